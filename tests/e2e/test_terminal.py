"""`chairlift chat` against real servers, as a program and with a terminal's lines."""

import contextlib
import io
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.serve_process import Server

from chairlift import cli
from chairlift.commands import terminal
from chairlift.commands.terminal import ChatEndpoint, Talk
from chairlift.demo import demo_path
from chairlift.errors import InvalidRequest, RequestFailed, Unavailable
from chairlift.own_server import own_server

HELLO = "Hello! I am the Chairlift demo model. Ask me about batching, mountains, capitals or small sums."
PARIS = "The capital of France is Paris."
GREEDY = {"temperature": 0, "max_tokens": 60}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Has `input` give these lines, raise those that are exceptions, and then end; returns the prompts shown."""

    def give(*given: Any) -> list[str]:
        prompts: list[str] = []
        left: Iterator[Any] = iter(given)

        def read(prompt: str) -> str:
            prompts.append(prompt)
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return str(line)

        monkeypatch.setattr("builtins.input", read)
        return prompts

    return give


def talk(server: Server, is_terminal: bool = True, system: str | None = None, **settings: Any) -> str:
    out = io.StringIO()
    Talk(ChatEndpoint.at(server.url, None), GREEDY | settings, system, out, is_terminal).run()
    return out.getvalue()


def test_a_conversation(demo_server: Server, lines: Callable[..., list[str]]) -> None:
    prompts = lines("Hello!", "", "What is the \\", "capital of France?", "/exit", "never read")
    said = talk(demo_server)
    assert HELLO in said
    assert prompts == ["> ", "> ", "> ", "... ", "> "]


def test_commands(demo_server: Server, lines: Callable[..., list[str]]) -> None:
    lines(
        "/help",
        "/retry",
        "What is the capital of France?",
        "/retry",
        "/new",
        "/system Be brief.",
        "Hello!",
        KeyboardInterrupt(),
    )
    said = talk(demo_server)
    assert said.count(PARIS) == 2
    assert "/system TEXT" in said
    assert "/retry: there is no answer yet" in said


def test_a_mistyped_command_does_not_go_to_the_model(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    def stream(self: ChatEndpoint, body: Any) -> Iterator[dict[str, str]]:
        sent.append(body["messages"][-1]["content"])
        yield {"content": "So."}

    monkeypatch.setattr(ChatEndpoint, "stream", stream)
    lines("/exti", "/retyr now", "/quit", "/new topic", " /quit", "/etc/hosts is what?", "/usr is what?")
    out = io.StringIO()
    Talk(ChatEndpoint.at("http://x", None), {}, None, out, is_terminal=True).run()
    said = out.getvalue()
    assert "there is no /exti; did you mean /exit? To send it, begin with a space" in said
    assert "there is no /retyr; did you mean /retry?" in said
    assert "there is no /quit; /help lists what there is." in said
    assert "/new takes no text" in said
    assert sent == [" /quit", "/etc/hosts is what?", "/usr is what?"]
    lines("/exti")
    with pytest.raises(InvalidRequest, match="did you mean /exit"):
        Talk(ChatEndpoint.at("http://x", None), {}, None, out, is_terminal=False).run()


def test_what_goes_wrong_is_said_and_forgotten(demo_server: Server, lines: Callable[..., list[str]]) -> None:
    lines("x " * 5000, "Hello!")
    said = talk(demo_server)
    assert "maximum context length" in said
    assert HELLO in said
    lines("Hello!")
    with pytest.raises(RequestFailed, match="does not exist"):
        talk(demo_server, is_terminal=False, model="other")


def test_an_interrupted_answer_ends(
    demo_server: Server, lines: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = ChatEndpoint.stream

    def interrupted(self: ChatEndpoint, body: Any) -> Iterator[dict[str, Any]]:
        for number, delta in enumerate(stream(self, body)):
            if number == 2:
                raise KeyboardInterrupt
            yield delta

    monkeypatch.setattr(ChatEndpoint, "stream", interrupted)
    lines("Hello!")
    assert talk(demo_server).splitlines()[-1] in HELLO


@pytest.mark.parametrize("interrupted", ["an answer", "a line"])
def test_without_a_terminal_ctrl_c_ends_the_talk(
    interrupted: str, lines: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stream(self: ChatEndpoint, body: Any) -> Iterator[dict[str, Any]]:
        yield {"content": "Hel"}
        raise KeyboardInterrupt

    monkeypatch.setattr(ChatEndpoint, "stream", stream)
    prompts = lines("Hello!" if interrupted == "an answer" else KeyboardInterrupt(), "never read")
    with pytest.raises(KeyboardInterrupt):
        Talk(ChatEndpoint.at("http://x", None), {}, None, io.StringIO(), is_terminal=False).run()
    assert len(prompts) == 1


def test_reasoning_is_dimmed_in_a_terminal(lines: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = [{"role": "assistant"}, {"reasoning": "hm"}, {"reasoning_content": "!"}, {"content": "So."}]
    monkeypatch.setattr(ChatEndpoint, "stream", lambda self, body: (each for each in deltas))
    for is_terminal, shown in ((True, "\033[2mhm!\033[0mSo.\n"), (False, "hm!So.\n")):
        lines("x")
        out = io.StringIO()
        Talk(ChatEndpoint.at("http://x", None), {}, None, out, is_terminal).run()
        assert out.getvalue().endswith(shown)


def test_addresses() -> None:
    assert ChatEndpoint.at("http://a:1/v1/", None).path == "/v1"
    assert ChatEndpoint.at("https://a/llm", "k").headers["Authorization"] == "Bearer k"
    for wrong in ("ftp://a", "http://", "http://a:b", "http://[::1"):
        with pytest.raises(InvalidRequest, match="is not like"):
            ChatEndpoint.at(wrong, None)
    with pytest.raises(Unavailable, match="starts a server"):
        list(ChatEndpoint.at("http://127.0.0.1:9", None).stream({}))
    assert terminal._told(b"rubbish", 502) == "the server answered 502"


@pytest.mark.processes
def test_a_folder_is_served_for_as_long_as_the_talk_lasts(tmp_path: Path) -> None:
    # The settings of another server, to which these questions do not go.
    of_server = 'api_key = "k"\ntls_cert = "none.pem"\ntls_key = "none.key"\nrecord = "trace.jsonl"\n'
    (tmp_path / "chairlift.toml").write_text(of_server)
    command = [sys.executable, "-m", "chairlift.cli", "chat", str(demo_path()), "--temperature", "0"]
    ended = subprocess.run(
        command, input="What is the capital of France?\n", capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert (ended.returncode, ended.stdout) == (0, f"{PARIS}\n"), ended.stderr
    assert f"loading {demo_path()} ..." in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["chairlift.toml"]
    wrong = subprocess.run([*command[:4], "nowhere"], capture_output=True, text=True, timeout=100)
    assert (wrong.returncode, "neither a URL nor a folder" in wrong.stderr) == (1, True)


def test_a_gguf_file_can_be_talked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def server_of(model: str) -> Iterator[Any]:
        yield SimpleNamespace(url=f"server of {model}")

    monkeypatch.setattr(terminal, "own_server", server_of)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with terminal._served(str(file)) as url:
        assert url == f"server of {file}"


@pytest.fixture
def breaking() -> Iterator[Callable[[bytes], ChatEndpoint]]:
    """A server that sends so much of an answer, and dies."""
    with contextlib.ExitStack() as stack:

        def serve(part: bytes) -> ChatEndpoint:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def answer() -> None:
                with listener.accept()[0] as asking:
                    asking.recv(65536)
                    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                    asking.sendall(head + b"%x\r\n%s\r\n" % (len(part), part))
                    # What is left unread when a connection is closed would reset it.
                    asking.shutdown(socket.SHUT_WR)
                    while asking.recv(65536):
                        pass

            thread = threading.Thread(target=answer)
            thread.start()
            stack.callback(thread.join)
            return ChatEndpoint.at(f"http://127.0.0.1:{listener.getsockname()[1]}", None)

        yield serve


def test_an_answer_that_breaks_off_is_no_whole_one(breaking: Callable[[bytes], ChatEndpoint], lines: Any) -> None:
    endpoint = breaking(b': waiting\ndata: {"choices":[{"delta":{"reasoning":"let me"}}]}\n\n')
    lines("Hello!")
    out = io.StringIO()
    talk = Talk(endpoint, {}, None, out, is_terminal=True)
    talk.run()
    dim, plain = terminal._DIM, terminal._PLAIN
    assert f"{dim}let me{plain}the answer of 127.0.0.1 broke off\n" in out.getvalue()
    assert talk._messages == []


def test_lines_that_break_off_are_no_whole_answer(breaking: Callable[[bytes], ChatEndpoint]) -> None:
    found = breaking(b"one\ntwo\nthr").lines("/recording")
    assert [next(found), next(found), next(found)] == [b"", b"one\n", b"two\n"]
    with pytest.raises(Unavailable, match=r"what 127\.0\.0\.1 sent broke off"):
        next(found)


@pytest.mark.processes
def test_an_own_server_is_the_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is named chairlift in the working directory."""
    python = tmp_path / "python"
    said = "Chairlift loads m at http://127.0.0.1:1/v1\nChairlift serves m, ready"
    python.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho "{said}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with own_server("m") as server:
        assert server.url == "http://127.0.0.1:1"
    assert (tmp_path / "arguments").read_text().startswith("-P -m chairlift.cli serve m ")


@pytest.mark.processes
def test_what_an_own_server_prints_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, printed = tmp_path / "python", tmp_path / "printed"
    said = "Chairlift loads m at http://127.0.0.1:1/v1\nChairlift serves m, ready"
    python.write_text(f'#!/bin/sh\necho "{said}"\nhead -c 1000000 /dev/urandom\ntouch {printed}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with own_server("m"):
        deadline = time.monotonic() + 20
        while not printed.exists():
            assert time.monotonic() < deadline, "it waits for somebody to read what it prints"
            time.sleep(0.01)


def test_what_the_terminal_has_no_sign_for_is_printed_as_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    monkeypatch.setattr(cli, "_run", lambda arguments, started: print("Grüße, 世") or 0)
    assert cli.main([]) == 0
    assert written.getvalue() == "Grüße, \\u4e16\n".encode("latin-1")
