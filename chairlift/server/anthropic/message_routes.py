"""POST /v1/messages and POST /v1/messages/count_tokens, as Anthropic's API has them."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import decode
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.errors import InvalidRequest
from chairlift.server.anthropic.message_answer import MessageAnswer
from chairlift.server.anthropic.message_blocks import conversation_of
from chairlift.server.anthropic.message_body import CountBody, MessageBody, check_message_body
from chairlift.server.conversations.conversation import OpenConversation
from chairlift.server.conversations.reply_steps import open_named, reply_options
from chairlift.server.http.api_errors import ApiError, PromptTooLong
from chairlift.server.http.exchange import as_json, in_turn, new_id, off_loop, read_body, terms_of
from chairlift.server.models.registry import models_of
from chairlift.server.models.sequence_service import SequenceService
from chairlift.server.openai.body_types import make_params

_message_decoder = msgspec.json.Decoder(MessageBody)
_count_decoder = msgspec.json.Decoder(CountBody)
_NAMES = {"stop": "stop_sequences"}
_CONVERSATION_NAMES = {
    "enable_thinking": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "continue_final_message": "messages",
}


async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    raw = await read_body(request)
    body = decode(raw, _message_decoder)
    service = models_of(request).language_model(body.model, request.scope["path"])
    check_message_body(body)
    _check_stop(service, body.stop_sequences)
    terms = terms_of(request.scope)
    service.check_load(terms)
    opened, continues = await _open(request, service, body, len(raw))
    max_tokens = _max_tokens(service, opened, body.max_tokens)
    params = _params(body, service.sampling_defaults, max_tokens)
    request_id = new_id("msg", "_")
    options = reply_options(opened, bool(body.stream), continues=continues)
    (sample,) = service.submit(request_id, [opened.prompt_ids], params, terms, options)
    omit = body.thinking is not None and body.thinking.display == "omitted"
    answer = MessageAnswer(service, sample, opened, request_id, max_tokens < body.max_tokens, omit)
    return await answer.respond(request, bool(body.stream))


async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation's prompt has; nothing is generated."""
    raw = await read_body(request)
    body = decode(raw, _count_decoder)
    service = models_of(request).language_model(body.model, request.scope["path"])
    check_message_body(body)
    opened, _ = await _open(request, service, body, len(raw))
    return as_json({"input_tokens": len(opened.prompt_ids)})


async def _open(
    request: Request, service: SequenceService, body: CountBody, size: int
) -> tuple[OpenConversation, bool]:
    """The conversation, and whether the answer continues its last message."""
    async with in_turn(request, size):
        conversation = await off_loop(size, lambda: conversation_of(body, size, service.model_dialect))
        try:
            opened = await open_named(service, conversation, _CONVERSATION_NAMES)
        except PromptTooLong as error:
            raise _too_long(error.least, error.limit) from None
    return opened, conversation.continue_final_message


def _max_tokens(service: SequenceService, opened: OpenConversation, wanted: int) -> int:
    """As many tokens of an answer as are wanted and the model has room for. Raises ApiError if it has none."""
    limit, tokens = service.max_model_len, len(opened.prompt_ids)
    if limit is None:
        # It is not loaded, which whoever is asked for the answer says.
        return wanted
    if tokens >= limit:
        raise _too_long(tokens, limit)
    return min(wanted, limit - tokens)


def _too_long(tokens: int, limit: int) -> ApiError:
    """The refusal of a prompt of at least so many tokens, in the words by which Anthropic's clients know it.

    They take the numbers out of it to see how much has to go.
    """
    # An answer has at least one token.
    message = f"prompt is too long: {tokens} tokens > {limit - 1} maximum"
    return ApiError(400, f"{message}. Shorten it.", "messages", "context_length_exceeded")


def _check_stop(service: SequenceService, stop: list[str] | None) -> None:
    try:
        service.check(None, stop)
    except InvalidRequest as error:
        _, _, problem = str(error).partition(" ")
        raise InvalidRequest(f"stop_sequences {problem}", "stop_sequences") from None


def _params(body: MessageBody, defaults: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    named = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "stop": body.stop_sequences}
    given = {name: value for name, value in named.items() if value is not None}
    return make_params(given | {"max_tokens": max_tokens}, defaults, _NAMES)
