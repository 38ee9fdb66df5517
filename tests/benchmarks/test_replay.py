"""`chairlift bench serve`: requests go out as the trace says, whatever becomes of the others."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_server import FakeServer

from chairlift.bench.replay import APIS, PromptMaker, make_target, replay
from chairlift.cli import main
from chairlift.errors import ConfigError
from chairlift.plan.trace import TraceRequest, cut_notes, fitted, scaled
from chairlift.plan.trace_files import write_trace

TRACE = [
    TraceRequest(arrival=0.0, input_length=30, output_length=4, hash_ids=(1, 2), block_size=10),
    TraceRequest(arrival=0.05, input_length=25, output_length=5, hash_ids=(1, 3), block_size=10, priority=2),
    TraceRequest(arrival=0.1, input_length=5, output_length=1, model="other"),
]


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    it = FakeServer()
    yield it
    it.close()


def event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def url(fake: FakeServer) -> str:
    return f"http://127.0.0.1:{fake.port}"


def sent(fake: FakeServer, api: str, trace: list[TraceRequest] = TRACE, extra: str = "{}") -> Any:
    return replay(make_target(url(fake), "m", api, extra, "secret"), trace, api, PromptMaker(100), 10.0)


def test_completions_have_the_lengths_and_the_common_prefixes(fake: FakeServer) -> None:
    fake.pieces = [event(text="a"), event(text="b"), b"data: [DONE]\n\n"]
    load = sent(fake, "completions")
    bodies = sorted(fake.bodies, key=lambda body: -len(body["prompt"]))
    assert [len(body["prompt"]) for body in bodies] == [30, 25, 5]
    assert [body["max_tokens"] for body in bodies] == [4, 5, 1]
    assert [body["model"] for body in bodies] == ["m", "m", "other"]
    one, two, _ = (body["prompt"] for body in bodies)
    assert one[:10] == two[:10]
    assert one[10:20] != two[10:20]
    assert all(10 <= token < 100 for token in one)
    assert all(body["ignore_eos"] and body["stream"] for body in bodies)
    assert sum("X-Request-Priority: 2" in head for head in fake.heads) == 1
    assert all("Authorization: Bearer secret" in head for head in fake.heads)
    outcomes = sorted(load.outcomes, key=lambda each: each.due)
    assert [each.due - load.began for each in outcomes] == pytest.approx([0.0, 0.05, 0.1], abs=1e-6)
    assert all(each.error is None and each.due <= each.sent <= each.times[0] for each in outcomes)


def test_prompts_are_others_with_another_seed_and_deadlines_go_along(fake: FakeServer) -> None:
    fake.pieces = [event(text="a"), b"data: [DONE]\n\n"]
    late = TraceRequest(arrival=0.0, input_length=10, hash_ids=(1,), block_size=10, timeout=1.5)
    assert PromptMaker(100, 1).token_ids(late, 0) != PromptMaker(100, 2).token_ids(late, 0)
    sent(fake, "completions", [late])
    assert "X-Request-Timeout-Ms: 1500" in fake.heads[0]


def test_chats_are_words(fake: FakeServer) -> None:
    fake.pieces = [
        event(delta={"role": "assistant", "content": ""}),
        event(delta={"content": "a"}),
        b"data: [DONE]\n\n",
    ]
    load = sent(fake, "chat", TRACE[:1])
    ((message,),) = [body["messages"] for body in fake.bodies]
    assert (message["role"], len(message["content"].split())) == ("user", 30)
    assert "POST /v1/chat/completions " in fake.heads[0]
    assert [len(outcome.times) for outcome in load.outcomes] == [1], "an empty text is none"


@pytest.mark.parametrize(
    ("api", "path", "extra", "body"),
    [
        ("tei", "/embed", "{}", {"inputs"}),
        ("embeddings", "/v1/embeddings", '{"encoding_format": "base64"}', {"input", "model", "encoding_format"}),
        ("oip", "/v2/models/m/infer", '{"inputs": []}', {"inputs"}),
    ],
)
def test_what_is_answered_as_a_whole(fake: FakeServer, api: str, path: str, extra: str, body: set[str]) -> None:
    fake.pieces, fake.content_type = [b"[[0.1,", b"0.2]]"], "application/json"
    load = sent(fake, api, [TraceRequest(arrival=0.0, input_length=7, items=3)], extra)
    (outcome,) = load.outcomes
    assert (outcome.error, len(outcome.times), outcome.tokens) == (None, 1, 0)
    assert outcome.times == [outcome.ended]
    assert f"POST {path} " in fake.heads[0]
    assert fake.bodies[0].keys() == body
    texts = fake.bodies[0].get("input" if api == "embeddings" else "inputs")
    if api != "oip":
        assert [len(text.split()) for text in texts] == [7, 7, 7]
        assert len(set(texts)) == 3


def test_the_command_prints_a_table_and_saves_what_it_saw(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.pieces = [event(text="a"), b"data: [DONE]\n\n"]
    write_trace(tmp_path / "trace.jsonl", TRACE)
    out, lines = tmp_path / "out.json", tmp_path / "requests.jsonl"
    flags = ["--speed", "2", "--limit", "2", "--out", str(out), "--requests-out", str(lines), "--model", "m"]
    command = ["bench", "serve", url(fake), str(tmp_path / "trace.jsonl"), *flags, "--api-key=s3cret"]
    monkeypatch.setattr("sys.argv", ["chairlift", *command])
    assert main(command) == 0
    assert "s3cret" not in out.read_text()
    assert "TTFT p50 ms" in capsys.readouterr().out
    (run,) = json.loads(out.read_text())["runs"]
    assert (run["requests"], run["failed"]) == (2, 0)
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [each["due"] for each in found] == pytest.approx([0.0, 0.025])
    assert all(len(each["times"]) == 1 and each["error"] is None for each in found)


def test_a_server_never_meets_the_same_prompts_twice_unless_it_is_told_the_seed(
    fake: FakeServer, tmp_path: Path
) -> None:
    """What it has in its prefix cache would make it look faster than it is."""
    fake.pieces = [event(text="a"), b"data: [DONE]\n\n"]
    write_trace(tmp_path / "trace.jsonl", TRACE[2:])
    out = tmp_path / "out.json"
    command = ["bench", "serve", url(fake), str(tmp_path / "trace.jsonl"), "--model", "m", "--out", str(out)]
    assert main(command) == 0
    seed = json.loads(out.read_text())["settings"]["seed"]
    assert main(command) == 0
    assert main([*command, "--seed", str(seed)]) == 0
    first, second, again = (body["prompt"] for body in fake.bodies)
    assert first == again != second


def test_failures_are_counted_and_named(fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.status, fake.pieces = "429 Too Many Requests", [b"full"]
    write_trace(tmp_path / "trace.jsonl", TRACE)
    assert main(["bench", "serve", url(fake), str(tmp_path / "trace.jsonl"), "--model", "m"]) == 0
    assert "3 x HTTP 429: full" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--speed", "0"], "--speed and --scale-lengths must be more than 0"),
        (["--scale-lengths", "nan"], "--speed and --scale-lengths must be more than 0"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--max-model-len", "1"], "--max-model-len at least 2"),
        (["--extra", "{"], "--extra is not JSON"),
        (["--extra", "[]"], "--extra must be a JSON object"),
        (["--vocab", "5"], "--vocab must be more than 10"),
        (["--api", "oip"], "--extra is the body"),
        (["--requests-out", "/nowhere/lines.jsonl"], "--requests-out /nowhere/lines.jsonl can't be written"),
        (["--out", "/"], "--out / can't be written"),
        (["--scale-lengths", "1e305"], "--scale-lengths 1e+305 makes prompts or answers of more than 16777216 tokens"),
        (["--scale-lengths", "1e12"], "--scale-lengths 1e+12 makes prompts or answers of more than 16777216 tokens"),
        (["--speed", "1e-9"], "the trace lasts 1e+08 s at this speed, and a replay at most 2592000: raise --speed"),
        (["--seconds", "-1"], "--seconds must be more than 0, and finite, got -1"),
        (["--seconds", "nan"], "--seconds must be more than 0, and finite, got nan"),
        (["--drain", "inf"], "--drain must be from 0 to 2592000 seconds, got inf"),
        (["--target-ttft-ms", "nan"], "--target-ttft-ms must be more than 0, and finite, got nan"),
        (["--trace-model", "third"], "--trace-model third: the trace has other"),
        (["--input-lengths", "constant:5"], "the trace has its own lengths: leave out --input-lengths"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    write_trace(tmp_path / "trace.jsonl", TRACE)
    assert main(["bench", "serve", "http://127.0.0.1:9", str(tmp_path / "trace.jsonl"), *flags]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kinds", "flags", "said"),
    [
        ("ii", [], "2 of the trace's 2 requests are answered in one call: send those with --api embeddings"),
        ("is", ["--api", "chat"], "1 of the trace's 2 requests are answered in one call"),
        ("is", ["--api", "embeddings"], "1 of the trace's 2 requests are answered token by token: choose one model's"),
        ("bb", [], "all requests of the trace ran in the background"),
        ("ib", ["--trace-model", "b"], "all requests of the trace ran in the background"),
    ],
)
def test_what_one_api_can_not_send_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kinds: str, flags: list[str], said: str
) -> None:
    write_trace(tmp_path / "trace.jsonl", [request_of(kind) for kind in kinds])
    assert main(["bench", "serve", "http://127.0.0.1:9", str(tmp_path / "trace.jsonl"), *flags]) == 1
    assert said in capsys.readouterr().err


def test_more_than_memory_takes_is_refused_before_anything_is_sent(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.pieces = [event(text="a"), b"data: [DONE]\n\n"]
    monkeypatch.setattr("chairlift.bench.replay._MOST_READY_BYTES", 1000)
    write_trace(tmp_path / "trace.jsonl", TRACE)
    command = ["bench", "serve", url(fake), str(tmp_path / "trace.jsonl"), "--model", "m"]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "the trace's 3 requests take about 1.87e-06 GB ready to send" in said
    assert "take fewer with --limit or --seconds" in said
    assert fake.bodies == []
    assert main([*command, "--limit", "1"]) == 0
    assert len(fake.bodies) == 1


def request_of(kind: str, arrival: float = 0.0) -> TraceRequest:
    """Answered in one call (i), token by token (s), or that in the background (b); the kind is the model's name."""
    items = 2 if kind == "i" else 0
    return TraceRequest(
        arrival=arrival, input_length=5, output_length=2, model=kind, items=items, background=kind == "b"
    )


def test_of_a_trace_of_several_models_one_is_sent_and_nothing_of_the_background(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.pieces, fake.content_type = [b"[]"], "application/json"
    write_trace(tmp_path / "trace.jsonl", [request_of(kind, 1000.0 * place) for place, kind in enumerate("sbisb")])
    lines = tmp_path / "lines.jsonl"
    command = ["bench", "serve", url(fake), str(tmp_path / "trace.jsonl"), "--requests-out", str(lines)]
    assert main([*command, "--api", "embeddings", "--trace-model", "i"]) == 0
    assert [(body["model"], len(body["input"])) for body in fake.bodies] == [("i", 2)]
    assert json.loads(lines.read_text())["due"] == 0.0, "nobody waits for those that are not sent"
    fake.pieces, fake.content_type = [event(text="a"), b"data: [DONE]\n\n"], ""
    write_trace(tmp_path / "trace.jsonl", [request_of(kind) for kind in "bsb"])
    capsys.readouterr()
    assert main(command) == 0
    assert [body["model"] for body in fake.bodies[1:]] == ["s"]
    assert "note: 2 of the trace's 3 requests ran in the background" in capsys.readouterr().err


def test_an_address_must_be_one() -> None:
    for api in APIS:
        with pytest.raises(ConfigError, match="is not an http:// address"):
            make_target("https://example.com", "m", api, '{"a": 1}')


def test_a_trace_is_scaled_and_made_to_fit() -> None:
    fast = scaled(TRACE, 2.0, 0.5)
    assert [each.arrival for each in fast] == [0.0, 0.025, 0.05]
    assert [(each.input_length, each.output_length, each.block_size) for each in fast[:1]] == [(15, 2, 5)]
    assert all(each.input_length >= 1 and each.output_length >= 1 for each in scaled(TRACE, 1.0, 0.001))
    long = [TraceRequest(arrival=0.0, input_length=900, output_length=90, max_tokens=500)]
    (cut,) = fitted(long, 100)
    assert (cut.input_length, cut.output_length, cut.max_tokens) == (50, 50, 50)
    assert fitted(TRACE, 1000) == TRACE


def test_only_what_does_not_fit_is_cut() -> None:
    lengths = [(100, 1500), (2000, 48), (100, 5000), (5000, 100), (5000, 5000)]
    whole = [TraceRequest(arrival=0.0, input_length=prompt, output_length=answer) for prompt, answer in lengths]
    cut = fitted(whole, 2048)
    assert cut[:2] == whole[:2]
    assert [(each.input_length, each.output_length) for each in cut[2:]] == [(100, 1948), (1948, 100), (1024, 1024)]
    assert cut_notes(whole, cut, 2048) == ["3 of 5 requests were cut to the model's 2048 tokens"]
    # No server takes more `max_tokens` than fit either; that cuts no request.
    roomy = [TraceRequest(arrival=0.0, input_length=100, output_length=10, max_tokens=9000)]
    assert [each.max_tokens for each in fitted(roomy, 2048)] == [1948]
    assert cut_notes(roomy, fitted(roomy, 2048), 2048) == []


def test_the_command_says_what_it_cuts(fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.pieces = [event(text="a"), b"data: [DONE]\n\n"]
    write_trace(tmp_path / "t.jsonl", TRACE)
    command = ["bench", "serve", url(fake), str(tmp_path / "t.jsonl"), "--model", "m", "--max-model-len"]
    assert main([*command, "32"]) == 0
    assert "note: 1 of 3 requests were cut to the model's 32 tokens\n" in capsys.readouterr().err
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in fake.bodies) == [(5, 1), (25, 5), (28, 4)]
    assert main([*command, "34"]) == 0
    assert "were cut" not in capsys.readouterr().err


ACCESS_LOG = """10.0.0.1 - - [29/Nov/2026:22:00:01 +0000] "POST /v1/completions HTTP/1.1" 200 512 "-" "curl/8"
10.0.0.1 - - [29/Nov/2026:22:00:01 +0000] "GET /v1/models HTTP/1.1" 200 99 "-" "curl/8"
10.0.0.2 - - [29/Nov/2026:22:00:03 +0000] "POST /v1/completions HTTP/1.1" 200 640 "-" "curl/8"
10.0.0.2 - - [29/Nov/2026:22:00:03 +0000] "POST /v1/embeddings HTTP/1.1" 200 640 "-" "curl/8"
"""


def test_an_access_log_is_sent_with_the_lengths_that_are_given(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.pieces = [event(text="a"), b"data: [DONE]\n\n"]
    (tmp_path / "access.log").write_text(ACCESS_LOG)
    command = ["bench", "serve", url(fake), str(tmp_path / "access.log"), "--model", "m", "--speed", "1000"]
    assert main([*command, "--input-lengths", "constant:6", "--output-lengths", "constant:3"]) == 0
    assert [(len(body["prompt"]), body["max_tokens"]) for body in fake.bodies] == [(6, 3), (6, 3)]
    said = capsys.readouterr().err
    assert "note: access log: 2 requests to '/v1/completions' (2); 2 lines are left out" in said
    fake.pieces, fake.content_type = [b"[]"], "application/json"
    assert main([*command, "--api", "embeddings", "--input-lengths", "constant:6"]) == 0
    assert [len(text.split()) for text in fake.bodies[-1]["input"]] == [6]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "access.log is an access log, which tells no lengths: say --input-lengths and --output-lengths"),
        (["--api", "chat", "--input-lengths", "constant:6"], "which tells no lengths: say --output-lengths"),
        (["--api", "tei", "--output-lengths", "constant:6"], "--output-lengths says nothing of requests with"),
        (["--api", "tei", "--input-lengths", "constant:99999999"], "99999999 is more than 16777216 tokens"),
        (["--api", "oip", "--input-lengths", "constant:6"], "--input-lengths says nothing of requests with --api oip"),
    ],
)
def test_what_an_access_log_can_not_be_sent_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    (tmp_path / "access.log").write_text(ACCESS_LOG)
    assert main(["bench", "serve", "http://127.0.0.1:9", str(tmp_path / "access.log"), *flags]) == 1
    assert said in capsys.readouterr().err


def test_whoever_was_refused_is_sent_with_an_answer_of_somebodys_length(fake: FakeServer, tmp_path: Path) -> None:
    fake.pieces = [event(text="a"), b"data: [DONE]\n\n"]
    refused = TraceRequest(arrival=0.01, input_length=5, output_length=0, max_tokens=9)
    write_trace(tmp_path / "t.jsonl", [TraceRequest(arrival=0.0, input_length=5, output_length=7), refused])
    assert main(["bench", "serve", url(fake), str(tmp_path / "t.jsonl"), "--model", "m"]) == 0
    assert [body["max_tokens"] for body in fake.bodies] == [7, 7]


def test_the_key_may_be_in_the_environment(fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_API_KEY", "clk_secret")
    out = tmp_path / "out.json"
    write_trace(tmp_path / "trace.jsonl", TRACE)
    assert main(["bench", "serve", url(fake), str(tmp_path / "trace.jsonl"), "--model", "m", "--out", str(out)]) == 0
    assert ["Bearer clk_secret" in head for head in fake.heads] == [True] * len(TRACE)
    assert "clk_secret" not in out.read_text()
