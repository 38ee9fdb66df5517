"""What a browser may be made to send: which sites' pages may use the server (`Origin`), and by which names (`Host`).

A page of any site can have its reader's browser post to a server on the reader's machine. It can't read the answer, but
what it asked for would be done. With a name of its own that leads to this machine (DNS rebinding) it could even read.
"""

import ipaddress
from collections.abc import Awaitable, Callable
from functools import lru_cache

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.config.server import ServerConfig
from chairlift.server.http.api_errors import ApiError, Shape
from chairlift.server.http.endpoint import ShortWay
from chairlift.server.http.tenants import TENANT

_ANY = "*"
# Methods that only read: without the headers below, a browser keeps their answers from other sites' pages.
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
# What a browser says of a page elsewhere; another port of the same machine is `same-site`.
_FOREIGN = frozenset({"cross-site", "same-site"})
_PREFLIGHT = {"Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE", "Access-Control-Max-Age": "600"}
# What proxies say of those for whom they ask.
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"})
# Names have at most 253 characters; what is longer is none, and not worth remembering or repeating.
_MAX_HOST, _MAX_SHOWN = 300, 100
_EXPOSED = (
    b"Retry-After, X-Request-Id, Request-Id, X-Queue-Time-Ms, X-Inference-Time-Ms, X-Batch-Size, "
    b"Inference-Header-Content-Length"
)


class Origins:
    """The rules, as `allowed_origins` and `allowed_hosts` have them beside the server's own."""

    def __init__(self, config: ServerConfig) -> None:
        self._origins = frozenset(origin.lower() for origin in config.allowed_origins)
        hosts = frozenset(host.lower() for host in config.allowed_hosts)
        self._any_host = _ANY in hosts or not (hosts or is_loopback(config.host))
        # An address is never a name that somebody else could point here, and probes and scrapers use the machine's own.
        self._any_address = not is_loopback(config.host)
        self._hosts = hosts | {config.host.lower()}
        self._known = lru_cache(maxsize=128)(self._knows)

    def knows(self, header: bytes) -> bool:
        """Whether this `Host` is one that the server has."""
        return len(header) <= _MAX_HOST and self._known(header)

    def allows(self, origin: str) -> bool:
        """Whether pages of this origin may send anything and read the answers."""
        return _ANY in self._origins or origin.lower() in self._origins

    def refusal(self, scope: Scope) -> ApiError | None:
        """Why a request is not let in, or None if it is."""
        origin = site = host = ""
        for name, value in scope["headers"]:
            if name == b"host":
                if not self.knows(value):
                    return _wrong_host(value.decode("latin-1"))
                host = value.decode("latin-1").lower()
            elif name == b"origin":
                origin = value.decode("latin-1")
            elif name == b"sec-fetch-site":
                site = value.decode("latin-1").lower()
        if scope["method"] in _READING or self.allows(origin) or not _is_foreign(origin, site, host):
            return None
        return _cross_origin(origin or "another site")

    def _knows(self, header: bytes) -> bool:
        """Look it up. Its port may be any, as that of a forwarded one is."""
        if self._any_host:
            return True
        name = _name_of(header.decode("latin-1").lower())
        if not name or name in self._hosts or is_loopback(name):
            return True
        return self._any_address and _address(name) is not None


def check_local(scope: Scope, key: str = "a key with the right 'admin'") -> None:
    """A 403 for whoever comes from another machine, by a name that could lead here from anywhere, or by a proxy.

    It says which key would do.
    """
    address = (scope.get("client") or [""])[0]
    headers = dict(scope["headers"])
    host = _name_of(headers.get(b"host", b"").decode("latin-1").lower())
    if not is_loopback(address) or (host and not is_loopback(host)) or _FORWARDED & headers.keys():
        message = (
            "without keys this is for the server's own machine: ask there for http://127.0.0.1, or through a tunnel "
            f"(ssh -L); elsewhere it takes {key}"
        )
        raise ApiError(403, message, code="not_local", kind="permission_error")


def check_same_site(scope: Scope) -> None:
    """A 403 for pages of other sites, whichever are allowed, that bring no key: they are for whoever runs the server.

    What such pages only read they would not be shown, but it would keep those out who may watch.
    """
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    said = [headers.get(name, "") for name in (b"origin", b"sec-fetch-site", b"host")]
    if TENANT not in scope and _is_foreign(said[0], said[1].lower(), said[2].lower()):
        message = "pages of other sites may watch or change this server only with a key that has the right 'admin'"
        raise ApiError(403, message, code="cross_origin")


def _is_foreign(origin: str, site: str, host: str) -> bool:
    """Whether a page elsewhere sent a request, as its browser says; `site` and `host` in small letters."""
    own = not origin or (origin.lower().partition("://")[2] == host and bool(host))
    return not own or site in _FOREIGN


def is_loopback(host: str) -> bool:
    """Whether a name or an address can only mean this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = _address(host)
    if address is None:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _name_of(host: str) -> str:
    """A `Host` without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _wrong_host(host: str) -> ApiError:
    message = (
        f"this server does not answer to the name {host[:_MAX_SHOWN]!r}; whoever runs it can add names to allowed_hosts"
    )
    return ApiError(421, message, code="wrong_host")


def _cross_origin(origin: str) -> ApiError:
    shown = origin[:_MAX_SHOWN]
    message = f"pages of {shown} may not use this server; whoever runs it can add their origin to allowed_origins"
    return ApiError(403, message, code="cross_origin")


class CheckOrigin:
    """Lets nobody in whom the rules keep out, and tells browsers what pages of allowed origins may send."""

    def __init__(self, app: ASGIApp, origins: Origins, shape_of: Callable[[str], Shape]) -> None:
        self._app, self._origins, self._shape_of = app, origins, shape_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, answer a preflight, or let it in."""
        if scope["type"] == "http":
            if (refusal := self._origins.refusal(scope)) is not None:
                await refusal.response(self._shape_of(scope["path"]))(scope, receive, send)
                return
            if scope["method"] == "OPTIONS" and (answer := self._preflight(scope)) is not None:
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _preflight(self, scope: Scope) -> Response | None:
        headers = dict(scope["headers"])
        if b"access-control-request-method" not in headers or not self._origins.allows(_origin_of(scope)):
            return None
        wanted = headers.get(b"access-control-request-headers", b"").decode("latin-1")
        allowed = {"Access-Control-Allow-Headers": wanted} if wanted else {}
        return Response(status_code=204, headers=_PREFLIGHT | allowed)


class ShareAnswers:
    """Has browsers show answers, whatever they are, to pages of allowed origins (CORS). Cookies are never asked for."""

    def __init__(self, app: ASGIApp, origins: Origins, direct: ShortWay) -> None:
        self.direct = direct
        self._app, self._origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the headers to the answer as it begins."""
        added = [(b"vary", b"Origin")]
        if scope["type"] == "http" and (origin := _origin_of(scope)) and self._origins.allows(origin):
            added.append((b"access-control-allow-origin", origin.encode("latin-1")))
            added.append((b"access-control-expose-headers", _EXPOSED))

        def sharing(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            return send(message)

        await self._app(scope, receive, sharing)


def _origin_of(scope: Scope) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"), "")
