"""A real `chairlift serve` in a process of its own, and what it serves."""

import json
import os
import re
import shutil
import ssl
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.encoder_factory import encoder_folder
from support.model_factory import model_folder
from support.processes import ServerProcess
from support.server_harness import TEMPLATE
from support.text_tokenizers import build

WITH_GRPC = () if find_spec("grpc") is None else ("--grpc-port", "0")
WORKER_MODELS = Path(__file__).parent / "worker_models.py"
MANY_MODELS = """
data_dir = "data"
model_control = true
[models.chat]
model = "llm"
kv_cache_gb = 0.01
num_threads = 1
weight = 2
[models.bert]
model = "bert"
num_threads = 1
[models.linear]
model = "linear.onnx"
[models.doubles]
model = "{python}:Doubles"
max_batch_size = 4
version = "3"
[models.counts]
model = "{python}:Counts"
[models.slow]
model = "{python}:Slow"
max_batch_size = 4
"""


class Server(ServerProcess):
    """A running `chairlift serve`, which ends with the `with` statement.

    `key` is what its clients send, `verify` whom they trust, `environ` has more variables for it.
    """

    def __init__(
        self,
        *arguments: str,
        key: str = "none",
        verify: ssl.SSLContext | bool = True,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(*arguments, environ=environ)
        headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=self.url, timeout=30, verify=verify, headers=headers)
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=httpx.Client(verify=verify, timeout=60)
        )

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

    @property
    def grpc_port(self) -> int:
        """The port that `--grpc-port 0` found."""
        deadline = time.monotonic() + 10
        while not (found := re.search(r"gRPC on port (\d+)", "".join(self.lines))):
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.01)
        return int(found[1])

    def worker(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "hello world"} | body)

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        super().close()


def servers() -> set[int]:
    """Children of this process that run the product's commands: other files' tests may have left theirs running."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in children if b"chairlift.cli" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def language_model(folder: Path) -> Path:
    """A small model with a tokenizer and a chat template."""
    shutil.copytree(model_folder(), folder)
    build("bytelevel").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def write_models(folder: Path) -> Path:
    """Models of every kind in a folder, and the settings that serve them all: see MANY_MODELS."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from support.onnx_models import linear

    language_model(folder / "llm")
    bert = shutil.copytree(encoder_folder("bert"), folder / "bert")
    build("wordpiece").save(str(bert / "tokenizer.json"))
    linear(folder / "linear.onnx")
    settings = folder / "models.toml"
    settings.write_text(MANY_MODELS.format(python=WORKER_MODELS))
    return settings
