"""The cost model: what it finds out, what it does not fall for, and what it never says."""

import math
import random
from collections.abc import Callable, Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from chairlift.core.cost import Coefficients, CostModel, ExpertReads

# A small model on a CPU; a large one on a GPU, where a step costs as much as hundreds of tokens.
SMALL = Coefficients(0.01, 0.001, 2e-6, 6e-7)
LARGE = Coefficients(0.012, 2e-5, 1e-7, 2e-9)
Sizes = tuple[int, int, int]


def chunk(count: int, computed: int = 0, decodes: int = 0, context: int = 0) -> Sizes:
    """Sizes of a step: a chunk of a prompt, and decodes that each attend to `context` tokens."""
    read, pairs = computed + count, count * computed + count * (count + 1) // 2
    return count + decodes, read + decodes * context, pairs + decodes * context


def decodes(count: int, context: int) -> Sizes:
    return count, count * context, count * context


def truth(terms: Coefficients, sizes: Sizes) -> float:
    tokens, kv_tokens, pairs = sizes
    return terms.step + terms.token * tokens + terms.kv_token * kv_tokens + terms.pair * pairs


def traffic(rng: random.Random, count: int) -> Iterable[Sizes]:
    """Steps as a server sees them: decodes most of the time, with chunks of prompts between them."""
    for _ in range(count):
        number, context = rng.randint(1, 32), rng.randint(10, 3000)
        if rng.random() < 0.3:
            yield chunk(rng.choice((16, 64, 200, 512)), rng.randrange(2000), number, context)
        else:
            yield decodes(number, context)


def feed(model: CostModel, steps: Iterable[Sizes], seconds: Callable[[Sizes], float]) -> None:
    for sizes in steps:
        model.observe(seconds(sizes), *sizes)


def fitted(terms: Coefficients, noise: float = 0.1, count: int = 500, seed: int = 0) -> CostModel:
    rng, model = random.Random(seed), CostModel()
    feed(model, traffic(rng, count), lambda sizes: truth(terms, sizes) * rng.lognormvariate(0, noise))
    return model


def error(model: CostModel, terms: Coefficients, sizes: Sizes) -> float:
    return abs(model.predict(*sizes) / truth(terms, sizes) - 1)


PROBES = [decodes(1, 100), decodes(32, 2000), chunk(512), chunk(128, 1500), chunk(64, 500, 16, 300)]


@pytest.mark.parametrize("terms", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("seed", range(5))
def test_known_coefficients_are_recovered_under_noise(terms: Coefficients, seed: int) -> None:
    model = fitted(terms, noise=0.1, seed=seed)
    assert max(error(model, terms, sizes) for sizes in PROBES) < 0.15
    exact = fitted(terms, noise=0.0, seed=seed)
    assert exact.coefficients.step == pytest.approx(terms.step, rel=0.1)
    assert exact.coefficients.token == pytest.approx(terms.token, rel=0.1)
    assert exact.coefficients.pair == pytest.approx(terms.pair, rel=0.25)


def test_a_few_steps_are_enough_to_begin_with() -> None:
    model = CostModel()
    feed(model, [chunk(16), decodes(1, 16), decodes(16, 1), chunk(64, 1024), chunk(192)], lambda s: truth(SMALL, s))
    assert max(error(model, SMALL, sizes) for sizes in PROBES) < 0.5


def test_a_hiccup_does_not_bend_the_model() -> None:
    model = fitted(SMALL)
    before = [model.predict(*sizes) for sizes in PROBES]
    for sizes in PROBES:
        model.observe(20 * truth(SMALL, sizes), *sizes)
        model.observe(truth(SMALL, sizes), *sizes)
    after = [model.predict(*sizes) for sizes in PROBES]
    assert after == pytest.approx(before, rel=0.1)


def test_one_step_in_ten_may_be_an_outlier() -> None:
    rng, model = random.Random(3), CostModel()
    feed(model, traffic(rng, 600), lambda s: truth(SMALL, s) * (20 if rng.random() < 0.1 else rng.uniform(0.95, 1.05)))
    assert max(error(model, SMALL, sizes) for sizes in PROBES) < 0.25


@pytest.mark.parametrize("change", [4.0, 1.5, 0.7, 0.25])
def test_a_lasting_change_of_speed_is_followed_within_some_tens_of_steps(change: float) -> None:
    model = fitted(SMALL)
    now = Coefficients(*(term * change for term in SMALL))
    feed(model, traffic(random.Random(1), 40), lambda sizes: truth(now, sizes))
    assert max(error(model, now, sizes) for sizes in PROBES) < 0.15


def test_a_slow_down_seen_in_decodes_holds_for_prompts_too() -> None:
    model = fitted(SMALL)
    feed(model, [decodes(8, 200 + n) for n in range(60)], lambda sizes: 2 * truth(SMALL, sizes))
    assert model.predict(*chunk(512)) == pytest.approx(2 * truth(SMALL, chunk(512)), rel=0.3)


def test_what_is_known_of_prompts_outlasts_thousands_of_decodes() -> None:
    rng, model = random.Random(5), fitted(SMALL)
    feed(model, [decodes(4, 100 + n % 500) for n in range(5000)], lambda s: truth(SMALL, s) * rng.uniform(0.95, 1.05))
    assert error(model, SMALL, chunk(512)) < 0.3


@pytest.mark.parametrize("terms", [SMALL, LARGE], ids=["small", "large"])
def test_after_decodes_of_one_sequence_prompts_are_predicted_with_sense(terms: Coefficients) -> None:
    model = CostModel()
    feed(model, [decodes(1, 10 + n) for n in range(300)], lambda sizes: truth(terms, sizes))
    assert error(model, terms, decodes(1, 400)) < 0.1
    one = truth(terms, decodes(1, 300))
    assert 1.5 * one < model.predict(*chunk(512)) < 100 * one


def test_the_same_step_over_and_over_leaves_a_finite_model() -> None:
    model = CostModel()
    feed(model, [decodes(1, 50)] * 20_000, lambda sizes: 0.02)
    assert model.predict(*decodes(1, 50)) == pytest.approx(0.02, rel=1e-3)
    assert all(0 <= term < 1 for term in model.coefficients)


def test_steps_that_were_not_timed_are_passed_over() -> None:
    model = fitted(SMALL)
    before = model.coefficients
    for seconds in (0.0, -1.0, math.nan, math.inf, 1e9):
        model.observe(seconds, *chunk(64))
    assert model.coefficients == before


# Experts that are read where some token chooses them, as OLMoE's: 8 of 64, nine tenths of the weights.
MIXTURE = ExpertReads(0.9, 1 / 8)


def mixed(sizes: Sizes) -> float:
    """Seconds of a mixture's step, whose weights take 40 ms to read."""
    return truth(Coefficients(0.04 * MIXTURE.read(sizes[0]), 0.0002, 1e-6, 6e-8), sizes)


def fed(experts: ExpertReads | None, noise: float = 0.05) -> CostModel:
    rng, model = random.Random(1), CostModel(experts=experts)
    feed(model, traffic(rng, 500), lambda sizes: mixed(sizes) * rng.lognormvariate(0, noise))
    return model


def test_what_a_step_reads_of_experts_by_hand() -> None:
    assert ExpertReads(0.9, 0.125).read(1) == pytest.approx(0.1 + 0.9 * 0.125)
    assert ExpertReads(0.9, 0.125).read(2) == pytest.approx(0.1 + 0.9 * (1 - 0.875**2))
    assert ExpertReads(0.9, 0.125).read(10_000) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "sizes", [decodes(1, 100), decodes(4, 100), decodes(16, 500), chunk(512), chunk(64, 500, 4, 300)]
)
def test_steps_of_a_mixture_are_foreseen_by_the_experts_that_they_read(sizes: Sizes) -> None:
    assert fed(MIXTURE).predict(*sizes) == pytest.approx(mixed(sizes), rel=0.06)


def test_without_that_steps_of_a_few_sequences_look_twice_as_long_as_they_are() -> None:
    assert fed(None).predict(*decodes(1, 100)) > 1.8 * mixed(decodes(1, 100))


def test_what_a_step_costs_by_itself_is_that_of_the_last_steps() -> None:
    """So whoever knows nothing of experts is right about steps like these."""
    model = fed(MIXTURE, 0.0)
    assert model.of_all_weights().step == pytest.approx(0.04, rel=0.05)
    feed(model, [decodes(2, 100)] * 100, mixed)
    assert model.coefficients.step == pytest.approx(0.04 * MIXTURE.read(2), rel=0.05)
    assert model.coefficients[1:] == model.of_all_weights()[1:]


LEARNED = fed(MIXTURE)


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-3, 0.3), st.integers(0, 64), st.integers(0, 4000), st.integers(0, 4000))
def test_a_prompt_that_joins_a_mixture_s_step_fits(target: float, count: int, context: int, computed: int) -> None:
    model = LEARNED
    found = model.tokens_within(target, *decodes(count, context), computed)
    assert found is not None, "a token takes some time"
    if found:
        assert model.predict(*chunk(found, computed, count, context)) <= target * (1 + 1e-6)
    # As if a prompt read all weights, however short it is.
    one_more = truth(model.of_all_weights(), chunk(found + 1, computed, count, context))
    assert one_more > target * (1 - 1e-6)


@pytest.mark.parametrize("tokens", [0, 1, 5, 20, 100])
def test_a_decode_that_joins_reads_as_much_more_as_is_said(tokens: int) -> None:
    model = fed(MIXTURE, 0.0)
    more = model.predict(tokens + 1, 0, 0) - model.predict(tokens, 0, 0) - model.coefficients.token
    assert more == pytest.approx(model.more_for(tokens), rel=1e-6, abs=1e-9)
    assert model.more_for(tokens + 1) < model.more_for(tokens)


# What holds of any history

sizes = st.tuples(st.integers(1, 2000), st.integers(0, 10**6), st.integers(0, 10**8))
histories = st.lists(st.tuples(st.floats(0, 1e4), sizes), max_size=60)


def any_model(history: list[tuple[float, Sizes]]) -> CostModel:
    model = CostModel()
    for seconds, size in history:
        model.observe(seconds, *size)
    return model


@settings(max_examples=150, deadline=None)
@given(histories, sizes, st.integers(0, 1000))
def test_whatever_happened_predictions_are_finite_positive_and_grow(
    history: list[tuple[float, Sizes]], size: Sizes, more: int
) -> None:
    model = any_model(history)
    assert all(math.isfinite(term) and term >= 0 for term in model.coefficients)
    tokens, kv_tokens, pairs = size
    predicted = model.predict(*size)
    assert 0 <= predicted < math.inf
    assert predicted <= model.predict(tokens + more, kv_tokens, pairs)
    assert predicted <= model.predict(tokens, kv_tokens + more, pairs)
    assert predicted <= model.predict(tokens, kv_tokens, pairs + more)


@settings(max_examples=150, deadline=None)
@given(histories, st.floats(1e-4, 10), st.integers(0, 64), st.integers(0, 4000), st.integers(0, 4000))
def test_tokens_within_is_all_that_fits_and_no_more(
    history: list[tuple[float, Sizes]], target: float, count: int, context: int, computed: int
) -> None:
    model = any_model(history)
    found = model.tokens_within(target, *decodes(count, context), computed)
    if found is None:
        assert model.predict(*chunk(10**6, computed, count, context)) <= target
        return
    assert found >= 0
    if found:
        assert model.predict(*chunk(found, computed, count, context)) <= target * (1 + 1e-6)
    one_more = chunk(found + 1, computed, count, context)
    assert model.predict(*one_more) > target * (1 - 1e-6)
