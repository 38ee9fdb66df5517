"""POST /v1/models/{model}/forecast: what the last minutes would have been like with other settings."""

import shlex
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import decode
from chairlift.plan.as_copied import as_flags, as_toml
from chairlift.plan.what_if import Foretold, ItemQuestion, SequenceQuestion
from chairlift.server.http.exchange import as_json, read_body, until_gone
from chairlift.server.http.origins import check_same_site
from chairlift.server.models.registry import model_in_path
from chairlift.server.twin.past_traffic import WINDOW_S, lately, past_of
from chairlift.server.twin.settings_change import BODY, given_in, other_settings
from chairlift.server.twin.twin import Twin


async def show_forecast(request: Request) -> Response:
    """The last minutes as they were, as the twin has them, and as it has them with these settings."""
    check_same_site(request.scope)
    body = decode(await read_body(request, untyped=True) or b"{}", BODY)
    service = model_in_path(request, request.path_params["model"])
    other = other_settings(service, given_in(body))
    now, tried = other.now, other.wanted
    past, changes = past_of(service), [] if other.change is None else [other.change]
    twin: Twin = request.app.state.twin
    async with until_gone(request.receive):
        question, answer = await twin.ask(lambda: lately(past, changes))
    (foretold,) = answer.changed or [None]
    return as_json(
        {
            "object": "forecast",
            "model": service.name,
            "window_s": WINDOW_S,
            "seen": _seen(question),
            "settings": {"now": now, "tried": tried},
            "measured": answer.measured,
            "now": answer.now.figures,
            "tried": _figures(foretold),
            **_to_copy(now, tried, other.unread),
        }
    )


def _figures(foretold: Foretold | None) -> Any:
    return None if foretold is None else foretold.figures


def _seen(question: SequenceQuestion | ItemQuestion) -> dict[str, int]:
    """The largest step or call in what the twin knows: beyond it goes by the cost model alone."""
    if isinstance(question, SequenceQuestion):
        most = max(step.requests for step in question.steps), max(step.tokens for step in question.steps)
        return {"steps": len(question.steps), "most_requests": most[0], "most_tokens": most[1]}
    return {"calls": len(question.calls), "most_items": max(call.items for call in question.calls)}


def _to_copy(now: dict[str, Any], tried: dict[str, Any] | None, unread: dict[str, Any]) -> dict[str, str]:
    """What to start a server with to have the settings that were tried, where they differ from those it has.

    Those that must go, lest the server refuses them, are `unread`, with their defaults: as flags these go before what
    a file or the environment says.
    """
    changed = {name: value for name, value in (tried or {}).items() if now.get(name) != value}
    lines = [f"# without {name}" if value is None else as_toml({name: value}) for name, value in changed.items()]
    lines += [f"# without {name}" for name in unread]
    return {"flags": shlex.join(as_flags(changed | unread)), "toml": "\n".join(lines)}
