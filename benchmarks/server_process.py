"""A server as a child process: started, awaited, ended. Standard library only, as peers' interpreters use it."""

import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.1


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    command: list[str], port: int, ready: str, env: dict[str, str], timeout: float = 300, own_group: bool = True
) -> Iterator[float]:
    """Run a server until the end of the block; gives the seconds until `ready` answered 200.

    Raises RuntimeError with the end of what it wrote, if it never does. Without a process group of its own, the server
    ends with the group of this process.
    """
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | env, start_new_session=own_group
        )
        try:
            while not _answers(port, ready):
                if process.poll() is not None or time.perf_counter() - start > timeout:
                    log.seek(max(0, os.fstat(log.fileno()).st_size - 2000))
                    raise RuntimeError(f"not ready: {log.read().decode(errors='replace').strip()}")
                time.sleep(POLL_SECONDS)
            yield time.perf_counter() - start
        finally:
            end(process, own_group)


def end(process: "subprocess.Popen[Any]", own_group: bool = True) -> None:
    """Ask a process to end, then kill what is left: a server that is killed may leave its workers behind."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with suppress(ProcessLookupError):
        if own_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def front_pid(port: int) -> int:
    """The child of this process that listens on a port: the server that was started here."""
    mine = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    for pid in map(int, Path(mine).read_text().split()):
        if str(port).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
    raise SystemExit("the server's process is not there")
