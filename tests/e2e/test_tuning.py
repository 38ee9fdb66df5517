"""A real server looks at its own traffic, and says what it made of it."""

import time
from pathlib import Path

import pytest
from support.serve_process import Server, language_model
from support.stub_runner import without_torch

pytestmark = pytest.mark.processes


def rounds_of(server: Server) -> float:
    """Looks that the tuner took; none before the first."""
    try:
        return server.metric("tuner_rounds_total", model="tiny")
    except AssertionError:
        return 0.0


def test_a_server_that_tunes_itself_tells_what_it_saw_and_what_that_cost(tmp_path: Path) -> None:
    often = ("--tune-every-s", "0.5", "--tune-cpu-share", "1", "--strategy", "dynamic", "--max-wait-ms", "200")
    with Server(str(language_model(tmp_path / "tiny")), "--auto", *often, environ=without_torch()) as server:
        server.wait_ready()
        for _ in range(24):
            assert server.complete(max_tokens=4, ignore_eos=True).status_code == 200
        deadline = time.monotonic() + 90
        while not rounds_of(server):
            assert time.monotonic() < deadline, server.lines
            time.sleep(0.1)
        about = server.http.get("/v1/models/tiny").json()["tuning"]
        assert about["decisions"][0]["reason"]
        assert about["cpu_s"] > 0
        assert about["configured"]["max_wait_ms"] == 200.0
        assert server.complete(max_tokens=4, ignore_eos=True).status_code == 200, "whatever was turned"
