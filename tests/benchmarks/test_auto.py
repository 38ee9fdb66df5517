"""What benchmarks/auto.py makes of a traffic and of what servers did with it."""

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from chairlift.bench.completion_stream import Outcome, Target
from chairlift.bench.latency import Slo
from chairlift.bench.load import Load
from chairlift.plan.trace import TraceRequest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import auto
import auto_rates

SLO = Slo(1000, 100)


def arguments(**changed: Any) -> argparse.Namespace:
    found = auto._parser().parse_args(["model"])
    return argparse.Namespace(**vars(found) | changed)


def test_steps_come_at_the_rate_of_their_phase() -> None:
    requests, phases = auto.traffic("steps", arguments(rate=20.0, phase_seconds=100.0))
    counts = [sum(phase.begin <= each.arrival < phase.end for each in requests) for phase in phases]
    assert counts == pytest.approx([2000, 8000, 2000], rel=0.1)
    assert auto.traffic("steps", arguments(rate=20.0, phase_seconds=100.0))[0] == requests


def test_lengths_change_in_the_middle() -> None:
    requests, (first, then) = auto.traffic("mixed", arguments(rate=20.0, phase_seconds=100.0))
    assert [each.arrival for each in requests] == sorted(each.arrival for each in requests)
    assert max(each.input_length for each in requests if each.arrival < first.end) <= 384
    assert min(each.input_length for each in requests if each.arrival >= then.begin) >= 400


def test_a_request_counts_in_the_phase_in_which_it_came() -> None:
    outcomes = [
        Outcome(11.0, 11.0, 11.5, [11.2, 11.5], 5),
        Outcome(14.9, 14.9, 16.0, [15.2, 16.0], 11),  # begun in the first phase, ended in the second
        Outcome(15.0, 15.0, 17.0, [16.5, 17.0], 11),  # its first token came too late
        Outcome(16.0, 16.0, 16.0, error="refused"),
    ]
    phases = [auto.Phase("one", 0.0, 5.0), auto.Phase("two", 5.0, 10.0)]
    one, two = auto.rows(Load(10.0, 10.0, outcomes, 0.0), phases, SLO)
    assert (one["offered"], one["goodput"], one["inside_percent"], one["failed"]) == (0.4, 0.4, 100.0, 0)
    assert (two["offered"], two["goodput"], two["failed"]) == (0.4, 0.0, 1)


def test_the_tuner_is_held_against_the_best_fixed_setting_of_each_phase() -> None:
    fixed = list(auto.FIXED)
    goodputs = {"auto": 9.0, "defaults": 6.0, fixed[0]: 10.0, fixed[1]: 4.0, "vLLM": 3.0}
    runs = [
        {"traffic": "steps", "phase": "once", "server": server, "goodput": goodput, "inside_percent": 90.0}
        for server, goodput in goodputs.items()
    ]
    (line,) = auto._ratios({"runs": runs})
    own = f"- steps, once: `auto` 0.90 of the best fixed setting ({fixed[0]}), 1.50 of defaults"
    assert line == f"{own}, 3.00 of vLLM"
    # A server whose queue grew has a ratio that says how long it did so.
    assert auto._ratios({"runs": [run | {"inside_percent": 89.9} for run in runs]}) == [
        f"{own}; vLLM did not hold this rate"
    ]


def test_fixed_settings_are_flags_that_there_are() -> None:
    from fidelity import settings_of

    for command, _, _ in auto.commands(arguments(vllm=None)).values():
        at = command.index("--dtype")
        assert settings_of("model", command[at:]).dtype == "bfloat16"


def test_a_search_tells_by_how_much_higher_a_rate_the_tuner_holds() -> None:
    found = {"auto": [4.0, 6.0], "defaults": [4.0, 4.0], "vLLM": [2.0, 3.0]}
    runs = [{"server": server, "best_rate": rate} for server, rates in found.items() for rate in rates]
    assert auto_rates._ratios({"runs": runs}) == ["- highest rate: `auto` 1.25 of defaults, 2.00 of vLLM"]
    # Of one that held none in a round there is no ratio.
    runs[-1]["best_rate"] = None
    assert auto_rates._ratios({"runs": runs}) == ["- highest rate: `auto` 1.25 of defaults"]
    runs[0]["best_rate"] = None
    assert auto_rates._ratios({"runs": runs}) == []


def test_a_rate_holds_while_95_percent_keep_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    args = auto_rates._parser().parse_args(["model", "--rate", "2", "--seconds", "10"])
    trace = [TraceRequest(arrival=float(number), input_length=8, output_length=4) for number in range(1000)]

    def served(target: Any, sent: list[TraceRequest], *rest: Any) -> Load:
        rate, give_up = (len(sent) - 1) / sent[-1].arrival, rest[-1]
        late = 2.0 if rate > 3.0 else 0.1
        outcomes = [Outcome(each.arrival, each.arrival, each.arrival + late, [each.arrival + late], 1) for each in sent]
        return Load(0.0, sent[-1].arrival, outcomes, 0.0, give_up(outcomes))

    monkeypatch.setattr(auto_rates, "replay", served)
    best, rows = auto_rates.find(Target.of("http://h:1", "m", {}), trace, args, "title")
    assert best is not None
    assert 3.0 / auto_rates.PRECISION < best <= 3.0
    assert [row["rate"] for row in rows] == sorted(row["rate"] for row in rows)
    assert {row["given_up"] for row in rows if row["rate"] > 3.1} == {True}
    # At low rates a hundred come all the same.
    assert all(row["requests"] >= 99 for row in rows)
