"""Files, batches and cached prefixes belong to whoever's key they came with."""

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.batch_harness import FUNCTION, Client, check_doubled, doubling
from support.items_harness import Listening, function, listening
from support.key_files import bearer, key_of, write_keys
from support.server_harness import Answer, FakeClient, Front, run, until

from chairlift.jobs.store import Job, Store, StoredFile
from chairlift.server.batches import service as batch_service
from chairlift.server.batches.data_folder import has_room

PEOPLE: dict[str, dict[str, Any]] = {
    "alice": {"rights": ["batch"]},
    "bob": {"rights": ["infer", "batch"]},
    "root": {"rights": ["batch", "admin"]},
}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Listening]:
    path = write_keys(tmp_path / "keys.toml", **PEOPLE)
    with listening(function()[0], api_keys=str(path), api_key="master", data_dir=str(tmp_path / "data")) as it:
        yield it


def client(served: Listening, name: str) -> Client:
    return Client(served.url, "master" if name == "master" else key_of(name))


def ids(api: Client, what: str) -> list[str]:
    return [each["id"] for each in api.http.get(f"/{what}").json()["data"]]


def test_what_is_anothers_is_not_there(served: Listening) -> None:
    alice, bob = client(served, "alice"), client(served, "bob")
    batch = alice.run(doubling(10))
    check_doubled(alice.content(batch["output_file_id"]), range(10))
    files = [batch["input_file_id"], batch["output_file_id"]]
    for file_id in files:
        nothing = bob.http.get("/files/file-000000000000000000000000")
        for answer in (
            bob.http.get(f"/files/{file_id}"),
            bob.http.get(f"/files/{file_id}/content"),
            bob.http.delete(f"/files/{file_id}"),
            bob.http.get("/files", params={"after": file_id}),
            bob.create(file_id),
        ):
            assert answer.status_code == nothing.status_code == 404
            error = answer.json()["error"]
            assert error["message"] == f"there is no file {file_id!r}"
            assert error["code"] == nothing.json()["error"]["code"]
    for answer in (
        bob.http.get(f"/batches/{batch['id']}"),
        bob.http.post(f"/batches/{batch['id']}/cancel"),
        bob.http.get("/batches", params={"after": batch["id"]}),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "batch_not_found")
    assert ids(bob, "files") == ids(bob, "batches") == []
    assert sorted(ids(alice, "files")) == sorted(files)
    assert ids(alice, "batches") == [batch["id"]]


@pytest.mark.parametrize("name", ["root", "master"])
def test_an_admin_sees_what_is_anybodys(name: str, served: Listening) -> None:
    alice, bob, admin = client(served, "alice"), client(served, "bob"), client(served, name)
    first, second = alice.run(doubling(3)), bob.run(doubling(3))
    own = admin.upload(doubling(3)).json()["id"]
    assert ids(admin, "batches") == [second["id"], first["id"]]
    assert len(ids(admin, "files")) == 5
    assert admin.http.get(f"/files/{first['output_file_id']}/content").status_code == 200
    assert alice.http.get(f"/files/{own}").status_code == 404
    assert admin.http.delete(f"/files/{first['input_file_id']}").status_code == 200
    assert first["input_file_id"] not in ids(alice, "files")


def test_a_running_batch_is_its_tenants_too(served: Listening) -> None:
    dispatcher: Any = served.models.get("function").dispatcher  # type: ignore[union-attr]
    dispatcher.held = True
    alice, bob = client(served, "alice"), client(served, "bob")
    batch = alice.begin(doubling(3))
    assert bob.http.get(f"/batches/{batch['id']}").status_code == 404
    assert bob.http.post(f"/batches/{batch['id']}/cancel").status_code == 404
    assert ids(bob, "batches") == []
    dispatcher.held = False
    assert alice.wait(batch["id"])["status"] == "completed"


def test_nobody_may_have_more_than_is_left_free() -> None:
    used: Counter[str | None] = Counter()
    shares = []
    for name in ("a", "b", "c", "d", "e"):
        while has_room(used, 8, name):
            used[name] += 1
        shares.append(used[name])
    assert shares == [4, 2, 1, 1, 0]
    assert not has_room(used, 8, None)
    used["a"] -= 1
    assert has_room(used, 8, None)
    assert not has_room(used, 8, None, 2)
    assert has_room(Counter(), 1, "a")


def test_no_tenant_closes_the_batch_api_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_keys(tmp_path / "keys.toml", **PEOPLE)
    limits = {"max_batches": 4, "max_files_bytes": 100_000}
    service, dispatcher = function()
    dispatcher.held = True
    with listening(service, api_keys=str(path), api_key="master", data_dir=str(tmp_path / "data"), **limits) as served:
        alice, bob, master = (client(served, name) for name in ("alice", "bob", "master"))
        file_id = alice.upload(doubling(1)).json()["id"]
        large = [each.upload(b"x" * 40_000).json()["id"] for each in (alice, master)]
        assert alice.create(file_id).json()["error"]["code"] == "storage_limit_exceeded"
        for each in large:
            assert master.http.delete(f"/files/{each}").status_code == 200
        made = [alice.create(file_id) for _ in range(3)]
        assert [each.status_code for each in made] == [200, 200, 429]
        assert "one key may have no more than it leaves free" in made[2].json()["error"]["message"]
        assert bob.create(bob.upload(doubling(1)).json()["id"]).status_code == 200
        assert master.create(file_id).status_code == 200
        sizes = [alice.upload(b"x" * 40_000).status_code, alice.upload(b"x" * 20_000).status_code]
        assert sizes == [200, 413]
        assert bob.upload(b"x" * 20_000).status_code == 200
        assert master.upload(b"x" * 30_000).status_code == 200
        assert served.batches._folder is not None
        served.batches._folder.uploads["alice"] = 4  # as if so many were on their way
        refused = alice.upload(b"")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_uploads")
        assert "there are 4 uploads already" in refused.json()["error"]["message"]
        assert bob.upload(b"").status_code == 200
        served.batches._folder.uploads["alice"] = 0
        monkeypatch.setattr(batch_service, "MAX_FILES", 10)
        few = [alice.upload(b"").status_code for _ in range(2)]
        assert few == [200, 413]
        assert master.upload(b"").status_code == 200
        dispatcher.held = False


def test_pages_count_only_ones_own(served: Listening) -> None:
    alice, bob = client(served, "alice"), client(served, "bob")
    made = []
    for _ in range(3):
        made.append(alice.run(doubling(1))["id"])
        bob.run(doubling(1))
    first = alice.http.get("/batches", params={"limit": 2}).json()
    assert ([each["id"] for each in first["data"]], first["has_more"]) == (made[:0:-1], True)
    rest = alice.http.get("/batches", params={"limit": 2, "after": first["last_id"]}).json()
    assert ([each["id"] for each in rest["data"]], rest["has_more"]) == (made[:1], False)


def test_lines_of_a_batch_count_against_no_limit(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.toml", alice={"rights": ["batch"], "requests_per_minute": 3})
    with listening(function()[0], api_keys=str(path), api_key="master", data_dir=str(tmp_path / "data")) as served:
        alice, master = client(served, "alice"), client(served, "master")
        batch = master.wait(alice.begin(doubling(100))["id"])
        check_doubled(alice.content(batch["output_file_id"]), range(100))
        assert alice.http.get("/files").status_code == 429


def test_a_batch_goes_on_when_its_key_has_gone(tmp_path: Path) -> None:
    path, data = write_keys(tmp_path / "keys.toml", alice={}), str(tmp_path / "data")
    service, dispatcher = function()
    dispatcher.held = True
    with listening(service, api_keys=str(path), api_key="master", data_dir=data) as served:
        batch = client(served, "alice").begin(doubling(5))
        client(served, "alice").wait(batch["id"], lambda each: each["status"] == "in_progress")
        write_keys(path, bob={"rights": ["batch"]})
        asyncio.run(served.keys.look_again())
        dispatcher.held = False
        assert client(served, "alice").http.get("/files").status_code == 401
        assert client(served, "master").wait(batch["id"])["request_counts"]["completed"] == 5
        assert ids(client(served, "bob"), "batches") == ids(client(served, "bob"), "files") == []


def without_tenants(database: Path) -> None:
    """Make a database what the first release wrote: no column, and records that know of no tenant."""
    with sqlite3.connect(database) as db:
        for table in ("jobs", "files"):
            for record_id, record in db.execute(f"SELECT id, record FROM {table}").fetchall():
                old = {name: value for name, value in json.loads(record).items() if name != "tenant"}
                db.execute(f"UPDATE {table} SET record = ? WHERE id = ?", (json.dumps(old), record_id))
            db.execute(f"ALTER TABLE {table} DROP COLUMN tenant")
        db.execute("PRAGMA user_version = 1")
    db.close()


def test_a_folder_of_the_first_release_belongs_to_nobody_in_particular(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with listening(function()[0], data_dir=str(data)) as served:
        batch = Client(served.url).run(doubling(10))
    without_tenants(data / "jobs.sqlite")
    path = write_keys(tmp_path / "keys.toml", **PEOPLE)
    with listening(function()[0], api_keys=str(path), api_key="master", data_dir=str(data)) as served:
        for name in ("root", "master"):
            admin = client(served, name)
            assert ids(admin, "batches") == [batch["id"]]
            check_doubled(admin.content(batch["output_file_id"]), range(10))
        assert ids(client(served, "bob"), "files") == ids(client(served, "bob"), "batches") == []
        assert client(served, "bob").http.get(f"/batches/{batch['id']}").status_code == 404
        client(served, "alice").run(doubling(2))
    # The same folder without keys: everything is there, whoever made it.
    with listening(function()[0], data_dir=str(data)) as served:
        assert len(ids(Client(served.url), "batches")) == 2


def test_a_store_lists_one_tenants_or_all(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.sqlite")
    for number, tenant in enumerate(("a", None, "b", "a")):
        store.add_job(Job(id=f"j{number}", state="completed", entered={}, tenant=tenant))
        store.add_file(
            StoredFile(id=f"f{number}", bytes=1, created_at=0.0, filename="", purpose="batch", tenant=tenant)
        )
    assert [job.id for job in store.jobs()] == ["j3", "j2", "j1", "j0"]
    assert [job.id for job in store.jobs(tenant="a")] == ["j3", "j0"]
    assert [job.id for job in store.jobs("j3", tenant="a")] == ["j0"]
    assert [file.tenant for file in store.files(newest_first=False)] == ["a", None, "b", "a"]
    job = store.job("j2")
    assert job is not None
    assert job.tenant == "b"
    store.close()


# The prefix cache


def salts(tmp_path: Path, *asked: tuple[str | None, str | None]) -> list[str]:
    """The salts that requests get, each of a tenant and with the `cache_salt` that it asks for."""

    async def go() -> list[str]:
        path = write_keys(tmp_path / "keys.toml", alice={}, bob={})
        front = Front(api_keys=str(path), api_key="master")
        for name, salt in asked:
            headers = {"authorization": "Bearer master"} if name is None else bearer(name)
            body = {"prompt": "hello", "max_tokens": 1} | ({} if salt is None else {"cache_salt": salt})
            assert (await front.post("/v1/completions", body, headers=headers)).status == 200
        return [request.cache_salt for request in front.client.requests]

    return asyncio.run(go())


def test_no_tenant_meets_anothers_prefixes(tmp_path: Path) -> None:
    alice, again, bob, alices_own, bobs_same, owner = salts(
        tmp_path, ("alice", None), ("alice", None), ("bob", None), ("alice", "x"), ("bob", "x"), (None, None)
    )
    assert alice == again
    assert len({alice, bob, alices_own, bobs_same, owner}) == 5
    # Whoever has seen a salt can't ask for it, nor make the name of another a part of their own.
    (stolen, joined) = salts(tmp_path, ("bob", alice), ("bob", "alice\0"))
    assert alice not in (stolen, joined)


def test_long_salts_become_short_ones(tmp_path: Path) -> None:
    """Each sequence of a request goes to the worker with its salt."""
    one, same, other, alices = salts(
        tmp_path, (None, "x" * 5000), (None, "x" * 5000), (None, "x" * 4999 + "y"), ("alice", "x" * 5000)
    )
    assert one == same
    assert len({one, other, alices}) == 3
    assert max(map(len, (one, other, alices))) <= 64


def test_salts_are_another_servers_every_time(tmp_path: Path) -> None:
    assert salts(tmp_path, ("alice", None)) != salts(tmp_path, ("alice", None))


def test_a_batch_has_the_prefixes_of_its_tenant(tmp_path: Path) -> None:
    from chairlift.server.http.local_client import AppClient

    async def go() -> None:
        path = write_keys(tmp_path / "keys.toml", alice={"rights": ["batch"], "priorities": [0, 3]})
        front = Front(api_keys=str(path))
        background = AppClient(front.app, background=True).of(front.keys.named("alice"))
        body: dict[str, Any] = {"prompt": "hello", "max_tokens": 1}
        assert (await background.post("/v1/completions", json.dumps(body).encode())).status == 200
        refused = await background.post("/v1/completions", json.dumps(body | {"priority": 9}).encode())
        assert refused.status == 403
        write_keys(path, alice={})
        await front.keys.look_again()
        assert (await front.post("/v1/completions", body, headers=bearer("alice"))).status == 200
        first, second = front.client.requests
        assert first.background
        assert not second.background
        assert first.cache_salt == second.cache_salt != ""

    asyncio.run(go())


def test_how_much_was_cached_need_not_be_told() -> None:
    async def go(**settings: Any) -> list[Any]:
        front = Front(**settings)
        body = {"prompt": "hello", "max_tokens": 2}
        streamed = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        whole = (await front.post("/v1/completions", body)).json()
        events = (await front.post("/v1/completions", body | streamed)).events()
        return [each["usage"]["prompt_tokens_details"] for each in (whole, *events)]

    shown, hidden = asyncio.run(go()), asyncio.run(go(show_cached_tokens=False))
    assert shown[0] == shown[-1] == {"cached_tokens": 3}
    assert len(hidden) == len(shown)
    assert set(hidden) == {None}


# Looks


async def look(front: Front, name: str, path: str = "/v1/models", query: str = "") -> Answer:
    return await front.call("GET", path, headers=bearer(name), query=query)


async def complete(front: Front, name: str) -> Answer:
    return await front.post("/v1/completions", {"prompt": "hello"}, headers=bearer(name))


def test_whoever_is_at_a_limit_can_ask_why(tmp_path: Path) -> None:
    people: dict[str, dict[str, Any]] = {
        "alice": {"requests_at_once": 4, "rights": ["infer"]},
        "bob": {"tokens_per_minute": 5},
        "carol": {"requests_per_minute": 2},
    }
    path = write_keys(tmp_path / "keys.toml", **people)

    async def go() -> None:
        front = Front(FakeClient(manual=True), api_keys=str(path))
        waiting = [asyncio.create_task(complete(front, "alice")) for _ in range(4)]
        await until(lambda: len(front.client.streams) == 4)
        assert (await complete(front, "alice")).error["code"] == "requests_at_once"
        front.keys.named("bob").spend(100)
        assert (await complete(front, "bob")).error["code"] == "tokens_per_minute"
        mine = f"/v1/requests/{front.client.streams[0].request.id}"
        for what in ("/v1/requests", mine, "/v1/models", "/v1/models/tiny"):
            assert (await look(front, "alice", what)).status == 200
        assert (await look(front, "bob", "/v1/requests")).status == 200
        for _ in range(3):
            assert (await look(front, "carol", "/v1/live", "limit=1")).status == 200
        assert front.keys.named("carol").left() == {"requests_per_minute": (2, 2)}
        assert (await look(front, "alice", "/v1/live", "limit=1")).error["code"] == "missing_right"
        front.gone.set()
        await asyncio.gather(*waiting)

    run(go)


def test_looks_have_limits_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.server.http.tenants._LOOKS_PER_MINUTE", 3)
    monkeypatch.setattr("chairlift.server.http.tenants._LOOKS_AT_ONCE", 1)
    people = {"alice": {"requests_per_minute": 1}, "bob": {"requests_per_minute": 5}, "carol": {"requests_at_once": 1}}
    path = write_keys(tmp_path / "keys.toml", free={}, **people)

    async def go() -> None:
        front = Front(api_keys=str(path))
        for name, most in (("alice", 3), ("bob", 5), ("free", 9)):
            assert [(await look(front, name)).status for _ in range(9)] == [200] * most + [429] * (9 - most)
        refused = (await look(front, "alice")).error
        assert refused["code"] == "requests_per_minute"
        assert "looks at requests and models have limits of their own" in refused["message"]
        assert (await complete(front, "alice")).status == 200
        watching = asyncio.create_task(look(front, "carol", "/v1/live"))
        await until(lambda: front.live.watchers)
        assert (await look(front, "carol")).error["code"] == "requests_at_once"
        assert (await complete(front, "carol")).status == 200
        front.gone.set()
        await watching
        assert (await look(front, "carol")).status == 200

    run(go)


def test_files_need_the_right(served: Listening, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.toml", bob={"rights": ["infer"]})
    asyncio.run(served.keys.look_again())
    answer = httpx.get(f"{served.url}/v1/files", headers=bearer("bob"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_right")
    assert httpx.post(f"{served.url}{FUNCTION}", json={"instances": [1]}, headers=bearer("bob")).status_code == 200
