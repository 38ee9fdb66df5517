"""POST /v1/embeddings."""

from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import InvalidRequest
from chairlift.folders.sentence_files import SPLADE
from chairlift.runners.items import Encoding, ItemInfo
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import off_loop, read_json, terms_of, until_gone
from chairlift.server.items.texts import as_inputs, check_not_empty, count, from_ids, from_texts, mixture, run
from chairlift.server.models.item_service import ItemService, timing_headers
from chairlift.server.models.registry import asked_model
from chairlift.server.openai.body_types import Int
from chairlift.text.encoding import Cut

Vectors = npt.NDArray[np.float32]

MAX_INPUTS = 2048
# Numbers of an answer that has a vector for every token.
MAX_NUMBERS = 2**22
_FIELD = "input"


class EmbeddingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/embeddings; None means the default, as in the OpenAI API."""

    input: Annotated[str | list[str | Int | list[Int]], Meta(examples=["What is batching?"])]
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
    body = await read_json(request, _decoder)
    service = asked_model(request, body.model)
    check_dimensions(service.loaded(), body.dimensions)
    terms = terms_of(request.scope, body.priority)
    async with until_gone(request.receive):
        encodings = await encode_input(service, body.input, body.truncate_prompt_tokens)
        answers = await run(service, encodings, terms)
        rows = stack([answer.value for answer in answers], body.dimensions)
        raw = await off_loop(rows.size, lambda: _document(service.name, rows, body, count(encodings)))
    return Response(raw, headers=timing_headers(answers), media_type="application/json")


async def encode_input(service: ItemService, inputs: str | Sequence[Any], truncate: int | None) -> list[Encoding]:
    """All forms of `input` as encodings, each cut to `truncate` tokens (-1: what the model takes)."""
    given: Sequence[Any] = [inputs] if isinstance(inputs, str) else as_inputs(inputs)
    if len(given) > MAX_INPUTS:
        raise ApiError(400, f"input holds {len(given)} inputs, more than {MAX_INPUTS}", _FIELD, "too_many_inputs")
    cut, kinds = cut_to(service, truncate), set(map(type, given))
    if kinds == {str}:
        texts = cast(list[str], given)
        check_not_empty(texts, _FIELD)
        return await from_texts(service, texts, cut, _FIELD)
    if kinds == {list}:
        prompts = cast(list[list[int]], given)
        if not all(prompts):
            raise ApiError(400, "input must not be empty", _FIELD, "empty_input")
        return await from_ids(service, prompts, cut, _FIELD)
    if not kinds:
        raise ApiError(400, "input must not be empty", _FIELD, "empty_input")
    raise mixture(_FIELD)


def whole_texts(encodings: Sequence[Encoding], info: ItemInfo) -> list[Encoding]:
    """The same, for a vector of every token. Raises ApiError where these would be too many numbers."""
    width = info.hidden_size or 1
    if count(encodings) * width > MAX_NUMBERS:
        problem = f"{count(encodings)} tokens of {width} numbers each are more than {MAX_NUMBERS} numbers"
        raise ApiError(400, f"{problem}; send fewer or shorter inputs", _FIELD, "too_many_inputs")
    return [msgspec.structs.replace(encoding, every_token=True) for encoding in encodings]


def cut_to(service: ItemService, tokens: int | None) -> Cut | None:
    """How to cut what is too long, as vLLM has it. Raises InvalidRequest."""
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
    vectors = as_base64(rows) if body.encoding_format == "base64" else as_numbers(rows)
    data = b",".join(
        [b'{"object":"embedding","index":%d,"embedding":%b}' % (index, vector) for index, vector in enumerate(vectors)]
    )
    name = msgspec.json.encode(model)
    usage = b'{"prompt_tokens":%d,"total_tokens":%d}' % (tokens, tokens)
    return b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (data, name, usage)


def check_dimensions(info: ItemInfo, dimensions: int | None) -> None:
    """Refuse more dimensions than the model has, or none; and a model with one for every word."""
    if info.pooling == SPLADE:
        raise ApiError(400, "this is a SPLADE model: /embed_sparse has what it makes of texts", "model", "wrong_task")
    if dimensions is None:
        return
    if dimensions < 1 or (info.dimensions is not None and dimensions > info.dimensions):
        message = f"dimensions must be between 1 and the model's {info.dimensions}, got {dimensions}"
        raise InvalidRequest(message, "dimensions")


def stack(values: Sequence[npt.ArrayLike], dimensions: int | None = None, normalize: bool | None = None) -> Vectors:
    """One row for each vector; unless the caller says whether to, a shortened one is brought back to length 1.

    So Matryoshka models are meant to be used.
    """
    rows: Vectors = np.asarray(values, dtype=np.float32)
    if dimensions is not None and dimensions < rows.shape[1]:
        rows = rows[:, :dimensions]
        normalize = True if normalize is None else normalize
    if normalize:
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        rows = (rows / np.where(norms > 0, norms, 1)).astype(np.float32)
    return rows


def as_numbers(rows: Vectors) -> list[bytes]:
    """Each row as a JSON array of numbers."""
    encode = msgspec.json.encode
    return [encode(row.tolist()) for row in rows]


def as_base64(rows: Vectors) -> list[bytes]:
    """Each row as a JSON string: base64 of little-endian float32."""
    return [b'"' + b64encode(row) + b'"' for row in np.ascontiguousarray(rows, dtype="<f4")]
