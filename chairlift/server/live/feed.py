"""One stream of messages for all who watch: made a few times a second, once, and only while somebody watches."""

import asyncio
import logging
from collections.abc import Callable

from chairlift.errors import Unavailable
from chairlift.server.http.api_errors import try_later
from chairlift.server.http.exchange import encode_line
from chairlift.server.live.snapshot import Observer, Snapshot

log = logging.getLogger(__name__)

MOST_WATCHERS = 16
_PERIOD_S, _RETRY_S = 0.35, 5
# A watcher that has so many messages unread gets one that tells all instead.
_MOST_UNREAD = 4


class Watcher:
    """Iterates over messages, as they come, until it is closed or the server leaves; `most` of them, 0 for ever."""

    def __init__(self, feed: "LiveFeed", most: int = 0) -> None:
        self.unread: list[bytes] = []
        # Whether it has yet to be told all, at first or because it was not.
        self.is_new = True
        self.ended = False
        self._feed = feed
        self._left = most
        self._woken = asyncio.Event()

    def __aiter__(self) -> "Watcher":
        return self

    async def __anext__(self) -> bytes:
        while not self.unread:
            if self.ended:
                raise StopAsyncIteration
            self._woken.clear()
            await self._woken.wait()
        message = self.unread.pop(0)
        self._left -= 1
        if self._left == 0:
            self.close()
            self.unread.clear()
        return message

    def close(self) -> None:
        """Watch no longer."""
        self._feed.leave(self)
        self.end()

    def end(self) -> None:
        """Nothing more comes."""
        self.ended = True
        self._woken.set()

    def push(self, message: bytes) -> None:
        """Hand over a message; one too many takes the place of all."""
        self.is_new = len(self.unread) >= _MOST_UNREAD
        if self.is_new:
            self.unread.clear()
        else:
            self.unread.append(message)
        self._woken.set()


class LiveFeed:
    """All who watch one server. Where nobody does nothing is kept, and nothing runs.

    `observer` makes what looks; its first look is of the last minute. All calls belong to one event loop.
    """

    def __init__(self, observer: Callable[[], Observer]) -> None:
        self.watchers: set[Watcher] = set()
        self.task: asyncio.Task[None] | None = None
        self._observer = observer
        self._closed = False

    def watch(self, most: int = 0) -> Watcher:
        """Begin to watch, for so many messages or, with 0, until the watcher is closed.

        Raises ApiError (429) where too many watch, or Unavailable where the server is about to leave.
        """
        if self._closed:
            raise Unavailable("the server is about to leave")
        if len(self.watchers) >= MOST_WATCHERS:
            message = f"{MOST_WATCHERS} watch this server already, which is the limit; try again"
            raise try_later(message, "too_many_watchers", _RETRY_S)
        watcher = Watcher(self, most)
        self.watchers.add(watcher)
        if self.task is None:
            self.task = asyncio.get_running_loop().create_task(self._run(), name="live feed")
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Let a watcher go; the last one ends the task."""
        self.watchers.discard(watcher)
        if not self.watchers and self.task is not None:
            self.task.cancel()
            self.task = None

    def close(self) -> None:
        """End all streams, and begin no other."""
        self._closed = True
        for watcher in list(self.watchers):
            watcher.close()

    async def _run(self) -> None:
        try:
            observer = self._observer()
            while True:
                self._tell(observer)
                await asyncio.sleep(_PERIOD_S)
        except Exception:
            log.exception("what the live page shows can't be put together")
            for watcher in list(self.watchers):
                watcher.close()

    def _tell(self, observer: Observer) -> None:
        snapshot = observer.look()
        changes = whole = b""
        for watcher in list(self.watchers):
            if watcher.is_new:
                whole = whole or _event(observer.with_all_bars(snapshot))
                watcher.push(whole)
            else:
                changes = changes or _event(snapshot)
                watcher.push(changes)
                watcher.is_new |= observer.needs_full


def _event(snapshot: Snapshot) -> bytes:
    return b"data: " + encode_line(snapshot) + b"\n\n"
