"""The service in front of a one-shot model: payloads go in, answers with their timings come out."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np

from chairlift.engine.dispatcher import Answer
from chairlift.errors import InvalidRequest, Unavailable
from chairlift.runners.oneshot import OneShotInfo, Task
from chairlift.server.oneshot_metrics import OneShotMetrics
from chairlift.text.encoding import TextEncoder

State = Literal["loading", "ready", "restarting", "draining", "failed"]


class Line(Protocol):
    """The part of Dispatcher that a service uses."""

    def submit(
        self,
        payload: Any,
        *,
        size: float = 1.0,
        shape_key: Hashable = None,
        priority: int = 0,
        timeout: float | None = None,
        on_part: Callable[[Any], None] | None = None,
    ) -> "asyncio.Future[Answer]":
        """Queue one payload; `on_part` hears of each part of a streaming model's result.

        Raises QueueFull; so may the future, or DeadlineExceeded, RequestFailed, Unavailable.
        """


class OneShotService:
    """One served one-shot model. Its owner opens it when it is loaded, and sets `state` and `failure` as they change.

    `capacity` is what the line holds, so that a request that can never fit is refused as such. `prompts` are texts that
    clients may ask to put before theirs, by name.
    """

    def __init__(
        self,
        name: str,
        line: Line | None = None,
        *,
        version: str = "1",
        info: OneShotInfo | None = None,
        encoder: TextEncoder | None = None,
        capacity: int = 1024,
        prompts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.version = version
        self.info = info
        self.encoder = encoder
        self.prompts = prompts
        self.capacity = capacity
        self.metrics = OneShotMetrics(name)
        self.state = "loading" if info is None else "ready"
        self.failure: str | None = None
        self.created = int(time.time())
        self._line = line

    def open(self, line: Line, info: OneShotInfo, encoder: TextEncoder | None) -> None:
        """Take requests from now on."""
        self._line, self.info, self.encoder = line, info, encoder
        self.state = "ready"

    @property
    def state(self) -> State:
        """One of loading, ready, restarting, draining, failed."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        self.metrics.ready = self.ready

    @property
    def ready(self) -> bool:
        """Whether a request would be taken in now."""
        return self._state == "ready"

    @property
    def task(self) -> Task | None:
        """What the model does; None before it is loaded."""
        return self.info.task if self.info is not None else None

    @property
    def max_model_len(self) -> int | None:
        """Tokens that an input may have, where inputs are texts."""
        return self.info.max_tokens if self.info is not None else None

    def loaded(self) -> OneShotInfo:
        """What is known of the model. Raises Unavailable while it takes no requests."""
        if self.info is None or not self.ready:
            failure = f": {self.failure}" if self.failure else ""
            raise Unavailable(f"the model `{self.name}` is {self.state}{failure}")
        return self.info

    def _open_line(self) -> Line:
        self.loaded()
        assert self._line is not None, "whoever is ready has a line"
        return self._line

    async def infer(
        self,
        payloads: Sequence[Any],
        *,
        sizes: Sequence[float] | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[Answer]:
        """An answer for each payload, or the first error; then, as when the caller is cancelled, no other goes on.

        Raises InvalidRequest, QueueFull, Unavailable, DeadlineExceeded or RequestFailed.
        """
        info = self.loaded()
        if len(payloads) > self.capacity:
            message = f"{len(payloads)} inputs are more than the queue of {self.capacity} holds (max_waiting)"
            raise InvalidRequest(message)
        futures: list[asyncio.Future[Answer]] = []
        submit = self._open_line().submit
        try:
            for index, payload in enumerate(payloads):
                size = 1.0 if sizes is None else sizes[index]
                key = _shape_key(payload) if info.shape_keys else None
                futures.append(submit(payload, size=size, shape_key=key, priority=priority, timeout=timeout))
            answers = [await futures[0]] if len(futures) == 1 else await asyncio.gather(*futures)
        except BaseException as error:
            self.metrics.on_failure(error, len(payloads))
            for future in futures:
                future.cancel()
            raise
        self.metrics.on_answers(answers)
        return answers

    async def stream(
        self, payloads: Sequence[Any], *, priority: int = 0, timeout: float | None = None
    ) -> AsyncGenerator[tuple[int, Any], None]:
        """The parts of a streaming model's results as they come, each with its payload's index. Raises as `infer`."""
        submit = self._open_line().submit
        events: asyncio.Queue[tuple[int, Any] | asyncio.Future[Answer]] = asyncio.Queue()
        futures: list[asyncio.Future[Answer]] = []
        left = len(payloads)
        try:
            for index, payload in enumerate(payloads):
                on_part = functools.partial(_put_part, events, index)
                futures.append(submit(payload, priority=priority, timeout=timeout, on_part=on_part))
                futures[-1].add_done_callback(events.put_nowait)
            while left:
                event = await events.get()
                if isinstance(event, asyncio.Future):
                    self.metrics.on_answers([event.result()])
                    left -= 1
                else:
                    yield event
        except BaseException as error:
            self.metrics.on_failure(error, left)
            raise
        finally:
            for future in futures:
                future.cancel()


def _put_part(events: "asyncio.Queue[Any]", index: int, part: Any) -> None:
    events.put_nowait((index, part))


def _shape_key(payload: Any) -> Hashable:
    """Equal for payloads whose arrays can be stacked."""
    if isinstance(payload, np.ndarray):
        return tuple(payload.shape)
    if isinstance(payload, dict):
        return tuple((name, value.shape) for name, value in sorted(payload.items()) if isinstance(value, np.ndarray))
    return None
