"""POST /rerank, /v1/rerank and /v2/rerank: documents by relevance to a query, as Cohere and Jina have it.

/rerank is also TEI's route: a body that has `texts` is answered as TEI does.
"""

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import decode
from chairlift.errors import InvalidRequest
from chairlift.runners.scores import Scores, pair_scores
from chairlift.server.http.api_errors import as_api_error, tei_shape
from chairlift.server.http.exchange import (
    as_json,
    new_id,
    read_body,
    terms_of,
    until_gone,
)
from chairlift.server.items.embeddings import cut_to
from chairlift.server.items.tei import rerank as rerank_as_tei
from chairlift.server.items.texts import (
    check_instruction,
    check_not_empty,
    check_repeated,
    count,
    from_pairs,
    run,
)
from chairlift.server.models.item_service import timing_headers
from chairlift.server.models.registry import asked_model
from chairlift.server.openai.body_types import Int
from chairlift.text.encoding import Cut

Document = str | dict[str, Any]
# Fields of a document that are compared.
_MAX_RANK_FIELDS = 64


class RerankBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What Cohere's and Jina's clients send; None means the default."""

    query: Annotated[str, Meta(examples=["What is batching?"])]
    documents: Annotated[list[Document], Meta(examples=[["Requests share a step.", "It rains."]])]
    model: str | None = None
    top_n: Int | None = None
    return_documents: bool | None = None
    # Documents are cut to this, and in any case to what the model takes together with the query.
    max_tokens_per_doc: Int | None = None
    # vLLM's name: what query and document are cut to together, -1 as without it.
    truncate_prompt_tokens: Int | None = None
    # vLLM's name, for a model whose pairs go through a chat template: what the system says there.
    instruction: str | None = None
    rank_fields: list[str] | None = None
    priority: Int | None = None
    # Not implemented: a document is one chunk.
    max_chunks_per_doc: Int | None = None
    relevant_spans: Any = None


class _Peek(msgspec.Struct):
    texts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decoder = msgspec.json.Decoder(RerankBody)
_peeker = msgspec.json.Decoder(_Peek)


async def rerank(request: Request) -> Response:
    """Order documents by relevance."""
    raw = await read_body(request)
    path = request.scope["path"]
    if path == "/rerank" and decode(raw, _peeker).texts is not msgspec.UNSET:
        try:
            return await rerank_as_tei(request, raw)
        except Exception as error:
            return as_api_error(error).response(tei_shape)
    body = decode(raw, _decoder)
    service = asked_model(request, body.model)
    service.check_count(len(body.documents))
    _check(body)
    cut = (cut_to(service, body.truncate_prompt_tokens) or Cut())._replace(second=body.max_tokens_per_doc)
    terms = terms_of(request.scope, body.priority)
    async with until_gone(request.receive):
        pairs = [(body.query, _text(body, index)) for index in range(len(body.documents))]
        encodings = await from_pairs(service, pairs, cut, "documents", instruction=body.instruction)
        activation = service.loaded().score_activation
        answers = await run(service, encodings, terms)
    scores = pair_scores([answer.value for answer in answers], activation)
    document = _document(body, service.name, scores, count(encodings), "2" if path.startswith("/v2/") else "1")
    return as_json(document, timing_headers(answers))


def _check(body: RerankBody) -> None:
    check_not_empty([body.query], "query")
    if not body.documents:
        raise InvalidRequest("documents must not be empty", "documents")
    check_repeated(body.query, len(body.documents), "query")
    check_instruction(body.instruction, len(body.documents))
    for name in ("top_n", "max_tokens_per_doc"):
        value = getattr(body, name)
        if value is not None and value < 1:
            raise InvalidRequest(f"{name} must be at least 1, got {value}", name)
    if body.max_chunks_per_doc not in (None, 1):
        raise InvalidRequest("max_chunks_per_doc is not supported; leave it out or set it to 1", "max_chunks_per_doc")
    if body.relevant_spans is not None:
        raise InvalidRequest("relevant_spans is not supported", "relevant_spans")
    if body.rank_fields is not None and not body.rank_fields:
        raise InvalidRequest("rank_fields must not be empty", "rank_fields")
    fields = body.rank_fields or []
    if len(fields) > _MAX_RANK_FIELDS or len(set(fields)) < len(fields):
        problem = f"rank_fields may have {_MAX_RANK_FIELDS} names, each of them once, got {len(fields)}"
        raise InvalidRequest(f"{problem} with {len(set(fields))} different ones", "rank_fields")


def _text(body: RerankBody, index: int) -> str:
    """What is compared with the query: the text, or the fields that were asked for, several by name as in YAML."""
    document = body.documents[index]
    if isinstance(document, str):
        return document
    fields = body.rank_fields or ["text"]
    for name in fields:
        if not isinstance(document.get(name), str):
            raise InvalidRequest(f"documents[{index}] needs a string {name!r}", f"documents[{index}].{name}")
    if len(fields) == 1:
        return str(document[fields[0]])
    return "\n".join(f"{name}: {document[name]}" for name in fields)


def _document(body: RerankBody, model: str, scores: Scores, tokens: int, version: str) -> dict[str, Any]:
    """What both kinds of clients look for: Cohere's `meta`, Jina's `usage`."""
    order = np.argsort(-scores, kind="stable")[: body.top_n]
    results: list[dict[str, Any]] = [{"index": int(i), "relevance_score": float(scores[i])} for i in order]
    if body.return_documents:
        for result in results:
            document = body.documents[result["index"]]
            result["document"] = {"text": document} if isinstance(document, str) else document
    return {
        "id": new_id("rerank"),
        "object": "list",
        "model": model,
        "results": results,
        "meta": {"api_version": {"version": version}, "tokens": {"input_tokens": tokens}},
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
