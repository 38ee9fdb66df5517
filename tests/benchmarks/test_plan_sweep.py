"""What benchmarks/plan_sweep.py tries, and what it makes of what it measured."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from chairlift.bench.completion_stream import Outcome
from chairlift.bench.latency import Slo
from chairlift.config.flags import add_flags

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import plan_sweep


def test_the_grid_has_forty_settings_of_all_strategies_that_a_server_takes() -> None:
    jobs = plan_sweep.grid("model")
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert len({job.name for job in jobs}) == len({job.flags for job in jobs}) == len(jobs) >= 40
    strategies = [vars(parser.parse_args(list(job.flags))).get("strategy", "continuous") for job in jobs]
    assert set(strategies) == {"continuous", "dynamic", "static", "none"}


def test_a_few_settings_are_of_all_strategies_too() -> None:
    jobs = plan_sweep.grid("model")
    few = plan_sweep.spread(jobs, 12)
    assert len(few) == 12
    assert (few[0], few[-1]) == (jobs[0], jobs[-1])
    assert {dict(zip(job.flags[::2], job.flags[1::2], strict=False)).get("--strategy") for job in few} == {
        *(None, "dynamic", "static", "none")
    }
    assert plan_sweep.spread(jobs, None) == plan_sweep.spread(jobs, 100) == jobs


def test_settings_are_found_by_their_names() -> None:
    jobs = plan_sweep.grid("model")
    assert plan_sweep.named(jobs, [jobs[7].name, jobs[2].name]) == [jobs[7], jobs[2]]
    with pytest.raises(SystemExit, match="no settings of the grid are called 'slots 3'; there are: max-num-seqs 4 "):
        plan_sweep.named(jobs, ["slots 3"])


def test_rates_that_are_near_are_one() -> None:
    assert plan_sweep.merged([5.0, 4.0, 4.1, 5.6, 5.2]) == [4.0, 5.0, 5.6]


def test_the_best_for_each_target_are_measured_again() -> None:
    own = [plan_sweep.Job(plan_sweep.plan_name(target), ()) for target in plan_sweep.TARGETS]
    others = [plan_sweep.Job(name, (name,)) for name in "abcd"]
    brisk, patient = plan_sweep.TARGETS
    reached = {job.name: {brisk: 0.0, patient: 0.0} for job in own}
    reached |= {name: {brisk: float(place), patient: -float(place)} for place, name in enumerate("abcd")}
    final = plan_sweep.finalists(own, [*own, *others], reached, 2)
    assert [job.name for job in final] == [*(job.name for job in own), "d", "c", "a", "b"]


def test_only_later_rounds_decide() -> None:
    (target, *_) = plan_sweep.TARGETS
    planned = plan_sweep.plan_name(target)
    goodputs = [("once", "lucky", 9.0), ("once", planned, 1.0)]
    goodputs += [("again", planned, each) for each in (4.0, 3.8, 4.2)]
    goodputs += [("again", "lucky", each) for each in (5.0, 4.9, 8.0)]
    runs = [
        {"traffic": "chat", "target": target, "settings": name, "stage": stage, "round": 1, "goodput": goodput}
        for stage, name, goodput in goodputs
    ]
    plans = [{"seconds": 31.4}, {"seconds": 60.2}]
    assert plan_sweep._ratios({"runs": runs, "plans": plans}) == [
        f"- chat, {target}: planned 4.00/s, 0.80 of the best (lucky)",
        "- a plan took 31 to 60 s, from a measured profile",
    ]


def test_how_long_those_were_measured_that_decide_is_said() -> None:
    saved = Path(plan_sweep.__file__).parent / "results" / "plan-sweep-long-prompts-served.json"
    results = json.loads(saved.read_text())
    assert "measured again:" in plan_sweep.markdown(results)
    results["settings"]["again_seconds"] = 60.0
    assert "measured again, 60 s at each rate:" in plan_sweep.markdown(results)


def test_pairs_that_differ_by_more_than_noise_have_an_order() -> None:
    real, said = {"a": 1.0, "b": 1.1, "c": 2.0, "d": 3.0}, {"a": 1.0, "b": 1.0, "c": 3.0, "d": 2.0}
    runs = [
        {"traffic": "chat", "target": "brisk", "settings": name, "stage": stage, "goodput": goodput}
        for stage, values in (("once", real), ("simulated", said))
        for name, goodput in values.items()
    ]
    # a and b are as good as each other; c and d are the wrong way round.
    lines = plan_sweep._orders({"runs": runs})
    assert lines == ["- chat, brisk: 4 of 5 pairs over 15% apart in their order"]


def test_a_request_is_inside_if_nearly_all_gaps_are() -> None:
    slo = Slo(600.0, 50.0)
    times = [10.5 + 0.04 * number for number in range(40)]
    assert plan_sweep.kept(Outcome(10.0, 10.0, times[-1], times, 40), slo)
    late = [*times[:20], *(moment + 0.1 for moment in times[20:])]
    assert plan_sweep.kept(Outcome(10.0, 10.0, late[-1], late, 40), slo)  # one gap of 39
    assert not plan_sweep.kept(Outcome(10.0, 10.0, 11.0, [10.5, 10.6, 10.62], 3), slo)  # one of two
    assert not plan_sweep.kept(Outcome(9.0, 9.0, times[-1], times, 40), slo)
    assert not plan_sweep.kept(Outcome(10.0, 10.0, 11.0, times, 40, error="refused"), slo)
    assert plan_sweep.kept(Outcome(10.0, 10.0, 10.1, [10.1], 1), slo)


def test_what_a_plan_promises_is_told_of_all_requests_and_gaps_together() -> None:
    found = plan_sweep.Reached({target: [] for target in plan_sweep.TARGETS}, [])
    quick = [Outcome(10.0, 10.0, 11.0, [10.1 + 0.01 * number for number in range(20)], 20) for _ in range(19)]
    slow = Outcome(10.0, 10.0, 11.0, [10.5, 10.9], 2)
    plan_sweep.note(found, [*quick, slow], 10.0)
    assert found.inside == {"brisk": [1.9], "patient": [1.9]}
    assert found.p95 == [pytest.approx((100.0, 10.0))]
    plan_sweep.note(found, [quick[0], Outcome(10.0, 10.0, 11.0, [], 0, error="refused")], 10.0)
    assert found.p95[1][0] == 3.6e6


@pytest.mark.parametrize("name", plan_sweep.TRAFFICS)
def test_traffics_are_the_same_each_time(name: str) -> None:
    first, second = (plan_sweep.synthetic(plan_sweep.TRAFFICS[name], 50.0) for _ in range(2))
    assert first == second
    assert len(first) == pytest.approx(500, rel=0.3)
