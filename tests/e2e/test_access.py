"""A real server with keys and certificates, which change while it runs."""

import http.client
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from support.certificates import Pair, authority, install, signed, trusting
from support.key_files import bearer, key_of, write_keys
from support.processes import end_with_tests
from support.serve_process import Server

pytestmark = pytest.mark.processes
MASTER = "a-master-key-that-nobody-may-see"


class World(NamedTuple):
    """A server, its files, and a certificate for later."""

    server: Server
    keys: Path
    ours: Pair
    place: Pair
    renewed: Pair


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("access")
    ours = authority(folder, "ours")
    place, renewed = signed(folder, "server", ours), signed(folder, "renewed", ours)
    keys = write_keys(folder / "keys.toml", alice={"rights": ["infer"]}, carol={"rights": ["infer"]})
    flags = ("--api-keys", keys, "--tls-cert", place.certificate, "--tls-key", place.key, "--log-level", "debug")
    environ = {"CHAIRLIFT_API_KEY": MASTER}
    with Server(*map(str, flags), key=MASTER, verify=trusting(ours), environ=environ) as server:
        server.wait_ready()
        yield World(server, keys, ours, place, renewed)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_start_line_says_https_and_clients_come_in_with_a_key(world: World) -> None:
    server = world.server
    assert f"at https://127.0.0.1:{server.port}/v1" in server.lines[0]
    messages: Any = [{"role": "user", "content": "hi"}]
    assert server.openai.chat.completions.create(model="demo", messages=messages, max_tokens=2).choices
    with httpx.Client(verify=trusting(world.ours)) as transport:
        for key, works in ((key_of("alice"), True), ("wrong", False)):
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, http_client=transport, max_retries=0)
            if works:
                assert client.chat.completions.create(model="demo", messages=messages, max_tokens=2).choices
            else:
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()


def test_who_does_not_trust_the_authority_does_not_connect(world: World) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{world.server.url}/health")


def test_prefixes_are_found_again_by_their_tenant_alone(world: World) -> None:
    def cached(name: str, **more: str) -> int:
        body = {"prompt": "Continuous batching gives each slot to the next at once. " * 4, "max_tokens": 1} | more
        answer = world.server.http.post("/v1/completions", json=body, headers=bearer(name))
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("alice") == 0
    assert cached("alice") >= 16
    assert cached("carol") == 0
    assert cached("alice", cache_salt="another user") == 0
    assert cached("carol") >= 16


def test_keys_change_while_it_runs(world: World) -> None:
    def status(name: str) -> int:
        return world.server.http.get("/v1/models", headers=bearer(name)).status_code

    assert (status("alice"), status("bob")) == (200, 401)
    world.keys.write_text("[keys")
    until(lambda: "what was read before stays in force" in "".join(world.server.lines))
    assert (status("alice"), status("bob")) == (200, 401)
    write_keys(world.keys, bob={})
    until(lambda: status("bob") == 200)
    assert status("alice") == 401


def test_certificates_change_while_it_runs(world: World) -> None:
    def connect() -> http.client.HTTPSConnection:
        made = http.client.HTTPSConnection("127.0.0.1", world.server.port, context=trusting(world.ours), timeout=10)
        made.connect()
        return made

    def serial(connection: http.client.HTTPSConnection) -> Any:
        assert isinstance(connection.sock, ssl.SSLSocket)
        return (connection.sock.getpeercert() or {})["serialNumber"]

    def ask() -> bytes:
        kept.request("GET", "/health/live")
        return kept.getresponse().read()

    def is_new() -> bool:
        connection = connect()
        try:
            return bool(serial(connection) != serial(kept))
        finally:
            connection.close()

    kept = connect()
    assert ask() == b'{"status":"live"}'
    install(world.renewed, world.place)
    until(is_new)
    assert ask() == b'{"status":"live"}'
    kept.close()


def test_keys_are_nowhere_to_be_read(world: World) -> None:
    worker = Path(f"/proc/{world.server.worker()}")
    environment = (worker / "environ").read_bytes()
    assert b"CHAIRLIFT_LOG_LEVEL" in environment
    assert MASTER.encode() not in environment
    assert b"CHAIRLIFT_API_KEY" not in environment
    for process in (worker, Path(f"/proc/{world.server.process.pid}")):
        assert MASTER.encode() not in (process / "cmdline").read_bytes()
    world.server.http.get("/v1/models")
    world.server.http.get("/v1/models", headers={"authorization": "Bearer another-secret"})
    output = "".join(world.server.lines)
    assert MASTER not in output
    assert "another-secret" not in output
    assert key_of("alice") not in output


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--api-keys", "none.toml"], "the key file none.toml can't be read: No such file or directory"),
        (["--tls-cert", "none.pem", "--tls-key", "none.key"], "tls_cert none.pem can't be read: No such file"),
        (["--tls-cert", "none.pem"], "tls_cert and tls_key go together"),
    ],
)
def test_files_that_are_no_good_end_it_before_anything_starts(flags: list[str], problem: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "chairlift.cli", "serve", "--port", "0", *flags]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, preexec_fn=end_with_tests)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert problem in ended.stderr
