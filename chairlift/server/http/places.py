"""The places for connections and for calls: how many are taken, by whom, and who makes room for another client."""

import heapq
from operator import attrgetter
from typing import Protocol

from chairlift.server.http.buffered import share_of

# What the holder of a place is in the middle of. Nothing, some of a request has come, or it waits for its answer.
IDLE, COMING, BUSY = range(3)


class Holder(Protocol):
    """A connection, or a call."""

    @property
    def stage(self) -> int:
        """IDLE, COMING or BUSY."""

    def give_way(self) -> None:
        """Lose the place: it is free already."""


class Places:
    """Who has a place.

    One client may have all, as a proxy in front of all others does. But when there is no place left and one comes that
    has no more than its share, those that have more make room: with what is idle, then with requests that are still on
    their way in. What is being answered stays, so that nobody can end the requests of others by coming.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._share = share_of(most)
        self._client_of: dict[Holder, str] = {}
        # The oldest first.
        self._held_by: dict[str, dict[Holder, None]] = {}
        # Those that have more than their share.
        self._beyond: set[str] = set()

    @property
    def beyond(self) -> int:
        """How many hold more than there are places for; negative while some are left."""
        return len(self._client_of) - self.most

    def enter(self, client: str, holder: Holder) -> int:
        """Count another, with room made for it if that is possible. Returns `beyond`."""
        own = self._held_by.setdefault(client, {})
        own[holder] = None
        self._client_of[holder] = client
        if len(own) > self._share:
            self._beyond.add(client)
        else:
            self._make_room()
        return self.beyond

    def leave(self, holder: Holder | None) -> None:
        """Its place is free, if it had one."""
        client = self._client_of.pop(holder, None) if holder is not None else None
        if client is None or holder is None:
            return
        own = self._held_by[client]
        del own[holder]
        if len(own) <= self._share:
            self._beyond.discard(client)
        if not own:
            del self._held_by[client]

    def _make_room(self) -> None:
        if self.beyond <= 0:
            return
        for client in tuple(self._beyond):
            own = self._held_by[client]
            ready = [each for each in own if each.stage < BUSY]
            number = min(self.beyond, len(own) - self._share)
            for each in heapq.nsmallest(number, ready, key=attrgetter("stage")):
                self.leave(each)
                each.give_way()
