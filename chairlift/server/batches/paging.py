"""Query parameters of lists."""

from collections.abc import Collection, Mapping

from starlette.requests import Request

from chairlift.server.http.api_errors import ApiError


def query_of(request: Request, known: Collection[str]) -> dict[str, str]:
    """The query, or a 400 that names the parameter that is not known."""
    query = dict(request.query_params)
    for name in query:
        if name not in known:
            raise ApiError(400, f"unknown parameter {name!r}; there are {', '.join(known)}", name, "unknown_field")
    return query


def page_limit(query: Mapping[str, str], default: int, most: int) -> int:
    """How many entries a page is to have. Raises a 400."""
    given = query.get("limit", str(default))
    if not (given.isascii() and given.isdecimal()) or not 1 <= int(given[:12]) <= most:
        raise ApiError(400, f"limit must be between 1 and {most}, got {given!r}", "limit")
    return int(given)
