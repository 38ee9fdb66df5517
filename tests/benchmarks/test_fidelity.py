"""What benchmarks/fidelity.py makes of a real and of a simulated run: the same figures, from the same requests."""

import sys
from pathlib import Path

import pytest
from support.simulated import exact_profile

from chairlift.bench.completion_stream import Outcome
from chairlift.bench.latency import figures
from chairlift.bench.load import Load
from chairlift.config.sequences import SequenceConfig
from chairlift.plan.machine_profile import FrontCost
from chairlift.plan.sequences import SequenceModel
from chairlift.plan.trace import TraceRequest, duration

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import fidelity

TRACE = [TraceRequest(arrival=0.3 * index, input_length=20, output_length=5) for index in range(50)]
MODEL = SequenceModel(SequenceConfig(model="formula"), exact_profile())


def test_a_simulated_run_is_summed_up_as_a_real_one() -> None:
    load = fidelity.simulated(MODEL, FrontCost(), TRACE, 10.0)
    found = figures(load, fidelity.NO_TARGET)
    assert (found["requests"], found["failed"], found["tokens"]) == (50, 0, 250)
    # By hand: a prompt of 20 tokens alone, then steps of one.
    prefill = 8e-3 + 20 * 2e-4 + 20 * 5e-7 + 210 * 1e-7
    assert found["ttft_ms"]["p50"] == pytest.approx(1000 * prefill)
    assert found["itl_ms"]["p50"] == pytest.approx(8.2, rel=0.01)
    same = fidelity.rows({"real": found, "simulated": found})
    assert all(row["error_percent"] == 0 for row in same if row["figure"] != "failed")


def test_errors_are_relative_to_the_real_run() -> None:
    def run(ttft: float) -> Load:
        times = [ttft, ttft + 0.1, ttft + 0.2]
        return Load(0.0, 1.0, [Outcome(0.0, 0.0, times[-1], times, 3)], 0.0)

    real, seen = (figures(run(ttft), fidelity.NO_TARGET) for ttft in (0.2, 0.3))
    errors = {row["figure"]: row.get("error_percent") for row in fidelity.rows({"real": real, "simulated": seen})}
    assert errors["TTFT p50 ms"] == pytest.approx(50)
    assert errors["ITL p95 ms"] == pytest.approx(0)
    others = fidelity.rows({"real": seen, "simulated": seen, "after": real, "again": real})
    for name in ("after_percent", "again_percent"):
        apart = {row["figure"]: row.get(name) for row in others}
        assert apart["TTFT p50 ms"] == pytest.approx(-100 / 3)


def test_every_round_says_what_the_machine_was() -> None:
    front = {"request": 1e-3, "contention": 1.2, "delays": [[1, 1e-3]]}
    measured = [{"front": front, "capacity": capacity} for capacity in (10.0, 12.0)]
    measured[1]["capacity_after"] = 9.0
    measured.append({"front": front, "capacity": [11.0, 10.5, 8.0]})
    names = {"trace": "bursty", "load": 0.5, "figure": "TTFT p50 ms", "real": 100.0}
    errors = ((1, 90.0, -10.0), (2, 120.0, 20.0))
    runs = [{**names, "round": number, "simulated": seen, "error_percent": error} for number, seen, error in errors]
    text = fidelity.markdown({"runs": runs, "measured": measured})
    assert "capacity 10.00/s; then front" in text
    assert "capacity 12.00/s, 9.00/s as measured after the loads" in text
    assert "capacity 11.00/s, 10.50, 8.00/s as measured after the loads" in text
    assert "+5.0% (-10.0%-+20.0%)" in text


def test_a_table_says_what_is_outside_its_limits() -> None:
    def run(figure: str, load: float, **percent: float | None) -> dict[str, object]:
        return {"figure": figure, "load": load, "error_percent": percent["before"], "own_percent": percent.get("own")}

    runs = [
        run("tok/s", 0.5, before=-3.1, own=3.0),
        run("TTFT p50 ms", 0.5, before=5.0),
        run("ITL p95 ms", 0.85, before=10.1),
        run("ITL p95 ms", 0.95, before=14.9),
        run("TTFT p95 ms", 1.1, before=-12.0),
        run("E2E p99 ms", 0.5, before=90.0),
        run("failed", 0.5, before=None),
    ]
    wide = "tok/s at 50% (-3.1%), ITL p95 at 85% (+10.1%), TTFT p95 at 110% (-12.0%)"
    assert fidelity.outside(runs).splitlines() == [
        f"- as measured before, 3 of 5 outside: {wide}",
        "- by its own steps, 0 of 1 outside",
    ]


def test_loads_are_shares_of_what_can_be_done() -> None:
    long = [TraceRequest(arrival=0.3 * index, input_length=20, output_length=5) for index in range(4000)]
    capacity = fidelity.capacity_of(MODEL, FrontCost(), TRACE)
    for load in (0.5, 2.0):
        sent = fidelity.at_load(long, load * capacity, 4.0)
        assert len(sent) / duration(sent) == pytest.approx(load * capacity)
        assert duration(sent) == pytest.approx(4.0, rel=0.02)


def test_the_settings_are_those_of_the_flags() -> None:
    config = fidelity.settings_of("folder", ["--max-num-seqs", "12", "--port", "1", "--no-enable-prefix-caching"])
    assert (config.model, config.max_num_seqs, config.enable_prefix_caching) == ("folder", 12, False)
