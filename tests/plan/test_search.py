"""The highest rate of some settings, and the best of many: against what can be told by hand, and by trying them all."""

import random
from collections.abc import Callable, Iterable
from math import inf
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated import exact_profile, noisy_profile

from chairlift.config.sequences import SequenceConfig
from chairlift.core.cost import Coefficients
from chairlift.core.sequences.strategy import STRATEGIES
from chairlift.errors import ConfigError
from chairlift.plan.case import changed, highest_rate
from chairlift.plan.figures import Latencies, latencies
from chairlift.plan.machine_profile import FrontCost
from chairlift.plan.search import num_requests, num_trials, search
from chairlift.plan.sequence_candidates import with_strategy
from chairlift.plan.sequence_case import SequenceCase
from chairlift.plan.targets import MODES, LatencyTargets, targets_of
from chairlift.plan.trace import TraceRequest, duration, with_answers
from chairlift.plan.traffic import Traffic, synthetic

# Steps of 10 ms, whatever they hold: what a server can do is a matter of counting.
STEADY = exact_profile(Coefficients(0.01, 0.0, 0.0, 0.0))
BASE = SequenceConfig(model="formula")


def traffic(output: str = "constant:10", count: int = 60, seed: int = 0) -> tuple[TraceRequest, ...]:
    lengths = Traffic(arrivals="poisson:10", input_length="constant:8", output_length=output)
    return tuple(synthetic(lengths, 4 * count / 10, seed)[:count])


def steady(targets: LatencyTargets | None = None, **more: Any) -> SequenceCase:
    return SequenceCase(STEADY, traffic(), targets or LatencyTargets(), **more)


def test_what_a_server_can_do_at_all() -> None:
    """An answer takes ten steps: 10 a second one at a time, 40 in four slots."""
    assert steady().capacity(with_strategy(BASE, "none", 1), 60) == pytest.approx(10)
    assert steady().capacity(with_strategy(BASE, "static", 4), 60) == pytest.approx(40)
    assert steady().capacity(with_strategy(BASE, "continuous", 4), 60) == pytest.approx(40)
    slow = steady(front=FrontCost(request=0.02, output_token=0.001))
    wide = with_strategy(BASE, "continuous", 64)
    assert slow.capacity(wide, 60) == pytest.approx(1 / 0.03), "the front is one thread"


@pytest.mark.parametrize(
    ("strategy", "slots", "cost"),
    [
        ("continuous", 64, Coefficients(0.02, 5e-5, 0.0, 0.0)),
        ("continuous", 128, Coefficients(0.018, 0.0019, 0.0, 0.0)),
        ("continuous", 16, Coefficients(0.01, 0.002, 1e-6, 0.0)),
        ("none", 1, Coefficients(0.02, 5e-5, 0.0, 0.0)),
    ],
)
def test_what_a_server_can_do_is_what_it_does_while_somebody_waits(
    strategy: str, slots: int, cost: Coefficients
) -> None:
    """The last answers of a crowd run by themselves: of few requests with long answers that is most of the time."""
    trace = traffic("exponential:150", count=100)
    config = with_strategy(BASE, strategy, slots, max_num_batched_tokens=2048)
    case = SequenceCase(exact_profile(cost), trace)
    few = case.capacity(config, 100)
    step = cost.step + slots * cost.token + slots * cost.kv_token * (8 + 150)
    outputs, inputs = (fmean(getattr(each, f"{name}_length") for each in trace) for name in ("output", "input"))
    by_hand = 1 / (outputs * step / slots + inputs * cost.token)
    assert few == pytest.approx(by_hand, rel=0.1)


def test_a_rate_below_all_others_is_found() -> None:
    """With company every second token is late, and without it none: so rare is company at a hundredth of what goes."""
    profile = exact_profile(Coefficients(0.01, 0.005, 0.0, 0.0))
    case = SequenceCase(profile, traffic(count=200), LatencyTargets(itl=0.016))
    config = with_strategy(BASE, "continuous", 64)
    assert highest_rate(case, config, 200) == 0
    rate = highest_rate(case, config, 200, rare=True)
    assert 0 < rate < 0.05 * case.capacity(config, 200)
    found = search(case, {"continuous": [config, with_strategy(BASE, "continuous", 32)]})
    assert found["continuous"].rate > 0, "it is looked there where there is nothing else"
    assert case.keeps(config, rate, 200)


def test_a_case_is_decided_on_fewer_requests_of_longer_prompts_and_answers() -> None:
    def count(prompt: int, answer: int) -> int:
        lengths = Traffic(arrivals="poisson:10", input_length=f"constant:{prompt}", output_length=f"constant:{answer}")
        return num_requests(SequenceCase(STEADY, tuple(synthetic(lengths, 200.0))))

    assert count(1, 10) == 1000
    assert count(1, 50) == 400
    assert count(1, 200) == 128, "fewer would be no crowd"
    assert count(50 * STEADY.block_size, 750) == 125
    assert count(10_000 * STEADY.block_size, 10_000) == 100


def test_without_targets_the_highest_rate_is_all_that_it_can_do() -> None:
    assert highest_rate(steady(), with_strategy(BASE, "continuous", 4), 60) == pytest.approx(40)


def test_the_highest_rate_keeps_the_targets_and_little_more_does_not() -> None:
    case = steady(LatencyTargets(ttft=0.06))
    config = with_strategy(BASE, "none", 1)
    rate = highest_rate(case, config, 60)
    assert 0 < rate < 10
    assert case.keeps(config, rate, 60)
    assert not case.keeps(config, 1.3 * rate, 60)


def test_a_batch_that_waits_to_be_full_misses_targets_at_low_rates() -> None:
    case, config = steady(LatencyTargets(ttft=0.5)), with_strategy(BASE, "static", 8)
    rate = highest_rate(case, config, 60)
    assert case.keeps(config, rate, 60)
    assert not case.keeps(config, rate / 10, 60)


def test_no_rate_is_one_where_nothing_is_fast_enough() -> None:
    assert highest_rate(steady(LatencyTargets(e2e=0.05)), with_strategy(BASE, "continuous", 8), 60) == 0


def test_a_point_says_what_came_of_a_rate() -> None:
    case = steady(LatencyTargets(itl=0.005))
    point = case.point(with_strategy(BASE, "continuous", 8), 5.0, 60)
    assert point.rate == 5.0
    assert point.latencies.itl == pytest.approx(0.01)
    assert point.missed == ("itl",)
    assert point.output_tokens == pytest.approx(10 * point.throughput)
    assert 0 < point.busy <= 1
    assert point.kv_tokens >= 18
    assert point.kv == pytest.approx(point.kv_tokens / 16 / case.num_blocks(with_strategy(BASE, "continuous", 8)))


def test_who_is_refused_misses_whatever_there_is_to_keep() -> None:
    """Where a target of the server's own has most refused, the tokens of those let in come as they should."""
    config = with_strategy(BASE, "continuous", 4, target_ttft_ms=50.0)
    case = steady(LatencyTargets(itl=0.05))
    assert not case.keeps(config, 400.0, 60)
    point = case.point(config, 400.0, 60)
    assert (point.latencies.itl, point.latencies.e2e) == (pytest.approx(0.01), inf)
    assert point.missed == ("e2e",)
    assert 0 < highest_rate(case, config, 60) < 60
    assert steady(LatencyTargets(ttft=0.2)).point(config, 400.0, 60).missed == ("ttft",)
    free = steady()
    assert free.keeps(config, 400.0, 60), "nothing was promised"
    assert free.point(config, 400.0, 60).missed == ()


def test_where_nothing_can_be_answered_the_reason_is_told() -> None:
    long = tuple(TraceRequest(arrival=0.1 * n, input_length=5000, output_length=1) for n in range(8))
    with pytest.raises(ConfigError, match="no request of the traffic can be answered: This model's maximum context"):
        SequenceCase(STEADY, long).alone(BASE, 8)


def test_kv_memory_is_what_a_server_with_so_many_slots_gets() -> None:
    """A longest sequence takes 256 blocks, and there are 10,000 at most."""
    case = steady()
    assert case.num_blocks(with_strategy(BASE, "continuous", 2)) == 512
    assert case.num_blocks(with_strategy(BASE, "continuous", 64)) == 10_000
    assert case.num_blocks(SequenceConfig(model="formula", max_num_seqs=2, kv_cache_gb=1.0)) == 10_000


def test_rates_change_the_gaps_and_nothing_else() -> None:
    case = steady()
    slow, fast = case.at(2.0, 40), case.at(20.0, 40)
    assert len(slow) / duration(slow) == pytest.approx(2.0)
    assert [each.arrival for each in fast] == pytest.approx([each.arrival / 10 for each in slow])


def test_latencies_count_those_who_were_never_answered() -> None:
    """Of 20 requests, of which one is refused, 95% are within a finite time, and 96% are not."""
    requests = [TraceRequest(arrival=0.1 * index, input_length=8, output_length=2) for index in range(19)]
    case = SequenceCase(STEADY, (*requests, TraceRequest(arrival=9.0, input_length=8, output_length=9999)))
    run = case.run(BASE, 10.0, 20)
    assert latencies(run, 95.0).e2e == pytest.approx(0.02)
    assert (latencies(run, 96.0).ttft, latencies(run, 96.0).e2e) == (inf, inf)
    assert latencies(run, 96.0).itl == pytest.approx(0.01)


def test_nobody_waits_for_what_runs_in_the_background() -> None:
    requests = [
        TraceRequest(arrival=0.1 * n, input_length=8, output_length=2, background=n % 2 == 0) for n in range(20)
    ]
    case = SequenceCase(STEADY, tuple(requests))
    run = case.run(with_strategy(BASE, "none", 1), 1000.0, 20)
    live = max(life.e2e or inf for life in run.requests if not life.request.background)
    assert latencies(run, 99.9).e2e == live < max(life.e2e or inf for life in run.requests)


def test_targets_of_modes_are_multiples_of_what_one_sees_alone() -> None:
    alone = Latencies(ttft=0.1, itl=0.02, e2e=1.0)
    assert targets_of("low-latency", alone, 90.0) == LatencyTargets(ttft=0.2, itl=0.04, percentile=90.0)
    assert not targets_of("high-throughput", alone, 95.0).any
    one_shot = Latencies(ttft=0.1, itl=0.0, e2e=0.1)
    assert all(targets_of(mode, one_shot, 95.0).itl == inf for mode in MODES)


@pytest.mark.parametrize("wrong", [{"ttft": 0.0}, {"itl": -1.0}, {"e2e": float("nan")}, {"percentile": 100.0}])
def test_targets_that_nobody_can_promise(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LatencyTargets(**wrong)


def test_with_another_strategy_goes_only_what_it_reads() -> None:
    config = SequenceConfig(model="formula", target_itl_ms=20.0, target_ttft_ms=500.0, max_num_seqs=9, seed=3)
    static = with_strategy(config, "static", 6, max_wait_ms=7.0)
    assert changed(static) == {"strategy": "static", "batch_size": 6, "seed": 3}
    assert with_strategy(static, "dynamic", 700, max_wait_ms=7.0).max_num_batched_tokens == 700


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_candidates_are_many_and_each_is_there_once(strategy: str) -> None:
    case = steady(LatencyTargets(ttft=1.0, itl=0.1))
    found = case.candidates(BASE, strategy)
    assert {each.strategy for each in found} == {strategy}
    assert all(found.count(each) == 1 for each in found)
    assert {each.slots for each in found} == ({1} if strategy == "none" else {2, 4, 8, 16, 32, 64, 128})
    if strategy == "continuous":
        assert {each.target_itl_ms for each in found} == {None, 50.0, 80.0, 100.0}
    if strategy == "dynamic":
        assert {each.max_wait_ms for each in found} == {0.0, 25.0, 100.0, 300.0}


def test_the_search_finds_what_trying_all_of_them_would() -> None:
    lengths = Traffic(arrivals="poisson:10", input_length="uniform:8:200", output_length="exponential:15")
    case = SequenceCase(noisy_profile(), tuple(synthetic(lengths, 10.0)), LatencyTargets(ttft=0.8, itl=0.03))
    wanted = {"continuous": case.candidates(BASE, "continuous")[::6]}
    found = search(case, wanted)["continuous"]
    everywhere = max(highest_rate(case, config, num_requests(case), 0.03) for config in wanted["continuous"])
    assert found.rate >= 0.9 * everywhere
    assert found.rate == highest_rate(case, found.config, num_requests(case), 0.03)


def test_the_search_is_not_misled_by_a_few_requests() -> None:
    """Where prompts hold up the others' tokens, small steps bear nearly twice as many requests as the defaults do.

    To the first 19 requests, which are never a crowd, all settings are alike.
    """
    profile = exact_profile(Coefficients(0.01, 0.00015, 1e-6, 6e-8), num_blocks=4000)
    lengths = Traffic(arrivals="poisson:10", input_length="uniform:16:384", output_length="exponential:64")
    case = SequenceCase(profile, tuple(synthetic(lengths, 60.0)), LatencyTargets(ttft=0.6, itl=0.05))
    slots = {32, 64}
    wanted = {"continuous": [each for each in case.candidates(BASE, "continuous") if each.slots in slots]}
    found = search(case, wanted)["continuous"]
    assert found.rate >= 1.5 * highest_rate(case, with_strategy(BASE, "continuous", 64), num_requests(case), 0.03)


@settings(max_examples=60, deadline=None)
@given(
    rate=st.floats(0.5, 60.0),
    slots=st.sampled_from((1, 4, 32)),
    percentile=st.sampled_from((50.0, 90.0, 95.0, 99.0)),
    targets=st.sampled_from(
        ({"ttft": 0.1}, {"itl": 0.012}, {"itl": 0.02}, {"e2e": 0.4}, {"ttft": 0.3, "itl": 0.015, "e2e": 1.0})
    ),
    limited=st.booleans(),
    seed=st.integers(0, 3),
)
def test_a_run_that_ends_early_would_have_missed_its_targets(
    rate: float, slots: int, percentile: float, targets: dict[str, float], limited: bool, seed: int
) -> None:
    """`keeps` says what the whole run would have, also where some are refused."""
    limits = {"target_ttft_ms": 200.0} if limited else {}
    requests = traffic("exponential:12", seed=seed)
    case = SequenceCase(noisy_profile(), requests, LatencyTargets(**targets, percentile=percentile), seed=seed)
    config = with_strategy(BASE, "continuous", slots, **limits)
    whole = latencies(case.run(config, rate, 60), percentile)
    assert case.keeps(config, rate, 60) == (not case.targets.missed(whole))


def test_the_search_says_the_same_however_it_is_shared_out() -> None:
    case = SequenceCase(noisy_profile(), traffic("exponential:12"), LatencyTargets(ttft=0.3), seed=4)
    wanted = {name: case.candidates(BASE, name)[::12] for name in STRATEGIES}
    calls: list[None] = []

    def shuffled(function: Callable[[Any], Any], jobs: Iterable[Any]) -> list[Any]:
        given = list(jobs)
        results: dict[int, Any] = {}
        for index in random.Random(len(given)).sample(range(len(given)), len(given)):
            results[index] = function(given[index])
        return [results[index] for index in range(len(given))]

    found = search(case, wanted, on_trial=lambda: calls.append(None))
    assert found == search(case, wanted, shuffled)
    assert len(calls) == num_trials(wanted)
    assert set(found) == set(STRATEGIES)


def test_of_settings_that_do_the_same_the_fewest_are_changed() -> None:
    """Answers of one token and few requests: any number of slots is enough."""
    case = SequenceCase(STEADY, traffic("constant:1"), LatencyTargets(ttft=0.05))
    wanted = [with_strategy(BASE, "continuous", slots) for slots in (128, 64, 96)]
    assert changed(search(case, {"continuous": wanted})["continuous"].config) == {}


def test_who_was_refused_gets_somebody_elses_length() -> None:
    trace = [TraceRequest(arrival=0.1 * n, input_length=5, output_length=7 * (n % 2), max_tokens=6) for n in range(10)]
    trace.append(TraceRequest(arrival=2.0, input_length=5, items=3))
    found = with_answers(trace, seed=1)
    assert [each.output_length for each in found] == [6, 7] * 5 + [0]
    assert with_answers(trace[:1]) == trace[:1], "there is nobody to ask"


def test_who_was_given_up_at_its_deadline_gets_more_than_it_had() -> None:
    whole = TraceRequest(arrival=0.0, input_length=5, output_length=7)
    cut = [
        TraceRequest(arrival=1.0, input_length=5, output_length=had, max_tokens=most, timeout=1.0, late=True)
        for had, most in ((3, None), (20, None), (6, 6), (0, None))
    ]
    assert [each.output_length for each in with_answers([whole, *cut])] == [7, 7, 21, 6, 7]
    assert [each.output_length for each in with_answers(cut)] == [4, 21, 6, 0], "nobody's answer is whole"
