"""`chairlift plan` as one types it: the demo model is measured, processes simulate, and the profile is kept."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chairlift.demo import demo_path
from chairlift.plan.machine_profile import MachineProfile, SequenceProfile
from chairlift.plan.trace_files import write_trace
from chairlift.plan.traffic import Traffic, synthetic

pytestmark = pytest.mark.processes


def test_the_demo_model_is_measured_and_planned_for(tmp_path: Path) -> None:
    lengths = Traffic(arrivals="poisson:20", input_length="uniform:4:60", output_length="exponential:10")
    write_trace(tmp_path / "trace.jsonl", synthetic(lengths, 3.0)[:24])

    command = [sys.executable, "-P", "-m", "chairlift.cli", "plan", str(demo_path()), "--trace", "trace.jsonl"]
    command += ["--profile", "profile.json", "--processes", "2", "--num-threads", "1", "--measure-seconds", "4"]
    # Of the modes this is simulated soonest; the others: tests/planning/test_plan_command.py.
    command += ["--mode", "high-throughput"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*command, "--out", "plan.json"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=140
    )
    assert done.returncode == 0, done.stderr
    assert "mode high-throughput" in done.stdout
    assert f"chairlift serve {demo_path()}" in done.stdout
    profile = MachineProfile.load(tmp_path / "profile.json").models[demo_path().name]
    assert isinstance(profile, SequenceProfile)
    assert profile.kv_bytes > 0
    plan = json.loads((tmp_path / "plan.json").read_text())["plan"]
    assert [each["strategy"] for each in plan["strategies"]] == ["none", "static", "dynamic", "continuous"]
    best = max(plan["strategies"], key=lambda each: each["rate"])
    chosen = next(each for each in plan["strategies"] if each["strategy"] == plan["chosen"])
    assert chosen["rate"] >= 0.98 * best["rate"] > 0
