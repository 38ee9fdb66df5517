"""`bench strategies`: the theory of batching, checked on the real thing."""

import json
from pathlib import Path

import pytest
from support.model_factory import model_folder

from chairlift.bench.report import figures, table
from chairlift.bench.strategies import StrategyRun, run_strategy
from chairlift.bench.workload import make_jobs
from chairlift.config.sequences import SequenceConfig
from chairlift.errors import ConfigError
from chairlift.plan.sequence_candidates import with_strategy
from chairlift.runners.decoder.runner import DecoderRunner


def ride(strategy: str, output_len: str, count: int = 64, rate: float | None = None) -> StrategyRun:
    base = SequenceConfig(
        model=str(model_folder()), max_model_len=300, kv_cache_gb=0.05, enable_prefix_caching=False, num_threads=1
    )
    jobs = make_jobs(count, "uniform:4:16", output_len, vocab_size=320, max_model_len=300, rate=rate, seed=1)
    return run_strategy(with_strategy(base, strategy, 8), DecoderRunner, jobs, None if rate else 16)


def test_equal_lengths_cost_static_nothing() -> None:
    static, continuous = (figures(ride(s, "constant:12")) for s in ("static", "continuous"))
    assert static["steps"] / continuous["steps"] == pytest.approx(1.0, abs=0.05)


def test_exponential_lengths_cost_static_about_h8() -> None:
    static, continuous = (figures(ride(s, "exponential:16", 400)) for s in ("static", "continuous"))
    assert static["steps"] / continuous["steps"] == pytest.approx(2.72, rel=0.15)
    assert static["idle_slots_percent"] > continuous["idle_slots_percent"]


def test_every_strategy_makes_the_same_tokens_and_never_overfills() -> None:
    for strategy in ("none", "static", "dynamic", "continuous"):
        run = ride(strategy, "uniform:1:20", 30, rate=400.0)
        assert all(life.finished >= life.first_token >= life.arrival for life in run.lives.values())
        assert max(step.num_seqs for step in run.recorder.steps) <= run.slots
        assert max(r.slot for r in run.recorder.placements.values()) < run.slots
        row = figures(run)
        assert row["padding_percent"] == 0
        assert row["kv_waste_tokens"] <= 15
        assert strategy in table([row])


def test_command_prints_json_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from chairlift.cli import main

    picture = tmp_path / "out.png"
    folder = str(model_folder())
    status = main(["bench", "strategies", folder, "--requests", "8", "--json", "--plot", str(picture)])
    assert status == 0
    rows = json.loads(capsys.readouterr().out)["strategies"]
    assert [row["strategy"] for row in rows] == ["none", "static", "dynamic", "continuous"]
    assert all(row["requests"] == 8 for row in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_table_and_picture_come_from_saved_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from chairlift.cli import main

    saved, picture = tmp_path / "saved.json", tmp_path / "out.png"
    command = ["bench", "strategies", str(model_folder()), "--requests", "8", "--rounds", "2"]
    assert main([*command, "--strategies", "static", "continuous", "--out", str(saved)]) == 0
    printed = capsys.readouterr().out
    runs = json.loads(saved.read_text())["runs"]
    assert [(run["round"], run["strategy"]) for run in runs] == [
        (1, "static"),
        (1, "continuous"),
        (2, "continuous"),
        (2, "static"),
    ]
    assert [len(run.get("bars", ())) for run in runs] == [8, 8, 0, 0]
    assert "medians of 2 rounds" in printed
    assert "continuous against static: " in printed
    assert main(["bench", "strategies", "--saved", str(saved), "--plot", str(picture)]) == 0
    assert capsys.readouterr().out == printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_other_results_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from chairlift.cli import main

    saved = tmp_path / "saved.json"
    saved.write_text('{"benchmark": "compare", "runs": []}')
    assert main(["bench", "strategies", "--saved", str(saved)]) == 1
    assert "not results of `bench strategies`" in capsys.readouterr().err


@pytest.mark.parametrize("spec", ["constant", "uniform:5", "gauss:3", "exponential:0", "trace:missing.csv"])
def test_malformed_lengths_are_refused_by_name(spec: str) -> None:
    with pytest.raises(ConfigError, match=spec.split(":")[-1]):
        make_jobs(1, "constant:4", spec, vocab_size=10, max_model_len=100)
