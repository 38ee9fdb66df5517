"""A real `chairlift run` in a process of its own, and jobs of known results."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from support.job_harness import batch_line
from support.processes import end_with_tests, environment

MODELS = "worker_models"


class RunProcess:
    """A running `chairlift run`, in a process group of its own; `environ` has more variables for it."""

    def __init__(self, folder: Path, *arguments: str, environ: Mapping[str, str] = MappingProxyType({})) -> None:
        here = Path(__file__).parent
        path = os.pathsep.join([str(here.parents[1]), str(here), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "chairlift.cli", "run", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=environment(PYTHONPATH=path) | environ,
            start_new_session=True,
            preexec_fn=end_with_tests,
        )

    def wait(self, timeout: float = 1200) -> tuple[int, str]:
        """The exit status, and all that was printed."""
        try:
            printed, _ = self.process.communicate(timeout=timeout)
        finally:
            self.kill()
        return self.process.returncode, printed

    def kill(self) -> None:
        """End the whole group at once."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()

    def workers(self) -> list[int]:
        """The processes that it started."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        try:
            return [int(pid) for pid in path.read_text().split()]
        except OSError:
            return []

    def wait_for(self, path: Path, size: int = 1, timeout: float = 240) -> None:
        """Until a file has so many bytes."""
        deadline = time.monotonic() + timeout
        while not path.exists() or path.stat().st_size < size:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.005)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def write_mixed(path: Path, count: int, model: str = "Slow") -> None:
    """Lines that are answered well, but for every 50th, which is no JSON."""
    url = f"/v1/models/{model}:predict"
    lines = [batch_line(f"c{i}", {"instances": [i]}, url) if i % 50 else '{"custom_id": ' for i in range(count)]
    path.write_text("\n".join(lines))


def comparable(path: Path) -> list[Any]:
    """A file's results without what no two runs have in common, sorted."""
    found = []
    for line in path.read_text().splitlines():
        result = json.loads(line)
        result["id"] = result["id"].rpartition("-")[2]
        if result["response"] is not None:
            del result["response"]["request_id"]
            for key in ("id", "created"):
                result["response"]["body"].pop(key, None)
        found.append(json.dumps(result, sort_keys=True))
    return sorted(found)
