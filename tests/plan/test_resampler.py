"""What was recorded is drawn anew: of like shape, in runs, and on average as it was."""

import random
from collections import Counter
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.simulated import COST, exact_calls, exact_profile, noisy_profile

from chairlift.core.cost import Coefficients, ExpertReads
from chairlift.plan.machine_profile import StepSample
from chairlift.plan.resampler import (
    MomentResampler,
    Resampler,
    StepTimes,
    fit_calls,
    fit_steps,
    line_through,
    thinned,
)


def test_only_like_shapes_are_drawn_from() -> None:
    shapes = [(1.0,)] * 50 + [(1000.0,)] * 50
    resampler = Resampler(shapes, [float(index) for index in range(100)], random.Random(0))
    assert all(resampler.draw(1) < 50 for _ in range(200))
    assert all(resampler.draw(700) >= 50 for _ in range(200))


def test_all_that_are_alike_are_drawn_from_where_that_is_asked_for() -> None:
    shapes = [(8.0,)] * 100 + [(9.0,)] * 100 + [(1000.0,)] * 10
    values = [float(index) for index in range(210)]
    few = Resampler(shapes, values, random.Random(0))
    assert {few.draw(8) for _ in range(2000)} == set(values[100:124]), "the first of those that are equally near"
    many = Resampler(shapes, values, random.Random(0), within=0.5)
    assert {many.draw(8) for _ in range(20_000)} == set(values[:200])
    assert {many.draw(1000) for _ in range(2000)} == set(values[-10:]) | set(values[100:114]), "or the usual number"


def test_slow_times_come_in_runs() -> None:
    """Twelve slow ones in a row were recorded: whoever is slow mostly stays so, though half of all are."""
    values = [2.0] * 12 + [1.0] * 12
    resampler = Resampler([(5.0,)] * 24, values, random.Random(0))
    drawn = [resampler.draw(5) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(1.5, abs=0.05)
    stays = sum(one == two for one, two in pairwise(drawn))
    assert stays / len(drawn) > 0.8


def test_a_slow_moment_is_slow_once_more() -> None:
    moments = [float(index) for index in range(100)]
    values = [3.0 if 40 <= moment < 60 else 1.0 for moment in moments]
    shapes = [(5.0,) if index % 2 else (1000.0,) for index in range(100)]
    resampler = MomentResampler(shapes, values, random.Random(0), moments=moments)
    assert {resampler.draw(5, now=50.0) for _ in range(100)} == {3.0}
    for now in (-10.0, 20.0, 80.0, 1e6):
        assert {resampler.draw(5, now=now) for _ in range(100)} == {1.0}
    assert fmean(resampler.draw(5, now=float(now)) for now in range(100) for _ in range(20)) == pytest.approx(
        1.4, abs=0.03
    )


def test_what_is_drawn_does_not_depend_on_who_drew_before() -> None:
    moments = [0.05 * index for index in range(200)]
    values = [float(index) for index in range(200)]
    first, other = (MomentResampler([(5.0,)] * 200, values, random.Random(0), moments=moments) for _ in range(2))
    other.draw(5, now=5.01)
    drawn = [each.fresh(random.Random(1)).draw(5, now=5.24) for each in (first, other)]
    assert drawn[0] == drawn[1]


def test_without_samples_nothing_is_added() -> None:
    assert Resampler([], [], random.Random(0), default=1.0).draw(3) == 1.0
    assert MomentResampler([], [], random.Random(0), moments=[]).draw(3, now=1.0) == 1.0


def test_steps_take_what_was_recorded_on_average_and_as_varied() -> None:
    times = StepTimes(noisy_profile(), random.Random(1))
    expected = COST.step + 8 * COST.token + 320 * (COST.kv_token + COST.pair)
    drawn = [times.seconds(8, 320, 320) / expected for _ in range(4000)]
    assert Counter(round(each, 6) for each in drawn).keys() == {1.0, 1.5}
    assert fmean(drawn) == pytest.approx(1.25, abs=0.03)
    gaps = {round(times.gap(8), 7) for _ in range(200)}
    assert gaps == {1e-4, 3e-4}


def test_times_that_begin_anew_are_those_of_a_new_one() -> None:
    profile = noisy_profile()
    used = StepTimes(profile, random.Random(1))
    for _ in range(100):
        used.seconds(8, 320, 320)
    new, again = StepTimes(profile, random.Random(7)), used.fresh(random.Random(7))
    drawn = [[(times.seconds(n, 40 * n, 40 * n), times.gap(n)) for n in range(1, 60)] for times in (new, again)]
    assert drawn[0] == drawn[1]


def test_a_thinned_profile_has_runs_from_all_of_it() -> None:
    profile = exact_profile()
    profile.steps = [StepSample(1, 1, 1, 1, 1.0 + index) for index in range(1000)]
    seconds = [round(step.seconds) - 1 for step in thinned(profile, 100).steps]
    assert len(seconds) == 96
    assert sum(later - sooner == 1 for sooner, later in pairwise(seconds)) >= 84, "twelve runs of eight"
    assert (seconds[0], seconds[-1] > 900) == (0, True)
    assert thinned(profile, 1000) is profile


@given(st.floats(0, 10), st.floats(0, 10), st.lists(st.floats(0, 100), min_size=3, max_size=30, unique=True))
def test_a_line_is_found_again(a: float, b: float, xs: list[float]) -> None:
    points = [(x, a + b * x) for x in xs]
    found = line_through(points)
    assert min(found) >= 0
    spread = max(xs) - min(xs)
    if spread > 1e-3:
        for x, y in points:
            assert found[0] + found[1] * x == pytest.approx(y, rel=1e-3, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 1e4)), max_size=20))
def test_a_line_through_anything_is_finite_and_not_negative(points: list[tuple[int, float]]) -> None:
    a, b = line_through(points)
    assert 0 <= a < 1e12
    assert 0 <= b < 1e12


def test_a_fit_finds_the_coefficients() -> None:
    true = Coefficients(6e-3, 3e-4, 4e-7, 2e-7)
    rng, steps = random.Random(0), []
    for _ in range(600):
        sequences = rng.randint(1, 32)
        tokens = sequences + rng.choice([0, 0, 100, 400])
        read = sequences * rng.randint(10, 900) + tokens
        pairs = read + (tokens - sequences) * rng.randint(50, 500)
        seconds = true.step + true.token * tokens + true.kv_token * read + true.pair * pairs
        steps.append(StepSample(sequences, tokens, read, pairs, seconds * rng.uniform(0.97, 1.03)))
    assert fit_steps(steps) == pytest.approx(true, rel=0.05)
    stalled = [
        structs.replace(step, seconds=9 * step.seconds) if index % 20 == 0 else step for index, step in enumerate(steps)
    ]
    assert fit_steps(stalled) == pytest.approx(true, rel=0.15), "one of 20 was held up"
    decodes = [step for step in steps if step.tokens == step.sequences]
    rare = [each for each in steps if each.tokens > each.sequences][:12]
    assert fit_steps([*decodes, *decodes, *decodes, *rare]).token == pytest.approx(true.token, rel=0.1)


def test_no_coefficient_is_negative() -> None:
    """Of steps that become shorter with the tokens that they read, nothing is said of these."""
    steps = [StepSample(1, 1, read, read, 0.02 - 1e-5 * read) for read in (10, 100, 400, 900)]
    found = fit_steps(steps)
    assert min(found) >= 0
    assert found.step + found.token > 0.005
    read = ExpertReads(0.9, 0.1)
    of_experts = [StepSample(n, n, n, n, 0.05 * read.read(n) + 1e-3 * n) for n in (1, 2, 8, 32, 128, 300)]
    assert fit_steps(of_experts, read).step == pytest.approx(0.05, rel=0.01)


def test_calls_are_fitted_by_a_line() -> None:
    assert fit_calls(exact_calls(0.01, 0.002).calls) == pytest.approx((0.01, 0.002))
