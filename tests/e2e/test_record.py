"""A real server records what comes; the file is a trace, and the same load can be sent again from it."""

import json
from pathlib import Path

import pytest
from support.serve_process import Server, language_model

from chairlift.cli import main
from chairlift.plan.trace_files import read_trace

pytestmark = pytest.mark.processes


def test_what_a_server_recorded_can_be_sent_to_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, trace = language_model(tmp_path / "tiny"), tmp_path / "trace.jsonl"
    flags = ("--num-threads", "1", "--dtype", "float32", "--kv-cache-gb", "0.01", "--record", str(trace))
    with Server(str(model), *flags) as server:
        server.wait_ready()
        for count in (3, 5, 4):
            assert server.complete(max_tokens=count, ignore_eos=True).status_code == 200
        assert server.complete(max_tokens=2, stream=True, ignore_eos=True).status_code == 200
        server.process.terminate()
        assert server.wait_ended() == 0, "who leaves in order has written all"
    recorded = read_trace(trace)
    assert [request.output_length for request in recorded] == [3, 5, 4, 2]
    assert {request.model for request in recorded} == {"tiny"}
    assert len({request.hash_ids for request in recorded}) == 1
    assert trace.stat().st_mode & 0o777 == 0o600
    assert "hello" not in trace.read_text()
    again, results = tmp_path / "again.jsonl", tmp_path / "results.json"
    with Server(str(model), *flags[:-1], str(again)) as server:
        server.wait_ready()
        replayed = ["bench", "serve", server.url, str(trace), "--vocab", "200", "--out", str(results)]
        assert main(replayed) == 0
        server.process.terminate()
        assert server.wait_ended() == 0
    (run,) = json.loads(results.read_text())["runs"]
    assert (run["requests"], run["failed"], run["tokens"]) == (4, 0, 14)
    lengths = [(request.input_length, request.output_length) for request in recorded]
    assert [(request.input_length, request.output_length) for request in read_trace(again)] == lengths
