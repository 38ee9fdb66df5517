"""`chairlift run` as a process: inputs of every kind, kills at any moment, and what it refuses."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.job_harness import batch_line, results
from support.run_process import MODELS, RunProcess, comparable, is_alive, write_mixed
from support.stub_runner import without_torch

from chairlift.cli import main
from chairlift.config.items import ItemConfig
from chairlift.config.run import RunConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.config.settings import ServedModel, Settings, Share
from chairlift.demo import demo_path
from chairlift.errors import JobError
from chairlift.run.identity import check_same, identity
from chairlift.run.main import _Run
from chairlift.run.plan import for_throughput, least_at_once
from chairlift.runners.items import ItemInfo
from chairlift.server.models.item_service import ItemService

pytestmark = pytest.mark.processes
SLOW = ("--model", f"{MODELS}:Slow", "--max-batch-size", "4")


def run(folder: Path, *arguments: str, **settings: Any) -> tuple[int, str]:
    return RunProcess(folder, *arguments, **settings).wait()


def demo_lines(count: int) -> list[tuple[str, int]]:
    return [(f"Once there was a cable car number {i} and it", 3 + i % 17) for i in range(count)]


def test_greedy_outputs_are_those_of_the_library(tmp_path: Path) -> None:
    import chairlift

    wanted = demo_lines(40)
    lines = [
        batch_line(f"c{i}", {"prompt": text, "max_tokens": most, "temperature": 0}, "/v1/completions")
        for i, (text, most) in enumerate(wanted)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    status, printed = run(tmp_path, "in.jsonl", "-o", "out.jsonl")
    assert status == 0, printed
    for part in ("continuous, 64 slots", "prefix cache", "lines", "40", "tokens out", "strategy"):
        assert part in printed
    params = [chairlift.SamplingParams(max_tokens=most, temperature=0) for _, most in wanted]
    outputs = chairlift.LLM(demo_path()).generate([text for text, _ in wanted], params, use_tqdm=False)
    texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in results(tmp_path / "out.jsonl")}
    assert texts == {f"c{i}": output.outputs[0].text for i, output in enumerate(outputs)}
    assert not (tmp_path / "out.jsonl.job").exists()
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_rows_and_a_static_batch_whose_last_slots_stay_empty(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("name,text\n" + "".join(f"n{i},say {i}\n" for i in range(11)))
    # What a server asks of its clients is none of a run's business.
    (tmp_path / "chairlift.toml").write_text('api_key = "k"\napi_keys = "only-where-the-server-is.toml"\n')
    arguments = ("in.csv", "-o", "out.jsonl", "--prompt-field", "text", "--id-field", "name", "--chat")
    arguments += ("--param", "max_tokens=3", "--strategy", "static", "--batch-size", "4")
    status, printed = run(tmp_path, *arguments, environ=without_torch())
    assert status == 0, printed
    assert "static, 4 slots" in printed
    found = results(tmp_path / "out.jsonl")
    assert {result["custom_id"] for result in found} == {f"n{i}" for i in range(11)}
    for result in found:
        assert result["response"]["body"]["object"] == "chat.completion"
        assert result["response"]["body"]["usage"]["completion_tokens"] == 3


def test_bad_lines_are_reported_and_stop_nothing(tmp_path: Path) -> None:
    write_mixed(tmp_path / "in.jsonl", 201)
    status, printed = run(tmp_path, "in.jsonl", "-o", "out.jsonl", *SLOW)
    assert status == 0, printed
    assert "lines that failed: out.errors.jsonl" in printed
    assert len(results(tmp_path / "out.jsonl")) == 196
    failed = results(tmp_path / "out.errors.jsonl")
    assert {result["error"]["code"] for result in failed} == {"invalid_json"}
    assert sorted(int(result["id"].rpartition("-")[2]) for result in failed) == [1, 51, 101, 151, 201]


def test_too_many_failures(tmp_path: Path) -> None:
    write_mixed(tmp_path / "in.jsonl", 201)
    arguments = ("in.jsonl", "-o", "out.jsonl", "--errors", "bad.jsonl", *SLOW)
    status, printed = run(tmp_path, *arguments, "--max-failures", "2")
    assert status == 3
    assert "more than 2 lines failed: see bad.jsonl" in printed
    assert "the same command goes on" in printed
    status, printed = run(tmp_path, *arguments, "--max-failures", "2")
    assert status == 1
    assert "failed already" in printed
    assert run(tmp_path, *arguments, "--max-failures", "5")[0] == 0
    assert len(results(tmp_path / "bad.jsonl")) == 5
    assert len(results(tmp_path / "out.jsonl")) == 196


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_in_order(signum: int, tmp_path: Path) -> None:
    write_mixed(tmp_path / "in.jsonl", 1500)
    going = RunProcess(tmp_path, "in.jsonl", "-o", "out.jsonl", *SLOW)
    going.wait_for(tmp_path / "out.jsonl")
    workers = going.workers()
    going.process.send_signal(signum)
    status, printed = going.wait()
    assert status == 128 + signum, printed
    assert "the same command goes on from here" in printed
    assert workers
    assert not any(map(is_alive, workers))
    some = len(results(tmp_path / "out.jsonl"))
    assert 0 < some < 1470
    status, printed = run(tmp_path, "in.jsonl", "-o", "out.jsonl", *SLOW)
    assert status == 0, printed
    assert "going on after" in printed
    assert "more by earlier runs" in printed
    assert len({result["custom_id"] for result in results(tmp_path / "out.jsonl")}) == 1470


@pytest.mark.parametrize("what", ["out.jsonl", "out.jsonl.job"])
def test_what_is_taken_away_while_it_runs_is_noticed(what: str, tmp_path: Path) -> None:
    write_mixed(tmp_path / "in.jsonl", 5000)
    going = RunProcess(tmp_path, "in.jsonl", "-o", "out.jsonl", *SLOW)
    out = tmp_path / "out.jsonl"
    going.wait_for(out, 50_000)
    for _ in range(2):
        # More is written only when what was written before is noted.
        going.wait_for(out, out.stat().st_size + 1)
    (tmp_path / what).unlink()
    status, printed = going.wait()
    assert status == 1, printed
    assert f"{what} was taken away" in printed
    assert "model busy" not in printed, "no table that says what was done"
    status, printed = run(tmp_path, "in.jsonl", "-o", "out.jsonl", *SLOW)
    assert status == 1, printed
    assert ("fewer than the" if what == "out.jsonl" else "belongs to no unfinished run") in printed


def test_an_output_that_is_taken_away_at_the_end_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mixed(tmp_path / "in.jsonl", 40)
    support = Path(__file__).parents[1] / "support"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(support.parents[1]), str(support)]))
    # Comes when all is committed, and before the run is noted as complete.
    monkeypatch.setattr("chairlift.run.main.Display.close", lambda self: (tmp_path / "out.jsonl").unlink())
    assert "out.jsonl was taken away" in refusal(tmp_path, capsys, "in.jsonl", "-o", "out.jsonl", *SLOW)
    assert not (tmp_path / "out.jsonl").exists()


def killed_and_taken_up(folder: Path, arguments: tuple[str, ...], kills: int, seed: int) -> None:
    """Kill the group, the front alone or the worker alone, at random moments; then let it end."""
    luck = random.Random(seed)
    for number in range(kills):
        going = RunProcess(folder, *arguments)
        victims = ("group", "front", "worker")[number % 3]
        size = (folder / "out.jsonl").stat().st_size if (folder / "out.jsonl").exists() else 0
        if luck.random() < 0.8:
            going.wait_for(folder / "out.jsonl", size + 1)
        time.sleep(luck.random() * 0.3)
        assert going.process.poll() is None, "it was done before it could be killed"
        workers = going.workers()
        if victims == "group":
            going.kill()
        elif victims == "front":
            going.process.kill()
        else:
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            time.sleep(luck.random() * 0.3)
            going.kill()
        going.process.wait()
        deadline = time.monotonic() + 20
        while any(map(is_alive, workers)):
            assert time.monotonic() < deadline, "a worker outlived its front"
            time.sleep(0.01)
        assert going.process.stdout is not None
        going.process.stdout.close()
    status, printed = run(folder, *arguments)
    assert status == 0, printed


def compare_with_undisturbed(folder: Path, arguments: tuple[str, ...], kills: int, seed: int) -> None:
    killed_and_taken_up(folder, arguments, kills, seed)
    names = ("out.jsonl", "out.errors.jsonl")
    disturbed = [comparable(folder / name) for name in names if (folder / name).exists()]
    for name in names:
        (folder / name).unlink(missing_ok=True)
    status, printed = run(folder, *arguments)
    assert status == 0, printed
    assert disturbed == [comparable(folder / name) for name in names if (folder / name).exists()]


def test_killed_at_random_moments_it_loses_nothing(tmp_path: Path) -> None:
    write_mixed(tmp_path / "in.jsonl", 4000)
    compare_with_undisturbed(tmp_path, ("in.jsonl", "-o", "out.jsonl", *SLOW), kills=3, seed=1)


@pytest.mark.slow
def test_killed_twenty_times_it_loses_nothing(tmp_path: Path) -> None:
    write_mixed(tmp_path / "in.jsonl", 40_000)
    compare_with_undisturbed(tmp_path, ("in.jsonl", "-o", "out.jsonl", *SLOW), kills=20, seed=2)


@pytest.mark.slow
def test_a_language_model_killed_ten_times_says_the_same(tmp_path: Path) -> None:
    lines = [
        batch_line(
            f"c{i}", {"prompt": text, "max_tokens": 40 + most, "temperature": 0, "ignore_eos": True}, "/v1/completions"
        )
        for i, (text, most) in enumerate(demo_lines(1500))
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    arguments = ("in.jsonl", "-o", "out.jsonl", "--dtype", "float32")
    compare_with_undisturbed(tmp_path, arguments, kills=10, seed=3)


def test_no_room_on_the_disk(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk, as it needs no special rights."""
    write_mixed(tmp_path / "in.jsonl", 1500)
    command = RunProcess(tmp_path, "in.jsonl", "-o", "out.jsonl", *SLOW)
    subprocess.run(["prlimit", f"--pid={command.process.pid}", "--fsize=150000"], check=True)
    status, printed = command.wait()
    assert status == 1
    assert "there is no space for out.jsonl (File too large): make some" in printed
    assert (tmp_path / "out.jsonl").stat().st_size <= 150_000
    some = len(results(tmp_path / "out.jsonl"))
    assert run(tmp_path, "in.jsonl", "-o", "out.jsonl", *SLOW)[0] == 0
    found = [result["custom_id"] for result in results(tmp_path / "out.jsonl")]
    assert some < len(found) == len(set(found)) == 1470


def interrupted(folder: Path, *arguments: str) -> None:
    write_mixed(folder / "in.jsonl", 3000)
    going = RunProcess(folder, "in.jsonl", "-o", "out.jsonl", *SLOW, *arguments)
    going.wait_for(folder / "out.jsonl")
    going.kill()
    going.process.communicate()


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with contextlib.chdir(folder):
        assert main(["run", *arguments]) == 1
    return capsys.readouterr().err


def test_only_the_same_run_is_taken_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted(tmp_path)
    same = ("in.jsonl", "-o", "out.jsonl", "--model", f"{MODELS}:Slow")
    says = refusal(tmp_path, capsys, "in.jsonl", "-o", "out.jsonl", "--model", f"{MODELS}:Doubles")
    assert "out.jsonl.job is of a run with other settings: --" in says
    assert "--restart" in says
    assert "--kind" not in refusal(tmp_path, capsys, *same, "--max-n", "3")
    assert "--max-n was 64 and is 3" in refusal(tmp_path, capsys, *same, "--max-n", "3")
    (tmp_path / "notes.txt").write_text("mine")
    elsewhere = (*same, "--errors", "notes.txt")
    assert '--errors was "out.errors.jsonl" and is "notes.txt"' in refusal(tmp_path, capsys, *elsewhere)
    assert "notes.txt is there, and belongs to no unfinished run" in refusal(tmp_path, capsys, *elsewhere, "--restart")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "in.jsonl").write_text(batch_line("c1", {"instances": [1]}, "/v1/models/Slow:predict"))
    assert "another INPUT: it has changed" in refusal(tmp_path, capsys, *same)
    status, printed = run(tmp_path, *same, "--restart")
    assert status == 0, printed
    assert [result["custom_id"] for result in results(tmp_path / "out.jsonl")] == ["c1"]


def test_an_output_that_is_there_is_not_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mixed(tmp_path / "in.jsonl", 10)
    arguments = ("in.jsonl", "-o", "out.jsonl", *SLOW)
    for name in ("out.jsonl", "out.errors.jsonl"):
        (tmp_path / name).write_text("precious")
        assert f"{name} is there, and belongs to no unfinished run: --overwrite" in refusal(
            tmp_path, capsys, *arguments
        )
        assert (tmp_path / name).read_text() == "precious"
        (tmp_path / name).unlink()
    (tmp_path / "out.jsonl").write_text("old")
    assert run(tmp_path, *arguments, "--overwrite")[0] == 0
    assert len(results(tmp_path / "out.jsonl")) == 9


@pytest.mark.parametrize("flag", ["-o", "--errors"])
def test_only_files_are_replaced(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    (tmp_path / "there").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("there", "pipe"):
        others = () if flag == "-o" else ("-o", "out.jsonl")
        says = refusal(tmp_path, capsys, "in.jsonl", flag, name, *others, "--overwrite", *SLOW)
        assert f"{name} is not a regular file, and results don't replace it: name another" in says
        assert (tmp_path / name).exists()
    assert not list(tmp_path.glob("*.job"))


def test_a_model_that_can_not_load_ends_it(tmp_path: Path) -> None:
    write_mixed(tmp_path / "in.jsonl", 10)
    for name, says in (("CannotLoad", "no weights here"), ("DiesLoading", "died (exit status 5) while it loaded")):
        status, printed = run(tmp_path, "in.jsonl", "-o", "out.jsonl", "--model", f"{MODELS}:{name}")
        assert status == 1
        assert says in printed
        assert not (tmp_path / "out.jsonl.job").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-", "-o", "o"), "INPUT must be a file"),
        (("in.jsonl.gz", "-o", "o"), "compressed"),
        (("in.jsonl", "-o", "in.jsonl"), "must be different files"),
        (("in.jsonl", "-o", "o", "--errors", "o.job"), "--errors and o.job, which says how far the run is, must be"),
        (("o.job", "-o", "o"), "must be different files"),
        (("in.jsonl", "-o", "o", "--chat"), "--chat goes with --prompt-field"),
        (("in.jsonl", "-o", "o", "--param", "x=1"), "--param goes with --prompt-field"),
        (("in.csv", "-o", "o"), "--prompt-field must say which field of in.csv"),
        (("in.jsonl", "-o", "o", "--format", "batch", "--prompt-field", "x"), "--prompt-field is for rows"),
        (("in.jsonl", "-o", "o", "--prompt-field", "x", "--param", "x"), "--param takes NAME=JSON"),
        (("in.jsonl", "-o", "o", "--concurrency", "0"), "--concurrency must be at least 1"),
        (("in.jsonl", "-o", "o", "--max-failures", "-1"), "--max-failures must be at least 0"),
        (("in.jsonl", "-o", "o", "--concurrency", "2000"), "max_waiting"),
        (("in.jsonl", "-o", "o", "--strategy", "static", "--concurrency", "7"), "7 is less than the 8 lines"),
        (("in.jsonl", "-o", "o", "--strategy", "static", "--max-waiting", "7"), "less than batch_size 8"),
        (("none.jsonl", "-o", "o"), "none.jsonl can't be read: No such file"),
        (("in.jsonl", "-o", "no/o"), "no/o can't be written: there is no folder no; make it, or name another file"),
        (("in.jsonl", "-o", "o", "--errors", "no/e"), "no/e can't be written: there is no folder no"),
        (("in.jsonl", "-o", "o", "--model", "nothing"), "'nothing' is no folder or file"),
    ],
)
def test_refusals(arguments: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    assert says in refusal(tmp_path, capsys, *arguments)
    assert not (tmp_path / "o.job").exists()


def test_parameters_are_checked_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "hello"}))
    arguments = ("in.jsonl", "-o", "out.jsonl", "--prompt-field", "text")
    status, printed = run(tmp_path, *arguments, "--param", "max_token=3", environ=without_torch())
    assert status == 1
    assert "--param: unknown field 'max_token'" in printed
    assert not list(tmp_path.glob("out*"))
    arguments += ("--param", "max_tokens=3", "--param", "stop=the end")
    status, printed = run(tmp_path, *arguments, environ=without_torch())
    assert status == 0, printed
    (result,) = results(tmp_path / "out.jsonl")
    assert result["custom_id"] == "line-1"


def test_several_models_in_one_run(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(
        "".join(f'[models.{name}]\nmodel = "{MODELS}:{name}"\n' for name in ("Slow", "Doubles"))
    )
    names = ("Slow", "Doubles")
    lines = [batch_line(f"c{i}", {"instances": [i]}, f"/v1/models/{names[i % 2]}:predict") for i in range(20)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    status, printed = run(tmp_path, "in.jsonl", "-o", "out.jsonl", "--config", "two.toml")
    assert status == 0, printed
    found = {r["custom_id"]: r["response"]["body"]["predictions"] for r in results(tmp_path / "out.jsonl")}
    assert found == {f"c{i}": [i * 2 if i % 2 else i + 1] for i in range(20)}
    (tmp_path / "rows.csv").write_text("x\na\nb\n")
    arguments = ("rows.csv", "-o", "rows.jsonl", "--config", "two.toml", "--prompt-field", "x")
    status, printed = run(tmp_path, *arguments)
    assert status == 1
    assert "say which one with --param model=NAME" in printed
    assert run(tmp_path, *arguments, "--param", "model=Doubles")[0] == 0
    found = {r["custom_id"]: r["response"]["body"]["predictions"] for r in results(tmp_path / "rows.jsonl")}
    assert found == {"line-1": ["aa"], "line-2": ["bb"]}


def test_what_a_server_asks_of_items_is_none_of_a_runs_business() -> None:
    item = ItemConfig(model=f"{MODELS}:Slow", timeout_ms=5.0, max_queue_ms=5.0)
    (served,) = for_throughput(Settings((ServedModel("slow", item),), ServerConfig())).models
    assert isinstance(served.config, ItemConfig)
    assert (served.config.timeout_ms, served.config.max_queue_ms) == (None, None)


def test_static_batches_of_several_models_need_lines_for_each() -> None:
    def least(*strategies: Any) -> int:
        models = [ServedModel("m", SequenceConfig(model="m", strategy=each)) for each in strategies]
        return least_at_once(Settings((*models, ServedModel("slow", ItemConfig(model="m:Slow"))), ServerConfig()))

    assert least("static") == 8
    # Else seven wait for the one, and seven for the other.
    assert least("static", "continuous", "static") == 15
    assert least("continuous", "dynamic", "none") == 1


def begun(settings: Settings) -> _Run:
    config = RunConfig(input=Path("in.jsonl"), output=Path("o"), errors=Path("e"), format="batch")
    store: Any = None  # which nobody asks before the models are there
    return _Run(config, settings, store, store, store)


def test_lines_are_counted_no_longer_than_the_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    counting = threading.Event()

    def count(path: Path, stop: Callable[[], bool]) -> int:
        counting.set()
        deadline = time.monotonic() + 10
        while not stop() and time.monotonic() < deadline:
            time.sleep(0.001)
        ended.append(stop())
        return 0

    async def fail() -> None:
        while not counting.is_set():
            await asyncio.sleep(0.001)
        raise JobError("it has no weights")

    monkeypatch.setattr("chairlift.run.main.count_newlines", count)
    run = begun(Settings((ServedModel("slow", ItemConfig(model=f"{MODELS}:Slow")),), ServerConfig()))
    monkeypatch.setattr(run._hosts[0], "start", fail)
    with pytest.raises(JobError, match="no weights"):
        asyncio.run(run.run())
    assert ended == [True]


def test_another_model_may_stand_between_two_versions_of_one() -> None:
    item = ItemConfig(model=f"{MODELS}:Slow", max_batch_size=4)
    first, second = (ServedModel("slow", item, Share(version=version)) for version in ("1", "2"))
    settings = Settings((first, ServedModel("chat", SequenceConfig(model=str(demo_path()))), second), ServerConfig())
    run = begun(settings)
    run._prepare()
    for service in run._services:
        if isinstance(service, ItemService):
            service.info = ItemInfo(task="python", device="cpu", dtype="")
    assert run._plan().reason.startswith("continuous, 64 slots")


def test_files_of_a_model_that_have_changed_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("in.jsonl", "one.py", "two.onnx", "two.onnx.data", "folder/config.json", "folder/.cache", "pack/x.py"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("{}")
    config = RunConfig(input=Path("in.jsonl"), output=Path("o"), errors=Path("e"), format="batch")

    def now(model: str, **more: Any) -> dict[str, Any]:
        made = (SequenceConfig if model == "folder" else ItemConfig)(model=model, **more)
        return identity(config, Settings((ServedModel("m", made),), ServerConfig(model_aliases={})))

    for model, changed in (
        ("folder", "folder/config.json"),
        ("one.py:Class", "one.py"),
        ("pack.x:Class", "pack/x.py"),
        ("two.onnx", "two.onnx.data"),
    ):
        before = now(model)
        check_same(before, now(model), config.state)
        Path("folder/.cache").write_text("something else")
        check_same(before, now(model), config.state)
        Path(changed).write_text("more than before")
        with pytest.raises(JobError, match=r"other settings: files of --model have changed\. Run it as it was begun"):
            check_same(before, now(model), config.state)
    for model, more, flag in (
        ("folder", {"tool_dialect": "hermes"}, "--tool-dialect"),
        ("folder", {"implementation": "transformers"}, "--implementation"),
        ("one.py:Class", {"retries": 1}, "--retries"),
        ("one.py:Class", {"call_timeout_s": 1.0}, "--call-timeout-s"),
    ):
        with pytest.raises(JobError, match=f"{flag} was .* and is "):
            check_same(now(model), now(model, **more), config.state)
    for server in (ServerConfig(max_waiting=3), ServerConfig(model_aliases={"other": "m"})):
        other = identity(config, Settings((ServedModel("m", SequenceConfig(model="folder")),), server))
        with pytest.raises(JobError, match=r"--(max-waiting|model-aliases) was "):
            check_same(now("folder"), other, config.state)


def test_parquet_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chairlift.errors import ConfigError
    from chairlift.run import tables

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(tables.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'chairlift\[parquet\]'"):
        tables._pyarrow()
