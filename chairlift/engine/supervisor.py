"""Keeps one worker process alive: starts it, carries frames to and from it, and starts another if it dies or hangs."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import zmq

from chairlift.engine.lifeline import HEARTBEAT_S
from chairlift.engine.watch import Watch
from chairlift.engine.worker_messages import LoadFailed
from chairlift.errors import Unavailable

log = logging.getLogger(__name__)

WorkerState = Literal["loading", "ready", "restarting", "draining", "failed"]
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.25, 10.0
# How often a model is tried in a server of several, which goes on without it.
LOAD_ATTEMPTS = 3
# Importing torch from a cold disk keeps the interpreter from everything else, heartbeats too.
LOADING_SILENCE_S = 120.0
# When nobody has looked after a worker, or read what it said, for this long, the front itself is at fault.
DEAF_S = 10.0
# A worker that did so many steps, or parts of calls, did not die of its first.
_DONE_WHEN_WORKING = 2
# After so long of taking in what a worker says, others on the event loop have their turn.
_TURN_S = 0.002
# As a plain number: an operation on zmq's enumeration takes longer than asking the socket.
_READABLE = int(zmq.POLLIN)


class Supervisor:
    """One worker, `python -m MODULE ADDRESS ARGUMENTS`, and its successors. All methods belong to one event loop.

    `take` gets each message's frames; it calls `loaded` or `refused` when the worker says so, and `worked` when it has
    done something of what it is there for. `lost` is told why the
    answers that are still owed will not come. `on_state` hears of every change of `state`.

    A model that could not be loaded in `load_attempts` workers has failed; one that has served is started again for
    ever. A worker is ended if its process is stopped for `heartbeat_timeout_s`, if it says that what it is at is
    overdue, or if it gives no sign of life for `most_silence_s` once it is ready (None: however long).
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        take: Callable[[list[zmq.Frame]], None],
        lost: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        on_state: Callable[[WorkerState], None] | None = None,
        load_attempts: int = 1,
        heartbeat_timeout_s: float = 3.0,
        most_silence_s: float | None = None,
    ) -> None:
        self.state: WorkerState = "loading"
        self.failure: str | None = None
        self.restarts = 0
        self._command = (module, arguments)
        self._take = take
        self._lost = lost
        self._environment = environment or {}
        self._on_state = on_state
        self._load_attempts = load_attempts
        self._heartbeat_timeout = heartbeat_timeout_s
        self._most_silence = most_silence_s
        self._socket: zmq.Socket[bytes] | None = None
        # What waits for the worker to connect, and the sign that something may have come, or can go.
        self._unsent: deque[Sequence[bytes | memoryview]] = deque()
        self._stirred = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._hurry = asyncio.Event()
        self._was_ready = self._hurried = False
        self._has_served = False
        # Of the present worker: what it said when it could not load, whether it has loaded, how much it has said and
        # done, and whether those who wait for its answers know that none will come.
        self._refusal: str | None = None
        self._has_loaded = False
        self._taken = self._done = 0
        self._is_lost = False
        self._watch: Watch | None = None
        self._looked = 0.0

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

    @property
    def problem(self) -> str | None:
        """What keeps this process from minding or hearing its worker, which only a new one could mend; None: nothing.

        Nobody looks after the worker any more; nobody has for `DEAF_S`; or for as long what it said was not read.
        """
        if self._task is None or self.state in ("draining", "failed"):
            return None
        if self._task.done():
            return "nobody keeps its worker alive any more"
        if self._watch is None:
            return None
        if (unseen := time.monotonic() - self._looked) > DEAF_S:
            return f"nobody has looked after its worker for {unseen:.0f} s"
        if self._watch.unread > DEAF_S:
            return f"nobody has read what its worker says for {self._watch.unread:.0f} s"
        return None

    async def start(self) -> None:
        """Start the worker and return at once; `wait_ready` waits until it has loaded."""
        self._task = asyncio.create_task(self._keep(), name="worker supervisor")

    async def wait_ready(self) -> None:
        """Return once the worker is ready. Raises Unavailable if the model can't be loaded, or `drain` was called."""
        while self.state not in ("ready", "failed", "draining"):
            await self._changed.wait()
        if self.state != "ready":
            raise Unavailable(self.failure or "the server is shutting down")

    def loaded(self) -> None:
        """The worker is ready."""
        self._has_loaded = self._has_served = True
        if self.state not in ("draining", "failed"):
            self.failure = None
            self._become("ready")

    def worked(self) -> None:
        """The worker has done a step, or a part of a call."""
        self._done += 1

    def refused(self, failed: LoadFailed) -> None:
        """The worker can't load the model; if that is final, and no other ever could, no other is started."""
        self._refusal = failed.message
        if failed.final and not self._has_served:
            self.give_up(failed.message)

    def give_up(self, reason: str) -> None:
        """End the worker, if there is one, and start no other: the model can't be served."""
        if self.state not in ("draining", "failed"):
            self.failure = reason
            self._become("failed")
            self.kill()

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

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send a message; without a worker it is dropped. Buffers must not change until the worker has answered."""
        if self._socket is not None:
            self._unsent.append(frames)
            self._flush(self._socket)
            # The socket tells of a change once, and sending may have been told of a message that came.
            self._stirred.set()

    def _stir(self, messages: "zmq.Socket[bytes]") -> None:
        """Have it looked at what the socket has. Asking for its events is what silences its descriptor."""
        messages.get(zmq.EVENTS)
        self._stirred.set()

    def _flush(self, messages: "zmq.Socket[bytes]") -> None:
        """Send what there is to send. With no high-water mark that never fails once the worker has connected."""
        with contextlib.suppress(zmq.Again):
            while self._unsent:
                messages.send_multipart(self._unsent[0], zmq.NOBLOCK, copy=False)
                self._unsent.popleft()

    async def _keep(self) -> None:
        """Supervise, and if that fails, which is a mistake of ours, let nobody wait for an answer."""
        try:
            await self._supervise()
        except Exception as error:
            log.critical("keeping the worker alive failed", exc_info=error)
            self._become("restarting")
            self._lost("the server failed to keep the model's worker alive")

    async def _supervise(self) -> None:
        """Run workers one after the other until told to stop, or until the model has failed to load often enough."""
        backoff = 0.0
        failures = 0
        while True:
            started = time.monotonic()
            self._refusal, self._has_loaded, self._is_lost = None, False, False
            self._taken = self._done = 0
            try:
                why = await self._run_worker()
            except (OSError, zmq.ZMQError, Unavailable) as error:
                why = f"could not be started ({error})"
            if self._is_over():
                return
            if self._has_loaded:
                failures = 0
            else:
                failures += 1
                self.failure = self._refusal or f"its worker {why} while it loaded the model{_hint(why)}"
                if not self._has_served and failures >= self._load_attempts:
                    self.give_up(self.failure)
            self._end_with(f"the model's worker {why} and is being restarted; send it again")
            if self._is_over():
                return
            self.restarts += 1
            worked = self._has_loaded and (time.monotonic() - started > 30 or self._done >= _DONE_WHEN_WORKING)
            backoff = 0.0 if worked or self._hurried else min(backoff * 2 or FIRST_BACKOFF_S, MAX_BACKOFF_S)
            what = f"the worker {why}" if self._has_loaded else f"a model could not be loaded: {self.failure}"
            log.error("%s; starting another worker within %.2f s", what, backoff)
            if await self._pause(backoff, self._has_loaded):
                backoff = 0.0
            if self._is_over():
                return

    async def _pause(self, seconds: float, may_hurry: bool) -> bool:
        """Wait before another worker is started; return whether there was hurry."""
        if not may_hurry:
            await asyncio.sleep(seconds)
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), seconds)
        return self._hurry.is_set()

    def _is_over(self) -> bool:
        """Whether no other worker is to be started; those who still wait for an answer are told."""
        over = self.state in ("failed", "draining")
        if over:
            self._lost(self.failure or "the server is shutting down")
        return over

    def _end_with(self, reason: str) -> None:
        """Take no more requests until the next worker is ready, and tell those who wait for an answer of this one."""
        if self.state not in ("failed", "draining") and not self._is_lost:
            self._is_lost = True
            self._was_ready, self._hurried = self._has_loaded, self._has_loaded and self._hurry.is_set()
            self._become("restarting")
            self._lost(reason)

    async def _run_worker(self) -> str:
        """Start one worker, take in its messages until it ends or has to be ended, and return how it ended."""
        # Of its own each time: what cleans up among temporary files may have removed the last one meanwhile.
        with _socket_folder() as folder:
            return await self._run_worker_at(f"ipc://{folder}/worker")

    async def _run_worker_at(self, address: str) -> str:
        module, arguments = self._command
        line, far_end = socket.socketpair()
        # The process's own context, which nobody ends: where a peer has just been killed, ending one may block for
        # ever, though every socket was closed with a linger of 0 (libzmq #3252; once in some 2,400 times here).
        messages: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        messages.set_hwm(0)
        messages.bind(address)
        loop, readable = asyncio.get_running_loop(), messages.fileno()
        loop.add_reader(readable, self._stir, messages)
        tasks: tuple[asyncio.Task[None], asyncio.Task[str], asyncio.Task[str]] | None = None
        try:
            # From the loop's own thread, at whose end the worker ends too.
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                # -P: a folder named chairlift in the working directory must not stand in for the installed package.
                *("-P", "-m", module, address, *arguments),
                stdin=far_end.fileno(),
                env={**worker_environment(), "PYTHONUNBUFFERED": "1", **self._environment},
            )
            far_end.close()
            self._socket, self._process = messages, process
            self._watch, self._looked = Watch(line, process.pid, self._heartbeat_timeout), time.monotonic()
            if self.state == "failed":
                # Given up while the process was being made: there was none to kill yet.
                process.kill()
            receiving = asyncio.create_task(self._receive(messages), name="worker messages")
            minding = asyncio.create_task(self._mind(self._watch), name="worker watch")
            ending = asyncio.create_task(_ended(process))
            tasks = (receiving, minding, ending)
            return await self._until_over(*tasks)
        finally:
            for task in tasks or ():
                task.cancel()
            self._socket = self._process = self._watch = None
            self._unsent.clear()
            loop.remove_reader(readable)
            messages.close(linger=0)
            far_end.close()
            if tasks is not None and process.returncode is None:
                process.kill()
                await process.wait()
            line.close()

    async def _until_over(
        self, receiving: "asyncio.Task[None]", minding: "asyncio.Task[str]", ending: "asyncio.Task[str]"
    ) -> str:
        """Wait until the worker has ended, or end it if it hangs or can't be heard; return which it was."""
        await asyncio.wait({receiving, minding, ending}, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            if not receiving.done():
                # What it said before it ended may still be on its way.
                await asyncio.wait({receiving}, timeout=0.05)
            return ending.result()
        error = receiving.exception() if receiving.done() else minding.exception()
        if error is None:
            why = f"hung ({minding.result()})"
        else:
            log.error("looking after the worker failed", exc_info=error)
            why = "could not be heard any more"
        receiving.cancel()
        # Large processes take their time to end.
        self._watch = None
        self._end_with(f"the model's worker {why} and is being restarted; send it again")
        self.kill()
        await ending
        return why

    async def _receive(self, messages: "zmq.Socket[bytes]") -> None:
        """Take in what the worker says, all that is there whenever the socket stirs: it tells of a change once.

        One that says more as fast as it is heard would keep the event loop from all others.
        """
        while True:
            self._stirred.clear()
            self._flush(messages)
            until = time.monotonic() + _TURN_S
            while (is_more := bool(int(messages.get(zmq.EVENTS)) & _READABLE)) and time.monotonic() < until:
                self._taken += 1
                self._take(messages.recv_multipart(copy=False))
            await (asyncio.sleep(0) if is_more else self._stirred.wait())

    async def _mind(self, watch: Watch) -> str:
        """Look after the worker, and return what is wrong with it once something is."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._looked = time.monotonic()
            most = self._most_silence
            if most is not None and not self._has_loaded:
                most = max(most, LOADING_SILENCE_S)
            found = watch.look(self._taken, most)
            if found is not None:
                return found

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
    def problem(self) -> str | None:
        """What keeps this process from minding or hearing its worker, which only a new one could mend; or None."""
        return self._worker.problem

    def give_up(self, reason: str) -> None:
        """End the worker and start no other: the model can't be served."""
        self._worker.give_up(reason)

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id, or None while there is none."""
        return self._worker.pid

    async def start(self) -> None:
        """Start the worker and return at once; `wait_ready` waits until it has loaded."""
        await self._worker.start()


async def _ended(process: asyncio.subprocess.Process) -> str:
    """Return how a process ended, once it has."""
    status = await process.wait()
    if status >= 0:
        return f"died (exit status {status})"
    try:
        return f"died (killed by {signal.Signals(-status).name})"
    except ValueError:
        return f"died (killed by signal {-status})"


def _socket_folder() -> "tempfile.TemporaryDirectory[str]":
    """A folder that only this user may enter, gone at the end of the block. Raises Unavailable."""
    try:
        return tempfile.TemporaryDirectory(prefix="chairlift-", ignore_cleanup_errors=True)
    except OSError as error:
        problem = f"there is no folder for its socket: {error.strerror or error}"
        raise Unavailable(f"{problem}; set TMPDIR to a folder that this user may write to") from error


def _hint(why: str) -> str:
    return "; a system that runs out of memory kills so" if "SIGKILL" in why else ""


def worker_environment() -> dict[str, str]:
    """What a worker gets of this process's variables: models need no key of the server."""
    return {name: value for name, value in os.environ.items() if name != "CHAIRLIFT_API_KEY"}
