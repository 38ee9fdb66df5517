"""Keeps one worker process alive: starts it, carries frames to and from it, and starts another when it dies."""

import asyncio
import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import zmq
import zmq.asyncio

from chairlift.errors import Unavailable

log = logging.getLogger(__name__)

WorkerState = Literal["loading", "ready", "restarting", "draining", "failed"]
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.25, 10.0


class Supervisor:
    """One worker, `python -m MODULE ADDRESS ARGUMENTS`, and its successors. All methods belong to one event loop.

    `take` gets each message's frames; it calls `loaded` or `refused` when the worker says so. `lost` is told why the
    answers that are still owed will not come. `on_state` hears of every change of `state`.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        take: Callable[[list[zmq.Frame]], None],
        lost: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        on_state: Callable[[WorkerState], None] | None = None,
    ) -> None:
        self.state: WorkerState = "loading"
        self.failure: str | None = None
        self.restarts = 0
        self._command = (module, arguments)
        self._take = take
        self._lost = lost
        self._environment = environment or {}
        self._on_state = on_state
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._hurry = asyncio.Event()
        self._was_ready = self._hurried = False

    @property
    def returning(self) -> bool:
        """Whether a worker that was ready has died in a hurry, and no other since."""
        return self.state == "restarting" and self._hurried

    def hurry(self, on: bool) -> None:
        """Replace a worker that was ready at once when it dies, or no longer so: it is known why it does."""
        if on:
            self._hurry.set()
            self._hurried = self._was_ready
        else:
            self._hurry.clear()

    @property
    def pid(self) -> int | None:
        """The worker's process id, or None while there is none."""
        return self._process.pid if self._process else None

    @property
    def connected(self) -> bool:
        """Whether there is a worker to send to."""
        return self._socket is not None

    async def start(self) -> None:
        """Start the worker and return at once; `wait_ready` waits until it has loaded."""
        self._context = zmq.asyncio.Context()
        self._folder = tempfile.TemporaryDirectory(prefix="chairlift-")
        self._task = asyncio.create_task(self._supervise(), name="worker supervisor")

    async def wait_ready(self) -> None:
        """Return once the worker is ready. Raises Unavailable if the model can't be loaded, or `drain` was called."""
        while self.state not in ("ready", "failed", "draining"):
            await self._changed.wait()
        if self.state != "ready":
            raise Unavailable(self.failure or "the server is shutting down")

    def loaded(self) -> None:
        """The worker is ready."""
        if self.state != "draining":
            self._become("ready")

    def refused(self, reason: str) -> None:
        """The worker can't load the model, and no other could."""
        self.failure = reason
        self._become("failed")

    def drain(self) -> None:
        """Start no other worker when this one ends."""
        self._become("draining")

    def kill(self) -> None:
        """End a worker that does not answer; another takes its place."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self, farewell: bytes) -> None:
        """End the worker, with a message that asks it to go, and if that does not help within 5 s, by force."""
        if self.state != "failed":
            self.drain()
        self._lost("the server is shutting down")
        if self._task is None:
            return
        self.send([farewell])
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 5)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)
        self._folder.cleanup()

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send a message; without a worker it is dropped. Buffers must not change until the worker has answered."""
        if self._socket is not None:
            # With no high-water mark queueing never waits, so the future is done already.
            self._socket.send_multipart(frames, copy=False)

    async def _supervise(self) -> None:
        """Run workers one after the other until told to stop; a model that can't load is not tried again."""
        backoff = 0.0
        while True:
            started = time.monotonic()
            status = await self._run_worker()
            if self.state in ("failed", "draining"):
                self._lost(self.failure or "the server is shutting down")
                return
            self._was_ready = reached_ready = self.state == "ready"
            self._hurried = reached_ready and self._hurry.is_set()
            self._become("restarting")
            self._lost(f"the model's worker died ({_describe(status)}) and is being restarted; send it again")
            self.restarts += 1
            backoff = (
                0.0
                if reached_ready and time.monotonic() - started > 30
                else min(backoff * 2 or FIRST_BACKOFF_S, MAX_BACKOFF_S)
            )
            if self._hurried:
                backoff = 0.0
            log.error("the worker died (%s); starting another within %.2f s", _describe(status), backoff)
            if await self._pause(backoff, reached_ready):
                backoff = 0.0

    async def _pause(self, seconds: float, may_hurry: bool) -> bool:
        """Wait before another worker is started; return whether there was hurry."""
        if not may_hurry:
            await asyncio.sleep(seconds)
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), seconds)
        return self._hurry.is_set()

    async def _run_worker(self) -> int:
        """Start one worker, take in its messages until it ends, and return its exit status."""
        module, arguments = self._command
        address = f"ipc://{self._folder.name}/{self.restarts}"
        socket = self._context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.bind(address)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            # -P: a folder named chairlift in the working directory must not stand in for the installed package.
            *("-P", "-m", module, address, *arguments),
            stdin=asyncio.subprocess.PIPE,
            env={**_environment(), "PYTHONUNBUFFERED": "1", **self._environment},
        )
        self._socket, self._process = socket, process
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
            receiving.cancel()
            self._socket = self._process = None
            socket.close(linger=0)
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            self._take(await socket.recv_multipart(copy=False))

    def _become(self, state: WorkerState) -> None:
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()
        if self._on_state is not None:
            self._on_state(state)


class Supervised:
    """What whoever computes in a supervised worker can be asked about it. A subclass sets `_worker`."""

    _worker: Supervisor

    @property
    def state(self) -> WorkerState:
        """What the worker is at."""
        return self._worker.state

    @property
    def failure(self) -> str | None:
        """Why the model can't be loaded, if it can't."""
        return self._worker.failure

    @property
    def restarts(self) -> int:
        """How many workers have died and been replaced."""
        return self._worker.restarts

    @property
    def ready(self) -> bool:
        """Whether work would be taken in now."""
        return self.state == "ready"

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id, or None while there is none."""
        return self._worker.pid

    async def start(self) -> None:
        """Start the worker and return at once; `wait_ready` waits until it has loaded."""
        await self._worker.start()


def _environment() -> dict[str, str]:
    """What a worker gets of this process's variables: models need no key of the server."""
    return {name: value for name, value in os.environ.items() if name != "CHAIRLIFT_API_KEY"}


def _describe(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
