"""POST /tokenize and POST /detokenize, as vLLM has them."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import decode
from chairlift.errors import InvalidRequest
from chairlift.server.conversations.conversation import Conversation, open_conversation
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import as_json, in_turn, off_loop, read_body
from chairlift.server.models.registry import models_of
from chairlift.server.models.sequence_service import SequenceService
from chairlift.server.openai.body_types import Int, ToolBody
from chairlift.server.openai.chat import check_messages, tools_of


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /tokenize: a prompt as /v1/completions reads it, or messages as chats are."""

    model: str | None = None
    prompt: Annotated[str | None, Meta(examples=["Batching is"])] = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    # Of a prompt, as in /v1/completions: true finds special tokens in its text.
    parse_special: bool | None = None
    # Of messages.
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    continue_final_message: bool | None = None
    # Not implemented.
    chat_template: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    tokens: Annotated[list[Int], Meta(examples=[[1, 2, 3]])]
    model: str | None = None


_NOT_IMPLEMENTED = ("chat_template", "mm_processor_kwargs", "media_io_kwargs")
_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


async def tokenize_prompt(request: Request, raw: bytes) -> Response:
    """The tokens of a prompt or a chat, which the body has; nothing is generated."""
    body = decode(raw, _tokenize_decoder)
    service = models_of(request).language_model(body.model, request.scope["path"])
    _check(body)
    async with in_turn(request, len(raw)):
        ids = await _tokens(service, body, len(raw))
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids}
    answer["token_strs"] = None
    if body.return_token_strs:
        name = service.tokenizer.backend.id_to_token
        answer["token_strs"] = await off_loop(len(ids), lambda: [name(token_id) or "" for token_id in ids])
    return as_json(answer)


def _check(body: TokenizeBody) -> None:
    for name in _NOT_IMPLEMENTED:
        if getattr(body, name) not in (None, False, [], {}):
            raise InvalidRequest(f"{name} is not supported; leave it out", name)
    if (body.prompt is None) is (body.messages is None):
        raise InvalidRequest("send either prompt or messages", "prompt")
    for name in _OF_MESSAGES if body.messages is None else ("parse_special",):
        if getattr(body, name) is not None:
            other = "messages" if body.messages is None else "prompt"
            raise InvalidRequest(f"{name} has no meaning without {other}; leave it out", name)
    if body.continue_final_message and body.add_generation_prompt:
        problem = "continue_final_message and add_generation_prompt exclude each other; leave one out"
        raise InvalidRequest(problem, "continue_final_message")
    if body.messages is not None and body.add_special_tokens:
        message = "add_special_tokens is not supported with messages: the chat template has them all; leave it out"
        raise InvalidRequest(message, "add_special_tokens")


async def _tokens(service: SequenceService, body: TokenizeBody, size: int) -> list[int]:
    if body.messages is not None:
        check_messages(body.messages)
        conversation = Conversation(
            messages=body.messages,
            size=size,
            tools=tools_of(body.tools),
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            continue_final_message=bool(body.continue_final_message),
            template_arguments=body.chat_template_kwargs or {},
        )
        return (await open_conversation(service, conversation)).prompt_ids
    text, around = body.prompt or "", body.add_special_tokens is not False
    (ids,) = await off_loop(len(text), lambda: service.encode([text], bool(body.parse_special), around))
    return ids


async def detokenize(request: Request) -> Response:
    """The text of tokens, special ones as they are written."""
    body = decode(await read_body(request), _detokenize_decoder)
    service = models_of(request).language_model(body.model, request.scope["path"])
    tokenizer, ids, most = service.tokenizer, body.tokens, service.max_model_len
    if most is not None and len(ids) > most:
        message = f"tokens holds {len(ids)} tokens, more than this model's maximum context length of {most}"
        raise ApiError(400, message, "tokens", "context_length_exceeded")
    wrong = next((token_id for token_id in ids if not 0 <= token_id < tokenizer.vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(
            f"tokens has {wrong}, which is no token: they go up to {tokenizer.vocab_size - 1}", "tokens"
        )
    text = await off_loop(len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=False))
    return as_json({"prompt": text})
