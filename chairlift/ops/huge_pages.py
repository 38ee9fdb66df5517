"""Memory for weights and caches, in huge pages."""

import contextlib
import ctypes
import mmap
import threading

import torch
from torch import Tensor


def zeros(size: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take up memory once touched, in huge pages where the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=dtype)
    return torch.frombuffer(_arena.take(size * dtype.itemsize), dtype=dtype)


class _Arena:
    """Huge pages, shared by whoever asks one after the other: most weights of a small model are smaller than a page.

    With small pages nearly every jump of attention from block to block misses the TLB, and a product's stream of
    weights misses it at every page. A piece of memory lives as long as anything in it does.
    """

    PAGE = 2 * 2**20
    PIECE = 16 * PAGE

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = memoryview(b"")

    def take(self, size: int) -> memoryview:
        """Return `size` zero bytes, aligned to 64."""
        with self._lock:
            if size > len(self._rest):
                if size > self.PIECE // 4:
                    return self._map(size)[:size]
                self._rest = self._map(self.PIECE)
            taken, self._rest = self._rest[:size], self._rest[-(-size // 64) * 64 :]
            return taken

    def _map(self, size: int) -> memoryview:
        """At least `size` bytes that begin with a huge page."""
        whole = -(-size // self.PAGE) * self.PAGE
        memory = mmap.mmap(-1, whole + self.PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % self.PAGE
        return memoryview(memory)[start : start + whole]


_arena = _Arena()
