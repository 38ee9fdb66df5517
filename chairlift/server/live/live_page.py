"""The live page: what a browser gets that asks for /, and the files that it is made of."""

from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from chairlift.server.http.api_errors import ApiError

_TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "txt": "text/plain"}
_SHELL = "live.html"
_SHOWN = 100
# All that the page may do; scripts and styles are the files below, and no text becomes markup.
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
_SHELL_HEADERS = _HEADERS | {"Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items())}


@cache
def _files() -> dict[str, bytes]:
    """What there is, by name."""
    folder = resources.files(__package__) / "page"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}


def wants_page(scope: Scope) -> bool:
    """Whether a browser asks for the page; whoever asks for `/` and does not take HTML gets what probes get."""
    if scope["path"] != "/" or scope["method"] not in ("GET", "HEAD"):
        return False
    return any(name == b"accept" and b"text/html" in value.lower() for name, value in scope["headers"])


def show_page() -> Response:
    """The page. It holds nothing of the server's: what it shows it asks for, with the key that it is given."""
    return Response(_files()[_SHELL], headers=_SHELL_HEADERS, media_type="text/html")


async def show_page_file(request: Request) -> Response:
    """A file of the page, or a 404."""
    name = request.path_params["file"]
    kind = _TYPES.get(name.rpartition(".")[2])
    if kind is None or name not in _files():
        raise ApiError(404, f"the live page has no file {name[:_SHOWN]!r}", code="not_found")
    return Response(_files()[name], headers=_HEADERS, media_type=kind)
