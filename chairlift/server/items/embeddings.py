"""POST /v1/embeddings."""

from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import decode
from chairlift.config.server import ServerConfig
from chairlift.errors import InvalidRequest
from chairlift.runners.items import Encoding
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.endpoint import check_priority, terms_of, timing_headers, until_gone
from chairlift.server.http.off_loop import off_loop
from chairlift.server.http.read_body import read_body
from chairlift.server.items.texts import check_not_empty, count, from_ids, from_texts, run
from chairlift.server.items.vectors import Vectors, as_base64, as_json, check_dimensions, stack
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.registry import Models
from chairlift.server.models.sequence_service import new_id
from chairlift.server.openai.body_types import Int
from chairlift.text.encoding import Cut

MAX_INPUTS = 2048
_FIELD = "input"


class EmbeddingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/embeddings; None means the default, as in the OpenAI API."""

    input: str | list[str | Int | list[Int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    # Extras, named as in vLLM: -1 cuts to what the model takes.
    truncate_prompt_tokens: Int | None = None
    priority: Int | None = None
    # Taken and ignored.
    user: Any = None


_decoder = msgspec.json.Decoder(EmbeddingBody)


async def embeddings(request: Request) -> Response:
    """Embed one input or many."""
    config: ServerConfig = request.app.state.config
    models: Models = request.app.state.models
    body = decode(await read_body(request, config.max_body_bytes, config.body_timeout_s), _decoder)
    service = models.one_shot(body.model, ("embed",), "/v1/embeddings")
    check_dimensions(service.loaded(), body.dimensions)
    terms = terms_of(request.scope)
    if body.priority is not None:
        terms = terms._replace(priority=check_priority(body.priority, "priority"))
    async with until_gone(request.receive):
        encodings = await _encode(service, body)
        answers = await run(service, encodings, terms)
        rows = stack([answer.value for answer in answers], body.dimensions)
        raw = await off_loop(rows.size, lambda: _document(service.name, rows, body, count(encodings)))
    headers = timing_headers(answers) | {"X-Request-Id": new_id("embd")}
    return Response(raw, headers=headers, media_type="application/json")


async def _encode(service: ItemService, body: EmbeddingBody) -> list[Encoding]:
    """All forms of `input` as encodings."""
    given: Sequence[Any] = [body.input] if isinstance(body.input, str) else body.input
    kinds = {type(part) for part in given}
    if kinds == {int}:
        given, kinds = [given], {list}
    if len(given) > MAX_INPUTS:
        raise ApiError(400, f"input holds {len(given)} inputs, more than {MAX_INPUTS}", _FIELD, "too_many_inputs")
    cut = _cut(service, body.truncate_prompt_tokens)
    if kinds == {str}:
        texts = cast(list[str], given)
        check_not_empty(texts, _FIELD)
        return await from_texts(service, [service.default_prompt + text for text in texts], cut, _FIELD)
    if kinds == {list}:
        prompts = cast(list[list[int]], given)
        if not all(prompts):
            raise ApiError(400, "input must not be empty", _FIELD, "empty_input")
        return from_ids(service, prompts, cut, _FIELD)
    if not kinds:
        raise ApiError(400, "input must not be empty", _FIELD, "empty_input")
    wanted = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
    raise InvalidRequest(f"input must be {wanted}, not a mixture", _FIELD)


def _cut(service: ItemService, tokens: int | None) -> Cut | None:
    if tokens is None:
        return None
    limit = service.loaded().max_tokens
    if tokens == -1:
        return Cut()
    if tokens < 1 or (limit is not None and tokens > limit):
        message = f"truncate_prompt_tokens must be -1, or between 1 and the model's {limit}, got {tokens}"
        raise InvalidRequest(message, "truncate_prompt_tokens")
    return Cut(tokens)


def _document(model: str, rows: Vectors, body: EmbeddingBody, tokens: int) -> bytes:
    """The answer, put together from bytes: a thousand embeddings make no thousand objects."""
    vectors = as_base64(rows) if body.encoding_format == "base64" else as_json(rows)
    data = b",".join(
        [b'{"object":"embedding","index":%d,"embedding":%b}' % (index, vector) for index, vector in enumerate(vectors)]
    )
    name = msgspec.json.encode(model)
    usage = b'{"prompt_tokens":%d,"total_tokens":%d}' % (tokens, tokens)
    return b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (data, name, usage)
