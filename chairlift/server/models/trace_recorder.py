"""What came, as a trace for the simulator: a line for each request, without any text, in a file that is bounded."""

import asyncio
import errno
import fcntl
import hmac
import logging
import os
import secrets
import stat
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from chairlift.core.sequences.request import Request
from chairlift.errors import ConfigError
from chairlift.plan.trace import TOKENS_PER_HASH
from chairlift.plan.trace_files import MOST_HASHES, TraceLine
from chairlift.server.http.exchange import Terms

logger = logging.getLogger(__name__)

# How often lines are written. A server that is killed loses those of so many seconds.
_SECONDS = 1.0
# What may wait to be written, in requests and in tokens of their prompts: a disk that hangs must not take the memory.
_MOST_WAITING, _MOST_WAITING_TOKENS = 2**16, 2**22
# Of a hash, so many bits are kept: numbers that any reader of JSON has exactly.
_HASH_BITS = 53
_TENANT_BYTES = 8


class _Seen(NamedTuple):
    """What a line says of a request, with a prompt that is yet to be hashed, and the salt of its cached prefix."""

    line: TraceLine
    tenant: str
    prompt_ids: Sequence[int]
    cache_salt: str


class TraceRecorder:
    """Appends a line for each request to a file, in a thread, once a second.

    Prompts are hashed, and tenants' names too, with a salt that is new for each recorder and kept nowhere: whoever
    reads the file sees which prompts begin alike, and can't try out what they may have been. At `max_bytes`, or if the
    file can't be written, recording stops, and one line of the log says so.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Open the file. Raises ConfigError if that can't be."""
        self._path = path
        self._max_bytes = max_bytes
        self._salt = secrets.token_bytes(32)
        self._encoder = msgspec.json.Encoder()
        # Milliseconds since 1970 of the monotonic clock's zero: times of several runs follow each other.
        self._zero = 1000 * (time.time() - time.monotonic())
        self._waiting: list[_Seen] = []
        self._waiting_tokens = 0
        # What is the thread's to write.
        self._handed: deque[list[_Seen]] = deque()
        try:
            self._file = _opened(path)
            self._size = os.fstat(self._file).st_size
        except OSError as error:
            raise ConfigError(f"record {path}: {error.strerror}") from None
        self._writing = threading.Lock()
        self._open = True

    def sequence(self, model: str, request: Request, terms: Terms, num_tokens: int) -> None:
        """Note a sequence that is over, or was refused, with the tokens that it was given."""
        line = TraceLine(
            timestamp=self._moment(request.arrival),
            input_length=max(len(request.prompt_ids), 1),
            output_length=num_tokens,
            max_tokens=max(request.max_tokens, 1),
            model=model,
            priority=request.priority,
            background=request.background,
            timeout=terms.timeout,
        )
        self._note(line, terms, request.prompt_ids if request.use_prefix_cache else (), request.cache_salt)

    def items(self, model: str, count: int, size: float, terms: Terms) -> None:
        """Note a request of so many items, of this size together, which has just come."""
        line = TraceLine(
            timestamp=self._moment(time.monotonic()),
            input_length=max(round(size / count), 1),
            items=min(count, MOST_HASHES),
            model=model,
            priority=terms.priority,
            background=terms.background,
            timeout=terms.timeout,
        )
        self._note(line, terms, (), "")

    async def keep_writing(self) -> None:
        """Write what comes until this is cancelled."""
        while self._open:
            await asyncio.sleep(_SECONDS)
            self._hand_over()
            await asyncio.to_thread(self._write)

    def close(self) -> None:
        """Write the rest, and end; what comes later is not recorded. Blocks."""
        self._hand_over()
        self._write()
        self._stop()
        with self._writing:
            os.close(self._file)

    def _moment(self, monotonic: float) -> float:
        return round(self._zero + 1000 * monotonic, 3)

    def _note(self, line: TraceLine, terms: Terms, prompt_ids: Sequence[int], cache_salt: str) -> None:
        if not self._open:
            return
        name = "" if terms.tenant is None else terms.tenant.name or ""
        self._waiting.append(_Seen(line, name, prompt_ids, cache_salt))
        self._waiting_tokens += len(prompt_ids)
        if len(self._waiting) > _MOST_WAITING or self._waiting_tokens > _MOST_WAITING_TOKENS:
            self._stop("the disk is slower than requests come")

    def _hand_over(self) -> None:
        if self._waiting:
            self._handed.append(self._waiting)
            self._waiting, self._waiting_tokens = [], 0

    def _write(self) -> None:
        """Append the lines that were handed over, as many as the file may hold; none of them in part."""
        with self._writing:
            while self._handed:
                self._append(self._handed.popleft())

    def _append(self, seen: list[_Seen]) -> None:
        if not self._open:
            return
        lines: list[bytes] = []
        size = self._size
        for each in seen:
            line = self._encoded(each)
            size += len(line)
            if size > self._max_bytes:
                self._stop(f"it has max_record_bytes ({self._max_bytes})")
                break
            lines.append(line)
        data = b"".join(lines)
        try:
            written = os.write(self._file, data)
            if written < len(data):
                os.ftruncate(self._file, self._size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += written
        except OSError as error:
            self._stop(error.strerror or str(error))

    def _encoded(self, seen: _Seen) -> bytes:
        line = seen.line
        line.hash_ids = self._hashes(seen.prompt_ids, seen.cache_salt)
        if seen.tenant:
            name = seen.tenant.encode(errors="surrogatepass")
            line.tenant = hmac.digest(self._salt, name, "sha256")[:_TENANT_BYTES].hex()
        return self._encoder.encode(line) + b"\n"

    def _hashes(self, prompt_ids: Sequence[int], cache_salt: str) -> list[int]:
        """A number for each block of a prompt, which stands for that block and all before it."""
        tokens = array("q", prompt_ids[: MOST_HASHES * TOKENS_PER_HASH])
        state = blake2b(cache_salt.encode(errors="surrogatepass"), key=self._salt, digest_size=8)
        hashes = []
        for start in range(0, len(tokens), TOKENS_PER_HASH):
            state.update(tokens[start : start + TOKENS_PER_HASH])
            hashes.append(int.from_bytes(state.copy().digest()) >> (64 - _HASH_BITS))
        return hashes

    def _stop(self, reason: str | None = None) -> None:
        """Take nothing more; with a reason, say so once."""
        if self._open and reason is not None:
            logger.warning("the trace %s ends here: %s; all else goes on", self._path, reason)
        self._open = False
        self._waiting, self._waiting_tokens = [], 0


def _opened(path: Path) -> int:
    """Open a file to append whole lines to, for its owner alone. Raises ConfigError or OSError."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"record {path}: it must be a file, which can be bounded")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"record {path}: another server writes to it; give each its own") from None
        os.fchmod(file, 0o600)
        if status.st_size and os.pread(file, 1, status.st_size - 1) != b"\n":
            os.write(file, b"\n")
    except BaseException:
        os.close(file)
        raise
    return file
