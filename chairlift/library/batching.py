"""`@chairlift.batched`: a function from list to list, called with one item at a time from anywhere."""

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Callable, Coroutine, Hashable, Sequence
from contextlib import suppress
from functools import partial, update_wrapper
from math import inf
from typing import Any, Generic, Literal, Protocol, TypedDict, TypeVar, Unpack, cast, overload

import msgspec

from chairlift.config.units import seconds
from chairlift.core.items.limits import BatchLimits
from chairlift.engine.items.dispatcher import Answer, Dispatcher
from chairlift.engine.items.function_call import AsyncCall, ThreadCall, shape_of
from chairlift.engine.items.loop_thread import LoopThread, loop_thread

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")
A = TypeVar("A")
Awaits = Coroutine[Any, Any, R]


class BatchingOptions(msgspec.Struct, frozen=True):
    """What a batched function was given besides its limits; `call_timeout` in seconds."""

    limits: BatchLimits
    stack: bool
    call_timeout: float | None
    workers: int
    size: Callable[[Any], float] | None
    shape_key: Callable[[Any], Hashable] | None

    def fields(self, item: Any, priority: int, timeout_ms: float | None) -> dict[str, Any]:
        """Return what `Dispatcher.submit` is to know of an item."""
        key = self.shape_key(item) if self.shape_key is not None else None
        return {
            "size": 1.0 if self.size is None else self.size(item),
            "shape_key": (key, shape_of(item)) if self.stack else key,
            "priority": priority,
            "timeout": seconds(timeout_ms),
        }


class _Batched:
    """What both kinds have in common: they look like their function, and on a class each object has its own."""

    def __init__(self, function: Callable[..., Any], options: BatchingOptions) -> None:
        self._function = function
        self._options = options
        self._attribute: str | None = None
        self._owner: Any = None
        update_wrapper(cast("Callable[..., Any]", self), function)

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def _bind(self, owner: Any) -> Any:
        """Return the batcher of one object, which from then on is found in the object itself."""
        name = self._attribute
        if name is None:
            raise TypeError("a batched method must be defined in the body of its class")
        bound = type(self)(self._function.__get__(owner), self._options)
        bound._attribute, bound._owner = name, owner
        try:
            return owner.__dict__.setdefault(name, bound)
        except AttributeError:
            kind = type(owner).__qualname__
            raise TypeError(f"{kind} has no __dict__ to keep the batcher of {name!r} in; drop its __slots__") from None

    def __reduce__(self) -> Any:
        # Copies and pickles of an object, or of a reference to a function, have batchers of their own.
        if self._owner is not None:
            return getattr, (self._owner, self._attribute)
        return self._function.__qualname__


class BatchedFunction(_Batched, Generic[T, R]):
    """A sync function. Calling it with one item blocks; inside an event loop, await `acall`. Any thread may do either.

    Batches run in one daemon thread for each of `workers`, and one more per process keeps the time; both start with the
    first call.
    """

    def __init__(self, function: Callable[..., Any], options: BatchingOptions) -> None:
        super().__init__(function, options)
        self._home: tuple[LoopThread, Dispatcher, list[ThreadCall]] | None = None

    @overload
    def __get__(self, owner: None, kind: type) -> "BatchedFunction[T, R]": ...
    @overload
    def __get__(self, owner: object, kind: type) -> "BatchedFunction[T, R]": ...
    def __get__(self, owner: object | None, kind: type) -> "BatchedFunction[T, R]":
        return self if owner is None else cast("BatchedFunction[T, R]", self._bind(owner))

    def __call__(self, item: T, *, priority: int = 0, timeout_ms: float | None = None) -> R:
        """Return the item's result, or raise its exception. `priority`: lower is sooner.

        `timeout_ms` is when it must be done: else it raises QueueFull as soon as that is foreseen, or DeadlineExceeded.
        Raises RuntimeError from inside the function itself, which would wait for itself.
        """
        home = self._home
        if home is not None and any(call.thread is threading.current_thread() for call in home[2]):
            raise RuntimeError(f"{self._function.__qualname__} was called with one item from inside itself")
        future = self.submit(item, priority=priority, timeout_ms=timeout_ms)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, item: T, *, priority: int = 0, timeout_ms: float | None = None) -> "concurrent.futures.Future[R]":
        """Queue the item and return at once. Cancelling the future takes it out of the queue."""
        fields = self._options.fields(item, priority, timeout_ms)
        future: concurrent.futures.Future[R] = concurrent.futures.Future()
        home, dispatcher, _ = self._at_home()
        home.post(partial(_submit, home, dispatcher, item, fields, future))
        return future

    async def acall(self, item: T, *, priority: int = 0, timeout_ms: float | None = None) -> R:
        """Await the item's result. Cancelling the awaiting task takes it out of the queue."""
        return await asyncio.wrap_future(self.submit(item, priority=priority, timeout_ms=timeout_ms))

    def _at_home(self) -> tuple[LoopThread, Dispatcher, list[ThreadCall]]:
        """Return the dispatcher between the loop that it belongs to and its calls; after a fork all are new."""
        here, home = loop_thread(), self._home
        if home is None or home[0] is not here:
            with here.lock:
                home = self._home
                if home is None or home[0] is not here:
                    options = self._options
                    calls = [
                        ThreadCall(self._function, options.stack, options.call_timeout) for _ in range(options.workers)
                    ]
                    home = self._home = here, Dispatcher(options.limits, calls, raise_originals=True), calls
        return home


class AsyncBatchedFunction(_Batched, Generic[T, R]):
    """A coroutine function. `await` it with one item, from any event loop; batches run, and form, on that loop."""

    def __init__(self, function: Callable[..., Any], options: BatchingOptions) -> None:
        super().__init__(function, options)
        self._dispatchers: dict[asyncio.AbstractEventLoop, Dispatcher] = {}
        self._lock = threading.Lock()

    @overload
    def __get__(self, owner: None, kind: type) -> "AsyncBatchedFunction[T, R]": ...
    @overload
    def __get__(self, owner: object, kind: type) -> "AsyncBatchedFunction[T, R]": ...
    def __get__(self, owner: object | None, kind: type) -> "AsyncBatchedFunction[T, R]":
        return self if owner is None else cast("AsyncBatchedFunction[T, R]", self._bind(owner))

    async def __call__(self, item: T, *, priority: int = 0, timeout_ms: float | None = None) -> R:
        """Await the item's result, or its exception; the arguments are those of `BatchedFunction.__call__`."""
        loop = asyncio.get_running_loop()
        dispatcher = self._dispatchers.get(loop) or self._dispatcher_of(loop)
        answer = await dispatcher.submit(item, **self._options.fields(item, priority, timeout_ms))
        return cast("R", answer.value)

    def _dispatcher_of(self, loop: asyncio.AbstractEventLoop) -> Dispatcher:
        """Make the dispatcher of a loop, and let go of those of closed ones. Threads of other loops may do the same."""
        options = self._options
        calls = [AsyncCall(self._function, options.stack, options.call_timeout) for _ in range(options.workers)]
        made = Dispatcher(options.limits, calls, raise_originals=True)
        with self._lock:
            open_ones = {each: there for each, there in self._dispatchers.items() if not each.is_closed()}
            self._dispatchers = open_ones | {loop: made}
        return made


def _submit(
    home: LoopThread,
    dispatcher: Dispatcher,
    item: Any,
    fields: dict[str, Any],
    future: "concurrent.futures.Future[Any]",
) -> None:
    """Queue an item, in the thread of the dispatcher's loop, for a caller that waits in another."""
    if future.cancelled():
        return
    try:
        ticket = dispatcher.submit(item, **fields)
    except Exception as error:
        with suppress(concurrent.futures.InvalidStateError):
            future.set_exception(error)
        return
    ticket.add_done_callback(partial(_hand_over, future))
    future.add_done_callback(partial(_withdraw, home, ticket))


def _hand_over(future: "concurrent.futures.Future[Any]", ticket: "asyncio.Future[Answer]") -> None:
    with suppress(concurrent.futures.InvalidStateError):
        if ticket.cancelled():
            future.cancel()
        elif (error := ticket.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(ticket.result().value)


def _withdraw(home: LoopThread, ticket: "asyncio.Future[Answer]", future: "concurrent.futures.Future[Any]") -> None:
    if future.cancelled():
        home.post(partial(_cancel, ticket))


def _cancel(ticket: "asyncio.Future[Answer]") -> None:
    ticket.cancel()


class Array(Protocol):
    """NumPy's and torch's arrays, as far as types are concerned."""

    @property
    def shape(self) -> Any:
        """The length of each axis."""


class Decorator(Protocol):
    """What `batched(...)` returns: it takes a function, or a method in the body of its class."""

    @overload
    def __call__(self, function: Callable[[list[T]], Awaits[Sequence[R]]]) -> AsyncBatchedFunction[T, R]: ...
    @overload
    def __call__(self, function: Callable[[S, list[T]], Awaits[Sequence[R]]]) -> AsyncBatchedFunction[T, R]: ...
    @overload
    def __call__(self, function: Callable[[list[T]], Awaits[Array]]) -> AsyncBatchedFunction[T, Any]: ...
    @overload
    def __call__(self, function: Callable[[S, list[T]], Awaits[Array]]) -> AsyncBatchedFunction[T, Any]: ...
    @overload
    def __call__(self, function: Callable[[list[T]], Sequence[R]]) -> BatchedFunction[T, R]: ...
    @overload
    def __call__(self, function: Callable[[S, list[T]], Sequence[R]]) -> BatchedFunction[T, R]: ...
    @overload
    def __call__(self, function: Callable[[list[T]], Array]) -> BatchedFunction[T, Any]: ...
    @overload
    def __call__(self, function: Callable[[S, list[T]], Array]) -> BatchedFunction[T, Any]: ...


class StackDecorator(Protocol):
    """What `batched(stack=True, ...)` returns: items are arrays, and the function gets one array of them all."""

    @overload
    def __call__(self, function: Callable[[A], Awaits[Any]]) -> AsyncBatchedFunction[A, Any]: ...
    @overload
    def __call__(self, function: Callable[[S, A], Awaits[Any]]) -> AsyncBatchedFunction[A, Any]: ...
    @overload
    def __call__(self, function: Callable[[A], Any]) -> BatchedFunction[A, Any]: ...
    @overload
    def __call__(self, function: Callable[[S, A], Any]) -> BatchedFunction[A, Any]: ...


class BatchedSettings(TypedDict, total=False):
    """What `batched` takes besides `stack`; `DEFAULTS` has what is not given."""

    max_batch_size: int
    max_wait_ms: float
    max_batch_tokens: float | None
    target_latency_ms: float | None
    timeout_ms: float | None
    call_timeout_ms: float | None
    max_waiting: int
    max_queue_ms: float | None
    priority_ageing_ms: float
    sort_window: int
    max_passed_over: int
    retries: int
    bisect: bool
    workers: int
    size: Callable[[Any], float] | None
    shape_key: Callable[[Any], Hashable] | None


DEFAULTS: BatchedSettings = {
    "max_batch_size": 32,
    "max_wait_ms": 0.0,
    "max_batch_tokens": None,
    "target_latency_ms": None,
    "timeout_ms": None,
    "call_timeout_ms": None,
    "max_waiting": 1024,
    "max_queue_ms": None,
    "priority_ageing_ms": 1000.0,
    "sort_window": 0,
    "max_passed_over": 16,
    "retries": 2,
    "bisect": True,
    "workers": 1,
    "size": None,
    "shape_key": None,
}


@overload
def batched(function: Callable[[list[T]], Awaits[Sequence[R]]], /) -> AsyncBatchedFunction[T, R]: ...
@overload
def batched(function: Callable[[S, list[T]], Awaits[Sequence[R]]], /) -> AsyncBatchedFunction[T, R]: ...
@overload
def batched(function: Callable[[list[T]], Awaits[Array]], /) -> AsyncBatchedFunction[T, Any]: ...
@overload
def batched(function: Callable[[S, list[T]], Awaits[Array]], /) -> AsyncBatchedFunction[T, Any]: ...
@overload
def batched(function: Callable[[list[T]], Sequence[R]], /) -> BatchedFunction[T, R]: ...
@overload
def batched(function: Callable[[S, list[T]], Sequence[R]], /) -> BatchedFunction[T, R]: ...
@overload
def batched(function: Callable[[list[T]], Array], /) -> BatchedFunction[T, Any]: ...
@overload
def batched(function: Callable[[S, list[T]], Array], /) -> BatchedFunction[T, Any]: ...
@overload
def batched(*, stack: Literal[False] = False, **settings: Unpack[BatchedSettings]) -> Decorator: ...
@overload
def batched(*, stack: Literal[True], **settings: Unpack[BatchedSettings]) -> StackDecorator: ...
def batched(
    function: Callable[..., Any] | None = None, /, *, stack: bool = False, **settings: Unpack[BatchedSettings]
) -> Any:
    """Decorate a function from a list of items to a list of their results, in order; call it with one item.

        @chairlift.batched(max_batch_size=32)
        def embed(texts: list[str]) -> list[Vector]: ...

        vector = embed("one text")  # from any thread; from async code: await embed.acall("one text")

    A coroutine function is awaited instead. A method is batched for each object by itself. Results may also be an array
    whose first axis is the batch; with `stack`, items are arrays, those of equal shape and type share a batch, and the
    function gets them as one (torch's or NumPy's).

    A batch leaves when a worker is free and `max_batch_size` wait, or the oldest has waited `max_wait_ms`; with
    `target_latency_ms` that follows from how long calls take. Items of equal `shape_key(item)` share a batch. `size` is
    what a call's time follows from, 1 unless given, and `max_batch_tokens` its sum in a batch. `timeout_ms`: who can't
    be done by then is refused at once. What the limits are for in detail: `BatchLimits`. A bare `@batched` has the
    defaults of all.

    If a call raises, halves of its batch are tried, so that only the culprit gets the exception. With `bisect=False` it
    runs once, and all get it. A result that is an exception is raised to its caller, and costs the others nothing. A
    call that takes longer than `call_timeout_ms` is given up, and its items are tried again one by one, each up to
    `retries` times.

    Raises ValueError if a setting is absurd, TypeError if the function is a generator, or no function.
    """
    options = _options(stack, settings)

    def decorate(function: Callable[..., Any]) -> Any:
        if not callable(function):
            raise TypeError(f"batched takes a function, and settings by keyword, not {function!r}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{function.__qualname__} is a generator; a batched function returns a list")
        if inspect.iscoroutinefunction(function):
            return AsyncBatchedFunction(function, options)
        return BatchedFunction(function, options)

    return decorate if function is None else decorate(function)


def _options(stack: bool, settings: BatchedSettings) -> BatchingOptions:
    """Fill in the defaults, and count in seconds. Raises TypeError for a setting that there is not."""
    if unknown := settings.keys() - DEFAULTS.keys():
        raise TypeError(f"batched() has no setting {', '.join(sorted(unknown))}; it takes stack, {', '.join(DEFAULTS)}")
    given: BatchedSettings = {**DEFAULTS, **settings}
    limits = BatchLimits(
        max_batch_size=given["max_batch_size"],
        max_wait=given["max_wait_ms"] / 1000,
        max_batch_tokens=given["max_batch_tokens"],
        max_waiting=given["max_waiting"],
        max_queue_seconds=seconds(given["max_queue_ms"]),
        target_latency=seconds(given["target_latency_ms"]),
        default_timeout=seconds(given["timeout_ms"]),
        priority_ageing=given["priority_ageing_ms"] / 1000,
        sort_window=given["sort_window"],
        max_passed_over=given["max_passed_over"],
        retries=given["retries"],
        bisect=given["bisect"],
    )
    if not isinstance(given["workers"], int) or given["workers"] < 1:
        raise ValueError(f"workers must be a whole number of at least 1, got {given['workers']}")
    call_timeout = seconds(given["call_timeout_ms"])
    if call_timeout is not None and not 0 < call_timeout < inf:
        raise ValueError(f"call_timeout_ms must be positive and finite, got {given['call_timeout_ms']}")
    return BatchingOptions(limits, stack, call_timeout, given["workers"], given["size"], given["shape_key"])


def _signature() -> inspect.Signature:
    """What `help` and editors are to show: every setting with its default."""
    settings = {"stack": False, **DEFAULTS}
    types = {"stack": bool, **BatchedSettings.__annotations__}
    kind = inspect.Parameter.KEYWORD_ONLY
    bare = inspect.Parameter("function", inspect.Parameter.POSITIONAL_ONLY, default=None)
    named = [inspect.Parameter(name, kind, default=value, annotation=types[name]) for name, value in settings.items()]
    return inspect.Signature([bare, *named])


vars(batched)["__signature__"] = _signature()
