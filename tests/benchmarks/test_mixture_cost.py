"""Steps of a mixture are told apart by whether the experts are known."""

import sys
from pathlib import Path

import pytest

from chairlift.core.cost import ExpertReads
from chairlift.plan.machine_profile import StepSample

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import mixture_cost

EXPERTS = ExpertReads(0.9, 0.125)


def test_only_who_knows_the_experts_foresees_small_steps() -> None:
    sizes = [1, 2, 4, 8, 16, 64, 256, 512] * 60
    steps = [
        StepSample(size, size, size, size, 0.04 * EXPERTS.read(size) + 0.0002 * size)
        # In runs, so that both halves have all sizes.
        for size in sizes
    ]
    found = {row["tokens"]: row for row in mixture_cost.rows(steps, EXPERTS)}
    assert found["1"]["measured_ms"] == pytest.approx(40 * EXPERTS.read(1) + 0.2)
    assert abs(found["1"]["experts_percent"]) < 5
    assert found["1"]["plain_percent"] > 40
    assert all(abs(row["experts_percent"]) < 8 for row in found.values())
