"""Figures of a simulation, against one small enough to be counted by hand."""

import pytest
from support.simulated import exact_profile

from chairlift.config.sequences import SequenceConfig
from chairlift.core.cost import Coefficients
from chairlift.plan.figures import Latencies, Percentiles, Targets, latencies, report
from chairlift.plan.sequences import SequenceModel
from chairlift.plan.simulated_run import SimulatedRequest, SimulatedRun, SimulatedSteps, within
from chairlift.plan.simulator import simulate
from chairlift.plan.trace import TraceRequest


def test_figures_are_those_that_one_counts() -> None:
    """Steps of 0.1 s, one request at a time, of two and of four tokens."""
    served = SequenceModel(
        SequenceConfig(model="formula", strategy="none"), exact_profile(Coefficients(0.1, 0.0, 0.0, 0.0)), "m"
    )
    trace = [
        TraceRequest(arrival=1.0, input_length=5, output_length=2),
        TraceRequest(arrival=1.1, input_length=7, output_length=4),
        TraceRequest(arrival=1.5, input_length=9999, output_length=4),
    ]
    found = report(simulate([served], trace), Targets(ttft=0.15))
    assert (found.requests, found.answered, found.refused, found.shed) == (3, 2, 1, {})
    assert found.seconds == pytest.approx(0.6)
    assert found.throughput == pytest.approx(2 / 0.6)
    assert found.output_tokens == pytest.approx(6 / 0.6)
    assert found.prompt_tokens == pytest.approx(12 / 0.6)
    assert found.offered == pytest.approx(3 / 0.5)
    assert found.goodput == pytest.approx(1 / 0.5)
    assert found.inside == pytest.approx(1 / 3)
    assert (found.ttft.count, found.ttft.mean, found.ttft.p50) == pytest.approx((2, 0.15, 0.15))
    assert (found.itl.count, found.itl.p50, found.itl.p99) == pytest.approx((4, 0.1, 0.1))
    assert (found.e2e.count, found.e2e.mean) == pytest.approx((2, 0.35))
    assert found.queue.mean == pytest.approx(0.05)
    gauges = found.gauges["m/0"]
    assert (gauges.steps, gauges.mean_batch, gauges.most_running) == (6, 1.0, 1)
    assert gauges.busy == pytest.approx(1.0)
    assert gauges.mean_waiting == pytest.approx(1 / 6)


def test_targets_are_for_each_request() -> None:
    served = SequenceModel(SequenceConfig(model="formula"), exact_profile(Coefficients(0.1, 0.0, 0.0, 0.0)), "m")
    outcome = simulate([served], [TraceRequest(arrival=0.0, input_length=5, output_length=3)])
    (life,) = outcome.requests
    assert life.tpot == pytest.approx(0.1)
    assert Targets(ttft=0.11, tpot=0.11, e2e=0.31).met_by(life)
    for missed in (Targets(ttft=0.09), Targets(tpot=0.09), Targets(e2e=0.29)):
        assert not missed.met_by(life)


def test_of_nothing_there_are_zeros() -> None:
    assert Percentiles.of([]) == Percentiles()
    served = SequenceModel(SequenceConfig(model="formula"), exact_profile(), "m")
    found = report(simulate([served], []))
    assert (found.requests, found.throughput, found.inside, found.gauges["m/0"].steps) == (0, 0.0, 0.0, 0)


def test_each_request_counts_by_its_own_gaps() -> None:
    """Two streams of which the short one has one long step in four, and the long one the same in forty."""
    times = [0.1 * step for step in range(4)] + [1.3 + 0.1 * step for step in range(38)]
    steps = SimulatedSteps(delivered=times)
    requests = [
        SimulatedRequest(
            TraceRequest(arrival=0.0, input_length=5, output_length=last + 1),
            "m",
            first=0.0,
            end=times[last],
            num_tokens=last + 1,
            spans=[[0, last]],
        )
        for last in (4, 41)
    ]
    run = SimulatedRun(requests, {("m", 0): steps})
    assert run.felt_itl(requests[0], 75.0) == pytest.approx(0.1)
    assert run.felt_itl(requests[0], 76.0) == pytest.approx(1.0)
    assert run.felt_itl(requests[1], 95.0) == pytest.approx(0.1)
    # Of all gaps two of 45 are long; of the requests, one of two.
    assert latencies(run, 95.0).itl == pytest.approx(1.0)
    assert latencies(SimulatedRun(requests[1:], {("m", 0): steps}), 95.0).itl == pytest.approx(0.1)


def test_one_token_has_no_gap() -> None:
    life = SimulatedRequest(TraceRequest(arrival=0.0, input_length=5, output_length=1), "m", first=0.1, end=0.1)
    life.num_tokens, life.spans = 1, [[0, 0]]
    run = SimulatedRun([life], {("m", 0): SimulatedSteps(delivered=[0.1])})
    assert run.felt_itl(life, 95.0) == 0.0
    assert latencies(run, 95.0) == Latencies(ttft=0.1, itl=0.0, e2e=0.1)


def test_what_so_many_percent_are_within() -> None:
    assert within([], 95.0) == 0.0
    assert within([3.0], 1.0) == 3.0
    samples = [float(number) for number in range(20, 0, -1)]
    assert (within(samples, 95.0), within(samples, 95.1), within(samples, 5.0)) == (19.0, 20.0, 1.0)


def test_whoever_is_given_up_last_took_time_too() -> None:
    served = SequenceModel(SequenceConfig(model="formula"), exact_profile(Coefficients(0.1, 0.0, 0.0, 0.0)), "m")
    trace = [
        TraceRequest(arrival=0.0, input_length=5, output_length=2),
        TraceRequest(arrival=0.0, input_length=5, output_length=100, timeout=1.05),
    ]
    found = report(simulate([served], trace))
    assert (found.answered, found.shed) == (1, {"deadline": 1})
    assert found.seconds == pytest.approx(1.05)
    assert found.gauges["m/0"].busy == pytest.approx(1.1 / 1.05, abs=1e-6)
