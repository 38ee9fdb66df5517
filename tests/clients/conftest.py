"""The server that all clients are tested against, in a process of its own: it may have another environment than they."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    yield os.environ["CL_URL"]


@pytest.fixture(scope="session")
def v1(url: str) -> str:
    return f"{url}/v1"
