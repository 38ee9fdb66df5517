"""GET /openapi.json and GET /docs: the table of routes as OpenAPI 3.1, and a page that shows it."""

import re
from base64 import b64encode
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from importlib import resources
from typing import Any, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from chairlift import __version__
from chairlift.server.http.api_errors import Shape
from chairlift.server.http.endpoint import Endpoint

_TERMS = {
    "X-Request-Timeout-Ms": (
        "Milliseconds until the answer is of no more use.",
        {"type": "number", "exclusiveMinimum": 0},
    ),
    "X-Request-Priority": ("Lower is sooner; 0 is the default.", {"type": "integer"}),
}
_ERRORS = {"4XX": "Refused, or too soon (429).", "5XX": "The server or the model failed."}


class Docs:
    """What there is to say of a table of routes. Made when somebody asks, and kept.

    `open_paths` is how paths begin that need no key; None where no path does.
    """

    def __init__(self, table: Sequence[Endpoint], open_paths: tuple[str, ...] | None) -> None:
        self._table = table
        self._open_paths = open_paths

    @cached_property
    def openapi(self) -> bytes:
        """The document as JSON."""
        types = [kind for row in self._table for kind in (*row.bodies, *row.query.values(), _error_of(row.shape))]
        found, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
        self._schemas = dict(zip(types, found, strict=True))
        paths: dict[str, dict[str, Any]] = {}
        for row in self._table:
            paths.setdefault(compile_path(row.path)[1], {})[row.method.lower()] = self._operation(row)
        document: dict[str, Any] = {
            "openapi": "3.1.0",
            "info": {"title": "Chairlift", "version": __version__, "license": {"name": "Apache-2.0"}},
            "tags": [{"name": tag} for tag in dict.fromkeys(row.tag for row in self._table)],
            "paths": paths,
            "components": {"schemas": components},
        }
        if self._open_paths is not None:
            document["components"]["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
            document["security"] = [{"key": []}, {"x-api-key": []}]
        return msgspec.json.encode(document)

    @cached_property
    def page(self) -> tuple[bytes, dict[str, str]]:
        """The page, which holds all that it needs, and headers that allow it nothing else."""
        folder = resources.files(__package__) / "page"
        style, script = ((folder / name).read_bytes() for name in ("docs.css", "docs.js"))
        html = (folder / "docs.html").read_bytes().replace(b"/* style */", style).replace(b"/* script */", script)
        policy = {
            "default-src": "'none'",
            "style-src": _hashed(style),
            "script-src": _hashed(script),
            "connect-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        return html, {
            "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }

    def _operation(self, row: Endpoint) -> dict[str, Any]:
        _, path, parameters = compile_path(row.path)
        given = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in parameters]
        given += [{"name": name, "in": "query", "schema": self._schemas[kind]} for name, kind in row.query.items()]
        if row.tasks and row.bodies:
            given += [
                {"name": name, "in": "header", "description": about, "schema": schema}
                for name, (about, schema) in _TERMS.items()
            ]
        failed = {"application/json": {"schema": self._schemas[_error_of(row.shape)]}}
        operation: dict[str, Any] = {
            "operationId": "_".join([row.method.lower(), *re.findall(r"\w+", path)]),
            "tags": [row.tag],
            "summary": row.about,
            "responses": {"200": {"description": row.answer}}
            | {status: {"description": about, "content": failed} for status, about in _ERRORS.items()},
        }
        if given:
            operation["parameters"] = given
        if row.bodies:
            operation["requestBody"] = self._body(row)
        if self._open_paths is not None:
            if path.startswith(self._open_paths):
                operation["security"] = []
            elif row.right is not None:
                operation["description"] = f"The key needs the right `{row.right}`."
        return operation

    def _body(self, row: Endpoint) -> dict[str, Any]:
        schemas = [self._schemas[kind] for kind in row.bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        needed = any(field.required for kind in row.bodies for field in msgspec.structs.fields(kind))
        raw = {"type": "string", "format": "binary"}
        content = {media: {"schema": raw if media == "application/octet-stream" else schema} for media in row.media}
        return {"required": needed, "content": content}


def _error_of(shape: Shape) -> type[msgspec.Struct]:
    """The struct that a shape makes of an error."""
    kind: type[msgspec.Struct] = get_type_hints(shape)["return"].__args__[1]
    return kind


def _hashed(source: bytes) -> str:
    return f"'sha256-{b64encode(sha256(source).digest()).decode()}'"


async def show_openapi(request: Request) -> Response:
    """The document."""
    docs: Docs = request.app.state.docs
    return Response(docs.openapi, media_type="application/json")


async def show_page(request: Request) -> Response:
    """The page."""
    docs: Docs = request.app.state.docs
    page, headers = docs.page
    return Response(page, headers=headers, media_type="text/html")
