"""How long answers become: what is learned of whom, what is forgotten, and what is still to come of one that runs."""

import random
from collections.abc import Callable, Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from chairlift.core.sequences.output_lengths import LengthCurve, OutputLengths


def learned(lengths: Iterable[int], most: int = 10**6) -> LengthCurve:
    """A curve that has seen answers of these lengths, cut off at `most`."""
    curve = LengthCurve()
    for length in lengths:
        curve.observe(min(length, most), ended=length < most)
    return curve


def draws(draw: Callable[[random.Random], float], count: int = 3000) -> list[int]:
    rng = random.Random(1)
    return [max(1, round(draw(rng))) for _ in range(count)]


def exponential(mean: float) -> list[int]:
    return draws(lambda rng: rng.expovariate(1 / mean))


@pytest.mark.parametrize("mean", [20.0, 64.0, 500.0])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_quantiles_of_the_lengths_seen(mean: float, share: float) -> None:
    seen = exponential(mean)
    actual = sorted(seen)[int(share * len(seen))]
    assert learned(seen).length(0, share) == pytest.approx(actual, rel=0.2)


def test_a_named_mean_holds_until_answers_tell_otherwise() -> None:
    named = OutputLengths(mean=400.0)
    assert named.of("anybody").length(0, 0.5) == pytest.approx(400 * 0.693, rel=0.1)
    for _ in range(8):
        named.observe("anybody", 10, ended=True)
    assert named.all.length(0, 0.5) > 100, "a few change little"
    for _ in range(500):
        named.observe("anybody", 10, ended=True)
    assert named.all.length(0, 0.5) < 12
    assert OutputLengths(mean=2.0**20).all.length(0, 0.5) > 10_000, "however long they may be expected to be"


def test_answers_that_are_all_alike() -> None:
    curve = learned([100] * 300)
    assert all(90 <= curve.length(0, share) <= 112 for share in (0.1, 0.5, 0.9))
    assert curve.length(99, 0.5) <= 112


def test_what_is_to_come_depends_on_what_there_is() -> None:
    # Half are short answers, half long ones: who is past the short ones is one of the others.
    curve = learned(draws(lambda rng: rng.choice((10, 400))))
    assert curve.length(0, 0.25) < 16
    assert 300 < curve.length(20, 0.25) < 500
    exponentials = learned(exponential(100.0))
    assert exponentials.length(100, 0.5) - 100 == pytest.approx(exponentials.length(0, 0.5), rel=0.3)


def test_answers_that_were_cut_off_tell_that_they_were_longer() -> None:
    cut = learned(exponential(100.0), most=64)
    # Where none was seen to end by itself, only the first guess of 64 tokens more is left.
    assert cut.length(0, 0.3) == pytest.approx(learned(exponential(100.0)).length(0, 0.3), rel=0.2)
    assert cut.length(0, 0.75) > 64


def test_a_change_is_followed() -> None:
    curve = learned(exponential(40.0))
    for length in exponential(200.0)[:1000]:
        curve.observe(length, ended=True)
    assert curve.length(0, 0.5) == pytest.approx(200 * 0.693, rel=0.25)
    for length in exponential(20.0)[:1000]:
        curve.observe(length, ended=True)
    assert curve.length(0, 0.5) == pytest.approx(20 * 0.693, rel=0.25)


def test_groups_differ_and_an_unknown_one_is_like_all() -> None:
    lengths = OutputLengths()
    assert 20 < lengths.of("new").length(0, 0.5) < 64, "a first guess, and no long one"
    for _ in range(300):
        lengths.observe("short", 10, ended=True)
        lengths.observe("long", 1000, ended=True)
    assert lengths.of("short").length(0, 0.9) < 16
    assert lengths.of("long").length(0, 0.1) > 700
    assert lengths.of("new").length(0, 0.4) < 16 < 700 < lengths.of("new").length(0, 0.6)
    lengths.observe("new", 50, ended=True)
    assert lengths.of("new").length(60, 0.5) > 700, "one answer is no experience"


def test_groups_are_few_and_the_oldest_go() -> None:
    lengths = OutputLengths(most=3)
    for group in ("a", "b", "c", "a", "d"):
        lengths.observe(group, 5, ended=True)
    assert len(lengths) == 3
    assert lengths.of("b") is lengths.all
    assert lengths.of("a") is not lengths.all


def test_no_length_is_none() -> None:
    curve = LengthCurve()
    curve.observe(0, ended=False)
    assert curve.num_observed == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3_000_000), st.booleans()), max_size=40),
    st.integers(0, 2_000_000),
    st.floats(0, 0.999),
    st.floats(0, 0.999),
)
def test_a_length_is_more_than_there_is_and_grows_with_the_share(
    seen: list[tuple[int, bool]], made: int, low: float, high: float
) -> None:
    curve = LengthCurve()
    for length, ended in seen:
        curve.observe(length, ended)
    low, high = sorted((low, high))
    assert made + 1 <= curve.length(made, low) <= curve.length(made, high)
