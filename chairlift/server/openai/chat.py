"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import decode
from chairlift.config.server import ServerConfig
from chairlift.core.sequences.request import TokenLogprob
from chairlift.core.sequences.sampling import MAX_LOGPROBS, SamplingParams
from chairlift.errors import InvalidRequest
from chairlift.server.http.endpoint import terms_of
from chairlift.server.http.off_loop import off_loop
from chairlift.server.http.read_body import read_body
from chairlift.server.models.registry import Models
from chairlift.server.models.sequence_service import SequenceService, new_id
from chairlift.server.openai.body_types import ChatBody, check_supported, sampling_params
from chairlift.server.openai.logprob_shapes import chat_logprobs
from chairlift.server.openai.samples import Piece, Sample, usage
from chairlift.server.openai.streaming import Events, EventStream, collect, encode, encode_line, render

# Parameters of the renderer itself.
_TAKEN = frozenset({"self", "messages", "add_generation_prompt"})
_decoder = msgspec.json.Decoder(ChatBody)


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    config: ServerConfig = request.app.state.config
    raw = await read_body(request, config.max_body_bytes, config.body_timeout_s)
    body = decode(raw, _decoder)
    models: Models = request.app.state.models
    service = models.llm(body.model, request.url.path)
    service.check(body)
    check_supported(body)
    terms = terms_of(request.scope)
    params = _params(body)
    _check_messages(body.messages)
    prompt = await off_loop(len(raw), lambda: _prompt(service, body))
    request_id = new_id("chatcmpl")
    samples = service.submit(request_id, [prompt], params, body, terms, continues=False)
    answer = _ChatAnswer(service, body, params, samples, request_id)
    if body.stream:
        return EventStream(request_id, samples, render(samples, answer.events, answer.event))
    if not await collect(request, samples, answer.keep):
        return Response(status_code=499)
    return Response(answer.whole(), headers={"X-Request-Id": request_id}, media_type="application/json")


def _params(body: ChatBody) -> SamplingParams:
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        message = f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {body.top_logprobs}"
        raise InvalidRequest(message, "top_logprobs")
    newer = body.max_completion_tokens
    if newer is not None and newer < 1:
        raise InvalidRequest(f"max_completion_tokens must be at least 1, got {newer}", "max_completion_tokens")
    return sampling_params(body, body.max_tokens if newer is None else newer, logprobs)


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages[{index}] needs a string 'role'", f"messages[{index}].role")


def _prompt(service: SequenceService, body: ChatBody) -> list[int]:
    arguments = body.chat_template_kwargs or {}
    if taken := sorted(_TAKEN.intersection(arguments)):
        raise InvalidRequest(f"chat_template_kwargs can't set {taken[0]!r}", "chat_template_kwargs")
    generation = True if body.add_generation_prompt is None else body.add_generation_prompt
    text = service.tokenizer.render_chat(body.messages, generation, **arguments)
    return service.tokenizer.encode(text, add_special_tokens=False)


class _ChatAnswer:
    """Puts pieces together, as events or as one document."""

    def __init__(
        self,
        service: SequenceService,
        body: ChatBody,
        params: SamplingParams,
        samples: Sequence[Sample],
        request_id: str,
    ) -> None:
        created = int(time.time())
        self.events = Events(request_id, "chat.completion.chunk", created, service.name, params.n, body.stream_options)
        self._about = {"id": request_id, "object": "chat.completion", "created": created, "model": service.name}
        self._tokenizer = service.tokenizer
        self._samples = samples
        self._texts: list[list[str]] = [[] for _ in samples]
        self._logprobs: list[list[TokenLogprob]] | None = [[] for _ in samples] if body.logprobs else None

    def keep(self, piece: Piece) -> None:
        """Store a piece for the document."""
        self._texts[piece.sample.index].append(piece.text)
        if self._logprobs is not None:
            self._logprobs[piece.sample.index] += piece.logprobs

    def whole(self) -> bytes:
        """The document."""
        choices = [
            {
                "index": sample.index,
                "message": {"role": "assistant", "content": "".join(self._texts[sample.index]), "refusal": None},
                "logprobs": self._shape(self._logprobs[sample.index]) if self._logprobs is not None else None,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
            }
            for sample in self._samples
        ]
        return encode(self._about | {"choices": choices, "usage": usage(self._samples, len(self._samples))})

    def event(self, piece: Piece) -> bytes:
        """A piece as events: the role before the first, the text if there is any, and how it ended."""
        index, events, made = piece.sample.index, self.events, b""
        if piece.first:
            role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            made = events.event(index, role, self._samples)
        if piece.text or piece.logprobs:
            logprobs = encode_line(self._shape(piece.logprobs)) if self._logprobs is not None else b"null"
            text = encode_line(piece.text)
            parts = (b'"delta":{"content":', text, b'},"logprobs":', logprobs, b',"finish_reason":null}')
            made += events.event(index, b"".join(parts), self._samples)
        if piece.finish_reason is not None:
            ending = {"finish_reason": piece.finish_reason, "stop_reason": piece.sample.stop_reason}
            made += events.event(index, b'"delta":{},"logprobs":null,' + encode_line(ending)[1:], self._samples)
        return made

    def _shape(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, entries)
