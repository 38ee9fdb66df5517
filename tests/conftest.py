"""What holds for all tests: those that start processes are marked, and what takes long to start is shared."""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    # Only where it is used: `pytest tests/core` needs no torch.
    from support.serve_process import Server

# No test asks the real Hub for anything: its library reads this once.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
# Every client of HTTP reads the certificates of all the world's authorities as it is made, which takes it 40 ms, and no
# test reaches the world. A folder is looked into only when somebody shows a certificate.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)
# Two processes of tests share the cores: threads that spin until there is work again keep it from the others. OpenMP
# reads this once.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What tests fork becomes another program at once. gRPC's own thread would begin in it before that, and end it where it
# finds its files closed (grpc/grpc#43055).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

# What is imported to find the tests makes millions of objects, and none of them is garbage.
gc.disable()

SHARED = {"demo_server", "models_server"}
_started: list[str] = []


@pytest.fixture(scope="session")
def demo_server() -> Iterator["Server"]:
    """`chairlift serve` as it comes, for all who do not stop or change it."""
    from support.serve_process import Server

    with Server() as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="session")
def models_settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The settings of `models_server`."""
    from support.serve_process import write_models

    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def models_server(models_settings: Path) -> Iterator["Server"]:
    """A server with one model of every kind and a data folder, for all who leave it as it was."""
    from support.serve_process import WITH_GRPC, Server

    with Server(str(models_settings), *WITH_GRPC) as server:
        server.wait_ready()
        yield server


def _note_python(event: str, arguments: tuple[Any, ...]) -> None:
    """Hear of every Python process that starts; small tools that libraries call, such as uname, are none of ours."""
    if event == "subprocess.Popen":
        program, command = arguments[:2]
        name = os.path.basename(os.fsdecode(program or command[0]))
        if name.startswith("python") or name == os.path.basename(sys.executable):
            _started.append(" ".join(map(str, command)))
    elif event in ("os.fork", "os.forkpty"):
        _started.append(event)


sys.addaudithook(_note_python)


def pytest_configure(config: pytest.Config) -> None:
    """Have pytest-xdist, where it is there, take files in the order that they are put in here."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_finish() -> None:
    """Look for garbage among what tests make alone."""
    gc.enable()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that use a shared server, whoever of them comes first and starts it, and put files in order."""
    for item in items:
        if SHARED.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.processes)
    if hasattr(config, "workerinput"):
        items[:] = _in_turns(items)


def _in_turns(items: list[pytest.Item]) -> list[pytest.Item]:
    """Have files that wait for other processes take turns with those that compute: two that wait leave a core idle.

    Those with many tests come first, and at the end small ones that compute, so that nobody waits for the last.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    kinds: dict[bool, list[list[pytest.Item]]] = {True: [], False: []}
    for tests in sorted(files.values(), key=len, reverse=True):
        kinds[any(test.get_closest_marker("processes") for test in tests)].append(tests)
    turns = [
        (place / len(kind) * (0.9 if waits else 1.0), tests)
        for waits, kind in kinds.items()
        for place, tests in enumerate(kind)
    ]
    return [test for _, tests in sorted(turns, key=lambda turn: turn[0]) for test in tests]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test without the marker in which a Python process was started, by itself or by its fixtures."""
    found = _started.copy()
    _started.clear()
    yield
    if found and item.get_closest_marker("processes") is None:
        pytest.fail(f"started {found[0][:200]!r}: mark the test with pytest.mark.processes", pytrace=False)
