"""What the front and any worker say to each other, whatever the worker computes."""

import msgspec


class Shutdown(msgspec.Struct, tag=True):
    """Front to worker: exit now."""


class LoadFailed(msgspec.Struct, tag=True):
    """Worker to front: the model can't be served as configured; restarting would not help."""

    message: str
