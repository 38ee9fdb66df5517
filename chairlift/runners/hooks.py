"""A user's class and its hooks: checked when it is made, and called alike whether they are async or not."""

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from chairlift.config.choices import problem_of
from chairlift.errors import ConfigError
from chairlift.runners.items import TensorSpec
from chairlift.runners.tensors import dtype_of

Hook = Callable[..., Any]


class Hooks:
    """An instance of a user's class. Raises ConfigError for a class that can't be served, naming what is wrong."""

    def __init__(self, cls: type, options: Mapping[str, Any], num_threads: int) -> None:
        name = cls.__qualname__
        self.stack: bool = _attribute(cls, "stack", bool, False)
        self.max_batch_size: int | None = _attribute(cls, "max_batch_size", int | None, None)
        self.max_wait_ms: float | None = _attribute(cls, "max_wait_ms", float | None, None)
        self.inputs = _specs(cls, "inputs")
        self.outputs = _specs(cls, "outputs")
        if bool(self.inputs) != bool(self.outputs):
            raise ConfigError(f"{name} declares only one of inputs and outputs; declare both, or neither")
        _check_call(cls, name, **options)
        self._object = cls(**options)
        self._load = self._find("load")
        self._preprocess = self._find("preprocess", "item")
        self._postprocess = self._find("postprocess", "output")
        self._example = self._find("example")
        predict = self._find("predict", "batch")
        if predict is None:
            raise ConfigError(f"{name} has no method predict(self, batch)")
        self._predict = predict
        self.streams = inspect.isgeneratorfunction(predict) or inspect.isasyncgenfunction(predict)
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="hooks")
        self._loop = _LoopThread()

    def load(self) -> None:
        """Call `load`, if there is one."""
        if self._load is not None:
            self._call(self._load)

    def example(self) -> list[Any]:
        """The class's own example of an item, if it has one."""
        return [] if self._example is None else [self._call(self._example)]

    def preprocess(self, items: Sequence[Any]) -> list[Any]:
        """What `preprocess` makes of each, or the exception that it raised."""
        return self._each(self._preprocess, items)

    def postprocess(self, outputs: Sequence[Any]) -> list[Any]:
        """What `postprocess` makes of each, or the exception that it raised."""
        return self._each(self._postprocess, outputs)

    def predict(self, batch: Any) -> Any:
        """What `predict` returns for a batch."""
        return self._call(self._predict, batch)

    def stream(self, batch: Any) -> Generator[Any, None, None]:
        """What a `predict` that is a generator yields for a batch."""
        made = self._predict(batch)
        if isinstance(made, Iterator):
            yield from made
            return
        try:
            while True:
                try:
                    part = self._loop.run(made.__anext__())
                except StopAsyncIteration:
                    return
                yield part
        finally:
            self._loop.run(made.aclose())

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
        self._loop.close()

    def _find(self, name: str, *arguments: str) -> Hook | None:
        """The user's method, or None if there is none; `arguments` are the names of what it must take."""
        method = getattr(self._object, name, None)
        if method is None:
            return None
        title = f"{type(self._object).__qualname__}.{name}"
        if not callable(method):
            raise ConfigError(f"{title} must be a method, not {type(method).__name__}")
        _check_call(method, title, *arguments)
        found: Hook = method
        return found

    def _call(self, function: Hook, *arguments: Any) -> Any:
        made = function(*arguments)
        return self._loop.run(made) if inspect.isawaitable(made) else made

    def _each(self, hook: Hook | None, values: Sequence[Any]) -> list[Any]:
        """Call a hook for each value, several at a time."""
        if hook is None:
            return list(values)
        if inspect.iscoroutinefunction(hook):
            gathered: list[Any] = self._loop.run(_gather(hook, values))
            return gathered
        # A few long slices: a task for each item would cost more than many a hook.
        width = min(self._num_threads, len(values))
        if width <= 1:
            return self._slice(hook, values)
        slices = list(self._pool.map(lambda first: self._slice(hook, values[first::width]), range(width)))
        return [slices[index % width][index // width] for index in range(len(values))]

    def _slice(self, hook: Hook, values: Sequence[Any]) -> list[Any]:
        results = []
        for value in values:
            try:
                results.append(self._call(hook, value))
            except Exception as error:
                results.append(error)
        return results


class _LoopThread:
    """An event loop that all async hooks share, in a thread of its own, so that what they leave running goes on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, made: Awaitable[Any]) -> Any:
        """Wait for the outcome in the calling thread. The loop starts with the first call."""

        async def outcome() -> Any:
            return await made

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="async hooks", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(outcome(), self._loop).result()

    def close(self) -> None:
        """Stop the loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)


async def _gather(hook: Hook, values: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*map(hook, values), return_exceptions=True)


def _attribute(cls: type, name: str, kind: Any, default: Any) -> Any:
    value = getattr(cls, name, default)
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{cls.__qualname__}.{name}: {problem_of(error)}, got {value!r}") from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigError(f"{cls.__qualname__}.{name} must be a finite number, got {value!r}")
    least = 1 if name == "max_batch_size" else 0
    if converted is not None and converted < least:
        raise ConfigError(f"{cls.__qualname__}.{name} must be at least {least}, got {value!r}")
    return converted


def _specs(cls: type, name: str) -> tuple[TensorSpec, ...]:
    """Specs, given as such or as (name, datatype, shape)."""
    given = getattr(cls, name, ())
    specs: list[TensorSpec] = []
    try:
        for each in given:
            parts = (each.name, each.datatype, each.shape) if isinstance(each, TensorSpec) else each
            spec = TensorSpec(*msgspec.convert(parts, tuple[str, str, tuple[int, ...]]))
            dtype_of(spec.datatype)
            specs.append(spec)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{cls.__qualname__}.{name} must be a list of (name, datatype, shape of one item), got {given!r}: {error}"
        ) from None
    return tuple(specs)


def _check_call(function: Any, title: str, *arguments: Any, **keywords: Any) -> None:
    """Refuse a function that can't be called so. Raises ConfigError with its signature."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a built-in there is none to see
        return
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        wanted = ", ".join([*map(str, arguments), *keywords])
        raise ConfigError(f"{title}{signature} can't be called as {title}({wanted}): {error}") from None
