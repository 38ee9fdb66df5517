"""How much is read of a connection whose requests have to wait for the one before them."""

import asyncio
from collections.abc import Collection
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

# Requests of one connection that wait for the one before them, and their bytes, beyond which no more is read.
MOST_QUEUED, MOST_QUEUED_BYTES = 16, HIGH_WATER_LIMIT


class Flow(FlowControl):
    """Reads nothing more while the requests that wait for the one before them are many, or large.

    As long as they are few it reads on: a client that hangs up is noticed only by who reads.
    """

    def __init__(self, transport: asyncio.Transport, queued: Collection[tuple[RequestResponseCycle, Any]]) -> None:
        super().__init__(transport)
        self._queued = queued
        # What came and is yet to be parsed.
        self.unread = b""

    def resume_reading(self) -> None:
        """Read on, if there is room for what comes."""
        if self.read_paused and not self.unread and self.has_room():
            super().resume_reading()

    def has_room(self) -> bool:
        """Whether another request may wait."""
        if not self._queued:
            return True
        if len(self._queued) >= MOST_QUEUED:
            return False
        return sum(_size(cycle) for cycle, _ in self._queued) < MOST_QUEUED_BYTES


def _size(cycle: RequestResponseCycle) -> int:
    """About the bytes of a request that waits."""
    scope = cycle.scope
    line = len(scope["raw_path"]) + len(scope["query_string"])
    return line + len(cycle.body) + sum(len(name) + len(value) for name, value in scope["headers"])
