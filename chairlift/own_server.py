"""A server as a child process, for as long as a command needs one of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, NamedTuple

from chairlift.errors import Unavailable

_DRAINED_CHARS = 2**16


class OwnServer(NamedTuple):
    """Where it listens, without the path of its API, and the process that does."""

    url: str
    pid: int


@contextlib.contextmanager
def own_server(
    model: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[OwnServer]:
    """Serve a model on a free port of this machine until the end of the block. Raises Unavailable if that can't be.

    It keeps no files, and takes settings of models from wherever they are, but none of the users' server.
    """
    flags = ["--own-server", "--port", "0", "--data-dir", "", *arguments]
    # -P: a folder named chairlift in the working directory must not stand in for the installed package.
    command = [sys.executable, "-P", "-m", "chairlift.cli", "serve", model, *flags]
    # Where this command is told to end, so is the server.
    before = {ending: signal.signal(ending, lambda *_: sys.exit(1)) for ending in (signal.SIGTERM, signal.SIGHUP)}
    env = {**os.environ, **(environment or {})}
    # In a group of its own: Ctrl-C is meant for the command, which ends it.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, errors="replace", process_group=0, env=env
    ) as server:
        try:
            assert server.stdout is not None
            url = None
            for line in server.stdout:
                url = line.split(" at ")[-1].strip().removesuffix("/v1") if " at http" in line else url
                if url and line.startswith("Chairlift serves "):
                    break
            else:
                raise Unavailable(f"{model} can't be served")
            # Nobody wants what else is printed, as a class may. But a pipe that nobody reads stops whoever prints.
            unwanted, server.stdout = server.stdout, None
            threading.Thread(target=_drain, args=(unwanted,), daemon=True).start()
            yield OwnServer(url, server.pid)
        finally:
            server.terminate()
            for ending, handler in before.items():
                signal.signal(ending, handler)


def _drain(pipe: IO[str]) -> None:
    """Read until all that write have ended, and keep nothing."""
    with pipe:
        while pipe.read(_DRAINED_CHARS):
            pass
