"""Why a request waits, of a real server with one place: while it does, and when it has ended."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.key_files import bearer, key_of, write_keys
from support.serve_process import Server, language_model
from support.stub_runner import without_torch

pytestmark = pytest.mark.processes
LONG = {"prompt": "hello world", "max_tokens": 80, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("why")
    people: dict[str, Any] = {
        "alice": {"rights": ["infer"]},
        "bob": {"rights": ["infer"]},
        "root": {"rights": ["admin"]},
    }
    keys = write_keys(folder / "keys.toml", **people)
    model, flags = language_model(folder / "tiny"), ("--max-num-seqs", "1", "--api-keys", str(keys))
    with Server(str(model), *flags, key=key_of("alice"), environ=without_torch()) as it:
        it.wait_ready()
        yield it


def until(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def command(server: Server, *arguments: str, name: str = "alice") -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"CHAIRLIFT_API_KEY": key_of(name)}
    argv = [sys.executable, "-m", "chairlift.cli", *arguments, server.url]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)


def test_a_request_that_waits_behind_others_says_so_and_has_its_phases_afterwards(server: Server) -> None:
    def waiting() -> dict[str, Any] | None:
        parts = server.http.get("/v1/requests", params={"limit": 100}).json()["data"]
        told = [each for each in parts if each["reason"] == "waiting_for_slots" and each["predicted"]]
        return told[-1] if told else None

    with ThreadPoolExecutor(25) as pool:
        others = [pool.submit(server.http.post, "/v1/completions", json=LONG) for _ in range(24)]
        told = until(waiting)
        assert (told["state"], told["model"]) == ("waiting", "tiny")
        assert told["position"] == told["ahead"]["count"] + 1
        assert told["ahead"]["others"] == 0, "they are all of one tenant"
        predicted = told["predicted"]
        assert predicted["first_token"]["in_s"] >= predicted["start"]["in_s"] >= 0
        assert predicted["end"]["in_s"] > predicted["first_token"]["in_s"]
        assert told["why"].startswith("every place to run is taken")
        assert server.http.get("/v1/requests", headers=bearer("bob")).json()["data"] == []
        assert server.http.get(f"/v1/requests/{told['id']}", headers=bearer("bob")).status_code == 404
        for other in others:
            assert other.result().status_code == 200
    (part,) = server.http.get(f"/v1/requests/{told['id']}").json()["parts"]
    assert (part["state"], part["finish_reason"], part["tokens"], part["preemptions"]) == ("ended", "length", 80, 0)
    phases = part["phases"]
    assert all(phases[name] > 0 for name in ("queued_s", "prefill_s", "decode_s"))
    parts = sum(phases[name] for name in ("queued_s", "prefill_s", "decode_s"))
    assert parts == pytest.approx(phases["total_s"], abs=0.01)
    assert (part["steps"], part["mean_batch"]) == (80, 1)
    assert part["hints"][0]["setting"] == "max_num_seqs"
    assert part["hints"][0]["seconds"] <= phases["queued_s"]
    said = command(server, "why", told["id"])
    assert said.returncode == 0, said.stderr
    assert "max_num_seqs" in said.stdout
    simulated = command(server, "why", "--what-if", told["id"])
    assert simulated.returncode == 0, simulated.stderr
    assert "the twin takes" in simulated.stdout
    # More slots are only as good as what their steps were measured to take here: tests/server/test_forecast.py.
    assert "with another machine like this one beside it" in simulated.stdout, "many waited for one place"
    refused = command(server, "why", "--what-if", told["id"], name="bob")
    assert refused.returncode == 1
    assert "there is no request" in refused.stderr


def test_whoever_watches_sees_who_has_the_one_slot(server: Server) -> None:
    def watch() -> tuple[Any, list[Any]]:
        told = server.http.get("/v1/live", params={"limit": 1}, headers=bearer("root"))
        (model,) = json.loads(told.text.removeprefix("data: "))["models"]
        return model, [bar for bar in model["bars"] if bar[4] is None]

    with ThreadPoolExecutor(24) as pool:
        others = [pool.submit(server.http.post, "/v1/completions", json=LONG) for _ in range(24)]
        model, bars = until(lambda: (seen := watch())[1] and seen)
        ((name, slot, *_, owner, reason),) = bars
        assert (model["slots"], slot, owner, reason) == (1, 0, "alice", None)
        for other in others:
            assert other.result().status_code == 200
    (part,) = server.http.get(f"/v1/requests/{name}").json()["parts"]
    assert part["tokens"] == 80
    model, bars = watch()
    assert bars == []
    assert name in {bar[0] for bar in model["bars"]}
    assert 0 < model["kv"][1] < model["kv"][2], "their prompts and answers are still known"
    assert server.http.get("/v1/live").status_code == 403


def test_top_shows_a_table_once_where_there_is_no_terminal(server: Server) -> None:
    said = command(server, "top")
    assert (said.returncode, said.stdout) == (0, "0 requests\n\n")


def test_the_id_in_an_answers_header_is_the_one_to_ask_for(server: Server) -> None:
    answer = server.http.post("/v1/completions", json=LONG | {"max_tokens": 3, "n": 2})
    told = server.http.get(f"/v1/requests/{answer.headers['x-request-id']}").json()
    assert [part["tokens"] for part in told["parts"]] == [3, 3]


def test_a_worker_that_is_gone_takes_its_requests_with_it(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(server.http.post, "/v1/completions", json=LONG | {"n": 20})
        until(lambda: server.http.get("/v1/requests").json()["data"])
        os.kill(server.worker(), 9)
        assert lost.result().status_code == 503
    assert server.http.get("/v1/requests").json()["data"] == []
    (part, *_) = server.http.get("/v1/requests", params={"status": "ended"}).json()["data"]
    assert part["finish_reason"] == "error"
    until(lambda: server.http.get("/health/ready").status_code == 200)
