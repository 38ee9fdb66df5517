"""A response: as events while it comes, or as one document in the end."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.core.finished import FinishReason
from chairlift.server.conversations.conversation import OpenConversation
from chairlift.server.conversations.reply_steps import EarlyParts, reasoning_tokens, reply_steps
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import INLINE_SIZE, LARGE_SIZE, PartStream, off_loop, sse_event, until_gone
from chairlift.server.http.part_writer import WRITER, PartWriter
from chairlift.server.models.sequence_service import Sample, SequenceService, close_all
from chairlift.server.responses.output_items import ItemEvent, OutputItems, TextLogprobs
from chairlift.text.reply import ContentPart, ReplyPart

T = TypeVar("T")

ResponseDocument = dict[str, Any]

_CUT_OFF = {"reason": "max_output_tokens"}


class ResponseAnswer:
    """One response on its way out. `about` is what its document says from the beginning.

    `keep`, if it is kept, gets it as JSON once it is over; not what ends before its answer begins: that is an HTTP
    error.
    """

    def __init__(
        self,
        service: SequenceService,
        about: ResponseDocument,
        sample: Sample,
        opened: OpenConversation,
        keep: Callable[[bytes], None] | None,
    ) -> None:
        self._service, self._sample, self._opened, self._keep = service, sample, opened, keep
        self._about = about
        wanted = sample.stream.request.params.logprobs is not None
        self._logprobs = TextLogprobs(sample, service.tokenizer) if wanted else None
        self._items = OutputItems(about["id"], self._logprobs)
        self._sent = 0
        self._begun = False

    def document(self, status: str, **more: Any) -> ResponseDocument:
        """The response as it now is."""
        return self._about | {"status": status, "output": self._items.done.copy()} | more

    async def respond(self, request: Request, streams: bool) -> Response:
        """The HTTP answer. Raises a 499 if the client leaves before the end."""
        headers = {"X-Request-Id": self._about["id"]}
        if streams:
            parts = self._render(request.scope.get(WRITER))
            return PartStream("text/event-stream", parts, self.last, headers, self.close)
        async with until_gone(request.receive):
            return Response(await self._whole(), headers=headers, media_type="application/json")

    def close(self) -> None:
        """Nobody waits for it any more."""
        close_all([self._sample])

    async def _whole(self) -> bytes:
        """All of it, which is kept."""
        async with contextlib.aclosing(self._steps(None, streams=False)) as steps:
            async for parts in steps:
                await _done(self._size(parts), partial(self._taken, parts))
        return (await self._over())[1]

    def _failed(self, error: ApiError) -> bytes:
        code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status, "server_error")
        raw = encode_document(self.document("failed", error={"code": code, "message": error.body.message}))
        if self._keep is not None:
            self._keep(raw)
        return raw

    def _steps(self, writer: PartWriter | None, streams: bool) -> AsyncGenerator[list[ReplyPart], None]:
        if self._logprobs is None:
            return reply_steps(self._sample, self._opened, None, EarlyParts(writer, self._told), streams)
        # With them a step in the middle may have much to tell.
        return reply_steps(self._sample, self._opened, self._logprobs.entries, streams=streams)

    def _size(self, parts: list[ReplyPart]) -> int:
        """About how many characters of log-probabilities are written with these parts: all, where an item may end."""
        if self._logprobs is None:
            return 0
        ends = self._sample.finish_reason is not None or not all(isinstance(part, ContentPart) for part in parts)
        return self._logprobs.size + (self._items.size if ends else 0)

    def _taken(self, parts: list[ReplyPart]) -> list[ItemEvent]:
        """What a step has to tell: the end too, with the last parts."""
        events = [event for part in parts for event in self._items.push(part)]
        return events if self._sample.finish_reason is None else events + self._items.finish(self._complete)

    @property
    def _complete(self) -> bool:
        return self._sample.finish_reason == FinishReason.STOP.value

    async def _over(self) -> tuple[str, bytes]:
        """The status of a reply that has ended, one way or the other, and its document."""
        counted = await self._usage()
        if self._complete:
            document = self.document("completed", completed_at=int(time.time()), usage=counted)
        else:
            document = self.document("incomplete", incomplete_details=_CUT_OFF, usage=counted)
        raw = await _done(self._items.size, partial(encode_document, document))
        if self._keep is not None:
            self._keep(raw)
        return document["status"], raw

    async def _usage(self) -> dict[str, Any]:
        sample = self._sample
        read, written = len(sample.prompt_ids), sample.num_tokens
        cached = sample.num_cached_tokens if self._service.config.show_cached_tokens else 0
        thought = await reasoning_tokens(self._service, self._items.reasoning, sample)
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": read + written,
        }

    async def _render(self, writer: PartWriter | None) -> AsyncGenerator[bytes, None]:
        """One chunk for each step, which the writer may have written before; several of one that is large."""
        async with contextlib.aclosing(self.events(writer, streams=True)) as groups:
            async for events in groups:
                for chunk in events if sum(map(len, events)) > LARGE_SIZE else [b"".join(events)]:
                    yield chunk

    def queued(self) -> list[bytes]:
        """The events of one that waits for its turn."""
        about = self.document("queued")
        return [self._numbered({"type": f"response.{kind}", "response": about}) for kind in ("created", "queued")]

    async def events(
        self, writer: PartWriter | None = None, streams: bool = False
    ) -> AsyncGenerator[list[bytes], None]:
        """What each step has to tell that the writer has not written; nothing where that is nothing.

        With `streams` a client reads them, as `pieces` has it.
        """
        async with contextlib.aclosing(self._steps(writer, streams)) as steps:
            async for parts in steps:
                events: list[bytes] = []
                if not self._begun:
                    kinds = ("in_progress",) if self._sent else ("created", "in_progress")
                    self._begun, begun = True, self.document("in_progress")
                    events = [self._numbered({"type": f"response.{kind}", "response": begun}) for kind in kinds]
                events += await _done(self._size(parts), partial(self._numbered_all, parts))
                if self._sample.finish_reason is not None:
                    status, raw = await self._over()
                    ending = {"type": f"response.{status}", "response": msgspec.Raw(raw)}
                    events.append(await _done(self._items.size, partial(self._numbered, ending)))
                if events:
                    yield events

    def _numbered_all(self, parts: list[ReplyPart]) -> list[bytes]:
        return [*map(self._numbered, self._taken(parts))]

    def _told(self, parts: list[ReplyPart]) -> bytes:
        """What a step in the middle has to tell."""
        return b"".join(self._numbered_all(parts))

    def _numbered(self, event: ItemEvent) -> bytes:
        """An event as it is sent."""
        made = sse_event(event["type"], event | {"sequence_number": self._sent})
        self._sent += 1
        return made

    def last(self, error: ApiError) -> bytes:
        """The event of an error that ends it, and is kept; after that of its creation, if nothing was told yet."""
        created = b""
        if not self._sent:
            # Clients take no other event for the first.
            created = self._numbered({"type": "response.created", "response": self.document("in_progress")})
        self._items.finish(complete=False)
        return created + self._numbered({"type": "response.failed", "response": msgspec.Raw(self._failed(error))})


async def _done(size: int, work: Callable[[], T]) -> T:
    """Do work as `off_loop`, and end no sooner than it does: what is then told of an error goes on from there."""
    if size <= INLINE_SIZE:
        return work()
    task = asyncio.ensure_future(off_loop(size, work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def encode_document(document: ResponseDocument) -> bytes:
    """A response as it is kept, and sent to whoever asks for it."""
    return msgspec.json.encode(document)
