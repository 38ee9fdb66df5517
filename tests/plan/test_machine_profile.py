"""Profiles: what is saved is what is loaded, and what nothing can be simulated with is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.simulated import exact_calls, noisy_profile

from chairlift.errors import ConfigError
from chairlift.plan.machine_profile import FrontCost, MachineProfile


def profile() -> MachineProfile:
    models = {"llm": noisy_profile(), "embedder": exact_calls(0.01, 0.001)}
    front = FrontCost(request=1e-4, hop=2e-5)
    return MachineProfile(machine="2 cores of a formula", front=front, models=dict(models))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    profile().save(path)
    assert MachineProfile.load(path) == profile()


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("front", "hop"), -1, "front.hop must be at least 0"),
        (("front", "step"), 0.001, "unknown field `step`"),
        (("models", "llm", "num_blocks"), 0, "models.llm.num_blocks must be at least 1"),
        (("models", "llm", "cost"), [1, 0, 0, -1], "models.llm.cost.pair must be at least 0"),
        (("models", "llm", "steps", 3), [1, 1, 1, 1, 0.0], r"models.llm.steps\[3\].seconds must be more than 0"),
        (("models", "llm", "steps", 3), [2, 1, 1, 1, 0.1], r"models.llm.steps\[3\] .* impossible counts"),
        (("models", "llm", "steps"), [], "models.llm.steps has 0 samples"),
        (("models", "embedder", "calls", 0), [0, 1.0, 0.1], r"models.embedder.calls\[0\] .* must be positive"),
        (("models", "embedder", "call"), -1.0, "models.embedder.call must be"),
        (("models", "llm", "type"), "trees", "trees"),
    ],
)
def test_what_is_absurd_is_refused_by_name(tmp_path: Path, place: tuple[Any, ...], value: Any, said: str) -> None:
    path = tmp_path / "machine.json"
    profile().save(path)
    data = json.loads(path.read_text())
    inside = data
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=said) as found:
        MachineProfile.load(path)
    assert "machine.json" in str(found.value)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        MachineProfile.load(tmp_path / "nothing.json")
    (tmp_path / "half.json").write_text('{"machine": "x", "models": {')
    with pytest.raises(ConfigError, match=r"half\.json"):
        MachineProfile.load(tmp_path / "half.json")
