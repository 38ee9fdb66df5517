"""The responses that a server keeps, in memory: bounded, and each tenant's apart."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from chairlift.config.server import ServerConfig
from chairlift.errors import InvalidRequest, Unavailable
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.buffered import too_many
from chairlift.server.http.tenants import Tenant
from chairlift.server.responses.event_log import EventLog
from chairlift.server.responses.input_items import no_item
from chairlift.server.responses.item_ids import response_of
from chairlift.server.responses.response_body import ResponseItem

# What is kept beside the JSON, in about so many bytes.
_OVERHEAD = 1024
# A document's fields as they are written: what a client sent, and it has back here, is not made again.
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class StoredResponse:
    """One response: its document and its own input items as JSON, and the response before it.

    Of one in the background, and of no other, there are the events, and as long as it is not over the `task` that
    answers it.
    """

    __slots__ = ("document", "id", "input", "log", "previous", "task")

    def __init__(self, name: str, previous: str | None, input_items: bytes, document: bytes) -> None:
        self.id, self.previous = name, previous
        self.input, self.document = input_items, document
        self.task: asyncio.Task[None] | None = None
        self.log: EventLog | None = None

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        events = 0 if self.log is None else self.log.size
        return len(self.input) + len(self.document) + events + _OVERHEAD


class _Shelf:
    """What one tenant has here, the least recently used first."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size = 0
        self.running = 0


class ResponseStore:
    """All responses that are kept. A tenant's count is bounded, and the bytes of all of them together.

    Beyond the bytes, whoever has most loses what it has not used for longest. All methods belong to the event loop.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._shelves: dict[str | None, _Shelf] = {}
        self._size = 0
        self._leaving = False

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._config.max_stored_responses > 0

    def put(self, tenant: Tenant | None, stored: StoredResponse) -> bool:
        """Keep a response, and let go of others as far as there is no room. Says whether this one is kept."""
        shelf = self._shelves.setdefault(_name(tenant), _Shelf())
        shelf.responses[stored.id] = stored
        self._grow(shelf, stored.size)
        return stored.id in shelf.responses

    def change(self, tenant: Tenant | None, stored: StoredResponse, document: bytes) -> None:
        """A response that is kept has another document now. One that is gone stays gone."""
        self._change(self._shelves[_name(tenant)], stored, document)

    def note(self, tenant: Tenant | None, stored: StoredResponse, events: Sequence[bytes]) -> None:
        """Keep further events of a response in the background."""
        assert stored.log is not None
        before = stored.size
        stored.log.add(events)
        self._grow_by(self._shelves[_name(tenant)], stored, before)

    async def pack(self, tenant: Tenant | None, stored: StoredResponse) -> None:
        """There are no further events: keep those that there are in fewer bytes."""
        assert stored.log is not None
        packed = await stored.log.packed()
        before = stored.size
        stored.log.replace(packed)
        self._grow_by(self._shelves[_name(tenant)], stored, before)

    def get(self, tenant: Tenant | None, name: str) -> StoredResponse:
        """A tenant's response, as one just used. Raises a 404."""
        shelf = self._shelves.get(_name(tenant))
        if shelf is None or name not in shelf.responses:
            message = f"there is no response {name!r}; responses are kept in memory, and the oldest go first"
            raise ApiError(404, message, code="response_not_found")
        shelf.responses.move_to_end(name)
        return shelf.responses[name]

    def delete(self, tenant: Tenant | None, name: str) -> None:
        """Delete a response; one that is not over is cancelled. Raises a 404."""
        self.get(tenant, name)
        self._drop(self._shelves[_name(tenant)], name)

    def cancel(self, tenant: Tenant | None, name: str) -> StoredResponse:
        """Cancel a response in the background; one that is over stays as it is. Raises a 404, or InvalidRequest."""
        stored = self.get(tenant, name)
        if stored.log is None:
            raise InvalidRequest("only a response with background can be cancelled; close the connection of others")
        self._cancel(self._shelves[_name(tenant)], stored)
        return stored

    def turns(self, tenant: Tenant | None, name: str) -> list[StoredResponse]:
        """The responses of a conversation, from the first one to the one named.

        Raises a 404 if one of them is gone, and a 413 if together they have more bytes than a body may have.
        """
        found: list[StoredResponse] = []
        previous: str | None = name
        size = 0
        while previous is not None:
            try:
                found.append(self.get(tenant, previous))
            except ApiError as error:
                message = f"{error.body.message}. Send all items of the conversation as input"
                raise ApiError(404, message, "previous_response_id", "previous_response_not_found") from None
            size += len(found[-1].input) + len(found[-1].document)
            if size > self._config.max_body_bytes:
                message = f"the conversation has more than {self._config.max_body_bytes} bytes (max_body_bytes)"
                raise ApiError(413, message, "previous_response_id", "conversation_too_large")
            previous = found[-1].previous
        found.reverse()
        return found

    def holders(self, tenant: Tenant | None, references: Mapping[str, str]) -> list[StoredResponse]:
        """The responses whose answers have these items, of which it is said where they are referred to.

        Raises a 404 for an item of one that is gone, and a 413 as `turns`.
        """
        found: dict[str, StoredResponse] = {}
        for item, where in references.items():
            try:
                stored = self.get(tenant, response_of(item) or "")
            except ApiError:
                raise no_item(item, where) from None
            found[stored.id] = stored
        if sum(len(stored.document) for stored in found.values()) > self._config.max_body_bytes:
            message = f"the items referred to have more than {self._config.max_body_bytes} bytes (max_body_bytes)"
            raise ApiError(413, message, "input", "conversation_too_large")
        return [*found.values()]

    @contextlib.contextmanager
    def place(self, tenant: Tenant | None) -> Iterator[None]:
        """A place in the background. Raises a 429 if the tenant has as many under way as it may."""
        shelf, most = self._shelves.setdefault(_name(tenant), _Shelf()), self._config.max_background_responses
        if self._leaving:
            raise Unavailable("the server is about to leave")
        if shelf.running >= most:
            raise too_many("responses in the background", most, "max_background_responses", close=False)
        shelf.running += 1
        try:
            yield
        finally:
            shelf.running -= 1

    async def leave(self) -> None:
        """Cancel what runs in the background, and begin no more of it."""
        self._leaving = True
        tasks: list[asyncio.Task[None] | None] = []
        for shelf in self._shelves.values():
            for stored in [each for each in shelf.responses.values() if each.task is not None]:
                tasks.append(stored.task)
                self._cancel(shelf, stored)
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)

    def _cancel(self, shelf: _Shelf, stored: StoredResponse) -> None:
        if stored.task is not None:
            stored.task.cancel()
            stored.task = None
            fields = _fields.decode(stored.document)
            self._change(shelf, stored, msgspec.json.encode(fields | {"status": "cancelled"}))

    def _change(self, shelf: _Shelf, stored: StoredResponse, document: bytes) -> None:
        before = stored.size
        stored.document = document
        self._grow_by(shelf, stored, before)

    def _grow_by(self, shelf: _Shelf, stored: StoredResponse, before: int) -> None:
        """A response had so many bytes before; one that is gone does not count."""
        if shelf.responses.get(stored.id) is stored:
            self._grow(shelf, stored.size - before)

    def _grow(self, shelf: _Shelf, size: int) -> None:
        shelf.size += size
        self._size += size
        while len(shelf.responses) > self._config.max_stored_responses:
            self._drop_oldest(shelf)
        while self._size > self._config.max_stored_bytes:
            self._drop_oldest(max(self._shelves.values(), key=lambda each: each.size))

    def _drop_oldest(self, shelf: _Shelf) -> None:
        """Let go of a response, if it can be one that is over."""
        over = (name for name, stored in shelf.responses.items() if stored.task is None)
        self._drop(shelf, next(over, next(iter(shelf.responses))))

    def _drop(self, shelf: _Shelf, name: str) -> None:
        stored = shelf.responses.pop(name)
        shelf.size -= stored.size
        self._size -= stored.size
        if stored.task is not None:
            stored.task.cancel()


def items_of(turns: Iterable[StoredResponse]) -> list[ResponseItem]:
    """All items of a conversation. Raises InvalidRequest if one of its responses is not complete."""
    items: list[ResponseItem] = []
    for turn in turns:
        items += msgspec.json.decode(turn.input) + _output_of(turn, "previous_response_id")
    return items


def kept_items(holders: Iterable[StoredResponse]) -> dict[str, ResponseItem]:
    """The items of these responses' answers, by their ids. Raises InvalidRequest if one is not complete."""
    return {item["id"]: item for holder in holders for item in _output_of(holder, "input")}


def _output_of(stored: StoredResponse, param: str) -> list[ResponseItem]:
    document = msgspec.json.decode(stored.document)
    if document["status"] not in ("completed", "incomplete"):
        raise InvalidRequest(f"the response {stored.id!r} is {document['status']}: nothing can follow it", param)
    output: list[ResponseItem] = document["output"]
    return output


def _name(tenant: Tenant | None) -> str | None:
    return None if tenant is None else tenant.name
