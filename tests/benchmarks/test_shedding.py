"""Whether the benchmark of who is let in asks what its rows say, and leaves everything as it was."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import shedding
from support.sequences_virtual import Machine

from chairlift.core.sequences import overload
from chairlift.plan.trace import TraceRequest
from chairlift.plan.traffic import Traffic, synthetic


def trace() -> list[TraceRequest]:
    lengths = Traffic(arrivals="gamma:10:3", input_length="uniform:200:900", output_length="exponential:40")
    return synthetic(lengths, 60.0)


def test_a_part_has_the_requests_of_its_seconds_and_the_gaps_of_the_trace() -> None:
    found = list(shedding.part(trace(), 0, 5.0, 40.0))
    assert len(found) == 200
    assert found[0].moment == 0
    assert found[-1].moment == pytest.approx(40.0)
    gaps = [each.arrival for each in trace()[:3]]
    times = [each.moment for each in found[:3]]
    assert (times[2] - times[1]) / (times[1] - times[0]) == pytest.approx((gaps[2] - gaps[1]) / (gaps[1] - gaps[0]))


def test_a_machine_is_as_fast_as_it_was_for_a_while() -> None:
    slowness = shedding.slowness(0.25, 1)
    assert slowness(0.0) == slowness(9.9) == 1.0
    assert len({slowness(float(moment)) for moment in range(600)}) > 9
    assert {shedding.slowness(0.0, 1)(float(moment)) for moment in range(600)} == {1.0}


def test_each_rule_asks_for_as_much_as_it_says() -> None:
    share = overload._SATURATED
    args = shedding._parser().parse_args(["--trace", "none", "--slots", "16"])

    def at(asked: str) -> dict[str, float]:
        arrivals = shedding.part(trace(), 0, 12.0, 40.0)
        return shedding.figures(args, arrivals, Machine(shedding._COST, 0.05), shedding.ASKED[asked])

    without, likely, certain = (at(name) for name in list(shedding.ASKED)[:3])
    assert share == overload._SATURATED
    assert without["refused_percent"] == 0
    assert likely["refused_percent"] > 0
    assert without["in_time_percent"] < likely["in_time_percent"]
    assert likely["kept_percent"] < certain["kept_percent"]
