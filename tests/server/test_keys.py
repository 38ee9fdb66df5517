"""Who may come in: keys, their rights and their limits, whatever the protocol."""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.items_harness import Listening, classifier, embedder, function, listening, reranker
from support.key_files import bearer, key_of, write_keys
from support.server_harness import Answer, FakeClient, Front

from chairlift.config.keys import RIGHTS, hash_of
from chairlift.core.finished import FinishReason
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.errors import ConfigError
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.local_client import AppClient
from chairlift.server.routes import ENDPOINTS


def run(go: Any) -> None:
    asyncio.run(go())


async def chat(it: Front, headers: dict[str, str]) -> Answer:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return await it.post("/v1/chat/completions", body, headers=headers)


async def complete(it: Front, headers: dict[str, str], **body: Any) -> Answer:
    return await it.post("/v1/completions", body, headers=headers)


def front(path: Path, client: FakeClient | None = None, **entries: dict[str, Any]) -> Front:
    keys = write_keys(path / "keys.toml", **entries)
    return Front(client, api_keys=str(keys), data_dir=str(path / "data"))


def test_a_key_opens_whatever_it_is_sent_as(tmp_path: Path) -> None:
    async def go() -> None:
        it = front(tmp_path, alice={}, bob={})
        for headers in ({}, bearer("carol"), {"authorization": key_of("alice")}, {"authorization": "Basic YTpi"}):
            refused = await chat(it, headers)
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
        for headers in (bearer("alice"), bearer("bob"), {"authorization": f"bearer {key_of('alice')}"}):
            assert (await chat(it, headers)).status == 200

    run(go)


def test_probes_and_docs_need_no_key_and_metrics_do(tmp_path: Path) -> None:
    async def go() -> None:
        it = front(tmp_path, alice={"rights": ["metrics"]}, bob={"rights": ["infer"]})
        for path in ("/health", "/health/live", "/v2/health/ready", "/docs", "/openapi.json"):
            assert (await it.call("GET", path)).status == 200
        assert (await it.call("GET", "/metrics")).status == 401
        assert (await it.call("GET", "/metrics", headers=bearer("bob"))).error["code"] == "missing_right"
        assert (await it.call("GET", "/metrics", headers=bearer("alice"))).status == 200
        # Any key will do to look at what is served.
        assert (await it.call("GET", "/v1/models", headers=bearer("alice"))).status == 200
        document = (await it.call("GET", "/openapi.json")).json()["paths"]
        assert document["/health"]["get"]["security"] == []
        assert "security" not in document["/metrics"]["get"]
        assert document["/v1/batches"]["post"]["description"] == "The key needs the right `batch`."

    run(go)


def test_the_one_key_is_still_there_and_may_do_all(tmp_path: Path) -> None:
    async def go() -> None:
        path = write_keys(tmp_path / "keys.toml", alice={"rights": []})
        it = Front(api_keys=str(path), api_key="master")
        master = {"authorization": "Bearer master"}
        assert (await chat(it, master)).status == 200
        assert (await chat(it, bearer("alice"))).status == 403
        write_keys(path, bob={})
        await it.keys.look_again()
        assert (await chat(it, master)).status == 200

    run(go)


@pytest.mark.parametrize("row", ENDPOINTS, ids=lambda row: f"{row.method} {row.path}")
def test_every_route_asks_for_its_right_and_no_other(row: Any, tmp_path: Path) -> None:
    """403 without the right, and something else with it alone; whatever computes asks for one."""
    assert not row.bodies or row.right is not None or row.path.endswith("/index")

    async def go() -> None:
        others = [right for right in RIGHTS if right != row.right]
        it = front(tmp_path, all_others={"rights": others}, only={"rights": [row.right] if row.right else []})
        path = row.path
        for name, value in (("name", "tiny"), ("model", "tiny"), ("version", "1"), ("file", "f"), ("batch", "b")):
            path = path.replace(f"{{{name}:path}}", value).replace(f"{{{name}}}", value)
        if row.path in ("/v1/live", "/v1/recording"):
            it.gone.set()  # these have no end of their own
        refused = await it.call(row.method, path, headers=bearer("all_others"))
        assert (refused.status == 403) == (row.right is not None), refused.body
        if row.right is not None:
            assert f"the right '{row.right}'" in refused.body.decode()
        assert (await it.call(row.method, path, headers=bearer("only"))).status not in (401, 403)

    run(go)


def test_requests_a_minute(tmp_path: Path) -> None:
    async def go() -> None:
        it = front(tmp_path, alice={"requests_per_minute": 2}, bob={})
        assert [(await chat(it, bearer("alice"))).status for _ in range(3)] == [200, 200, 429]
        refused = await chat(it, bearer("alice"))
        assert refused.error["code"] == "requests_per_minute"
        assert "2 requests per minute (requests_per_minute)" in refused.error["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert len(it.client.requests) == 2
        assert (await chat(it, bearer("bob"))).status == 200

    run(go)


def test_tokens_a_minute_are_those_read_and_those_generated(tmp_path: Path) -> None:
    async def go() -> None:
        it = front(tmp_path, alice={"tokens_per_minute": 100})
        prompt = list(range(1, 61))
        first = await complete(it, bearer("alice"), prompt=prompt, max_tokens=4)
        assert first.status == 200
        # 36 are left, so another such prompt has to wait, and a short one has not.
        refused = await complete(it, bearer("alice"), prompt=prompt, max_tokens=4)
        assert (refused.status, refused.error["code"]) == (429, "tokens_per_minute")
        # A minute brings 100, so the 24 that are missing take 15 s.
        assert 10 <= int(refused.headers["retry-after"]) <= 15
        second = await complete(it, bearer("alice"), prompt=[1, 2], max_tokens=60)
        assert second.status == 200
        # What was generated has overdrawn the account.
        assert (await complete(it, bearer("alice"), prompt=[1])).status == 429

    run(go)


def test_a_prompt_counts_once_and_every_sample_for_itself(tmp_path: Path) -> None:
    async def go() -> None:
        it = front(tmp_path, alice={"tokens_per_minute": 1000})
        assert (await complete(it, bearer("alice"), prompt=[1] * 100, n=3, max_tokens=100)).status == 200
        # 1000 - 100 - 300 are left.
        within, beyond = [1] * 199, [1] * 199
        refused = await complete(it, bearer("alice"), prompt=[within, beyond, [1] * 199, [1] * 15], max_tokens=1)
        assert refused.status == 429
        allowed = await complete(it, bearer("alice"), prompt=[within, beyond, [1] * 199], max_tokens=1)
        assert allowed.status == 200

    run(go)


def test_what_was_refused_costs_no_tokens(tmp_path: Path) -> None:
    async def go() -> None:
        it = front(tmp_path, alice={"tokens_per_minute": 100})
        for _ in range(5):
            too_long = await complete(it, bearer("alice"), prompt=[1] * 90, max_tokens=1000)
            assert too_long.status == 400
        assert (await complete(it, bearer("alice"), prompt=[1] * 90, max_tokens=1)).status == 200

    run(go)


async def until_sent(it: Front, number: int) -> None:
    while len(it.client.requests) < number:
        await asyncio.sleep(0)


def test_requests_at_once_until_their_last_token(tmp_path: Path) -> None:
    async def go() -> None:
        it = front(tmp_path, FakeClient(manual=True), alice={"requests_at_once": 2})
        calls = [
            asyncio.create_task(complete(it, bearer("alice"), prompt="hello", stream=stream))
            for stream in (False, True)
        ]
        await until_sent(it, 2)
        refused = await complete(it, bearer("alice"), prompt="hello")
        assert (refused.status, refused.error["code"]) == (429, "requests_at_once")
        assert int(refused.headers["retry-after"]) >= 1
        # Clients that hang up give their places back.
        it.gone.set()
        assert [answer.status for answer in await asyncio.gather(*calls)] == [499, 499]
        it.gone.clear()
        again = asyncio.create_task(complete(it, bearer("alice"), prompt="hello"))
        await until_sent(it, 3)
        again.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await again
        # So do those that fail, or are cut off.
        for _ in range(5):
            assert (await complete(it, bearer("alice"), prompt=[])).status == 400
        last = [asyncio.create_task(complete(it, bearer("alice"), prompt="hello")) for _ in range(2)]
        await until_sent(it, 5)
        it.gone.set()
        await asyncio.gather(*last)

    run(go)


def test_every_sample_of_every_prompt_counts_among_the_requests_at_once(tmp_path: Path) -> None:
    async def go() -> None:
        it = front(tmp_path, FakeClient(manual=True), alice={"requests_at_once": 4})
        (alice,) = it.keys.all()

        async def until_left(number: int) -> None:
            while alice.left()["requests_at_once"] != (number, 4):
                await asyncio.sleep(0)

        for body in ({"prompt": ["a", "b", "c"], "n": 2}, {"prompt": "a", "n": 1, "best_of": 6}):
            never = await complete(it, bearer("alice"), **body)
            assert (never.status, never.error["code"]) == (400, "requests_at_once")
            assert "6 sequences" in never.error["message"]
            assert "the 4 that this key may have at once" in never.error["message"]
            assert "each sample (n, best_of) of each prompt counts as a request" in never.error["message"]
            assert "ask for fewer samples, or send several requests" in never.error["message"]
        calls = [asyncio.create_task(complete(it, bearer("alice"), prompt=["a", "b"]))]
        await until_sent(it, 2)
        later = await complete(it, bearer("alice"), prompt="a", n=3)
        assert (later.status, later.error["code"]) == (429, "requests_at_once")
        assert "this is 3 sequences, and each sample (n, best_of) of each prompt counts" in later.error["message"]
        assert int(later.headers["retry-after"]) >= 1
        calls.append(asyncio.create_task(complete(it, bearer("alice"), prompt="a", n=2, stream=True)))
        await until_sent(it, 4)
        assert (await complete(it, bearer("alice"), prompt="a")).status == 429
        # A sample that has ended leaves its place, though its request goes on.
        ended = it.client.streams[1]
        ended.push(SequenceUpdate(ended.request.id, [70], FinishReason.LENGTH))
        await until_left(1)
        calls.append(asyncio.create_task(complete(it, bearer("alice"), prompt="a")))
        await until_sent(it, 5)
        it.gone.set()
        assert [answer.status for answer in await asyncio.gather(*calls)] == [499] * 3
        await until_left(4)

    asyncio.run(asyncio.wait_for(go(), 20))


def test_sequences_in_the_background_count_against_no_limit(tmp_path: Path) -> None:
    async def go() -> None:
        it = front(tmp_path, alice={"requests_at_once": 2})
        (alice,) = it.keys.all()
        lines = AppClient(it.app, background=True).of(alice)
        answer = await lines.post("/v1/completions", b'{"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 1}')
        assert answer.status == 200
        assert alice.left()["requests_at_once"] == (2, 2)

    run(go)


def test_a_key_without_a_range_does_not_go_before_those_that_ask_for_nothing(tmp_path: Path) -> None:
    async def go() -> None:
        path = write_keys(tmp_path / "keys.toml", alice={})
        it = Front(api_keys=str(path), api_key="master")
        for priority in (-1, -(2**31)):
            refused = await complete(it, bearer("alice"), prompt="hello", priority=priority)
            assert (refused.status, refused.error["code"]) == (403, "priority_not_allowed")
            assert "from 0 to 2147483647" in refused.error["message"]
        assert it.keys.named("gone").check_priority(5) == 5
        with pytest.raises(ApiError):
            it.keys.named("gone").check_priority(-1)
        master = {"authorization": "Bearer master"}
        for who, headers, priority in (
            (it, bearer("alice"), 2**31 - 1),
            (it, master, -(2**31)),
            (Front(), {}, -(2**31)),
        ):
            answer = await complete(who, headers, prompt="hello", priority=priority, max_tokens=1)
            assert answer.status == 200, answer.body
            assert who.client.requests[-1].priority == priority

    run(go)


@pytest.mark.parametrize(
    ("priorities", "asked", "got"),
    [
        ([0, 10], 10, 10),
        ([0, 10], 11, None),
        ([0, 10], -1, None),
        ([0, 10], None, 0),
        ([5, 10], None, 5),
        ([5, 10], 0, 5),
        ([-10, -5], None, -5),
        ([5, 10], 4, None),
    ],
)
def test_priorities(priorities: list[int], asked: int | None, got: int | None, tmp_path: Path) -> None:
    async def go() -> None:
        it = front(tmp_path, alice={"priorities": priorities})
        headers = bearer("alice") | ({} if asked is None else {"x-request-priority": str(asked)})
        answers = [
            await complete(it, bearer("alice"), prompt="hello", priority=asked, max_tokens=1),
            await complete(it, headers, prompt="hello", max_tokens=1),
        ]
        for answer in answers:
            if got is None:
                assert (answer.status, answer.error["code"], answer.error["param"]) == (
                    403,
                    "priority_not_allowed",
                    "priority",
                )
                assert f"from {priorities[0]} to {priorities[1]}" in answer.error["message"]
            else:
                assert answer.status == 200
        assert [request.priority for request in it.client.requests] == ([] if got is None else [got, got])

    run(go)


# The file, while the server runs


def test_a_new_file_goes_for_the_next_request(tmp_path: Path) -> None:
    async def go() -> None:
        path = tmp_path / "keys.toml"
        it = front(tmp_path, alice={"requests_per_minute": 2}, bob={})
        assert (await chat(it, bearer("alice"))).status == 200
        write_keys(path, alice={"requests_per_minute": 3}, carol={"rights": []})
        await it.keys.look_again()
        assert (await chat(it, bearer("bob"))).status == 401
        assert (await chat(it, bearer("carol"))).status == 403
        # Another limit, of which one is spent already.
        assert [(await chat(it, bearer("alice"))).status for _ in range(3)] == [200, 200, 429]
        write_keys(path, alice={"sha256": [hash_of("new"), hash_of(key_of("alice"))]})
        await it.keys.look_again()
        assert (await chat(it, {"authorization": "Bearer new"})).status == 200
        assert (await chat(it, bearer("alice"))).status == 200

    run(go)


@pytest.mark.parametrize("text", ["", "[keys.alice", "[keys.alice]\nsha256 = []\nrights = []", None])
def test_a_broken_file_changes_nothing_and_is_logged(
    text: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        path = tmp_path / "keys.toml"
        it = front(tmp_path, alice={})
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        for _ in range(3):
            await it.keys.look_again()
        assert (await chat(it, bearer("alice"))).status == 200
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert str(path) in caplog.text
        assert "what was read before stays in force" in caplog.text
        write_keys(path, bob={})
        await it.keys.look_again()
        assert (await chat(it, bearer("bob"))).status == 200
        assert (await chat(it, bearer("alice"))).status == 401

    run(go)


def test_a_file_that_could_not_be_read_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reads: list[Path] = []
    read = Path.read_text

    def full(path: Path, *given: Any) -> str:
        reads.append(path)
        if len(reads) < 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return read(path, *given)

    async def go() -> None:
        it = front(tmp_path, alice={})
        write_keys(tmp_path / "keys.toml", bob={})
        monkeypatch.setattr(Path, "read_text", full)
        for _ in range(5):
            await it.keys.look_again()
        assert len(reads) == 3, "and not once more after that"
        assert (await chat(it, bearer("bob"))).status == 200
        assert [record.levelname for record in caplog.records if record.levelname == "ERROR"] == ["ERROR"]
        assert "Too many open files" in caplog.text

    run(go)


def test_no_state_is_kept_of_keys_that_have_gone(tmp_path: Path) -> None:
    async def go() -> None:
        it = front(tmp_path, alice={})
        for number in range(50):
            write_keys(tmp_path / "keys.toml", **{f"t{number}": {}})
            await it.keys.look_again()
            assert (await chat(it, bearer(f"t{number}"))).status == 200
            assert (await chat(it, bearer("nobody"))).status == 401
        assert len(it.keys._by_name) == len(it.keys._by_hash) == 1

    run(go)


def test_a_broken_file_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml can't be read"):
        Front(api_keys=str(tmp_path / "none.toml"))


# Model control


LOAD = "/v2/repository/models/tiny/load"


def test_nobody_loads_models_unless_it_is_asked_for(tmp_path: Path) -> None:
    async def go() -> None:
        off = await Front().call("POST", LOAD)
        assert off.status == 403
        assert "model_control" in off.json()["error"]
        # These get as far as the registry, which has no loader here.
        for allowed, headers in (
            (Front(model_control=True), {}),
            (Front(api_key="k"), {"authorization": "Bearer k"}),
            (front(tmp_path, alice={"rights": ["admin"]}), bearer("alice")),
        ):
            answer = await allowed.call("POST", LOAD, headers=headers)
            assert (answer.status, "loads and unloads no models" in answer.json()["error"]) == (400, True)
        path = write_keys(tmp_path / "keys.toml", alice={"rights": ["infer"]})
        keyed = Front(api_keys=str(path), model_control=True)
        assert (await keyed.call("POST", LOAD, headers=bearer("alice"))).status == 403
        assert (await Front().call("POST", "/v2/repository/index")).status == 200

    run(go)


# Models that answer in one call


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Listening]:
    path = write_keys(
        tmp_path / "keys.toml",
        alice={},
        few={"requests_per_minute": 3},
        short={"tokens_per_minute": 10},
        urgent={"priorities": [-5, 0]},
        nothing={"rights": []},
        one={"requests_at_once": 1},
    )
    with listening(embedder()[0], reranker()[0], classifier()[0], function()[0], api_keys=str(path)) as it:
        yield it


INSTANCE = {"instances": [2]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "fox"},
    "/embed": {"inputs": "fox"},
    "/predict": {"inputs": "fox", "model": "classifier"},
    "/rerank": {"query": "fox", "texts": ["dog"]},
    "/v1/rerank": {"query": "fox", "documents": ["dog"]},
    "/v2/rerank": {"query": "fox", "documents": ["dog"]},
    "/v1/models/function:predict": INSTANCE,
    "/v2/models/function/infer": {"inputs": [{"name": "input", "shape": [1], "datatype": "BYTES", "data": ["2"]}]},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_protocol_asks_for_the_key(path: str, served: Listening) -> None:
    def status(name: str | None) -> int:
        headers = bearer(name) if name else {}
        return httpx.post(f"{served.url}{path}", json=BODIES[path], headers=headers).status_code

    assert [status(name) for name in (None, "stranger", "nothing", "alice")] == [401, 401, 403, 200]
    assert [status("few") for _ in range(4)] == [200, 200, 200, 429]


@pytest.mark.parametrize("path", [path for path in BODIES if "function" not in path])
def test_texts_are_charged_by_their_tokens(path: str, served: Listening) -> None:
    answers = [httpx.post(f"{served.url}{path}", json=BODIES[path], headers=bearer("short")) for _ in range(6)]
    statuses = [answer.status_code for answer in answers]
    assert statuses[0] == 200
    assert statuses[-1] == 429
    assert "tokens_per_minute" in answers[-1].text
    assert int(answers[-1].headers["retry-after"]) >= 1


def test_priorities_of_items(served: Listening) -> None:
    for path in ("/v1/embeddings", "/v1/models/function:predict"):
        for priority, status in ((-5, 200), (-6, 403), (1, 403)):
            headers = bearer("urgent") | {"x-request-priority": str(priority)}
            assert httpx.post(f"{served.url}{path}", json=BODIES[path], headers=headers).status_code == status


def test_the_short_way_gives_places_back(served: Listening) -> None:
    """Requests in one piece are answered without a task: those that fail, and those whose clients left, have ended."""
    path = "/v1/models/function:predict"
    with httpx.Client(base_url=served.url, headers=bearer("one")) as client:
        for body in (INSTANCE, {"instances": [None]}, {"instances": []}, INSTANCE):
            assert client.post(path, json=body).status_code in (200, 400, 500)
        dispatcher: Any = served.models.get("function").dispatcher  # type: ignore[union-attr]
        dispatcher.held = True
        raw = b'{"instances": [1]}'
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {key_of('one')}\r\nContent-Length: {len(raw)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as one:
            one.sendall(head.encode() + raw)
            while not dispatcher.waiting:
                pass
            refused = client.post(path, json=INSTANCE)
            assert (refused.status_code, "requests_at_once" in refused.text) == (429, True)
        while dispatcher.waiting:
            pass
        dispatcher.held = False
        answer = client.post(path, json=INSTANCE)
        while answer.status_code == 429:
            answer = client.post(path, json=INSTANCE)
        assert answer.status_code == 200
