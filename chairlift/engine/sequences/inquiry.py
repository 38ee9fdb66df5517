"""What people ask a worker about its requests: put together, so that it is asked little, whoever asks how often."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from chairlift.core.sequences.standing import Standing
from chairlift.engine.sequences.messages import Explain

# Of those asked for at once so many are looked for, and a worker has so many seconds of peace after each answer.
_MOST_ASKED = 512
_PAUSE_S = 0.1
# A worker answers between two steps. Whoever asks does not wait for a longer one.
_PATIENCE_S = 2.0


class Inquiry:
    """Asks a worker where requests are, one question at a time. All calls belong to one event loop."""

    def __init__(self, send: Callable[[Explain], None]) -> None:
        self._send = send
        self._wanted: dict[str, None] = {}
        self._next: asyncio.Future[Mapping[str, Standing]] | None = None
        self._asked: asyncio.Future[Mapping[str, Standing]] | None = None
        self._pauses = False

    async def ask(self, request_ids: Iterable[str]) -> Mapping[str, Standing]:
        """Return where requests are. Those are missing that the worker does not know, or does not say in time."""
        self._wanted.update(dict.fromkeys(request_ids))
        answer = self._next
        if answer is None:
            answer = self._next = asyncio.get_running_loop().create_future()
        self._begin()
        await asyncio.wait([answer], timeout=_PATIENCE_S)
        return answer.result() if answer.done() else {}

    def answered(self, found: Iterable[Standing]) -> None:
        """Hear what the worker says."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.set_result({each.id: each for each in found})
            self._pauses = True
            asked.get_loop().call_later(_PAUSE_S, self._resume)

    def lost(self) -> None:
        """Hear that the worker is gone: whoever asked gets nothing."""
        for each in (self._asked, self._next):
            if each is not None:
                each.set_result({})
        self._asked = self._next = None
        self._wanted.clear()

    def _begin(self) -> None:
        if self._next is None or self._asked is not None or self._pauses:
            return
        self._asked, self._next = self._next, None
        wanted, self._wanted = self._wanted, {}
        self._send(Explain(list(islice(wanted, _MOST_ASKED))))

    def _resume(self) -> None:
        self._pauses = False
        self._begin()
