"""Who is let in while more come than can be served in time: those whose first token will be there within a target.

Requests past capacity would wait longer and longer, until none of them is in time. So whoever would come too late is
refused at once, with the time after which it would not. How sure one must be to come in time follows from how many are
refused: a place that a request takes in vain could have been that of one that is refused, if there is one.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from math import exp, inf, log
from operator import attrgetter
from typing import NamedTuple

from chairlift.core.cost import Coefficients
from chairlift.core.finished import Shed, ShedReason
from chairlift.core.queue import QueueOrder
from chairlift.core.sequences.forecast import Expected, Forecast, StepLimits
from chairlift.core.sequences.live_progress import LiveProgress
from chairlift.core.sequences.outlook import Outlook, QueueHead
from chairlift.core.sequences.output_lengths import OutputLengths
from chairlift.core.sequences.ratio_band import RatioBand
from chairlift.core.sequences.request import Request

# A first token is promised by when 98 of 100 came; it is likely by when half of them came.
_PROMISED, _LIKELY = 0.98, 0.5
# By how much one that comes later, or sooner, moves that, and how far it may move.
_RATIO_STEP, _MOST_RATIO = 0.05, 8.0
# Weight of each request that comes in the share that was refused lately.
_LATELY = 1 / 50
# From this share on a first token must be promised. While nobody is refused it need only be likely, and for shares in
# between the bound lies between the two.
_SATURATED = 0.3
# A wait below this share of the target never matters, whatever the ratio of expected to actual.
_NEGLIGIBLE = 0.05
# Where there is no target, one below so many seconds.
_NEGLIGIBLE_SECONDS = 0.1
# Whoever waits is given up when likely to be later than the target by this: a little late is better than refused late.
_HOPELESS = 1.1
# A forecast is used for so many seconds.
_FRESH_SECONDS = 0.05
# It is used for this share of the target, if that is shorter.
_FRESH = 0.025
# Making one takes up to so many seconds for each request that waits, and for each time that steps go by.
_ADMISSION_SECONDS, _PASS_SECONDS = 3e-5, 5e-6
# It is used for at least so many times as long as it took to make.
_REST = 10
# What is known of so many ends is learned at the next forecast; of more, only the last.
_MOST_ENDS = 1024
_CACHED_STEP = 0.05
# For people who ask: what a band leaves out at either end, how much must have been seen before there is one, and how
# far into the queue is looked.
_BAND = 0.05
_LEAST_COMPARED, _LEAST_ENDS = 20, 8
_MOST_FORESEEN = 128


class RatioQuantile:
    """Follows a quantile of actual over expected times, by stochastic approximation (Robbins and Monro 1951)."""

    def __init__(self, quantile: float) -> None:
        self.value = 1.0
        self._quantile = quantile

    def observe(self, ratio: float) -> None:
        """Take in a ratio."""
        above = ratio > self.value
        moved = self.value * (1 + _RATIO_STEP * (self._quantile - (not above)))
        self.value = min(max(moved, 1 / _MOST_RATIO), _MOST_RATIO)


class ForeseenMoment(NamedTuple):
    """When something is expected, on the caller's clock: at `expected`, and in 9 of 10 cases from `early` to `late`.

    Both are None as long as too little was seen to tell.
    """

    expected: float
    early: float | None = None
    late: float | None = None


class Foreseen(NamedTuple):
    """What is expected of a live request: None where nothing is known, and of what lies behind it."""

    start: ForeseenMoment | None = None
    first: ForeseenMoment | None = None
    end: ForeseenMoment | None = None


_rank = attrgetter("rank")


def _rest(admissions: int, passes: int) -> float:
    """For how many seconds to use what so many admissions found, in which steps went by so often."""
    return _REST * (_ADMISSION_SECONDS * admissions + _PASS_SECONDS * passes)


class LoadShedder:
    """Admits live requests to one model by when they will have their first tokens and, with a deadline, their last.

    Pure: `now` comes in, in seconds on the caller's clock. It hears of each request that comes, has its first token and
    ends, and of the steps in between; who runs and for how long, it predicts (`Forecast`) from `limits` and `cost`,
    which are None until they are known, and from the lengths of the answers that ended (`OutputLengths`): until some
    have, as if they were of `expected_output` tokens on average. What was expected is compared with what came, so
    systematic errors correct themselves. Whoever finds a free slot and nobody waiting is never refused, so a wrong
    prediction is always put to the test. `target` is in seconds; without one only deadlines count. Background requests
    have no place here: they yield.
    """

    def __init__(
        self, target: float | None = None, order: QueueOrder | None = None, expected_output: float | None = None
    ) -> None:
        self.target = target
        self.order = order or QueueOrder()
        self.limits: StepLimits | None = None
        self.cost: Coefficients | None = None
        self.lengths = OutputLengths(expected_output)
        self.promised, self.likely = RatioQuantile(_PROMISED), RatioQuantile(_LIKELY)
        self._band = RatioBand(_BAND)
        self.num_shed: Counter[ShedReason] = Counter()
        self._negligible = _NEGLIGIBLE_SECONDS if target is None else _NEGLIGIBLE * target
        self._fresh = _FRESH_SECONDS if target is None else min(_FRESH_SECONDS, _FRESH * target)
        self._live: dict[str, LiveProgress] = {}
        self._waiting: list[LiveProgress] = []
        self._ends: deque[tuple[Hashable, int, bool]] = deque(maxlen=_MOST_ENDS)
        self._cached = 0.0
        self._steps = 0
        self._serial = 0
        self._deadlines = 0
        self._refused = 0.0
        self._outlook: Outlook[LiveProgress] | None = None
        self._head: QueueHead[LiveProgress] | None = None
        self._stale_at = -inf

    @property
    def num_waiting(self) -> int:
        """Requests that have no token yet."""
        return len(self._waiting)

    # What the engine's front tells

    def arrive(
        self, requests: Sequence[Request], now: float, group: Hashable = None, deadline: float | None = None
    ) -> None:
        """Take in requests that belong together, all or none. Raises Shed if they would be too late.

        The first of them counts for the target, the last for the deadline. Those of a `group` have answers of like
        length. `deadline` is on the caller's clock.
        """
        coming = [self._coming(each, group, deadline, each is requests[0]) for each in requests]
        if (self.target is not None or deadline is not None) and not self._finds_slot():
            self._expect(coming, now, deadline)
        self._refused -= _LATELY * self._refused
        for live in coming:
            self._live[live.request.id] = live
            insort(self._waiting, live, key=_rank)
            self._deadlines += deadline is not None

    def check(self, priority: int, now: float) -> None:
        """Raise Shed if a request that comes now would be too late even with a prompt of one token."""
        if self.target is None or self.limits is None or self.cost is None or self._finds_slot():
            return
        moment = self.order.moment(now, priority, 2)
        if not self._waiting or moment >= self._waiting[-1].rank[0]:
            self._check_target(self._least_wait(now), 1)

    def moved(self, begun: Iterable[str], preempted: Iterable[str]) -> None:
        """Hear who took a slot in a step, and who had given one up before; any that are not here are passed over.

        This comes before `stepped` says how many steps there were with that one.
        """
        for names, has_slot in ((preempted, False), (begun, True)):
            for name in names:
                if name in self._live:
                    self._live[name].move(has_slot, self._steps)

    def started(self, request_id: str, steps: int, num_cached_tokens: int, now: float) -> None:
        """Hear that a request had its first token in the last of so many steps, and how much was cached."""
        live = self._live.get(request_id)
        if live is None or live.since is not None:
            return
        self._leave_queue(live)
        live.since = steps
        self._cached += _CACHED_STEP * (num_cached_tokens / len(live.request.prompt_ids) - self._cached)
        self._compare(live, now - live.request.arrival)
        if live.foreseen is not None:
            asked, wait = live.foreseen
            self._see(now - asked, wait)

    def ended(self, request_id: str, length: int | None = None) -> None:
        """Hear that a request is over; `length` says where it was cut off, None that it came to an end by itself.

        Of one that was cut off at 0 nothing is learned.
        """
        live = self._live.pop(request_id, None)
        if live is None:
            return
        if live.since is None:
            self._leave_queue(live)
        else:
            made = live.made(self._steps) if length is None else length
            self._ends.append((live.group, made, length is None))

    def stepped(self, steps: int, num_waiting: int, cost: Coefficients | None, now: float) -> list[tuple[str, Shed]]:
        """Hear how many steps there were, and how many wait for a slot after the last of them.

        Returns who waits for one in vain by now. They are here until `ended` is called for them.
        """
        self._steps, self.cost = steps, cost
        hopeful = num_waiting and (self.target is not None or self._deadlines)
        late: list[tuple[str, Shed]] = []
        if hopeful and now >= self._stale_at and self.limits is not None and cost is not None:
            self._look_ahead(now, late)
        return late

    def lost(self) -> None:
        """Hear that all requests are gone. What was learned stays."""
        self._live.clear()
        self._waiting.clear()
        self._deadlines = self._steps = 0
        self._outlook, self._head, self._stale_at = None, None, -inf

    # Predicting

    def expected_wait(self, now: float) -> float:
        """Return the seconds within which a short request that comes now has its first token; 0 if at once."""
        if self.limits is None or self.cost is None or self._finds_slot():
            return 0.0
        return self._least_wait(now)

    def expected_of(self, request_id: str) -> float | None:
        """Return the wait that was predicted for a request that has no token yet, None if nothing was; for tests."""
        return self._live[request_id].expected

    def foresee(self, request_ids: Collection[str], now: float) -> dict[str, Foreseen]:
        """Say what is expected of live requests, for a person who asks; those far back in the queue are missing.

        What comes of it is learned from, as nothing else is without a target. Takes O(live requests), and an admission
        for each of the first in the queue; what that found is used again for ten times as long as it took, so whoever
        has just come into a long queue may be missing too.
        """
        if self.limits is None or self.cost is None:
            return {}
        head = self._head
        if head is None or now >= head.made + _rest(head.num_admitted, head.forecast.passes):
            forecast, begun, line = self._in_order(now)
            # As in `_look_ahead`: who has a slot keeps it, whoever goes before it in the queue.
            head = self._head = QueueHead(now, forecast, (*begun, *line[:_MOST_FORESEEN]), self._admit)
        found: dict[str, Foreseen] = {}
        for request_id in request_ids:
            live = self._live.get(request_id)
            if live is None:
                continue
            if live.runs:
                end = self._foreseen_end(live, ForeseenMoment(now, now, now), head.pace, live.made(self._steps))
                found[request_id] = Foreseen(end=end)
            elif (expected := head.expected(live.rank)) is not None:
                found[request_id] = self._foreseen(live, expected, now)
        return found

    def _foreseen(self, live: LiveProgress, expected: Expected, now: float) -> Foreseen:
        """What is expected of a request that waits; when that was first said is kept, to learn from.

        One that had tokens before has no first one to come, but others.
        """
        wait = max(expected.first - now, 0.0)
        if live.foreseen is None and live.expected is None:
            live.foreseen = now, wait
        likely = self._stretched(wait, self.likely.value)
        following = ForeseenMoment(now + likely)
        if len(self._band) >= _LEAST_COMPARED:
            early, late = (self._stretched(wait, ratio) for ratio in self._band.ends(wait))
            following = ForeseenMoment(now + min(max(likely, early), late), now + early, now + late)
        start = ForeseenMoment(min(max(expected.start, now), following.expected))
        made = min(live.made(self._steps) + 1, live.request.max_tokens)
        end = self._foreseen_end(live, following, expected.pace, made)
        return Foreseen(start, following if live.since is None else None, end)

    def _foreseen_end(self, live: LiveProgress, last: ForeseenMoment, pace: float, made: int) -> ForeseenMoment | None:
        """When a request ends that has so many tokens at the moment `last`; None before lengths are known."""
        if live.request.may_stop and self.lengths.all.num_observed < _LEAST_ENDS:
            return None
        curve = self.lengths.of(live.group)

        def at(moment: float, share: float) -> float:
            return moment + pace * (live.length(curve, made, share) - made)

        expected = at(last.expected, _LIKELY)
        if not live.request.may_stop or last.early is None or last.late is None:
            return ForeseenMoment(expected)
        return ForeseenMoment(expected, at(last.early, _BAND), at(last.late, 1 - _BAND))

    def _least_wait(self, now: float) -> float:
        first = self._up_to_date(now).end().admit(1, 0, 1).first
        return self._stretched(max(first - now, 0.0), self._ratio)

    @property
    def _ratio(self) -> float:
        """How many times as long as expected a wait is taken to be of whoever wants to be let in."""
        sure = min(self._refused / _SATURATED, 1.0)
        return exp((1 - sure) * log(self.likely.value) + sure * log(self.promised.value))

    def _finds_slot(self) -> bool:
        """Whether whoever comes finds nobody waiting and a slot free."""
        return not self._waiting and (self.limits is None or len(self._live) < self.limits.slots)

    def _expect(self, coming: list[LiveProgress], now: float, deadline: float | None) -> None:
        """Say when each will have its first token. Raises Shed if that is too late."""
        if self.limits is None or self.cost is None:
            return
        outlook = self._up_to_date(now)
        forecast = outlook.before(coming[0].rank)
        expected = [self._admit(forecast, live) for live in coming]
        waits = [max(each.first - now, 0.0) for each in expected]
        if self.target is not None:
            self._check_target(self._stretched(waits[0], self._ratio), len(coming))
        if deadline is not None:
            rest = expected[-1].pace * (self._left(coming[-1], 0.5) - 1)
            self._check_deadline(self._stretched(waits[-1], self.likely.value), rest, deadline - now, len(coming))
        for live, wait in zip(coming, waits, strict=True):
            live.expected = wait
        outlook.add(coming, forecast)

    def _check_target(self, wait: float, count: int) -> None:
        assert self.target is not None
        if wait > self.target:
            self.num_shed[ShedReason.TTFT] += count
            self._refused += _LATELY * (1 - self._refused)
            detail = f"its first token would take up to {wait:.3g} s, and may take {self.target:g} s (target_ttft_ms)"
            # A little later, lest whoever comes back is refused again for a small error of the prediction.
            raise Shed(ShedReason.TTFT, detail, (1 + _NEGLIGIBLE) * wait - self.target)

    def _check_deadline(self, wait: float, rest: float, left: float, count: int) -> None:
        if wait + rest > left:
            self.num_shed[ShedReason.DEADLINE] += count
            detail = f"it would be done in about {wait + rest:.3g} s, after its deadline in {max(left, 0.0):.3g} s"
            raise Shed(ShedReason.DEADLINE, detail, min(wait + rest - left, wait))

    def _up_to_date(self, now: float) -> Outlook[LiveProgress]:
        """Return what is expected of those who wait, not much older than `now`."""
        if self._outlook is None or now >= self._stale_at:
            return self._look_ahead(now)
        return self._outlook

    def _look_ahead(self, now: float, late: list[tuple[str, Shed]] | None = None) -> Outlook[LiveProgress]:
        """Look at all who wait anew. Where there is a list of those who do in vain, they join it and are left out."""
        forecast, begun, line = self._in_order(now)
        for live in begun:
            self._admit(forecast, live)
        self._outlook = outlook = Outlook(forecast, self._admit)
        passes = forecast.passes
        for live in line:
            forecast = outlook.end()
            before = forecast.passes
            first = self._admit(forecast, live).first
            passes += forecast.passes - before
            if late is not None and live.since is None:
                wait = self._stretched(max(first - now, 0.0), self.likely.value)
                if (shed := self._hopeless(live, wait, now)) is not None:
                    late.append((live.request.id, shed))
                    continue
            outlook.add([live], forecast)
        self._stale_at = now + max(self._fresh, _rest(len(begun) + len(line), passes))
        return outlook

    def _hopeless(self, live: LiveProgress, wait: float, now: float) -> Shed | None:
        """Say why a request that waits, and will for so many seconds, need wait no longer; None if it may hope."""
        waited = now - live.request.arrival
        if live.deadline is not None and now + wait > live.deadline:
            self.num_shed[ShedReason.DEADLINE] += 1
            detail = f"it waited {waited:.3g} s, and its first token would come after its deadline"
            return Shed(ShedReason.DEADLINE, detail, wait)
        if self.target is None or not live.leads or waited + wait <= _HOPELESS * self.target:
            return None
        self.num_shed[ShedReason.TTFT] += 1
        self._compare(live, waited + wait)
        detail = f"it waited {waited:.3g} s for its first token, which may take {self.target:g} s (target_ttft_ms), "
        return Shed(ShedReason.TTFT, f"{detail}and would take {wait:.3g} s more", max(waited + wait - self.target, 0.0))

    def _in_order(self, now: float) -> tuple[Forecast, list[LiveProgress], list[LiveProgress]]:
        """Return a forecast that begins with those who run, those whose prompts are being computed, and all others.

        The second keep their slots, however long that takes. Among the third, in order, are those who lost theirs.
        """
        assert self.limits is not None
        assert self.cost is not None
        while self._ends:
            self.lengths.observe(*self._ends.popleft())
        running = []
        line = [live for live in self._waiting if not live.begun]
        for live in self._live.values():
            if live.since is None:
                continue
            if live.halted is None:
                running.append((self._context(live), self._left(live, live.share)))
            else:
                insort(line, live, key=_rank)
        begun = [live for live in self._waiting if live.begun]
        return Forecast(self.limits, self.cost, now, running), begun, line

    def _admit(self, forecast: Forecast, live: LiveProgress) -> Expected:
        """Let one in that waits; what it had before it lost its slot is computed anew."""
        prompt = self._context(live)
        cached = min(int(self._cached * prompt), prompt - 1)
        return forecast.admit(prompt, cached, self._left(live, live.share))

    def _left(self, live: LiveProgress, share: float) -> int:
        """Tokens that a request is yet to have."""
        return live.left(self.lengths.of(live.group), live.made(self._steps), share)

    def _context(self, live: LiveProgress) -> int:
        """Tokens of its prompt, and those that it has."""
        return len(live.request.prompt_ids) + live.made(self._steps)

    # Learning

    def _stretched(self, wait: float, ratio: float) -> float:
        """Return an expected wait as experience corrects it."""
        return max(ratio * (wait + self._negligible) - self._negligible, 0.0)

    def _compare(self, live: LiveProgress, waited: float) -> None:
        """Learn from how long a request waited beside what was expected of it, once."""
        if live.expected is None:
            return
        ratio = (waited + self._negligible) / (live.expected + self._negligible)
        expected, live.expected = live.expected, None
        self.promised.observe(ratio)
        self.likely.observe(ratio)
        self._see(waited, expected)

    def _see(self, waited: float, expected: float) -> None:
        """Learn how far a wait is from what was expected."""
        ratio = (waited + self._negligible) / (expected + self._negligible)
        self._band.observe(expected, ratio)

    # Keeping count

    def _coming(self, request: Request, group: Hashable, deadline: float | None, leads: bool) -> LiveProgress:
        self._serial += 1
        moment = self.order.moment(request.arrival, request.priority, len(request.prompt_ids) + request.max_tokens)
        return LiveProgress(request, group, (moment, self._serial), deadline, leads)

    def _leave_queue(self, live: LiveProgress) -> None:
        del self._waiting[bisect_left(self._waiting, live.rank, key=_rank)]
        self._deadlines -= live.deadline is not None
