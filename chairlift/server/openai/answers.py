"""Pieces of text put together: as server-sent events while they come, or as one document in the end."""

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.step import TokenLogprob
from chairlift.errors import InvalidRequest
from chairlift.server.conversations.at_once import at_once
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import DONE, PartStream, off_loop, until_gone
from chairlift.server.http.part_writer import WRITER, PartWriter
from chairlift.server.models.sequence_service import Piece, Sample, SequenceService, close_all, pieces
from chairlift.server.openai.body_types import CommonBody, StreamOptions
from chairlift.text.tokenizer import Tokenizer

encode = msgspec.json.encode

# Log-probabilities in one document: of 200,000 tokens with 20 others each. As JSON one takes about so many characters.
_MOST_LOGPROBS, _LOGPROB_CHARS = 2**22, 40
# What an event takes to be written, in characters that are.
_PIECE_CHARS = 100


class PromptTokensDetails(msgspec.Struct):
    """How much of the prompt came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """About how many of the tokens written were reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Tokens read and written. A prompt counts once, however many samples were drawn from it.

    Without details the server does not say what was in its prefix cache, or the model is not known to reason.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage(
    samples: Sequence[Sample], n: int, show_cached: bool, written: int | None = None, thought: int | None = None
) -> Usage:
    """Token counts; samples come in order, `n` for each prompt. `written` goes before what they have by now.

    `thought` is how many of them were reasoning, None where it is not known how the model reasons.
    """
    read = sum(len(sample.prompt_ids) for sample in samples[::n])
    if written is None:
        written = sum(sample.num_tokens for sample in samples)
    cached = PromptTokensDetails(sum(sample.num_cached_tokens for sample in samples[::n])) if show_cached else None
    details = UNSET if thought is None else CompletionTokensDetails(thought)
    return Usage(read, written, read + written, cached, details)


class Events:
    """Renders one request's events. What never changes is encoded once; a token costs two or three copies."""

    def __init__(self, about: dict[str, Any], n: int, options: StreamOptions | None, show_cached: bool) -> None:
        self._head = b"data: " + encode(about)[:-1] + b',"choices":['
        self._heads: dict[int, bytes] = {}
        self._n = n
        self._show_cached = show_cached
        self.counts = bool(options and options.include_usage)
        # As in vLLM: with the usage of each choice so far, every event of a choice has more tokens than the one before.
        self.continuous = self.counts and bool(options and options.continuous_usage_stats)
        self._tail = b'],"usage":null}\n\n' if self.counts else b"]}\n\n"

    def event(
        self, index: int, rest: tuple[bytes, ...], samples: Sequence[Sample], written: int | None = None
    ) -> bytes:
        """An event with one choice; `rest` is the choice's JSON after its index, with the closing brace, in parts.

        `written` is how many tokens the choice has with it, all that it has by now if left out.
        """
        head = self._heads.get(index) or self._begun(index)
        if self.continuous:
            counted = encode(usage(samples[index : index + 1], 1, self._show_cached, written))
            return b"".join((head, *rest, b'],"usage":', counted, b"}\n\n"))
        return b"".join((head, *rest, self._tail))

    def around(self, before: bytes, after: bytes) -> tuple[bytes, bytes] | None:
        """What an event of the first choice has around what may change of it; None where that is not all."""
        return None if self.continuous else (self._begun(0) + before, after + self._tail)

    def _begun(self, index: int) -> bytes:
        head = self._heads[index] = self._head + b'{"index":%d,' % index
        return head

    def last(self, samples: Sequence[Sample], thought: int | None) -> bytes:
        """What follows the last choice: the usage, if it was asked for, and the end."""
        if not self.counts:
            return DONE
        counted = encode(usage(samples, self._n, self._show_cached, thought=thought))
        return b"".join((self._head, b'],"usage":', counted, b"}\n\n", DONE))


def named_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], names_are_ids: bool = False
) -> list[dict[str, Any]]:
    """Log-probabilities of tokens as chat completions and responses have them."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        name = id_name(token_id) if names_are_ids else tokenizer.token_text(token_id)
        return {"token": name, "logprob": logprob, "bytes": list(tokenizer.token_bytes(token_id))}

    return [
        named(entry.token_id, entry.logprob) | {"top_logprobs": [named(*likely) for likely in entry.top]}
        for entry in entries
    ]


def logprobs_size(count: int) -> int:
    """About how many characters so many log-probabilities have in a document."""
    return count * _LOGPROB_CHARS


def check_logprobs(size: int, instead: str) -> None:
    """Raise InvalidRequest where log-probabilities of so many characters are too many for one document."""
    if size > _MOST_LOGPROBS * _LOGPROB_CHARS:
        problem = f"the answer has over {_MOST_LOGPROBS} log-probabilities, too many for one document"
        raise InvalidRequest(f"{problem}; {instead}", "logprobs")


def id_name(token_id: int) -> str:
    """A token as it is named with `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


class SequenceAnswer:
    """One request's samples on their way out. Each protocol says what its events and its choices look like.

    `kind` is the document's `object`, `event_kind` that of an event.
    """

    def __init__(
        self,
        kind: str,
        event_kind: str,
        service: SequenceService,
        body: CommonBody,
        params: SamplingParams,
        samples: Sequence[Sample],
        request_id: str,
    ) -> None:
        about: dict[str, Any] = {
            "id": request_id,
            "object": kind,
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }
        self._show_cached = service.config.show_cached_tokens
        self.events = Events(about | {"object": event_kind}, params.n, body.stream_options, self._show_cached)
        self.samples = samples
        self.tokenizer = service.tokenizer
        self.n = params.n
        self.names_are_ids = bool(body.return_tokens_as_token_ids)
        self._prompt_logprobs = body.prompt_logprobs
        self._about = about
        self._streams = body.stream
        self._texts: list[list[str]] = [[] for _ in samples]

    async def respond(self, request: Request) -> Response:
        """The HTTP answer. Raises a 499 if the client leaves before the end."""
        headers = {"X-Request-Id": self._about["id"]}
        if self._streams:
            parts = self._render(request.scope.get(WRITER))
            return PartStream("text/event-stream", parts, _last, headers, lambda: close_all(self.samples))
        size = length = 0
        async with until_gone(request.receive), contextlib.aclosing(pieces(self.samples)) as groups:
            async for group in groups:
                more, echoed = self._size(group), self.echo_size(group)
                size += more
                length += echoed + sum(len(piece.text) for piece in group)
                check_logprobs(size, "stream it, or ask for fewer")
                await off_loop(more + echoed, partial(self._keep, group))
        # To take the text apart takes as long as its length, as does writing it.
        size += length
        choices = await off_loop(size, self._choices)
        counted = usage(self.samples, self.n, self._show_cached, thought=await self.reasoning_tokens())
        about = self._about | {"choices": choices}
        # Last, where it is found without reading all of it.
        raw = await off_loop(size, lambda: encode(about | self.beside() | {"usage": counted}))
        return Response(raw, headers=headers, media_type="application/json")

    def _size(self, group: list[Piece]) -> int:
        """About how many characters the log-probabilities of some pieces have."""
        count = 0
        for piece in group:
            count += sum(1 + len(entry.top) for entry in piece.logprobs)
            if piece.first:
                count += sum(1 + len(entry.top) for entry in piece.sample.prompt_logprobs)
        return logprobs_size(count)

    def _keep(self, group: list[Piece]) -> None:
        for piece in group:
            self._texts[piece.sample.index].append(self.text(piece))
            self.keep_logprobs(piece)

    def _choices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                **self.content(sample, "".join(self._texts[sample.index])),
                "finish_reason": self.finish_reason(sample),
                "stop_reason": sample.stop_reason,
            }
            for index, sample in enumerate(self.shown())
        ]

    async def _render(self, writer: PartWriter | None) -> AsyncGenerator[bytes, None]:
        """One chunk for each step: the events of its pieces. Some of them the writer may have written before."""
        unfinished = len(self.samples)
        written = at_once(self.samples, writer, self._events, self.around_text())
        async with contextlib.aclosing(pieces(self.samples, written, streams=True)) as groups:
            async for group in groups:
                size = _PIECE_CHARS * len(group) + self._size(group) + self.echo_size(group)
                chunk = await off_loop(size, partial(self._events, group))
                unfinished -= sum(piece.finish_reason is not None for piece in group)
                if not unfinished:
                    thought = await self.reasoning_tokens() if self.events.counts else None
                    chunk += self.events.last(self.samples, thought)
                if chunk:
                    yield chunk

    def _events(self, group: list[Piece]) -> bytes:
        return b"".join([self.event(piece) for piece in group])

    async def reasoning_tokens(self) -> int | None:
        """How many of the tokens are reasoning; None where it is not known how the model reasons."""
        return None

    def echo_size(self, group: list[Piece]) -> int:
        """About how many characters of prompts some pieces bring along."""
        return 0

    def text(self, piece: Piece) -> str:
        """What a piece adds to the text."""
        return piece.text

    def finish_reason(self, sample: Sample) -> str | None:
        """How a sample ended, in the protocol's words."""
        return sample.finish_reason

    def shown(self) -> Sequence[Sample]:
        """The samples that the document has, in order."""
        return self.samples

    def beside(self) -> dict[str, Any]:
        """What the document has beside choices and usage."""
        return {}

    def prompt_logprobs(self, sample: Sample) -> dict[str, Any]:
        """`prompt_logprobs` as vLLM has them, if they were asked for: of each of its tokens, the likeliest."""
        count = self._prompt_logprobs
        if count is None:
            return {}
        entries: list[dict[int, dict[str, Any]] | None] = [None]
        for entry in sample.prompt_logprobs:
            named = {entry.token_id: self._ranked(entry.token_id, entry.logprob, entry.rank)}
            for rank, (token_id, logprob) in enumerate(entry.top[:count], 1):
                named.setdefault(token_id, self._ranked(token_id, logprob, rank))
            entries.append(named)
        return {"prompt_logprobs": entries}

    def _ranked(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self.tokenizer.token_text(token_id)}

    def keep_logprobs(self, piece: Piece) -> None:
        """Keep a piece's log-probabilities for the document, if they were asked for."""
        raise NotImplementedError

    def content(self, sample: Sample, text: str) -> dict[str, Any]:
        """A choice of the document, between its index and how it ended."""
        raise NotImplementedError

    def event(self, piece: Piece) -> bytes:
        """A piece as events; nothing if it has nothing to say."""
        raise NotImplementedError

    def around_text(self) -> tuple[bytes, bytes] | None:
        """What `event` has around the text, as JSON, of a piece between the first and the last; None if it has more."""
        raise NotImplementedError


def _last(error: ApiError) -> bytes:
    return b"data: " + error.encode() + b"\n\n"
