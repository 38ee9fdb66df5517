"""A real server records what comes; the file is a trace, and the same load can be sent again from it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.serve_process import Server, language_model
from support.stub_runner import without_torch

from chairlift.cli import main
from chairlift.commands.terminal import ChatEndpoint
from chairlift.plan.trace_files import read_trace

pytestmark = pytest.mark.processes


def test_what_a_server_recorded_can_be_sent_to_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, trace = language_model(tmp_path / "tiny"), tmp_path / "trace.jsonl"
    flags = ("--record", str(trace))
    with Server(str(model), *flags, environ=without_torch()) as server:
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
    with Server(str(model), *flags[:-1], str(again), environ=without_torch()) as server:
        server.wait_ready()
        replayed = ["bench", "serve", server.url, str(trace), "--vocab", "200", "--out", str(results)]
        assert main(replayed) == 0
        server.process.terminate()
        assert server.wait_ended() == 0
    (run,) = json.loads(results.read_text())["runs"]
    assert (run["requests"], run["failed"], run["tokens"]) == (4, 0, 14)
    lengths = [(request.input_length, request.output_length) for request in recorded]
    assert [(request.input_length, request.output_length) for request in read_trace(again)] == lengths


def test_a_recording_that_finds_the_disk_full_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened, trace = os.open, tmp_path / "trace.jsonl"

    def full(path: Any, *given: Any, **more: Any) -> int:
        return opened("/dev/full", os.O_WRONLY) if path == trace else opened(path, *given, **more)

    monkeypatch.setattr(os, "open", full)
    monkeypatch.setattr(ChatEndpoint, "lines", lambda self, path: (line for line in (b"", b"{}\n")))
    assert main(["record", "http://x", str(trace)]) == 1
    assert f"{trace}: No space left on device, after 0 requests" in capsys.readouterr().err


def test_a_server_that_runs_can_be_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, trace = language_model(tmp_path / "tiny"), tmp_path / "trace.jsonl"
    with Server(str(model), environ=without_torch()) as server:
        server.wait_ready()
        command = [sys.executable, "-m", "chairlift.cli", "record", server.url, str(trace)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as recording:
            assert recording.stdout is not None
            deadline = time.monotonic() + 60
            while not trace.exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            while len(trace.read_text().splitlines()) < 3:
                assert time.monotonic() < deadline
                assert server.complete(max_tokens=4, ignore_eos=True).status_code == 200
            recording.terminate()
            said, problem = recording.communicate(timeout=60)
        assert recording.returncode == 0, problem
        assert "requests, for `chairlift plan --trace`" in said
        assert main(["record", server.url, str(trace)]) == 1
        assert "File exists" in capsys.readouterr().err
        assert main(["record", server.url, str(tmp_path / "short.jsonl"), "--seconds", "1"]) == 0
        assert main(["record", server.url, str(tmp_path / "none.jsonl"), "--seconds", "0"]) == 1
        assert "seconds must be between" in capsys.readouterr().err
    recorded = read_trace(trace)
    assert {request.output_length for request in recorded} == {4}
    assert trace.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "short.jsonl").read_bytes() == b""
    assert not (tmp_path / "none.jsonl").exists()
