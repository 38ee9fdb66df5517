"""A real `chairlift serve` in a process of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families
from support.model_factory import model_folder
from support.server_harness import TEMPLATE
from support.text_tokenizers import build


class Server:
    """A running `chairlift serve`."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "chairlift.cli", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tempfile.gettempdir(),
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline()]
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.lines[0])
        assert found, self.lines[0] + self.process.stdout.read()
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += self.process.stdout

    def wait_ready(self, timeout: float = 40) -> None:
        deadline = time.monotonic() + timeout
        while self.http.get("/health/ready").status_code != 200:
            assert time.monotonic() < deadline, self.lines
            assert self.process.poll() is None, self.lines
            time.sleep(0.02)

    def metric(self, name: str, **labels: str) -> float:
        text = self.http.get("/metrics").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"chairlift_{name}" and labels.items() <= sample.labels.items():
                    return sample.value
        raise AssertionError(f"no metric {name} {labels}")

    def worker(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "hello world"} | body)

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


def language_model(folder: Path) -> Path:
    """A small model with a tokenizer and a chat template."""
    shutil.copytree(model_folder(), folder)
    build("bytelevel").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
