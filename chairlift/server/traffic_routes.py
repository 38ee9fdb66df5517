"""GET /v1/traffic: what came to a model in the last minutes, and the steps or calls that it took."""

import asyncio
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.plan.seen_traffic import SeenItems, SeenSequences
from chairlift.plan.what_if import ItemQuestion, SequenceQuestion
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.origins import check_same_site
from chairlift.server.http.paging import query_of, whole_number
from chairlift.server.models.registry import models_of
from chairlift.server.twin.past_traffic import LEAST_ANSWERED, WINDOW_S, all_arrivals, lately, past_of

TRAFFIC_QUERY = {"model": str, "least_answered": Annotated[int, msgspec.Meta(ge=1, le=LEAST_ANSWERED)]}


async def show_traffic(request: Request) -> Response:
    """The requests of the last minutes to a `model`, without texts, and its steps or calls, for `chairlift plan`.

    As many must have been answered as for a forecast, if the query does not say that fewer will do. `came` counts all
    that came meanwhile, of which those that were refused are listed as a sample, or not at all.
    """
    check_same_site(request.scope)
    query = query_of(request, TRAFFIC_QUERY)
    name, least = (
        query.get("model"),
        whole_number(query.get("least_answered", str(LEAST_ANSWERED)), LEAST_ANSWERED, "least_answered"),
    )
    if not name:
        raise ApiError(400, "say whose traffic: ?model=NAME", "model")
    service = models_of(request).get(name)
    past = past_of(service)

    def made() -> bytes:
        question = lately(past, [], least)
        told: dict[str, Any] = {"object": "traffic", "model": service.name, "window_s": WINDOW_S}
        return msgspec.json.encode(told | {"came": all_arrivals(past, question.requests), "seen": _told(question)})

    return Response(await asyncio.to_thread(made), media_type="application/json")


def _told(question: SequenceQuestion | ItemQuestion) -> SeenSequences | SeenItems:
    requests = question.requests
    if isinstance(question, ItemQuestion):
        return SeenItems(requests=requests, calls=question.calls, sized=question.sized)
    return SeenSequences(requests=requests, profile=question.profile, steps=question.steps, cost=question.cost)
