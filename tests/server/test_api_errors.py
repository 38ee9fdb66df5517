"""What errors tell a client, and what of it stays here."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from support.items_harness import function, listening
from support.server_harness import Front

from chairlift.errors import (
    ITEM_ENDS_WORKER,
    ConfigError,
    InvalidRequest,
    JobError,
    RequestFailed,
    StorageFull,
    StoreBusy,
    Unavailable,
    UnsupportedModel,
    WorkerLost,
)
from chairlift.server.http.api_errors import as_api_error, without_folders


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "there is no space for /srv/data/files/file-ab12 (No space left)",
            "there is no space for file-ab12 (No space left)",
        ),
        ("/srv/data/jobs.sqlite can't be used", "jobs.sqlite can't be used"),
        ("no file /a/x.onnx (in the working directory /home/me)", "no file x.onnx (in the working directory me)"),
        ("/models has no weights", "models has no weights"),
        ("[Errno 2] No such file: '/srv/my models/x y.txt'", "[Errno 2] No such file: 'x y.txt'"),
        ('open("/srv/a/b"): failed', 'open("b"): failed'),
        ("path=/srv/x/y, model:/srv/a/b and [/srv/c/d]", "path=y, model:b and [d]"),
        ("`/srv/m/x` is no folder", "`x` is no folder"),
    ],
)
def test_folders_are_left_out(text: str, told: str) -> None:
    assert without_folders(text) == told


@pytest.mark.parametrize(
    "text",
    [
        "3 / 4 tokens/s, n/a, and/or",
        "see https://example.com/a/b",
        "the model `team/name` is failed",
        "chairlift-data/files/file-1 can't be written",
        "'a' / 'b/c'",
    ],
)
def test_all_else_stays(text: str) -> None:
    assert without_folders(text) == text


@pytest.mark.parametrize(
    "kind", [JobError, StorageFull, StoreBusy, RequestFailed, Unavailable, ConfigError, UnsupportedModel]
)
def test_a_servers_own_errors_keep_folders_in_the_log(kind: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    told = as_api_error(kind("/srv/data/thing is broken" if kind is not Unavailable else "failed: /srv/data/thing"))
    assert "thing" in str(told)
    assert "/srv" not in str(told)
    # Why a model is not there was said when it failed, not with every request for it.
    assert ("/srv/data/thing" in caplog.text) == (kind is not Unavailable)


@pytest.mark.parametrize(
    ("error", "status", "code", "alone"),
    [
        (WorkerLost("it died", alone=True), 503, "worker_lost", "alone"),
        (WorkerLost("it died"), 503, "worker_lost", None),
        (Unavailable("it is draining"), 503, "unavailable", None),
        (RequestFailed("it died", ITEM_ENDS_WORKER), 500, "item_ends_worker", "alone"),
        (RequestFailed("it raised"), 500, "request_failed", None),
    ],
)
def test_who_alone_may_have_ended_a_worker_is_told_by_a_header(
    error: Exception, status: int, code: str, alone: str | None
) -> None:
    told = as_api_error(error)
    assert (told.status, told.body.code, told.headers.get("X-Ends-Worker")) == (status, code, alone)
    assert ("Retry-After" in told.headers) == (status == 503)


def test_what_a_client_sent_is_told_as_it_was() -> None:
    assert str(as_api_error(InvalidRequest("url is '/v1/x', not '/v1/y'"))) == "url is '/v1/x', not '/v1/y'"


def test_why_a_model_failed_is_told_without_folders(tmp_path: Path) -> None:
    failure = f"ConfigError: {tmp_path}/config.json: pooling"
    front = Front()
    front.client.state, front.client.failure = "failed", failure
    for method, path in (("GET", "/health/ready"), ("POST", "/v1/completions"), ("POST", "/v2/repository/index")):
        answer = asyncio.run(front.call(method, path, {"prompt": "x"} if path == "/v1/completions" else None))
        assert "config.json: pooling" in answer.body.decode()
        assert str(tmp_path) not in answer.body.decode()
    service, _ = function()
    service.state, service.failure = "failed", failure
    with listening(service, data_dir="") as server:
        answer = httpx.post(
            f"{server.url}/v1/models/function:predict", content=json.dumps({"instances": [1]}), headers=JSON
        )
        assert (answer.status_code, str(tmp_path) in answer.text) == (503, False)


JSON = {"Content-Type": "application/json"}
