"""`chairlift plan`: what it prints can be copied, and what can't be planned is refused before anything runs."""

import argparse
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.model_factory import model_folder
from support.simulated import few_candidates, noisy_profile

from chairlift.cli import main
from chairlift.config.flags import add_flags
from chairlift.config.sequences import SequenceConfig
from chairlift.config.settings import load
from chairlift.plan.machine_profile import FrontCost, MachineProfile
from chairlift.plan.trace import TraceRequest
from chairlift.plan.trace_files import write_trace
from chairlift.plan.traffic import Traffic, synthetic

DESCRIBED = ("--rate", "5", "--input-lengths", "constant:8", "--output-lengths", "constant:4")


@pytest.fixture(autouse=True)
def few() -> Iterator[None]:
    with few_candidates():
        yield


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    front = FrontCost(request=1e-3, output_token=2e-5)
    made = msgspec.structs.replace(noisy_profile(), weight_bytes=10**9, kv_bytes=2 * 10**9)
    MachineProfile(machine="made up", front=front, models={"formula": made}).save(path)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lengths = Traffic(arrivals="poisson:5", input_length="uniform:8:300", output_length="exponential:30")
    write_trace(path, synthetic(lengths, 10.0)[:24])
    return path


def plan(*arguments: object) -> int:
    return main(["plan", str(model_folder()), "--processes", "1", *map(str, arguments)])


def test_what_is_printed_can_be_copied(
    trace: Path, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert plan("--trace", trace, "--profile", profile, "--ttft-ms", 900, "--itl-ms", 60, "--out", out) == 0
    text = capsys.readouterr().out
    assert "TTFT within 900 ms, ITL within 60 ms, for 95%" in text
    assert "made up; the HTTP front takes 1.00 ms a request" in text
    assert "knee" in text
    assert "1.00 GB of weights" in text
    saved = json.loads(out.read_text())
    chosen = next(each for each in saved["plan"]["strategies"] if each["strategy"] == saved["plan"]["chosen"])
    wanted = SequenceConfig(model=str(model_folder()), **chosen["settings"])
    (command,) = re.findall(r"```\nchairlift serve (.*)\n```", text)
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert load(vars(parser.parse_args(command.split())), {}, tmp_path, "").models[0].config == wanted
    (table,) = re.findall(r"```toml\n(.*?)\n```", text, re.DOTALL)
    assert SequenceConfig(**tomllib.loads(table)) == wanted


def test_the_same_plan_comes_of_the_same_seed(trace: Path, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("--trace", trace, "--profile", profile, "--mode", "high-throughput", "--rate", "40")
    assert plan(*wanted) == 0
    text = capsys.readouterr().out
    assert plan(*wanted) == 0
    assert capsys.readouterr().out == text
    assert "targets: none (mode high-throughput)" in text
    assert re.search(r"40 requests a second take \d+ machine", text)


def test_a_picture(trace: Path, profile: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plan("--trace", trace, "--profile", profile, "--plot", tmp_path / "plan.png") == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "say what comes: --trace FILE, or --rate"),
        (("--rate", "5", "--input-lengths", "constant:8"), "say what comes"),
        (("--trace", "TRACE", "--input-lengths", "constant:8"), "leave out --input-lengths"),
        (("--trace", "nowhere"), "No such file"),
        (("--trace", "TRACE", "--trace-model", "other"), "--trace-model other: the trace has"),
        ((*DESCRIBED[:-1], "normal:4"), "length 'normal:4' is not constant:N"),
        ((*DESCRIBED, "--rate", "0"), "--rate must be more than 0"),
        ((*DESCRIBED, "--ttft-ms", "-5"), "--ttft-ms must be more than 0"),
        ((*DESCRIBED, "--ttft-ms", "5", "--mode", "balanced"), "--mode is for those who give no target"),
        ((*DESCRIBED, "--percentile", "100"), "percentile must be between 0 and 100"),
        ((*DESCRIBED, "--processes", "0"), "--processes must be at least 1"),
        ((*DESCRIBED, "--out", "nowhere/plan.json"), "--out nowhere/plan.json: there is no folder"),
        ((*DESCRIBED, "--measure-seconds", "90"), "at most 60 seconds"),
        ((*DESCRIBED, "--trace-model", "m"), "there is none"),
        ((*DESCRIBED, "--kv-cache-gb", "much"), "--kv-cache-gb: must be a number"),
    ],
)
def test_what_can_not_be_planned(
    arguments: tuple[str, ...], problem: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*(trace if each == "TRACE" else each for each in arguments)) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("models", "items", "problem"),
    [(("a", "b"), 0, "is of a, b: choose one with --trace-model"), (("a",), 2, "no requests to a language model")],
)
def test_traces_of_other_models(
    models: tuple[str, ...], items: int, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [
        TraceRequest(arrival=float(n), input_length=4, output_length=3, model=models[n % len(models)], items=items)
        for n in range(30)
    ]
    write_trace(tmp_path / "t", requests)
    assert plan("--trace", tmp_path / "t") == 1
    assert problem in capsys.readouterr().err


def test_too_short_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "t", [TraceRequest(arrival=0.0, input_length=4, output_length=3)] * 30)
    assert plan("--trace", tmp_path / "t") == 1
    assert "got 30 in 0 s" in capsys.readouterr().err


def test_only_language_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.onnx").touch()
    assert main(["plan", str(tmp_path / "net.onnx"), *DESCRIBED]) == 1
    assert "is for one language model's folder" in capsys.readouterr().err
