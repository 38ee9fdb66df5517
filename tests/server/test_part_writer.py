"""Streams whose events are written as soon as their tokens come, over real sockets."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest
from support.items_harness import Listening, listening
from support.server_harness import INFO, Answer, FakeClient, Front, run, tokenizer, until

from chairlift.config.server import ServerConfig
from chairlift.engine.sequences.client import Stream
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.errors import RequestFailed
from chairlift.server.http import exchange, part_sender
from chairlift.server.http.part_sender import PartSender
from chairlift.server.http.part_writer import WRITER, PartQueue, PartWriter
from chairlift.server.models import sequence_service
from chairlift.server.models.sequence_service import Sample, SequenceService

SENTENCE = "hello world! "
TOKENS = 3000
_USAGE = "include_usage", "continuous_usage_stats"
_MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is written at once, as it goes out."""
    parts: list[bytes] = []
    write = PartWriter.write

    def noting(self: PartWriter, *given: bytes) -> None:
        parts.append(b"".join(given))
        write(self, *given)

    monkeypatch.setattr(PartWriter, "write", noting)
    return parts


@pytest.fixture
def server() -> Iterator[Listening]:
    client = FakeClient(tokenizer().encode(SENTENCE))
    client.info = msgspec.structs.replace(INFO, max_model_len=10**6, num_blocks=10**6)
    with listening(SequenceService(client, tokenizer(), "tiny", ServerConfig())) as it:
        yield it


def texts_of(lines: list[str]) -> dict[int, str]:
    """The texts of a stream of completions or chats, by index."""
    assert lines.pop() == "[DONE]"
    found: dict[int, str] = {}
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        found[choice["index"]] = found.get(choice["index"], "") + text
    return found


def events(raw: str) -> list[str]:
    return [line.removeprefix("data: ") for line in raw.splitlines() if line]


def whole(tokens: int) -> str:
    ids = tokenizer().encode(SENTENCE)
    return tokenizer().decode([ids[step % len(ids)] for step in range(tokens)])


def delta_texts(lines: list[str]) -> str:
    """The text of a stream of a response or a message."""
    found = [json.loads(line) for line in lines if line.startswith("{")]
    deltas = [each["delta"] for each in found if each["type"] in ("response.output_text.delta", "content_block_delta")]
    numbers = [each["sequence_number"] for each in found if "sequence_number" in each]
    assert numbers == list(range(len(numbers)))
    return "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas)


@pytest.mark.parametrize("kind", ["completions", "chat/completions", "responses", "messages"])
@pytest.mark.parametrize("waits", [False, True], ids=["quickly", "slowly"])
def test_a_stream_is_whole_however_its_client_reads(
    kind: str, waits: bool, server: Listening, written: list[bytes]
) -> None:
    asked: dict[str, Any] = {"prompt": "hello"}
    if kind != "completions":
        asked = {"input" if kind == "responses" else "messages": [{"role": "user", "content": "hi"}], "model": "tiny"}
    limit = "max_output_tokens" if kind == "responses" else "max_tokens"
    body = json.dumps(asked | {"stream": True, limit: TOKENS}).encode()
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(20)
        reader.connect(("127.0.0.1", server.port))
        more = "Host: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        reader.sendall(f"POST /v1/{kind} HTTP/1.1\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        raw = b""
        while part := reader.recv(65536):
            raw += part
            if waits and len(raw) < 200_000:
                time.sleep(0.01)
    _, _, chunks = raw.partition(b"\r\n\r\n")
    data = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        data, chunks = data + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    lines = events(data.decode())
    found = texts_of(lines) if kind.endswith("completions") else {0: delta_texts(lines)}
    assert found == {0: whole(TOKENS)}
    assert written
    if waits:
        assert len(written) < TOKENS - 2


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"n": 2}, {0: whole(50), 1: whole(50)}),
        ({"prompt": ["hello", "hello"]}, {0: whole(50), 1: whole(50)}),
        ({"stop": "d! h"}, {0: "hello worl"}),
    ],
    ids=str,
)
def test_streams_of_several_and_those_that_a_string_may_stop_are_read_by_their_tasks(
    more: dict[str, Any], expected: dict[int, str], server: Listening, written: list[bytes]
) -> None:
    body = {"prompt": "hello", "stream": True, "max_tokens": 50, "ignore_eos": True} | more
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert texts_of(events(answer.text)) == expected
    assert not written


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    "more",
    [{}, {"stream_options": {"include_usage": True}}, {"stream_options": dict.fromkeys(_USAGE, True)}, {"logprobs": 1}],
    ids=str,
)
def test_events_are_the_same_whoever_writes_them(
    kind: str, more: dict[str, Any], server: Listening, written: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"prompt": "hello"} if kind == "completions" else {"messages": _MESSAGES}
    body = asked | {"stream": True, "max_tokens": 50, "ignore_eos": True} | more
    if "logprobs" in more and kind != "completions":
        body["logprobs"] = True

    def streamed() -> list[dict[str, Any]]:
        lines = events(httpx.post(f"{server.url}/v1/{kind}", json=body).text)
        assert lines.pop() == "[DONE]"
        return [json.loads(line) | {"id": "", "created": 0} for line in lines]

    at_once, count = streamed(), len(written)
    monkeypatch.setattr(PartWriter, "is_ready", False)
    assert streamed() == at_once
    # A part may have the tokens of two steps if its task was late.
    assert (count > 30, len(written)) == (True, count)


def test_usage_and_the_end_follow_what_was_written(server: Listening, written: list[bytes]) -> None:
    body = {"prompt": "hello", "stream": True, "max_tokens": 50, "stream_options": {"include_usage": True}}
    answer = httpx.post(f"{server.url}/v1/completions", json=body | {"ignore_eos": True})
    lines = events(answer.text)
    assert texts_of(list(lines)) == {0: whole(50)}
    assert json.loads(lines[-2])["usage"]["completion_tokens"] == 50
    assert len(written) > 40


@pytest.mark.parametrize(("method", "more"), [("take_text", {}), ("take", {"logprobs": 0})])
def test_a_mistake_ends_its_own_stream_with_an_error(
    method: str, more: dict[str, Any], server: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = getattr(Sample, method)

    def breaking(self: Sample, update: SequenceUpdate) -> Any:
        if self.stream.request.max_tokens == 40 and self.num_tokens == 19:
            raise RuntimeError("a mistake")
        return take(self, update)

    monkeypatch.setattr(Sample, method, breaking)

    async def go() -> list[list[str]]:
        async with httpx.AsyncClient(base_url=server.url) as client:
            body = {"prompt": "hello", "stream": True, "ignore_eos": True} | more
            asked = [client.post("/v1/completions", json=body | {"max_tokens": count}) for count in (40, 41)]
            return [events(answer.text) for answer in await asyncio.gather(*asked)]

    broken, other = asyncio.run(go())
    assert texts_of(other) == {0: whole(41)}
    error = json.loads(broken.pop())["error"]
    assert error["type"] == "server_error"
    assert "a mistake" not in error["message"]
    assert len(broken) == 19


@pytest.mark.parametrize("kind", ["completions", "chat/completions", "responses", "messages"])
def test_who_leaves_too_much_unread_gets_an_error_and_no_more(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_service, "_MOST_UNREAD", 20_000)
    client = FakeClient(tokenizer().encode(SENTENCE))
    client.info = msgspec.structs.replace(INFO, max_model_len=10**6, num_blocks=10**6)
    asked: dict[str, Any] = {"prompt": "hello", "n": 2, "logprobs": 2}
    if kind != "completions":
        asked = {"input" if kind == "responses" else "messages": _MESSAGES}
    limit = "max_output_tokens" if kind == "responses" else "max_tokens"
    body = json.dumps(asked | {"stream": True, limit: TOKENS, "model": "tiny"}).encode()
    with listening(SequenceService(client, tokenizer(), "tiny", ServerConfig())) as server:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.settimeout(20)
            reader.connect(("127.0.0.1", server.port))
            more = "Host: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            reader.sendall(f"POST /v1/{kind} HTTP/1.1\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wanted = asked.get("n", 1)
            while not (len(client.streams) == wanted and all(stream.done for stream in client.streams)):
                time.sleep(0.002)
            assert len(client.cancelled) == wanted
            assert [stream.updates for stream in client.streams] == [[]] * wanted
            raw = b""
            while part := reader.recv(65536):
                raw += part
    assert b"left more than 20000 bytes of its stream unread" in raw.rpartition(b"data: ")[2]


# While nothing comes


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    """A server whose model says nothing until its client was told to wait."""
    sent: list[bytes] = []
    send = PartSender.send

    async def noting(self: PartSender, raw: bytes) -> None:
        await send(self, raw)
        sent.append(raw)

    class LateClient(FakeClient):
        async def _answer(self, streams: list[Stream]) -> None:
            sent.clear()
            await until(lambda: sent)
            await super()._answer(streams)

    monkeypatch.setattr(part_sender, "WAITING_S", 0.001)
    monkeypatch.setattr(PartSender, "send", noting)
    client = LateClient(tokenizer().encode(SENTENCE))
    with listening(SequenceService(client, tokenizer(), "tiny", ServerConfig())) as it:
        yield it


def test_clients_of_a_late_model_see_the_same_as_others(late: Listening, written: list[bytes]) -> None:
    with openai.OpenAI(base_url=f"{late.url}/v1", api_key="none", max_retries=0) as api:
        pieces = api.completions.create(model="tiny", prompt="hello", max_tokens=50, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == whole(50)
        deltas = api.chat.completions.create(model="tiny", messages=_MESSAGES, max_tokens=50, stream=True)
        assert "".join(delta.choices[0].delta.content or "" for delta in deltas) == whole(50)
        with api.responses.stream(model="tiny", input="hi", max_output_tokens=50) as response:
            told = [event.delta for event in response if event.type == "response.output_text.delta"]
        assert "".join(told) == whole(50)
    other = anthropic.Anthropic(base_url=late.url, api_key="none", max_retries=0)
    with other, other.messages.stream(model="tiny", messages=_MESSAGES, max_tokens=50) as message:
        assert "".join(message.text_stream) == whole(50)
    assert written


@pytest.mark.parametrize(("kind", "first"), [("responses", "response.created"), ("messages", "message_start")])
def test_a_comment_is_no_part(kind: str, first: str, late: Listening) -> None:
    limit = "max_output_tokens" if kind == "responses" else "max_tokens"
    body = {"input" if kind == "responses" else "messages": _MESSAGES, "stream": True, limit: 50}
    raw = httpx.post(f"{late.url}/v1/{kind}", json=body).text
    assert raw.startswith(": waiting\n")
    lines = [line for line in events(raw) if line.startswith("{")]
    assert json.loads(lines[0])["type"] == first
    assert delta_texts(lines) == whole(50)


def test_who_waits_is_told_so_and_an_error_then_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_sender, "WAITING_S", 0.001)

    async def test() -> None:
        front, answer = Front(FakeClient(manual=True)), Answer()
        asked = asyncio.create_task(front.post("/v1/completions", {"prompt": "hello", "stream": True}, answer=answer))
        await until(lambda: answer.writes)
        assert (answer.status, set(answer.writes)) == (200, {b": waiting\n"})
        (stream,) = front.client.streams
        word = front.tokenizer.encode("hello")
        stream.push(SequenceUpdate(stream.request.id, word, None, None, None, None, 0, 0.0))
        await until(lambda: answer.writes[-1].startswith(b"data: "))
        before = len(answer.writes)
        await until(lambda: len(answer.writes) > before)
        stream.give_up(RequestFailed("it broke"))
        await asked
        text, error = [write for write in answer.writes if write != b": waiting\n"]
        assert json.loads(text[6:])["choices"][0]["text"] == "hello"
        assert json.loads(error[6:])["error"]["message"] == "it broke"
        assert answer.complete

    run(test)


class Connection(asyncio.Transport):
    """Notes what is written."""

    def __init__(self, log: list[tuple[str, bytes]], name: str) -> None:
        super().__init__()
        self.log, self.name, self.closes = log, name, False

    def is_closing(self) -> bool:
        return self.closes

    def write(self, data: Any) -> None:
        self.log.append((self.name, bytes(data)))


def answered(connection: Connection) -> Any:
    """An answer under way over this connection."""
    return SimpleNamespace(
        transport=connection,
        flow=SimpleNamespace(write_paused=False),
        response_started=True,
        chunked_encoding=True,
        response_complete=False,
        disconnected=False,
    )


def test_parts_are_written_together_before_those_who_are_woken_meanwhile() -> None:
    async def go() -> None:
        log: list[tuple[str, bytes]] = []
        queue, one, other = PartQueue(), answered(Connection(log, "one")), answered(Connection(log, "other"))
        for step in (b"1", b"2"):
            queue.add(one, step)
            asyncio.get_running_loop().call_soon(log.append, ("task", step))
            queue.add(other, step)
        assert not log
        await asyncio.sleep(0)
        parts = [("one", b"1"), ("other", b"1"), ("one", b"2"), ("other", b"2")]
        assert log == [*parts, ("task", b"1"), ("task", b"2")]
        queue.add(one, b"3")
        await asyncio.sleep(0)
        assert log[-1] == ("one", b"3")

    asyncio.run(go())


@pytest.mark.parametrize("why", ["closes", "is complete"])
def test_an_answer_that_ends_meanwhile_gets_nothing_and_the_others_theirs(why: str) -> None:
    async def go() -> None:
        log: list[tuple[str, bytes]] = []
        queue, one, other = PartQueue(), answered(Connection(log, "one")), answered(Connection(log, "other"))
        queue.add(one, b"1")
        queue.add(other, b"1")
        if why == "closes":
            one.transport.closes = True
        else:
            one.response_complete = True
        await asyncio.sleep(0)
        assert log == [("other", b"1")]

    asyncio.run(go())


def test_what_comes_together_with_the_end_of_its_time_is_written_before_the_error() -> None:
    """Behind the end it would be taken for the beginning of the next answer."""
    log: list[tuple[str, bytes]] = []

    async def parts() -> AsyncGenerator[bytes, None]:
        yield b"1"
        await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def test() -> None:
        cycle = answered(Connection(log, "writer"))
        writer = PartWriter(cycle, PartQueue())

        async def send(message: Any) -> None:
            if "body" in message:
                log.append(("task", message["body"]))
                cycle.response_complete = not message.get("more_body", False)

        app = SimpleNamespace(state=SimpleNamespace(config=ServerConfig()))
        limit = SimpleNamespace(expired=lambda: True)
        scope = {"type": "http", "method": "POST", "app": app, exchange.LIMIT: limit, WRITER: writer}
        stream = exchange.PartStream("text/event-stream", parts(), lambda error: b"error")
        task = asyncio.create_task(stream(scope, receive, send))
        await until(lambda: writer.is_ready)
        task.cancel()
        writer.write(b"2")
        await task
        await asyncio.sleep(0)
        assert log == [("task", b"1"), ("writer", b"1\r\n2\r\n"), ("task", b"error"), ("task", b"")]

    run(test)
