"""/v1/responses, as OpenAI's API has it: made, asked for, continued, deleted, cancelled."""

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import decode
from chairlift.core.sequences.sampling_params import SamplingParams, StructuredOutputsParams
from chairlift.errors import InvalidRequest
from chairlift.server.conversations.conversation import Conversation, OpenConversation, Tool
from chairlift.server.conversations.reply_steps import open_named, reply_options
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import (
    PartStream,
    Terms,
    as_json,
    in_turn,
    new_id,
    off_loop,
    read_body,
    sse_event,
    stays,
    terms_of,
)
from chairlift.server.http.paging import page_limit, query_of
from chairlift.server.http.tenants import TENANT
from chairlift.server.models.registry import models_of
from chairlift.server.models.sequence_service import SequenceService
from chairlift.server.responses.background_run import NewResponse
from chairlift.server.responses.event_log import EventLog
from chairlift.server.responses.input_items import messages_of, read_items, references_in
from chairlift.server.responses.response_answer import ResponseAnswer, ResponseDocument
from chairlift.server.responses.response_body import (
    InputBody,
    ResponseBody,
    ResponseItem,
    check_input_body,
    check_response_body,
    response_params,
)
from chairlift.server.responses.response_store import ResponseStore, StoredResponse, items_of, kept_items
from chairlift.server.responses.tool_fields import read_choice, read_tools
from chairlift.server.responses.truncation import NAMES, Truncation
from chairlift.text.structured import grammar_of, schema_grammar

_DEFAULT_PAGE, _MAX_PAGE = 20, 100
_MAX_DIGITS = 9
SHOW_QUERY: Mapping[str, Any] = {
    "include": list[str],
    "include[]": list[str],
    "stream": bool,
    "starting_after": int,
    "include_obfuscation": bool,
}
ITEMS_QUERY: Mapping[str, Any] = {
    "after": str,
    "limit": Annotated[int, Meta(ge=1, le=_MAX_PAGE)],
    "order": Literal["asc", "desc"],
    "include": list[str],
    "include[]": list[str],
}
_decoder = msgspec.json.Decoder(ResponseBody)
_input_decoder = msgspec.json.Decoder(InputBody)


class _KeptItem(msgspec.Struct):
    """What an item is called; its other fields are passed over."""

    id: str


_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_ids_decoder = msgspec.json.Decoder(list[_KeptItem])


class _Ask(NamedTuple):
    """A body, understood: its own items, its tools, and the conversation with all that was before.

    `all_items` are those of earlier responses, and its own.
    """

    items: list[ResponseItem]
    tools: list[Tool]
    conversation: Conversation
    all_items: list[ResponseItem]

    async def open(self, service: SequenceService, body: InputBody, max_tokens: int | None = None) -> OpenConversation:
        """Open the conversation, or what fits of it if the body wants that. Raises as `open_conversation`."""
        if body.truncation != "auto":
            return await open_named(service, self.conversation, NAMES)
        return await Truncation(service, self.conversation, body.instructions, self.all_items).open(max_tokens)


async def create_response(request: Request) -> Response:
    """POST: answer a conversation."""
    raw = await read_body(request)
    body = decode(raw, _decoder)
    service = models_of(request).language_model(body.model, request.scope["path"])
    service.check(None, body.stop)
    check_response_body(body)
    params = response_params(body, service.sampling_defaults)
    store, tenant = _store(request), request.scope.get(TENANT)
    terms = _terms(request, body, store)
    service.check_load(terms)
    ask, opened = await _open(request, service, body, len(raw), body.max_output_tokens)
    request_id = new_id("resp", "_")
    options = reply_options(opened, bool(body.stream), body.cache_salt, body.cache_prompt is not False)
    with contextlib.ExitStack() as stack:
        if body.background:
            stack.enter_context(store.place(tenant))
        (sample,) = service.submit(request_id, [opened.prompt_ids], params, terms, options)
        # What a batch's lines get is in the batch's file, and would only drive out what somebody may ask for.
        kept = store.keeps and body.store is not False and not stays(request.receive)
        about = _about(body, params, ask.tools, service, request_id, kept)
        new = NewResponse(service, sample, opened, about, ask.items, store, tenant)
        if body.background:
            log, headers = new.begin(stack.pop_all()), {"X-Request-Id": request_id}
            return _follow(log, -1, headers) if body.stream else as_json(about, headers)
    keep = new.keep if kept else None
    return await ResponseAnswer(service, about, sample, opened, keep).respond(request, bool(body.stream))


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def _terms(request: Request, body: ResponseBody, store: ResponseStore) -> Terms:
    """When and how urgently it is wanted. Raises ApiError for a background that may not be had."""
    terms = terms_of(request.scope, body.priority)
    if not body.background:
        return terms
    if stays(request.receive):
        raise InvalidRequest("background is not for a batch's lines, which nobody waits for anyway", "background")
    if not store.keeps:
        message = "background needs responses to be kept, and this server keeps none (max_stored_responses)"
        raise InvalidRequest(message, "background")
    if terms.tenant is not None:
        # What is in the background counts against no limit of tokens, so it takes the same right as a batch.
        terms.tenant.check_right("batch")
    return terms._replace(background=True)


async def count_input_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens: how many tokens the prompt has; nothing is generated."""
    raw = await read_body(request)
    body = decode(raw, _input_decoder)
    service = models_of(request).language_model(body.model, request.scope["path"])
    check_input_body(body)
    _, opened = await _open(request, service, body, len(raw))
    return as_json({"object": "response.input_tokens", "input_tokens": len(opened.prompt_ids)})


async def _open(
    request: Request, service: SequenceService, body: InputBody, size: int, max_tokens: int | None = None
) -> tuple[_Ask, OpenConversation]:
    """A body of that many bytes, with what was before it, opened. Raises InvalidRequest naming the field, or ApiError.

    With what was before it, it may take long: in its client's turn, and until that hangs up.
    """
    previous, store, tenant = body.previous_response_id, _store(request), request.scope.get(TENANT)
    turns = store.turns(tenant, previous) if previous is not None else []
    holders = store.holders(tenant, references_in(body.input))
    size += sum(stored.size for stored in (*turns, *holders))
    async with in_turn(request, size):
        ask = await off_loop(size, lambda: _read(service, body, turns, holders, size))
        return ask, await ask.open(service, body, max_tokens)


def _read(
    service: SequenceService,
    body: InputBody,
    turns: list[StoredResponse],
    holders: list[StoredResponse],
    size: int,
) -> _Ask:
    items = read_items(body.input, kept_items(holders))
    all_items = items_of(turns) + items
    tools = read_tools(body.tools or [])
    left, choice = read_choice(body.tool_choice, tools)
    effort = body.reasoning.effort if body.reasoning is not None else None
    conversation = Conversation(
        messages=messages_of(body.instructions, all_items),
        size=size,
        tools=left,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=_grammar(body),
        # Clients name one for every model; where there are no degrees there is none to choose.
        reasoning_effort=effort if service.model_dialect.takes_effort or effort == "none" else None,
    )
    return _Ask(items, tools, conversation, all_items)


def _grammar(body: InputBody) -> str | None:
    """What says the form of the answer; None for text."""
    form = body.text.format if body.text is not None else None
    if form is None:
        return None
    if form.type != "json_schema" and len(_given(form)) > 1:
        raise InvalidRequest(f"text.format of type {form.type!r} takes no other fields", "text.format")
    if form.type == "text":
        return None
    if form.type == "json_object":
        return grammar_of(StructuredOutputsParams(json_object=True), "text.format")
    if form.schema is None:
        raise InvalidRequest("text.format.schema is required with type 'json_schema'", "text.format.schema")
    return schema_grammar(form.schema, "text.format")


def _about(
    body: ResponseBody, params: SamplingParams, tools: list[Tool], service: SequenceService, request_id: str, kept: bool
) -> ResponseDocument:
    """What a response says from the beginning, mostly what was asked for."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    form = body.text.format if body.text is not None else None
    return {
        "id": request_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": service.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": kept,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if form is None else _given(form), "verbosity": "medium"},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [{"type": "function", **msgspec.structs.asdict(tool)} for tool in tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
        # The last, where batches look for it.
        "usage": None,
    }


def _given(form: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(form).items() if value is not None}


async def show_response(request: Request) -> Response:
    """GET /v1/responses/{id}: as it now is, or with `stream` the events of one in the background."""
    query = query_of(request, SHOW_QUERY)
    streams = query.get("stream", "false")
    if streams not in ("true", "false"):
        raise InvalidRequest(f"stream must be true or false, got {streams!r}", "stream")
    stored = _find(request)
    if streams == "false":
        if "starting_after" in query:
            raise InvalidRequest("starting_after has no meaning without stream=true; leave it out", "starting_after")
        return _answered(stored)
    after = query.get("starting_after", "-1")
    if after != "-1" and not (after.isascii() and after.isdecimal() and len(after) <= _MAX_DIGITS):
        raise InvalidRequest(f"starting_after must be the number of an event, got {after!r}", "starting_after")
    if stored.log is None:
        raise InvalidRequest("stream is for responses that were made with background; leave it out", "stream")
    return _follow(stored.log, int(after))


def _follow(log: EventLog, after: int, headers: Mapping[str, str] | None = None) -> Response:
    """The events of a response in the background; whoever hangs up leaves it alone."""
    last = after

    async def parts() -> AsyncGenerator[bytes, None]:
        nonlocal last
        async with contextlib.aclosing(log.after(after)) as chunks:
            async for chunk in chunks:
                last += chunk.count(b"\n\n")
                yield chunk

    # With the number of the last one sent, which is where to go on from.
    return PartStream("text/event-stream", parts(), lambda error: _cut_short(error, max(last, 0)), headers)


def _cut_short(error: ApiError, number: int) -> bytes:
    body = error.body
    told = {"type": "error", "code": body.code, "message": body.message, "param": body.param}
    return sse_event("error", told | {"sequence_number": number})


async def delete_response(request: Request) -> Response:
    """DELETE /v1/responses/{id}."""
    name = request.path_params["response"]
    _store(request).delete(request.scope.get(TENANT), name)
    return as_json({"id": name, "object": "response", "deleted": True})


async def cancel_response(request: Request) -> Response:
    """POST /v1/responses/{id}/cancel: one in the background; one that is over stays as it is."""
    return _answered(_store(request).cancel(request.scope.get(TENANT), request.path_params["response"]))


async def list_input_items(request: Request) -> Response:
    """GET /v1/responses/{id}/input_items: those that came with it, not those of earlier responses."""
    query = query_of(request, ITEMS_QUERY)
    limit = page_limit(query, _DEFAULT_PAGE, _MAX_PAGE)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, got {order!r}", "order")
    raw, after = _find(request).input, query.get("after")
    page = await off_loop(len(raw), lambda: _page(raw, order == "desc", after, limit))
    return Response(page, media_type="application/json")


def _page(raw: bytes, last_first: bool, after: str | None, limit: int) -> bytes:
    """So many of these items, from the one that follows `after` on. They go out as they are kept: only ids are read."""
    items, ids = _items_decoder.decode(raw), [each.id for each in _ids_decoder.decode(raw)]
    if last_first:
        items.reverse()
        ids.reverse()
    if after is not None and after not in ids:
        raise ApiError(404, f"there is no item {after!r} in its input", "after", "item_not_found")
    start = 0 if after is None else ids.index(after) + 1
    shown = ids[start : start + limit]
    answer = {
        "object": "list",
        "data": items[start : start + limit],
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
        "has_more": len(ids) > start + limit,
    }
    return msgspec.json.encode(answer)


def _find(request: Request) -> StoredResponse:
    return _store(request).get(request.scope.get(TENANT), request.path_params["response"])


def _answered(stored: StoredResponse) -> Response:
    return Response(stored.document, media_type="application/json")
