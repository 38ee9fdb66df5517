"""A real browser on a page elsewhere: what it sends is refused, and what it may not see it does not show."""

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.chromium import CHROMIUM, FLAGS
from support.items_harness import Listening, function, listening
from support.server_harness import FakeClient, tokenizer

from chairlift.config.server import ServerConfig
from chairlift.server.models.registry import Models, ModelService
from chairlift.server.models.sequence_service import SequenceService

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
ALL_FLAGS = (
    *FLAGS,
    # Any name leads to this machine: what DNS rebinding comes to.
    "--host-resolver-rules=MAP rebound.example 127.0.0.1",
)
PAGE = """<!doctype html><title>elsewhere</title><iframe name="sink"></iframe><script>
const server = SERVER;
const post = (path, type, body, mode) => fetch(server + path, {
  method: "POST", mode, body: body && new Blob([body], type ? {type} : {}),
});
const form = (path, enctype, fields) => new Promise((done) => {
  const made = Object.assign(document.createElement("form"),
    {action: server + path, method: "POST", enctype, target: "sink"});
  for (const [name, value] of Object.entries(fields)) {
    const input = Object.assign(document.createElement("input"), {name, value});
    if (name === "file") {
      const files = new DataTransfer();
      files.items.add(new File([value], "in.jsonl"));
      input.type = "file";
      input.files = files.files;
    }
    made.append(input);
  }
  document.body.append(made);
  document.querySelector("iframe").onload = () => done({type: "form", status: 0});
  made.submit();
});
const completion = JSON.stringify({prompt: "hello", max_tokens: 2});
const stream = JSON.stringify({prompt: "hello", max_tokens: 2, stream: true});
const instances = JSON.stringify({instances: [2]});
const attempts = {
  text: () => post("/v1/completions", "text/plain", completion, "no-cors"),
  untyped: () => post("/v1/completions", "", completion, "no-cors"),
  predict: () => post("/v1/models/function:predict", "", instances, "no-cors"),
  tensors: () => post("/v2/models/function/infer", "", TENSORS, "no-cors"),
  unload: () => post("/v2/repository/models/function/unload", "", "", "no-cors"),
  beacon: async () => ({type: String(navigator.sendBeacon(server + "/v2/repository/models/function/unload"))}),
  form: () => form("/v1/files", "multipart/form-data", {purpose: "batch", file: "{}"}),
  text_form: () => form("/v1/completions", "text/plain", {'{"prompt": "hello", "user": "': '"}'}),
  json: () => post("/v1/completions", "application/json", completion, "cors"),
  stream: () => post("/v1/completions", "application/json", stream, "cors"),
  wrong: () => post("/v1/completions", "application/json", "{", "cors"),
  models: () => fetch(server + "/v1/models"),
};
const tried = async (attempt) => {
  try {
    const answer = await attempt();
    return {type: answer.type, status: answer.status, text: answer.text ? await answer.text() : ""};
  } catch (error) {
    return {type: "error", text: String(error)};
  }
};
(async () => {
  const seen = {};
  for (const [name, attempt] of Object.entries(attempts)) seen[name] = await tried(attempt);
  await fetch("/report", {method: "POST", body: JSON.stringify(seen)});
})();
</script>"""
TENSORS = {"inputs": [{"name": "input", "shape": [1], "datatype": "BYTES", "data": ["1"]}]}


class Shelf:
    """Loads nothing, and notes what is unloaded."""

    def __init__(self) -> None:
        self.unloaded: list[str] = []

    def problem(self) -> str | None:
        return None

    def available(self) -> Sequence[str]:
        return ["function"]

    async def load(self, name: str, changes: Mapping[str, Any]) -> Sequence[ModelService]:
        raise AssertionError(name)

    async def unload(self, model: ModelService) -> None:
        self.unloaded.append(model.name)


class World:
    """A server of two models, and what was asked of them."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.shelf = Shelf()
        service, self.functions = function()
        words = tokenizer()
        self.language = FakeClient(words.encode("hello world! "))
        spoken = SequenceService(self.language, words, "tiny", ServerConfig())  # type: ignore[arg-type]
        self._listening = listening(
            registry=Models([spoken, service], self.shelf),
            data_dir=str(folder / "data"),
            model_control=True,
            **settings,
        )
        self.server: Listening

    def __enter__(self) -> "World":
        self.server = self._listening.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.__exit__(None, None, None)

    @property
    def done(self) -> dict[str, int]:
        files = httpx.get(f"{self.server.url}/v1/files").json()["data"]
        return {
            "completions": len(self.language.requests),
            "predictions": len(self.functions.submitted),
            "unloads": len(self.shelf.unloaded),
            "files": len(files),
        }


class Site:
    """Another site: it has one page, and gets that page's report."""

    def __init__(self) -> None:
        self.reports: queue.Queue[dict[str, dict[str, Any]]] = queue.Queue()
        self.page = b""
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(site.page if self.path == "/" else b"")

            def do_POST(self) -> None:
                site.reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._answer(b"")

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.origin = f"http://localhost:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def site() -> Iterator[Site]:
    it = Site()
    yield it
    it.http.shutdown()
    it.http.server_close()


def report_of(site: Site, server: Listening, profile: Path) -> dict[str, dict[str, Any]]:
    """What the site's page saw of the server."""
    page = PAGE.replace("SERVER", json.dumps(server.url)).replace("TENSORS", json.dumps(json.dumps(TENSORS)))
    site.page = page.encode()
    assert CHROMIUM is not None
    browser = subprocess.Popen(
        [CHROMIUM, *ALL_FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}", site.origin],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return site.reports.get(timeout=90)
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait(10)


def test_a_page_elsewhere_does_nothing_and_sees_nothing(site: Site, tmp_path: Path) -> None:
    with World(tmp_path) as world:
        seen = report_of(site, world.server, tmp_path / "profile")
        assert world.done == {"completions": 0, "predictions": 0, "unloads": 0, "files": 0}
        # Requests without a preflight came, and were refused; with one, the browser sent no more than that.
        counts = world.server.server.config.app.direct._count
        refused = sum(count for (method, _, code), count in counts.items() if (method, code) == ("POST", 403))
        assert refused == 8
        assert {seen[name]["type"] for name in ("text", "untyped", "predict", "tensors", "unload")} == {"opaque"}
        assert {seen[name]["type"] for name in ("json", "stream", "wrong", "models")} == {"error"}
        assert "tiny" not in json.dumps(seen)


def test_a_page_that_is_let_in_does_all_and_sees_all(site: Site, tmp_path: Path) -> None:
    with World(tmp_path, allowed_origins=(site.origin,)) as world:
        seen = report_of(site, world.server, tmp_path / "profile")
        # Bodies that are no JSON by their type are refused as ever; only tensors may come without one.
        assert world.done == {"completions": 2, "predictions": 1, "unloads": 1, "files": 1}
        assert {name: seen[name]["status"] for name in ("json", "stream", "wrong", "models")} == {
            "json": 200,
            "stream": 200,
            "wrong": 400,
            "models": 200,
        }
        assert seen["stream"]["text"].endswith("data: [DONE]\n\n")
        assert json.loads(seen["json"]["text"])["choices"][0]["text"]
        assert json.loads(seen["wrong"]["text"])["error"]["message"]


def test_a_name_that_was_made_to_lead_here_opens_nothing(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    with World(tmp_path) as world:
        pages = []
        for name in ("rebound.example", "localhost"):
            url = f"http://{name}:{world.server.port}/v1/models"
            command = [CHROMIUM, *ALL_FLAGS, f"--user-data-dir={tmp_path / name}", "--dump-dom", url]
            pages.append(subprocess.run(command, capture_output=True, text=True, timeout=90, check=False).stdout)
        assert "wrong_host" in pages[0]
        assert "tiny" not in pages[0]
        assert "tiny" in pages[1]
