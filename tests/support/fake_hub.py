"""A Hub on this machine: repositories in memory, served as the real one does, and with its faults."""

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import struct
import termios
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

# Weights, whose hash the real one knows as well; other files have git's alone.
_LARGE = (".safetensors", ".onnx", ".gguf", ".bin")


@dataclass
class FakeRepo:
    """Files by name, and what is wrong with them.

    Of a file that `breaks`, so many connections end in its middle, and by `resets` so many are reset there, once what
    was sent is acknowledged. One that `lies` is said to be another. A `gated` one needs the token. Each chunk takes
    `slow` seconds. Of an `endless` one come bytes for as long as anybody takes them, and one that is `gone` is listed
    all the same. `answers` are headers that are sent with a file in place of the right ones, `listed` what the list of
    files says of it. `statuses` are errors that files, and the list of them, "", are answered with.
    """

    files: dict[str, bytes]
    commit: str = "0123456789abcdef0123456789abcdef01234567"
    breaks: Counter[str] = field(default_factory=Counter)
    resets: Counter[str] = field(default_factory=Counter)
    lies: set[str] = field(default_factory=set)
    gated: bool = False
    slow: float = 0.0
    endless: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    answers: dict[str, dict[str, str]] = field(default_factory=dict)
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "FakeRepo":
        """The files of a folder."""
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        return cls({path.relative_to(folder).as_posix(): path.read_bytes() for path in found})


class FakeHub:
    """The server; `downloads` are the files whose bytes were asked for, and `ranges` those that go on.

    `leaks` are those for which the host of large files was told a token.
    """

    TOKEN = "hf_secret"

    def __init__(self, repos: dict[str, FakeRepo]) -> None:
        self.repos = repos
        self.downloads: list[str] = []
        self.ranges: list[str] = []
        self.leaks: list[str] = []
        hub = self

        class Handler(_Handler):
            """One that knows the hub."""

            fake = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeHub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[0] == "files":
            if "Authorization" in self.headers:
                self.fake.leaks.append(url.path)
            return self._file(parts[1:], with_body)
        at = 2 if parts[:2] == ["api", "models"] else 0
        repo = self.fake.repos.get("/".join(parts[at : at + 2]))
        if repo is None:
            return self._refuse(404, "RepoNotFound")
        asked = "" if at else "/".join(parts[4:])
        if asked in repo.statuses:
            # As the real one puts it where a token has expired.
            said = {"X-Error-Message": "Invalid credentials in Authorization header"}
            return self._send(repo.statuses[asked], b"{}", True, said)
        if repo.gated and self.headers.get("Authorization") != f"Bearer {self.fake.TOKEN}":
            return self._refuse(403, "GatedRepo")
        revision = parts[at + 3] if len(parts) > at + 3 else "main"
        if revision not in ("main", repo.commit):
            return self._refuse(404, "RevisionNotFound")
        if at:
            about = {"id": "/".join(parts[2:4]), "sha": repo.commit, "siblings": _siblings(repo, parse_qs(url.query))}
            return self._send(200, json.dumps(about).encode(), with_body, {"Content-Type": "application/json"})
        name = "/".join(parts[4:])
        if name not in repo.files or name in repo.gone:
            return self._refuse(404, "EntryNotFound", repo.answers.get(name, {}))
        # As the real one does: small files at once, large ones from another host.
        if not name.endswith(_LARGE):
            return self._file([*parts[:2], name], with_body)
        headers = {
            "Location": f"{self.fake.url.replace('127.0.0.1', 'localhost')}/files/{'/'.join(parts[:2])}/{name}",
            "X-Repo-Commit": repo.commit,
            "X-Linked-Size": str(len(repo.files[name])),
            "X-Linked-ETag": f'"{_hash_of(name, repo.files[name])}"',
            "ETag": f'"{_hash_of(name, repo.files[name])}"',
        }
        return self._send(302, b"", with_body, headers | repo.answers.get(name, {}))

    def _file(self, parts: list[str], with_body: bool) -> None:
        repo, name = self.fake.repos["/".join(parts[:2])], "/".join(parts[2:])
        data = repo.files[name]
        if with_body:
            self.fake.downloads.append(name)
        begin = 0
        if wanted := self.headers.get("Range"):
            self.fake.ranges.append(f"{name} {wanted}")
            begin = int(wanted.removeprefix("bytes=").partition("-")[0])
        headers = {"Accept-Ranges": "bytes", "ETag": f'"{_hash_of(name, data)}"', "X-Repo-Commit": repo.commit}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        headers |= repo.answers.get(name, {})
        if with_body and name in repo.endless:
            self._send_without_end(headers)
            return
        body = data[begin:]
        if with_body and repo.breaks[name] > 0:
            repo.breaks[name] -= 1
            self._begin(206 if begin else 200, len(body), headers)
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        if with_body and repo.resets[name] > 0:
            repo.resets[name] -= 1
            self._begin(206 if begin else 200, len(body), headers)
            self.wfile.write(body[: len(body) // 2])
            self._reset()
            return
        if with_body and repo.slow:
            self._begin(206 if begin else 200, len(body), headers)
            for place in range(0, len(body), 4096):
                self.wfile.write(body[place : place + 4096])
                time.sleep(repo.slow)
            return
        self._send(206 if begin else 200, body, with_body, headers)

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, b"{}", True, {"X-Error-Code": code, "X-Error-Message": code} | (headers or {}))

    def _send_without_end(self, headers: dict[str, str]) -> None:
        """Send until the other side hangs up; not for ever, so that a test of one that does not can fail."""
        self._begin(200, None, headers | {"Connection": "close"})
        with contextlib.suppress(OSError):
            for _ in range(2**12):
                self.wfile.write(bytes(2**16))
        self.close_connection = True

    def _reset(self) -> None:
        """End the connection by a reset, which would take what is not acknowledged yet."""
        while struct.unpack("i", fcntl.ioctl(self.connection, termios.TIOCOUTQ, bytes(4)))[0]:
            time.sleep(0.001)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Not `close`, after which whoever reads and writes would still hold it.
        os.close(self.connection.detach())
        self.close_connection = True

    def _begin(self, status: int, length: int | None, headers: dict[str, str]) -> None:
        self.send_response(status)
        if length is not None:
            headers = headers | {"Content-Length": str(length)}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status: int, body: bytes, with_body: bool, headers: dict[str, str]) -> None:
        self._begin(status, len(body), headers)
        if with_body and self.command != "HEAD":
            self.wfile.write(body)


def _siblings(repo: FakeRepo, query: dict[str, list[str]]) -> list[dict[str, Any]]:
    """The files, with sizes and hashes only for those who ask for them."""
    if "blobs" not in query:
        return [{"rfilename": name} for name in repo.files]
    found = []
    for name, data in repo.files.items():
        said = b"other" + data[5:] if name in repo.lies else data
        about: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": _git_sha1(said)}
        if name.endswith(_LARGE):
            about["lfs"] = {"sha256": hashlib.sha256(said).hexdigest(), "size": len(data), "pointerSize": 130}
        found.append(about | repo.listed.get(name, {}))
    return found


def _hash_of(name: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if name.endswith(_LARGE) else _git_sha1(data)


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
