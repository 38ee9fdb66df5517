"""A page elsewhere can make a browser send requests here; they are refused, whatever the route and the way."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.routing import compile_path
from support.items_harness import Listening, counter, embedder, function, listening
from support.server_harness import Answer, FakeClient, Front

from chairlift.config.server import ServerConfig
from chairlift.server.http.origins import Origins, is_loopback
from chairlift.server.routes import ENDPOINTS, shape_of

PAGE = "https://page.example"
ELSEWHERE: dict[str, dict[str, str]] = {
    "foreign": {"Origin": PAGE},
    "another port": {"Origin": "http://localhost:9", "Host": "localhost:8000"},
    "longer": {"Origin": "http://localhost:80001", "Host": "localhost:8000"},
    "null": {"Origin": "null", "Host": "localhost:8000"},
    "null as a host": {"Origin": "null", "Host": ""},
    "cross-site": {"Sec-Fetch-Site": "cross-site"},
    "same-site": {"Sec-Fetch-Site": "same-site", "Host": "localhost:8000"},
    "own, from elsewhere": {
        "Origin": "http://localhost:8000",
        "Host": "localhost:8000",
        "Sec-Fetch-Site": "cross-site",
    },
}
AT_HOME: dict[str, dict[str, str]] = {
    "no browser": {},
    "own": {"Origin": "http://localhost:8000", "Host": "localhost:8000", "Sec-Fetch-Site": "same-origin"},
    "behind TLS": {"Origin": "https://LOCALHOST", "Host": "localhost"},
    "address bar": {"Sec-Fetch-Site": "none", "Host": "127.0.0.1:8000"},
}
CHANGING = [row for row in ENDPOINTS if row.method not in ("GET", "HEAD", "OPTIONS")]


def call(front: Front, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    return asyncio.run(front.call(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()}))


def filled(path: str) -> str:
    return re.sub(r"{\w+}", "tiny", compile_path(path)[1])


@pytest.mark.parametrize("row", CHANGING, ids=lambda row: f"{row.method} {row.path}")
def test_every_route_that_does_something_refuses_pages_elsewhere(row: Any) -> None:
    path = filled(row.path)
    for headers in ELSEWHERE.values():
        answer = call(Front(), row.method, path, {}, **headers)
        assert answer.status == 403, headers
        assert set(answer.json()) == set(json.loads(_refusal_of(path)))
        assert "allowed_origins" in answer.body.decode()
        assert "access-control-allow-origin" not in answer.headers


def _refusal_of(path: str) -> bytes:
    from chairlift.server.http.api_errors import ApiError

    return bytes(ApiError(403, "x").response(shape_of(path)).body)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_nothing_is_computed_for_pages_elsewhere(name: str) -> None:
    client = FakeClient([1])
    answer = call(Front(client), "POST", "/v1/completions", {"prompt": "hello"}, **ELSEWHERE[name])
    assert (answer.status, answer.error["code"]) == (403, "cross_origin")
    assert client.requests == []


@pytest.mark.parametrize("name", AT_HOME)
def test_own_pages_and_other_clients_are_served(name: str) -> None:
    assert call(Front(), "POST", "/v1/completions", {"prompt": "hello"}, **AT_HOME[name]).status == 200


@pytest.mark.parametrize("name", ELSEWHERE)
def test_reading_is_left_to_the_browser_which_shows_nothing(name: str) -> None:
    answer = call(Front(), "GET", "/v1/models", **ELSEWHERE[name])
    assert answer.status == 200
    assert not any(header.startswith("access-control") for header in answer.headers)
    preflight = call(Front(), "OPTIONS", "/v1/completions", Access_Control_Request_Method="POST", **ELSEWHERE[name])
    assert preflight.status == 405
    assert not any(header.startswith("access-control") for header in preflight.headers)


def test_a_page_needs_no_key_to_be_refused_nor_does_a_key_help_it() -> None:
    front = Front(api_key="k")
    assert call(front, "POST", "/v1/completions", {"prompt": "x"}, Origin=PAGE).status == 403
    assert call(front, "POST", "/v1/completions", {"prompt": "x"}, Origin=PAGE, Authorization="Bearer k").status == 403


# What pages of allowed origins see


def test_allowed_origins_are_served_and_see_the_answer() -> None:
    front = Front(allowed_origins=("https://Page.example", "http://localhost:3000"))
    for origin in (PAGE, "http://localhost:3000"):
        headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site", "Host": "127.0.0.1"}
        for stream in (False, True):
            answer = call(front, "POST", "/v1/completions", {"prompt": "x", "stream": stream}, **headers)
            assert answer.status == 200
            assert answer.headers["access-control-allow-origin"] == origin
            assert answer.headers["vary"] == "Origin"
            assert "access-control-allow-credentials" not in answer.headers
    assert call(front, "POST", "/v1/completions", {"prompt": "x"}, Origin="https://page.example.org").status == 403
    # Caches have to know that the answer to others is another.
    other = call(front, "GET", "/v1/models", Origin="https://other.example")
    assert (other.headers["vary"], "access-control-allow-origin" in other.headers) == ("Origin", False)


def test_errors_are_shown_to_allowed_origins_too() -> None:
    client = FakeClient([1])
    front = Front(client, allowed_origins=(PAGE,), api_key="k")
    key = {"Authorization": "Bearer k", "Origin": PAGE}
    assert call(front, "POST", "/v1/completions", {"prompt": "x"}, Origin=PAGE).status == 401
    client.refusal = RuntimeError("unexpected")
    answers = [
        call(front, "POST", "/v1/completions", {"prompt": "x"}, Origin=PAGE),
        call(front, "POST", "/nowhere", {}, **key),
        call(front, "POST", "/v1/completions", b"{", **key),
        call(front, "POST", "/v1/completions", {"prompt": "x"}, **key),
        call(front, "POST", "/v1/completions", {"prompt": "x", "stream": True}, **key),
    ]
    assert [answer.status for answer in answers] == [401, 404, 400, 500, 500]
    assert {answer.headers.get("access-control-allow-origin") for answer in answers} == {PAGE}


def test_a_preflight_needs_no_key_and_says_what_may_be_sent() -> None:
    front = Front(allowed_origins=(PAGE,), api_key="k")
    asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization,x-stainless-os"}
    answer = call(front, "OPTIONS", "/v1/chat/completions", Origin=PAGE, **asked)
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert {"POST", "DELETE"} <= set(answer.headers["access-control-allow-methods"].split(", "))
    assert int(answer.headers["access-control-max-age"]) > 0
    foreign = call(front, "OPTIONS", "/v1/chat/completions", Origin="https://other.example", **asked)
    assert "access-control-allow-origin" not in foreign.headers
    assert foreign.status == 401


def test_a_star_allows_all_and_asks_for_no_cookies() -> None:
    front = Front(allowed_origins=("*",))
    for headers in ELSEWHERE.values():
        answer = call(front, "POST", "/v1/completions", {"prompt": "x"}, **headers)
        assert answer.status == 200
        assert answer.headers.get("access-control-allow-origin") == headers.get("Origin")
        assert "access-control-allow-credentials" not in answer.headers


# Names


@pytest.mark.parametrize(
    "host", ["page.example", "page.example:8000", "localhost.page.example", "10.0.0.1", "[fe80::1]"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/v2", "/metrics"])
def test_on_loopback_other_names_are_refused_even_to_read(host: str, path: str) -> None:
    answer = call(Front(), "GET", path, Host=host)
    assert answer.status == 421
    assert "allowed_hosts" in answer.body.decode()
    if not path.startswith("/v2"):
        assert answer.error["code"] == "wrong_host"


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:80", "localhost.:80", "a.localhost", "127.0.0.1:8000", "127.9.9.9", "[::1]:80", ""]
)
def test_names_of_this_machine_are_answered(host: str) -> None:
    assert call(Front(), "GET", "/v1/models", Host=host).status == 200
    assert call(Front(), "GET", "/v1/models").status == 200


def test_a_host_that_is_none_is_no_reason_to_fail() -> None:
    for method, path, status in (
        ("POST", "/v1/completions", 200),
        ("POST", "/nowhere", 404),
        ("PUT", "/v1/models", 405),
        ("GET", "/v1/models/nobody", 404),
    ):
        answer = call(Front(), method, path, {"prompt": "x"}, Host="[")
        assert answer.status == status, answer.body


def test_which_names_count_follows_from_the_settings() -> None:
    def known(name: str, **settings: Any) -> bool:
        return Origins(ServerConfig(**settings)).knows(name.encode())

    assert known("Mine.example:80", allowed_hosts=("mine.example",))
    assert not known("sub.mine.example", allowed_hosts=("mine.example",))
    assert known("any.example", allowed_hosts=("*",))
    assert known("any.example", host="0.0.0.0")
    assert known("any.example", host="llm.example")
    beyond: dict[str, Any] = {"host": "0.0.0.0", "allowed_hosts": ("mine.example",)}
    assert not known("any.example", **beyond)
    # Probes and scrapers name the machine by its address.
    assert all(known(host, **beyond) for host in ("mine.example", "10.1.2.3:80", "[fe80::1]", "localhost"))


def test_what_loopback_is() -> None:
    assert all(is_loopback(host) for host in ("localhost", "a.localhost", "127.3.2.1", "::1", "::ffff:127.0.0.1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "notlocalhost", "localhost.example", ""))


# The short way, and the types of bodies, over a real connection


@pytest.fixture
def server() -> Iterator[Listening]:
    with listening(function()[0], counter()[0], embedder()[0], data_dir="") as it:
        yield it


PATH = "/v1/models/function:predict"


def post(server: Listening, headers: dict[str, str], path: str = PATH, body: bytes = b'{"instances": [2]}') -> int:
    return httpx.post(server.url + path, content=body, headers=headers).status_code


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("name", [name for name in ELSEWHERE if ELSEWHERE[name].get("Host") != ""])
def test_the_short_way_is_no_way_around(name: str, server: Listening) -> None:
    assert post(server, JSON) == 200
    assert post(server, JSON | ELSEWHERE[name]) == 403
    assert post(server, JSON | {"Host": "page.example"}) == 421


def test_the_short_way_sends_what_allowed_origins_need() -> None:
    with listening(function()[0], allowed_origins=(PAGE,), data_dir="") as server:
        answer = httpx.post(server.url + PATH, json={"instances": [2]}, headers={"Origin": PAGE})
        assert (answer.status_code, answer.json()) == (200, {"predictions": [4]})
        assert answer.headers["access-control-allow-origin"] == PAGE
        exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
        for name in ("x-request-id", "x-batch-size", "x-queue-time-ms"):
            assert name in exposed
            assert name in answer.headers


@pytest.mark.parametrize("path", [PATH, "/v1/embeddings", "/v1/batches", "/v2/rerank", "/embed"])
def test_a_body_needs_its_type(path: str, server: Listening) -> None:
    assert post(server, {}, path) == 415
    assert post(server, {"Content-Type": "text/plain"}, path) == 415
    assert post(server, {"Content-Type": "application/x-www-form-urlencoded"}, path) == 415


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/repository/index", b"{}"),
        (
            "/v2/models/function/infer",
            b'{"inputs": [{"name": "input", "shape": [1], "datatype": "BYTES", "data": ["1"]}]}',
        ),
    ],
)
def test_triton_clients_send_no_type(path: str, body: bytes, server: Listening) -> None:
    assert post(server, {}, path, body) == 200
    assert post(server, {"Content-Type": "text/plain"}, path, body) == 415
    assert post(server, {"Origin": PAGE}, path, body) == 403


def test_no_body_needs_no_type(server: Listening) -> None:
    assert post(server, {}, "/v2/repository/index", b"") == 200


def test_long_names_are_neither_remembered_nor_repeated() -> None:
    origins = Origins(ServerConfig(host="0.0.0.0"))
    assert origins.knows(b"a" * 300)
    assert not origins.knows(b"a" * 301)
    assert origins._known.cache_info().currsize == 1
    refused = call(Front(), "GET", "/v1/models", Host="a" * 60_000)
    assert refused.status == 421
    foreign = call(Front(), "POST", "/v1/completions", {}, Origin="https://" + "a" * 60_000)
    assert foreign.status == 403
    assert max(len(refused.body), len(foreign.body)) < 500
