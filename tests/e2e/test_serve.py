"""The real server process with a real worker: what a client, a probe, a vandal and an operator see."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.processes import end_with_tests
from support.serve_process import WITH_GRPC, WORKER_MODELS, Server, language_model
from support.stub_runner import without_torch

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model, "--max-num-seqs", "16", "--max-body-bytes", "100000") as it:
        yield it


@contextlib.contextmanager
def serving(model: Path, *flags: str, **settings: Any) -> Iterator[Server]:
    small = ("--num-threads", "1", "--dtype", "float32", "--kv-cache-gb", "0.01")
    with Server(str(model), *small, *flags, **settings) as it:
        it.wait_ready()
        yield it


def with_stub(model: Path, *flags: str) -> contextlib.AbstractContextManager[Server]:
    """The same for tests of processes, with a worker that computes nothing."""
    return serving(model, *flags, environ=without_torch())


def test_openai_client_works_unchanged(server: Server) -> None:
    client = server.openai
    assert [m.id for m in client.models.list()] == ["tiny"]
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    fixed: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **fixed)
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content is not None
    assert len(whole.choices[0].logprobs.content) == 20
    stream = client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **fixed
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
    text = client.completions.create(prompt=["hello", "the quick"], n=2, seed=1, logprobs=1, echo=True, **fixed)
    assert [choice.index for choice in text.choices] == [0, 1, 2, 3]
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="other", messages=messages)
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="tiny", prompt="hello", max_tokens=10_000)


def test_seeded_samples_repeat_and_extend(server: Server) -> None:
    body = {"seed": 11, "max_tokens": 12, "n": 3}
    first = [choice["text"] for choice in server.complete(**body).json()["choices"]]
    assert first == [choice["text"] for choice in server.complete(**body).json()["choices"]]
    assert server.complete(seed=13, max_tokens=12).json()["choices"][0]["text"] == first[2]
    assert len(set(first)) == 3


def test_prompt_scores_do_not_depend_on_the_prefix_cache(server: Server) -> None:
    prompt = "the quick brown fox sees naïve words. " * 4
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    fresh = server.complete(**body, cache_salt="a").json()["choices"][0]["logprobs"]
    server.complete(prompt=prompt, max_tokens=1)
    cached = server.complete(**body).json()["choices"][0]["logprobs"]
    assert len(fresh["tokens"]) == len(fresh["token_logprobs"]) == len(fresh["text_offset"])
    assert cached["tokens"] == fresh["tokens"]
    assert cached["token_logprobs"][1:] == pytest.approx(fresh["token_logprobs"][1:], abs=1e-4)
    repeated = server.complete(prompt=prompt, max_tokens=1).json()["usage"]
    assert repeated["prompt_tokens_details"]["cached_tokens"] >= 16


RUBBISH = [
    b"GARBAGE\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: nine\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 40_000,
    b"GET /v1/models\x00 HTTP/1.1\r\n\r\n",
]


@pytest.mark.parametrize("raw", RUBBISH, ids=lambda raw: repr(raw[:40]))
def test_rubbish_is_answered_or_dropped(server: Server, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(OSError):
            while part := connection.recv(65536):
                answer += part
    assert answer == b"" or re.match(rb"HTTP/1\.1 4\d\d ", answer), answer[:200]
    assert server.http.get("/health/ready").status_code == 200


def test_bodies_beyond_the_limit(server: Server) -> None:
    assert server.http.post("/v1/completions", content=b"x", headers={"content-type": "text/plain"}).status_code == 415
    kind = {"content-type": "application/json"}
    declared = httpx.post(f"{server.url}/v1/completions", content=b" " * 150_000, headers=kind)
    assert declared.status_code == 413
    streamed = httpx.post(f"{server.url}/v1/completions", content=(b" " * 1000 for _ in range(300)), headers=kind)
    assert streamed.status_code == 413
    assert "100000 bytes (max_body_bytes)" in streamed.json()["error"]["message"]


def test_many_streams_a_third_dropped(server: Server) -> None:
    """Those that stay get the text that they get alone, and nothing is left behind."""
    prompts = [f"hello world {i} the quick" for i in range(200)]
    body = {"temperature": 0, "max_tokens": 24}
    stay = [prompt for index, prompt in enumerate(prompts) if index % 3 != 1]
    alone = {p: server.complete(prompt=p, **body).json()["choices"][0]["text"] for p in stay}

    def one(index: int) -> str | None:
        asked = {"prompt": prompts[index], "stream": True} | body
        made = ""
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=60) as answer:
            for count, line in enumerate(line for line in answer.iter_lines() if line):
                if index % 3 == 1 and count == index % 17:
                    return None
                if line != "data: [DONE]":
                    made += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return made

    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = list(pool.map(one, range(len(prompts))))
    assert sum(text is None for text in texts) == 67
    for prompt, text in zip(prompts, texts, strict=True):
        assert text is None or text == alone[prompt]
    _nothing_is_held(server)


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_frees_seat_and_blocks(server: Server, stream: bool) -> None:
    before = server.metric("requests_finished_total", reason="abort")
    body = json.dumps({"prompt": "hello", "n": 8, "max_tokens": 400, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head % len(body) + body)
    _until(lambda: server.metric("requests_running") == 8)
    connection.close()
    _until(lambda: server.metric("requests_finished_total", reason="abort") == before + 8)
    _nothing_is_held(server)


def _nothing_is_held(server: Server) -> None:
    assert server.complete(max_tokens=1).status_code == 200
    _until(lambda: server.metric("kv_blocks_used") == 0 and server.metric("requests_running") == 0)


def _until(condition: Any, timeout: float = 10) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_demo_is_served_without_a_model(demo_server: Server) -> None:
    asked: list[Any] = [{"role": "user", "content": "Hello!"}]
    made = demo_server.openai.chat.completions.create(model="demo", messages=asked, temperature=0, max_tokens=40)
    assert made.choices[0].message.content
    assert made.choices[0].finish_reason in ("stop", "length")


def test_full_queue_is_429_with_retry_after(model: Path) -> None:
    with with_stub(model, "--max-waiting", "2", "--max-num-seqs", "1") as server, ThreadPoolExecutor(8) as pool:
        long = [pool.submit(server.complete, max_tokens=300) for _ in range(8)]
        answers = [each.result() for each in long]
        codes = sorted(answer.status_code for answer in answers)
        assert codes[0] == 200
        assert codes[-1] == 429
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert server.complete(n=3).status_code == 400


def test_killed_worker_is_an_error_and_then_ready_again(model: Path) -> None:
    with with_stub(model) as server:
        outcomes: list[str] = []

        def client(stream: bool) -> None:
            body = {"prompt": "hello", "max_tokens": 400, "stream": stream}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
            if answer.status_code == 200:
                last = answer.text.strip().split("\n\n")[-1].removeprefix("data: ")
                outcomes.append("whole" if last == "[DONE]" else "error" if "error" in json.loads(last) else "whole")
            else:
                outcomes.append(f"{answer.status_code}, retry after {answer.headers['retry-after']}")

        clients = [threading.Thread(target=client, args=(i % 2 == 0,)) for i in range(200)]
        for each in clients:
            each.start()
        _until(lambda: server.metric("requests_running") >= 32)
        os.kill(server.worker(), signal.SIGKILL)
        _until(lambda: server.http.get("/health/ready").status_code == 503)
        assert server.http.get("/health/live").status_code == 200
        assert server.complete().status_code == 503
        for each in clients:
            each.join(20)
        assert len(outcomes) == 200
        assert "error" in outcomes
        assert "503, retry after 1" in outcomes
        server.wait_ready()
        assert server.complete(max_tokens=2).status_code == 200
        assert server.metric("worker_restarts_total") == 1


def test_sigterm_drains(model: Path) -> None:
    with serving(model, *WITH_GRPC) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.complete, max_tokens=400, ignore_eos=True)
        _until(lambda: server.metric("requests_running") == 1)
        # To all of its group, as a shell's `kill %1` and `timeout` do.
        os.killpg(server.process.pid, signal.SIGTERM)
        with httpx.Client(base_url=server.url) as other:
            _until(lambda: other.get("/health/ready").status_code == 503 or running.done())
            assert other.post("/v1/completions", json={"prompt": "late"}).status_code == 503
        assert running.result().json()["usage"]["completion_tokens"] == 400
        assert server.process.wait(10) == 0


def test_who_is_not_done_when_draining_ends_is_told(model: Path) -> None:
    with with_stub(model, "--max-num-seqs", "1", "--drain-timeout-s", "0.2") as server:
        # One after the other: all together they take seconds.
        body = {"prompt": "hello", "n": 64, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            events = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
            assert "choices" in json.loads(next(events))
            server.process.send_signal(signal.SIGTERM)
            *_, last = events
        assert "error" in json.loads(last)
        assert server.process.wait(10) == 0


def test_second_signal_ends_at_once(model: Path) -> None:
    with with_stub(model) as server, ThreadPoolExecutor(1) as pool:
        worker = server.worker()
        running = pool.submit(server.complete, n=32, max_tokens=2000)
        _until(lambda: server.metric("requests_running") == 32)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(5) == 128 + signal.SIGINT
        with pytest.raises(httpx.TransportError):
            running.result()
        _until(lambda: not Path(f"/proc/{worker}").exists())


def test_model_that_cannot_load_ends_the_server(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    made = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "chairlift.cli",
            "serve",
            "--port",
            "0",
            "--implementation",
            "native",
            str(broken),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (made.returncode, made.stdout) == (1, "")
    assert made.stderr.startswith("chairlift: broken: model_type 'mamba' is not supported")


def test_model_whose_weights_are_missing_is_never_said_to_be_served(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken, ignore=shutil.ignore_patterns("*.safetensors"))
    with Server(str(broken)) as server:
        assert server.wait_ended() == 1
        said = "".join(server.lines)
    assert "safetensors" in said
    assert "serves" not in said


def test_a_worker_that_is_killed_while_it_loads_ends_the_server() -> None:
    with Server(f"{WORKER_MODELS}:DiesLoading") as server:
        assert server.wait_ended() == 1
        assert "chairlift: DiesLoading: its worker died (exit status 5) while it loaded" in "".join(server.lines)


def test_a_stopped_worker_is_replaced_and_none_outlives_its_front(model: Path) -> None:
    with with_stub(model, "--heartbeat-timeout-s", "1") as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.complete, max_tokens=400, ignore_eos=True)
        _until(lambda: server.metric("requests_running") == 1)
        stopped = server.worker()
        os.kill(stopped, signal.SIGSTOP)
        answer = running.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")
        assert "hung (its process was stopped" in answer.json()["error"]["message"]
        server.wait_ready()
        assert server.metric("worker_restarts_total") == 1
        assert server.metric("requests_running") == server.metric("kv_blocks_used") == 0
        assert server.metric("kv_blocks") > 0
        assert not Path(f"/proc/{stopped}").exists()
        os.kill(last := server.worker(), signal.SIGSTOP)
        server.process.kill()
        server.process.wait()
        _until(lambda: not _runs(last))


def _runs(pid: int) -> bool:
    """Whether a process is there, and not only its entry, which waits for whoever adopted it."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_front_never_imports_torch() -> None:
    modules = "chairlift.cli, chairlift.run.main, chairlift.server.front, chairlift.text.encoding"
    modules += ", chairlift.runners.check_model"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    made = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert made.stdout.strip() == "False"


def test_grpc_beside_http(models_server: Server) -> None:
    triton = pytest.importorskip("tritonclient.grpc")
    client = triton.InferenceServerClient(f"127.0.0.1:{models_server.grpc_port}")
    assert client.is_server_ready()
    assert client.is_model_ready("chat")
    client.close()


def test_it_serves_and_leaves_when_nobody_reads_what_it_prints(model: Path) -> None:
    command = [sys.executable, "-P", "-m", "chairlift.cli", "serve", str(model), "--port", "0", "--kv-cache-gb", "0.01"]
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | without_torch(),
        preexec_fn=end_with_tests,
    )
    try:
        assert server.stdout is not None
        url = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
        assert url is not None
        server.stdout.close()
        deadline = time.monotonic() + 40
        while httpx.get(f"{url[0]}/health/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    finally:
        server.kill()
        server.wait()
    assert server.returncode >= 0, "it left by itself"
