"""Files that a command writes once it is done: that they can't be is told before anything runs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chairlift.errors import ConfigError


def check_output(flag: str, path: Path) -> None:
    """Raise ConfigError for a file that can't be written, as far as that can be told without trying."""
    folder = path.absolute().parent
    if os.path.isdir(path):
        problem = "it is a folder; name a file in it"
    elif not os.path.isdir(folder):
        problem = f"there is no folder {folder}; make it, or name another file"
    elif not os.access(*((path, os.W_OK) if os.path.exists(path) else (folder, os.W_OK | os.X_OK))):
        problem = "you may not write there; allow it, or name another file"
    else:
        return
    raise ConfigError(f"{flag} {path} can't be written: {problem}")


@contextmanager
def saving(flag: str, path: Path) -> Iterator[None]:
    """Have what goes wrong while a file is written raise ConfigError: a disk may be full by then."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {path} can't be written: {error.strerror or error}") from None
