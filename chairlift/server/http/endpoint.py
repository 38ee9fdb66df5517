"""A row of the table of routes, and a way past them."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from chairlift.config.keys import Right
from chairlift.server.http.api_errors import Shape, openai_shape

Handler = Callable[[Request], Awaitable[Response]]


class Endpoint(NamedTuple):
    """One method of one path, and everything that is said of it anywhere.

    `bodies` are the structs of which it takes one, sent as one of the types in `media`; nothing has to be sent where a
    struct has only defaults. `query` has the types of its parameters, by name. `answer` says what comes back if all is
    well. `tasks` are what a model may do to answer here. Lines of batches may be for a `batchable` path; their model is
    the one that the path names, or else the body. Requests for a `hot` path skip most of the routing, as those
    for a path without parameters do. Keys need the `right`, if there is one. Requests are `counted` against limits, but
    for looks, by which whoever is at a limit learns why. A `local` path is for admins, and where nobody is asked for a
    key for this machine.
    """

    method: str
    path: str
    handler: Handler
    about: str
    bodies: tuple[type[msgspec.Struct], ...] = ()
    tag: str = ""
    media: tuple[str, ...] = ("application/json",)
    answer: str = "JSON"
    shape: Shape = openai_shape
    tasks: tuple[str, ...] = ()
    batchable: bool = False
    hot: bool = False
    query: Mapping[str, Any] = {}
    right: Right | None = None
    counted: bool = True
    local: bool = False


SendReply = Callable[[int, Mapping[str, str], bytes], None]


class ShortWay(Protocol):
    """Answers small requests without a task, from the event loop's own callbacks."""

    # How the paths end that are worth offering.
    end: str

    def take(self, scope: Scope, body: bytes, reply: SendReply) -> Callable[[], None] | None:
        """Answer a request, now or later, by calling `reply` with status, headers and body.

        Returns what to call if the client hangs up first, or None to leave the request to the ordinary way.
        """
        ...
