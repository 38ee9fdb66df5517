"""One instance of a model that answers in one call, in a process of its own: `python -m ... ADDRESS CONFIG_JSON`.

It computes the batches that it is sent, one after the other, and sleeps in between. Its standard input is its
`Lifeline`: when the front is gone, so is the worker.
"""

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from chairlift.config.items import DEFAULT_MAX_BATCH_SIZE, ItemConfig
from chairlift.core.items.item import Failure
from chairlift.engine.device_lost import is_device_lost
from chairlift.engine.items.arrays import decode, encode
from chairlift.engine.items.call import CallFailed, CallResult, OnParts, describe
from chairlift.engine.items.messages import Done, Failed, InstanceReady, ItemsToFront, ItemsToWorker, Parts, RunBatch
from chairlift.engine.lifeline import Lifeline
from chairlift.engine.worker_messages import Shutdown, load_failed
from chairlift.errors import BadItem, InvalidRequest
from chairlift.logs import start_logging
from chairlift.runners.items import Encoding, ItemInfo, ItemRunner, StreamingRunner
from chairlift.runners.make_runner import make_runner
from chairlift.runners.out_of_memory import is_out_of_memory, one_line

log = logging.getLogger(__name__)

_OF_TEXTS = ("embed", "classify", "rerank")


def compute(runner: ItemRunner, payloads: Sequence[Any], on_parts: OnParts | None = None) -> CallResult:
    """Run one batch in the calling thread.

    `on_parts` is for a `StreamingRunner` only, and gets the parts as they come. Raises CallFailed, after logging the
    traceback, or where memory ran out or a `BadItem` was raised, a line; and as it is what says that no other batch can
    be run in this process either.
    """
    started = time.perf_counter()
    try:
        if on_parts is None:
            results = runner.run(payloads)
        else:
            streaming: StreamingRunner = runner  # type: ignore[assignment]
            results = streaming.stream(payloads, on_parts)
        if len(results) != len(payloads):
            raise ValueError(f"{len(results)} results for {len(payloads)} payloads")
    except Exception as error:
        if is_device_lost(error):
            raise
        failure = Failure.OUT_OF_MEMORY if is_out_of_memory(error) else Failure.RAISED
        # Of these two a traceback would tell nothing more.
        if failure is Failure.OUT_OF_MEMORY or isinstance(error, BadItem):
            log.warning("a call of %d items failed: %s", len(payloads), one_line(error))
        else:
            log.warning("a call of %d items failed", len(payloads), exc_info=True)
        raise CallFailed(failure, describe(error)) from error
    return CallResult(results, time.perf_counter() - started)


class ItemWorker:
    """Carries batches between a socket and a runner."""

    def __init__(self, runner: ItemRunner, info: ItemInfo, socket: "zmq.Socket[bytes]", line: Lifeline) -> None:
        self.runner = runner
        self.socket = socket
        self._line = line
        self._payloads: Any = list[Encoding] if info.task in _OF_TEXTS else list[Any]
        self._decoder = msgspec.msgpack.Decoder(ItemsToWorker)
        self._idle = 0.0

    def serve(self) -> None:
        """Compute what comes until told to shut down."""
        while True:
            free = time.perf_counter()
            header, *frames = self.socket.recv_multipart(copy=False)
            self._idle = time.perf_counter() - free
            message = self._decoder.decode(header.buffer)
            if isinstance(message, Shutdown):
                return
            self._run(message, [frame.buffer for frame in frames])

    def _run(self, message: RunBatch, frames: list[memoryview]) -> None:
        def send_parts(parts: dict[int, Any]) -> None:
            self._send(Parts(message.id, list(parts)), encode(list(parts.values())))

        try:
            payloads = decode(frames, self._payloads)
            made = compute(self.runner, payloads, send_parts if message.stream else None)
        except CallFailed as failed:
            self._send(Failed(message.id, failed.failure, failed.detail))
        except (msgspec.DecodeError, ValueError) as error:
            self._send(Failed(message.id, Failure.RAISED, f"the payload can't be read: {error}"))
        else:
            errors = {i: _told(each) for i, each in enumerate(made.results) if isinstance(each, BaseException)}
            refused = [index for index in errors if isinstance(made.results[index], InvalidRequest)]
            results = [None if index in errors else each for index, each in enumerate(made.results)]
            encoded = [] if message.stream else _encode(results, errors)
            self._send(Done(message.id, made.seconds, self._idle, errors, refused), encoded)

    def _send(self, message: ItemsToFront, frames: Sequence[bytes | memoryview] = ()) -> None:
        # Copied, since the model may write its next parts or results into the same arrays at once.
        self.socket.send_multipart([msgspec.msgpack.encode(message), *frames])
        self._line.sent += 1


def _told(error: BaseException) -> str:
    """What the front hears of an item's error; what is for the client's eyes names no type."""
    return str(error) if isinstance(error, InvalidRequest) else describe(error)


def _encode(results: list[Any], errors: dict[int, str]) -> list[bytes | memoryview]:
    """Encode results; those that can't be become errors of their own."""
    try:
        return encode(results)
    except Exception:
        for index, result in enumerate(results):
            try:
                encode(result)
            except Exception as error:
                results[index] = None
                errors[index] = f"the result can't be sent: {describe(error)}"
        return encode(results)


def main(address: str, config_json: str) -> int:
    """Load the model, say so, serve. Returns the process's exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front decides what it means
    start_logging(os.environ.get("CHAIRLIFT_LOG_LEVEL", "info"))
    config = msgspec.json.decode(config_json, type=ItemConfig)
    # Only a user's own code may start processes.
    line = Lifeline(guards=config.kind == "python")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.set_hwm(0)
    socket.connect(address)
    try:
        runner = make_runner(config)
        info = _load(runner, config)
    except (Exception, SystemExit) as error:
        log.debug("the model can't be loaded", exc_info=True)
        socket.send(msgspec.msgpack.encode(load_failed(error)))
        socket.close()
        context.term()
        return 1
    # A full collection walks every object that the model's imports made, in the middle of somebody's batch.
    gc.collect()
    gc.freeze()
    socket.send(msgspec.msgpack.encode(InstanceReady(info)))
    line.sent += 1
    ItemWorker(runner, info, socket, line).serve()
    runner.close()
    socket.close(linger=0)
    return 0


def _load(runner: ItemRunner, config: ItemConfig) -> ItemInfo:
    """Load and warm up, with the batch sizes that will occur, as far as memory goes."""
    info = runner.load()
    for size in config.warm_up_for(config.max_batch_size or info.max_batch_size or DEFAULT_MAX_BATCH_SIZE):
        try:
            runner.warm_up([size])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.warning("a batch of %d is too large for the memory there is: %s", size, one_line(error))
            break
    return info


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
