"""Importing torch faster: it makes more than a million objects, and none of them is garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_import() -> Iterator[None]:
    """Have nothing collected while something large is imported, which takes a fifth of the time that it takes torch."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
