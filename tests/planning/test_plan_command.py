"""`chairlift plan`: what it prints can be copied, and what can't be planned is refused before anything runs."""

import argparse
import json
import re
import shlex
import shutil
import signal
import tomllib
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from support.encoder_factory import encoder_folder
from support.model_factory import model_folder
from support.simulated import exact_calls, few_candidates, noisy_profile

from chairlift.cli import main
from chairlift.config.flags import add_flags
from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.config.settings import load
from chairlift.errors import ConfigError
from chairlift.plan.machine_profile import FrontCost, ItemProfile, MachineProfile
from chairlift.plan.planner import StrategyPlan
from chairlift.plan.trace import TraceRequest
from chairlift.plan.trace_files import write_trace
from chairlift.plan.traffic import Traffic, synthetic
from chairlift.planning import plan_command, plan_subject, plan_traffic
from chairlift.planning.plan_report import PlanResults, _to_copy

DESCRIBED = ("--rate", "5", "--input-lengths", "constant:8", "--output-lengths", "constant:4")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plan_traffic, "_MAKE_UP", 100)
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
    targets = ("--target-ttft-ms", 900, "--target-itl-ms", 60)
    assert plan("--trace", trace, "--profile", profile, *targets, "--out", out) == 0
    text = capsys.readouterr().out
    assert "TTFT within 900 ms, ITL within 60 ms, for 95% of the requests" in text
    assert "made up; the HTTP front takes 1.00 ms a request" in text
    assert "knee" in text
    assert "1.00 GB of weights" in text
    saved = json.loads(out.read_text())
    chosen = next(each for each in saved["plan"]["strategies"] if each["strategy"] == saved["plan"]["chosen"])
    wanted = SequenceConfig(model=str(model_folder()), **chosen["settings"])
    (command,) = re.findall(r"```\nchairlift serve (.*)\n```", text)
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert load(vars(parser.parse_args(shlex.split(command))), {}, tmp_path, "").models[0].config == wanted
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


def test_lengths_that_are_not_said_are_those_that_the_settings_expect(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHAIRLIFT_EXPECTED_INPUT_TOKENS", "40")
    assert plan("--rate", 5, "--profile", profile) == 1
    assert "say what comes" in capsys.readouterr().err
    monkeypatch.setenv("CHAIRLIFT_EXPECTED_OUTPUT_TOKENS", "12")
    expected, said = tmp_path / "expected.json", tmp_path / "said.json"
    wanted = ("--rate", 5, "--profile", profile, "--mode", "high-throughput")
    assert plan(*wanted, "--out", expected) == 0
    lengths = ("--input-lengths", "exponential:40", "--output-lengths", "exponential:12")
    assert plan(*wanted, *lengths, "--out", said) == 0
    assert json.loads(expected.read_text())["facts"] == json.loads(said.read_text())["facts"]


def test_a_profile_is_used_for_what_it_was_measured_with(
    trace: Path, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_subject, "_measured_sequences", lambda config, seconds: MachineProfile.load(profile))
    kept = tmp_path / "kept.json"
    wanted = ("--trace", trace, "--profile", kept, "--mode", "high-throughput")
    assert plan(*wanted) == 0
    assert MachineProfile.load(kept).settings["model"] == model_folder().name
    capsys.readouterr()
    assert plan(*wanted, "--quantization", "int8") == 1
    assert "it was measured with quantization 'none', and the plan is for 'int8'" in capsys.readouterr().err
    for name, value in (("OPS", "reference"), ("IMPLEMENTATION", "native"), ("BLOCK_SIZE", "32")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(f"CHAIRLIFT_{name}", value)
            assert plan(*wanted) == 1
        assert f"it was measured with {name.lower()} " in capsys.readouterr().err
    monkeypatch.setenv("CHAIRLIFT_EXPECTED_INPUT_TOKENS", "40")
    other = shutil.copytree(model_folder(), tmp_path / "moved")
    # One of the two expectations has no effect, and the folder may have been moved.
    subject = plan_subject.subject_here(argparse.Namespace(model=str(other), examples=None))
    plan_subject._check_settings(kept, MachineProfile.load(kept), subject)
    monkeypatch.setenv("CHAIRLIFT_EXPECTED_OUTPUT_TOKENS", "2")
    capsys.readouterr()
    assert plan(*wanted) == 1
    assert "expected_output_tokens None, and the plan is for 42; name another file" in capsys.readouterr().err
    monkeypatch.delenv("CHAIRLIFT_EXPECTED_OUTPUT_TOKENS")
    weights = max(other.iterdir(), key=lambda path: path.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert main(["plan", str(other), "--processes", "1", *map(str, wanted)]) == 1
    assert f"it was measured with other files than those of {other}; name another" in capsys.readouterr().err


def test_a_profile_that_says_less_is_used_for_what_it_says(profile: Path) -> None:
    """Those of earlier versions name the folder, and no files."""
    machine = MachineProfile.load(profile)
    subject = plan_subject.subject_here(argparse.Namespace(model=str(model_folder()), examples=None))
    for settings in ({}, {"model": model_folder().name, "dtype": "auto"}, {"ops": "auto", "unknown": 1}):
        machine.settings = settings
        plan_subject._check_settings(profile, machine, subject)
    machine.settings = {"model": "other"}
    with pytest.raises(ConfigError, match="measured with model 'other', and the plan is for"):
        plan_subject._check_settings(profile, machine, subject)
    of_class = plan_subject.Subject("m", ItemConfig(model="module:Class", options={"a": (1, 2)}), 1, lambda _: machine)
    machine.settings = plan_subject._settings_of(of_class)
    plan_subject._check_settings(profile, machine, of_class)
    with pytest.raises(ConfigError, match=r"measured with options {'a': \[1, 2\]}"):
        plan_subject._check_settings(
            profile, machine, of_class._replace(config=ItemConfig(model="module:Class", options={"a": 3}))
        )


def test_where_nothing_may_be_written_nothing_is_measured(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write to any folder, so it is only said to be closed.
    monkeypatch.setattr("chairlift.bench.output_files.os.access", lambda path, mode: False)
    monkeypatch.setattr(plan_subject, "_measured_sequences", lambda config, seconds: pytest.fail("it was measured"))
    for flag in ("--out", "--profile", "--plot"):
        assert plan("--trace", trace, flag, tmp_path / "file") == 1
        assert f"{flag} {tmp_path / 'file'} can't be written: you may not write there" in capsys.readouterr().err


def test_what_can_not_be_saved_after_all_is_told(
    trace: Path, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan("--trace", trace, "--profile", profile, "--mode", "high-throughput", "--out", "/dev/full") == 1
    told = capsys.readouterr()
    assert "knee" in told.out
    assert "--out /dev/full can't be written: No space left on device" in told.err
    folder = tmp_path / "gone"
    folder.mkdir()

    def measured(config: SequenceConfig, seconds: float) -> MachineProfile:
        folder.rmdir()
        return MachineProfile.load(profile)

    monkeypatch.setattr(plan_subject, "_measured_sequences", measured)
    assert plan("--trace", trace, "--profile", folder / "profile.json") == 1
    assert f"--profile {folder / 'profile.json'} can't be written: No such file" in capsys.readouterr().err


def test_a_picture_of_the_mode_that_nobody_says(
    trace: Path, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert plan("--trace", trace, "--profile", profile, "--plot", tmp_path / "plan.png") == 0
    assert "mode balanced" in capsys.readouterr().out
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
        ((*DESCRIBED, "--seconds", "5"), "--seconds takes a part of a --trace, and there is none"),
        (("--trace", "TRACE", "--seconds", "-5"), "--seconds must be more than 0, and finite, got -5"),
        (("--trace", "TRACE", "--seconds", "0.001"), "a plan needs 20 requests or more"),
        ((*DESCRIBED, "--target-ttft-ms", "-5"), "--target-ttft-ms must be more than 0"),
        ((*DESCRIBED, "--target-ttft-ms", "5", "--mode", "balanced"), "--mode is for those who give no target"),
        ((*DESCRIBED, "--percentile", "100"), "percentile must be between 0 and 100"),
        ((*DESCRIBED, "--processes", "0"), "--processes must be at least 1"),
        ((*DESCRIBED, "--out", "nowhere/plan.json"), "--out nowhere/plan.json can't be written: there is no folder"),
        ((*DESCRIBED, "--profile", "nowhere/profile.json"), "--profile nowhere/profile.json can't be written"),
        ((*DESCRIBED, "--out", "/"), "--out / can't be written: it is a folder"),
        ((*DESCRIBED, "--plot", "/"), "--plot / can't be written: it is a folder"),
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


def lasting(count: int, gap: float = 0.1, start: float = 0.0, **about: Any) -> list[TraceRequest]:
    """Requests of the same lengths, and with equal gaps."""
    lengths = {"input_length": 4, "output_length": 8} | about
    return [TraceRequest(arrival=start + gap * n, **lengths) for n in range(count)]


def test_what_fits_is_left_as_it_is_and_what_does_not_is_told(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    wanted = ("--profile", profile, "--max-model-len", 16, "--mode", "high-throughput", "--out", out)
    write_trace(tmp_path / "t", lasting(20, output_length=12))
    assert plan("--trace", tmp_path / "t", *wanted) == 0
    assert "were cut" not in capsys.readouterr().out
    assert json.loads(out.read_text())["facts"]["output_mean"] == 12
    write_trace(tmp_path / "t", [*lasting(20, output_length=12), *lasting(3, start=2.0, output_length=500)])
    assert plan("--trace", tmp_path / "t", *wanted) == 0
    assert "- 3 of 23 requests were cut to the model's 16 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("promised", [(), ("--mode", "low-latency"), ("--target-ttft-ms", 900)])
def test_no_latency_is_promised_where_nobody_waits(
    promised: tuple[object, ...], profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "t", lasting(24, background=True))
    wanted = ("--trace", tmp_path / "t", "--profile", profile)
    assert plan(*wanted, *promised) == 1
    said = capsys.readouterr().err
    assert "all 24 requests ran in the background, where nobody waits, so no latency can be promised" in said
    assert "--mode high-throughput" in said
    assert ("leave out the targets" in said) == ("--target-ttft-ms" in promised)
    # Somebody comes, but later than what is simulated.
    write_trace(tmp_path / "t", [*lasting(600, background=True, output_length=40), *lasting(30, start=60.0)])
    assert plan(*wanted, *promised) == 1
    assert re.search(r"the first \d+ requests, which are simulated, ran in the background", capsys.readouterr().err)


def test_the_mode_without_targets_takes_requests_for_which_nobody_waits(
    profile: Path, items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mode = ("--mode", "high-throughput")
    write_trace(tmp_path / "t", lasting(24, background=True))
    assert plan("--trace", tmp_path / "t", "--profile", profile, *mode) == 0
    text = capsys.readouterr().out
    assert "nobody waits for these requests, which ran in the background" in text
    assert "Does anybody wait for each answer? No, all run in the background" in text
    assert "takes up to 0 s without company" not in text
    write_trace(tmp_path / "t", lasting(24, background=True, items=2))
    assert plan_items("--trace", tmp_path / "t", "--profile", items, *mode) == 0
    assert "Does anybody wait for each answer? No, all run in the background" in capsys.readouterr().out


def test_a_pause_is_told_and_a_part_of_a_trace_is_planned_with(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    write_trace(tmp_path / "t", [*lasting(30), *lasting(30, start=82_803.0)])
    wanted = ("--trace", tmp_path / "t", "--profile", profile, "--mode", "high-throughput", "--out", out)
    assert plan(*wanted) == 0
    said = "a pause of 23 h counts as traffic, and what comes around it as bursts: plan with a part of the trace"
    assert f"{said}, by --seconds" in capsys.readouterr().out
    assert plan(*wanted, "--seconds", 60) == 0
    assert "a pause" not in capsys.readouterr().out
    facts = json.loads(out.read_text())["facts"]
    assert (facts["requests"], facts["rate"]) == (30, pytest.approx(30 / 2.9))


def access_log(path: Path, count: int = 40) -> Path:
    line = '10.0.0.1 - - [29/Nov/2026:22:00:{second:02} +0000] "{method} /v1/chat/completions HTTP/1.1" 200 512\n'
    methods = ("POST", "OPTIONS")
    path.write_text("".join(line.format(second=n // 4, method=each) for n in range(count) for each in methods))
    return path


def test_an_access_log_is_planned_with_the_lengths_that_are_said(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, out = access_log(tmp_path / "access.log"), tmp_path / "plan.json"
    wanted = ("--trace", log, "--profile", profile, "--mode", "high-throughput", "--input-lengths", "constant:7")
    # Either length may be what the settings expect.
    monkeypatch.setenv("CHAIRLIFT_EXPECTED_OUTPUT_TOKENS", "12")
    assert plan(*wanted, "--out", out) == 0
    note = "access log: 40 requests to '/v1/chat/completions' (40); 40 lines are left out: 40 not POST"
    assert note in capsys.readouterr().out
    facts = json.loads(out.read_text())["facts"]
    assert (facts["requests"], facts["input_mean"]) == (40, 7)
    assert facts["output_mean"] == pytest.approx(12, rel=0.5)
    assert facts["rate"] == pytest.approx(4.0, rel=0.2)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "access.log is an access log, which tells no lengths: say --input-lengths and --output-lengths"),
        (("--input-lengths", "constant:8"), "tells no lengths: say --input-lengths and --output-lengths"),
        ((*DESCRIBED[2:], "--trace-model", "m"), "chooses among models, which an access log does not name"),
        ((*DESCRIBED[2:], "--items", "2"), "--items is for models that answer in one call"),
    ],
)
def test_what_an_access_log_can_not_be_planned_with(
    arguments: tuple[str, ...], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("--trace", access_log(tmp_path / "access.log"), *arguments) == 1
    assert problem in capsys.readouterr().err


def test_an_access_log_of_what_is_answered_in_one_call(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = access_log(tmp_path / "access.log")
    assert plan_items("--trace", log, "--profile", items) == 1
    assert "none of its lines is a POST to a model that answers in one call" in capsys.readouterr().err
    log.write_text(log.read_text().replace("/v1/chat/completions", "/v2/models/m/infer"))
    assert plan_items("--trace", log, "--profile", items, "--items", 3) == 0
    assert "3 items in each on average" in capsys.readouterr().out


@pytest.fixture
def items(tmp_path: Path) -> Path:
    """A profile of a class whose calls cost 5 ms, and 1 ms an item."""
    path = tmp_path / "items.json"
    made = msgspec.structs.replace(exact_calls(0.005, 0.001), cores=0.5, cpus=2, process_bytes=3 * 10**8)
    MachineProfile(machine="made up", front=FrontCost(request=1e-4, item=1e-5), models={"formula": made}).save(path)
    return path


def plan_items(*arguments: object, model: str = "module:Class") -> int:
    return main(["plan", model, "--processes", "1", *map(str, arguments)])


def test_a_plan_for_models_that_answer_in_one_call(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    wanted = ("--profile", items, "--rate", 100, "--items", 3, "--target-e2e-ms", 60, "--out", out)
    draws = ("--plot", picture) if find_spec("matplotlib") else ()
    assert plan_items(*wanted, *draws) == 0
    text = capsys.readouterr().out
    assert "E2E within 60 ms, for 95% of the requests" in text
    assert "10 us an item" in text
    assert "| items/s | latency p95 ms | mean batch | limited by" in text
    assert "knee" in text
    assert "TTFT" not in text
    assert "A call costs 5 ms by itself and 1 ms for each item: 8 items in one call are 3.7 times as fast" in text
    saved = json.loads(out.read_text())
    assert [each["strategy"] for each in saved["plan"]["strategies"]] == ["none", "static", "dynamic"]
    assert saved["plan"]["chosen"] == "dynamic"
    chosen = saved["plan"]["strategies"][2]
    assert chosen["at"]["items"] == pytest.approx(3 * chosen["at"]["throughput"])
    config = ItemConfig(model="module:Class", **chosen["settings"])
    count = config.instances
    assert count > 1, "a class that keeps half a core busy has two instances on two of them"
    assert f"each of {count} workers takes up to 0.30 GB" in text
    (command,) = re.findall(r"```\nchairlift serve (.*)\n```", text)
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert load(vars(parser.parse_args(shlex.split(command))), {}, tmp_path, "").models[0].config == config
    (table,) = re.findall(r"```toml\n(.*?)\n```", text, re.DOTALL)
    assert ItemConfig(**tomllib.loads(table)) == config
    assert not draws or picture.read_bytes().startswith(b"\x89PNG")


def test_a_trace_of_items(items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = [
        TraceRequest(arrival=0.01 * n, input_length=1, items=2, model="m", background=n % 3 == 0) for n in range(30)
    ]
    write_trace(tmp_path / "t", requests)
    assert plan_items("--profile", items, "--trace", tmp_path / "t", "--mode", "low-latency") == 0
    assert "2 items in each on average" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "say what comes: --trace FILE, or --rate"),
        (("--rate", 5, "--output-lengths", "constant:4"), "--output-lengths is of answers token by token"),
        (("--rate", 5, "--input-lengths", "constant:4"), "--input-lengths is of texts"),
        (("--rate", 5, "--items", 0), "--items must be between 1 and"),
        (("--rate", 5, "--target-ttft-ms", 4), "--target-ttft-ms and --target-itl-ms are of answers token by token"),
        (("--rate", 5, "--target-itl-ms", 4), "--target-ttft-ms and --target-itl-ms are of answers token by token"),
        (("--rate", 5, "--examples", "nowhere"), "--examples nowhere"),
        (("--trace", "TRACE"), "has no requests to a model that answers in one call"),
        (("--rate", 5, "--profile", "OTHER"), "it must hold one model that answers in one call, and has 0"),
    ],
)
def test_what_can_not_be_planned_of_items(
    arguments: tuple[object, ...], problem: str, trace: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"TRACE": trace, "OTHER": profile}
    assert plan_items(*(files.get(str(each), each) for each in arguments)) == 1
    assert problem in capsys.readouterr().err


def test_what_only_items_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*DESCRIBED, "--items", 3) == 1
    assert "--items is for models that answer in one call" in capsys.readouterr().err
    assert plan(*DESCRIBED, "--examples", "nowhere") == 1
    assert "--examples is for models that answer in one call" in capsys.readouterr().err
    assert plan_items("--rate", 5, "--examples", "nowhere", model=str(encoder_folder("bert"))) == 1
    assert "--examples is not for models of texts, which are made up" in capsys.readouterr().err


def test_words_lists_and_tables_can_be_copied_too(tmp_path: Path) -> None:
    model = "my file.py:Own"
    settings = {
        "served_model_name": "my model's",
        "warm_up_sizes": (1, 8),
        "options": {"a b": [1, {"c": "d\x7f\u00e9", "e": []}], "f": 2.5},
        "retries": 0,
        "bisect": False,
        "call_timeout_s": None,
    }

    def to_copy(**given: Any) -> tuple[dict[str, Any], str]:
        results = SimpleNamespace(title=model, model=model, given=given)
        told = _to_copy(cast(PlanResults, results), cast(StrategyPlan, SimpleNamespace(settings={"max_wait_ms": 3.0})))
        (command,) = re.findall(r"```\nchairlift serve (.*)\n```", told)
        (table,) = re.findall(r"```toml\n(.*?)\n```", told, re.DOTALL)
        parser = argparse.ArgumentParser()
        add_flags(parser)
        return vars(parser.parse_args(shlex.split(command))), table

    wanted = ItemConfig(model=model, max_wait_ms=3.0, **settings)
    flags, table = to_copy(**settings)
    assert load(flags, {}, Path.cwd(), "").models[0].config == wanted
    in_file = msgspec.convert(tomllib.loads(table), ItemConfig)
    assert in_file == msgspec.structs.replace(wanted, call_timeout_s=ItemConfig(model=model).call_timeout_s)
    assert "# call_timeout_s is null, or holds one, which TOML does not have: give it as a flag" in table
    flags, table = to_copy(revision="v1.0", options={"a": None})
    assert (flags["revision"], flags["options"]) == ("v1.0", '{"a": null}')
    assert "# options is null, or holds one" in table


@pytest.mark.processes
def test_those_who_simulate_are_deaf_to_ctrl_c_and_this_process_is_not() -> None:
    deaf_to = partial(signal.pthread_sigmask, signal.SIG_BLOCK)
    with plan_command._mapper(2) as mapper:
        (found,) = mapper(deaf_to, [()])
    assert signal.SIGINT in found
    assert signal.SIGINT not in deaf_to(())


@pytest.mark.parametrize("kind", ["encoder", "onnx", "python"])
def test_models_of_every_kind_are_measured(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths: tuple[str, ...] = ()
    if kind == "encoder":
        model, lengths = str(encoder_folder("bert")), ("--input-lengths", "uniform:4:40")
    elif kind == "onnx":
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
        from support.onnx_models import linear

        model = linear(tmp_path / "net.onnx")
    else:
        model = f"{tmp_path / 'own.py'}:Own"
        (tmp_path / "own.py").write_text("class Own:\n    def predict(self, batch):\n        return batch\n")
        (tmp_path / "lines").write_text("[1]\n[2]\n")
        lengths = ("--examples", str(tmp_path / "lines"))
    saved = tmp_path / "profile.json"
    wanted = ("--rate", 20, "--measure-seconds", 1, "--num-threads", 1, "--profile", saved, "--mode", "high-throughput")
    assert plan_items(*wanted, *lengths, model=model) == 0
    text = capsys.readouterr().out
    assert "its worker takes up to" in text or "workers takes up to" in text
    (made,) = MachineProfile.load(saved).models.values()
    assert isinstance(made, ItemProfile)
    assert max(call.items for call in made.calls) == 64
    assert (max(call.computed for call in made.calls) > 64) == (kind == "encoder")
