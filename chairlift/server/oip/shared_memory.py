"""Tensors in memory that clients on the same machine share with the server: Triton's system shared memory.

It is read and written as a file, never mapped: whoever shares it may shorten it at any time.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.config.server import ServerConfig
from chairlift.errors import InvalidRequest
from chairlift.server.http.api_errors import ApiError
from chairlift.server.oip.parameters import read_size

_FOLDER = Path("/dev/shm")
_KEY = re.compile(r"/?(?!\.\.?$)[\w.-]{1,200}")
_MAX_REGIONS, _MAX_NAME = 256, 200
_REGION, _OFFSET, _SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
# The parameters of a tensor that is somewhere else.
PLACE = (_REGION, _OFFSET, _SIZE)


# Gets the bytes of a tensor that is somewhere else; None for one that comes with the message.
Fetch = Callable[[Mapping[str, Any] | None], bytes | None]


class Place(NamedTuple):
    """Where a tensor's bytes are, or may go: so many of a region of an owner."""

    owner: str
    region: str
    offset: int
    size: int

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that say so."""
        return {_REGION: self.region, _OFFSET: self.offset, _SIZE: self.size}


def place_of(given: Mapping[str, Any] | None, owner: str) -> Place | None:
    """Where a tensor is by its parameters; None if it comes with the message. Raises InvalidRequest."""
    if not given or not any(name in given for name in PLACE):
        return None
    region, size = given.get(_REGION), read_size(given, _SIZE)
    if not isinstance(region, str) or size is None:
        raise InvalidRequest(f"{_REGION} and {_SIZE} go together: a name, and a number of bytes", _REGION)
    return Place(owner, region, read_size(given, _OFFSET) or 0, size)


class _Region(NamedTuple):
    """`size` bytes from `offset` of what the client called `key`, open as `file`."""

    key: str
    offset: int
    size: int
    file: int


class SharedRegions:
    """The regions that clients have registered, by owner and name. All methods raise InvalidRequest or ApiError."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        # Requests read and write in threads: no file may be closed, and its number given away, meanwhile.
        self._lock = threading.Lock()
        self._regions: dict[tuple[str, str], _Region] = {}

    def register(self, owner: str, name: str, key: str, offset: int, size: int) -> None:
        """Open a region that there is already."""
        self._check_on()
        if not 1 <= len(name) <= _MAX_NAME or _KEY.fullmatch(key) is None:
            raise InvalidRequest(
                f"a region needs a name of at most {_MAX_NAME} characters, and a key like '/data'", "key"
            )
        if (owner, name) in self._regions:
            raise InvalidRequest(f"the region {name!r} is registered already", "name")
        if len(self._regions) >= _MAX_REGIONS:
            raise InvalidRequest(f"there are {_MAX_REGIONS} regions already; unregister one", "name")
        try:
            file = os.open(_FOLDER / key.lstrip("/"), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise InvalidRequest(f"the shared memory {key!r} can't be opened: {error.strerror}", "key") from None
        has = os.fstat(file).st_size
        if offset < 0 or size < 1 or offset + size > has:
            os.close(file)
            raise InvalidRequest(f"the shared memory {key!r} has {has} bytes, not {size} from {offset}", "byte_size")
        self._regions[owner, name] = _Region(key, offset, size, file)

    def unregister(self, owner: str, name: str) -> None:
        """Close a region, if it is there, or without a name all of the owner."""
        self._check_on()
        with self._lock:
            for known in [key for key in self._regions if key == (owner, name) or (key[0] == owner and not name)]:
                os.close(self._regions.pop(known).file)

    def status(self, owner: str, name: str) -> list[dict[str, Any]]:
        """What there is of one region, or without a name of all of the owner."""
        self._check_on()
        if name:
            self._find(owner, name)
        return [
            {"name": each, "key": region.key, "offset": region.offset, "byte_size": region.size}
            for (whose, each), region in self._regions.items()
            if whose == owner and name in ("", each)
        ]

    def size_of(self, tensors: Iterable[Mapping[str, Any] | None], owner: str) -> int:
        """The bytes that a request's tensors have in shared memory, by their parameters; none is read yet.

        Raises where a region is not there or too small, so that nobody is given room for bytes that are nowhere.
        """
        size = 0
        for parameters in tensors:
            if (place := place_of(parameters, owner)) is not None:
                size += place.size
                self._check_size(size, place)
                self._at(place)
        return size

    def fetcher(self, owner: str) -> Fetch:
        """What gets the bytes of a request's tensors by their parameters, up to `max_tensor_bytes` in all."""
        size = 0

        def fetch(parameters: Mapping[str, Any] | None) -> bytes | None:
            nonlocal size
            place = place_of(parameters, owner)
            if place is None:
                return None
            size += place.size
            self._check_size(size, place)
            return self._read(place)

        return fetch

    def _check_size(self, size: int, place: Place) -> None:
        if size > self._config.max_tensor_bytes:
            limit = f"{self._config.max_tensor_bytes} bytes (max_tensor_bytes)"
            raise ApiError(413, f"the tensors are larger than {limit}", place.region, "body_too_large")

    def _read(self, place: Place) -> bytes:
        with self._lock:
            region, start = self._at(place)
            raw = os.pread(region.file, place.size, start)
        if len(raw) != place.size:
            raise InvalidRequest(f"the region {place.region!r} is shorter than it was", place.region)
        return raw

    def write(self, place: Place, raw: bytes) -> Place:
        """Put bytes at a place; returns where exactly they are."""
        with self._lock:
            region, start = self._at(place)
            if len(raw) > place.size:
                problem = f"the output has {len(raw)} bytes, and only {place.size} were given"
                raise InvalidRequest(f"region {place.region!r}: {problem}", place.region)
            if os.fstat(region.file).st_size < start + len(raw):
                raise InvalidRequest(f"the region {place.region!r} is shorter than it was", place.region)
            os.pwrite(region.file, raw, start)
        return place._replace(size=len(raw))

    def close(self) -> None:
        """Close all regions."""
        with self._lock:
            while self._regions:
                os.close(self._regions.popitem()[1].file)

    def _at(self, place: Place) -> tuple[_Region, int]:
        self._check_on()
        region = self._find(place.owner, place.region)
        if place.offset + place.size > region.size:
            problem = f"has {region.size} bytes, not {place.size} from {place.offset}"
            raise InvalidRequest(f"the region {place.region!r} {problem}", place.region)
        return region, region.offset + place.offset

    def _find(self, owner: str, name: str) -> _Region:
        # One look-up: another thread may take it out of use meanwhile.
        if (region := self._regions.get((owner, name))) is None:
            raise InvalidRequest(f"there is no region {name!r}; register it first", name)
        return region

    def _check_on(self) -> None:
        if not self._config.shared_memory:
            raise InvalidRequest("this server shares no memory with its clients (shared_memory)")
