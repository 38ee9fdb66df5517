"""One instance of a model that answers in one call, in a process of its own: `python -m ... ADDRESS CONFIG_JSON`.

It computes the batches that it is sent, one after the other, and sleeps in between. Its standard input is its
`Lifeline`: when the front is gone, so is the worker.
"""

import contextlib
import gc
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import zmq

from chairlift.config.items import DEFAULT_MAX_BATCH_SIZE, ItemConfig
from chairlift.core.items.item import Failure
from chairlift.engine.device_lost import is_device_lost
from chairlift.engine.items.arrays import decode, encode
from chairlift.engine.items.call import CallFailed, CallResult, Unwanted
from chairlift.engine.items.messages import (
    Done,
    Failed,
    InstanceReady,
    ItemsToFront,
    ItemsToWorker,
    Parts,
    RunBatch,
    StopBatch,
)
from chairlift.engine.lifeline import Lifeline
from chairlift.engine.worker_main import run_worker
from chairlift.engine.worker_messages import Shutdown
from chairlift.errors import BadItem, InvalidRequest
from chairlift.runners.error_text import describe, one_line, text_of
from chairlift.runners.items import TEXT_TASKS, Encoding, ItemInfo, ItemRunner, StreamingRunner
from chairlift.runners.make_runner import make_runner
from chairlift.runners.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)

Emit = Callable[[dict[int, Any]], None]
Received = tuple[ItemsToWorker, list[memoryview]]


def compute(runner: ItemRunner, payloads: Sequence[Any], emit: Emit | None = None) -> CallResult:
    """Run one batch in the calling thread.

    `emit` is for a `StreamingRunner` only, and gets the parts as they come; if it raises Unwanted, so does this. Raises
    CallFailed, after logging the traceback, or where memory ran out or a `BadItem` was raised, a line; and as it is
    what says that no other batch can be run in this process either, of an item too.
    """
    started = time.perf_counter()
    try:
        if emit is None:
            results = runner.run(payloads)
        else:
            streaming: StreamingRunner = runner  # type: ignore[assignment]
            results = streaming.stream(payloads, emit)
        if len(results) != len(payloads):
            raise ValueError(f"{len(results)} results for {len(payloads)} payloads")
        lost = next((each for each in results if isinstance(each, Exception) and _ends_process(each)), None)
        if lost is not None:
            raise lost
    except Unwanted:
        raise
    except Exception as error:
        if _ends_process(error):
            raise
        failure = Failure.OUT_OF_MEMORY if is_out_of_memory(error) else Failure.RAISED
        # Of these two a traceback would tell nothing more.
        if failure is Failure.OUT_OF_MEMORY or isinstance(error, BadItem):
            log.warning("a call of %d items failed: %s", len(payloads), one_line(error))
        else:
            log.warning("a call of %d items failed", len(payloads), exc_info=True)
        raise CallFailed(failure, describe(error)) from error
    return CallResult(results, time.perf_counter() - started)


def _ends_process(error: Exception) -> bool:
    """Whether no other batch can be run here. One whose text can't be read is of a model's code, not of CUDA."""
    try:
        return is_device_lost(error)
    except Exception:
        return False


class ItemWorker:
    """Carries batches between a socket and a runner."""

    def __init__(self, runner: ItemRunner, info: ItemInfo, socket: "zmq.Socket[bytes]", line: Lifeline) -> None:
        self.runner = runner
        self.socket = socket
        self._line = line
        self._payloads: Any = list[Encoding] if info.task in TEXT_TASKS else list[Any]
        self._decoder = msgspec.msgpack.Decoder(ItemsToWorker)
        self._idle = 0.0
        self._ended: float | None = None
        # What came while a stream was computed, in its order.
        self._inbox: deque[Received] = deque()

    def serve(self) -> None:
        """Compute what comes until told to shut down."""
        while True:
            free = time.perf_counter()
            message, frames = self._inbox.popleft() if self._inbox else self._receive()
            self._idle = time.perf_counter() - free
            if isinstance(message, Shutdown):
                return
            if isinstance(message, RunBatch):
                self._run(message, frames)

    def _receive(self, flags: int = 0) -> Received:
        header, *frames = self.socket.recv_multipart(flags, copy=False)
        return self._decoder.decode(header.buffer), [frame.buffer for frame in frames]

    def _check_wanted(self, batch: int) -> None:
        """Raise Unwanted if the front has said that nobody waits for this batch any more."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._inbox.append(self._receive(zmq.NOBLOCK))
        if any(isinstance(message, StopBatch) and message.id == batch for message, _ in self._inbox):
            raise Unwanted

    def _run(self, message: RunBatch, frames: list[memoryview]) -> None:
        unsent: dict[int, str] = {}

        def send_parts(parts: dict[int, Any]) -> None:
            self._check_wanted(message.id)
            going = {index: part for index, part in parts.items() if index not in unsent}
            try:
                encoded = encode(list(going.values()))
            except Exception:
                unsent.update(_unsendable(going, "part"))
                going = {index: part for index, part in going.items() if index not in unsent}
                encoded = encode(list(going.values()), checked=True)
            if going:
                self._send(Parts(message.id, list(going)), encoded)

        try:
            payloads = decode(frames, self._payloads)
            gap = None if self._ended is None else time.perf_counter() - self._ended - self._idle
            made = compute(self.runner, payloads, send_parts if message.stream else None)
            self._ended = time.perf_counter()
        except CallFailed as failed:
            self._send(Failed(message.id, failed.failure, failed.detail))
        except Unwanted:
            self._send(Failed(message.id, Failure.RAISED, "nobody waits for it any more"))
        except (msgspec.DecodeError, ValueError) as error:
            self._send(Failed(message.id, Failure.RAISED, f"the payload can't be read: {text_of(error)}"))
        else:
            self._answer(message, made, gap, unsent)

    def _answer(self, message: RunBatch, made: CallResult, gap: float | None, unsent: dict[int, str]) -> None:
        """Send what a call gave; an item whose parts can't be sent has an error, whatever came after that part."""
        errors = {i: _told(each) for i, each in enumerate(made.results) if isinstance(each, BaseException)} | unsent
        refused = [i for i in errors if i not in unsent and isinstance(made.results[i], InvalidRequest)]
        encoded: list[bytes | memoryview] = []
        if not message.stream:
            results = [None if i in errors else each for i, each in enumerate(made.results)]
            try:
                encoded = encode(results)
            except Exception:
                errors |= _unsendable(dict(enumerate(results)), "result")
                encoded = encode([None if i in errors else each for i, each in enumerate(results)], checked=True)
        self._send(Done(message.id, made.seconds, self._idle, gap, errors, refused), encoded)

    def _send(self, message: ItemsToFront, frames: Sequence[bytes | memoryview] = ()) -> None:
        # Copied, since the model may write its next parts or results into the same arrays at once.
        self.socket.send_multipart([msgspec.msgpack.encode(message), *frames])
        self._line.sent += 1


def _told(error: BaseException) -> str:
    """What the front hears of an item's error; what is for the client's eyes names no type."""
    return text_of(error) if isinstance(error, InvalidRequest) else describe(error)


def _unsendable(values: dict[int, Any], what: str) -> dict[int, str]:
    """Of values that can't be sent together, which can't be alone, and why. All others can be: they nest no deeper."""
    errors = {}
    for index, value in values.items():
        try:
            encode(value)
        except Exception as error:
            errors[index] = f"the {what} can't be sent: {describe(error)}"
    return errors


def main(address: str, config_json: str) -> int:
    """Load the model, say so, serve. Returns the process's exit status."""
    config = msgspec.json.decode(config_json, type=ItemConfig)
    # Only a user's own code may start processes.
    return run_worker(address, partial(_load, config), _serve, guards=config.kind == "python")


def _serve(loaded: tuple[ItemRunner, ItemInfo], socket: "zmq.Socket[bytes]", line: Lifeline) -> None:
    runner, info = loaded
    socket.send(msgspec.msgpack.encode(InstanceReady(info)))
    line.sent += 1
    ItemWorker(runner, info, socket, line).serve()
    runner.close()


def _load(config: ItemConfig) -> tuple[ItemRunner, ItemInfo]:
    """Load and warm up, with the batch sizes that will occur, as far as memory goes."""
    runner = make_runner(config)
    # None of what was imported will ever be garbage: looking at torch takes 0.15 s each time.
    gc.freeze()
    info = runner.load()
    for size in config.warm_up_for(config.max_batch_size or info.max_batch_size or DEFAULT_MAX_BATCH_SIZE):
        try:
            runner.warm_up([size])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.warning("a batch of %d is too large for the memory there is: %s", size, one_line(error))
            break
    return runner, info


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
