"""A real server that is watched: its spans at a collector, and its last minute in a file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.collector import Collector, attributes
from support.serve_process import Server, language_model
from support.stub_runner import without_torch
from support.trace_events import check_trace, slices

from chairlift.cli import main

pytestmark = pytest.mark.processes

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_the_collector_and_the_timeline_have_a_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = language_model(tmp_path / "tiny"), tmp_path / "timeline.json"
    with (
        Collector() as collector,
        Server(str(model), "--otlp-endpoint", collector.url, environ=without_torch()) as server,
    ):
        server.wait_ready()
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "ignore_eos": True}
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        answer = server.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert main(["timeline", server.url, "--out", str(out)]) == 0
        assert "ui.perfetto.dev" in capsys.readouterr().out
        server.process.terminate()
        assert server.wait_ended() == 0, "who leaves in order has sent all"
        (span,) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
    said = attributes(span)
    assert said["gen_ai.usage.output_tokens"] == 6
    assert said["gen_ai.response.id"] == answer.headers["x-request-id"]
    assert 0 < said["gen_ai.latency.time_to_first_token"] <= said["gen_ai.latency.e2e"]
    kinds = check_trace(json.loads(out.read_text()))
    (request,) = slices(kinds, "request")
    assert request["name"] == said["gen_ai.response.id"]
    steps = slices(kinds, "step")
    assert sum(step["args"]["tokens"] for step in steps) >= answer.json()["usage"]["prompt_tokens"] + 5
    inside = [step for step in steps if request["ts"] <= step["ts"] <= request["ts"] + request["dur"]]
    assert len(inside) >= 5, "its steps lie within it"


def test_nothing_of_opentelemetry_is_loaded_where_nobody_asks_for_it() -> None:
    """Neither by what a server imports, nor by what a request goes through."""
    code = (
        "import sys, chairlift.server.front, chairlift.server.app, chairlift.server.models.sequence_service\n"
        "import chairlift.server.models.item_service, chairlift.server.request_routes\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry') or 'request_spans' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
