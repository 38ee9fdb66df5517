"""What comes for the streams of one request, as its reader gets it."""

import asyncio
from collections.abc import Sequence

from chairlift.engine.sequences.client import AtOnce, Stream
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.errors import QueueFull

# Updates that are read at once: what is made of them must not keep others waiting for long.
MOST_AT_ONCE = 256
# About what an update takes in memory, and in it a token and a log-probability.
_UPDATE_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES = 300, 36, 140


class Updates:
    """Reads streams together: iterating gives what has come for them since, each update with its stream's index.

    Of what is more than `MOST_AT_ONCE`, some for each stream in turn. Raises the error of a stream that has one, once
    all that came before has been read. Of a single stream, while somebody waits, `at_once` is offered first what comes
    before the end, one update at a time: to wake a task takes longer than most have to do. What it raises is raised
    here.

    Whoever leaves more than `most_unread` bytes of them unread, about, while doing something else than to wait for
    more, gets no more: they are dropped, the requests cancelled, and QueueFull is raised. None is any number of bytes.
    """

    def __init__(
        self, streams: Sequence[Stream], at_once: AtOnce | None = None, most_unread: int | None = None
    ) -> None:
        self._streams = streams
        self._at_once = at_once if len(streams) == 1 else None
        self._most_unread, self._unread = most_unread, 0
        self._error: Exception | None = None
        self._wake: asyncio.Future[None] | None = None
        # The stream that is looked at first, and whether there was too much for one time.
        self._first, self._has_more = 0, False
        for stream in streams:
            stream.on_change = self._notify
            if most_unread is not None:
                stream.on_update = self._count

    def __aiter__(self) -> "Updates":
        return self

    async def __anext__(self) -> list[tuple[int, SequenceUpdate]]:
        if self._has_more:
            # Or the reader of what has piled up might go on without a pause till the end.
            await asyncio.sleep(0)
        while self._error is None:
            if group := self._take():
                return group
            if self._error is None:
                if all(stream.done for stream in self._streams):
                    raise StopAsyncIteration
                await self._wait()
        raise self._error

    def _take(self) -> list[tuple[int, SequenceUpdate]]:
        """What is read now, and the error where a stream has one and nothing is left unread."""
        group: list[tuple[int, SequenceUpdate]] = []
        count, first = len(self._streams), self._first
        error: Exception | None = None
        self._first, self._has_more = 0, False
        for index in (*range(first, count), *range(first)):
            stream = self._streams[index]
            if stream.updates:
                room = MOST_AT_ONCE - len(group)
                group += [(index, update) for update in stream.updates[:room]]
                del stream.updates[:room]
                if len(group) == MOST_AT_ONCE:
                    self._first, self._has_more = (index + 1) % count, True
                    break
            error = error or stream.error
        else:
            self._error = error
        if self._unread:
            self._unread = max(self._unread - sum(_bytes_of(update) for _, update in group), 0)
        return group

    async def _wait(self) -> None:
        self._wake, self._unread = asyncio.get_running_loop().create_future(), 0
        self._offer(self._at_once)
        try:
            await self._wake
        finally:
            self._wake = None
            self._offer(None)

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._offer(None)
            self._wake.set_result(None)

    def _offer(self, at_once: AtOnce | None) -> None:
        if self._at_once is not None:
            self._streams[0].at_once = at_once

    def _count(self, update: SequenceUpdate) -> None:
        """Hear of an update that is to be read. However large, one that finds nothing unread may wait."""
        if self._wake is not None:
            return  # the reader takes it as soon as it runs
        most, size = self._most_unread, _bytes_of(update)
        if most is None or not self._unread or self._unread + size <= most:
            self._unread += size
            return
        problem = f"the client left more than {most} bytes of its stream unread, so it ends here"
        self._error = QueueFull(f"{problem}; read faster, or ask for less at once", 1.0)
        for stream in self._streams:
            stream.updates.clear()
            stream.give_up(self._error)


def _bytes_of(update: SequenceUpdate) -> int:
    """About what it takes in memory; all log-probabilities of a request come with as many others."""
    size = _UPDATE_BYTES + _TOKEN_BYTES * len(update.token_ids)
    for entries in (update.logprobs, update.prompt_logprobs):
        if entries:
            size += _LOGPROB_BYTES * len(entries) * (1 + len(entries[-1].top))
    return size
