"""What the front and a worker of items say to each other.

A message is a header, one of these in msgpack, and where it says so, frames as `arrays.encode` makes them.
"""

import msgspec

from chairlift.core.items.item import Failure
from chairlift.engine.worker_messages import LoadFailed, Shutdown
from chairlift.runners.items import ItemInfo


class RunBatch(msgspec.Struct, tag=True):
    """Front to worker: compute a batch. Frames: the list of payloads. `stream` asks for parts as they come."""

    id: int
    stream: bool = False


class StopBatch(msgspec.Struct, tag=True):
    """Front to worker: nobody waits for this stream any more. Nothing happens if it has ended."""

    id: int


ItemsToWorker = RunBatch | StopBatch | Shutdown


class InstanceReady(msgspec.Struct, tag=True):
    """Worker to front: loaded and warmed up."""

    info: ItemInfo


class Parts(msgspec.Struct, tag=True):
    """Worker to front: what one step of a stream gave. Frames: the parts, of the items with these indices."""

    id: int
    indices: list[int]


class Done(msgspec.Struct, tag=True):
    """Worker to front: a batch is computed. Frames: the list of results, or none where all went out as parts.

    `errors` has the text for each item that failed alone, by its index; its result is None. Those in `refused` did so
    because of what the client sent. Only the call itself counts as `seconds`. Since the call before the worker waited
    for `idle` seconds, and had other things to do for so many, the `gap`.
    """

    id: int
    seconds: float
    idle: float
    gap: float | None = None
    errors: dict[int, str] = {}
    refused: list[int] = []


class Failed(msgspec.Struct, tag=True):
    """Worker to front: the call failed as a whole."""

    id: int
    failure: Failure
    detail: str


ItemsToFront = InstanceReady | LoadFailed | Parts | Done | Failed
