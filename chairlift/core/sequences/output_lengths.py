"""How long answers become, learned from those that ended: what is still to come, given what there is."""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Hashable
from math import expm1, log1p

# Ends of the bins, in tokens: each length up to 8, then four to an octave.
_QUARTERS = [(1 << power) * quarter // 4 for power in range(3, 21) for quarter in range(5, 9)]
_ENDS: tuple[int, ...] = (*range(1, 9), *_QUARTERS)
_STARTS: tuple[int, ...] = (0, *_ENDS[:-1])
_WIDTHS: tuple[int, ...] = tuple(end - start for start, end in zip(_STARTS, _ENDS, strict=True))
# A bin remembers about so many of those that came through it.
_KEEP = 1 - 1 / 256
# Before anything is known: so many tokens, since nobody is refused on a guess. It counts as one, less in wide bins. A
# mean that somebody has named counts as more.
_FIRST_MEAN = 64.0
_FIRST_TOKENS, _FIRST_COUNT, _NAMED_COUNT = 32, 1.0, 16.0
# What is known of all counts like so many of a group's own.
_GROUP_TOKENS, _GROUP_COUNT = 64, 4.0
# A group takes over what is new about all after so many of them.
_CATCH_UP = 16
_MOST_CHANCE = 0.999


class LengthCurve:
    """The chance that an answer which has come so far ends within the next tokens, in bins (Kaplan and Meier 1958).

    Answers that `max_tokens` cut short tell that they were longer: they count as far as they came. A bin forgets as
    others come through it, so changes are followed, and what is rare is kept. Until a bin has seen enough, it is as
    that of `others`, or as if lengths were exponential with a mean that somebody has named.
    """

    def __init__(self, others: "LengthCurve | None" = None, mean: float | None = None) -> None:
        self.num_observed = 0
        self._others = others
        self._mean, self._count = (_FIRST_MEAN, _FIRST_COUNT) if mean is None else (mean, _NAMED_COUNT)
        self._ended = [0.0] * len(_ENDS)
        self._passed = [0.0] * len(_ENDS)
        self._hazards: list[float] = []
        self._before: list[float] = []
        self._known = (-1, -1)

    def observe(self, length: int, ended: bool) -> None:
        """Take in an answer of so many tokens, which ended by itself or was cut off there."""
        if length < 1:
            return
        self.num_observed += 1
        last = min(bisect_left(_ENDS, length), len(_ENDS) - 1)
        ends, passed = self._ended, self._passed
        for index in range(last + 1):
            ends[index] *= _KEEP
            passed[index] = passed[index] * _KEEP + 1
        ends[last] += ended
        if not ended:
            passed[last] -= max(_ENDS[last] - length, 0) / _WIDTHS[last]

    def length(self, made: int, share: float) -> float:
        """Return the length that this share of those with `made` tokens do not exceed; more than `made`."""
        self._update()
        start = bisect_right(_STARTS, made) - 1
        wanted = self._before[start] + (made - _STARTS[start]) * self._hazards[start] - log1p(-share)
        index = bisect_right(self._before, wanted) - 1
        return max(_STARTS[index] + (wanted - self._before[index]) / self._hazards[index], made + 1.0)

    def chance(self, index: int) -> float:
        """Return the chance that an answer which has come to a bin ends in it."""
        width = _WIDTHS[index]
        if self._others is None:
            known, weight = -expm1(-width / self._mean), min(_FIRST_TOKENS / width, 1.0) * self._count
        else:
            known, weight = self._others.chance(index), min(_GROUP_TOKENS / width, 1.0) * _GROUP_COUNT
        return min((self._ended[index] + weight * known) / (self._passed[index] + weight), _MOST_CHANCE)

    def _update(self) -> None:
        """Sum up the chances, if they have changed."""
        others = self._others.num_observed // _CATCH_UP if self._others is not None else 0
        if self._known == (self.num_observed, others):
            return
        self._known = self.num_observed, others
        self._hazards = [-log1p(-self.chance(index)) / width for index, width in enumerate(_WIDTHS)]
        self._before, total = [], 0.0
        for hazard, width in zip(self._hazards, _WIDTHS, strict=True):
            self._before.append(total)
            total += hazard * width


class OutputLengths:
    """A curve for each group of requests that are alike, for the `most` that were heard of last, and one for all."""

    def __init__(self, mean: float | None = None, most: int = 256) -> None:
        self.all = LengthCurve(mean=mean)
        self._most = most
        self._groups: OrderedDict[Hashable, LengthCurve] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def of(self, group: Hashable) -> LengthCurve:
        """Return what is known of a group, or of all if it is not known."""
        return self._groups.get(group, self.all)

    def observe(self, group: Hashable, length: int, ended: bool) -> None:
        """Take in an answer."""
        self.all.observe(length, ended)
        curve = self._groups.get(group)
        if curve is None:
            curve = self._groups[group] = LengthCurve(self.all)
            if len(self._groups) > self._most:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        curve.observe(length, ended)
