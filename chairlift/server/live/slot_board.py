"""Who had which slot when: the picture of a model's last minute, a row a slot, a bar a request."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter

import msgspec

# Bars are shown for so long after their end, and of one model so many of those that have ended.
SHOWN_S = 60.0
MOST_BARS = 1000
# A slot that one request leaves and the next takes is told with moments that may differ by so much.
_SAME_S = 0.01
_INF = float("inf")


class Bar(msgspec.Struct, array_like=True):
    """One request's time in a slot, in seconds of CLOCK_MONOTONIC; `end` and `first_token` are None until they come.

    A call for items is a bar as well: `id` is that of its first item, `count` how many it has. `owner` is the tenant of
    a request, `finish_reason` how it ended.
    """

    id: str
    slot: int
    start: float
    first_token: float | None = None
    end: float | None = None
    background: bool = False
    count: int = 1
    owner: str | None = None
    finish_reason: str | None = None


class SlotBoard:
    """Gives every request a row. Which one is the board's choice: to a scheduler all slots of a model are alike.

    Unless it `chooses`, a bar has the slot that it comes with. Bars of one `key` are of the same request, or call.
    """

    def __init__(self, num_slots: int, key: Callable[[Bar], Hashable] = attrgetter("id"), chooses: bool = True) -> None:
        self._key, self._chooses = key, chooses
        self._until = dict.fromkeys(range(num_slots), -_INF)
        self._live: dict[Hashable, Bar] = {}
        self._ended: deque[Bar] = deque()
        self._ended_keys: set[Hashable] = set()

    @property
    def bars(self) -> list[Bar]:
        """All that are shown."""
        return [*self._ended, *self._live.values()]

    def update(self, live: Sequence[Bar], ended: Sequence[Bar], now: float) -> list[Bar]:
        """Take in who runs and who ended lately, of which some may be known; return what is new, then what has changed.

        Who ran before and is not there any more, or started anew, has given the slot up.
        """
        key = self._key
        running, over = {key(bar): bar for bar in live}, {key(bar): bar for bar in ended}
        changed = []
        for bar in list(self._live.values()):
            again = running.get(key(bar))
            if again is not None and again.start == bar.start:
                if again.first_token == bar.first_token:
                    continue
                bar.first_token = again.first_token
            else:
                self._end(bar, over.get(key(bar)), now)
            changed.append(bar)
        new = [bar for bar in over.values() if key(bar) not in self._ended_keys]
        new += [bar for bar in running.values() if key(bar) not in self._live]
        for bar in sorted(new, key=lambda each: each.start):
            self._place(bar)
        self._forget(now)
        return new + changed

    def _end(self, bar: Bar, known: Bar | None, now: float) -> None:
        bar.end = now
        if known is not None:
            bar.first_token, bar.end, bar.finish_reason = known.first_token, known.end, known.finish_reason
        del self._live[self._key(bar)]
        self._until[bar.slot] = bar.end or now
        self._keep(bar)

    def _place(self, bar: Bar) -> None:
        if self._chooses:
            bar.slot = self._free_slot(bar.start)
        self._until[bar.slot] = _INF if bar.end is None else bar.end
        if bar.end is None:
            self._live[self._key(bar)] = bar
        else:
            self._keep(bar)

    def _free_slot(self, start: float) -> int:
        """The first slot that was free by then, or else the one that was left first."""
        for slot, until in self._until.items():
            if until <= start + _SAME_S:
                return slot
        slot = min(self._until, key=self._until.__getitem__)
        # Where all are taken, more run than there are slots, as far as one could see.
        return len(self._until) if self._until[slot] == _INF else slot

    def _keep(self, bar: Bar) -> None:
        self._ended.append(bar)
        self._ended_keys.add(self._key(bar))

    def _forget(self, now: float) -> None:
        while self._ended and ((self._ended[0].end or 0.0) < now - SHOWN_S or len(self._ended) > MOST_BARS):
            self._ended_keys.discard(self._key(self._ended.popleft()))
