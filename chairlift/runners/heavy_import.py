"""Importing torch faster: of the many objects that it makes none is garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_import() -> Iterator[None]:
    """Let no garbage be looked for while something large is imported: of the time that torch takes that is a fifth."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
