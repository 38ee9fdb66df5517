"""GET /v1/requests: where requests are and why, and what became of those that ended; /v1/timeline: a picture."""

import asyncio
import heapq
import re
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from chairlift.core.items.item import Item
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import as_json, off_loop, until_gone
from chairlift.server.http.origins import check_local, check_same_site
from chairlift.server.http.paging import page_limit, query_of
from chairlift.server.http.tenants import TENANT
from chairlift.server.models.registry import ModelService, models_of
from chairlift.server.models.request_log import EndedRequest, Viewer
from chairlift.server.models.sequence_service import Sample, SequenceService
from chairlift.server.requests import item_view, sequence_view
from chairlift.server.requests.request_view import RequestView
from chairlift.server.requests.timeline import snapshot, timeline_document
from chairlift.server.twin.past_traffic import ANSWERED
from chairlift.server.twin.twin import Twin
from chairlift.server.twin.what_if_view import what_if

_DEFAULT_PAGE, _MOST = 20, 100
LIST_QUERY = {
    "status": Literal["live", "ended"],
    "model": str,
    "limit": Annotated[int, Meta(ge=1, le=_MOST)],
}
SHOW_QUERY = {"what_if": Literal["true", "false", "1", "0"]}
_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")


async def list_requests(request: Request) -> Response:
    """The live requests of whoever asks, oldest first, or those that ended, the last one first.

    Without keys all are everybody's, and with an id of these a kept response can be read: so it is for this machine.
    """
    if TENANT not in request.scope:
        check_local(request.scope, "a key")
    query = query_of(request, LIST_QUERY)
    limit, status = page_limit(query, _DEFAULT_PAGE, _MOST), query.get("status", "live")
    if status not in ("live", "ended"):
        raise ApiError(400, f"status must be live or ended, got {status!r}", "status")
    models, viewer = models_of(request), Viewer.of(request.scope)
    named = [models.get(query["model"])] if "model" in query else models.all()
    if status == "live":
        lines = [_Placed.live(model, viewer) for model in named]
        chosen = list(islice(heapq.merge(*lines, key=lambda each: each.moment), limit + 1))
    else:
        lines = [_Placed.ended(model, viewer) for model in named]
        chosen = list(islice(heapq.merge(*lines, key=lambda each: each.moment, reverse=True), limit + 1))
    views = await _views(chosen[:limit], viewer)
    return as_json({"object": "list", "data": views, "has_more": len(chosen) > limit})


async def show_request(request: Request) -> Response:
    """A request by the id in its answer, or by that of one of its parts; 404 for one that is not the asker's."""
    request_id = request.path_params["request"]
    if not _ID.fullmatch(request_id):
        raise ApiError(400, "a request's id has up to 100 letters, digits, '-' and '_'", "request", "invalid_id")
    simulated = query_of(request, SHOW_QUERY).get("what_if", "false")
    if simulated not in ("true", "false", "1", "0"):
        raise ApiError(400, f"what_if must be true or false, got {simulated!r}", "what_if")
    viewer = Viewer.of(request.scope)
    found = [each for model in models_of(request).all() for each in _find(model, viewer, request_id)]
    if not found:
        problem = f"there is no request {request_id!r}: it may have ended more than 10 minutes ago, or be another's"
        raise ApiError(404, problem, "request", "request_not_found")
    views = await _views(found[:_MOST], viewer)
    if simulated in ("true", "1"):
        async with until_gone(request.receive):
            await _add_what_if(request.app.state.twin, viewer, found[:_MOST], views)
    return as_json({"object": "request", "id": request_id, "parts": views, "has_more": len(found) > _MOST})


async def show_timeline(request: Request) -> Response:
    """The last minute of all models, in Chrome's Trace Event Format."""
    check_same_site(request.scope)
    now, viewer = time.monotonic(), Viewer.of(request.scope)
    models = [snapshot(model, viewer, now) for model in models_of(request).all()]
    raw = await off_loop(sum(model.size for model in models), lambda: timeline_document(models, now))
    return Response(raw, media_type="application/json")


async def _add_what_if(twin: Twin, viewer: Viewer, placed: "Sequence[_Placed]", views: Sequence[RequestView]) -> None:
    """Add what would have made it faster to the part that took longest of those that were answered, if any was."""
    answered = [
        (each, view)
        for each, view in zip(placed, views, strict=True)
        if isinstance(each.each, EndedRequest) and each.each.finish_reason in ANSWERED and each.each.total_s
    ]
    if answered:
        each, view = max(answered, key=lambda pair: pair[0].each.total_s)
        view.what_if = await what_if(twin, viewer, each.model, each.each)


class _Placed:
    """A request, or a part of one, and the model that has it. `moment` is by which lists are in order."""

    def __init__(self, model: ModelService, each: Any, moment: float) -> None:
        self.model, self.each, self.moment = model, each, moment

    @classmethod
    def live(cls, model: ModelService, viewer: Viewer) -> "Iterator[_Placed]":
        """The live ones of a model, oldest first."""
        each: Iterator[Sample | Item] = (
            model.log.live_of(viewer) if isinstance(model, SequenceService) else item_view.live_items(model, viewer)
        )
        return (cls(model, one, one.arrival) for one in each)

    @classmethod
    def ended(cls, model: ModelService, viewer: Viewer) -> "Iterator[_Placed]":
        """Those of a model that have ended, the last one first."""
        return (cls(model, one, one.ended) for one in model.log.ended_of(viewer))


def _find(model: ModelService, viewer: Viewer, request_id: str) -> list[_Placed]:
    """All parts of a request that a model has, the live ones first."""
    live: Sequence[Sample | Item] = (
        model.log.find(viewer, request_id)
        if isinstance(model, SequenceService)
        else item_view.find_items(model, viewer, request_id)
    )
    ended = model.log.find_ended(viewer, request_id)
    return [*(_Placed(model, one, one.arrival) for one in live), *(_Placed(model, one, one.ended) for one in ended)]


async def _views(placed: Sequence[_Placed], viewer: Viewer) -> list[RequestView]:
    """What is told of them, in their order. Every model is asked once."""
    by_model: dict[ModelService, list[Any]] = {}
    for each in placed:
        by_model.setdefault(each.model, []).append(each.each)
    told = await asyncio.gather(*(_views_of(model, viewer, parts) for model, parts in by_model.items()))
    made = {model: iter(views) for model, views in zip(by_model, told, strict=True)}
    return [next(made[each.model]) for each in placed]


async def _views_of(model: ModelService, viewer: Viewer, parts: list[Any]) -> list[RequestView]:
    live = [each for each in parts if not isinstance(each, EndedRequest)]
    ended = [each for each in parts if isinstance(each, EndedRequest)]
    if isinstance(model, SequenceService):
        told = sequence_view.ended_views(model, ended)
        return (await sequence_view.live_views(model, viewer, live) if live else []) + told
    return (item_view.item_views(model, viewer, live) if live else []) + item_view.ended_items(model, ended)
