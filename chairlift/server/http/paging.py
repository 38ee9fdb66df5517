"""What clients ask of lists, and attach to what the server keeps for them."""

from collections.abc import Collection, Mapping

from starlette.requests import Request

from chairlift.server.http.api_errors import ApiError

_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_MAX_DIGITS = 12


def query_of(request: Request, known: Collection[str]) -> dict[str, str]:
    """The query, or a 400 that names the parameter that is not known."""
    query = dict(request.query_params)
    for name in query:
        if name not in known:
            raise ApiError(400, f"unknown parameter {name!r}; there are {', '.join(known)}", name, "unknown_field")
    return query


def page_limit(query: Mapping[str, str], default: int, most: int) -> int:
    """How many entries a page is to have. Raises a 400."""
    return whole_number(query.get("limit", str(default)), most, "limit")


def whole_number(given: str, most: int, name: str) -> int:
    """The number from 1 to `most` that the parameter `name` was given as. Raises a 400."""
    is_number = given.isascii() and given.isdecimal() and len(given) <= _MAX_DIGITS
    if not is_number or not 1 <= int(given) <= most:
        raise ApiError(400, f"{name} must be between 1 and {most}, got {given!r}", name)
    return int(given)


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Refuse more of what a client attaches to its own things than OpenAI's API takes. Raises a 400."""
    if metadata is None:
        return
    if len(metadata) > _MAX_PAIRS:
        raise ApiError(400, f"metadata may have {_MAX_PAIRS} pairs, got {len(metadata)}", "metadata")
    for key, value in metadata.items():
        if len(key) > _MAX_KEY:
            raise ApiError(400, f"a key of metadata may have {_MAX_KEY} characters, got {len(key)}", "metadata")
        if len(value) > _MAX_VALUE:
            problem = f"a value of metadata may have {_MAX_VALUE} characters, got {len(value)}"
            raise ApiError(400, problem, f"metadata.{key}")
