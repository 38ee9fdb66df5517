"""Who of those who wait goes into the batch that leaves now."""

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import inf
from operator import attrgetter
from typing import NamedTuple

from chairlift.core.items.learned import LinearCost
from chairlift.core.items.waiting import WaitingItem

# What losing an item counts, in items answered. Smaller batches save those who are nearly too late, and full ones give
# the most answers under overload. Simulated with 8 + 0.25 b and 1 + 4 b ms a batch (benchmarks/dynamic): 0 loses 3% of
# the rate at which 99% are in time, and 0.4 loses 1% of the answers at 130% load.
_LOSS = 0.2
# Before anything is known of a runner that pads: a call costs as much as so many items.
_GUESSED_ITEMS = 8.0
# Equal predictions may differ in their last digits.
_EPSILON = 1e-9
_size = attrgetter("item.size")


class BatchCapacity(NamedTuple):
    """What a batch may hold: items, and computed size. One item alone may be larger."""

    items: int
    size: float = inf


class Rules(NamedTuple):
    """Whether the runner pads, and in how many batches at most later ones may be before somebody."""

    pads: bool
    max_passed_over: int


class Formed(NamedTuple):
    """The batch, what the runner computes for it, and who of the window would have been late in it."""

    chosen: list[WaitingItem]
    computed: float
    late: list[WaitingItem]


def form(window: list[WaitingItem], capacity: BatchCapacity, time: LinearCost, rules: Rules, now: float) -> Formed:
    """Choose the batch that leaves at `now` from the window, which is in order of rank.

    First comes how much the batch may hold, which says how long it takes; whoever has less time than that stays out.
    Then all are taken in order, or where the runner pads, the most urgent and others of like length. Nobody is taken
    before one that stays behind and has been passed over as often as is allowed. Nobody is chosen only if everyone is
    too late already.
    """
    eligible: list[WaitingItem] = window
    late: list[WaitingItem] = []
    if any(waiter.item.deadline is not None for waiter in window):
        slacks = [inf if w.item.deadline is None else w.item.deadline - now + _EPSILON for w in window]
        hopeful = [(w, s) for w, s in zip(window, slacks, strict=True) if s >= time.seconds(w.item.size)]
        if not hopeful:
            return Formed([], 0.0, window)
        capacity = _best_capacity(hopeful, capacity, time, rules)
        eligible = [w for w, s in hopeful if s >= time.seconds(max(capacity.size, w.item.size))]
        staying = {w.rank[1] for w in eligible}
        late = [w for w in window if w.rank[1] not in staying]
    return Formed(*fill(eligible, capacity, time, rules), late)


def fill(
    eligible: list[WaitingItem], capacity: BatchCapacity, time: LinearCost, rules: Rules
) -> tuple[list[WaitingItem], float]:
    """Choose without a look at deadlines; return who goes, and what the runner computes for them."""
    return _alike(eligible, capacity, time, rules) if rules.pads else _in_order(eligible, capacity, rules)


def _best_capacity(
    hopeful: list[tuple[WaitingItem, float]], capacity: BatchCapacity, time: LinearCost, rules: Rules
) -> BatchCapacity:
    """Limit the capacity so that the most are answered in time for each second, a loss counting as a part of an answer.

    Lost is who has less time than the batch takes, or who stays behind with less than the next one takes as well.
    """
    slacks = sorted(slack for _, slack in hopeful)
    sizes = [waiter.item.size for waiter, _ in hopeful[: capacity.items]]
    if rules.pads:
        computed = [longest * (i + 1) for i, longest in enumerate(accumulate(sizes, max))]
    else:
        computed = list(accumulate(sizes))
    following = time.seconds(sum(sizes) / len(sizes))
    best, limit = -inf, computed[0]
    for count, size in enumerate(computed, 1):
        seconds = time.seconds(size)
        too_late = bisect_left(slacks, seconds)
        if count > 1 and (size > capacity.size or len(slacks) - too_late < count):
            break
        lost = max(too_late, bisect_left(slacks, seconds + following) - count)
        score = (count - _LOSS * lost) / seconds if seconds > 0 else count
        if score >= best:
            best, limit = score, size
    return BatchCapacity(capacity.items, limit)


def _in_order(eligible: list[WaitingItem], capacity: BatchCapacity, rules: Rules) -> tuple[list[WaitingItem], float]:
    """Take them by rank; whoever is too large for what is left is passed over."""
    chosen: list[WaitingItem] = []
    total = 0.0
    for waiter in eligible:
        if len(chosen) == capacity.items:
            break
        size = waiter.item.size
        if not chosen or total + size <= capacity.size:
            chosen.append(waiter)
            total += size
        elif waiter.passed_over >= rules.max_passed_over:
            break
    return chosen, total


def _alike(
    eligible: list[WaitingItem], capacity: BatchCapacity, time: LinearCost, rules: Rules
) -> tuple[list[WaitingItem], float]:
    """Take the first, whoever may not be passed over again, and those of like length that make the best use of time.

    Best is the most size for each second, padding included. The others are neighbours by length, so all there is to
    choose is how many that are longer than the first ones, and how many that are not.
    """
    anchors, rest = [eligible[0]], []
    longest = eligible[0].item.size
    for waiter in eligible[1:]:
        if waiter.passed_over < rules.max_passed_over:
            rest.append(waiter)
            continue
        if len(anchors) == capacity.items or max(longest, waiter.item.size) * (len(anchors) + 1) > capacity.size:
            return anchors, longest * len(anchors)
        anchors.append(waiter)
        longest = max(longest, waiter.item.size)
    rest.sort(key=_size)
    sizes = [waiter.item.size for waiter in rest]
    sums = [0.0, *accumulate(sizes)]
    middle = bisect_right(sizes, longest)
    useful = sum(waiter.item.size for waiter in anchors)
    call, each = time if time.call > 0 or time.size > 0 else (_GUESSED_ITEMS * useful / len(anchors), 1.0)
    best, low, high, computed = -inf, middle, middle, longest * len(anchors)
    for end in range(middle, min(len(rest), middle + capacity.items - len(anchors)) + 1):
        top = sizes[end - 1] if end > middle else longest
        free = int(min(capacity.size / top, capacity.items)) - len(anchors) - (end - middle)
        shorter = min(free, middle)
        while shorter >= 0:
            size = top * (len(anchors) + end - middle + shorter)
            rate = (useful + sums[end] - sums[middle - shorter]) / (call + each * size)
            if rate > best:
                best, low, high, computed = rate, middle - shorter, end, size
            shorter = shorter // 2 if shorter else -1
    return anchors + rest[low:high], computed
