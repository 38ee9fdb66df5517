"""`--record`: what came is in the file as the simulator reads it, and no text, no name and no more than is allowed."""

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from support.items_harness import embedder
from support.server_harness import Front, full

from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.errors import ConfigError
from chairlift.plan.trace import TraceRequest
from chairlift.plan.trace_files import read_trace
from chairlift.server.http.exchange import Terms
from chairlift.server.http.tenants import Tenant
from chairlift.server.models import trace_notes
from chairlift.server.models.request_log import EndedRequest
from chairlift.server.models.trace_recorder import TraceRecorder

PLAIN = Terms()
ENDED = EndedRequest(id="a", ended=1.0, finish_reason="length", tokens=4)


def sequence(arrival: float, prompt: list[int], **fields: Any) -> Request:
    params = SamplingParams(temperature=0, max_tokens=None)
    return Request(id="a", prompt_ids=prompt, params=params, max_tokens=9, arrival=arrival, **fields)


def recorded(path: Path, *requests: Request, terms: Terms = PLAIN, ended: EndedRequest = ENDED) -> list[TraceRequest]:
    recorder = TraceRecorder(path, 2**20)
    for request in requests:
        recorder.sequence("m", request, terms, ended)
    recorder.close()
    return read_trace(path)


def test_lengths_times_and_terms_are_kept(tmp_path: Path) -> None:
    terms = Terms(timeout=2.5, tenant=Tenant("alice", b"secret"))
    two = sequence(12.25, [1] * 7), sequence(11.0, [2] * 600, priority=-3, background=True)
    later, first = recorded(tmp_path / "r", *two, terms=terms)[::-1]
    assert (first.arrival, later.arrival) == (0.0, pytest.approx(1.25, abs=1e-5))
    assert (first.input_length, first.output_length, first.max_tokens) == (600, 4, 9)
    assert (first.model, first.priority, first.background, first.timeout) == ("m", -3, True, 2.5)
    assert len(first.hash_ids) == 2
    assert (later.input_length, len(later.hash_ids), later.background) == (7, 1, False)
    assert first.tenant == later.tenant != ""
    assert b"alice" not in (tmp_path / "r").read_bytes()


def test_who_was_given_up_at_its_deadline_is_marked(tmp_path: Path) -> None:
    late = EndedRequest(id="a", ended=1.0, finish_reason="late", tokens=3)
    [cut] = recorded(tmp_path / "r", sequence(1.0, [1]), terms=Terms(timeout=0.5), ended=late)
    assert (cut.late, cut.timeout, cut.output_length) == (True, 0.5, 3)
    [whole] = recorded(tmp_path / "s", sequence(1.0, [1]), terms=Terms(timeout=0.5))
    assert (whole.late, whole.timeout, whole.output_length) == (False, 0.5, 4)
    assert b"late" not in (tmp_path / "s").read_bytes()


def test_prompts_that_begin_alike_have_hashes_that_do(tmp_path: Path) -> None:
    common = list(range(512))
    one, two, other, apart, own = recorded(
        tmp_path / "r",
        sequence(0.0, common + [1] * 512),
        sequence(1.0, common + [2] * 512),
        sequence(2.0, [7, *common[1:]] + [1] * 512),
        sequence(3.0, common + [1] * 512, cache_salt="somebody else's"),
        sequence(4.0, common, use_prefix_cache=False),
    )
    assert one.hash_ids[0] == two.hash_ids[0]
    assert one.hash_ids[1] != two.hash_ids[1]
    assert not set(one.hash_ids) & set(other.hash_ids), "a hash stands for all before it as well"
    assert not set(one.hash_ids) & set(apart.hash_ids), "who shares no cached prefix has none in common"
    assert own.hash_ids == ()


def test_hashes_of_another_run_say_nothing_of_the_same_prompt(tmp_path: Path) -> None:
    one, two = (recorded(tmp_path / name, sequence(0.0, [1] * 600))[0] for name in "ab")
    assert not set(one.hash_ids) & set(two.hash_ids)


def test_only_the_owner_may_read_and_runs_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_text('{"timestamp": 1, "input_length": 3}\n{"timestamp": 2, "input_length": 5}')
    path.chmod(0o644)
    trace = recorded(path, sequence(0.0, [1]))
    assert [request.input_length for request in trace] == [3, 5, 1], "what was cut off is a line of its own"
    assert path.stat().st_mode & 0o777 == 0o600
    assert recorded(tmp_path / "new", sequence(0.0, [1]))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


def test_a_full_file_gets_no_part_of_a_line_and_the_log_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "r"
    recorder = TraceRecorder(path, 400)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            recorder.sequence("m", sequence(1.0, [1]), Terms(), ENDED)
        recorder.close()
        recorder.sequence("m", sequence(1.0, [1]), Terms(), ENDED)
    assert 0 < path.stat().st_size <= 400
    assert 1 < len(read_trace(path)) < 50
    assert len(caplog.messages) == 1
    assert "max_record_bytes (400)" in caplog.text


def test_a_disk_that_hangs_does_not_take_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_notes, "_MOST_WAITING_TOKENS", 100)
    recorder = TraceRecorder(tmp_path / "r", 2**20)
    for _ in range(20):
        recorder.sequence("m", sequence(1.0, [1] * 30), Terms(), ENDED)
    recorder.close()
    assert (tmp_path / "r").stat().st_size == 0
    assert len(caplog.messages) == 1
    assert "slower than requests come" in caplog.text


def test_samples_of_one_prompt_are_one_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_notes, "_MOST_WAITING_TOKENS", 100)
    recorder, prompt = TraceRecorder(tmp_path / "r", 2**20), [1] * 60
    for _ in range(20):
        recorder.sequence("m", sequence(1.0, prompt), Terms(), ENDED)
    recorder.close()
    assert len((tmp_path / "r").read_text().splitlines()) == 20


def test_a_disk_that_is_full_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = TraceRecorder(tmp_path / "r", 2**20)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:20]))
    recorder.sequence("m", sequence(1.0, [1]), Terms(), ENDED)
    recorder.close()
    assert (tmp_path / "r").stat().st_size == 0
    assert "No space left" in caplog.text


def test_files_that_can_not_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        TraceRecorder(tmp_path / "nowhere" / "r", 100)
    with pytest.raises(ConfigError, match="must be a file"):
        TraceRecorder(Path("/dev/null"), 100)
    recorder = TraceRecorder(tmp_path / "r", 100)
    with pytest.raises(ConfigError, match="another server"):
        TraceRecorder(tmp_path / "r", 100)
    recorder.close()


def test_the_server_records_answers_refusals_and_items(tmp_path: Path) -> None:
    """Lines are there while the server runs; whoever was refused has no tokens, and items come as one request."""

    async def run() -> None:
        front = Front()
        recorder = TraceRecorder(tmp_path / "r", 2**20)
        front.service.recorders.append(recorder)
        writing = asyncio.create_task(recorder.keep_writing())
        assert (await front.complete(max_tokens=5, n=2, temperature=1)).status == 200
        front.client.refusal = full(1.0)
        assert (await front.complete(max_tokens=6)).status == 429
        service, _ = embedder()
        service.recorders.append(recorder)
        assert service.encoder is not None
        texts = service.encoder.encode_texts(["hello world", "hello"])
        await service.infer(texts, Terms(), [float(len(each.token_ids)) for each in texts])
        while (tmp_path / "r").read_bytes().count(b"\n") < 4:
            await asyncio.sleep(0.01)
        writing.cancel()
        recorder.close()

    asyncio.run(run())
    trace = read_trace(tmp_path / "r")
    assert [(each.model, each.output_length, each.max_tokens, each.items) for each in trace] == [
        ("tiny", 5, 5, 0),
        ("tiny", 5, 5, 0),
        ("tiny", 0, 6, 0),
        ("embedder", 0, None, 2),
    ]
    assert trace[0].hash_ids == trace[1].hash_ids == trace[2].hash_ids != ()
    assert "hello" not in json.dumps((tmp_path / "r").read_text())
