"""Forecasts of a queue, kept for a while: of all of it, into whose middle others come, and of its head."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from math import inf
from operator import attrgetter
from typing import Generic, TypeVar

from chairlift.core.queue import HasRank, Rank
from chairlift.core.sequences.forecast import Expected, Forecast

_rank = attrgetter("rank")
# From so many to so many in the queue there is a mark: a forecast to go on from.
_STRIDE = 32

W = TypeVar("W", bound=HasRank)


class _Mark(Generic[W]):
    """A forecast that has all up to a rank. Those in `pending` came later and go before; they are yet to be let in."""

    __slots__ = ("forecast", "pending", "rank")

    def __init__(self, rank: Rank, forecast: Forecast) -> None:
        self.rank = rank
        self.forecast = forecast
        self.pending: list[W] = []


class Outlook(Generic[W]):
    """Forecasts along a queue, from `forecast`, which has those who need not wait. `admit` lets one more in.

    Whoever comes is added as they come, and whoever leaves stays in it: it is good for a moment, and made anew then.
    Looking at a place in the queue takes a few dozen admissions, wherever that is.
    """

    def __init__(self, forecast: Forecast, admit: Callable[[Forecast, W], object]) -> None:
        self._admit = admit
        self._line: list[W] = []
        self._marks: list[_Mark[W]] = [_Mark((-inf, 0), forecast)]
        # How many there are from the last mark but one to the last, which is the end.
        self._since = _STRIDE

    def before(self, rank: Rank) -> Forecast:
        """Return a forecast up to the last who goes before a rank; it is the caller's."""
        line, mark = self._line, self._marks[bisect_right(self._marks, rank, key=_rank) - 1]
        for each in mark.pending:
            self._admit(mark.forecast, each)
        mark.pending.clear()
        forecast = mark.forecast.copy()
        for each in line[bisect_right(line, mark.rank, key=_rank) : bisect_left(line, rank, key=_rank)]:
            self._admit(forecast, each)
        return forecast

    def end(self) -> Forecast:
        """Return a forecast up to the last of all; it is the caller's."""
        return self.before((inf, 0))

    def add(self, coming: Sequence[W], forecast: Forecast) -> None:
        """Have some join the line. The `forecast` is what `before` said of the first, with all of them let in."""
        line, marks = self._line, self._marks
        behind = len(marks)
        if coming[0].rank > marks[-1].rank:
            if self._since < _STRIDE:
                behind -= 1  # the end itself goes on
            else:
                marks.append(_Mark(marks[-1].rank, forecast))
                self._since = 0
            end = marks[-1]
            end.forecast, end.rank = forecast, max(each.rank for each in coming)
            # Those who come together need not stand together.
            between = slice(*(bisect_right(line, rank, key=_rank) for rank in (coming[0].rank, end.rank)))
            end.pending += line[between]
            self._since += len(coming)
        for each in coming:
            insort(line, each, key=_rank)
            for mark in marks[bisect_right(marks, each.rank, key=_rank, hi=behind) : behind]:
                mark.pending.append(each)


class QueueHead(Generic[W]):
    """When the first of a queue are expected, from `forecast`, which has those who run. `admit` lets one more in.

    It goes as far as somebody asks, and keeps what it found. Like an outlook it is good for a moment after `made`.
    """

    def __init__(
        self, made: float, forecast: Forecast, line: Iterable[W], admit: Callable[[Forecast, W], Expected]
    ) -> None:
        self.made = made
        self.forecast = forecast
        # Seconds that each token of those takes who run.
        self.pace = forecast.pace
        self._admit = admit
        self._line = iter(line)
        self._found: dict[Rank, Expected] = {}

    @property
    def num_admitted(self) -> int:
        """How many it has looked at."""
        return len(self._found)

    def expected(self, rank: Rank) -> Expected | None:
        """Return when one is expected; None of one that is further back, or that came later."""
        found = self._found
        while rank not in found and (following := next(self._line, None)) is not None:
            found[following.rank] = self._admit(self.forecast, following)
        return found.get(rank)
