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

    def planned(*more: str) -> str:
        command = [sys.executable, "-P", "-m", "chairlift.cli", "plan", str(demo_path()), "--trace", "trace.jsonl"]
        command += ["--profile", "profile.json", "--processes", "2", "--num-threads", "1", *more]
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=140)
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = planned("--measure-seconds", "4", "--out", "plan.json")
    assert "mode balanced" in text
    profile = MachineProfile.load(tmp_path / "profile.json").models[demo_path().name]
    assert isinstance(profile, SequenceProfile)
    assert profile.kv_bytes > 0
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert saved["plan"]["chosen"] in text
    assert f"chairlift serve {demo_path()}" in text
    assert planned() == text, "what was measured is read again, and the same comes of it"
