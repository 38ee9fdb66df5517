"""The front's side of a model: starts its worker, keeps it alive, and carries requests to it and tokens back."""

import asyncio
import contextlib
import functools
import logging
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from chairlift.config import EngineConfig
from chairlift.core.admission import Admission
from chairlift.core.request import FinishReason, Request
from chairlift.engine.machine import Machine
from chairlift.engine.messages import (
    Abort,
    Add,
    CloseLine,
    EngineStats,
    LoadFailed,
    Ready,
    SequenceUpdate,
    Shutdown,
    StepOutput,
    ToFront,
    ToWorker,
    TurnAsked,
    TurnGiven,
    TurnOver,
    TurnWanted,
)
from chairlift.errors import QueueFull, RequestFailed, Unavailable
from chairlift.runners.base import ModelInfo

log = logging.getLogger(__name__)

State = Literal["loading", "ready", "restarting", "draining", "failed"]
MAX_BACKOFF_S = 10.0


class Stream:
    """The updates of one request, as they come. Iterating raises Unavailable or RequestFailed if it can't end well."""

    def __init__(self, request: Request, cancel: Callable[["Stream"], None]) -> None:
        self.request = request
        self.started = False
        self._updates: deque[SequenceUpdate] = deque()
        self._error: Exception | None = None
        self._done = False
        self._wake: asyncio.Future[None] | None = None
        self._cancel = cancel

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> SequenceUpdate:
        while not self._updates:
            if self._error is not None:
                raise self._error
            if self._done:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        update = self._updates.popleft()
        if update.finish_reason is FinishReason.ERROR:
            self._error = RequestFailed(str(update.detail))
            raise self._error
        return update

    def cancel(self) -> None:
        """Give up the request; its seat and blocks are free within one step. Calling it again does nothing."""
        if not self._done:
            self._cancel(self)

    def push(self, update: SequenceUpdate) -> None:
        """Hand over an update from the worker."""
        self.started = True
        self._updates.append(update)
        self._done = update.finish_reason is not None
        self._notify()

    def close(self, error: Exception | None = None) -> None:
        """End the stream after what it already holds, with an error if one is given."""
        self._done, self._error = True, error
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class EngineClient:
    """One model served by one worker process. All methods belong to the event loop that called `start`."""

    def __init__(
        self, config: EngineConfig, max_waiting: int = 1024, machine: Machine | None = None, weight: float = 1.0
    ) -> None:
        """Serve a model, alone or, with a `machine`, taking turns with others in proportion to the weights."""
        self.config = config
        self.info: ModelInfo | None = None
        self.state: State = "loading"
        self.failure: str | None = None
        self.stats = EngineStats()
        self.restarts = 0
        self.on_step: Callable[[EngineStats], None] | None = None
        self._admission = Admission(max_waiting)
        self._machine, self._weight = machine, weight
        self._turn_name = f"{config.served_model_name or config.model} {id(self):x}"
        self._streams: dict[str, Stream] = {}
        self._num_waiting = 0
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._idle = asyncio.Event()
        self._idle.set()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToFront)

    @property
    def ready(self) -> bool:
        """Whether a request would be taken in now."""
        return self.state == "ready"

    @property
    def num_unfinished(self) -> int:
        """Requests sent and not yet answered in full."""
        return len(self._streams)

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id, or None while there is none."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the worker and return at once; `wait_ready` waits until it has loaded."""
        self._context = zmq.asyncio.Context()
        self._folder = tempfile.TemporaryDirectory(prefix="chairlift-")
        self._supervisor = asyncio.create_task(self._supervise(), name="worker supervisor")

    async def wait_ready(self) -> None:
        """Return once requests are taken in. Raises Unavailable if the model can't be loaded."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.state in ("ready", "failed", "draining"))
        if self.state != "ready":
            raise Unavailable(self.failure or "the server is shutting down")

    def submit(self, *requests: Request) -> list[Stream]:
        """Queue requests, all or none. Raises QueueFull, or Unavailable while the worker can't take them."""
        if self.state != "ready" or self._socket is None:
            raise Unavailable(f"the model is {self.state}" + (f": {self.failure}" if self.failure else ""))
        retry_after = self._admission.retry_after(self._num_waiting, len(requests), time.monotonic())
        if retry_after is not None:
            raise QueueFull(
                f"{self._num_waiting} requests wait already and {len(requests)} more would pass the limit of "
                f"{self._admission.max_waiting}; come back in {retry_after:.0f} s",
                retry_after,
            )
        streams = []
        for request in requests:
            stream = self._streams[request.id] = Stream(request, self._abort)
            self._num_waiting += 1
            self._send(Add(request))
            streams.append(stream)
        self._idle.clear()
        return streams

    async def drain(self, timeout: float) -> None:
        """Take no more requests; give those that are here up to `timeout` seconds to end."""
        await self._become("draining")
        if self._streams:
            self._send(CloseLine())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)

    async def stop(self) -> None:
        """End the worker; whatever still runs gets Unavailable."""
        if self.state != "failed":
            await self._become("draining")
        self._fail_all("the server is shutting down")
        if self._supervisor is not None:
            self._send(Shutdown())
            process = self._process
            if process is not None and process.returncode is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 5)
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._context.destroy(linger=0)
            self._folder.cleanup()

    # The worker

    async def _supervise(self) -> None:
        """Run workers one after the other until told to stop; a model that can't load is not tried again."""
        backoff = 0.0
        while True:
            started = time.monotonic()
            status = await self._run_worker()
            if self.state in ("failed", "draining"):
                self._fail_all(self.failure or "the server is shutting down")
                return
            reached_ready = self.state == "ready"
            await self._become("restarting")
            self._fail_all(f"the model's worker died ({_describe(status)}) and is being restarted; send it again")
            self.restarts += 1
            backoff = (
                0.0 if reached_ready and time.monotonic() - started > 30 else min(backoff * 2 or 0.25, MAX_BACKOFF_S)
            )
            log.error("the worker died (%s); starting another in %.2f s", _describe(status), backoff)
            await asyncio.sleep(backoff)

    async def _run_worker(self) -> int:
        """Start one worker, take in its messages until it ends, and return its exit status."""
        address = f"ipc://{self._folder.name}/{self.restarts}"
        socket = self._context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.bind(address)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            # -P: a folder named chairlift in the working directory must not stand in for the installed package.
            *("-P", "-m", "chairlift.engine.worker", address, msgspec.json.encode(self.config).decode()),
            *(("turns",) if self._machine else ()),
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._socket, self._process = socket, process
        if self._machine is not None:
            given, asked = (functools.partial(self._send, message) for message in (TurnGiven(), TurnAsked()))
            self._machine.join(self._turn_name, self._weight, given, asked)
        receiving = asyncio.create_task(self._receive(socket), name="worker messages")
        ending = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({receiving, ending}, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done() and not ending.done():
                log.error("taking in the worker's messages failed", exc_info=receiving.exception())
                process.kill()
            status = await ending
            if not receiving.done():
                # What it said before it ended may still be on its way.
                await asyncio.wait({receiving}, timeout=0.05)
            return status
        finally:
            if self._machine is not None:
                self._machine.leave(self._turn_name)
            receiving.cancel()
            self._socket = self._process = None
            socket.close(linger=0)
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            message = self._decoder.decode(await socket.recv())
            match message:
                case StepOutput():
                    self._take(message)
                case Ready(info=info):
                    self.info = info
                    if self.state != "draining":
                        await self._become("ready")
                case LoadFailed(message=reason):
                    self.failure = reason
                    await self._become("failed")
                case TurnWanted() if self._machine is not None:
                    self._machine.ask(self._turn_name)
                case TurnOver(again=again) if self._machine is not None:
                    self._machine.release(self._turn_name, again)

    def _take(self, output: StepOutput) -> None:
        self.stats = output.stats
        for update in output.updates:
            stream = self._streams.get(update.id)
            if stream is None:
                continue  # cancelled while the step ran
            if not stream.started:
                self._num_waiting -= 1
            stream.push(update)
            if update.finish_reason is not None:
                self._forget(stream)
        if self.on_step is not None:
            self.on_step(output.stats)

    def _send(self, message: ToWorker) -> None:
        if self._socket is not None:
            # With no high-water mark queueing never waits, so the future is done already.
            self._socket.send(self._encoder.encode(message))

    # Streams

    def _abort(self, stream: Stream) -> None:
        if self._streams.get(stream.request.id) is stream:
            if not stream.started:
                self._num_waiting -= 1
            self._forget(stream)
            self._send(Abort([stream.request.id]))
        stream.close()

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.request.id]
        self._admission.ended(time.monotonic())
        if not self._streams:
            self._idle.set()

    def _fail_all(self, reason: str) -> None:
        streams, self._streams = self._streams, {}
        self._num_waiting = 0
        for stream in streams.values():
            stream.close(Unavailable(reason))
        self._idle.set()

    async def _become(self, state: State) -> None:
        async with self._changed:
            self.state = state
            self._changed.notify_all()


def _describe(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
