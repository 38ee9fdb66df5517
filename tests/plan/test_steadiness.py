"""A plan says so where the machine was not the same all the time that it was measured."""

from itertools import cycle, islice

import msgspec
import pytest
from support.simulated import exact_calls, exact_profile, noisy_profile

from chairlift.plan.machine_profile import ItemProfile, SequenceProfile
from chairlift.plan.steadiness import steadiness_notes, unsteadiness


def paced(profile: SequenceProfile, slower: float, begin: int, end: int) -> SequenceProfile:
    """The same steps again and again, so many times as long from one of them to another."""
    steps = [
        msgspec.structs.replace(step, seconds=step.seconds * (slower if begin <= index < end else 1.0))
        for index, step in enumerate(islice(cycle(profile.steps), 2000))
    ]
    return msgspec.structs.replace(profile, steps=steps)


def test_a_steady_machine_needs_no_word() -> None:
    assert unsteadiness(paced(exact_profile(), 1.0, 0, 0)) == pytest.approx(1.0)
    # Deviations that come all the time are no change.
    assert steadiness_notes(paced(noisy_profile(), 1.0, 0, 0)) == []
    assert steadiness_notes(paced(exact_profile(), 1.1, 500, 1000)) == []


@pytest.mark.parametrize(("begin", "end"), [(0, 700), (900, 1500), (1400, 2000)])
def test_a_machine_that_was_slow_for_a_while_is_said_to_have_been(begin: int, end: int) -> None:
    profile = paced(exact_profile(), 1.6, begin, end)
    assert unsteadiness(profile) == pytest.approx(1.6, rel=0.05)
    (note,) = steadiness_notes(profile)
    assert "up to 1.6 times as long" in note


def test_calls_are_looked_at_too() -> None:
    profile = exact_calls(0.05, 1e-3)
    calls = [
        msgspec.structs.replace(call, seconds=call.seconds * (2.0 if index < 300 else 1.0))
        for index, call in enumerate(islice(cycle(profile.calls), 800))
    ]
    assert unsteadiness(msgspec.structs.replace(profile, calls=calls)) == pytest.approx(2.0, rel=0.05)


def test_too_little_says_nothing() -> None:
    few = exact_profile()
    assert unsteadiness(msgspec.structs.replace(few, steps=few.steps[:3])) == 1.0
    assert unsteadiness(ItemProfile(model="none", call=0.0, size=0.0, calls=[])) == 1.0
