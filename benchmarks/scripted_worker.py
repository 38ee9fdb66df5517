"""A language model's worker without a model: `python -m scripted_worker ADDRESS CONFIG_JSON TOKENS STEP_SECONDS`.

Engine, scheduler, messages and socket are the real ones, so that a front hears what it would hear of any worker. Every
sequence is given TOKENS (ids with commas between them) over and over, one a step, and a step sleeps for STEP_SECONDS.
"""

import sys
import time
from itertools import cycle
from typing import Any

import msgspec
import zmq

from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.step import Step, StepResult
from chairlift.engine.lifeline import Lifeline
from chairlift.engine.sequences.engine import Engine
from chairlift.engine.sequences.messages import Ready
from chairlift.engine.sequences.worker import SequenceWorker
from chairlift.runners.sequences import SequenceInfo


class ScriptedRunner:
    """Gives every sequence whose prompt is complete its next token."""

    def __init__(self, tokens: list[int], seconds: float) -> None:
        self._tokens, self._seconds = tokens, seconds
        self._missing: dict[str, int] = {}
        self._replies: dict[str, cycle[int]] = {}

    def load(self) -> SequenceInfo:
        """Say that there is room for everybody."""
        sizes: dict[str, Any] = {"vocab_size": max(self._tokens) + 1, "num_blocks": 65536, "block_size": 16}
        where = {"dtype": "none", "device": "none", "ops": "none"}
        return SequenceInfo(max_model_len=4096, weight_bytes=0, kv_bytes=0, **sizes, **where)

    def warm_up(self) -> None:
        """There is nothing to warm up."""

    def find_grammar(self, grammar: str) -> object | None:
        """There are no grammars."""
        return None

    def compile_grammar(self, grammar: str, done: Any) -> None:
        """Refuse it."""
        done(ValueError("no model, no grammar"))

    def cancel_grammar(self, grammar: str) -> bool:
        """There is none that waits."""
        return False

    def execute(self, step: Step) -> StepResult:
        """Sleep, and give a token to all but those whose prompts are cut off here."""
        for request_id in step.released:
            self._missing.pop(request_id)
            self._replies.pop(request_id)
        for start in step.started:
            self._missing[start.request.id] = len(start.token_ids) - start.num_computed_tokens
            self._replies[start.request.id] = cycle(self._tokens)
        time.sleep(self._seconds)
        given: dict[str, list[int]] = {}
        for request_id, count in step.num_tokens.items():
            self._missing[request_id] -= count
            if self._missing[request_id] <= 0:
                given[request_id] = [next(self._replies[request_id])]
        return StepResult(given, seconds=self._seconds)

    def close(self) -> None:
        """There is nothing to release."""


def main(address: str, config_json: str, tokens: str, seconds: str) -> None:
    line = Lifeline()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)
    config = msgspec.json.decode(config_json, type=SequenceConfig)
    runner = ScriptedRunner([int(token) for token in tokens.split(",")], float(seconds))
    worker = SequenceWorker(Engine(config, runner), socket, line, config.step_timeout_s, shares_machine=False)
    worker.send(Ready(worker.engine.info))
    worker.run()
    socket.close(linger=0)
    context.term()


if __name__ == "__main__":
    main(*sys.argv[1:])
