"""`chairlift plan URL`: what a server tells of itself, and what its answers take, seen from outside."""

import json
import re
import time
from collections.abc import Iterator
from math import floor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.fake_server import FakeServer
from support.items_harness import MAX_TOKENS, adder, classifier, embedder, function, listening
from support.server_harness import INFO, FakeClient, tokenizer
from support.simulated import exact_profile, few_candidates

from chairlift.cli import main
from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.errors import ConfigError, RequestFailed
from chairlift.plan.machine_profile import ItemProfile, MachineProfile, SequenceProfile
from chairlift.plan.seen_traffic import SeenRequest, SeenSequences, SeenStep
from chairlift.planning import plan_traffic, served_traffic, told_steps
from chairlift.planning.measure_served_items import measure_served_items
from chairlift.planning.running_server import RunningServer
from chairlift.server.metrics.sequences import RecentStep
from chairlift.server.models.request_log import EndedRequest, RefusedRequest
from chairlift.server.models.sequence_service import SequenceService

WORD = tokenizer().encode("hello")[0]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plan_traffic, "_MAKE_UP", 100)
    with few_candidates():
        yield


def ignored(share: float) -> None:
    assert 0 <= share <= 1


def served(client: FakeClient) -> SequenceService:
    return SequenceService(client, tokenizer(), "tiny", ServerConfig())


def plan(url: str, *arguments: object, seconds: float = 0.5) -> int:
    return main(["plan", url, "--processes", "1", "--measure-seconds", str(seconds), *map(str, arguments)])


def test_a_server_tells_how_it_batches_and_nothing_else() -> None:
    client = FakeClient([WORD])
    client.config = SequenceConfig(model="/secret/folder", max_num_seqs=6, target_itl_ms=40.0, seed=7)
    service, _ = embedder()
    with listening(served(client), service) as it:
        server = RunningServer(it.url)
        about, items = server.model("tiny"), server.model("embedder")
        with pytest.raises(ConfigError, match="serves tiny, embedder: choose one with --model"):
            server.model(None)
        with pytest.raises(ConfigError, match="has no model 'other'; it serves tiny, embedder"):
            server.model("other")
        assert "settings" not in server.get("/v1/models")["data"][0]
    assert about["settings"]["max_num_seqs"] == 6
    assert about["settings"]["target_itl_ms"] == 40.0
    assert about["settings"]["max_waiting"] == ServerConfig().max_waiting
    assert about["memory"] == {"num_blocks": INFO.num_blocks, "block_size": 16, "weight_bytes": 0, "kv_bytes": 0}
    assert not {"model", "seed", "served_model_name"} & about["settings"].keys()
    assert "secret" not in json.dumps(about)
    assert items["settings"]["max_batch_size"] == 32
    assert (items["settings"]["max_wait_ms"], items["settings"]["timeout_ms"]) == (0.0, None)
    assert items["settings"]["instances"] == 1


@pytest.fixture
def tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a server tell of steps, which a client that runs none has not."""
    requests = [SeenRequest(float(i), 16, 4, scheduled=float(i), first=i + 0.015, ended=i + 0.06) for i in range(25)]
    steps = [SeenStep(i + 0.015 * each, 0.015, 1, 16 if each == 1 else 1, 1, 2) for i in range(25) for each in (1, 2)]
    bare = msgspec.structs.replace(exact_profile(), num_blocks=INFO.num_blocks, max_model_len=200, steps=[])
    seen = SeenSequences(requests=requests, profile=bare, steps=steps)
    monkeypatch.setattr(told_steps, "told_traffic", lambda server, name: seen)


@pytest.mark.usefixtures("tells")
def test_at_most_half_of_the_slots_are_taken_and_others_go_first(tmp_path: Path) -> None:
    client = FakeClient([WORD])
    client.config = SequenceConfig(model="tiny", max_num_seqs=8)
    saved = tmp_path / "profile.json"
    sent = ("--rate", 5, "--input-lengths", "constant:8", "--output-lengths", "constant:4")
    with listening(served(client)) as it:
        # A machine that stood still for a moment is taken for a slow one, and has fewer at once: not within so long.
        assert plan(it.url, *sent, "--mode", "high-throughput", "--profile", saved, seconds=2) == 0
    assert all(request.priority == 1000 for request in client.requests)
    assert client.most_at_once == 4
    # All but one token of the context at most, and the first prompt without company however slow it is.
    assert 64 <= max(len(request.prompt_ids) for request in client.requests) <= 199
    assert all((request.max_tokens or 0) <= 100 for request in client.requests)
    profile = MachineProfile.load(saved).models["tiny"]
    assert isinstance(profile, SequenceProfile)
    assert (profile.num_blocks, profile.max_model_len, len(profile.steps)) == (INFO.num_blocks, 200, 50)
    assert {step.seconds for step in profile.steps} == {0.015}


def test_examples_of_what_is_made_up_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    service, _ = embedder()
    with listening(served(FakeClient([WORD])), service) as it:
        problems = {"tiny": "is for models that answer in one call", "embedder": "is not for models of texts"}
        for name, problem in problems.items():
            assert plan(it.url, "--model", name, "--rate", 5, "--examples", "nowhere") == 1
            assert f"--examples {problem}" in capsys.readouterr().err


@pytest.mark.usefixtures("tells")
def test_a_plan_of_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = ("--rate", 5, "--input-lengths", "constant:8", "--output-lengths", "constant:4")
    saved = tmp_path / "profile.json"
    with listening(served(FakeClient([WORD]))) as it:
        assert plan(it.url, *described, "--mode", "high-throughput", "--profile", saved) == 0
        printed = capsys.readouterr()
        assert plan(it.url, *described, "--dtype", "float32") == 1
        assert "--dtype is a setting of the server" in capsys.readouterr().err
    assert f"this sends requests to {it.url} for about 0.5 s, at a low priority" in printed.err
    assert f"# A plan for tiny at {it.url}" in printed.out
    assert "measured while it was served, with what others sent; the KV cache stays as large" in printed.out
    assert "as it is now, with `the defaults`, it " in printed.out
    assert "chairlift serve tiny" in printed.out
    assert "where its models are: tiny stands for that" in printed.out
    assert isinstance(MachineProfile.load(saved).models["tiny"], SequenceProfile)


@pytest.mark.parametrize("make", [embedder, classifier, adder])
def test_a_plan_of_what_answers_in_one_call(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    service, dispatcher = make()
    lengths = () if make is adder else ("--input-lengths", "constant:8")
    with listening(service) as it:
        assert plan(it.url, "--rate", 50, *lengths, "--target-e2e-ms", 100) == 0
    text = capsys.readouterr().out
    assert "how many cores one takes is not seen" in text
    assert "items/s" in text
    (command,) = re.findall(r"chairlift serve (.*)", text)
    assert "--max-batch-size" in command, "the model may have a default of its own"
    assert max(dispatcher.batches) == 32, "no batch is larger than the server's own"


def test_a_server_is_planned_with_what_came_if_nobody_says_what_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service, dispatcher = embedder()
    saved = tmp_path / "profile.json"
    with listening(service) as it:
        assert plan(it.url) == 1
        said = capsys.readouterr().err
        assert "say what comes: --trace FILE, or --rate" in said
        assert "0 requests came and were answered within the last 120 s, and to say anything takes 20" in said
        server = RunningServer(it.url)
        for _ in range(25):
            server.post("/v1/embeddings", {"model": "embedder", "input": ["hello", "world"]})
        asked = len(dispatcher.submitted)
        assert plan(it.url, "--target-e2e-ms", 1000, "--profile", saved) == 0
        printed = capsys.readouterr()
        assert plan(it.url, "--rate", 7, "--target-e2e-ms", 1000) == 0
        assert "7 requests come a second" in capsys.readouterr().out
        assert len(dispatcher.submitted) == asked, "it is measured by what it did, and gets nothing more to do"
        for flag in ("--trace-model", "--examples"):
            (tmp_path / "x").write_text("1\n")
            assert plan(it.url, flag, tmp_path / "x") == 1
            assert flag in capsys.readouterr().err
    assert "this sends requests" not in printed.err
    assert "planned with its own last 2 minutes: 25 requests and 25 of its calls" in printed.out
    assert "as it is now, with `--max-batch-size 32 --max-wait-ms 0`, it keeps the targets up to" in printed.out
    profile = MachineProfile.load(saved).models["embedder"]
    assert isinstance(profile, ItemProfile)
    assert len(profile.calls) == 25
    assert all(call.lag is not None and call.began is None for call in profile.calls)


def test_so_is_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "profile.json"
    service = served(FakeClient([WORD]))
    with listening(service) as it:
        now = time.monotonic()
        for number in range(25):
            ended, times = now - 1 + number / 25, {"total_s": 0.06, "queued_s": 0.0, "prefill_s": 0.02}
            about = {"prompt_tokens": 20, "cached_tokens": 0, "tokens": 4, **times}
            service.log.keep(None, EndedRequest(id=f"cmpl-{number:024x}", ended=ended, finish_reason="stop", **about))
        service.metrics.steps.extend(RecentStep(now - 1 + number / 50, 0.015, 2, 2, 0, 0, 4, 2) for number in range(40))
        assert plan(it.url, "--mode", "high-throughput", "--profile", saved) == 0
    text = capsys.readouterr().out
    assert "planned with its own last 2 minutes: 25 requests and 40 of its steps" in text
    assert "for more than 2 sequences in a step" in text
    profile = MachineProfile.load(saved).models["tiny"]
    assert isinstance(profile, SequenceProfile)
    assert {step.seconds for step in profile.steps} == {0.015}
    assert all(step.began is None for step in profile.steps)


def test_an_overloaded_server_is_planned_for_all_that_came(capsys: pytest.CaptureFixture[str]) -> None:
    service = served(FakeClient([WORD]))
    log, begin = service.log, floor(time.monotonic()) - 20
    for number in range(1200):
        log.refuse(RefusedRequest(None, begin + number / 100, 0, False, 20, 4))
    times = {"total_s": 0.0625, "queued_s": 0.0, "prefill_s": 0.02}
    about = {"prompt_tokens": 20, "cached_tokens": 0, "tokens": 4, **times}
    for number in range(24):
        log.arrive(begin + number / 2)
        ended = begin + number / 2 + times["total_s"]
        log.keep(None, EndedRequest(id=f"cmpl-{number:024x}", ended=ended, finish_reason="stop", **about))
        service.metrics.steps.append(RecentStep(ended, 0.015, 1, 1, 0, 0, 4, 1))
    with listening(service) as it:
        assert plan(it.url, "--mode", "high-throughput") == 0
    text = capsys.readouterr().out
    assert "requests, 102 a second; prompts of 20 tokens" in text
    assert "only a sample is known of the requests that were refused or given up: 102 came a second in all" in text


def test_a_server_that_tells_impossible_things_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    service, _ = embedder()
    with listening(service) as it:
        server = RunningServer(it.url)
        for _ in range(25):
            server.post("/v1/embeddings", {"model": "embedder", "input": ["hello"]})
        calls = service.metrics.calls
        calls.append(calls[-1]._replace(items=0))
        assert plan(it.url) == 1
    said = capsys.readouterr().err
    assert "nothing can be simulated with what" in said
    assert "holds 0 items" in said


def test_calls_are_as_long_as_the_server_says() -> None:
    service, dispatcher = embedder()
    with listening(service) as it:
        server = RunningServer(it.url)
        config = ItemConfig(model="embedder", kind="encoder")
        profile, front = measure_served_items(server, server.model(None), config, [], 0.5, ignored)
    assert {call.seconds for call in profile.calls} == {0.002}
    assert {call.computed / call.items for call in profile.calls} == {8.0, 32.0, float(MAX_TOKENS)}
    assert all(each["priority"] == 1000 for each in dispatcher.submitted)
    assert profile.max_tokens == MAX_TOKENS
    assert front.request + front.item > 0


def test_examples_are_what_a_function_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service, dispatcher = function()
    examples = tmp_path / "examples.jsonl"
    examples.write_text('{"x": 2}\n3\n')
    with listening(service) as it:
        assert plan(it.url, "--rate", 50, "--examples", examples) == 0
        assert plan(it.url, "--rate", 50, "--items", 1) == 1
    assert "takes --examples of what it is sent" in capsys.readouterr().err
    assert {json.dumps(each["payload"]) for each in dispatcher.submitted} == {'{"x": 2}', "3"}


def test_servers_that_can_not_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    client, sent = FakeClient([WORD]), ("--rate", 5, "--input-lengths", "constant:8", "--output-lengths", "constant:4")
    with listening(served(client)) as it:
        assert plan(it.url, *sent) == 1
        assert "answered too few requests for its times to be known: give it more time" in capsys.readouterr().err
        client.config = SequenceConfig(model="tiny", strategy="static", batch_size=4)
        assert plan(it.url, *sent) == 1
        assert "a static server answers full batches only" in capsys.readouterr().err


def test_who_may_not_see_steps_is_told_before_anything_is_sent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, sent = FakeClient([WORD]), ("--rate", 5, "--input-lengths", "constant:8", "--output-lengths", "constant:4")

    def refuse(*_: object) -> None:
        raise RequestFailed("/v1/traffic answered 403: missing_right")

    monkeypatch.setattr(served_traffic, "told_traffic", refuse)
    with listening(served(client)) as it:
        assert plan(it.url, *sent) == 1
    assert "use a key with the right admin, or plan with its folder" in capsys.readouterr().err
    assert client.requests == []


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"seen": {"type": "trees"}, "window_s": 120}, "tells its traffic in another way"),
        ({"seen": {"type": "sequences", "requests": [], "steps": []}, "window_s": 120}, "in another way"),
        ({"seen": {"type": "items", "requests": [], "calls": [], "sized": True}, "window_s": 120}, "no requests"),
        (
            {
                "seen": {"type": "items", "requests": [], "calls": [], "sized": True},
                "window_s": 120,
                "came": {"requests": 1, "listed": 1, "seconds": 0},
            },
            "in another way",
        ),
    ],
)
def test_traffic_that_makes_no_sense_is_refused(told: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RunningServer("http://localhost:9")
    monkeypatch.setattr(server, "get", lambda path: told)
    with pytest.raises(ConfigError, match=said):
        served_traffic.told_traffic(server, "tiny")


def test_steps_of_no_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [SeenRequest(0.0, 16, 4)]
    for step in (SeenStep(1.0, 0.0, 1, 1, 1, 2), SeenStep(1.0, 0.1, 1, 0, 1, 2)):
        seen = SeenSequences(requests=requests, profile=exact_profile(), steps=[step])
        server = RunningServer("http://localhost:9")
        told = {"seen": msgspec.to_builtins(seen), "window_s": 120}
        monkeypatch.setattr(server, "get", lambda path, told=told: told)
        with pytest.raises(ConfigError, match="steps that took no time, or had no token"):
            served_traffic.told_traffic(server, "tiny")


def test_another_machine_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("http://192.0.2.1:9", "--rate", 5, "--input-lengths", "constant:8") == 1
    assert "is another machine, to which requests would be sent: say --yes" in capsys.readouterr().err
    assert plan("https://localhost", "--rate", 5) == 1
    assert "is not an http:// address" in capsys.readouterr().err
    assert RunningServer("http://localhost:1").is_here
    assert RunningServer("http://127.0.0.2/v1").is_here


def test_a_key_without_that_priority_sends_none() -> None:
    fake = FakeServer()
    try:
        server = RunningServer(f"http://127.0.0.1:{fake.port}/v1/", "secret")
        fake.status, fake.pieces = "403 Forbidden", [b"priority_not_allowed"]
        server.check_priority("/v1/completions", {})
        assert "X-Request-Priority: 1000" in fake.heads[0]
        assert "POST /v1/completions " in fake.heads[0]
        fake.status, fake.pieces = "200 OK", [b"{}"]
        server.post("/v1/completions", {})
        assert "X-Request-Priority" not in fake.heads[1]
        assert "Authorization: Bearer secret" in fake.heads[1]
        assert server.target("m").headers == ("Authorization: Bearer secret",)
        fake.status, fake.pieces = "500 Oops", [b"broken"]
        with pytest.raises(RequestFailed, match="answered 500: broken"):
            server.check_priority("/v1/completions", {})
    finally:
        fake.close()
