"""`chairlift chat`: a conversation in a terminal, with a server or with a model's folder."""

import argparse
import contextlib
import difflib
import http.client
import json
import os
import re
import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from urllib.parse import urlsplit

from chairlift.errors import InvalidRequest, RequestFailed, Unavailable
from chairlift.hub.name import hub_name
from chairlift.own_server import own_server

DEFAULT_URL = "http://127.0.0.1:8000"
_CONNECT_S, _FETCH_S = 10.0, 30.0
_PART_BYTES = 2**16
_DIM, _PLAIN = "\033[2m", "\033[0m"
# What a terminal might obey.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_HELP = """/new           begin anew
/system TEXT   begin anew, with these instructions
/retry         have the last answer given again
/exit          leave, as Ctrl-D does; Ctrl-C ends an answer
A line that ends in \\ goes on in the next; one that begins with a space is no command."""
_COMMANDS = ("/new", "/system", "/retry", "/exit", "/help")
_LIKE_A_COMMAND, _LONGEST_COMMAND = re.compile(r"/[a-z]+"), 20


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    about = f"a server's URL ({DEFAULT_URL}), or a model's folder, GGUF file or name on the Hub, then served meanwhile"
    tokens = "tokens of an answer (default: what the model has room for)"
    parser.add_argument("target", nargs="?", default=DEFAULT_URL, metavar="URL|MODEL", help=about)
    parser.add_argument("--model", help="the model's name, where the server has several")
    parser.add_argument("--system", metavar="TEXT", help="instructions for the model")
    parser.add_argument("--max-tokens", type=int, metavar="N", help=tokens)
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="0 takes the likeliest tokens (default: the model's)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="better set as CHAIRLIFT_API_KEY than as a flag")


def chat_command(args: argparse.Namespace) -> int:
    """Talk until the input ends. Raises Unavailable or InvalidRequest, without a terminal KeyboardInterrupt too."""
    key = args.api_key or os.environ.get("CHAIRLIFT_API_KEY")
    settings = {"model": args.model, "max_tokens": args.max_tokens, "temperature": args.temperature}
    asked = {name: value for name, value in settings.items() if value is not None}
    with contextlib.ExitStack() as stack:
        url = args.target
        if "://" not in url:
            url = stack.enter_context(_served(url))
        endpoint = ChatEndpoint.at(url, key)
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - from now on lines can be edited
        return Talk(endpoint, asked, args.system, sys.stdout, is_terminal=sys.stdin.isatty()).run()


@contextlib.contextmanager
def _served(model: str) -> Iterator[str]:
    """A server of a folder, a GGUF file or a name of the Hub, and its URL."""
    from chairlift.gguf.side_folder import is_gguf

    if not os.path.isdir(model) and not is_gguf(Path(model)) and hub_name(model) is None:
        other = "a folder, a GGUF file or a name of the Hub, as organization/model"
        raise InvalidRequest(f"{model!r} is neither a URL nor {other}")
    print(f"loading {model} ...", file=sys.stderr, flush=True)
    with own_server(model) as server:
        yield server.url


class ChatEndpoint(NamedTuple):
    """A server: where chats are answered and requests are told of. `path` begins all paths of its API."""

    secure: bool
    host: str
    port: int | None
    path: str
    headers: Mapping[str, str]

    @classmethod
    def at(cls, url: str, key: str | None) -> "ChatEndpoint":
        """That of a server. Raises InvalidRequest if it is no URL of one."""
        wrong = InvalidRequest(f"{url!r} is not like {DEFAULT_URL}")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise wrong from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        return cls(parts.scheme == "https", parts.hostname, port, path, headers)

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The deltas of an answer as they come. Raises Unavailable, or RequestFailed with what the server says."""
        with self._answer("POST", "/chat/completions", json.dumps({**body, "stream": True}), None) as answer:
            for line in answer:
                # What else there is are blank lines, and comments by which a server says that it is still there.
                if not line.startswith(b"data:"):
                    continue
                event = line[5:].strip()
                if event == b"[DONE]":
                    return
                made = json.loads(event)
                if "error" in made:
                    raise RequestFailed(_told(event, 200))
                yield from (choice["delta"] for choice in made["choices"])
            # The library takes the end of a connection for the end of an answer.
            raise Unavailable(f"the answer of {self.host} broke off")

    def fetch(self, path: str, patience: float = _FETCH_S) -> Any:
        """The JSON at a path of the API, which may take so many seconds to come. Raises as `stream`."""
        with self._answer("GET", path, None, patience) as answer:
            raw = answer.read()
        try:
            return json.loads(raw)
        except ValueError:
            raise RequestFailed(f"{self.host} answered with no JSON; is that a Chairlift server?") from None

    def lines(self, path: str) -> Generator[bytes, None, None]:
        """An empty line once the answer at a path has begun, and then its lines as they come. Raises as `stream`."""
        with self._answer("GET", path, None, None) as answer:
            yield b""
            rest = b""
            try:
                # The library's own lines end where a connection does, as if that were the end of the answer.
                while part := answer.read1(_PART_BYTES):
                    *lines, rest = (rest + part).split(b"\n")
                    yield from (line + b"\n" for line in lines)
            except http.client.IncompleteRead:
                raise Unavailable(f"what {self.host} sent broke off") from None
            if rest:
                yield rest

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: str | None, timeout: float | None
    ) -> Iterator[http.client.HTTPResponse]:
        """An answer that begins well, each part of which may take so many seconds."""
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=_CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(timeout)
            connection.request(method, self.path + path, body, dict(self.headers))
            answer = connection.getresponse()
            if answer.status != 200:
                raise RequestFailed(_told(answer.read(), answer.status))
            yield answer
        except (OSError, http.client.HTTPException) as error:
            port = f":{self.port}" if self.port else ""
            problem = f"no answer from {self.host}{port}: {error}; `chairlift serve` starts a server"
            raise Unavailable(problem) from None
        finally:
            connection.close()


def _told(raw: bytes, status: int) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}"


def _check_is_text(command: str, rest: str) -> None:
    """Raise InvalidRequest for what somebody took for a command, or wrote wrongly."""
    close = difflib.get_close_matches(command[:_LONGEST_COMMAND], _COMMANDS, 1, 0.7)
    if close or (_LIKE_A_COMMAND.fullmatch(command) and not rest):
        meant = f"did you mean {close[0]}?" if close else "/help lists what there is."
        raise InvalidRequest(f"there is no {command[:_LONGEST_COMMAND]}; {meant} To send it, begin with a space")


class Talk:
    """A conversation: lines in, answers out."""

    def __init__(
        self, endpoint: ChatEndpoint, settings: Mapping[str, Any], system: str | None, out: TextIO, is_terminal: bool
    ) -> None:
        self._endpoint, self._settings, self._out = endpoint, settings, out
        self._is_terminal = is_terminal
        self._begin(system)

    def run(self) -> int:
        """Read and answer until the input ends, or /exit. Without a terminal what goes wrong is raised."""
        if self._is_terminal:
            self._say("Ctrl-D leaves, /help says more.\n")
        while (line := self._line()) is not None:
            command, _, rest = line.partition(" ")
            if command == "/exit":
                break
            if not line.strip():
                continue
            try:
                self._obey(command, rest.strip(), line)
            except (InvalidRequest, RequestFailed, Unavailable) as error:
                if not self._is_terminal:
                    raise
                self._say(f"{error}\n")
        return 0

    def _obey(self, command: str, rest: str, line: str) -> None:
        if command == "/new":
            if rest:
                raise InvalidRequest("/new takes no text; /system TEXT begins anew, with these instructions")
            self._begin(self._system)
        elif command == "/system":
            self._begin(rest or None)
        elif command == "/retry":
            if not self._messages or self._messages[-1]["role"] != "assistant":
                raise InvalidRequest("/retry: there is no answer yet")
            self._answer(self._messages[:-1])
        elif command == "/help":
            self._say(f"{_HELP}\n")
        else:
            _check_is_text(command, rest)
            self._answer([*self._messages, {"role": "user", "content": line}])

    def _begin(self, system: str | None) -> None:
        self._system = system
        self._messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]

    def _answer(self, messages: list[dict[str, str]]) -> None:
        """Print an answer as it comes, and keep it; of one that fails nothing is kept."""
        texts: list[str] = []
        deltas = self._endpoint.stream({**self._settings, "messages": messages})
        dim = False
        # With nobody to go on with the conversation Ctrl-C ends all of it.
        stop = contextlib.suppress(KeyboardInterrupt) if self._is_terminal else contextlib.nullcontext()
        try:
            with stop, contextlib.closing(deltas):  # type: ignore[type-var]
                for delta in deltas:
                    thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
                    text = delta.get("content") or ""
                    if thought:
                        self._say(thought, _DIM if self._is_terminal and not dim else "")
                        dim = True
                    if text:
                        self._say(text, _PLAIN if self._is_terminal and dim else "")
                        dim = False
                        texts.append(text)
        finally:
            # What follows is not dim, not even where the answer broke off.
            if self._is_terminal and dim:
                self._say("", _PLAIN)
        self._say("\n")
        self._messages = [*messages, {"role": "assistant", "content": "".join(texts)}]

    def _line(self) -> str | None:
        """The next line, or several that are joined; None at the end."""
        lines: list[str] = []
        try:
            while not lines or lines[-1].endswith("\\"):
                line = input(("... " if lines else "> ") if self._is_terminal else "")
                lines = [*lines[:-1], lines[-1][:-1], line] if lines else [line]
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            self._say("\n")
            return ""
        return "\n".join(lines)

    def _say(self, text: str, style: str = "") -> None:
        """Print a text, which may be a model's, without what a terminal would obey; `style` is printed as it is."""
        self._out.write(style + _CONTROL.sub("", text))
        self._out.flush()
