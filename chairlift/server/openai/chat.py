"""POST /v1/chat/completions."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import decode
from chairlift.core.sequences.request import TokenLogprob
from chairlift.core.sequences.sampling import MAX_LOGPROBS, SamplingParams
from chairlift.errors import InvalidRequest
from chairlift.server.http.exchange import encode_line, new_id, read_body, terms_of
from chairlift.server.models.conversation import Conversation, open_conversation
from chairlift.server.models.registry import models_of
from chairlift.server.models.sequence_service import Piece, Sample, SequenceService
from chairlift.server.openai.answer_form import answer_grammar
from chairlift.server.openai.answers import SequenceAnswer
from chairlift.server.openai.body_types import ChatBody, check_supported, has_form, options_of, sampling_params

# A role is put between a template's own special tokens, so it must not be made to end or begin one.
_ROLE = re.compile(r"[\w .-]{1,64}")
_decoder = msgspec.json.Decoder(ChatBody)


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    raw = await read_body(request)
    body = decode(raw, _decoder)
    service = models_of(request).language_model(body.model, request.url.path)
    service.check(body.n, body.stop)
    check_supported(body)
    terms = terms_of(request.scope, body.priority)
    service.check_load(terms)
    params = _params(body)
    check_messages(body.messages)
    grammar = await answer_grammar(request, body) if has_form(body) else None
    opened = await open_conversation(service, _conversation(body, len(raw), grammar))
    request_id = new_id("chatcmpl")
    options = options_of(body, continues=False, grammar=opened.grammar)
    samples = service.submit(request_id, [opened.prompt_ids], params, terms, options)
    return await ChatAnswer(service, body, params, samples, request_id).respond(request)


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


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Refuse a chat without messages, and roles that could be more than that. Raises InvalidRequest."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages[{index}] needs a string 'role'", f"messages[{index}].role")
        if _ROLE.fullmatch(message["role"]) is None:
            wanted = "must be 1 to 64 letters, digits, spaces, '_', '.' or '-'"
            raise InvalidRequest(f"messages[{index}].role {wanted}", f"messages[{index}].role")


def _conversation(body: ChatBody, size: int, grammar: str | None) -> Conversation:
    generation = True if body.add_generation_prompt is None else body.add_generation_prompt
    return Conversation(
        messages=body.messages,
        size=size,
        add_generation_prompt=generation,
        grammar=grammar,
        template_arguments=body.chat_template_kwargs or {},
    )


class ChatAnswer(SequenceAnswer):
    """A message for each sample."""

    def __init__(
        self,
        service: SequenceService,
        body: ChatBody,
        params: SamplingParams,
        samples: Sequence[Sample],
        request_id: str,
    ) -> None:
        super().__init__("chat.completion", "chat.completion.chunk", service, body, params, samples, request_id)
        self._logprobs: list[list[TokenLogprob]] | None = [[] for _ in samples] if body.logprobs else None

    def keep_logprobs(self, piece: Piece) -> None:
        """Keep them as they are."""
        if self._logprobs is not None:
            self._logprobs[piece.sample.index] += piece.logprobs

    def content(self, sample: Sample, text: str) -> dict[str, Any]:
        """The message and its log-probabilities."""
        return {
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._shape(self._logprobs[sample.index]) if self._logprobs is not None else None,
        }

    def event(self, piece: Piece) -> bytes:
        """The role before the first piece, the text if there is any, and how it ended."""
        index, events, made = piece.sample.index, self.events, b""
        if piece.first:
            role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            made = events.event(index, role, self.samples)
        if piece.text or piece.logprobs:
            logprobs = encode_line(self._shape(piece.logprobs)) if self._logprobs is not None else b"null"
            text = encode_line(piece.text)
            parts = (b'"delta":{"content":', text, b'},"logprobs":', logprobs, b',"finish_reason":null}')
            made += events.event(index, b"".join(parts), self.samples)
        if piece.finish_reason is not None:
            ending = {"finish_reason": piece.finish_reason, "stop_reason": piece.sample.stop_reason}
            made += events.event(index, b'"delta":{},"logprobs":null,' + encode_line(ending)[1:], self.samples)
        return made

    def _shape(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities as chat completions have them."""
        content = [
            self._named(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._named(token_id, logprob) for token_id, logprob in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.tokenizer.token_bytes(token_id)
        return {"token": self.tokenizer.token_text(token_id), "logprob": logprob, "bytes": list(raw)}
