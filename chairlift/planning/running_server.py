"""A server that runs already, as `chairlift plan` sees it: what it says of itself, and what its answers take."""

import http.client
import ipaddress
import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from chairlift.bench.completion_stream import Target
from chairlift.errors import ConfigError, RequestFailed, Unavailable

# Sent with each request, so that others go first; a key that may not ask for it goes without.
LATER = {"X-Request-Priority": "1000"}
_TIMEOUT_S = 60.0


class HttpAnswer(NamedTuple):
    """An answer: its JSON, if that was read, its headers in small letters, and the seconds until all of it was here."""

    body: Any
    headers: Mapping[str, str]
    seconds: float


class RunningServer:
    """A server at an http:// address. Raises ConfigError for one that is none."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port:
            raise ConfigError(f"{url!r} is not an http:// address")
        self.url = url
        self.host = parts.hostname
        self._port = port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._later = LATER

    @property
    def is_here(self) -> bool:
        """Whether it is on this very machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def get(self, path: str) -> Any:
        """The JSON at a path, or its text. Raises Unavailable, or RequestFailed with what the server says."""
        return self._ask("GET", path, None, reads=True).body

    def post(self, path: str, body: Any) -> HttpAnswer:
        """The answer to a body, which is not read. Raises as `get`."""
        return self._ask("POST", path, json.dumps(body).encode(), reads=False)

    def model(self, name: str | None) -> dict[str, Any]:
        """What it says of a model, of the only one if none is named. Raises ConfigError if that is not enough."""
        known = [each["id"] for each in self.get("/v1/models").get("data", [])]
        if name is None and len(known) != 1:
            raise ConfigError(f"{self.url} serves {', '.join(known) or 'nothing'}: choose one with --model")
        if name is not None and name not in known:
            raise ConfigError(f"{self.url} has no model {name!r}; it serves {', '.join(known)}")
        found: dict[str, Any] = self.get(f"/v1/models/{quote(name or known[0])}")
        if not found.get("ready", True):
            raise ConfigError(f"{self.url}: the model {found['id']!r} is {found['status']}; ask again when it is ready")
        if "settings" not in found:
            raise ConfigError(f"{self.url} does not tell its settings; plan with the model's folder, or a --profile")
        return found

    def busy(self) -> int:
        """How many requests it has, as far as it says that to anybody."""
        try:
            lines = str(self.get("/metrics")).splitlines()
        except RequestFailed:
            return 0
        counted = ("chairlift_requests_running{", "chairlift_requests_waiting{")
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(counted))

    def target(self, model: str) -> Target:
        """Where streamed completions are asked for."""
        headers = tuple(f"{name}: {value}" for name, value in (self._headers | self._later).items())
        return Target(self.host, self._port, f"{self._prefix}/v1/completions", model, {}, headers)

    def check_priority(self, path: str, body: Any) -> None:
        """Send one request at that low priority; if that is not allowed, all others go without. Raises as `get`."""
        try:
            self.post(path, body)
        except RequestFailed as error:
            if "priority" not in str(error):
                raise
            self._later = {}

    def _ask(self, method: str, path: str, body: bytes | None, reads: bool) -> HttpAnswer:
        headers = self._headers | ({} if body is None else {"Content-Type": "application/json", **self._later})
        began = time.perf_counter()
        connection = http.client.HTTPConnection(self.host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, self._prefix + path, body, headers)
            answer = connection.getresponse()
            raw = answer.read()
            seconds = time.perf_counter() - began
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"no answer from {self.url}: {error}") from None
        finally:
            connection.close()
        if answer.status != 200:
            said = raw[:300].decode(errors="replace")
            raise RequestFailed(f"{self.url}{path} answered {answer.status}: {said}")
        return HttpAnswer(_parsed(raw) if reads else None, {n.lower(): v for n, v in answer.getheaders()}, seconds)


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
