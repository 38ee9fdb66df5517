"""The server that all clients are tested against. It may have another environment than they: see CONTRIBUTING.md."""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import ServerProcess

DEMO = Path(__file__).parents[2] / "chairlift/demo/model"


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the demo model is served, with a chat template that has tools, and reasons where it is asked to."""
    folder = shutil.copytree(DEMO, tmp_path_factory.mktemp("clients") / "demo")
    shutil.copy(Path(__file__).with_name("chat_template.jinja"), folder)
    python = os.environ.get("CHAIRLIFT_PYTHON", sys.executable)
    with ServerProcess(str(folder), "--kv-cache-gb", "0.05", "--num-threads", "1", python=python) as server:
        deadline = time.monotonic() + 120
        while not any("ready in" in line for line in server.lines):
            assert time.monotonic() < deadline, server.lines
            assert server.process.poll() is None, server.lines
            time.sleep(0.05)
        yield server.url


@pytest.fixture(scope="session")
def v1(url: str) -> str:
    """The base URL that OpenAI's clients want."""
    return f"{url}/v1"
