"""TLS and certificates of clients, over HTTP and gRPC, with the clients that people use; and files that change."""

import asyncio
import contextlib
import errno
import http.client
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from support.certificates import Pair, authority, install, signed, trusting
from support.items_harness import Listening, adder, embedder, listening, reranker
from support.key_files import key_of, write_keys
from support.oip_tensors import check, tensors
from support.processes import end_with_tests

from chairlift.config.server import ServerConfig
from chairlift.errors import ConfigError
from chairlift.server.http import protocol
from chairlift.server.http.tls import make_tls


class World(NamedTuple):
    """An authority and a stranger, what they signed for the server and for a client, and where the server looks."""

    folder: Path
    ours: Pair
    strangers: Pair
    server: Pair
    renewed: Pair
    foreign: Pair
    client: Pair
    stray: Pair

    def place(self) -> Pair:
        """The server's files, as they are at first."""
        place = Pair(self.folder / "in-use.pem", self.folder / "in-use.key")
        install(self.server, place)
        return place

    def trusted(self) -> Path:
        """The file that says who signs the certificates of clients, as it is at first."""
        path = self.folder / "trusted.pem"
        path.write_bytes(self.ours.certificate.read_bytes())
        return path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("certificates")
    ours, strangers = authority(folder, "ours"), authority(folder, "strangers")
    return World(
        folder,
        ours,
        strangers,
        server=signed(folder, "server", ours),
        renewed=signed(folder, "renewed", ours),
        foreign=signed(folder, "foreign", strangers),
        client=signed(folder, "client", ours),
        stray=signed(folder, "stray", strangers),
    )


@contextlib.contextmanager
def serving(world: World, keys: Path | None = None, **settings: Any) -> Iterator[Listening]:
    place = world.place()
    more = {"tls_cert": str(place.certificate), "tls_key": str(place.key)} | settings
    if keys is not None:
        more["api_keys"] = str(write_keys(keys / "keys.toml", alice={}))
    with listening(adder()[0], embedder()[0], reranker()[0], **more) as it:
        yield it


def name_of(context: ssl.SSLContext, port: int) -> str:
    """Whose certificate a new connection is shown."""
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=10)
    connection.connect()
    try:
        return common_name(connection)
    finally:
        connection.close()


def common_name(connection: http.client.HTTPSConnection) -> str:
    assert isinstance(connection.sock, ssl.SSLSocket)
    shown = connection.sock.getpeercert()
    assert shown is not None
    subject: Any = shown["subject"]
    return str(subject[0][0][1])


REFUSED = (ssl.SSLError, OSError, http.client.HTTPException)


def test_clients_of_every_kind(world: World, tmp_path: Path) -> None:
    cohere = pytest.importorskip("cohere")
    with serving(world, tmp_path) as it:
        context, key = trusting(world.ours), key_of("alice")
        with httpx.Client(verify=context, base_url=it.url, headers={"authorization": f"Bearer {key}"}) as plain:
            assert it.url.startswith("https://")
            assert plain.get("/v1/models").status_code == 200
            assert httpx.get(f"{it.url}/v1/models", verify=context).status_code == 401
        with httpx.Client(verify=context) as transport:
            ours = openai.OpenAI(base_url=f"{it.url}/v1", api_key=key, http_client=transport, max_retries=0)
            assert len(ours.embeddings.create(model="embedder", input="fox").data) == 1
            theirs = openai.OpenAI(base_url=f"{it.url}/v1", api_key="wrong", http_client=transport, max_retries=0)
            with pytest.raises(openai.AuthenticationError):
                theirs.embeddings.create(model="embedder", input="fox")
            ranker = cohere.Client(api_key=key, base_url=it.url, httpx_client=transport)
            assert len(ranker.rerank(query="fox", documents=["fox", "dog"], model="reranker").results) == 2


def test_triton_over_http(world: World, tmp_path: Path) -> None:
    triton_http = pytest.importorskip("tritonclient.http")
    utils = pytest.importorskip("tritonclient.utils")
    with serving(world, tmp_path) as it:
        triton = triton_http.InferenceServerClient(
            f"localhost:{it.port}", ssl=True, ssl_context_factory=lambda: trusting(world.ours)
        )
        inputs = tensors(triton_http, True)
        check(triton.infer("adder", inputs, headers={"Authorization": f"Bearer {key_of('alice')}"}))
        with pytest.raises(utils.InferenceServerException, match="send a key"):
            triton.infer("adder", inputs)
        triton.close()


def triton_over_grpc(it: Listening, trusts: Pair, own: Pair | None = None) -> Any:
    triton_grpc = pytest.importorskip("tritonclient.grpc")
    files = {} if own is None else {"private_key": str(own.key), "certificate_chain": str(own.certificate)}
    url = f"localhost:{it.grpc_port}"
    return triton_grpc.InferenceServerClient(url, ssl=True, root_certificates=str(trusts.certificate), **files)


def test_triton_over_grpc(world: World, tmp_path: Path) -> None:
    triton_grpc = pytest.importorskip("tritonclient.grpc")
    utils = pytest.importorskip("tritonclient.utils")
    with serving(world, tmp_path, grpc=True) as it:
        triton = triton_over_grpc(it, world.ours)
        inputs = tensors(triton_grpc, True)
        check(triton.infer("adder", inputs, headers={"authorization": f"Bearer {key_of('alice')}"}))
        with pytest.raises(utils.InferenceServerException, match="UNAUTHENTICATED"):
            triton.infer("adder", inputs)
        triton.close()
        stranger = triton_over_grpc(it, world.strangers)
        with pytest.raises(utils.InferenceServerException, match="UNAVAILABLE"):
            stranger.is_server_live()
        stranger.close()


def test_a_server_that_nobody_vouches_for_is_not_talked_to(world: World) -> None:
    with serving(world) as it:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{it.url}/health", verify=trusting(world.strangers))
        # Nor does the server talk in the clear.
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{it.port}/health")
        assert httpx.get(f"{it.url}/health", verify=trusting(world.ours)).status_code == 200


def test_old_versions_of_tls_are_refused(world: World) -> None:
    with serving(world) as it:
        for version, works in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
            context = trusting(world.ours)
            # What this machine's own settings would not even try.
            context.set_ciphers("DEFAULT:@SECLEVEL=0")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                context.minimum_version = context.maximum_version = version
            if works:
                assert name_of(context, it.port) == "server"
            else:
                # The server says so, or hangs up; the client itself would have said something else.
                with pytest.raises(ssl.SSLError, match=r"ALERT_PROTOCOL_VERSION|UNEXPECTED_EOF"):
                    name_of(context, it.port)


def test_clients_show_certificates_where_they_are_asked_for(world: World) -> None:
    with serving(world, tls_ca=str(world.trusted())) as it:
        assert httpx.get(f"{it.url}/health", verify=trusting(world.ours, world.client)).status_code == 200
        for own in (None, world.stray):
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{it.url}/health", verify=trusting(world.ours, own))


def test_clients_show_certificates_over_grpc(world: World) -> None:
    utils = pytest.importorskip("tritonclient.utils")
    with serving(world, tls_ca=str(world.trusted()), grpc=True) as it:
        for own, works in ((world.client, True), (None, False), (world.stray, False)):
            triton = triton_over_grpc(it, world.ours, own)
            if works:
                assert triton.is_server_live()
            else:
                with pytest.raises(utils.InferenceServerException, match="UNAVAILABLE"):
                    triton.is_server_live()
            triton.close()


# Who begins no handshake


def silent(it: Listening) -> socket.socket:
    """A connection that says nothing, as soon as the server counts it."""
    connections = it.server.server_state.connections
    before = len(connections)
    made = socket.create_connection(("127.0.0.1", it.port), timeout=20)
    while len(connections) == before:
        time.sleep(0.002)
    return made


def test_connections_count_before_their_handshake(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SPARE_CONNECTIONS", 1)
    with serving(world, max_connections=2) as it, contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(silent(it)) for _ in range(2)]
        answer = httpx.get(f"{it.url}/v1/models", verify=trusting(world.ours))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_connections")
        while len(it.server.server_state.connections) > 2:
            time.sleep(0.002)
        stack.enter_context(silent(it))
        with socket.create_connection(("127.0.0.1", it.port), timeout=20) as beyond:
            assert ended(beyond)
        # One that hangs up and one that talks of something else let others in.
        waiting[0].close()
        waiting[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        while len(it.server.server_state.connections) > 1:
            time.sleep(0.002)
        assert httpx.get(f"{it.url}/v1/models", verify=trusting(world.ours)).status_code == 200


def test_handshakes_of_one_address_make_room_for_another(world: World) -> None:
    with serving(world, max_connections=4) as it, contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(silent(it)) for _ in range(4)]
        transport = httpx.HTTPTransport(verify=trusting(world.ours), local_address="127.0.0.2")
        client = stack.enter_context(httpx.Client(transport=transport))
        assert client.get(f"{it.url}/v1/models").status_code == 200
        assert ended(waiting[0])


def ended(client: socket.socket) -> bool:
    """Wait for the end of a connection, however it comes, without an answer."""
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_a_handshake_has_its_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HANDSHAKE_TIMEOUT_S", 0.05)
    with serving(world) as it, silent(it) as client:
        assert ended(client)
        while it.server.server_state.connections:
            time.sleep(0.002)


def test_a_server_that_leaves_waits_for_no_handshake(world: World) -> None:
    with contextlib.ExitStack() as stack:
        with serving(world) as it:
            client = stack.enter_context(silent(it))
        assert ended(client)


# What a container is asked


@pytest.fixture
def health_check(tmp_path: Path) -> Path:
    """The health check of the image."""
    text = (Path(__file__).parents[2] / "Dockerfile").read_text()
    path = tmp_path / "check.py"
    path.write_text(text.partition("/chairlift-ready\n")[2].partition("\nEOF\n")[0])
    return path


def healthy(check: Path, process: int | None = None, port: int | None = None) -> bool:
    """What it says of this process, or another; 0 is none."""
    command = [sys.executable, str(check), str(os.getpid() if process is None else process)]
    environment = os.environ if port is None else os.environ | {"CHAIRLIFT_PORT": str(port)}
    return subprocess.run(command, env=environment, capture_output=True).returncode == 0


@pytest.mark.processes
def test_the_health_check_of_the_image(world: World, health_check: Path) -> None:
    grpc = find_spec("grpc") is not None
    with listening(adder()[0], grpc=grpc) as plain:
        assert healthy(health_check), "at a port that nobody was told of"
        assert healthy(health_check, 0, plain.port)
        next(iter(plain.models.all())).state = "draining"
        assert not healthy(health_check)
    assert not healthy(health_check, 0, plain.port)
    with serving(world, grpc=grpc) as encrypted:
        assert healthy(health_check)
        next(iter(encrypted.models.all())).state = "draining"
        assert not healthy(health_check)
    with serving(world, tls_ca=str(world.trusted())) as closed:
        assert healthy(health_check)
        assert healthy(health_check, 0, closed.port)


_ANSWERS = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = HTTPServer(("127.0.0.1", 0), Ready)
print(flush=True)
server.serve_forever()
"""


@pytest.mark.processes
@pytest.mark.parametrize("inits", [1, 2])
def test_the_health_check_looks_behind_an_init(inits: int, health_check: Path) -> None:
    last = '"$0" -S -c "$1"; :'
    command = ["sh", "-c", last if inits == 1 else 'sh -c "$2" "$0" "$1"; :', sys.executable, _ANSWERS, last]
    # In a group of its own, so that both can be ended.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0, preexec_fn=end_with_tests
    ) as init:
        try:
            assert init.stdout is not None
            assert init.stdout.readline() == b"\n"
            assert healthy(health_check, init.pid)
        finally:
            os.killpg(init.pid, signal.SIGKILL)


# Files that are replaced


def test_new_connections_get_the_new_certificate_and_old_ones_go_on(world: World) -> None:
    with serving(world) as it:
        assert it.tls is not None
        context = trusting(world.ours)
        kept = http.client.HTTPSConnection("127.0.0.1", it.port, context=context, timeout=10)
        kept.request("GET", "/health/live")
        assert kept.getresponse().read() == b'{"status":"live"}'
        assert common_name(kept) == "server"
        before = kept.sock
        install(world.renewed, Pair(world.folder / "in-use.pem", world.folder / "in-use.key"))
        asyncio.run(it.tls.look_again())
        assert name_of(context, it.port) == "renewed"
        kept.request("GET", "/health/live")
        assert kept.getresponse().read() == b'{"status":"live"}'
        assert kept.sock is before
        kept.close()


def test_grpc_gets_the_new_certificate(world: World) -> None:
    utils = pytest.importorskip("tritonclient.utils")
    with serving(world, grpc=True) as it:
        assert it.tls is not None
        kept = triton_over_grpc(it, world.ours)
        assert kept.is_server_live()
        install(world.foreign, Pair(world.folder / "in-use.pem", world.folder / "in-use.key"))
        asyncio.run(it.tls.look_again())
        assert kept.is_server_live()
        kept.close()
        late, right = triton_over_grpc(it, world.ours), triton_over_grpc(it, world.strangers)
        with pytest.raises(utils.InferenceServerException, match="UNAVAILABLE"):
            late.is_server_live()
        assert right.is_server_live()
        late.close()
        right.close()


def test_other_authorities_for_clients(world: World) -> None:
    """Who is no longer trusted does not come in again, not even by an earlier session; who newly is does."""
    trusted = world.trusted()
    with serving(world, tls_ca=str(trusted)) as it:
        assert it.tls is not None
        was, will_be = trusting(world.ours, world.client), trusting(world.ours, world.stray)
        assert httpx.get(f"{it.url}/health", verify=was).status_code == 200
        trusted.write_bytes(world.strangers.certificate.read_bytes())
        asyncio.run(it.tls.look_again())
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{it.url}/health", verify=was)
        assert httpx.get(f"{it.url}/health", verify=will_be).status_code == 200


@pytest.mark.parametrize("which", [0, 1])
def test_half_a_renewal_changes_nothing(which: int, world: World, caplog: pytest.LogCaptureFixture) -> None:
    with serving(world) as it:
        assert it.tls is not None
        place = Pair(world.folder / "in-use.pem", world.folder / "in-use.key")
        context = trusting(world.ours)
        place[which].write_bytes(world.renewed[which].read_bytes())
        asyncio.run(it.tls.look_again())
        assert name_of(context, it.port) == "server"
        assert "is not the key of tls_cert" in caplog.text
        install(world.renewed, place)
        asyncio.run(it.tls.look_again())
        assert name_of(context, it.port) == "renewed"


# Files that are no good


def made(cert: Path, key: Path, ca: Path | None = None) -> Any:
    return make_tls(ServerConfig(tls_cert=str(cert), tls_key=str(key), tls_ca=None if ca is None else str(ca)))


def test_what_is_wrong_is_said_at_the_start(world: World, tmp_path: Path) -> None:
    server, none, junk, empty = world.server, tmp_path / "none", tmp_path / "junk", tmp_path / "empty"
    junk.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    empty.touch()
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", str(server.key), "-aes256", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    cases: list[tuple[tuple[Path, ...], str]] = [
        ((none, server.key), r"tls_cert .*none can't be read: No such file"),
        ((server.certificate, none), r"tls_key .*none can't be read: No such file"),
        ((server.certificate, server.key, none), r"tls_ca .*none can't be read: No such file"),
        ((server.certificate, tmp_path), r"tls_key .* can't be read: Is a directory"),
        ((server.certificate, world.client.key), r"tls_key .*client\.key is not the key of tls_cert .*server\.pem"),
        ((junk, server.key), r"tls_cert .*junk and tls_key .*server\.key can't be used"),
        ((empty, server.key), r"tls_cert .*empty and tls_key .*server\.key can't be used"),
        ((server.certificate, junk), r"tls_key .*junk can't be used"),
        ((server.certificate, server.key, junk), r"tls_ca .*junk can't be used"),
        ((server.certificate, server.key, empty), r"tls_ca .*empty can't be used"),
        ((server.certificate, locked), r"tls_key .*locked\.key has a passphrase"),
    ]
    for files, problem in cases:
        with pytest.raises(ConfigError, match=problem):
            made(*files)
    assert made(server.certificate, server.key) is not None
    assert make_tls(ServerConfig()) is None


def test_a_key_that_may_not_be_read_is_named(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "closed.key"
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path == key:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"tls_key .*closed\.key can't be read: Permission denied"):
        made(world.server.certificate, key)
