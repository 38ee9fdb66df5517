"""The Files and Batches API over models that are computed here: states, limits, refusals and faults."""

import asyncio
import errno
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.batch_harness import FUNCTION, Client, check_doubled, doubling, files_in, jsonl, line
from support.items_harness import Listening, LocalDispatcher, embedder, function, listening, reranker

from chairlift.config.server import ServerConfig
from chairlift.errors import JobError, StorageFull, StoreBusy, Unavailable
from chairlift.jobs.store import Counts, Job, Store, StoredFile
from chairlift.server.app import create_app
from chairlift.server.batches import batch_run, file_routes
from chairlift.server.batches.data_folder import Folder
from chairlift.server.batches.record import About, about, as_batch, note
from chairlift.server.batches.service import Batches, new_file_id
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.registry import Models


class Api(Client):
    """A server and its client; `dispatcher` is that of the function, which can be held."""

    def __init__(
        self, server: Listening, functions: LocalDispatcher, services: Sequence[ItemService], key: str | None = None
    ) -> None:
        super().__init__(server.url, key)
        self.dispatcher = functions
        self.services = services
        self.folder = Path(server.config.data_dir)


def serving(folder: Path, held: bool = False, ranks: str = "reranker", **settings: Any) -> Iterator[Api]:
    service, functions = function()
    functions.held = held
    models = (service, embedder()[0], reranker(ranks)[0])
    with listening(*models, data_dir=str(folder), **settings) as server:
        yield Api(server, functions, models, settings.get("api_key"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Api]]:
    """Start servers with one data folder, each in place of the one before."""
    running: list[Iterator[Api]] = []

    def stop() -> None:
        for each in running:
            next(each, None)
        running.clear()

    def begin(**settings: Any) -> Api:
        stop()
        running.append(serving(tmp_path / "data", **settings))
        return next(running[0])

    yield begin
    stop()


@pytest.fixture
def api(start: Callable[..., Api]) -> Api:
    return start()


def error(answer: Any) -> Any:
    assert set(answer.json()) == {"error"}, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.json()["error"]


def test_a_batch_of_a_function(api: Api) -> None:
    assert not api.folder.exists()
    uploaded = api.upload(doubling(300), "numbers.jsonl").json()
    assert uploaded["bytes"] == len(jsonl(doubling(300)))
    assert (uploaded["object"], uploaded["purpose"], uploaded["filename"]) == ("file", "batch", "numbers.jsonl")
    created = api.create(uploaded["id"], metadata={"for": "test"}).json()
    assert created["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    batch = api.wait(created["id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
    assert batch["metadata"] == {"for": "test"}
    assert batch["error_file_id"] is batch["errors"] is batch["failed_at"] is None
    times = [batch[f"{state}_at"] for state in ("created", "in_progress", "finalizing", "completed")]
    assert times == sorted(times)
    assert batch["expires_at"] == batch["created_at"] + 86400
    check_doubled(api.content(batch["output_file_id"]), range(300))
    assert [each["background"] for each in api.dispatcher.submitted] == [True] * 300
    output = api.http.get(f"/files/{batch['output_file_id']}").json()
    assert (output["purpose"], output["filename"]) == ("batch_output", f"{batch['id']}_output.jsonl")
    assert api.metric("batches", state="completed") == 1
    assert api.metric("batch_lines_total", outcome="completed") == 300


def test_other_endpoints(api: Api) -> None:
    texts = api.run(
        [line(f"t{i}", {"model": "embedder", "input": f"hello {i}"}, "/v1/embeddings") for i in range(50)],
        "/v1/embeddings",
    )
    assert (texts["status"], texts["model"], texts["request_counts"]["completed"]) == ("completed", "embedder", 50)
    result = api.results(texts["output_file_id"])["t3"]["response"]
    direct = api.http.post("/embeddings", json={"model": "embedder", "input": "hello 3"}).json()
    assert result["body"]["data"] == direct["data"]
    for path in ("/v1/rerank", "/rerank"):
        ranks = api.run([line("r", {"query": "hello", "documents": ["hello", "world"]}, path)], path)
        assert (ranks["status"], ranks["model"]) == ("completed", "reranker")
        (result,) = api.results(ranks["output_file_id"]).values()
        assert [each["index"] for each in result["response"]["body"]["results"]] == [0, 1]


def test_lines_that_fail_have_a_file_of_their_own(api: Api) -> None:
    batch = api.run([line("good", {"instances": [1]}), line("bad", {"instance": [1]})])
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 2, "completed": 1, "failed": 1})
    assert set(api.results(batch["output_file_id"])) == {"good"}
    (failed,) = api.results(batch["error_file_id"]).values()
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
    only_bad = api.run([line("bad", {"instance": [1]})])
    assert (only_bad["status"], only_bad["output_file_id"]) == ("completed", None)
    assert only_bad["error_file_id"] is not None
    assert api.metric("batch_lines_total", outcome="failed") == 2


WRONG: dict[str, tuple[list[Any], str, list[tuple[str, int | None]]]] = {
    "empty": ([], FUNCTION, [("empty_file", None)]),
    "blank": (["", "  "], FUNCTION, [("empty_file", None)]),
    "lines": (
        [
            "{no json",
            line("good", {"instances": [1]}),
            "",
            line("good", {"instances": [1]}),
            line("url", {}, "/v1/embeddings"),
            line("method", {}, method="GET"),
            line("more", {}, more=1),
            {"custom_id": "no body", "method": "POST", "url": FUNCTION},
            line("list", []),  # type: ignore[arg-type]
            line("streams", {"stream": True}),
            line(7, {}),  # type: ignore[arg-type]
        ],
        FUNCTION,
        [
            ("invalid_json", 1),
            ("duplicate_custom_id", 4),
            ("mismatched_url", 5),
            ("invalid_method", 6),
            ("unknown_field", 7),
            ("missing_field", 8),
            ("invalid_body", 9),
            ("stream_not_supported", 10),
            ("invalid_line", 11),
        ],
    ),
    "models": (
        [
            line("a", {"model": "embedder"}, "/v1/embeddings"),
            line("b", {"model": "other"}, "/v1/embeddings"),
            line("c", {}, "/v1/embeddings"),
            line("d", {"model": 1}, "/v1/embeddings"),
        ],
        "/v1/embeddings",
        [("mismatched_model", 2), ("mismatched_model", 3), ("invalid_model", 4)],
    ),
    "unknown": ([line("a", {"model": "other"}, "/v1/embeddings")], "/v1/embeddings", [("model_not_found", 1)]),
    "task": ([line("a", {"model": "embedder"}, "/v1/rerank")], "/v1/rerank", [("wrong_task", 1)]),
    "none": ([line("a", {}, "/v1/completions")], "/v1/completions", [("model_not_found", 1)]),
    "many": ([line(f"{i}", {}, "/x") for i in range(500)], FUNCTION, [("mismatched_url", i + 1) for i in range(100)]),
}


@pytest.mark.parametrize("what", WRONG)
def test_validation(what: str, api: Api) -> None:
    lines, endpoint, expected = WRONG[what]
    batch = api.run(lines, endpoint)
    assert batch["status"] == "failed"
    assert batch["failed_at"] is not None
    assert batch["in_progress_at"] is None
    found = batch["errors"]["data"]
    assert [(each["code"], each["line"]) for each in found] == expected
    for each in found:
        assert each["line"] is None or str(each["line"]) in each["message"]
    assert not api.dispatcher.submitted


def test_a_model_that_is_not_utf8_is_a_problem_of_its_line(api: Api) -> None:
    raw = jsonl([line("a", {"model": "embedder"}, "/v1/embeddings"), line("b", {"model": "no"}, "/v1/embeddings")])
    file = api.upload(raw.replace(b'"no"', b'"\xff"')).json()["id"]
    batch = api.wait(api.create(file, "/v1/embeddings").json()["id"])
    assert batch["status"] == "failed"
    (found,) = batch["errors"]["data"]
    assert (found["code"], found["line"]) == ("invalid_model", 2)


def test_duplicates_name_both_lines(api: Api) -> None:
    lines = doubling(700)
    lines[650]["custom_id"] = "c3"
    (found,) = api.run(lines)["errors"]["data"]
    assert found["line"] == 651
    assert "lines 4 and 651" in found["message"]
    assert found["param"] == "custom_id"


def test_too_many_lines(start: Callable[..., Api]) -> None:
    api = start(max_batch_lines=300)
    assert api.run([*doubling(300), ""])["status"] == "completed"
    (found,) = api.run(doubling(301))["errors"]["data"]
    assert (found["code"], found["line"]) == ("too_many_lines", 301)
    assert "max_batch_lines" in found["message"]
    (found,) = api.run(b"\n" * 301)["errors"]["data"]
    assert (found["code"], found["line"]) == ("too_many_lines", 301)
    assert "more blank lines" in found["message"]


def test_what_is_wrong_with_a_batch_is_told_in_few_words_however_long_its_names_are(api: Api) -> None:
    names = [line(f"c{i}", {"model": ("x" if i else "y") * 20_000}, "/v1/embeddings") for i in range(30)]
    for lines, endpoint in (
        (names, "/v1/embeddings"),
        ([line("url", {}, "/" + "u" * 20_000)], FUNCTION),
        ([line("more", {}, **{"m" * 20_000: 1})], FUNCTION),
    ):
        found = api.run(lines, endpoint)["errors"]["data"]
        assert max(len(json.dumps(each)) for each in found) < 2500


def test_a_new_batch_does_not_wait_for_a_model_that_has_failed(api: Api) -> None:
    lines = [line("a", {"model": "embedder"}, "/v1/embeddings")]
    assert api.run(lines, "/v1/embeddings")["status"] == "completed"
    for service in api.services:
        service.state, service.failure = "failed", "no memory"
    for given, endpoint in ((lines, "/v1/embeddings"), (doubling(1), FUNCTION)):
        (found,) = api.run(given, endpoint)["errors"]["data"]
        assert found["code"] == "model_failed"
        assert "no memory" in found["message"]


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"endpoint": "/v1/messages"}, 400, "endpoint"),
        ({"endpoint": "/v1/files"}, 400, "endpoint"),
        ({"endpoint": "/v1/models/other:predict"}, 404, "model"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "0h"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"input_file_id": "file-0123456789abcdef01234567"}, 404, "input_file_id"),
        ({"input_file_id": "../jobs.sqlite"}, 404, "input_file_id"),
        ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
        ({"metadata": {"k" * 65: ""}}, 400, "metadata"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata.k"),
        ({"metadata": {"k": 1}}, 400, "metadata[...]"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, 400, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, 400, "output_expires_after.anchor"),
        ({"priority": 1}, 400, "priority"),
    ],
)
def test_create_refuses_by_name(changes: dict[str, Any], status: int, param: str, api: Api) -> None:
    good = {"input_file_id": api.upload(doubling(1)).json()["id"], "endpoint": FUNCTION, "completion_window": "24h"}
    answer = api.http.post("/batches", json=good | changes)
    assert (answer.status_code, error(answer)["param"]) == (status, param)
    assert api.http.get("/batches").json()["data"] == []


def test_results_are_no_input(api: Api) -> None:
    output = api.run(doubling(1))["output_file_id"]
    assert error(api.create(output))["code"] == "wrong_purpose"


def test_upload_refuses_by_name_and_leaves_nothing(start: Callable[..., Api]) -> None:
    api = start(max_file_bytes=3_000_000, max_files_bytes=4_000_000, body_timeout_s=1)
    too_large = api.upload(b"x" * 3_000_001)
    kept = api.upload(b"x" * 3_000_000)
    assert kept.status_code == 200
    many = api.http.post("/files", data={"purpose": "batch"}, files=[("file", ("a", b"1")), ("file", ("b", b"2"))])
    answers = {
        "file_too_large": too_large,
        "storage_limit_exceeded": api.upload(b"x" * 2_000_000),
        "unknown_field": api.upload(b"x", colour="red"),
        "invalid_multipart": many,
        "unsupported_type": api.http.post("/files", json={"purpose": "batch"}),
        "unsupported_encoding": api.http.post("/files", files={"file": b"1"}, headers={"Content-Encoding": "gzip"}),
        "missing_field": api.http.post("/files", data={}, files={"file": ("a", b"1")}),
        "name_too_long": api.upload(b"x", "n" * 256),
        "body_too_large": api.upload(b"x", purpose="p" * 100_000),
        "cross_origin": api.http.post("/files", files={"file": b"1"}, headers={"Origin": "http://example.com"}),
    }
    for code, answer in answers.items():
        assert error(answer)["code"] == code
    assert [answers[code].status_code for code in ("file_too_large", "storage_limit_exceeded")] == [413, 413]
    assert "max_file_bytes" in error(answers["file_too_large"])["message"]
    assert answers["unsupported_encoding"].status_code == 415
    # Its body was read, so nothing tears the connection from under the answer.
    assert answers["unsupported_type"].headers.get("connection") != "close"
    assert error(answers["unknown_field"])["param"] == "colour"
    for answer, param in (
        (api.upload(b"x", purpose="assistants"), "purpose"),
        (api.upload(b"x", **{"expires_after[anchor]": "created_at"}), "expires_after[seconds]"),
        (api.upload(b"x", **{"expires_after[seconds]": "3600"}), "expires_after[anchor]"),
        (api.upload(b"x", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}), None),
        (api.http.post("/files", files={"purpose": (None, "batch")}), "file"),
    ):
        assert answer.status_code == 400
        assert error(answer)["param"] == (param or "expires_after[seconds]")
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    cut = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nsome'
    for body in (cut, b"nonsense", b""):
        assert error(api.http.post("/files", content=body, headers=form))["code"] == "invalid_multipart"
    long = {"Content-Type": "multipart/form-data; boundary=" + "b" * 300}
    assert error(api.http.post("/files", content=cut, headers=long))["code"] == "invalid_multipart"
    slow = api.http.post("/files", content=_stalling(cut), headers=form)
    assert (slow.status_code, "body_timeout_s" in error(slow)["message"]) == (408, True)
    assert files_in(api.folder) == {kept.json()["id"]}
    assert [each["id"] for each in api.http.get("/files").json()["data"]] == [kept.json()["id"]]
    assert api.upload(b"x" * 1_000_000).status_code == 200
    assert error(api.create(kept.json()["id"]))["code"] == "storage_limit_exceeded"


def test_lines_that_look_like_boundaries_are_refused(api: Api) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=B"}
    head = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch'
    head += b'\r\n--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    refused = api.http.post("/files", content=head + b"\r\n--BX" * 1000 + b"\r\n--B--\r\n", headers=form)
    assert (refused.status_code, error(refused)["code"]) == (400, "invalid_multipart")
    assert "choose another" in error(refused)["message"]
    assert files_in(api.folder) == set()
    assert api.http.post("/files", content=head + b"text\r\n--B--\r\n", headers=form).json()["bytes"] == 4


def _stalling(head: bytes) -> Iterator[bytes]:
    yield head
    time.sleep(3)
    yield b"more"


def test_no_more_than_so_many_files(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.server.batches.service.MAX_FILES", 2)
    first, second = (api.upload(b"x").json()["id"] for _ in range(2))
    beyond = api.upload(b"x")
    assert (beyond.status_code, error(beyond)["code"]) == (413, "storage_limit_exceeded")
    assert "there are 2 files, which is the limit: delete some" in error(beyond)["message"]
    assert files_in(api.folder) == {first, second}
    assert api.http.delete(f"/files/{first}").status_code == 200
    assert api.upload(b"x").status_code == 200


def test_of_very_many_batches_the_last_are_kept(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.server.batches.service.MAX_KEPT", 2)
    ids = [api.run(doubling(1))["id"] for _ in range(4)]
    assert [each["id"] for each in api.http.get("/batches").json()["data"]] == [ids[3], ids[2]]
    assert api.http.get(f"/batches/{ids[1]}").status_code == 404
    assert api.metric("batches", state="completed") == 2


def test_names_are_data(api: Api) -> None:
    name = "../../up and away \u00e9.jsonl"
    uploaded = api.upload(b"hello", name).json()
    assert uploaded["filename"] == name
    answer = api.http.get(f"/files/{uploaded['id']}/content")
    assert answer.content == b"hello"
    assert "filename*=utf-8''" in answer.headers["content-disposition"]
    part = api.http.get(f"/files/{uploaded['id']}/content", headers={"Range": "bytes=1-2"})
    assert (part.status_code, part.content) == (206, b"el")
    assert files_in(api.folder) == {uploaded["id"]}
    for path in ("..%2Fjobs.sqlite", "..%2F..%2Fup", "%2Fetc%2Fpasswd", "file-x", "%00"):
        for answer in (api.http.get(f"/files/{path}/content"), api.http.delete(f"/files/{path}")):
            assert answer.status_code == 404, path
    assert (api.folder / "jobs.sqlite").exists()


def test_pages_of_files(api: Api) -> None:
    ids = [api.upload(f"{i}".encode()).json()["id"] for i in range(5)]

    def page(**query: Any) -> tuple[list[str], bool]:
        answer = api.http.get("/files", params=query).json()
        found = [each["id"] for each in answer["data"]]
        assert (answer["first_id"], answer["last_id"]) == ((found[0], found[-1]) if found else (None, None))
        return found, answer["has_more"]

    assert page() == (ids[::-1], False)
    assert page(limit=2) == (ids[:2:-1], True)
    assert page(order="asc", limit=2, after=ids[1]) == (ids[2:4], True)
    assert page(order="asc", limit=2, after=ids[2]) == (ids[3:], False)
    assert page(after=ids[0]) == ([], False)
    assert page(purpose="batch_output") == ([], False)
    for query, param in (
        ({"limit": 0}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"limit": 10_001}, "limit"),
        ({"order": "up"}, "order"),
        ({"colour": "red"}, "colour"),
    ):
        answer = api.http.get("/files", params=query)
        assert (answer.status_code, error(answer)["param"]) == (400, param)
    assert api.http.get("/files", params={"after": "nobody"}).status_code == 404
    assert api.http.delete(f"/files/{ids[2]}").json() == {"id": ids[2], "object": "file", "deleted": True}
    assert api.http.get(f"/files/{ids[2]}").status_code == 404
    assert api.http.delete(f"/files/{ids[2]}").status_code == 404
    assert page(order="asc") == ([*ids[:2], *ids[3:]], False)
    assert files_in(api.folder) == set(page()[0])


def test_a_batch_says_how_much_was_reasoning() -> None:
    noted = About(endpoint=FUNCTION, input_file_id="file", completion_window="24h", expires_at=1.0)
    job = Job(id="batch_1", state="in_progress", entered={"validating": 1.0})
    note(job, noted)
    usage = as_batch(job, Counts(prompt_tokens=3, completion_tokens=7, reasoning_tokens=5))["usage"]
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (7, {"reasoning_tokens": 5})


def test_pages_of_batches(api: Api) -> None:
    ids = [api.run(doubling(2))["id"] for _ in range(4)]

    def page(**query: Any) -> tuple[list[str], bool]:
        answer = api.http.get("/batches", params=query).json()
        return [each["id"] for each in answer["data"]], answer["has_more"]

    assert page() == (ids[::-1], False)
    assert page(limit=3) == (ids[:0:-1], True)
    assert page(limit=3, after=ids[1]) == ([ids[0]], False)
    for query, status in (({"limit": 101}, 400), ({"after": "nobody"}, 404), ({"order": "asc"}, 400)):
        assert api.http.get("/batches", params=query).status_code == status
    assert error(api.http.get("/batches/nobody"))["code"] == "batch_not_found"


def test_cancel(api: Api) -> None:
    api.dispatcher.held = True
    batch = api.begin(doubling(500))
    api.wait(batch["id"], lambda b: b["status"] == "in_progress")
    needed = api.http.delete(f"/files/{batch['input_file_id']}")
    assert (needed.status_code, error(needed)["code"]) == (409, "file_in_use")
    assert batch["id"] in error(needed)["message"]
    assert api.metric("batches", state="in_progress") == 1
    for _ in range(2):
        assert api.http.post(f"/batches/{batch['id']}/cancel").json()["status"] in ("cancelling", "cancelled")
    over = api.wait(batch["id"])
    assert over["status"] == "cancelled"
    assert over["cancelling_at"] <= over["cancelled_at"]
    assert over["request_counts"] == {"total": 500, "completed": 0, "failed": 500}
    failed = api.results(over["error_file_id"])
    assert len(failed) == 500
    assert {(each["response"], each["error"]["code"]) for each in failed.values()} == {(None, "batch_cancelled")}
    assert api.http.post(f"/batches/{batch['id']}/cancel").json() == over
    api.dispatcher.held = False
    done = api.run(doubling(1))
    late = api.http.post(f"/batches/{done['id']}/cancel")
    assert (late.status_code, error(late)["code"]) == (409, "batch_not_cancellable")
    assert api.http.post("/batches/nobody/cancel").status_code == 404
    assert api.http.delete(f"/files/{batch['input_file_id']}").status_code == 200


def test_what_is_done_before_a_cancel_is_kept(api: Api) -> None:
    batch = api.begin(doubling(20_000))
    api.wait(batch["id"], lambda b: b["request_counts"]["completed"] > 100)
    api.http.post(f"/batches/{batch['id']}/cancel")
    over = api.wait(batch["id"])
    counts = over["request_counts"]
    assert counts["completed"] + counts["failed"] == counts["total"] == 20_000
    done = api.results(over["output_file_id"])
    failed = api.results(over["error_file_id"])
    assert (len(done), len(failed)) == (counts["completed"], counts["failed"])
    assert not done.keys() & failed.keys()


def test_a_batch_that_expires(api: Api) -> None:
    api.dispatcher.held = True
    batch = api.run(doubling(40), window="1s")
    assert batch["status"] == "expired"
    assert batch["expired_at"] >= batch["expires_at"] == batch["created_at"] + 1
    failed = api.results(batch["error_file_id"])
    assert len(failed) == 40
    assert {each["error"]["code"] for each in failed.values()} == {"batch_expired"}
    assert batch["output_file_id"] is None


def test_batches_wait_for_their_turn(start: Callable[..., Api]) -> None:
    api = start(held=True, max_running_batches=1, max_batches=3)
    first, second, third = (api.begin(doubling(20 + i)) for i in range(3))
    refused = api.create(first["input_file_id"])
    assert (refused.status_code, error(refused)["code"]) == (429, "too_many_batches")
    assert refused.headers["Retry-After"] == "10"
    for batch in (first, second, third):
        api.wait(batch["id"], lambda b: b["status"] == "in_progress")
    assert len(api.dispatcher.submitted) <= 20
    api.http.post(f"/batches/{second['id']}/cancel")
    assert api.wait(second["id"])["status"] == "cancelled"
    fourth = api.begin(doubling(1), window="1s")
    assert api.wait(fourth["id"])["status"] == "expired"
    api.dispatcher.held = False
    for batch in (first, third):
        assert api.wait(batch["id"])["status"] == "completed"


def test_each_model_has_turns_of_its_own(start: Callable[..., Api]) -> None:
    api = start(held=True, max_running_batches=1)
    held = [api.begin(doubling(20)) for _ in range(2)]
    api.wait(held[0]["id"], lambda b: b["status"] == "in_progress")
    texts = [line("t", {"model": "embedder", "input": "hello"}, "/v1/embeddings")]
    assert api.run(texts, "/v1/embeddings")["status"] == "completed"
    api.dispatcher.held = False
    for batch in held:
        assert api.wait(batch["id"])["status"] == "completed"


def test_lines_may_be_as_long_as_bodies_and_no_longer(start: Callable[..., Api]) -> None:
    api = start(max_body_bytes=1000, max_tensor_bytes=200_000)
    inputs = ("short", "x" * 70_000)
    texts = [line(f"t{i}", {"model": "embedder", "input": text}, "/v1/embeddings") for i, text in enumerate(inputs)]
    (found,) = api.run(texts, "/v1/embeddings")["errors"]["data"]
    assert (found["code"], found["line"]) == ("line_too_long", 2)
    assert "66536 bytes" in found["message"]
    over = api.run([line("c", {"instances": ["x" * 150_000]})])
    assert over["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


def test_an_input_may_serve_twice(api: Api) -> None:
    file_id = api.upload(doubling(30)).json()["id"]
    for batch in [api.create(file_id).json() for _ in range(2)]:
        over = api.wait(batch["id"])
        check_doubled(api.content(over["output_file_id"]), range(30))


def test_files_expire(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_routes, "SHORTEST_LIFE_S", 1)
    api.dispatcher.held = True
    life = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}
    plain = api.upload(b"x", **life).json()
    assert plain["expires_at"] == plain["created_at"] + 1
    needed = api.upload(doubling(3), **life).json()
    batch = api.create(needed["id"], output_expires_after={"anchor": "created_at", "seconds": 1}).json()
    _gone(api, plain["id"])
    assert api.http.get(f"/files/{needed['id']}").status_code == 200
    api.dispatcher.held = False
    over = api.wait(batch["id"])
    assert over["status"] == "completed"
    _gone(api, needed["id"])
    _gone(api, over["output_file_id"])
    assert files_in(api.folder) == set()


def test_what_batches_need_is_looked_up_once_a_pass(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.dispatcher.held = True
    api.wait(api.begin(doubling(3))["id"], lambda batch: batch["status"] == "in_progress")
    looked: list[str] = []

    def look(run: batch_run.BatchRun) -> str:
        looked.append(run.job.id)
        return about(run.job).input_file_id

    monkeypatch.setattr(batch_run.BatchRun, "input_file_id", property(look))
    life = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    for _ in range(10):
        api.upload(b"x", **life)
    assert 0 < len(looked) <= 12
    api.dispatcher.held = False


def test_a_file_that_is_just_being_deleted_is_not_there(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    file_id = api.upload(doubling(1)).json()["id"]
    removed, looked = threading.Event(), threading.Event()
    remove, holds = Folder._remove, Folder.holds

    def remove_slowly(folder: Folder, file_id: str) -> None:
        remove(folder, file_id)
        removed.set()
        assert looked.wait(20)

    def look(folder: Folder, file: StoredFile) -> bool:
        found = holds(folder, file)
        looked.set()
        return found

    monkeypatch.setattr(Folder, "_remove", remove_slowly)
    monkeypatch.setattr(Folder, "holds", look)
    with ThreadPoolExecutor(1) as pool:
        deletion = pool.submit(api.http.delete, f"/files/{file_id}")
        assert removed.wait(20)
        assert api.http.get(f"/files/{file_id}/content").status_code == 404
        assert deletion.result().status_code == 200


def _gone(api: Api, file_id: str) -> None:
    deadline = time.monotonic() + 20
    while api.http.get(f"/files/{file_id}").status_code != 404:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_results_live_as_long_as_was_asked(api: Api) -> None:
    batch = api.run(doubling(1), output_expires_after={"anchor": "created_at", "seconds": 7200})
    output = api.http.get(f"/files/{batch['output_file_id']}").json()
    assert output["expires_at"] == output["created_at"] + 7200


# Durability


def test_a_server_that_leaves_and_the_next(start: Callable[..., Api]) -> None:
    api = start()
    plain = api.begin(doubling(5000))
    api.wait(plain["id"], lambda b: b["request_counts"]["completed"] > 100)
    api.dispatcher.held = True
    cancelled = api.begin(doubling(50))
    api.wait(cancelled["id"], lambda b: b["status"] == "in_progress")
    done = api.run([line("bad", {})])
    api = start(held=True)
    assert api.batch(done["id"]) == done
    between = api.batch(plain["id"])
    assert between["status"] == "in_progress"
    assert 100 < between["request_counts"]["completed"] < 5000
    api.http.post(f"/batches/{cancelled['id']}/cancel")
    api = start()
    assert api.wait(cancelled["id"])["status"] == "cancelled"
    over = api.wait(plain["id"])
    assert over["request_counts"] == {"total": 5000, "completed": 5000, "failed": 0}
    check_doubled(api.content(over["output_file_id"]), range(5000))
    assert api.metric("batches", state="completed") == 2


def test_lines_that_name_no_model_have_the_same_one_after_a_restart(start: Callable[..., Api]) -> None:
    lines = [line(f"r{i}", {"query": "hello", "documents": ["hello", "world"]}, "/v1/rerank") for i in range(3)]
    api = start()
    dispatcher: Any = api.services[2].dispatcher
    dispatcher.held = True
    batch = api.begin(lines, "/v1/rerank")
    wait_for(lambda: len(dispatcher.submitted) == 6)
    api = start(ranks="other")
    over = api.wait(batch["id"])
    assert (over["status"], over["model"]) == ("completed", "reranker")
    assert over["output_file_id"] is None
    failed = api.results(over["error_file_id"])
    assert {each["response"]["body"]["message"] for each in failed.values()} == {
        "The model `reranker` does not exist. This server has `function`, `embedder`, `other`."
    }


def test_cancelled_before_it_was_looked_through(start: Callable[..., Api], tmp_path: Path) -> None:
    """By a server that ended in that moment."""
    folder = Folder(tmp_path / "data")
    file_id = new_file_id()
    folder.place(file_id).write_bytes(b"nothing")
    folder.store.add_file(StoredFile(id=file_id, bytes=7, created_at=1.0, filename="a", purpose="batch"))
    noted = About(
        endpoint=FUNCTION,
        input_file_id=file_id,
        completion_window="24h",
        expires_at=time.time() + 86_400,
        results=(new_file_id(), new_file_id()),
    )
    job = Job(id="batch_1", state="cancelling", entered={"validating": 1.0, "cancelling": 2.0})
    note(job, noted)
    folder.store.add_job(job)
    folder.close()
    over = start().wait("batch_1")
    assert (over["status"], over["output_file_id"], over["error_file_id"]) == ("cancelled", None, None)
    assert over["request_counts"] == {"total": 0, "completed": 0, "failed": 0}


def test_a_server_that_has_left_has_lost_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        models, config = Models([function()[0]]), ServerConfig(data_dir=str(tmp_path / "data"))
        batches = Batches(models, config)
        create_app(models, config, batches)
        folder = await batches.folder(make=True)
        assert folder is not None
        await batches.close()
        with pytest.raises(Unavailable, match="about to leave"):
            await batches.page(None, 10, None)
        # Whoever looked just before.
        with pytest.raises(Unavailable, match="about to leave"):
            await batches._check_kept(folder)

    asyncio.run(go())
    assert "taken away" not in caplog.text


def test_expired_while_nobody_was_there(start: Callable[..., Api]) -> None:
    batch = start(held=True).begin(doubling(5), window="1s")
    start(held=True)
    time.sleep(1)
    assert start(held=True).wait(batch["id"])["status"] == "expired"


def test_leftovers_are_deleted_and_nothing_else(start: Callable[..., Api]) -> None:
    api = start()
    kept = api.upload(b"kept").json()["id"]
    lost = api.upload(b"lost").json()["id"]
    files = api.folder / "files"
    (files / ("file-" + "0" * 24)).write_bytes(b"an upload that was cut off")
    (files / "notes.txt").write_bytes(b"somebody's own")
    (files / lost).unlink()
    api = start()
    assert [each["id"] for each in api.http.get("/files").json()["data"]] == [kept]
    assert files_in(api.folder) == {kept, "notes.txt"}


def test_one_server_at_a_time(api: Api) -> None:
    api.upload(b"x")
    with pytest.raises(StoreBusy, match="in use by another server"):
        Folder(api.folder)


def test_an_input_that_is_gone_fails_its_batch(start: Callable[..., Api]) -> None:
    api = start(held=True)
    batch = api.begin(doubling(5))
    api.wait(batch["id"], lambda b: b["status"] == "in_progress")
    (api.folder / "files" / batch["input_file_id"]).unlink()
    api = start()
    over = api.wait(batch["id"])
    assert over["status"] == "failed"
    assert over["errors"]["data"][0]["code"] == "batch_failed"
    assert "can't be read" in over["errors"]["data"][0]["message"]


# A full disk


class FullDisk:
    """Has room for so many bytes of each file of results, and of each upload."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, results: int = 10**9, uploads: int = 10**9) -> None:
        self.results, self.uploads = results, uploads
        self._pwrite, self._write = os.pwrite, os.write
        monkeypatch.setattr("chairlift.jobs.result_file.os.pwrite", self.pwrite)
        monkeypatch.setattr("chairlift.server.batches.upload.os.write", self.write)

    def pwrite(self, fd: int, raw: Any, offset: int) -> int:
        return self._pwrite(fd, raw[: _fits(self.results, offset)], offset)

    def write(self, fd: int, raw: Any) -> int:
        if not os.readlink(f"/proc/self/fd/{fd}").split("/")[-1].startswith("file-"):
            return self._write(fd, raw)
        return self._write(fd, raw[: _fits(self.uploads, os.lseek(fd, 0, os.SEEK_CUR))])


def _fits(room: int, offset: int) -> int:
    if offset >= room:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return room - offset


def test_what_is_kept_is_its_owners_alone(start: Callable[..., Api]) -> None:
    before = os.umask(0)
    try:
        api = start()
        over = api.run([*doubling(2), line("wrong", {"instances": []})])
        assert {over["output_file_id"], over["error_file_id"]} < files_in(api.folder)
        modes = {each.name: each.stat().st_mode & 0o777 for each in api.folder.rglob("*")}
        assert set(modes) >= {"jobs.sqlite", "jobs.sqlite-wal", "files", over["input_file_id"], over["output_file_id"]}
        assert modes.pop("files") == 0o700
        assert set(modes.values()) == {0o600}
        assert api.folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_no_answer_says_where_files_lie(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    file_id = api.upload(doubling(1)).json()["id"]
    path = api.folder / "files" / file_id
    path.unlink()
    over = api.wait(api.create(file_id).json()["id"])
    (problem,) = over["errors"]["data"]
    assert problem["message"] == f"{file_id} can't be read: No such file or directory"
    assert str(path) in caplog.text
    lost = api.http.get(f"/files/{file_id}/content")
    assert (lost.status_code, str(api.folder) in lost.text) == (503, False)
    assert error(lost)["message"] == f"{file_id} was taken away or changed"


# What is kept is lost


LOSSES: dict[str, Callable[[Path], object]] = {
    "folder removed": shutil.rmtree,
    "folder made anew": lambda folder: (shutil.rmtree(folder), (folder / "files").mkdir(parents=True)),
    "folder moved": lambda folder: folder.rename(folder.with_name("elsewhere")),
    "database removed": lambda folder: (folder / "jobs.sqlite").unlink(),
    "database written over": lambda folder: (folder / "jobs.sqlite").write_bytes(b"something else"),
    "database replaced": lambda folder: shutil.copy(folder / "jobs.sqlite", folder / "new").rename(
        folder / "jobs.sqlite"
    ),
}


@pytest.mark.parametrize("what", LOSSES)
@pytest.mark.parametrize("held", [False, True])
def test_a_data_folder_that_is_lost(what: str, held: bool, start: Callable[..., Api], caplog: Any) -> None:
    api = start(max_running_batches=1)
    done = api.run(doubling(5))
    api.dispatcher.held_from = 500
    ids = [api.begin(doubling(4_000), window="1h")["id"] for _ in range(2)]
    wait_for(lambda: api.dispatcher.held)
    api.wait(ids[1], lambda b: b["status"] == "in_progress")
    LOSSES[what](api.folder)
    api.dispatcher.held = held
    for batch_id in ids:
        over = api.wait(batch_id)
        assert (over["status"], over["output_file_id"], over["error_file_id"]) == ("failed", None, None)
        assert over["request_counts"]["completed"] == 0
        assert re.search("taken away|written to|can't be written", over["errors"]["data"][0]["message"])
        assert str(api.folder) not in str(over)
    assert "refused until the server starts anew" in caplog.text
    for answer in (
        api.http.get("/batches"),
        api.http.get(f"/batches/{done['id']}"),
        api.http.get("/files"),
        api.http.get(f"/files/{done['output_file_id']}/content"),
        api.upload(doubling(1)),
        api.create(done["input_file_id"]),
    ):
        assert (answer.status_code, error(answer)["code"]) == (503, "storage_failed"), answer.text
    assert error(api.http.post(f"/batches/{ids[0]}/cancel"))["code"] == "batch_not_cancellable"
    assert api.metric("batches", state="failed") == 2
    api.dispatcher.held = False
    live = api.http.post("/models/function:predict", json={"instances": [4]})
    assert live.json() == {"predictions": [8]}
    assert api.http.get(str(api.http.base_url).removesuffix("/v1/") + "/health").status_code == 200


@pytest.mark.parametrize("how", ["removed", "cut", "longer"])
def test_an_output_that_is_lost_while_its_batch_runs(how: str, api: Api) -> None:
    api.dispatcher.held_from = 500
    batch = api.begin([*doubling(20_000), line("bad", {"instance": [1]})])
    wait_for(lambda: api.dispatcher.held)
    wait_for(lambda: len(files_in(api.folder)) > 1)
    (output,) = files_in(api.folder) - {batch["input_file_id"]}
    # Until something is written there is nothing to damage.
    wait_for(lambda: (api.folder / "files" / output).stat().st_size > 10)
    _damage(api.folder / "files" / output, how)
    # Whatever was under way may have been written by now; the lines that follow come upon the damage.
    api.dispatcher.held = False
    over = api.wait(batch["id"])
    assert (over["status"], over["output_file_id"]) == ("failed", None)
    assert over["request_counts"]["completed"] == 0
    assert over["errors"]["data"][0]["code"] == "batch_failed"
    assert output in over["errors"]["data"][0]["message"]
    assert api.batch(batch["id"]) == over
    assert api.run(doubling(5))["status"] == "completed", "others go on"


@pytest.mark.parametrize("how", ["removed", "cut", "longer"])
def test_an_output_that_is_lost_at_the_last_moment(how: str, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    enter = Store.enter

    def lose(self: Store, job_id: str, state: Any, now: float) -> Any:
        if state == "finalizing":
            for output in files_in(api.folder) - {batch["input_file_id"]}:
                _damage(api.folder / "files" / output, how)
        return enter(self, job_id, state, now)

    monkeypatch.setattr(Store, "enter", lose)
    api.dispatcher.held = True
    batch = api.begin(doubling(50))
    api.dispatcher.held = False
    over = api.wait(batch["id"])
    assert (over["status"], over["output_file_id"], over["request_counts"]["completed"]) == ("failed", None, 0)
    assert [each["code"] for each in over["errors"]["data"]] == ["results_lost"]


def _damage(path: Path, how: str) -> None:
    if how == "removed":
        path.unlink()
    elif how == "cut":
        os.truncate(path, 10)
    else:
        with path.open("ab") as file:
            file.write(b"more\n")


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Results and a full disk


def test_results_wait_for_space(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch, results=100_000)
    batch = api.begin(doubling(3000))
    deadline = time.monotonic() + 30
    while not api.metric("batches_waiting_for_room"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert api.batch(batch["id"])["status"] == "in_progress"
    disk.results = 10**9
    over = api.wait(batch["id"])
    assert over["status"] == "completed"
    check_doubled(api.content(over["output_file_id"]), range(3000))
    assert not api.metric("batches_waiting_for_room")


def test_a_server_without_room_leaves(start: Callable[..., Api], monkeypatch: pytest.MonkeyPatch) -> None:
    api = start()
    disk = FullDisk(monkeypatch, results=100_000)
    batch = api.begin(doubling(3000))
    while not api.metric("batches_waiting_for_room"):
        time.sleep(0.02)
    start(held=True)
    disk.results = 10**9
    api = start()
    check_doubled(api.content(api.wait(batch["id"])["output_file_id"]), range(3000))


def test_states_wait_for_space(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "_FIRST_PAUSE_S", 0.01)
    change, refused = Store.change_job, []

    def full(self: Store, *arguments: Any) -> Any:
        # Every second change: each is refused once.
        if len(refused) % 2 == 0:
            refused.append(True)
            raise StorageFull("there is no space")
        refused.append(False)
        return change(self, *arguments)

    monkeypatch.setattr(Store, "change_job", full)
    assert api.run(doubling(3))["status"] == "completed"
    assert refused == [True, False] * 3


def test_an_upload_without_room(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch, uploads=1_500_000)
    answer = api.upload(b"x" * 3_000_000)
    assert (answer.status_code, error(answer)["code"]) == (507, "storage_full")
    assert "make some" in error(answer)["message"]
    assert str(api.folder) not in answer.text
    assert files_in(api.folder) == set()
    assert api.upload(b"x" * 1_000_000).status_code == 200
    disk.uploads = 10**9
    monkeypatch.setattr(Store, "add_file", _no_room)
    assert api.upload(b"x").status_code == 507
    monkeypatch.undo()
    (kept,) = api.http.get("/files").json()["data"]
    assert files_in(api.folder) == {kept["id"]}
    assert api.http.delete(f"/files/{kept['id']}").status_code == 200


def test_a_new_batch_without_room(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    file_id = api.upload(doubling(1)).json()["id"]
    with monkeypatch.context() as patch:
        patch.setattr(Store, "add_job", _no_room)
        assert api.create(file_id).status_code == 507
    assert api.http.get("/batches").json()["data"] == []
    assert api.wait(api.create(file_id).json()["id"])["status"] == "completed"


def _no_room(self: Store, record: Any) -> None:
    raise StorageFull("there is no space")


# Settings


def test_no_data_dir() -> None:
    with listening(function()[0], data_dir="") as server:
        client = Client(server.url)
        for answer in (client.upload(b"x"), client.create("file-1"), client.http.get("/files")):
            assert (answer.status_code, error(answer)["code"]) == (404, "no_data_dir")
        assert client.metric("batch_lines_total", outcome="completed") == 0


def test_a_server_with_a_key(start: Callable[..., Api]) -> None:
    api = start(api_key="secret")
    assert Client(str(api.http.base_url).removesuffix("/v1/")).upload(b"x").status_code == 401
    check_doubled(api.content(api.run(doubling(10))["output_file_id"]), range(10))


def test_nothing_is_made_by_looking(api: Api) -> None:
    assert api.http.get("/files").json()["data"] == []
    assert api.http.get("/batches").json()["data"] == []
    assert api.create("file-1").status_code == 404
    assert not api.folder.exists()


def test_unknown_methods(api: Api) -> None:
    answer = api.http.put("/files")
    assert (answer.status_code, json.loads(answer.content)["error"]["code"]) == (405, "method_not_allowed")


def test_a_data_folder_that_can_not_be_looked_at_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(JobError, match=f"{tmp_path} can't be written: Permission denied"):
        Folder.exists(tmp_path)
