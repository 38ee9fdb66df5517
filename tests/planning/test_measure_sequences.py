"""Measuring a language model on a server: what is sent to it, what it tells, and what becomes of that."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.serve_process import language_model, servers
from support.simulated import exact_profile

from chairlift.bench.load import Phase
from chairlift.config.sequences import SequenceConfig
from chairlift.core.cost import Coefficients
from chairlift.errors import ConfigError, RequestFailed, Unavailable
from chairlift.plan.machine_profile import MachineProfile
from chairlift.plan.seen_traffic import SeenRequest, SeenSequences, SeenStep
from chairlift.plan.sequences import SequenceModel
from chairlift.plan.simulator import simulate
from chairlift.plan.trace import TraceRequest
from chairlift.planning import told_steps
from chairlift.planning.measure_sequences import _Alone, _Crowds, _crowds, _phases, measure_sequences
from chairlift.planning.running_server import RunningServer
from chairlift.planning.told_steps import ToldSteps


@pytest.mark.processes
def test_a_server_is_measured_under_load_and_is_gone_afterwards(tmp_path: Path) -> None:
    config = SequenceConfig(
        model=str(language_model(tmp_path / "model")),
        max_model_len=400,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        kv_cache_gb=0.01,
        num_threads=1,
        target_itl_ms=5.0,
    )
    heard: list[float] = []
    before = servers()
    profile, front = measure_sequences(config, 3.0, heard.append)
    assert servers() <= before
    assert heard == sorted(heard)
    assert heard[-1] == 1.0
    assert (profile.max_model_len, profile.block_size, profile.max_num_batched_tokens) == (400, 16, 64)
    assert profile.weight_bytes > 0
    assert max(step.tokens for step in profile.steps) <= 64
    assert {step.sequences for step in profile.steps} == {1, 2, 3, 4, 5, 6}
    assert sum(step.gap is not None for step in profile.steps) > len(profile.steps) / 2
    assert {step.began for step in profile.steps} == {None}
    assert 0 < front.request < 1
    assert 0 < front.output_token < front.request
    assert front.contention == 0
    MachineProfile(machine="", front=front, models={"tiny": profile}).check()
    trace = [TraceRequest(arrival=0.0, input_length=100, output_length=20)]
    (life,) = simulate([SequenceModel(config, profile)], trace, front=front).requests
    assert life.num_tokens == 20


@pytest.mark.parametrize("seconds", [0.0, -1.0, 61.0, float("nan")])
def test_the_time_is_bounded(seconds: float) -> None:
    with pytest.raises(ConfigError, match="at most 60 seconds"):
        measure_sequences(SequenceConfig(model="nothing"), seconds)


@pytest.mark.processes
def test_a_model_that_can_not_be_served_is_told(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="can't be served"):
        measure_sequences(SequenceConfig(model=str(tmp_path / "nothing")), 1.0)


def test_what_is_sent_to_a_fast_model_and_to_a_slow_one() -> None:
    assert _crowds(_Alone(1e-5, 1e-3), 40.0, 128, 2048) == _Crowds([1, 2, 4, 8, 16, 32, 64, 128], 1024, 64)
    # Half a second for a token of an answer: few of them, and crowds whose prompts take no more than a fifth of it all.
    assert _crowds(_Alone(1e-2, 0.5), 40.0, 128, 2048) == _Crowds([1, 2, 4, 8, 16, 32, 64], 64, 8)
    assert _crowds(_Alone(100.0, 100.0), 40.0, 128, 2048).levels == [1]
    assert _crowds(_Alone(1e-5, 1e-3), 40.0, 5, 20) == _Crowds([1, 2, 4, 5], 20, 64)


def test_crowds_grow_and_shrink_and_large_ones_have_more_time() -> None:
    assert _phases([1, 4], 16.0) == [Phase(1, 2.0), Phase(4, 6.0), Phase(4, 6.0), Phase(1, 2.0)]


def told(begin: int, end: int) -> SeenSequences:
    """A request that had a step of 10 ms each 20 ms."""
    request = SeenRequest(0.0, 8, end, scheduled=0.0, first=0.01, ended=0.02 * end)
    steps = [SeenStep(0.02 * index + 0.01, 0.01, 1, 8 if index == 0 else 1, 1, 1) for index in range(begin, end)]
    bare = msgspec.structs.replace(exact_profile(Coefficients(0.01, 0.0, 0.0, 0.0)), steps=[])
    return SeenSequences(requests=[request], profile=bare, steps=steps)


def test_no_step_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([told(0, 10), told(5, 12), told(5, 12)])
    monkeypatch.setattr(told_steps, "told_traffic", lambda server, name: next(answers))
    steps = ToldSteps(RunningServer("http://localhost:9"), "tiny")
    for count in (10, 12, 12):
        steps.ask()
        assert len(steps.samples) == count
    assert [step.tokens for step in steps.samples] == [8] + [1] * 11
    assert {step.began for step in steps.samples} == {None}
    assert steps.samples[0].gap == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("said", "kind"),
    [("409: too_little_traffic", ConfigError), ("403: needs the right `admin`", RequestFailed)],
)
def test_a_server_that_tells_nothing(said: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> SeenSequences:
        raise RequestFailed(said)

    monkeypatch.setattr(told_steps, "told_traffic", refuse)
    with pytest.raises(kind):
        ToldSteps(RunningServer("http://localhost:9"), "tiny").ask()
