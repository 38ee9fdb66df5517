"""What the scheduler of items achieves, in virtual time: the promises of docs and benchmarks, on short runs."""

import sys
from pathlib import Path

import pytest

from chairlift.core.items.limits import BatchLimits

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "dynamic"))
from simulate import held, p95s
from virtual import Executor, poisson, simulate

FIXED, LINEAR = Executor(0.008, 0.00025), Executor(0.001, 0.004)


@pytest.mark.parametrize(
    ("executor", "slo", "rate", "seconds"), [(FIXED, 0.05, 1980, 6), (FIXED, 0.025, 1240, 6), (LINEAR, 0.06, 204, 40)]
)
def test_nearly_everyone_is_in_time_up_to_the_limit(
    executor: Executor, slo: float, rate: float, seconds: float
) -> None:
    run = simulate(BatchLimits(default_timeout=slo), executor, poisson(rate, seconds, 1))
    assert run.inside(slo) / run.sent >= 0.99


@pytest.mark.parametrize(("executor", "slo", "seconds"), [(FIXED, 0.05, 4), (LINEAR, 0.06, 30)])
@pytest.mark.parametrize("load", [1.3, 10.0])
def test_overload_costs_no_goodput(executor: Executor, slo: float, seconds: float, load: float) -> None:
    capacity = executor.capacity(32)
    run = simulate(BatchLimits(default_timeout=slo), executor, poisson(load * capacity, seconds / load * 1.3, 1))
    assert run.goodput(slo) >= 0.95 * capacity


@pytest.mark.parametrize(("executor", "slo", "seconds"), [(FIXED, 0.05, 3), (LINEAR, 0.06, 24)])
def test_a_target_alone_is_enough(executor: Executor, slo: float, seconds: float) -> None:
    capacity = executor.capacity(32)
    chosen = BatchLimits(target_latency=slo, max_waiting=10**6)
    best = max(held(BatchLimits(max_batch_size=size, max_waiting=10**6), executor, slo, seconds) for size in (4, 32))
    assert best > 0.5 * capacity
    assert max(p95s(chosen, executor, 0.9 * best, seconds)) <= slo
