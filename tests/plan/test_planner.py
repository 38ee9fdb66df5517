"""A plan as a whole: what it chooses, why, and on how many machines, where that can be told beforehand."""

import random
import tomllib
from collections.abc import Iterator
from math import inf
from typing import Any

import msgspec
import pytest
from support.simulated import COST, exact_profile, few_candidates

from chairlift.config.sequences import SequenceConfig
from chairlift.core.cost import Coefficients
from chairlift.core.sequences.strategy import STRATEGIES
from chairlift.plan.advice import facts_of
from chairlift.plan.as_copied import as_flags, as_toml
from chairlift.plan.case import Point
from chairlift.plan.figures import Latencies
from chairlift.plan.machine_profile import FrontCost
from chairlift.plan.planner import ServingPlan, knee, make_plan, replicas_for, with_mode
from chairlift.plan.search import Trial, num_requests
from chairlift.plan.sequence_advice import longest_of, sequence_decision
from chairlift.plan.sequence_candidates import with_strategy
from chairlift.plan.sequence_case import SequenceCase
from chairlift.plan.simulated_run import SimulatedRun
from chairlift.plan.targets import LatencyTargets
from chairlift.plan.trace import TraceRequest
from chairlift.plan.traffic import Traffic, synthetic

STEADY = exact_profile(Coefficients(0.01, 0.0, 0.0, 0.0))
BASE = SequenceConfig(model="formula")
RATE = 10.0


def traffic(output: str, count: int = 40, **more: Any) -> tuple[TraceRequest, ...]:
    lengths = Traffic(arrivals=f"poisson:{RATE}", input_length="constant:8", output_length=output, **more)
    return tuple(synthetic(lengths, 4 * count / RATE)[:count])


def planned(case: SequenceCase, rate: float = RATE) -> ServingPlan:
    return make_plan(case, BASE, rate)


@pytest.fixture(scope="module", autouse=True)
def few() -> Iterator[None]:
    with few_candidates():
        yield


@pytest.fixture(scope="module")
def varied(few: None) -> tuple[SequenceCase, ServingPlan]:
    case = SequenceCase(STEADY, traffic("exponential:12"), LatencyTargets(ttft=0.2, itl=0.05))
    return case, planned(case)


def test_a_plan_has_every_strategy_and_takes_the_fastest(varied: tuple[SequenceCase, ServingPlan]) -> None:
    case, plan = varied
    assert [each.strategy for each in plan.strategies] == list(STRATEGIES)
    assert plan.best is not None
    assert plan.chosen == "continuous"
    assert plan.best.rate == max(each.rate for each in plan.strategies)
    assert plan.best.rate <= plan.best.capacity
    assert plan.best.at is not None
    assert plan.best.at.missed == ()
    assert plan.best.at == case.point(SequenceConfig(model="formula", **plan.best.settings), plan.best.rate, 40)
    assert [point.rate for point in plan.best.curve] == sorted(point.rate for point in plan.best.curve)
    assert plan.replicas is not None
    assert plan.replicas.count == 1


def test_progress_goes_to_the_end(varied: tuple[SequenceCase, ServingPlan]) -> None:
    case, plan = varied
    shares: list[float] = []
    again = make_plan(case, BASE, RATE, on_progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert again == plan, "the same case has one plan"


def test_more_traffic_takes_more_machines(varied: tuple[SequenceCase, ServingPlan]) -> None:
    case, plan = varied
    assert plan.best is not None
    trial = Trial(SequenceConfig(model="formula", **plan.best.settings), plan.best.rate)
    found = replicas_for(case, trial, 3.5 * plan.best.rate, 40)
    assert found.count >= 4
    assert found.at is not None
    assert found.at.missed == ()


def test_of_very_many_machines_a_few_are_simulated(
    varied: tuple[SequenceCase, ServingPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, plan = varied
    assert plan.best is not None
    trial = Trial(SequenceConfig(model="formula", **plan.best.settings), plan.best.rate)
    simulated: list[tuple[float, int]] = []
    run = SequenceCase.run

    def noted(self: SequenceCase, config: SequenceConfig, rate: float, count: int, replicas: int = 1) -> SimulatedRun:
        simulated.append((rate, replicas))
        return run(self, config, rate, count, replicas)

    monkeypatch.setattr(SequenceCase, "run", noted)
    rate = 1e5 * trial.rate
    found = replicas_for(case, trial, rate, 40)
    assert {machines for _, machines in simulated} == {64}
    assert len(simulated) <= 8
    assert 1e5 <= found.count < 1.2e5
    assert simulated[-1][0] / 64 == pytest.approx(rate / found.count), "each has its own share"
    assert found.at is not None
    assert found.at.rate == pytest.approx(rate)
    assert found.at.missed == ()


def test_the_words_have_the_numbers_of_the_case(varied: tuple[SequenceCase, ServingPlan]) -> None:
    case, plan = varied
    facts = facts_of(case.trace)
    lines = sequence_decision(plan, facts, case.trace)
    assert f"{facts.rate:.3g} requests come a second" in lines[0]
    assert f"{plan.alone.e2e:.3g} s" in lines[1]
    assert f"variation of {facts.output_cv:.2f}" in lines[2]
    assert "at any step: continuous." in lines[3]
    assert lines[4].endswith("Take continuous.")
    assert all(f"{each.strategy} {each.rate:.3g}" in lines[4] for each in plan.strategies)


def test_nothing_is_chosen_where_nothing_is_fast_enough() -> None:
    case = SequenceCase(STEADY, traffic("constant:10", 20), LatencyTargets(e2e=0.05))
    plan = planned(case)
    assert (plan.chosen, plan.best, plan.replicas) == (None, None, None)
    assert "No rate is within the targets" in sequence_decision(plan, facts_of(case.trace), case.trace)[-1]
    assert all(each.at is None and each.rate == 0 for each in plan.strategies)


def test_one_shot_answers_suit_batches() -> None:
    case = SequenceCase(STEADY, traffic("constant:1", 20), LatencyTargets(ttft=0.1))
    facts = facts_of(case.trace, 500.0)
    lines = sequence_decision(planned(case, 500.0), facts, case.trace)
    assert "a batch is over after a step" in lines[2]
    assert "dynamic or continuous" in lines[3]


def test_hardly_any_traffic_suits_anything_that_does_not_wait() -> None:
    case = SequenceCase(STEADY, traffic("exponential:12", 20), LatencyTargets(ttft=1.0))
    lines = sequence_decision(planned(case, 0.1), facts_of(case.trace, 0.1), case.trace)
    assert "hardly anything to batch" in lines[3]


def test_a_mode_is_relative_to_a_request_without_company() -> None:
    """An answer begins after one step of 10 ms, and goes on at that pace, however bursty the traffic is."""
    case = SequenceCase(STEADY, traffic("constant:10"))
    seen = case.alone(BASE, num_requests(case))
    assert (seen.ttft, seen.itl, seen.e2e) == pytest.approx((0.01, 0.01, 0.1))
    targets = with_mode(case, BASE, "balanced").targets
    assert (targets.itl, targets.e2e) == (pytest.approx(0.04), inf)


def point(rate: float, mean_e2e: float) -> Point:
    return Point(
        rate=rate,
        throughput=rate,
        output_tokens=rate,
        latencies=Latencies(),
        mean_e2e=mean_e2e,
        mean_batch=1.0,
        busy=rate,
        kv=0.0,
        kv_tokens=0,
        failed=0,
        missed=(),
    )


def test_the_knee_of_a_queue_is_half_its_capacity() -> None:
    """Of one server with random service times (M/M/1): latency is 1 / (1 - load), so that power is highest at 0.5."""
    assert knee([point(load, 1 / (1 - load)) for load in (0.1, 0.3, 0.5, 0.7, 0.9)]) == 2


def test_what_is_refused_is_no_throughput() -> None:
    """Every other prompt is longer than the model can have."""
    some = traffic("constant:10")
    half = tuple(
        msgspec.structs.replace(each, input_length=5000) if index % 2 else each for index, each in enumerate(some)
    )
    served = SequenceCase(STEADY, some[::2]).capacity(BASE, 20)
    assert SequenceCase(STEADY, half).capacity(BASE, 40) == pytest.approx(served, rel=0.01)


def limited(
    case: SequenceCase, rate: float, strategy: str = "continuous", slots: int = 64, **more: Any
) -> tuple[str, float]:
    config = with_strategy(BASE, strategy, slots, **more)
    found = case.limit(config, case.run(config, rate, len(case.trace)))
    assert found.why
    return found.by, found.compute


def test_what_limits_is_named() -> None:
    long = traffic("constant:50", 60)
    assert limited(SequenceCase(STEADY, long), 500.0, slots=4)[0] == "slots"
    assert limited(SequenceCase(exact_profile(num_blocks=24), long), 500.0)[0] == "KV memory"
    assert limited(SequenceCase(STEADY, long, front=FrontCost(output_token=0.01)), 500.0)[0] == "front"
    assert limited(SequenceCase(STEADY, long), 1.0)[0] == "targets"
    assert limited(SequenceCase(STEADY, long), 1.0, "dynamic", 8, max_wait_ms=900.0)[0] == "batch"
    varied = SequenceCase(STEADY, traffic("exponential:30", 60))
    assert limited(varied, 500.0, "static", 8)[0] == "empty slots"


def test_arithmetic_and_reading_are_told_apart() -> None:
    """Prompts are arithmetic; steps, and the KV cache that each token looks at, are reading."""
    prompts = tuple(TraceRequest(arrival=0.001 * n, input_length=500, output_length=1) for n in range(1, 40))
    by, share = limited(SequenceCase(exact_profile(), prompts), 1000.0)
    assert (by, share > 0.8) == ("compute", True)
    answers = tuple(TraceRequest(arrival=0.001 * n, input_length=2, output_length=60) for n in range(1, 21))
    by, share = limited(SequenceCase(exact_profile(), answers), 1000.0, slots=40)
    assert (by, share < 0.5) == ("memory bandwidth", True)
    one = tuple(TraceRequest(arrival=float(n), input_length=10, output_length=3) for n in range(1, 25))
    _, share = limited(SequenceCase(exact_profile(), one), 0.1)
    compute = COST.token * 12 + COST.pair * (55 + 11 + 12)
    reading = 3 * COST.step + COST.kv_token * (10 + 11 + 12)
    assert share == pytest.approx(compute / (compute + reading))


def test_the_longest_of_a_batch_is_what_order_statistics_say() -> None:
    rng = random.Random(0)
    assert longest_of([7] * 5, 8) == pytest.approx(7)
    assert longest_of([1, 2], 2) == pytest.approx(1.75)
    lengths = [round(100 * rng.expovariate(0.01)) for _ in range(20_000)]
    harmonic = sum(1 / n for n in range(1, 9))
    assert longest_of(lengths, 8) / (sum(lengths) / len(lengths)) == pytest.approx(harmonic, rel=0.02)


def test_facts_of_traffic() -> None:
    trace = [
        TraceRequest(arrival=0.5 * n, input_length=100, output_length=10, hash_ids=(1, 2 + n), block_size=60)
        for n in range(5)
    ]
    facts = facts_of(trace)
    assert (facts.requests, facts.rate, facts.gap_cv) == (5, 2.5, 0.0)
    assert (facts.input_mean, facts.output_mean, facts.output_cv) == (100, 10, 0.0)
    assert facts.shared == pytest.approx(4 * 60 / 500)
    assert facts_of(trace, 7.0).rate == 7.0


def test_settings_as_flags() -> None:
    settings = {"max_num_seqs": 8, "target_itl_ms": 25.0, "max_wait_ms": 7.5, "enable_prefix_caching": False}
    assert as_flags(settings) == [
        *("--max-num-seqs", "8", "--target-itl-ms", "25", "--max-wait-ms", "7.5"),
        "--no-enable-prefix-caching",
    ]
    words = {"revision": "v1.0", "warm_up_sizes": (1, 8), "options": {"a": None}, "call_timeout_s": None}
    assert as_flags(words) == [
        *("--revision", "v1.0", "--warm-up-sizes", "[1, 8]"),
        *("--options", '{"a": null}', "--call-timeout-s", "null"),
    ]


def test_settings_as_a_file() -> None:
    settings: dict[str, Any] = {"target_itl_ms": 1234567.0, "max_wait_ms": 7.5, "bisect": True, "revision": 'a "b"'}
    settings["warm_up_sizes"] = (1, 8)
    lines = as_toml(settings | {"options": {"scale": 2.0}, "call_timeout_s": None}).splitlines()
    assert lines[:3] == ["target_itl_ms = 1234567", "max_wait_ms = 7.5", "bisect = true"]
    assert tomllib.loads("\n".join(lines)) == settings | {"warm_up_sizes": [1, 8], "options": {"scale": 2.0}}
    assert lines[5] == 'options = { "scale" = 2.0 }'
    assert lines[6].startswith("# call_timeout_s is null")
