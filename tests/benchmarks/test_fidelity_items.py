"""What benchmarks/fidelity_items.py makes of a real and of a simulated load."""

import sys
from pathlib import Path

import pytest

from chairlift.bench.completion_stream import Outcome
from chairlift.bench.load import Load
from chairlift.plan.item_case import ItemCase
from chairlift.plan.machine_profile import CallSample, FrontCost, ItemProfile
from chairlift.plan.trace import TraceRequest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import fidelity_items


def load_of(*seconds: float, failed: int = 0) -> Load:
    outcomes = [Outcome(5.0 + place, 5.0 + place, 5.0 + place + each, [], 1) for place, each in enumerate(seconds)]
    for outcome in outcomes[:failed]:
        outcome.error = "refused"
    return Load(5.0, 10.0, outcomes, 0.0)


def test_answers_count_while_requests_come() -> None:
    found = fidelity_items.summed_up(load_of(0.5, 1.0, 20.0), 10.0)
    assert found["answers/s"] == 0.2
    assert found["p50 ms"] == pytest.approx(1000.0)
    assert found["failed"] == 0
    rows = fidelity_items.rows(load_of(1.0, 1.0, failed=1), load_of(1.1, 1.1), 10.0)
    assert {row["figure"]: row["error_percent"] and round(row["error_percent"]) for row in rows} == {
        "answers/s": 100,
        "p50 ms": 10,
        "p95 ms": 10,
        "mean ms": 10,
        "failed": -100,
    }


def test_the_simulated_load_is_that_of_the_scheduler() -> None:
    calls = [CallSample(1, 10.0, 0.002)] * 40
    profile = ItemProfile(model="m", call=0.001, size=1e-4, calls=calls, cores=1.0, cpus=2)
    trace = [fidelity_items.tokens_of(TraceRequest(arrival=0.1 * place, input_length=8)) for place in range(20)]
    config = fidelity_items.settings_of("some/file.py:Class", ["--max-wait-ms", "3"])
    case = ItemCase(profile, tuple(trace), front=FrontCost(hop=1e-4))
    load = fidelity_items.simulated(case.model(config), FrontCost(hop=1e-4), trace)
    assert all(outcome.error is None for outcome in load.outcomes)
    # Nobody comes meanwhile: the wait, a call of one item of size 1, and the way there and back.
    assert fidelity_items.summed_up(load, 2.0)["p50 ms"] == pytest.approx(3 + 1.1 + 0.2, rel=0.01)
