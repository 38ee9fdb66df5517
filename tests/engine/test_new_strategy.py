"""A strategy is one class and one row: with no other change it is configured, served, measured and explained."""

import argparse
import gc
from pathlib import Path
from typing import Any

import pytest
from support.model_factory import model_folder

from chairlift.bench.report import figures
from chairlift.bench.strategies import run_strategy
from chairlift.bench.workload import make_jobs
from chairlift.cli import main
from chairlift.config.flags import add_flags
from chairlift.config.sequences import SequenceConfig
from chairlift.config.settings import load
from chairlift.core.decision import Reason
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.strategy import STRATEGIES, Admission, Strategy, WaitingView
from chairlift.engine.sequences.engine import Engine
from chairlift.errors import ConfigError
from chairlift.plan.sequence_candidates import with_strategy
from chairlift.runners.decoder.runner import DecoderRunner

BASE = {"model": str(model_folder()), "max_model_len": 300, "kv_cache_gb": 0.05, "num_threads": 1}


class Pairs(Strategy):
    """The double chair: takes two at a time, or whoever is left once nobody else will come."""

    about = "in pairs"
    slots_setting = "batch_size"

    def admit(self, waiting: WaitingView, running: int, now: float) -> Admission:
        free = self.slots - running
        if len(waiting) >= 2 or waiting.closed:
            return Admission(min(free, 2), detail="all chairs are taken")
        return Admission(0, Reason.BATCH, "it waits for another")


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "pairs", Pairs)


def config(**settings: Any) -> SequenceConfig:
    return SequenceConfig(**(BASE | {"strategy": "pairs", "batch_size": 6} | settings))


def test_it_is_configured_by_name(tmp_path: Path) -> None:
    assert config().slots == 6
    with pytest.raises(ConfigError, match="max_wait_ms has no effect under the pairs strategy: it belongs to dynamic"):
        config(max_wait_ms=7.0)
    with pytest.raises(ConfigError, match=r"batch_size has no effect .* it belongs to static and dynamic and pairs"):
        config(strategy="continuous")
    with pytest.raises(ConfigError, match="strategy must be one of none, static, dynamic, continuous, pairs, got 'no'"):
        config(strategy="no")
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert "pairs: in pairs" in " ".join(parser.format_help().split())
    args = parser.parse_args([BASE["model"], "--strategy", "pairs", "--batch-size", "6"])
    (served,) = load(vars(args), {}, tmp_path, "m").models
    assert isinstance(served.config, SequenceConfig)
    assert (served.config.strategy, served.config.slots) == ("pairs", 6)


def test_the_engine_runs_it() -> None:
    engine = Engine(config(), DecoderRunner(config()))
    params = SamplingParams(temperature=0, max_tokens=None)
    for number in range(3):
        prompt = [number + 1] * 5
        engine.add(Request(id=f"r{number}", prompt_ids=prompt, params=params, max_tokens=4, arrival=float(number)))
        output = engine.step()
        assert (output is None) == (number == 0), "the first waits for the second"
    assert engine.scheduler.num_running == 2
    waiting = engine.scheduler.explain("r2")
    assert waiting is not None
    assert (waiting.reason, waiting.detail) == (Reason.BATCH, "it waits for another")
    engine.close_queue()
    ended = set()
    while engine.num_unfinished:
        output = engine.step()
        assert output is not None
        ended |= {update.id for update in output.updates if update.finish_reason is not None}
    assert ended == {"r0", "r1", "r2"}


def test_the_benchmark_measures_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Or the collector would look through all that was imported, for this test and those that follow.
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    jobs = make_jobs(20, "uniform:4:16", "uniform:1:20", vocab_size=320, max_model_len=300, rate=400.0, seed=1)
    run = run_strategy(with_strategy(SequenceConfig(**BASE), "pairs", 4), DecoderRunner, jobs, None)
    assert max(step.num_seqs for step in run.recorder.steps) == figures(run)["slots"] == 4
    assert main(["bench", "strategies", BASE["model"], "--requests", "4", "--strategies", "pairs", "continuous"]) == 0
    assert "continuous against pairs" in capsys.readouterr().out
