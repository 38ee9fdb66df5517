"""What the front and any worker say to each other, whatever the worker computes."""

import traceback
from pathlib import Path

import msgspec

from chairlift.errors import ChairliftError
from chairlift.runners.error_text import as_utf8, one_line, text_of
from chairlift.runners.out_of_memory import is_out_of_memory


class Shutdown(msgspec.Struct, tag=True):
    """Front to worker: exit now."""


class LoadFailed(msgspec.Struct, tag=True):
    """Worker to front: the model can't be loaded. `final` says that it can't be served as configured, at any time."""

    message: str
    final: bool


class Heartbeat(msgspec.Struct, array_like=True):
    """Worker to front, by the lifeline, twice a second: so many messages were sent, and what is `overdue`, if any."""

    sent: int
    overdue: str | None = None


def load_failed(error: BaseException) -> LoadFailed:
    """Say in a line or two why a model can't be loaded."""
    if isinstance(error, ChairliftError):
        return LoadFailed(text_of(error), final=True)
    if is_out_of_memory(error):
        return LoadFailed(f"out of memory: {one_line(error)}", final=False)
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" ({as_utf8(Path(each.filename).name)}, line {each.lineno})" for each in where)
    return LoadFailed(one_line(error) + place, final=False)
