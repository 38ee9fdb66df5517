"""The table of routes as OpenAPI and as a page: valid, complete, and as strict as the decoders."""

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from support.page_code import in_node, needs_node
from support.server_harness import Answer, Front

from chairlift.server.http.api_errors import anthropic_shape, oip_shape, openai_shape, rerank_shape, tei_shape
from chairlift.server.http.tenants import OPEN_PATHS
from chairlift.server.items.embeddings import EmbeddingBody
from chairlift.server.openai.body_types import ChatBody
from chairlift.server.routes import ENDPOINTS, shape_of


def get(path: str, **settings: Any) -> Answer:
    answer = asyncio.run(Front(**settings).call("GET", path))
    assert answer.status == 200
    return answer


@pytest.fixture(scope="module")
def api() -> Any:
    return get("/openapi.json").json()


def operations(document: Any) -> Iterator[tuple[str, str, Any]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_it_is_valid(api: Any) -> None:
    validate(api)
    references = re.findall(r'"\$ref":"([^"]*)"', json.dumps(api, separators=(",", ":")))
    assert references
    for reference in references:
        place = api
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


def test_it_has_every_route_and_no_other(api: Any) -> None:
    table = [(row.method, re.sub(r":path(?=})", "", row.path)) for row in ENDPOINTS]
    assert sorted((method, path) for method, path, _ in operations(api)) == sorted(table)
    assert len(set(table)) == len(table) == len(list(operations(api)))
    ids = [operation["operationId"] for _, _, operation in operations(api)]
    assert len(set(ids)) == len(ids)


def test_every_route_of_the_document_is_served(api: Any) -> None:
    async def go() -> None:
        front = Front(data_dir="")
        for method, path, operation in operations(api):
            if path not in ("/docs", "/openapi.json"):
                names = dict.fromkeys(("name", "file", "batch", "model", "request", "response"), "x")
                answer = await front.call(method, path.format(version="1", **names))
                unknown = answer.status == 404 and b"there is no /" in answer.body
                assert not unknown, (method, path)
                assert answer.status != 405, (method, path)
                if answer.status >= 400 and b"status" not in answer.body:
                    (content,) = operation["responses"][f"{answer.status // 100}XX"]["content"].values()
                    schema = content["schema"] | {"components": api["components"]}
                    Draft202012Validator(schema).validate(answer.json())

    asyncio.run(go())


def test_bodies_are_required_where_something_is() -> None:
    found = get("/openapi.json").json()["paths"]
    assert found["/v1/chat/completions"]["post"]["requestBody"]["required"]
    assert not found["/v2/repository/index"]["post"]["requestBody"]["required"]
    assert set(found["/v2/models/{name}/infer"]["post"]["requestBody"]["content"]) == {
        "application/json",
        "application/octet-stream",
    }
    assert set(found["/v1/files"]["post"]["requestBody"]["content"]) == {"multipart/form-data"}
    assert found["/v1/files/{file}"]["delete"]["parameters"] == [
        {"name": "file", "in": "path", "required": True, "schema": {"type": "string"}}
    ]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatBody, {"messages": [{"role": "user", "content": "hi"}], "n": 2, "stop": ["a"], "logit_bias": {"5": 1.5}}),
        (ChatBody, {"messages": [], "stream_options": {"include_usage": True}, "temperature": None}),
        (ChatBody, {}),
        (ChatBody, {"messages": "hi"}),
        (ChatBody, {"messages": ["hi"]}),
        (ChatBody, {"messages": [], "n": 2**31}),
        (ChatBody, {"messages": [], "n": -(2**31) - 1}),
        (ChatBody, {"messages": [], "n": 1.5}),
        (ChatBody, {"messages": [], "n": "1"}),
        (ChatBody, {"messages": [], "stream": 1}),
        (ChatBody, {"messages": [], "stop": 5}),
        (ChatBody, {"messages": [], "unknown": 1}),
        (ChatBody, {"messages": [], "stream_options": {"unknown": 1}}),
        (ChatBody, []),
        (EmbeddingBody, {"input": ["a", "b"], "encoding_format": "base64"}),
        (EmbeddingBody, {"input": [1, 2]}),
        (EmbeddingBody, {"input": "a", "encoding_format": "hex"}),
        (EmbeddingBody, {"input": {}}),
        (EmbeddingBody, {"input": "a", "dimensions": 2**40}),
    ],
)
def test_schemas_refuse_what_decoders_refuse(kind: type[msgspec.Struct], body: Any, api: Any) -> None:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}", "components": api["components"]}
    try:
        msgspec.json.decode(json.dumps(body), type=kind)
        taken = True
    except msgspec.ValidationError:
        taken = False
    assert Draft202012Validator(schema).is_valid(body) is taken


def test_no_body_may_have_fields_that_are_unknown(api: Any) -> None:
    body = {"no_such_field": 1}
    for kind in {kind for row in ENDPOINTS for kind in row.bodies}:
        with pytest.raises(msgspec.ValidationError, match="unknown field `no_such_field`"):
            msgspec.convert(body, kind)
        schema = {"$ref": f"#/components/schemas/{kind.__name__}", "components": api["components"]}
        refused = {error.validator for error in Draft202012Validator(schema).iter_errors(body)}
        assert "additionalProperties" in refused, kind


def test_what_needs_the_key(api: Any) -> None:
    assert "security" not in api
    assert "securitySchemes" not in api["components"]
    asked = get("/openapi.json", api_key="secret").json()
    validate(asked)
    assert asked["security"] == [{"key": []}, {"x-api-key": []}]
    assert "secret" not in json.dumps(asked)
    for _, path, operation in operations(asked):
        assert ("security" in operation) is path.startswith(OPEN_PATHS)


def test_it_is_made_once_and_small(api: Any) -> None:
    async def go() -> None:
        front = Front()
        first, second = [await front.call("GET", path) for path in ("/openapi.json", "/openapi.json")]
        assert first.body == second.body
        assert len(first.body) < 100_000
        assert first.headers["content-type"] == "application/json"

    asyncio.run(go())


class Elements(HTMLParser):
    """The text of a page's styles and scripts, and every attribute in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.inner: dict[str, str] = {}
        self.given: list[tuple[str, str | None]] = []
        self._tag = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.given += attrs

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag in ("style", "script"):
            self.inner[self._tag] = self.inner.get(self._tag, "") + data


def test_the_page_runs_nothing_but_its_own() -> None:
    answer = get("/docs")
    page = Elements(answer.body.decode())
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    for tag, source in page.inner.items():
        assert policy[f"{tag}-src"] == f"'sha256-{b64encode(sha256(source.encode()).digest()).decode()}'"
        assert len(source) > 500
    assert set(page.inner) == {"style", "script"}
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert [value for name, value in page.given if name in ("src", "href")] == ["openapi.json"]
    assert not any(name == "style" or name.startswith("on") for name, _ in page.given)
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in page.inner["script"]
    assert answer.headers["content-type"].startswith("text/html")


SENDING = """
globalThis.location = { origin: "" };
const parts = operation("GET", "/v1/live", { responses: {} });
const [go, box] = [parts.find((each) => each.textContent === "Send"), parts.at(-1)];
const answered = (source) => ({ status: 200, headers: new Headers(), body: new ReadableStream(source) });
const text = new TextEncoder();
"""


def of_docs(script: str, folder: Path) -> Any:
    """What a script logs that follows the page's own."""
    source = (resources.files("chairlift.server.http") / "page" / "docs.js").read_text()
    return in_node(source + SENDING + script, folder)


@needs_node
def test_an_answer_without_end_is_shown_as_it_comes_and_left(tmp_path: Path) -> None:
    first, shown, cancelled = of_docs(
        """
        let cancelled = false, first = null;
        const pull = (controller) => {
          first ??= box.children.length ? box.children.join("") : null;
          controller.enqueue(text.encode("x".repeat(3000)));
        };
        globalThis.fetch = async () => answered({ pull, cancel: () => { cancelled = true; } });
        await go.onclick();
        console.log(JSON.stringify([first.length, box.children.join(""), cancelled]));
        """,
        tmp_path,
    )
    assert 0 < first < 20000, "before the end"
    assert shown == "x" * 20000 + "…"
    assert cancelled


@needs_node
def test_what_is_sent_again_gives_up_what_was_sent_before(tmp_path: Path) -> None:
    given_up, shown = of_docs(
        """
        const signals = [];
        globalThis.fetch = (path, { signal }) => {
          signals.push(signal);
          if (signals.length > 1) return answered({ start: (controller) => {
            controller.enqueue(text.encode("hello"));
            controller.close();
          } });
          return new Promise((_, fail) => signal.addEventListener("abort", () => fail(signal.reason)));
        };
        await Promise.all([go.onclick(), go.onclick()]);
        console.log(JSON.stringify([signals.map((each) => each.aborted), box.textContent + box.children.join("")]));
        """,
        tmp_path,
    )
    assert given_up == [True, False]
    assert shown == "200\nhello"


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/chat/completions", openai_shape),
        ("/nothing", openai_shape),
        ("/v1/models/a/b", openai_shape),
        ("/v1/models/a/b:predict", oip_shape),
        ("/v2", oip_shape),
        ("/v2/models/a/infer", oip_shape),
        ("/v2/nothing", oip_shape),
        ("/v2/rerank", rerank_shape),
        ("/rerank", rerank_shape),
        ("/embed", tei_shape),
        ("/info", tei_shape),
        ("/v1/responses/x/cancel", openai_shape),
        ("/v1/messages/count_tokens", anthropic_shape),
        ("/v1/messages/batches", anthropic_shape),
    ],
)
def test_errors_have_the_shape_of_their_path(path: str, shape: Any) -> None:
    assert shape_of(path) is shape
