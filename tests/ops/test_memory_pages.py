"""Memory for weights and caches: zero, aligned, and nobody's else; and what kernels do that are refused some."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.native_isa import needs_native
from support.processes import end_with_tests, environment

from chairlift.ops.huge_pages import zeros

_SAID = "the native kernels were refused memory"
# Products of weights that are all zero. In the first one the buffers for rows are refused, before there are threads;
# in the second one what each thread of the team allocates for itself.
_REFUSED = """
import ctypes, resource
import torch
from chairlift.ops import native
from chairlift.ops.formats import FORMATS

OUTS, INS, ROWS, SLACK = 64, 1 << 20, 6, 4 << 20
library = native.load_library()[0]
torch.set_num_threads(2)
held = [torch.zeros(OUTS) for _ in "sc"]

def product(name, rows, ins, limited=False):
    each = FORMATS[name]
    packed = torch.zeros(each.packed_bytes(OUTS // 32, ins), dtype=torch.uint8)
    pointers = [tensor.data_ptr() for tensor in held]
    weight = native.WeightStruct(packed.data_ptr(), None, *pointers, OUTS, ins, each.id, 0, -1)
    x, out = torch.ones(rows, ins, dtype=torch.bfloat16), torch.ones(rows, OUTS, dtype=torch.bfloat16)
    if limited:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + SLACK, resource.RLIM_INFINITY))
    try:
        library.chairlift_linear(x.data_ptr(), rows, ctypes.byref(weight), out.data_ptr(), False, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert not out.any()

product("int8", 1, 1 << 14)
for name in ("int8", "int4"):
    try:
        product(name, ROWS, INS, limited=True)
    except MemoryError as error:
        print(name, error)
    product(name, ROWS, INS)
"""


def test_pieces_are_zero_aligned_and_apart():
    sizes = [1, 63, 64, 4096, 3 * 2**20, 9 * 2**20, 7]
    pieces = [zeros(size, torch.int8) for size in sizes]
    for number, piece in enumerate(pieces, 1):
        assert piece.data_ptr() % 64 == 0
        assert not piece.any()
        piece.fill_(number)
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True), 1):
        assert piece.tolist() == [number] * size if size < 100 else bool((piece == number).all())


def test_elements_have_their_size():
    piece = zeros(1000, torch.bfloat16)
    assert piece.shape == (1000,)
    assert piece.dtype == torch.bfloat16


def test_memory_outlives_what_was_made_beside_it():
    kept = zeros(1000, torch.int8).fill_(3)
    for _ in range(50):
        zeros(2**20, torch.int8).fill_(4)
    assert bool((kept == 3).all())


@needs_native
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="where memory is not refused")
def test_memory_that_is_refused_is_an_error_and_no_end_of_the_process() -> None:
    # One heap, which takes nothing large: what is asked for is new memory, and so may be refused.
    alone = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    process = subprocess.run(
        [sys.executable, "-c", _REFUSED],
        capture_output=True,
        text=True,
        env=environment(PYTHONPATH=str(Path(__file__).parents[2])) | alone,
        preexec_fn=end_with_tests,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [f"{name} {_SAID}" for name in ("int8", "int4")]
