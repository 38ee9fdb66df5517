"""What comes, noted as lines of a trace, without any text."""

import hmac
import secrets
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from chairlift.core.finished import FinishReason
from chairlift.core.sequences.request import Request
from chairlift.plan.trace import TOKENS_PER_HASH
from chairlift.plan.trace_files import MOST_HASHES, TraceLine
from chairlift.server.http.exchange import Terms
from chairlift.server.models.request_log import EndedRequest

# What may wait to be taken, in requests and in tokens of their prompts: who takes it must not take the memory.
_MOST_WAITING, _MOST_WAITING_TOKENS = 2**16, 2**22
# Of a hash, so many bits are kept: numbers that any reader of JSON has exactly.
_HASH_BITS = 53
_TENANT_BYTES = 8


class SeenLine(NamedTuple):
    """What a line says of a request, with a prompt that is yet to be hashed, and the salt of its cached prefix."""

    line: TraceLine
    tenant: str
    prompt_ids: Sequence[int]
    cache_salt: str


class TraceNotes:
    """Notes requests, for somebody who takes them and makes lines of them in time.

    Prompts are hashed, and tenants' names too, with a salt that is new for each recording and kept nowhere: whoever
    reads the lines sees which prompts begin alike, and can't try out what they may have been.
    """

    # Whose fault it is if too much waits.
    taker = "who reads it"

    def __init__(self) -> None:
        self.is_open = True
        self._salt = secrets.token_bytes(32)
        self._encoder = msgspec.json.Encoder()
        # Milliseconds since 1970 of the monotonic clock's zero: times of several runs follow each other.
        self._zero = 1000 * (time.time() - time.monotonic())
        self._waiting: list[SeenLine] = []
        self._waiting_tokens = 0

    def sequence(self, model: str, request: Request, terms: Terms, ended: EndedRequest) -> None:
        """Note a sequence that is over, or was refused."""
        line = TraceLine(
            timestamp=self._moment(request.arrival),
            input_length=max(len(request.prompt_ids), 1),
            output_length=ended.tokens or 0,
            max_tokens=max(request.max_tokens, 1),
            model=model,
            priority=request.priority,
            background=request.background,
            timeout=terms.timeout,
            late=ended.finish_reason == FinishReason.LATE.value,
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

    def _moment(self, monotonic: float) -> float:
        return round(self._zero + 1000 * monotonic, 3)

    def _note(self, line: TraceLine, terms: Terms, prompt_ids: Sequence[int], cache_salt: str) -> None:
        if not self.is_open:
            return
        name = "" if terms.tenant is None else terms.tenant.name or ""
        # Samples of one prompt hold the same list.
        if not self._waiting or self._waiting[-1].prompt_ids is not prompt_ids:
            self._waiting_tokens += len(prompt_ids)
        self._waiting.append(SeenLine(line, name, prompt_ids, cache_salt))
        if len(self._waiting) > _MOST_WAITING or self._waiting_tokens > _MOST_WAITING_TOKENS:
            self.stop(f"{self.taker} is slower than requests come")

    def take(self) -> list[SeenLine]:
        """Hand over what has been noted since the last time."""
        seen, self._waiting, self._waiting_tokens = self._waiting, [], 0
        return seen

    def stop(self, reason: str | None = None) -> None:
        """Note nothing more."""
        self.is_open = False
        self.take()

    def encoded(self, seen: Iterable[SeenLine]) -> Iterator[bytes]:
        """Make lines of what was noted; takes as long as their prompts are, in any thread."""
        return map(self._encoded, seen)

    def _encoded(self, seen: SeenLine) -> bytes:
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
