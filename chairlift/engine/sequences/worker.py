"""One language model in a process of its own: `python -m chairlift.engine.sequences.worker ADDRESS CONFIG [turns]`.

It sleeps until a message comes or the moment the scheduler asked for; it never polls. Its standard input is its
`Lifeline`: when the front is gone, so is the worker. With `turns` it runs no step before the front says that the
machine is its own.
"""

import contextlib
import gc
import sys
from functools import partial
from socket import socketpair

import msgspec
import zmq

from chairlift.config.sequences import SequenceConfig
from chairlift.core.finished import FinishReason
from chairlift.core.sequences.live_settings import apply_settings
from chairlift.core.sequences.standing import Standing
from chairlift.core.sequences.turn import Turn
from chairlift.engine.lifeline import Lifeline
from chairlift.engine.sequences.engine import Engine
from chairlift.engine.sequences.messages import (
    Abort,
    Add,
    CloseQueue,
    Explain,
    Explained,
    Ready,
    Retune,
    SequencesToFront,
    SequencesToWorker,
    SequenceUpdate,
    StepOutput,
    TurnAsked,
    TurnGiven,
    TurnOver,
    TurnWanted,
)
from chairlift.engine.worker_main import run_worker
from chairlift.engine.worker_messages import Shutdown
from chairlift.runners.check_model import check_model
from chairlift.runners.uncollected import nothing_collected

# A step is overdue after so many times what it should take: the machine may swap, or have other work.
_PATIENCE = 20
# Messages are taken in for so many seconds between two steps, whoever sends how many. The others stay in the socket.
_LISTENS_S = 0.01


class SequenceWorker:
    """Carries messages between a socket and an engine."""

    def __init__(
        self, engine: Engine, socket: "zmq.Socket[bytes]", line: Lifeline, step_timeout_s: float, shares_machine: bool
    ) -> None:
        self.engine = engine
        self.socket = socket
        self._line = line
        self._step_timeout = step_timeout_s
        line.overdue = self._overdue
        self._turn = Turn(
            lambda background: self.send(TurnWanted(background)),
            lambda again, seconds, background: self.send(TurnOver(again, seconds, background)),
            shares_machine,
        )
        self._decoder = msgspec.msgpack.Decoder(SequencesToWorker)
        self._encoder = msgspec.msgpack.Encoder()
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        # What other threads wake this one by.
        self._wakes, self._wake = socketpair()
        self._wakes.setblocking(False)
        self._wake.setblocking(False)
        self._poller.register(self._wakes, zmq.POLLIN)
        # Somebody has come or gone since the front was last told how things are.
        self._has_news = False
        engine.on_prepared = self._wake_up

    def send(self, message: SequencesToFront) -> None:
        """Queue a message to the front."""
        self.socket.send(self._encoder.encode(message))
        self._line.sent += 1

    def _overdue(self, seconds: float) -> str | None:
        """Say so if the present step, and what belongs to it, has taken too many seconds. Called in another thread."""
        if seconds < self._step_timeout:
            return None
        limit = max(self._step_timeout, _PATIENCE * self.engine.longest_step)
        return f"one step took longer than {limit:.3g} s, see step_timeout_s" if seconds >= limit else None

    def _wake_up(self) -> None:
        """End the wait for messages. Called in another thread."""
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b".")

    def _take_prepared(self) -> None:
        """Queue requests whose grammars are compiled, and say which can't be served."""
        with contextlib.suppress(BlockingIOError):
            self._wakes.recv(4096)
        ends = self.engine.take_prepared()
        if ends:
            self.send(StepOutput(ends, self.engine.stats()))

    def run(self) -> None:
        """Serve until told to shut down."""
        timeout: float | None = None
        turn = self._turn
        while self._listen(timeout):
            if self.engine.num_unfinished and not turn.want(self.engine.only_background):
                if self._has_news:
                    self._tell()
                timeout = None
                continue
            output = self.engine.step(yields=turn.live_waits)
            if output is not None:
                self.send(output)
                self._has_news = False
                turn.after_step(output.stats.step_seconds, self.engine.only_background)
                timeout = 0.0
                continue
            turn.nothing_to_do(self.engine.has_background)
            self._tell()
            moment = self.engine.ask_again
            timeout = None if moment is None else max(moment - self.engine.clock(), 0.0)

    def _tell(self) -> None:
        """Say how things are: whoever looks at the metrics now sees who waits for what, and what an abort freed."""
        self.send(StepOutput([], self.engine.stats()))
        self._has_news = False

    def _listen(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds (None: for ever) for messages and take them in; False when it is time to go.

        If they are too many for a moment, some are left for the next time.
        """
        self._line.phase += 1
        # Rounding a wait up by less than a millisecond beats waking just before the moment, over and over.
        ready = dict(self._poller.poll(None if timeout is None else int(timeout * 1000 + 0.999)))
        self._line.phase += 1
        if self._wakes.fileno() in ready:
            self._take_prepared()
        until = self.engine.clock() + _LISTENS_S
        while True:
            try:
                message = self._decoder.decode(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return True
            if not self._take(message):
                return False
            if self.engine.clock() >= until:
                return True

    def _take(self, message: SequencesToWorker) -> bool:
        match message:
            case Add(request=request):
                self._has_news = True
                try:
                    self.engine.add(request)
                except ValueError as error:
                    refusal = SequenceUpdate(request.id, [], FinishReason.ERROR, str(error))
                    self.send(StepOutput([refusal], self.engine.stats()))
            case Abort(request_ids=ids):
                self._has_news = True
                self.engine.abort(ids)
            case CloseQueue():
                self.engine.close_queue()
            case Explain(request_ids=ids):
                self.send(Explained(self._explain(set(ids))))
            case Retune(settings=settings):
                apply_settings(settings, self.engine.scheduler)
            case TurnGiven():
                self._turn.given()
            case TurnAsked(live=live):
                self._turn.others_wait(live)
            case Shutdown():
                return False
        return True

    def _explain(self, request_ids: set[str]) -> list[Standing]:
        """Where requests are; who waits for no reason of this model's may wait for others' turns."""
        found = self.engine.explain(request_ids)
        if not self._turn.holds:
            for standing in found:
                standing.detail = standing.detail or "another model of this server has its turn to compute"
        return found


def main(address: str, config_json: str, turns: str = "") -> int:
    """Load the model, say so, serve. Returns the process's exit status."""

    def serve(loaded: tuple[SequenceConfig, Engine], socket: "zmq.Socket[bytes]", line: Lifeline) -> None:
        config, engine = loaded
        worker = SequenceWorker(engine, socket, line, config.step_timeout_s, shares_machine=turns == "turns")
        line.phase = 1
        worker.send(Ready(engine.info))
        worker.run()
        engine.close()

    return run_worker(address, partial(_load, config_json), serve)


def _load(config_json: str) -> tuple[SequenceConfig, Engine]:
    config = msgspec.json.decode(config_json, type=SequenceConfig)
    # What can't be served is refused before torch is loaded, which takes seconds.
    check_model(config)
    with nothing_collected():
        from chairlift.runners.decoder.runner import DecoderRunner
    # None of what was imported will ever be garbage: looking at torch takes 0.15 s each time.
    gc.freeze()

    return config, Engine(config, DecoderRunner(config))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
