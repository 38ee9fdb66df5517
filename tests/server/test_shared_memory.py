"""Tensors in the system's shared memory, by Triton's clients, and what is refused of it."""

import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.items_harness import Listening, adder, function, listening
from support.key_files import bearer, write_keys
from support.oip_tensors import A, B, tensors

from chairlift.server.oip.shared_memory import Place, SharedRegions

shm = pytest.importorskip("tritonclient.utils.shared_memory")
utils = pytest.importorskip("tritonclient.utils")
http = pytest.importorskip("tritonclient.http")


@pytest.fixture(scope="module")
def server() -> Iterator[Listening]:
    with listening(adder()[0], shared_memory=True, grpc=True, max_tensor_bytes=4096) as it:
        yield it


@pytest.fixture
def key() -> Iterator[str]:
    name = f"chairlift-test-{secrets.token_hex(8)}"
    Path("/dev/shm", name).write_bytes(bytes(4096))
    yield f"/{name}"
    Path("/dev/shm", name).unlink()


def client_of(server: Listening, module: Any) -> Any:
    return module.InferenceServerClient(f"127.0.0.1:{server.grpc_port}" if module is not http else server.url[7:])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritons_clients_share_memory(server: Listening, key: str, protocol: str) -> None:
    module = pytest.importorskip(f"tritonclient.{protocol}")
    triton = client_of(server, module)
    handle = shm.create_shared_memory_region("data", key, 4096)
    size = A.nbytes
    shm.set_shared_memory_region(handle, [A, B])
    triton.register_system_shared_memory("data", key, 4096)
    status = triton.get_system_shared_memory_status()
    found = status[0] if protocol == "http" else status.regions["data"]
    about = found if protocol == "http" else {"key": found.key, "byte_size": found.byte_size, "offset": found.offset}
    assert (about["key"], about["byte_size"], about["offset"]) == (key, 4096, 0)
    inputs = tensors(module, True)[2:]
    for index, name in enumerate("ab"):
        tensor = module.InferInput(name, A.shape, "FP32")
        tensor.set_shared_memory("data", size, index * size)
        inputs.append(tensor)
    outputs = [module.InferRequestedOutput("sum"), module.InferRequestedOutput("mean")]
    outputs[0].set_shared_memory("data", 512, 1024)
    result = triton.infer("adder", inputs, outputs=outputs)
    np.testing.assert_array_equal(result.as_numpy("mean"), (A + B).mean(axis=1))
    np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, A.shape, 1024), A + B)
    parameters = result.get_output("sum")["parameters"] if protocol == "http" else result.get_output("sum").parameters
    given = parameters["shared_memory_byte_size"]
    assert (given if protocol == "http" else given.int64_param) == size
    triton.unregister_system_shared_memory("data")
    triton.unregister_system_shared_memory()
    left = triton.get_system_shared_memory_status()
    assert not (left if protocol == "http" else left.regions)
    with pytest.raises(utils.InferenceServerException, match="no region 'data'"):
        triton.infer("adder", inputs)
    triton.close()


def test_regions_that_can_not_be_are_refused(server: Listening, key: str) -> None:
    triton = client_of(server, http)
    for wrong, size, offset, problem in (
        ("/../../etc/passwd", 1, 0, "a key like"),
        ("/a/b", 1, 0, "a key like"),
        ("..", 1, 0, "a key like"),
        ("", 1, 0, "a key like"),
        (f"{key}-x", 1, 0, "can't be opened"),
        (key, 4097, 0, "has 4096 bytes, not 4097"),
        (key, 4096, 1, "has 4096 bytes"),
        (key, 0, 0, "has 4096 bytes"),
    ):
        with pytest.raises(utils.InferenceServerException, match=problem):
            triton.register_system_shared_memory("x", wrong, size, offset)
    os.symlink("/etc/hostname", f"/dev/shm{key}-link")
    try:
        with pytest.raises(utils.InferenceServerException, match="can't be opened"):
            triton.register_system_shared_memory("x", f"{key}-link", 1)
    finally:
        os.unlink(f"/dev/shm{key}-link")
    triton.register_system_shared_memory("x", key, 8)
    with pytest.raises(utils.InferenceServerException, match="registered already"):
        triton.register_system_shared_memory("x", key, 8)
    with pytest.raises(utils.InferenceServerException, match="no region 'y'"):
        triton.get_system_shared_memory_status("y")
    triton.unregister_system_shared_memory()
    triton.close()


@pytest.mark.parametrize(
    ("parameters", "status", "problem"),
    [
        ({"shared_memory_region": "x"}, 400, "go together"),
        ({"shared_memory_byte_size": 4}, 400, "go together"),
        ({"shared_memory_region": 3, "shared_memory_byte_size": 4}, 400, "go together"),
        ({"shared_memory_region": "x", "shared_memory_byte_size": -4}, 400, "must not be negative"),
        ({"shared_memory_region": "x", "shared_memory_byte_size": 4, "shared_memory_offset": 4093}, 400, "has 4096"),
        ({"shared_memory_region": "x", "shared_memory_byte_size": 8}, 400, "needs 4 bytes"),
        ({"shared_memory_region": "x", "shared_memory_byte_size": 4, "binary_data_size": 0}, 400, "either data or"),
        ({"shared_memory_region": "x", "shared_memory_byte_size": 3000}, 413, "4096 bytes (max_tensor_bytes)"),
    ],
    ids=str,
)
def test_places_that_can_not_be_are_refused(
    server: Listening, key: str, parameters: dict[str, Any], status: int, problem: str
) -> None:
    triton = client_of(server, http)
    triton.register_system_shared_memory("x", key, 4096)
    inputs = [{"name": name, "shape": [1], "datatype": "FP32", "parameters": parameters} for name in "ab"]
    if status == 413:
        inputs = [each | {"shape": [750]} for each in inputs]
    answer = httpx.post(f"{server.url}/v2/models/adder/infer", json={"inputs": inputs})
    assert (answer.status_code, problem in answer.json()["error"]) == (status, True), answer.text
    triton.unregister_system_shared_memory()
    triton.close()


def test_memory_that_shrinks_or_is_too_small_is_an_error(server: Listening, key: str) -> None:
    triton = client_of(server, http)
    triton.register_system_shared_memory("x", key, 4096)
    outputs = [http.InferRequestedOutput("sum")]
    outputs[0].set_shared_memory("x", 4, 0)
    with pytest.raises(utils.InferenceServerException, match="24 bytes, and only 4 were given"):
        triton.infer("adder", tensors(http, True), outputs=outputs)
    os.truncate(f"/dev/shm{key}", 8)
    outputs[0].set_shared_memory("x", 24, 0)
    with pytest.raises(utils.InferenceServerException, match="shorter than it was"):
        triton.infer("adder", tensors(http, True), outputs=outputs)
    given = tensors(http, True)
    given[0].set_shared_memory("x", 24, 0)
    with pytest.raises(utils.InferenceServerException, match="shorter than it was"):
        triton.infer("adder", given)
    triton.unregister_system_shared_memory()
    triton.close()


def test_it_has_to_be_allowed(key: str) -> None:
    with listening(adder()[0]) as server:
        triton = client_of(server, http)
        for ask in (
            lambda: triton.register_system_shared_memory("x", key, 8),
            triton.get_system_shared_memory_status,
            triton.unregister_system_shared_memory,
        ):
            with pytest.raises(utils.InferenceServerException, match="shares no memory"):
                ask()
        given = tensors(http, True)
        given[0].set_shared_memory("x", 24, 0)
        with pytest.raises(utils.InferenceServerException, match="shares no memory"):
            triton.infer("adder", given)
        assert "system_shared_memory" not in triton.get_server_metadata()["extensions"]
        triton.close()


def test_regions_belong_to_a_key(key: str, tmp_path: Path) -> None:
    keys = write_keys(
        tmp_path / "keys.toml", anna={"rights": ["infer"]}, ben={"rights": ["infer"]}, eva={"rights": ["batch"]}
    )
    with listening(adder()[0], shared_memory=True, api_keys=str(keys)) as server:
        url = f"{server.url}/v2/systemsharedmemory"
        body = {"key": key, "byte_size": 8}

        def ask(who: str, method: str, path: str, **more: Any) -> httpx.Response:
            return httpx.request(method, url + path, headers=bearer(who), **more)

        assert ask("anna", "POST", "/region/x/register", json=body).status_code == 200
        assert ask("eva", "POST", "/region/x/register", json=body).status_code == 403
        assert ask("ben", "GET", "/status").json() == []
        assert ask("ben", "GET", "/region/x/status").status_code == 400
        assert ask("ben", "POST", "/unregister").status_code == 200
        assert [each["name"] for each in ask("anna", "GET", "/status").json()] == ["x"]
        assert httpx.get(f"{url}/status").status_code == 401


class Region:
    """A region with the one input of `function` in it: a text of many characters as JSON."""

    SIZE = 200_000

    def __init__(self, server: Listening, key: str, protocol: str) -> None:
        text = b'"' + b"a" * (self.SIZE - 4 - 2) + b'"'
        Path(f"/dev/shm{key}").write_bytes(len(text).to_bytes(4, "little") + text)
        self.module = pytest.importorskip(f"tritonclient.{protocol}")
        self.triton = client_of(server, self.module)
        self.triton.register_system_shared_memory("data", key, self.SIZE)

    def ask(self) -> str:
        """What became of a request with the region as its input: a status, or a code of gRPC."""
        tensor = self.module.InferInput("input", [1], "BYTES")
        tensor.set_shared_memory("data", self.SIZE)
        try:
            self.triton.infer("function", [tensor])
        except utils.InferenceServerException as error:
            return str(error.status())
        return "OK"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_shared_bytes_count_like_those_of_a_body(key: str, protocol: str) -> None:
    settings = {"max_buffered_bytes": 1_000_000, "max_body_bytes": 50_000, "max_tensor_bytes": 2 * Region.SIZE}
    service, dispatcher = function()
    with listening(service, shared_memory=True, grpc=True, **settings) as server:
        region = Region(server, key, protocol)
        others = server.buffered.limit - Region.SIZE + 1
        server.buffered.add(others)
        assert region.ask() in ("429", "StatusCode.RESOURCE_EXHAUSTED")
        # Not only the answer had no room.
        assert dispatcher.submitted == []
        server.buffered.give(others)
        assert region.ask() == "OK"
        region.triton.close()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_large_region_is_read_while_others_are_served(
    key: str, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    read = SharedRegions._read

    def noted(self: SharedRegions, place: Place) -> bytes:
        threads.append(threading.current_thread())
        return read(self, place)

    monkeypatch.setattr(SharedRegions, "_read", noted)
    with listening(function()[0], shared_memory=True, grpc=True) as server:
        region = Region(server, key, protocol)
        assert region.ask() == "OK"
        region.triton.close()
        assert threads
        assert server._thread not in threads
