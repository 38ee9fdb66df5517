"""What is common to all processes that tests start."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_tests() -> None:
    """For a new process: be killed when the tests are, which then have no time to end it themselves. Linux only."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def environment(**more: str) -> dict[str, str]:
    """This process's variables for a new one, but for settings of Chairlift that whoever runs the tests may have.

    CHAIRLIFT_ISA is none: with it all tests run on fewer instructions than the processor has.
    """
    settings = {name for name in os.environ if name.startswith("CHAIRLIFT_")} - {"CHAIRLIFT_ISA"}
    return {name: value for name, value in os.environ.items() if name not in settings} | more


class ServerProcess:
    """A running `chairlift serve`, which ends with the `with` statement; needs nothing of its clients.

    `environ` has more variables for it, `python` the interpreter that has what the server needs.
    """

    def __init__(
        self, *arguments: str, environ: Mapping[str, str] = MappingProxyType({}), python: str = sys.executable
    ) -> None:
        # So that no file that lies about is read, and none is left behind.
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.process = subprocess.Popen(
            [python, "-P", "-m", "chairlift.cli", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._folder.name,
            env=environment(PYTHONPATH=str(Path(__file__).parents[2])) | environ,
            preexec_fn=end_with_tests,
            process_group=0,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        found = None
        # A model may have failed before the address is said.
        while found is None:
            self.lines.append(self.process.stdout.readline())
            assert self.lines[-1], self.lines
            found = re.search(r"(https?)://127\.0\.0\.1:(\d+)", self.lines[-1])
        self.port = int(found[2])
        self.url = f"{found[1]}://127.0.0.1:{self.port}"
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += self.process.stdout

    def wait_ended(self, timeout: float = 60) -> int:
        """Wait until it has ended by itself and all that it said is in `lines`; return its exit status."""
        status = self.process.wait(timeout)
        self._reader.join(5)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._folder.cleanup()
