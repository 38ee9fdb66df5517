"""Runs tests on every set of native kernels that was built and can run here."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.device import DEVICE

from chairlift.errors import ConfigError
from chairlift.ops.native import LIBRARY, load_library

ISAS = ["baseline", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx"]
needs_native = pytest.mark.skipif(
    DEVICE == "cuda" or not LIBRARY.exists(), reason="there are no native kernels, or the native library is not built"
)


@contextmanager
def kernels_of(isa: str) -> Iterator[None]:
    """Use these kernels for a while. Weights and caches lie the same way under all of them."""
    if not LIBRARY.exists():
        pytest.skip("the native library is not built")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CHAIRLIFT_ISA", isa)
            try:
                load_library()
            except ConfigError:
                pytest.skip(f"{isa} was not built or does not run here")
            yield
    finally:
        # The choice holds for the whole process until the next one.
        load_library()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Compute with so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def runs_here(isa: str) -> bool:
    """Whether these kernels were built and can run."""
    try:
        with kernels_of(isa):
            return True
    except pytest.skip.Exception:
        return False
