"""Batches through the `openai` client and a real `chairlift serve`, which is killed while they run."""

import contextlib
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch
from support.batch_harness import OVER, check_doubled, files_in, jsonl, line
from support.serve_process import WORKER_MODELS, Server

CHAT = "/v1/chat/completions"
SLOW = "/v1/models/slow:predict"
pytestmark = pytest.mark.processes


@pytest.fixture
def server(models_server: Server) -> Server:
    return models_server


def chats(count: int) -> list[dict[str, Any]]:
    return [
        line(
            f"chat {i}",
            {
                "model": "chat",
                "max_tokens": 4,
                "temperature": 0,
                "messages": [{"role": "user", "content": f"What is {i} plus {i}?"}],
            },
            CHAT,
        )
        for i in range(count)
    ]


def wait(client: openai.OpenAI, batch: Batch) -> Batch:
    deadline = time.monotonic() + 100
    while batch.status not in OVER:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def begin(client: openai.OpenAI, lines: list[Any], endpoint: Any, **more: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def test_the_openai_clients_whole_flow(server: Server, tmp_path: Path) -> None:
    client = server.openai
    path = tmp_path / "chats.jsonl"
    path.write_bytes(jsonl(chats(40)))
    life: Any = {"anchor": "created_at", "seconds": 3600}
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch", expires_after=life)
    assert (uploaded.filename, uploaded.status, uploaded.bytes) == ("chats.jsonl", "processed", path.stat().st_size)
    assert uploaded.expires_at == uploaded.created_at + 3600
    assert client.files.retrieve(uploaded.id) == uploaded
    assert client.files.wait_for_processing(uploaded.id) == uploaded
    assert client.files.content(uploaded.id).content == path.read_bytes()

    batch = client.batches.create(
        input_file_id=uploaded.id,
        endpoint=CHAT,
        completion_window="24h",
        metadata={"night": "one"},
        output_expires_after=life,
    )
    assert (batch.status, batch.metadata) == ("validating", {"night": "one"})
    batch = wait(client, batch)
    assert (batch.status, batch.model, batch.errors, batch.error_file_id) == ("completed", "chat", None, None)
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (40, 40)
    assert batch.usage is not None
    assert batch.output_file_id is not None
    results = {
        each["custom_id"]: each for each in map(json.loads, client.files.content(batch.output_file_id).iter_lines())
    }
    assert results.keys() == {f"chat {i}" for i in range(40)}
    usages = [each["response"]["body"]["usage"] for each in results.values()]
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages)
    live = client.chat.completions.create(**chats(8)[7]["body"])
    assert results["chat 7"]["response"]["body"]["choices"][0]["message"]["content"] == live.choices[0].message.content

    assert [each.id for each in client.files.list(purpose="batch_output")] == [batch.output_file_id]
    assert [each.id for each in client.files.list(limit=1)] == [batch.output_file_id, uploaded.id]
    assert client.files.delete(batch.output_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(batch.output_file_id)


def test_embeddings_and_a_function(server: Server) -> None:
    client = server.openai
    texts = [line(f"text {i}", {"model": "bert", "input": f"hello {i}"}, "/v1/embeddings") for i in range(30)]
    numbers = [line(f"c{i}", {"instances": [i]}, SLOW) for i in range(30)]
    batches = [begin(client, texts, "/v1/embeddings"), begin(client, numbers, SLOW)]
    embedded, counted = (wait(client, batch) for batch in batches)
    assert (embedded.status, counted.status) == ("completed", "completed")
    assert embedded.output_file_id is not None
    assert counted.output_file_id is not None
    results = [json.loads(each) for each in client.files.content(embedded.output_file_id).iter_lines()]
    assert len({each["custom_id"] for each in results}) == 30
    assert all(len(each["response"]["body"]["data"][0]["embedding"]) == 64 for each in results)
    plain = server.http.get(f"/v1/files/{counted.output_file_id}/content").text.splitlines()
    assert {each["custom_id"]: each["response"]["body"]["predictions"] for each in map(json.loads, plain)} == {
        f"c{i}": [i + 1] for i in range(30)
    }


def test_cancel_list_and_validation(server: Server) -> None:
    client = server.openai
    long = begin(client, [line(f"c{i}", {"instances": [i]}, SLOW) for i in range(20_000)], SLOW)
    assert client.batches.cancel(long.id).status in ("cancelling", "cancelled")
    bad = begin(client, [*chats(2), line("chat 0", {"model": "chat", "messages": []}, CHAT), "{"], CHAT)
    bad = wait(client, bad)
    assert bad.status == "failed"
    assert bad.errors is not None
    assert bad.errors.data is not None
    assert [(each.code, each.line) for each in bad.errors.data] == [("duplicate_custom_id", 3), ("invalid_json", 4)]
    long = wait(client, long)
    assert (long.status, long.request_counts is not None) == ("cancelled", True)
    listed = [each.id for each in client.batches.list(limit=1)]
    assert listed[:2] == [bad.id, long.id]
    assert len(listed) == len(set(listed))
    with pytest.raises(openai.ConflictError, match="can't be cancelled"):
        client.batches.cancel(bad.id)
    with pytest.raises(openai.BadRequestError, match="endpoint may be"):
        client.batches.create(input_file_id="file-x", endpoint="/v1/messages", completion_window="24h")


def test_a_second_server_is_refused(server: Server, models_settings: Path) -> None:
    server.openai.files.create(file=b"x", purpose="batch")
    # Of other models, which start sooner: the folder is what counts.
    again = [sys.executable, "-P", "-m", "chairlift.cli", "serve", f"{WORKER_MODELS}:Doubles", "--port", "0"]
    again += ["--data-dir", str(models_settings.parent / "data")]
    second = subprocess.run(
        again, capture_output=True, text=True, timeout=60, cwd=models_settings.parents[1], check=False
    )
    assert second.returncode == 1
    assert "in use by another server" in second.stderr
    assert "data_dir" in second.stderr


def adding(count: int) -> list[dict[str, Any]]:
    """Lines whose answers are twice their numbers."""
    return [line(f"c{i}", {"instances": [2 * i - 1]}, SLOW) for i in range(count)]


def completed(server: Server, batch_id: str) -> int:
    counts = server.openai.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def written(data: Path) -> int:
    """Bytes of all files in a data folder."""
    return sum(path.stat().st_size for path in (data / "files").iterdir())


def killed(folder: Path, times: int, lines: int, chance: random.Random) -> None:
    """Run a batch while its server is killed again and again, amid it; every line has its one right result."""
    shutil.copy(WORKER_MODELS, folder)
    command = (str(folder / "worker_models.py:Slow"), "--served-model-name", "slow", "--max-batch-size", "4")
    data = folder / "data"
    batch_id = ""
    kept = []
    for attempt in range(times):
        with Server(*command, "--data-dir", str(data)) as server:
            if not attempt:
                batch_id = begin(server.openai, adding(lines), SLOW).id
            kept.append(completed(server, batch_id))
            before = written(data)
            while written(data) <= before or completed(server, batch_id) <= kept[-1]:
                time.sleep(0.01)
            # By now what was written may be committed, or not.
            time.sleep(chance.uniform(0.0, 0.2))
            assert completed(server, batch_id) < lines, "it was over before it was killed"
            server.process.send_signal(signal.SIGKILL)
    with Server(*command, "--data-dir", str(data)) as server:
        over = wait(server.openai, server.openai.batches.retrieve(batch_id))
        assert (over.status, over.error_file_id) == ("completed", None)
        assert over.output_file_id is not None
        check_doubled(server.openai.files.content(over.output_file_id).content, range(lines))
        assert files_in(data) == {over.input_file_id, over.output_file_id}
    print("lines kept at each start:", kept)
    assert kept == sorted(kept)


def test_killed_twice(tmp_path: Path) -> None:
    killed(tmp_path, 2, 2000, random.Random(5))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_twenty_times(tmp_path: Path) -> None:
    killed(tmp_path, 20, 20_000, random.Random(6))


def test_told_to_leave(tmp_path: Path) -> None:
    """SIGTERM: what is done is kept, what was under way is done by the next server."""
    shutil.copy(WORKER_MODELS, tmp_path)
    command = (
        str(tmp_path / "worker_models.py:Slow"),
        "--served-model-name",
        "slow",
        "--data-dir",
        str(tmp_path / "d"),
    )
    with Server(*command, "--max-batch-size", "4") as server:
        server.wait_ready()
        batch = begin(server.openai, adding(1000), SLOW)
        while (counts := server.openai.batches.retrieve(batch.id).request_counts) is None or counts.completed < 50:
            time.sleep(0.01)
        server.process.terminate()
        assert server.process.wait(20) == 0
    with Server(*command) as server:
        server.wait_ready()
        between = server.openai.batches.retrieve(batch.id)
        assert between.request_counts is not None
        assert between.request_counts.completed >= 50
        over = wait(server.openai, between)
        assert over.output_file_id is not None
        check_doubled(server.openai.files.content(over.output_file_id).content, range(1000))


def test_an_upload_that_is_under_way_ends_before_the_server_leaves(tmp_path: Path) -> None:
    data = tmp_path / "d"
    parts = [b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n']
    parts += [b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\n', b"{}\n\r\n--x--\r\n"]
    kind = "Host: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\nExpect: 100-continue\r\n"
    head = f"POST /v1/files HTTP/1.1\r\n{kind}Content-Length: {sum(map(len, parts))}\r\n\r\n"
    with Server(f"{WORKER_MODELS}:Doubles", "--data-dir", str(data)) as server:
        server.wait_ready()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(head.encode())
            assert client.recv(4096).startswith(b"HTTP/1.1 100 "), "it has begun"
            client.sendall(parts[0])
            server.process.terminate()
            deadline = time.monotonic() + 60
            with contextlib.suppress(ConnectionRefusedError):
                while True:
                    socket.create_connection(("127.0.0.1", server.port), timeout=60).close()
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            client.sendall(b"".join(parts[1:]))
            answer = b""
            while part := client.recv(65536):
                answer += part
        head, _, body = answer.decode().partition("\r\n\r\n")
        assert head.startswith("HTTP/1.1 200 "), answer
        assert files_in(data) == {json.loads(body)["id"]}
        assert server.process.wait(20) == 0
