"""POST /v1/score (or /score), /classify and /pooling: pairs, labels and vectors, as vLLM has them."""

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import InvalidRequest
from chairlift.runners.items import Encoding, ItemInfo
from chairlift.runners.scores import Scores, pair_scores, probabilities
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import as_json, new_id, off_loop, read_json, terms_of, until_gone
from chairlift.server.items.embeddings import (
    MAX_INPUTS,
    as_base64,
    as_numbers,
    check_dimensions,
    cut_to,
    encode_input,
    stack,
    whole_texts,
)
from chairlift.server.items.texts import (
    check_instruction,
    check_not_empty,
    check_number,
    check_repeated,
    count,
    from_pairs,
    from_texts,
    run,
)
from chairlift.server.models.item_service import ItemService, timing_headers
from chairlift.server.models.registry import asked_model
from chairlift.server.openai.body_types import Int

TextInputs = str | list[str | Int | list[Int]]
T = TypeVar("T")


class PoolingBase(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all three; None means the default, as in vLLM."""

    model: str | None = None
    # -1 cuts to what the model takes.
    truncate_prompt_tokens: Int | None = None
    # False gives logits as they are.
    use_activation: bool | None = None
    activation: bool | None = None
    priority: Int | None = None
    # Taken and ignored.
    user: Any = None

    @property
    def activates(self) -> bool:
        """Whether logits are made probabilities."""
        return self.use_activation is not False and self.activation is not False


class ScoreBody(PoolingBase, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/score: a text against another, one against many, or many against as many."""

    text_1: Annotated[str | list[str] | None, Meta(examples=["What is batching?"])] = None
    text_2: Annotated[str | list[str] | None, Meta(examples=[["Requests share a step.", "It rains."]])] = None
    # The same by other names.
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    # For a model whose pairs go through a chat template: what the system says there.
    instruction: str | None = None


class ClassifyBody(PoolingBase, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /classify."""

    input: Annotated[TextInputs, Meta(examples=["What is batching?"])]


class PoolingBody(PoolingBase, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /pooling: what the model gives for each input, or for each of an input's tokens."""

    input: Annotated[TextInputs, Meta(examples=["What is batching?"])]
    task: Literal["embed", "classify", "token_embed"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None


_score_decoder = msgspec.json.Decoder(ScoreBody)
_classify_decoder = msgspec.json.Decoder(ClassifyBody)
_pooling_decoder = msgspec.json.Decoder(PoolingBody)


async def score(request: Request) -> Response:
    """How well texts go together: by a reranker's scores, or the cosine of embeddings."""
    body = await read_json(request, _score_decoder)
    service = asked_model(request, body.model)
    first, second = _sides(body)
    _check_activation(service, body)
    check_instruction(body.instruction, len(second.texts))
    if service.task == "embed" and body.instruction is not None:
        problem = f"instruction is for rerankers, and `{service.name}` is an embedder; leave it out"
        raise InvalidRequest(problem, "instruction")
    cut = cut_to(service, body.truncate_prompt_tokens)
    terms = terms_of(request.scope, body.priority)
    async with until_gone(request.receive):
        if service.task == "embed":
            check_number(service, 2 * len(second.texts), second.name)
            ones, others = [await from_texts(service, side.texts, cut, side.name) for side in (first, second)]
            encodings = [each for pair in zip(_repeated(ones, len(others)), others, strict=True) for each in pair]
            answers = await run(service, encodings, terms)
            rows = stack([answer.value for answer in answers], normalize=True)
            scores: Scores = np.einsum("ij,ij->i", rows[::2], rows[1::2]).astype(np.float64)
        else:
            pairs = list(zip(_repeated(first.texts, len(second.texts)), second.texts, strict=True))
            encodings = await from_pairs(service, pairs, cut, second.name, instruction=body.instruction)
            activation = service.loaded().score_activation if body.activates else "none"
            answers = await run(service, encodings, terms)
            scores = pair_scores([answer.value for answer in answers], activation)
    data = [{"index": index, "object": "score", "score": float(each)} for index, each in enumerate(scores)]
    return as_json(_document("score", service, data, encodings), timing_headers(answers))


class _Side(NamedTuple):
    """One side of what is compared, and the name that the client has for it."""

    name: str
    texts: list[str]


def _sides(body: ScoreBody) -> tuple[_Side, _Side]:
    """What is compared, in the order of the answer: one text, or as many as there are on the other side."""
    sides: list[_Side] = []
    for names in (("text_1", "queries"), ("text_2", "documents")):
        given = [(name, value) for name in names if (value := getattr(body, name)) is not None]
        if len(given) != 1:
            raise InvalidRequest(f"give either {names[0]} or {names[1]}", names[0])
        (name, value) = given[0]
        texts = [value] if isinstance(value, str) else value
        check_not_empty(texts, name)
        sides.append(_Side(name, texts))
    first, second = sides
    number = len(second.texts)
    if number > MAX_INPUTS:
        raise ApiError(400, f"{number} pairs are more than {MAX_INPUTS}", second.name, "too_many_inputs")
    if len(first.texts) == 1:
        check_repeated(first.texts[0], number, first.name)
    elif len(first.texts) != number:
        problem = f"{first.name} must be one text, or as many as {second.name}: got {len(first.texts)} and {number}"
        raise InvalidRequest(problem, first.name)
    return first, second


def _repeated(side: list[T], number: int) -> list[T]:
    return side * number if len(side) == 1 else side


def _check_activation(service: ItemService, body: PoolingBase) -> None:
    """Refuse to leave out what embedders don't have."""
    for name in ("use_activation", "activation"):
        if service.task == "embed" and getattr(body, name) is False:
            problem = f"{name} can't be false: `{service.name}` is an embedder, and makes no probabilities of logits"
            raise InvalidRequest(problem, name)


async def classify(request: Request) -> Response:
    """The likeliest label of each input, and the probabilities of all."""
    body = await read_json(request, _classify_decoder)
    service = asked_model(request, body.model)
    info = service.loaded()
    async with until_gone(request.receive):
        encodings = await encode_input(service, body.input, body.truncate_prompt_tokens)
        answers = await run(service, encodings, terms_of(request.scope, body.priority))
        values = [answer.value for answer in answers]

        def write() -> bytes:
            data = [_labelled(info, index, value, body.activates) for index, value in enumerate(values)]
            return msgspec.json.encode(_document("classify", service, data, encodings))

        raw = await off_loop(sum(map(np.size, values)), write)
    return Response(raw, headers=timing_headers(answers), media_type="application/json")


def _labelled(info: ItemInfo, index: int, logits: Any, activates: bool) -> dict[str, Any]:
    """One input's likeliest label, and the probabilities of all."""
    scores = _activated(info, logits, activates)
    best = int(scores.argmax())
    label = info.labels[best] if best < len(info.labels) else None
    return {"index": index, "label": label, "probs": scores.tolist(), "num_classes": scores.size}


async def pooling(request: Request) -> Response:
    """What the model gives, as it is: a vector for each input, or one for each of its tokens."""
    body = await read_json(request, _pooling_decoder)
    service = asked_model(request, body.model)
    info = service.loaded()
    embeds = info.task == "embed"
    if body.task is not None and (body.task == "classify") == embeds:
        raise InvalidRequest(f"`{service.name}` can't {body.task}: its task is {info.task}", "task")
    if body.dimensions is not None and (not embeds or body.task == "token_embed"):
        raise InvalidRequest("dimensions are those of embeddings of whole inputs", "dimensions")
    _check_activation(service, body)
    check_dimensions(info, body.dimensions)
    async with until_gone(request.receive):
        encodings = await encode_input(service, body.input, body.truncate_prompt_tokens)
        if body.task == "token_embed":
            encodings = whole_texts(encodings, info)
        answers = await run(service, encodings, terms_of(request.scope, body.priority))
        values = [answer.value for answer in answers]
        if not embeds:
            values = [_activated(info, value, body.activates) for value in values]
        if body.task != "token_embed":
            values = list(stack(values, body.dimensions))
        size = sum(np.size(value) for value in values)
        data = await off_loop(size, lambda: [_written(value, body.encoding_format) for value in values])
    entries = [{"index": index, "object": "pooling", "data": raw} for index, raw in enumerate(data)]
    return as_json(_document("pool", service, entries, encodings), timing_headers(answers))


def _activated(info: ItemInfo, logits: Any, activates: bool) -> Scores:
    return probabilities(np.ravel(logits), info.score_activation if activates else "none")


def _written(value: Any, encoding_format: str | None) -> msgspec.Raw:
    """A vector, or one for each token, as JSON."""
    rows = np.atleast_2d(np.asarray(value, dtype=np.float32))
    if encoding_format == "base64":
        return msgspec.Raw(as_base64(rows.reshape(1, -1))[0])
    numbers = as_numbers(rows)
    return msgspec.Raw(numbers[0] if np.ndim(value) == 1 else b"[%b]" % b",".join(numbers))


def _document(kind: str, service: ItemService, data: list[Any], encodings: Sequence[Encoding]) -> dict[str, Any]:
    tokens = count(encodings)
    return {
        "id": new_id(kind),
        "object": "list",
        "created": int(time.time()),
        "model": service.name,
        "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }
