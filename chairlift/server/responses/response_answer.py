"""A response: as events while it comes, or as one document in the end."""

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.core.finished import FinishReason
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import PartStream, as_json, encode_line, until_gone
from chairlift.server.http.part_writer import WRITER, PartWriter
from chairlift.server.models.conversation import OpenConversation
from chairlift.server.models.reply_steps import EarlyParts, reasoning_tokens, reply_steps
from chairlift.server.models.sequence_service import Sample, SequenceService, close_all
from chairlift.server.responses.output_items import ItemEvent, OutputItems, TextLogprobs
from chairlift.text.reply import ReplyPart

ResponseDocument = dict[str, Any]

_CUT_OFF = {"reason": "max_output_tokens"}


class ResponseAnswer:
    """One response on its way out. `about` is what its document says from the beginning, `keep` gets each that is over.

    `keep` is not called for what ends before it has begun: that is an HTTP error.
    """

    def __init__(
        self,
        service: SequenceService,
        about: ResponseDocument,
        sample: Sample,
        opened: OpenConversation,
        keep: Callable[[ResponseDocument], None],
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
            return as_json(await self.whole(), headers)

    def close(self) -> None:
        """Nobody waits for it any more."""
        close_all([self._sample])

    async def whole(self) -> ResponseDocument:
        """All of it, which is kept."""
        async with contextlib.aclosing(self._steps(None)) as steps:
            async for parts in steps:
                for part in parts:
                    self._items.push(part)
        self._items.finish(self._complete)
        return await self._over()

    def _failed(self, error: ApiError) -> ResponseDocument:
        code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status, "server_error")
        document = self.document("failed", error={"code": code, "message": error.body.message})
        self._keep(document)
        return document

    def _steps(self, writer: PartWriter | None) -> AsyncGenerator[list[ReplyPart], None]:
        logprobs = None if self._logprobs is None else self._logprobs.entries
        return reply_steps(self._sample, self._opened, logprobs, EarlyParts(writer, self._written))

    @property
    def _complete(self) -> bool:
        return self._sample.finish_reason == FinishReason.STOP.value

    async def _over(self) -> ResponseDocument:
        """The document of a reply that has ended, one way or the other."""
        counted = await self._usage()
        if self._complete:
            document = self.document("completed", completed_at=int(time.time()), usage=counted)
        else:
            document = self.document("incomplete", incomplete_details=_CUT_OFF, usage=counted)
        self._keep(document)
        return document

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
        """One chunk for each step, which the writer may have written before."""
        async with contextlib.aclosing(self.events(writer)) as groups:
            async for events in groups:
                yield b"".join(events)

    def queued(self) -> list[bytes]:
        """The events of one that waits for its turn."""
        about = self.document("queued")
        return [self._numbered({"type": f"response.{kind}", "response": about}) for kind in ("created", "queued")]

    async def events(self, writer: PartWriter | None = None) -> AsyncGenerator[list[bytes], None]:
        """What each step has to tell that the writer has not written; nothing where that is nothing."""
        async with contextlib.aclosing(self._steps(writer)) as steps:
            async for parts in steps:
                events: list[ItemEvent] = []
                if not self._begun:
                    kinds = ("in_progress",) if self._sent else ("created", "in_progress")
                    self._begun, begun = True, self.document("in_progress")
                    events = [{"type": f"response.{kind}", "response": begun} for kind in kinds]
                for part in parts:
                    events += self._items.push(part)
                if self._sample.finish_reason is not None:
                    events += self._items.finish(self._complete)
                    document = await self._over()
                    events.append({"type": f"response.{document['status']}", "response": document})
                if events:
                    yield [*map(self._numbered, events)]

    def _written(self, parts: list[ReplyPart]) -> bytes:
        """What a step in the middle has to tell."""
        return b"".join([self._numbered(event) for part in parts for event in self._items.push(part)])

    def _numbered(self, event: ItemEvent) -> bytes:
        """An event as it is sent."""
        made = encode_line(event | {"sequence_number": self._sent})
        self._sent += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), made)

    def last(self, error: ApiError) -> bytes:
        """The event of an error that ends it, and is kept."""
        self._items.finish(complete=False)
        return self._numbered({"type": "response.failed", "response": self._failed(error)})


def encode_document(document: ResponseDocument) -> bytes:
    """A response as it is kept, and sent to whoever asks for it."""
    return msgspec.json.encode(document)
