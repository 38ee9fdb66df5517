"""Clients from npm, by scripts of node's own test runner: the packages openai and ai."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.processes]
HERE = Path(__file__).parent


@pytest.mark.parametrize("script", ["openai.mjs", "ai.mjs"])
def test_a_package_of_npm(url: str, script: str) -> None:
    node = shutil.which("node")
    if node is None or not (HERE / "node_modules").exists():
        pytest.skip("needs node, and npm install --prefix tests/clients")
    environ = os.environ | {"CHAIRLIFT_URL": url}
    ended = subprocess.run([node, "--test", script], cwd=HERE, env=environ, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
