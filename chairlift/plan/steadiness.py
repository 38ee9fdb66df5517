"""Whether a machine held still while it was measured: one that others share may be half as fast a minute later."""

from collections import defaultdict
from itertools import accumulate
from math import log2
from statistics import median
from typing import NamedTuple

from chairlift.plan.machine_profile import ItemProfile, SequenceProfile
from chairlift.plan.resampler import expected_seconds

# The time of a measurement is looked at in so many parts; fewer samples in one of them say nothing.
_PARTS, _LEAST = 8, 8
# By how much more the slowest part may take than the fastest before it is worth a word.
_STEADY = 1.15


class _Timed(NamedTuple):
    """A step or a call: its shape, what it took, and what it is predicted to take."""

    shape: tuple[int, ...]
    seconds: float
    expected: float


def unsteadiness(profile: SequenceProfile | ItemProfile) -> float:
    """Return how many times as long the same work took in the slowest part of a measurement as in the fastest.

    1 if that is unknown. Work of like shape is the same, within an octave; what the cost model has wrong of a shape all
    the time is no change of the machine.
    """
    timed = [each for each in _timed(profile) if each.expected > 0 and each.seconds > 0]
    ratios = defaultdict[tuple[int, ...], list[float]](list)
    for each in timed:
        ratios[each.shape].append(each.seconds / each.expected)
    usual = {shape: median(values) for shape, values in ratios.items()}
    whole = sum(each.seconds for each in timed)
    parts: list[list[_Timed]] = [[] for _ in range(_PARTS)]
    for each, until in zip(timed, accumulate(each.seconds for each in timed), strict=True):
        parts[min(int(_PARTS * until / whole), _PARTS - 1)].append(each)
    paces = [
        median(each.seconds / (each.expected * usual[each.shape]) for each in part)
        for part in parts
        if len(part) >= _LEAST
    ]
    return max(paces) / min(paces) if paces else 1.0


def steadiness_notes(profile: SequenceProfile | ItemProfile) -> list[str]:
    """Return what a plan says of a machine that did not hold still, which is nothing if it did."""
    times = unsteadiness(profile)
    if times <= _STEADY:
        return []
    about = f"the same work took up to {times:.1f} times as long as at other moments while it was measured"
    return [f"the machine did not hold still: {about}, and what is foretold here may be off as far"]


def _timed(profile: SequenceProfile | ItemProfile) -> list[_Timed]:
    if isinstance(profile, ItemProfile):
        return [
            _Timed(_shape(call.items, call.computed), call.seconds, profile.call + profile.size * call.computed)
            for call in profile.calls
        ]
    return [
        _Timed(
            _shape(step.tokens, step.kv_tokens),
            step.seconds,
            expected_seconds(profile, step.tokens, step.kv_tokens, step.pairs),
        )
        for step in profile.steps
    ]


def _shape(*counts: float) -> tuple[int, ...]:
    return tuple(round(log2(1 + count)) for count in counts)
