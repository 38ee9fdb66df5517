"""The routes of text-embeddings-inference: /embed, /predict, /rerank, / (whichever the model is for) and others.

TEI serves one model and has no field to name one; here `model` may, and must where several would do.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from chairlift import __version__
from chairlift.bodies import decode
from chairlift.errors import InvalidRequest
from chairlift.folders.sentence_files import SPLADE
from chairlift.runners.items import Encoding, ItemInfo
from chairlift.runners.scores import first_logits, probabilities, sigmoid
from chairlift.server.http.api_errors import ApiError, as_api_error, tei_shape
from chairlift.server.http.exchange import (
    as_json,
    off_loop,
    read_body,
    read_json,
    terms_of,
    until_gone,
)
from chairlift.server.items.embeddings import MAX_INPUTS, as_numbers, check_dimensions, stack, whole_texts
from chairlift.server.items.texts import (
    are_ids,
    as_inputs,
    check_not_empty,
    check_repeated,
    encoder_of,
    from_ids,
    from_pairs,
    from_texts,
    mixture,
    naming,
    run,
)
from chairlift.server.models.item_service import ItemService, timing_headers
from chairlift.server.models.registry import asked_model
from chairlift.server.openai.body_types import Int
from chairlift.server.openai.token_routes import tokenize_prompt
from chairlift.text.encoding import MAX_TOKENS_TOLD, Cut, Side


class TeiBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of every TEI request."""

    model: str | None = None
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] = "right"


class EmbedBody(TeiBody, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /embed."""

    inputs: Annotated[str | list[str | Int | list[Int]], Meta(examples=["What is batching?"])]
    normalize: bool = True
    prompt_name: str | None = None
    dimensions: Int | None = None


class PredictParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What Hugging Face's own client sends for a classification."""

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    top_k: Int | None = None


class TeiPredictBody(TeiBody, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /predict: one text, a pair as a list of two, or a list of lists of one text or two."""

    inputs: Annotated[str | list[str | list[str]], Meta(examples=["What is batching?"])]
    raw_scores: bool = False
    parameters: PredictParameters | None = None


class EmbedAllBody(TeiBody, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /embed_all."""

    inputs: Annotated[str | list[str | Int | list[Int]], Meta(examples=["What is batching?"])]
    prompt_name: str | None = None


class Sentences(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text, and those that it is compared with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How the texts of a similarity are read."""

    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] = "right"
    prompt_name: str | None = None


class SimilarityBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /similarity."""

    inputs: Sentences
    parameters: SimilarityParameters | None = None
    model: str | None = None


class TeiTokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /tokenize, as TEI has it."""

    inputs: Annotated[str | list[str], Meta(examples=["What is batching?"])]
    add_special_tokens: bool = True
    prompt_name: str | None = None
    model: str | None = None


class DecodeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /decode."""

    ids: Annotated[list[Int | list[Int]], Meta(examples=[[1, 2, 3]])]
    skip_special_tokens: bool = True
    model: str | None = None


class RanksBody(TeiBody, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /rerank as TEI has it."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False


class _Asked(msgspec.Struct):
    model: str | None = None
    texts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_asked_decoder = msgspec.json.Decoder(_Asked)
_embed_decoder = msgspec.json.Decoder(EmbedBody)
_embed_all_decoder = msgspec.json.Decoder(EmbedAllBody)
_similarity_decoder = msgspec.json.Decoder(SimilarityBody)
_tokenize_decoder = msgspec.json.Decoder(TeiTokenizeBody)
_decode_decoder = msgspec.json.Decoder(DecodeBody)
_predict_decoder = msgspec.json.Decoder(TeiPredictBody)
_ranks_decoder = msgspec.json.Decoder(RanksBody)


async def default(request: Request) -> Response:
    """What the model does: embeddings, labels or ranks."""
    raw = await read_body(request)
    asked = decode(raw, _asked_decoder)
    if asked_model(request, asked.model).task == "embed":
        return await _embed(request, raw)
    return await (_predict(request, raw) if asked.texts is msgspec.UNSET else rerank(request, raw))


async def embed(request: Request) -> Response:
    """An embedding for each input."""
    return await _embed(request, await read_body(request))


async def _embed(request: Request, raw: bytes) -> Response:
    body = decode(raw, _embed_decoder)
    service = asked_model(request, body.model)
    info = service.loaded()
    check_dimensions(info, body.dimensions)
    if not body.normalize and info.normalized:
        raise InvalidRequest("normalize can't be false: this model normalizes its embeddings itself", "normalize")
    async with until_gone(request.receive):
        encodings = await _encode(service, body, body.prompt_name, _given(body.inputs))
        answers = await run(service, encodings, terms_of(request.scope))
        rows = stack([answer.value for answer in answers], body.dimensions, body.normalize)
        written = await off_loop(rows.size, lambda: b"[%b]" % b",".join(as_numbers(rows)))
    return Response(written, headers=timing_headers(answers), media_type="application/json")


async def embed_all(request: Request) -> Response:
    """A vector for each token of each input, as the model's backbone gives it."""
    body = await read_json(request, _embed_all_decoder)
    service = asked_model(request, body.model)
    async with until_gone(request.receive):
        encodings = whole_texts(await _encode(service, body, body.prompt_name, _given(body.inputs)), service.loaded())
        answers = await run(service, encodings, terms_of(request.scope))
        rows = [answer.value for answer in answers]
        raw = await off_loop(sum(map(np.size, rows)), lambda: b"[%b]" % b",".join(map(_matrix, rows)))
    return Response(raw, headers=timing_headers(answers), media_type="application/json")


async def embed_sparse(request: Request) -> Response:
    """Of each input the words that a SPLADE model gives it, by their weights."""
    body = await read_json(request, _embed_all_decoder)
    service = asked_model(request, body.model)
    if service.loaded().pooling != SPLADE:
        raise ApiError(400, f"`{service.name}` is no SPLADE model; /embed has its embeddings", "model", "wrong_task")
    async with until_gone(request.receive):
        encodings = await _encode(service, body, body.prompt_name, _given(body.inputs))
        answers = await run(service, encodings, terms_of(request.scope))
        rows = [answer.value for answer in answers]
        raw = await off_loop(sum(map(np.size, rows)), lambda: msgspec.json.encode(list(map(_words, rows))))
    return Response(raw, headers=timing_headers(answers), media_type="application/json")


def _words(row: npt.ArrayLike) -> list[dict[str, Any]]:
    weights = np.asarray(row, dtype=np.float32)
    return [{"index": int(word), "value": float(weights[word])} for word in weights.nonzero()[0]]


def _matrix(rows: npt.ArrayLike) -> bytes:
    return b"[%b]" % b",".join(as_numbers(np.asarray(rows, dtype=np.float32)))


async def similarity(request: Request) -> Response:
    """The cosine of a text's embedding with that of each of others."""
    body = await read_json(request, _similarity_decoder)
    service = asked_model(request, body.model)
    how = body.parameters or SimilarityParameters()
    check_not_empty([body.inputs.source_sentence], "inputs.source_sentence")
    check_not_empty(body.inputs.sentences, "inputs.sentences")
    terms = TeiBody(truncate=how.truncate, truncation_direction=how.truncation_direction)
    async with until_gone(request.receive):
        given = [body.inputs.source_sentence, *body.inputs.sentences]
        places = ["inputs.source_sentence", *(f"inputs.sentences[{i}]" for i in range(len(body.inputs.sentences)))]
        encodings = await _encode(service, terms, how.prompt_name, given, places)
        answers = await run(service, encodings, terms_of(request.scope))
    rows = stack([answer.value for answer in answers], normalize=True)
    return as_json((rows[1:] @ rows[0]).tolist(), timing_headers(answers))


async def tokenize(request: Request) -> Response:
    """The tokens of `inputs`, as TEI has it; or of a prompt or a chat, as vLLM has it."""
    raw = await read_body(request)
    if decode(raw, _asked_decoder).inputs is msgspec.UNSET:
        return await tokenize_prompt(request, raw)
    try:
        return await _tokenize_texts(request, raw)
    except Exception as error:
        return as_api_error(error).response(tei_shape)


async def _tokenize_texts(request: Request, raw: bytes) -> Response:
    """The tokens of each text, and where they are in it."""
    body = decode(raw, _tokenize_decoder)
    service = asked_model(request, body.model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    check_not_empty(texts, "inputs")
    _check_count(len(texts), "inputs")
    encoder = encoder_of(service)
    encoder.check_prompt(body.prompt_name)
    work = naming("inputs", len(texts), lambda: encoder.tokens(texts, body.add_special_tokens, body.prompt_name))
    return as_json(await off_loop(sum(map(len, texts)) + encoder.chars_around * len(texts), work))


async def decode_ids(request: Request) -> Response:
    """The texts of token ids."""
    body = await read_json(request, _decode_decoder)
    service = asked_model(request, body.model)
    prompts = as_inputs(body.ids)
    _check_count(len(prompts), "ids")
    if not all(isinstance(ids, list) for ids in prompts):
        raise mixture("ids", "token ids or lists of them")
    if not prompts or not all(prompts):
        raise ApiError(400, "ids must not be empty", "ids", "empty_input")
    size = sum(map(len, prompts))
    if size > MAX_TOKENS_TOLD:
        problem = f"ids holds {size} token ids, more than {MAX_TOKENS_TOLD}; send fewer at once"
        raise ApiError(413, problem, "ids", "too_many_inputs")
    decode_one = encoder_of(service).decode

    def write() -> Response:
        if not all(map(are_ids, prompts)):
            raise mixture("ids", "token ids or lists of them")
        return as_json([decode_one(ids, body.skip_special_tokens) for ids in prompts])

    return await off_loop(size, write)


async def predict(request: Request) -> Response:
    """For each text, or pair, its labels with the best first."""
    return await _predict(request, await read_body(request))


async def _predict(request: Request, raw: bytes) -> Response:
    body = decode(raw, _predict_decoder)
    service = asked_model(request, body.model)
    parameters = body.parameters or PredictParameters()
    if parameters.top_k is not None and parameters.top_k < 1:
        raise InvalidRequest(f"top_k must be at least 1, got {parameters.top_k}", "parameters.top_k")
    function = parameters.function_to_apply or ("none" if body.raw_scores else None)
    if not isinstance(body.inputs, str):
        _check_count(len(body.inputs), "inputs")
    inputs, single = _sequences(body.inputs)
    if not inputs or any(not text for texts in inputs for text in texts):
        raise ApiError(400, "inputs must not be empty", "inputs", "empty_input")
    async with until_gone(request.receive):
        encodings = await _encode_sequences(service, inputs, _cut(body), single)
        answers = await run(service, encodings, terms_of(request.scope))
        info, values = service.loaded(), [answer.value for answer in answers]

        def write() -> bytes:
            predictions = [_predictions(info, value, function, parameters.top_k) for value in values]
            return msgspec.json.encode(predictions[0] if single else predictions)

        raw = await off_loop(sum(map(np.size, values)), write)
    return Response(raw, headers=timing_headers(answers), media_type="application/json")


async def rerank(request: Request, raw: bytes) -> Response:
    """Texts by relevance to a query."""
    body = decode(raw, _ranks_decoder)
    service = asked_model(request, body.model)
    check_not_empty([body.query], "query")
    check_not_empty(body.texts, "texts")
    _check_count(len(body.texts), "texts")
    check_repeated(body.query, len(body.texts), "query")
    async with until_gone(request.receive):
        pairs = [(body.query, text) for text in body.texts]
        encodings = await from_pairs(service, pairs, _cut(body), "texts")
        answers = await run(service, encodings, terms_of(request.scope))
    scores = first_logits([answer.value for answer in answers])
    if not body.raw_scores:
        scores = sigmoid(scores)
    ranks: list[dict[str, Any]] = [
        {"index": int(i), "score": float(scores[i])} for i in np.argsort(-scores, kind="stable")
    ]
    if body.return_text:
        ranks = [rank | {"text": body.texts[rank["index"]]} for rank in ranks]
    return as_json(ranks, timing_headers(answers))


async def info(request: Request) -> Response:
    """What is served and within which limits: of the only model, or the one that `?model=` names."""
    service = asked_model(request, request.query_params.get("model"))
    about, limits = service.loaded(), service.dispatcher.limits
    return as_json(
        {
            "model_id": service.name,
            "model_sha": None,
            "model_dtype": about.dtype,
            "model_type": _model_type(about),
            "max_concurrent_requests": limits.max_waiting,
            "max_input_length": about.max_tokens,
            "max_batch_tokens": limits.max_batch_tokens or limits.max_batch_size * (about.max_tokens or 1),
            "max_batch_requests": limits.max_batch_size,
            "max_client_batch_size": min(MAX_INPUTS, limits.max_waiting),
            "auto_truncate": False,
            "version": __version__,
        }
    )


def _given(inputs: str | list[str | int | list[int]]) -> Sequence[str | int | list[int]]:
    """The inputs, of which one may come as it is: a text or its token ids."""
    return [inputs] if isinstance(inputs, str) else as_inputs(inputs)


async def _encode(
    service: ItemService,
    body: TeiBody,
    prompt_name: str | None,
    given: Sequence[str | int | list[int]],
    places: Sequence[str] | None = None,
) -> list[Encoding]:
    """Texts, which clients call by their `places`, with the prompt that was asked for; or token ids as they are."""
    _check_count(len(given), "inputs")
    if not given or not all(isinstance(each, int) or each for each in given):
        raise ApiError(400, "inputs must not be empty", "inputs", "empty_input")
    encoder_of(service).check_prompt(prompt_name)
    cut = _cut(body)
    if all(isinstance(each, str) for each in given):
        return await from_texts(service, cast(list[str], given), cut, "inputs", places, prompt_name)
    if not all(isinstance(each, list) for each in given):
        raise mixture("inputs")
    if prompt_name is not None:
        raise InvalidRequest("prompt_name needs texts, not token ids", "prompt_name")
    ids = cast(list[list[int]], given)
    return await from_ids(service, ids, cut, "inputs")


def _cut(body: TeiBody) -> Cut | None:
    return Cut(side=cast(Side, body.truncation_direction.lower())) if body.truncate else None


def _sequences(inputs: str | list[str | list[str]]) -> tuple[list[list[str]], bool]:
    """Each input as one text or two, and whether it was a single one that is answered without a list around it."""
    if isinstance(inputs, str):
        return [[inputs]], True
    if inputs and all(isinstance(each, str) for each in inputs):
        sequences, single = [cast(list[str], inputs)], True
    else:
        sequences, single = [each if isinstance(each, list) else [] for each in inputs], False
    if any(len(texts) not in (1, 2) for texts in sequences):
        message = "inputs must be a text, a pair of texts, or a list of lists of one text or two"
        raise InvalidRequest(message, "inputs")
    return sequences, single


def _check_count(number: int, field: str) -> None:
    if number > MAX_INPUTS:
        raise ApiError(413, f"{field} holds {number} inputs, more than {MAX_INPUTS}", field, "too_many_inputs")


async def _encode_sequences(
    service: ItemService, inputs: list[list[str]], cut: Cut | None, single: bool
) -> list[Encoding]:
    """Texts and pairs in their order; where there are several, what is too long is told by its place among all."""
    kinds = {}
    for number in (1, 2):
        found = [(texts, f"inputs[{index}]") for index, texts in enumerate(inputs) if len(texts) == number]
        places = None if single else [place for _, place in found]
        if number == 1:
            made = await from_texts(service, [texts[0] for texts, _ in found], cut, "inputs", places)
        else:
            made = await from_pairs(service, [(texts[0], texts[1]) for texts, _ in found], cut, "inputs", places)
        kinds[number] = iter(made)
    return [next(kinds[len(texts)]) for texts in inputs]


def _predictions(info: ItemInfo, logits: Any, function: str | None, most: int | None) -> list[dict[str, Any]]:
    scores = probabilities(np.ravel(logits), function or info.activation)
    best = np.argsort(-scores, kind="stable")[:most]
    return [{"score": float(scores[i]), "label": info.labels[i] if info.labels else f"LABEL_{i}"} for i in best]


def _model_type(info: ItemInfo) -> dict[str, Any]:
    if info.task == "embed":
        return {"embedding": {"pooling": info.pooling}}
    labels = {"id2label": dict(enumerate(info.labels)), "label2id": {label: i for i, label in enumerate(info.labels)}}
    return {"classifier" if info.task == "classify" else "reranker": labels}
