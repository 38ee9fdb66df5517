"""Runs batches of items in a worker process of its own."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import zmq

from chairlift.config.items import ItemConfig
from chairlift.core.items.item import Failure
from chairlift.engine.items.arrays import encode, encode_each, size_in_header
from chairlift.engine.items.call import CallFailed, CallResult, OnParts, Unwanted
from chairlift.engine.items.messages import Done, Failed, InstanceReady, ItemsToFront, Parts, RunBatch, StopBatch
from chairlift.engine.items.worker_answers import LARGE_BYTES, Unreadable, WorkerAnswers
from chairlift.engine.supervisor import Supervised, Supervisor, WorkerState
from chairlift.engine.worker_messages import LoadFailed, Shutdown
from chairlift.errors import BadItem, RequestFailed, Unavailable
from chairlift.runners.error_text import describe
from chairlift.runners.items import ItemInfo

# The batch that runs, and the one that follows it at once.
_MOST_CALLS = 2


class _Call:
    """A batch that is being computed, and whom to tell."""

    def __init__(self, number: int, size: int, on_parts: OnParts | None) -> None:
        self.number = number
        self.size = size
        self.on_parts = on_parts
        self.streamed: list[Any] = [[] for _ in range(size)]
        self.begun = self.unwanted = self.expired = False
        self.timer: asyncio.TimerHandle | None = None
        self.future: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()

    def take(self, indices: Sequence[int], found: list[Any] | Unreadable) -> bool:
        """Hand over parts of a stream, and keep those that belong in the results. False if nobody waits any more."""
        if isinstance(found, Unreadable):
            self._fail_to_read(found)
            self.unwanted = True
            return False
        self.begun = True
        parts = dict(zip(indices, found, strict=True))
        kept: dict[int, Any] | None = None
        try:
            if self.future.done():
                raise Unwanted
            if self.on_parts is not None:
                kept = self.on_parts(parts)
        except Unwanted:
            self.unwanted = True
            return False
        for index, part in (parts if kept is None else kept).items():
            self.streamed[index].append(part)
        return True

    def end(self, done: Done, found: list[Any] | Unreadable) -> None:
        """Hand over the results, which are what was streamed where there are no others."""
        if isinstance(found, Unreadable):
            self._fail_to_read(found)
            return
        results = found or self.streamed
        for index, text in done.errors.items():
            results[index] = BadItem(text) if index in done.refused else RequestFailed(text)
        self._succeed(CallResult(results, done.seconds, done.idle, done.gap))

    def _succeed(self, result: CallResult) -> None:
        """Hand over the results, unless nobody waits any more."""
        if not self.future.done():
            self.future.set_result(result)

    def _fail_to_read(self, problem: Unreadable) -> None:
        self.fail(Failure.RAISED, f"what the model gave can't be read: {problem}")

    def fail(self, failure: Failure, detail: str) -> None:
        """Say that the call failed as a whole; or, where parts are out that can't be called back, each of its items."""
        if self.begun and not self.unwanted:
            text = f"{detail}, after a part of the answer"
            self._succeed(CallResult([RequestFailed(text) for _ in range(self.size)], 0.0))
        elif not self.future.done():
            self.future.set_exception(CallFailed(failure, detail))


class ProcessExecutor(Supervised):
    """One instance of a model, in a worker process. All methods belong to the event loop that called `start`.

    It takes a call while it is at another, and begins it right after that. Calls go out, and their answers come, in
    order, also where they are so large that a thread writes and reads them. A worker that dies is replaced, and costs
    the call that it was at. One that takes longer than `call_timeout_s` over a call, or over the next part of a stream,
    is killed. `on_ready` hears whether it is `ready` whenever its state changes. The worker has the variables of this
    process, and those of `environment`.
    """

    queues = True

    def __init__(
        self,
        config: ItemConfig,
        on_ready: Callable[[bool], None] | None = None,
        environment: Mapping[str, str] | None = None,
        load_attempts: int = 1,
    ) -> None:
        self.config = config
        self.info: ItemInfo | None = None
        self.on_ready = on_ready
        self._calls: deque[_Call] = deque()
        self._free = asyncio.Event()
        self._free.set()
        # Whose call is written and sent next, and how many are under way in all.
        self._turn = asyncio.Lock()
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._answers = WorkerAnswers()
        self._numbers = itertools.count()
        self._decoder = msgspec.msgpack.Decoder(ItemsToFront)
        threads = config.num_threads
        self._worker = Supervisor(
            "chairlift.engine.items.worker",
            msgspec.json.encode(config).decode(),
            take=self._take,
            lost=self._lost,
            # What a class computes with is its own business; nearly all of it listens to this.
            environment={**(environment or {}), **({} if threads is None else {"OMP_NUM_THREADS": str(threads)})},
            on_state=self._changed,
            load_attempts=load_attempts,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
        )

    async def wait_ready(self) -> ItemInfo:
        """Return what is known of the model once it is loaded. Raises Unavailable if it can't be."""
        await self._worker.wait_ready()
        assert self.info is not None
        return self.info

    @property
    def returning(self) -> bool:
        """Whether its worker has died in a hurry, and another is about to be ready."""
        return self._worker.returning

    def hurry(self, on: bool) -> None:
        """Replace a worker that dies at once, or no longer so: it is being found out which item ends it."""
        self._worker.hurry(on)

    async def idle(self) -> None:
        """Return once no call runs, or waits to."""
        await self._idle.wait()

    async def stop(self) -> None:
        """End the worker; a call that still runs fails."""
        await self._worker.stop(msgspec.msgpack.encode(Shutdown()))
        await self._answers.done()

    async def run(self, payloads: Sequence[Any], on_parts: OnParts | None = None) -> CallResult:
        """Compute one batch, once the worker is ready and has at most one call to end before.

        With `on_parts`, a streaming model hands over its parts as they come, by item; each result has those that it
        returns. If it raises Unwanted, the model is told to stop. Raises CallFailed. Once a part is out it does not, as
        nobody may get it twice: every item has an error then.
        """
        self._under_way += 1
        self._idle.clear()
        try:
            async with self._turn:
                call = await self._send(payloads, on_parts)
            return await call.future
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _send(self, payloads: Sequence[Any], on_parts: OnParts | None) -> _Call:
        """Send a call, once it is written and there is room for it. Raises CallFailed."""
        frames = await _written(payloads)
        try:
            while len(self._calls) >= _MOST_CALLS or not self.ready:
                await self._free.wait()
                await self.wait_ready()
        except Unavailable as error:
            raise CallFailed(Failure.DIED, str(error)) from None
        streams = self.info is not None and self.info.streams
        call = _Call(next(self._numbers), len(payloads), on_parts if streams else None)
        self._calls.append(call)
        if len(self._calls) == _MOST_CALLS:
            self._free.clear()
        self._worker.send([msgspec.msgpack.encode(RunBatch(call.number, call.on_parts is not None)), *frames])
        if call is self._calls[0]:
            self._set_timer(call)
        return call

    def _set_timer(self, call: _Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
        if self.config.call_timeout_s is not None:
            call.timer = asyncio.get_running_loop().call_later(self.config.call_timeout_s, self._expire, call)

    def _expire(self, call: _Call) -> None:
        call.expired = True
        self._worker.kill()

    def _take(self, frames: list[zmq.Frame]) -> None:
        message = self._decoder.decode(frames[0].buffer)
        buffers = [frame.buffer for frame in frames[1:]]
        match message:
            case InstanceReady(info=info):
                self.info = info
                self._worker.loaded()
                return
            case LoadFailed():
                self._worker.refused(message)
                return
        self._worker.worked()
        call = self._calls[0] if self._calls else None
        if call is None or call.number != message.id:
            return  # it was failed when `stop` was called, and then done after all
        match message:
            case Parts(indices=indices):
                self._set_timer(call)
                if not call.unwanted:
                    self._answers.add(buffers, partial(self._hand_out, call, indices))
            case Done():
                self._end()
                self._answers.add(buffers, partial(call.end, message))
            case Failed(failure=failure, detail=detail):
                self._end()
                self._answers.then(partial(call.fail, failure, detail))

    def _hand_out(self, call: _Call, indices: list[int], parts: list[Any] | Unreadable) -> None:
        """Hand over parts of a stream, and stop it if nobody waits any more."""
        if not call.unwanted and not call.take(indices, parts):
            self._worker.send([msgspec.msgpack.encode(StopBatch(call.number))])

    def _end(self) -> _Call:
        """Let the call that the worker is at go; from now on it is at the next, if there is one."""
        call = self._calls.popleft()
        if call.timer is not None:
            call.timer.cancel()
        if self._calls:
            self._set_timer(self._calls[0])
        self._free.set()
        return call

    def _lost(self, reason: str) -> None:
        calls = [self._end() for _ in range(len(self._calls))]
        limit = self.config.call_timeout_s
        for place, call in enumerate(calls):
            failure, detail = Failure.DIED, reason
            if place:
                failure = Failure.UNTRIED
            elif call.expired:
                detail = f"the call took more than {limit:g} s (call_timeout_s); its worker was ended"
                failure = Failure.TIMED_OUT
            # After the parts that came before, which can't be called back.
            self._answers.then(partial(call.fail, failure, detail))

    def _changed(self, state: WorkerState) -> None:
        if self.on_ready is not None:
            self.on_ready(self.ready)


async def _written(payloads: Sequence[Any]) -> list[bytes | memoryview]:
    """The frames of payloads; a thread writes large ones. Raises CallFailed for what can't be sent.

    A body of JSON has been held to fewer levels than can be read, and there is no time to look again.
    """
    try:
        if size_in_header(payloads, LARGE_BYTES) > LARGE_BYTES:
            return await asyncio.to_thread(encode_each, payloads)
        return encode(list(payloads), checked=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise CallFailed(Failure.RAISED, f"the payload can't be sent: {describe(error)}") from error
