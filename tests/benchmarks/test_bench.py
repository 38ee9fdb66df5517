"""`bench strategies`: the theory of batching, checked on the real thing."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.model_factory import model_folder

from chairlift.bench import strategies
from chairlift.bench.report import figures, table
from chairlift.bench.strategies import StrategyRun, run_strategy
from chairlift.bench.workload import jobs_of_trace, make_jobs
from chairlift.config.sequences import SequenceConfig
from chairlift.errors import ConfigError
from chairlift.plan.sequence_candidates import with_strategy
from chairlift.plan.trace import TraceRequest
from chairlift.plan.trace_files import write_trace
from chairlift.runners.decoder.runner import DecoderRunner


@pytest.fixture(autouse=True)
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is asked of the collector, which would look through all that other tests have imported as well."""
    asked: list[str] = []
    spy = SimpleNamespace(**{name: partial(asked.append, name) for name in ("collect", "freeze", "unfreeze")})
    monkeypatch.setattr(strategies, "gc", spy)
    yield asked
    # What was loaded may go before the next is.
    assert asked == ["collect", "freeze", "unfreeze"] * (len(asked) // 3)


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


def test_every_strategy_makes_the_same_tokens_and_never_overfills(collector: list[str]) -> None:
    for strategy in ("none", "static", "dynamic", "continuous"):
        run = ride(strategy, "uniform:1:20", 30, rate=400.0)
        assert all(life.finished >= life.first_token >= life.arrival for life in run.lives.values())
        assert max(step.num_seqs for step in run.recorder.steps) <= run.slots
        assert max(r.slot for r in run.recorder.placements.values()) < run.slots
        row = figures(run)
        assert row["padding_percent"] == 0
        assert row["kv_waste_tokens"] <= 15
        assert strategy in table([row])
    assert len(collector) == 4 * 3


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


def recorded(path: Path, count: int = 12) -> Path:
    requests = [
        TraceRequest(arrival=0.02 * n, input_length=5 + n, output_length=3 if n % 2 else 0, items=int(n == 4))
        for n in range(count)
    ]
    write_trace(path, requests)
    return path


def test_a_trace_of_ones_own_is_served_at_its_moments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from chairlift.cli import main

    trace, saved, picture = recorded(tmp_path / "t.jsonl"), tmp_path / "saved.json", tmp_path / "out.png"
    command = ["bench", "strategies", str(model_folder()), "--trace", str(trace), "--strategies", "dynamic"]
    assert main([*command, "--out", str(saved), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "11 requests of t.jsonl, at the times at which they were recorded" in printed
    (run,) = json.loads(saved.read_text())["runs"]
    assert (run["requests"], len(run["bars"])) == (11, 11), "one of them is to another kind of model"
    assert run["seconds"] >= 0.22, "the last comes then"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*command, "--rate", "200", "--requests", "6"]) == 0
    assert "6 requests of t.jsonl, 200 arrivals a second" in capsys.readouterr().out


def test_jobs_are_as_long_and_as_far_apart_as_in_the_trace() -> None:
    trace = [TraceRequest(arrival=1.0 + n, input_length=90 + n, output_length=30 * (n % 2)) for n in range(4)]
    jobs = jobs_of_trace(trace, 3, vocab_size=10, max_model_len=100)
    assert [job.offset for job in jobs] == [0.0, 1.0, 2.0]
    # Who was refused there gets somebody else's length, and both together fit.
    assert [(len(job.prompt_ids), job.output_len) for job in jobs] == [(70, 30)] * 3
    fast = jobs_of_trace(trace, 3, vocab_size=10, max_model_len=100, rate=6.0)
    assert [job.offset for job in fast] == pytest.approx([0.0, 0.25, 0.5])
    with pytest.raises(ConfigError, match="comes at one moment"):
        jobs_of_trace(trace[:1], 9, vocab_size=10, max_model_len=100, rate=6.0)
    with pytest.raises(ConfigError, match="no requests to a language model"):
        jobs_of_trace([TraceRequest(arrival=0.0, input_length=3, items=1)], 9, vocab_size=10, max_model_len=100)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--rate", "0"], "--rate must be more than 0"),
        (["--rate", "5", "--concurrency", "3"], "--concurrency is of a closed loop"),
        (["--trace", "TRACE", "--concurrency", "3"], "--concurrency is of a closed loop"),
        (["--concurrency", "0"], "--concurrency must be at least 1, got 0"),
        (["--concurrency", "-3"], "--concurrency must be at least 1, got -3"),
        (["--concurrency", "4"], "never fills 8 --slots, which static waits for: raise --concurrency to 8"),
        (["--slots", "0"], "--slots must be at least 1, got 0"),
        (["--requests", "0"], "--requests must be at least 1, got 0"),
        (["--trace", "TRACE", "--output-len", "constant:3"], "leave out --prompt-len and --output-len"),
        (["--trace", "nowhere"], "No such file"),
    ],
)
def test_contradictions_are_refused(
    flags: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from chairlift.cli import main

    trace = str(recorded(tmp_path / "t.jsonl"))
    command = ["bench", "strategies", str(model_folder()), *(trace if each == "TRACE" else each for each in flags)]
    assert main(command) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("few", [["--requests", "3"], ["--strategies", "dynamic", "continuous"]])
def test_fewer_clients_than_slots_will_do_where_nobody_waits_for_more(few: list[str]) -> None:
    from chairlift.cli import main

    command = ["bench", "strategies", str(model_folder()), "--requests", "4", "--output-len", "constant:2"]
    assert main([*command, "--strategies", "static", "--concurrency", "3", *few]) == 0


@pytest.mark.parametrize("spec", ["constant", "uniform:5", "gauss:3", "exponential:0", "trace:missing.csv"])
def test_malformed_lengths_are_refused_by_name(spec: str) -> None:
    with pytest.raises(ConfigError, match=spec.split(":")[-1]):
        make_jobs(1, "constant:4", spec, vocab_size=10, max_model_len=100)
