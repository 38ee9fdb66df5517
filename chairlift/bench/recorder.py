"""A runner that writes down what every step held, for the table and the picture."""

import time
from dataclasses import dataclass, field

from chairlift.core.sequences.scheduler import SequenceScheduler
from chairlift.core.sequences.step import Step, StepResult
from chairlift.runners.sequences import GrammarDone, SequenceInfo, SequenceRunner


@dataclass(slots=True)
class Placement:
    """One request's time in a slot. Times in seconds of the monotonic clock; `steps` counts forward passes."""

    slot: int
    began: float
    ended: float = 0.0
    prefill_ended: float = 0.0
    steps: int = 0


@dataclass(slots=True)
class StepRecord:
    """One forward pass: when, how many sequences, tokens and computed rows, and the KV tokens left unused."""

    began: float
    ended: float
    num_seqs: int
    num_tokens: int
    num_rows: int
    unused_kv_tokens: int


@dataclass(slots=True)
class Recorder:
    """A runner that passes everything on to another and keeps a record of the steps.

    `scheduler` must be set before the first.
    """

    runner: SequenceRunner
    scheduler: SequenceScheduler | None = None
    steps: list[StepRecord] = field(default_factory=list)
    placements: dict[str, Placement] = field(default_factory=dict)
    _running: dict[str, int] = field(default_factory=dict)

    def load(self) -> SequenceInfo:
        """Load the runner."""
        return self.runner.load()

    def warm_up(self) -> None:
        """Warm up the runner."""
        self.runner.warm_up()

    def find_grammar(self, grammar: str) -> object | None:
        """Ask the runner."""
        return self.runner.find_grammar(grammar)

    def compile_grammar(self, grammar: str, done: GrammarDone) -> None:
        """Have the runner do it."""
        self.runner.compile_grammar(grammar, done)

    def cancel_grammar(self, grammar: str) -> bool:
        """Forget a grammar that waits to be compiled; return whether it did."""
        return self.runner.cancel_grammar(grammar)

    def close(self) -> None:
        """Close the runner."""
        self.runner.close()

    def execute(self, step: Step) -> StepResult:
        """Run the step and record it."""
        began = time.monotonic()
        result = self.runner.execute(step)
        ended = time.monotonic()
        self._running = {name: slot for name, slot in self._running.items() if name in step.num_tokens}
        for name in step.num_tokens:
            placement = self.placements.get(name)
            if placement is None:
                placement = self.placements[name] = Placement(self._free_slot(), began)
            self._running[name] = placement.slot
            placement.ended = ended
            placement.steps += 1
            if not placement.prefill_ended and name in result.tokens:
                placement.prefill_ended = ended
        sizes = len(step.num_tokens), step.total_tokens, result.num_rows
        self.steps.append(StepRecord(began, ended, *sizes, self._unused_kv_tokens(step)))
        return result

    def _free_slot(self) -> int:
        taken = set(self._running.values())
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def _unused_kv_tokens(self, step: Step) -> int:
        assert self.scheduler is not None
        size = self.scheduler.block_size
        return sum(
            len(sequence.block_table) * size - sequence.num_computed_tokens - step.num_tokens.get(sequence.id, 0)
            for sequence in self.scheduler.running
        )
