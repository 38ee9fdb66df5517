"""What is kept of responses: bounded by count and bytes, each tenant's apart, and gone from the oldest on."""

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.config.server import ServerConfig
from chairlift.errors import ConfigError, InvalidRequest, Unavailable
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.tenants import Tenant
from chairlift.server.responses.event_log import EventLog
from chairlift.server.responses.response_store import ResponseStore, StoredResponse, items_of, kept_items

ALICE, BOB = Tenant("alice"), Tenant("bob")
# What one takes beside its texts.
EMPTY = StoredResponse("", None, b"", b"").size


def store(**limits: int) -> ResponseStore:
    return ResponseStore(ServerConfig(**limits))


def stored(name: str, size: int = 0, previous: str | None = None, status: str = "completed") -> StoredResponse:
    items = msgspec.json.encode([{"type": "message", "id": f"in-{name}"}])
    document = msgspec.json.encode({"status": status, "output": [{"type": "message", "id": f"out-{name}"}]})
    return StoredResponse(name, previous, items, document + b" " * (size - len(items) - len(document) - EMPTY))


def names(kept: ResponseStore, tenant: Tenant | None, wanted: str) -> str:
    """Which of these there are. Looking for one is a use of it."""
    found = ""
    for name in wanted:
        with contextlib.suppress(ApiError):
            found += kept.get(tenant, name).id
    return found


def test_beyond_the_count_the_least_recently_used_goes() -> None:
    kept = store(max_stored_responses=3)
    for name in "abc":
        assert kept.put(ALICE, stored(name))
    kept.get(ALICE, "a")
    kept.put(ALICE, stored("d"))
    assert names(kept, ALICE, "abcd") == "acd"
    # Another's count for nothing here, and are not seen.
    kept.put(BOB, stored("e"))
    kept.put(None, stored("f"))
    assert (names(kept, ALICE, "abcdef"), names(kept, BOB, "abcdef"), names(kept, None, "abcdef")) == ("acd", "e", "f")


def test_beyond_the_bytes_whoever_has_most_gives() -> None:
    kept = store(max_stored_bytes=10_000)
    for name in "abc":
        kept.put(ALICE, stored(name, 3000))
    kept.put(BOB, stored("x", 4000))
    assert (names(kept, ALICE, "abc"), names(kept, BOB, "x")) == ("bc", "x")
    assert not kept.put(BOB, stored("y", 20_000))
    assert names(kept, BOB, "y") == ""
    assert names(kept, ALICE, "bc") == "bc"


def test_a_conversation_is_all_of_its_turns() -> None:
    kept = store(max_body_bytes=3 * (stored("a").size - EMPTY) - 1)
    kept.put(ALICE, stored("a"))
    kept.put(ALICE, stored("b", previous="a"))
    assert [item["id"] for item in items_of(kept.turns(ALICE, "b"))] == ["in-a", "out-a", "in-b", "out-b"]
    kept.put(ALICE, stored("c", previous="b"))
    with pytest.raises(ApiError, match="max_body_bytes") as large:
        kept.turns(ALICE, "c")
    assert large.value.status == 413
    kept.delete(ALICE, "a")
    with pytest.raises(ApiError, match=r"'a'.*Send all items") as gone:
        kept.turns(ALICE, "b")
    assert (gone.value.status, gone.value.body.param) == (404, "previous_response_id")
    with pytest.raises(ApiError, match="there is no response"):
        kept.delete(ALICE, "a")


def test_items_that_are_referred_to_have_the_bytes_of_a_body() -> None:
    names = [f"resp_{digit * 24}" for digit in "abc"]
    made = [stored(name) for name in names]
    kept = store(max_body_bytes=2 * len(made[0].document) + 1)
    for each in made:
        kept.put(ALICE, each)
    places = {f"msg_{digit * 24}_{index}": "input[0].id" for digit in "ab" for index in (0, 1)}
    assert kept.holders(ALICE, places) == made[:2]
    assert kept_items(made[:2]).keys() == {f"out-{name}" for name in names[:2]}
    with pytest.raises(ApiError, match="max_body_bytes") as large:
        kept.holders(ALICE, places | {f"rs_{'c' * 24}_0": "input[4].id"})
    assert large.value.status == 413
    with pytest.raises(ApiError, match=r"input\[0\].id: there is no item") as others:
        kept.holders(BOB, places)
    assert others.value.status == 404


def test_what_changes_counts_as_it_is_and_what_is_gone_stays_gone() -> None:
    kept = store(max_stored_bytes=10_000)
    first, second = stored("a", 2000), stored("b", 2000)
    kept.put(ALICE, first)
    kept.put(ALICE, second)
    kept.change(ALICE, second, b" " * 8000)
    assert names(kept, ALICE, "ab") == "b"
    kept.change(ALICE, first, b" " * 9000)
    assert names(kept, ALICE, "ab") == "b"


def test_places_in_the_background_are_for_each_tenant() -> None:
    async def go() -> None:
        kept = store(max_background_responses=1)
        with kept.place(ALICE):
            with pytest.raises(ApiError, match="max_background_responses") as full, kept.place(ALICE):
                pass
            assert full.value.status == 429
            with kept.place(BOB):
                pass
        with kept.place(ALICE):
            pass
        running = stored("a")
        running.task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        task = running.task
        kept.put(ALICE, running)
        await kept.leave()
        assert task.cancelled()
        assert msgspec.json.decode(kept.get(ALICE, "a").document)["status"] == "cancelled"
        with pytest.raises(Unavailable), kept.place(ALICE):
            pass

    asyncio.run(go())


def test_to_cancel_makes_nothing_of_a_document() -> None:
    async def go() -> None:
        kept = store()
        kept.put(ALICE, StoredResponse("a", None, b"[]", b"not looked at"))
        with pytest.raises(InvalidRequest, match="only a response with background can be cancelled"):
            kept.cancel(ALICE, "a")
        over, running = StoredResponse("b", None, b"[]", b"nor this"), StoredResponse("c", None, b"[]", b"")
        over.log, running.log = EventLog(), EventLog()
        # As it is, and would not be if it was decoded.
        written = b'"instructions":"\\u0061","output":[{"a":  1}]'
        running.document = b'{"id":"c","status":"in_progress",%b}' % written
        running.task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        kept.put(ALICE, over)
        kept.put(ALICE, running)
        assert kept.cancel(ALICE, "b").document == b"nor this"
        assert kept.cancel(ALICE, "c").document == b'{"id":"c","status":"cancelled",%b}' % written
        assert kept.cancel(ALICE, "c").task is None

    asyncio.run(go())


def test_what_runs_goes_last_and_is_cancelled() -> None:
    async def go() -> None:
        kept = store(max_stored_responses=2)
        running = stored("a")
        running.task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        for each in (running, stored("b"), stored("c")):
            kept.put(ALICE, each)
        assert names(kept, ALICE, "abc") == "ac"
        kept.delete(ALICE, "a")
        await asyncio.gather(running.task, return_exceptions=True)
        assert running.task.cancelled()

    asyncio.run(go())


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["put", "change", "delete", "get"]),
        st.sampled_from([None, ALICE, BOB]),
        st.sampled_from("abcdef"),
        st.integers(0, 6000),
    ),
    max_size=60,
)


@given(changes=CHANGES)
@settings(max_examples=200, deadline=None)
def test_no_history_goes_beyond_the_limits(changes: list[tuple[str, Any, str, int]]) -> None:
    kept = store(max_stored_responses=3, max_stored_bytes=12_000)
    known: dict[tuple[Any, str], StoredResponse] = {}
    for number, (what, tenant, letter, size) in enumerate(changes):
        name = f"{letter}{number}" if what == "put" else letter
        match what:
            case "put":
                known[tenant, letter] = stored(name, size)
                kept.put(tenant, known[tenant, letter])
            case "change" if (tenant, letter) in known:
                kept.change(tenant, known[tenant, letter], b" " * size)
            case _ if (tenant, letter) in known:
                with contextlib.suppress(ApiError):
                    getattr(kept, what)(tenant, known[tenant, letter].id)
        shelves = kept._shelves.values()
        sizes = [sum(each.size for each in shelf.responses.values()) for shelf in shelves]
        assert [shelf.size for shelf in shelves] == sizes
        assert kept._size == sum(sizes) <= 12_000
        assert all(len(shelf.responses) <= 3 for shelf in shelves)


def test_limits_are_checked() -> None:
    for wrong in ({"max_stored_responses": -1}, {"max_stored_bytes": 0}, {"max_background_responses": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ServerConfig(**wrong)
