"""The library for event loops: a model in a thread of its own, and generations that are read as they grow."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from chairlift.core.finished import FinishReason
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.engine.sequences.engine import Engine
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.errors import InvalidRequest, Unavailable
from chairlift.library.llm import LLM
from chairlift.library.loaded_model import OpenOutput, Prompt
from chairlift.library.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)

T = TypeVar("T")
log = logging.getLogger(__name__)

# What vLLM's `generate` takes besides, and there is not here.
_NOT_THERE = ("lora_request", "trace_headers", "prompt_text", "tokenization_kwargs", "data_parallel_rank")


class AsyncLLM:
    """A model in this process for use in event loops: `async for output in AsyncLLM(folder).generate(...)`.

    Takes what `LLM` takes, and raises as it does. The model is loaded before this returns. Its work is done in a thread
    of its own, so loops go on meanwhile; all generations that run at one time share batches. Methods may be called in
    any event loop.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        self._thread = _ModelThread(partial(LLM, model, **settings))
        self._llm = self._thread.load()
        self._end = weakref.finalize(self, self._thread.stop, None)

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "AsyncLLM":
        """Make one of settings in a mapping, or in a dataclass such as vLLM's, whose defaults are passed over.

        Raises TypeError for a setting that there is not.
        """
        if isinstance(engine_args, Mapping):
            return cls(**engine_args)
        given = {each.name: getattr(engine_args, each.name) for each in dataclasses.fields(engine_args)}
        for each in dataclasses.fields(engine_args):
            made = each.default_factory is not dataclasses.MISSING
            default = each.default_factory() if callable(each.default_factory) and made else each.default
            if each.name != "model" and given[each.name] == default:
                del given[each.name]
        return cls(**given)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. A chat is rendered by it: see `LLM.chat`."""
        return self._llm.tokenizer

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, of the forms that `LLM.generate` takes: its output so far, each time that it has grown.

        The last has `finished`; what was aborted has the finish_reason "abort", and what failed "error". Leaving the
        loop, or cancelling the task, aborts the request. Raises InvalidRequest, or Unavailable after `shutdown`.
        """
        if named := sorted(name for name, value in others.items() if name not in _NOT_THERE or value is not None):
            raise TypeError(f"generate takes no {', '.join(named)}; leave it out")
        model, thread, reader = self._llm.sequences, self._thread, _OutputReader()
        if thread.readers.setdefault(request_id, reader) is not reader:
            raise InvalidRequest(f"request_id {request_id!r} is running already; give each request its own")
        try:
            make = partial(model.open_output, request_id=request_id, compiles=False, streams=True)
            reader.output = opened = await asyncio.to_thread(make, prompt, sampling_params, priority)
            thread.post(partial(thread.begin, reader))
            while not opened.output.finished:
                ended = await reader.take()
                if ended:
                    thread.forget(ended)
                yield opened.as_now()
        finally:
            del thread.readers[request_id]
            if reader.output is not None and not reader.output.output.finished:
                thread.forget([each.id for each in reader.output.requests])

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End generations; those that are not there (any more) are passed over. Their readers get what came so far."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            reader = self._thread.readers.get(name)
            if reader is not None:
                reader.call(reader.abort)
                # Whoever reads may be at something else for long; without an output its requests are yet to come.
                if (opened := reader.output) is not None:
                    self._thread.forget([each.id for each in opened.requests])

    async def embed(
        self, prompts: str | Sequence[str], *, truncate_prompt_tokens: int | None = None
    ) -> list[EmbeddingRequestOutput]:
        """As `LLM.embed`; so are `classify` and `score`."""
        return await self._thread.work(self._of_texts("embed", prompts, truncate_prompt_tokens))

    async def classify(
        self, prompts: str | Sequence[str], *, truncate_prompt_tokens: int | None = None
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of each text's labels."""
        return await self._thread.work(self._of_texts("classify", prompts, truncate_prompt_tokens))

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together."""
        cut = truncate_prompt_tokens
        return await self._thread.work(
            partial(self._llm.score, text_1, text_2, truncate_prompt_tokens=cut, use_tqdm=False)
        )

    async def check_health(self) -> None:
        """Raise Unavailable if nothing is answered any more."""
        self._thread.check()

    @property
    def errored(self) -> bool:
        """Whether the engine has failed, and answers nothing any more."""
        return self._thread.error is not None

    @property
    def is_running(self) -> bool:
        """Whether requests are answered."""
        return not self._thread.is_over

    def shutdown(self, timeout: float | None = None) -> None:
        """End what runs, whose readers get Unavailable, and release the model; waits up to `timeout` seconds for it."""
        self._end.detach()
        self._thread.stop(timeout)

    def _of_texts(self, method: str, prompts: str | Sequence[str], cut: int | None) -> Callable[[], Any]:
        return partial(getattr(self._llm, method), prompts, truncate_prompt_tokens=cut, use_tqdm=False)


class _OutputReader:
    """Whoever reads a generation, in an event loop. All methods but `call` belong to that loop."""

    def __init__(self) -> None:
        self.output: OpenOutput | None = None
        self._loop = asyncio.get_running_loop()
        self._updates: deque[tuple[int, SequenceUpdate]] = deque()
        self._error: Exception | None = None
        self._aborted = False
        self._wake: asyncio.Future[None] | None = None

    def call(self, method: Callable[..., None], *args: Any) -> None:
        """Have one of the methods called in the loop; nobody is told if that has ended. From any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(method, *args)

    def push(self, updates: Iterable[tuple[int, SequenceUpdate]]) -> None:
        """Hand over what a step gave, each with the index of its sample."""
        self._updates += updates
        self._notify()

    def fail(self, error: Exception) -> None:
        """There is nothing to come after what is here already but an error."""
        self._error = error
        self._notify()

    def abort(self) -> None:
        """End all that has not ended."""
        self._aborted = True
        self._notify()

    async def take(self) -> list[str]:
        """Wait until there is something, and put it into the output; return what the engine need not go on with."""
        while not (self._updates or self._aborted or self._error):
            self._wake = self._loop.create_future()
            await self._wake
        output = self.output
        assert output is not None
        if not self._updates and not self._aborted and self._error is not None:
            raise self._error
        ended = []
        while self._updates:
            index, update = self._updates.popleft()
            if update.finish_reason is FinishReason.INVALID:
                raise InvalidRequest(str(update.detail))
            if output.take(index, update) and update.finish_reason is None:
                ended.append(update.id)
        if self._aborted and not output.output.finished:
            output.abort()
            return [each.id for each in output.requests]
        return ended

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class _ModelThread(threading.Thread):
    """The thread that loads the model and does its work. A daemon, so it keeps no program from ending."""

    def __init__(self, load: Callable[[], LLM]) -> None:
        super().__init__(name="chairlift model", daemon=True)
        # By the ids that the callers gave.
        self.readers: dict[str, _OutputReader] = {}
        self.is_over = False
        self.error: BaseException | None = None
        self._load = load
        self._loaded: concurrent.futures.Future[LLM] = concurrent.futures.Future()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._work: set[concurrent.futures.Future[Any]] = set()
        # Of the requests that the engine has.
        self._routes: dict[str, tuple[_OutputReader, int]] = {}
        self._engine: Engine | None = None

    def load(self) -> LLM:
        """Begin, and return what was loaded. Raises as `LLM`."""
        self.start()
        return self._loaded.result()

    def run(self) -> None:
        """Load the model and work until told to stop."""
        try:
            llm = self._load()
        except BaseException as error:
            self.is_over = True
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(llm)
        try:
            if llm.generates:
                self._drive(llm.engine)
            while not self.is_over:
                self._inbox.get()()
        except BaseException as error:
            log.exception("the engine failed")
            self.error = error
        with self._lock:
            self.is_over = True
        for reader in [*self.readers.values()]:
            reader.call(reader.fail, self._refusal())
        for future in [*self._work]:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._refusal())
        llm.close()

    def check(self) -> None:
        """Raise Unavailable if there is nobody to do any work."""
        if self.is_over:
            raise self._refusal()

    def post(self, call: Callable[[], None]) -> None:
        """Have the thread make a call between two steps, after those that were posted before. Raises Unavailable."""
        with self._lock:
            self.check()
            self._inbox.put(call)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Have the engine end requests, if it has them still."""
        with contextlib.suppress(Unavailable):
            self.post(partial(self._abort, request_ids))

    def stop(self, timeout: float | None) -> None:
        """Have it end after the present step, and wait up to `timeout` seconds for that."""
        with self._lock:
            self.is_over = True
        self._inbox.put(_nothing)
        if threading.current_thread() is not self:
            self.join(timeout)

    async def work(self, call: Callable[[], T]) -> T:
        """Have the thread make a call, and return its result. Raises Unavailable, or what the call raises."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            self.check()
            self._work.add(future)
            future.add_done_callback(self._work.discard)
            self._inbox.put(partial(_call_into, future, call))
        return await asyncio.wrap_future(future)

    # In the thread

    def begin(self, reader: _OutputReader) -> None:
        """Give the engine a reader's requests."""
        assert self._engine is not None
        assert reader.output is not None
        for index, request in enumerate(reader.output.requests):
            self._routes[request.id] = reader, index
            try:
                self._engine.add(request)
            except ValueError as error:
                self._hand_over([SequenceUpdate(request.id, [], FinishReason.ERROR, str(error))])

    def _abort(self, request_ids: Sequence[str]) -> None:
        assert self._engine is not None
        self._engine.abort(request_ids)
        for request_id in request_ids:
            self._routes.pop(request_id, None)

    def _drive(self, engine: Engine) -> None:
        self._engine = engine
        engine.on_prepared = partial(self._inbox.put, _nothing)
        timeout: float | None = None
        while True:
            self._listen(timeout)
            if self.is_over:
                return
            self._hand_over(engine.take_prepared())
            stepped = engine.step()
            if stepped is not None:
                self._hand_over(stepped.updates)
                timeout = 0.0
            else:
                moment = engine.ask_again
                timeout = None if moment is None else max(moment - engine.clock(), 0.0)

    def _listen(self, timeout: float | None) -> None:
        """Make the calls that were posted, having waited up to `timeout` seconds (None: for ever) for one."""
        with contextlib.suppress(Empty):
            self._inbox.get(timeout != 0, timeout)()
            while True:
                self._inbox.get_nowait()()

    def _hand_over(self, updates: Iterable[SequenceUpdate]) -> None:
        found: dict[_OutputReader, list[tuple[int, SequenceUpdate]]] = {}
        for update in updates:
            reader, index = self._routes[update.id]
            found.setdefault(reader, []).append((index, update))
            if update.finish_reason is not None:
                del self._routes[update.id]
        for reader, theirs in found.items():
            reader.call(reader.push, theirs)

    def _refusal(self) -> Unavailable:
        why = "was shut down" if self.error is None else f"failed: {type(self.error).__name__}: {self.error}"
        return Unavailable(f"the engine {why}; make another AsyncLLM")


def _call_into(future: "concurrent.futures.Future[T]", call: Callable[[], T]) -> None:
    """Make a call, unless nobody waits for it any more."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)


def _nothing() -> None:
    pass
