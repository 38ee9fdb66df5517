"""Recorded deviations, drawn anew: how long steps and calls take is what was seen of those most like them."""

import random
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from itertools import combinations
from math import log2
from typing import Any, Literal

import msgspec
import numpy as np

from chairlift.core.cost import Coefficients, ExpertReads
from chairlift.plan.machine_profile import CallSample, ItemProfile, ProfileT, SequenceProfile, StepSample

# Of the recorded ones, so many that are nearest in shape are drawn from.
_NEAREST = 24
# Shapes that differ by less than this share of an octave are one.
_PER_OCTAVE = 4
# Deviations come in runs, as whatever slows a machine down lasts for a while: so many in a row on average. Where
# moments are known, so many that are nearest to a moment are drawn from.
_RUN = 8
# Moments that are nearer to each other count as one, and so many samples before and after one are looked at.
_MOMENT_S = 0.25
_AROUND = 250
# Relative errors of a step's seconds beyond which they count as outliers, and how often the fit is mended by them.
_HUBER, _HUBER_ROUNDS = 0.1, 4


class Resampler:
    """Draws from recorded values those whose shape is nearest, in runs, as they came one after the other.

    A stationary bootstrap (Politis and Romano 1994) among the nearest neighbours. A shape is any counts; distances are
    in octaves. Without values it always draws `default`. Where there are more than the usual number `within` so many
    octaves, all of these are drawn from: of traffic many are alike, and the first of them may have been odd.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[float, ...]],
        values: Sequence[float],
        rng: random.Random,
        default: float = 1.0,
        within: float | None = None,
    ) -> None:
        self._points = np.log2(1 + np.array(shapes, dtype=float))
        self._values = values
        self._random = rng.random
        self._default = default
        self._within = within
        self._pools: dict[tuple[int, ...], list[float]] = {}
        # For each shape its pool, and the place in it of what was drawn last.
        self._runs: dict[tuple[int, ...], list[Any]] = {}

    def fresh(self, rng: random.Random) -> "Resampler":
        """Return one that begins anew, with what this one knows of which values are near."""
        other = copy(self)
        other._random = rng.random
        other._runs = {}
        return other

    def draw(self, *shape: float, now: float = 0.0) -> float:
        """Return a value for a shape; the moment `now` matters where moments were recorded."""
        key = tuple([_bin(count) for count in shape])
        run = self._runs.get(key)
        if run is None:
            near = self._pools.get(key)
            if near is None:
                near = self._pools[key] = [self._values[place] for place in self._near(key)]
            if not near:
                return self._default
            run = self._runs[key] = [near, 0]
            begins = True
        else:
            begins = self._random() * _RUN < 1
        pool: list[float] = run[0]
        # Round and round, or the first ones would come less often than the others.
        place = run[1] = int(self._random() * len(pool)) if begins else (run[1] + 1) % len(pool)
        return pool[place]

    def _near(self, key: tuple[int, ...]) -> list[int]:
        """The places of the nearest shapes, in the order in which they were recorded."""
        if not len(self._points):
            return []
        distances = np.abs(self._points - np.array(key) / _PER_OCTAVE).sum(axis=1)
        count = _NEAREST
        if self._within is not None:
            count = max(count, int((distances <= self._within).sum()))
        nearest = np.argsort(distances, kind="stable")[:count]
        return sorted(nearest.tolist())


class MomentResampler(Resampler):
    """Draws for a moment those values that were recorded nearest to it, of shapes that are nearest.

    For what is known of these very minutes: a machine that others slowed down for ten seconds is slow for the same ten
    seconds once more, and whoever waited then waits again. `moments` are those of the values, in seconds, and rise. A
    second counts as much as an octave; shapes are alike that differ by less than `within`.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[float, ...]],
        values: Sequence[float],
        rng: random.Random,
        default: float = 1.0,
        within: float | None = None,
        *,
        moments: Sequence[float],
    ) -> None:
        super().__init__(shapes, values, rng, default, within)
        self._moments = np.array(moments, dtype=float)

    def draw(self, *shape: float, now: float = 0.0) -> float:
        """Return a value for a shape at a moment."""
        moment = int(now / _MOMENT_S)
        key = (*(_bin(count) for count in shape), moment)
        pool = self._pools.get(key)
        if pool is None:
            # The same for whoever asks first, as runs share their pools.
            near = self._near_at(key[:-1], (moment + 0.5) * _MOMENT_S)
            pool = self._pools[key] = [self._values[place] for place in near]
        return pool[int(self._random() * len(pool))] if pool else self._default

    def _near_at(self, key: tuple[int, ...], now: float) -> list[int]:
        """The places of what is nearest in shape and moment."""
        if not len(self._points):
            return []
        middle = int(np.searchsorted(self._moments, now))
        first = max(middle - _AROUND, 0)
        around = slice(first, middle + _AROUND)
        octaves = np.abs(self._points[around] - np.array(key) / _PER_OCTAVE).sum(axis=1)
        distances = np.maximum(octaves - (self._within or 0.0), 0.0) + np.abs(self._moments[around] - now)
        nearest = np.argsort(distances, kind="stable")[:_RUN]
        return [first + place for place in nearest.tolist()]


@lru_cache(maxsize=2**16)
def _bin(count: float) -> int:
    return round(_PER_OCTAVE * log2(1 + count))


class StepTimes:
    """How long a model's steps take in a simulation, and what passes between two of them.

    `within` is as in `Resampler`. Where it is known of all steps when they began, those of like moments are drawn.
    """

    def __init__(self, profile: SequenceProfile, rng: random.Random, within: float | None = None) -> None:
        self._cost, self._experts = profile.cost, profile.experts
        steps = [step for step in profile.steps if self._expected(step.tokens, step.kv_tokens, step.pairs) > 0]
        self._ratios = _resampler(
            steps,
            [(step.tokens, step.kv_tokens) for step in steps],
            [step.seconds / self._expected(step.tokens, step.kv_tokens, step.pairs) for step in steps],
            rng,
            1.0,
            within,
        )
        before = [step for step in profile.steps if step.gap is not None]
        gaps = [(step.sequences, step.gap or 0.0) for step in before]
        self._gap, self._gap_sequence = line_through(gaps)
        self._gap_ratios = _resampler(
            before,
            [(count,) for count, _ in gaps],
            [gap / line if (line := self._gap_line(count)) > 0 else 0.0 for count, gap in gaps],
            rng,
            0.0,
            within,
        )

    def fresh(self, rng: random.Random) -> "StepTimes":
        """Return times that begin anew, without the work of making them."""
        other = copy(self)
        other._ratios, other._gap_ratios = self._ratios.fresh(rng), self._gap_ratios.fresh(rng)
        return other

    def seconds(self, tokens: int, kv_tokens: int, pairs: int, now: float = 0.0) -> float:
        """Draw the seconds of a step that begins now; other arguments as in `CostModel.predict`."""
        return self._expected(tokens, kv_tokens, pairs) * self._ratios.draw(tokens, kv_tokens, now=now)

    def gap(self, sequences: int, now: float = 0.0) -> float:
        """Draw the seconds between the end of a step with so many sequences, now, and the beginning of the next."""
        return self._gap_line(sequences) * self._gap_ratios.draw(sequences, now=now)

    def _expected(self, tokens: int, kv_tokens: int, pairs: int) -> float:
        return step_seconds(self._cost, self._experts, tokens, kv_tokens, pairs)

    def _gap_line(self, sequences: float) -> float:
        return self._gap + self._gap_sequence * sequences


def _resampler(
    samples: Sequence[StepSample] | Sequence[CallSample],
    shapes: Sequence[tuple[float, ...]],
    values: Sequence[float],
    rng: random.Random,
    default: float,
    within: float | None,
) -> Resampler:
    """One that goes by moments, where they are known of all samples."""
    moments = [sample.began for sample in samples if sample.began is not None]
    if moments and len(moments) == len(samples):
        return MomentResampler(shapes, values, rng, default, within, moments=moments)
    return Resampler(shapes, values, rng, default, within)


class CallTimes:
    """How long a model's calls take in a simulation, and what passes before and after them; else as `StepTimes`."""

    def __init__(self, profile: ItemProfile, rng: random.Random, within: float | None = None) -> None:
        self._call, self._size = profile.call, profile.size
        calls = [call for call in profile.calls if self._expected(call.computed) > 0]
        self._ratios = _resampler(
            calls,
            [(call.items, call.computed) for call in calls],
            [call.seconds / self._expected(call.computed) for call in calls],
            rng,
            1.0,
            within,
        )
        known = [call for call in calls if call.lag is not None]
        self._there = _of_calls([call for call in known if call.gap is None], "lag", rng, within)
        self._back = _of_calls(known, "lag", rng, within)
        self._gaps = _of_calls([call for call in known if call.gap is not None], "gap", rng, within)
        self._holds = _of_calls([call for call in calls if call.hold is not None], "hold", rng, within)

    def fresh(self, rng: random.Random) -> "CallTimes":
        """Return times that begin anew, without the work of making them."""
        other = copy(self)
        other._ratios = self._ratios.fresh(rng)
        for name in ("_there", "_back", "_gaps", "_holds"):
            drawn = getattr(self, name)
            setattr(other, name, None if drawn is None else drawn.fresh(rng))
        return other

    def seconds(self, items: int, computed: float, now: float = 0.0) -> float:
        """Draw the seconds of a call that begins now."""
        return self._expected(computed) * self._ratios.draw(items, computed, now=now)

    def there(self, items: int, now: float = 0.0) -> float | None:
        """Draw the seconds from the front to an instance that has nothing to do; None where that was not recorded."""
        return None if self._there is None else self._there.draw(items, now=now)

    def back(self, items: int, now: float = 0.0) -> float | None:
        """Draw the seconds from the end of a call until the front has heard of it; None as above."""
        return None if self._back is None else self._back.draw(items, now=now)

    def gap(self, items: int, now: float = 0.0) -> float | None:
        """Draw the seconds between a call that ends now and the next, which was sent ahead; None as above."""
        return None if self._gaps is None else self._gaps.draw(items, now=now)

    def hold(self, now: float = 0.0) -> float:
        """Draw the seconds until the front sends what it may send now; 0 where that was not recorded."""
        return 0.0 if self._holds is None else self._holds.draw(now=now)

    def _expected(self, computed: float) -> float:
        return self._call + self._size * computed


def _of_calls(
    calls: Sequence[CallSample], what: Literal["lag", "gap", "hold"], rng: random.Random, within: float | None
) -> Resampler | None:
    """What passed beside these calls, if there are any. How many will share a batch is not known while it is held."""
    if not calls:
        return None
    values = [getattr(call, what) for call in calls]
    if what == "hold":
        return _resampler(calls, [()] * len(calls), values, rng, 0.0, within or 0.0)
    return _resampler(calls, [(call.items,) for call in calls], values, rng, 0.0, within)


def thinned(profile: ProfileT, most: int) -> ProfileT:
    """Return a profile with no more steps, or calls, than `most`, from all of it, in runs as they came."""
    name = "steps" if isinstance(profile, SequenceProfile) else "calls"
    samples = getattr(profile, name)
    count, runs = len(samples), most // _RUN
    if count <= most:
        return profile
    starts = (index * count // runs for index in range(runs))
    kept = [sample for start in starts for sample in samples[start : start + _RUN]]
    return msgspec.structs.replace(profile, **{name: kept})


def expected_seconds(profile: SequenceProfile, tokens: int, kv_tokens: int, pairs: int) -> float:
    """Return what a step is predicted to take; arguments as in `CostModel.predict`."""
    return step_seconds(profile.cost, profile.experts, tokens, kv_tokens, pairs)


def step_seconds(cost: Coefficients, experts: ExpertReads | None, tokens: int, kv_tokens: int, pairs: int) -> float:
    """Return what a step costs by coefficients of which that of a step is for one that reads all weights."""
    step, token, kv_token, pair = cost
    if experts is not None:
        step *= experts.read(tokens)
    return step + token * tokens + kv_token * kv_tokens + pair * pairs


def fit_steps(steps: Sequence[StepSample], experts: ExpertReads | None = None) -> Coefficients:
    """Return what steps cost by what was recorded of them, with no coefficient below 0.

    Least squares of relative errors. Steps of all sizes count as much as those of one that came more often, and large
    errors for no more than their size (Huber 1964). With four coefficients every set of them that may be 0 is tried.
    """
    shapes = np.array([(step.tokens, step.kv_tokens, step.pairs) for step in steps], float)
    seconds = np.array([step.seconds for step in steps])
    read = np.array([1.0 if experts is None else experts.read(step.tokens) for step in steps])
    sizes = np.column_stack([read, shapes]) / seconds[:, None]
    _, kinds, counts = np.unique(np.rint(np.log2(shapes)), axis=0, return_inverse=True, return_counts=True)
    even = 1 / counts[kinds.ravel()]
    weights = even
    found = np.zeros(4)
    for _ in range(_HUBER_ROUNDS):
        found = _not_negative(sizes, weights)
        errors = np.abs(sizes @ found - 1)
        weights = even / np.maximum(errors / _HUBER, 1.0)
    return Coefficients(*found.tolist())


def _not_negative(sizes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The coefficients by which all rows come nearest to 1, none below 0."""
    best, least = np.zeros(sizes.shape[1]), np.inf
    root = np.sqrt(weights)
    for count in range(1, sizes.shape[1] + 1):
        for columns in combinations(range(sizes.shape[1]), count):
            part = sizes[:, columns] * root[:, None]
            scale = np.maximum(np.abs(part).max(axis=0), 1e-300)
            answer = np.linalg.lstsq(part / scale, root, rcond=None)[0] / scale
            error = float(np.square(part @ answer - root).sum())
            if (answer >= 0).all() and error < least:
                best, least = np.zeros(sizes.shape[1]), error
                best[list(columns)] = answer
    return best


def fit_calls(calls: Sequence[CallSample]) -> tuple[float, float]:
    """Return the seconds of a call by itself, and of a unit of computed size."""
    return line_through([(call.computed, call.seconds) for call in calls])


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return a, b >= 0 of y = a + b * x, for the least sum of squares relative to the height of the line at x.

    The scatter of times grows with the times: each point counts by 1 / y^2 of the plain fit.
    """
    weights = [1.0] * len(points)
    a = b = 0.0
    for _ in range(2):
        total = sum(weights)
        if not total:
            return 0.0, 0.0
        x = sum(w * px for w, (px, _) in zip(weights, points, strict=True)) / total
        y = sum(w * py for w, (_, py) in zip(weights, points, strict=True)) / total
        spread = sum(w * (px - x) ** 2 for w, (px, _) in zip(weights, points, strict=True))
        along = sum(w * (px - x) * (py - y) for w, (px, py) in zip(weights, points, strict=True))
        b = max(along / spread, 0.0) if spread > 0 else 0.0
        a = y - b * x
        if a < 0:
            squares = sum(w * px * px for w, (px, _) in zip(weights, points, strict=True))
            a, b = 0.0, sum(w * px * py for w, (px, py) in zip(weights, points, strict=True)) / squares
        heights = [a + b * px for px, _ in points]
        top = max(heights)
        weights = [(top / max(height, top / 10)) ** 2 if top > 0 else 0.0 for height in heights]
    return a, b
