"""Memory of the KV cache that is there before it is needed."""

import ctypes
import threading
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from chairlift.ops.base import KVCache
from chairlift.runners.low_priority import lower

# Linux 5.14 and later; others refuse it, and pages come when they are first used.
_MADV_POPULATE_WRITE = 23
_SMALL_PAGE, _HUGE_PAGE = 2**12, 2**21
# Spans that are kept ready behind the last block in use. A span is a huge page of every array.
_AHEAD = 4
# Unless more spans than this are missing, the thread rests after each page, so many times as long as that took: a host
# that has to find a page first stops the core, whatever the thread's priority, and a step beside which many came one
# after the other took three times as long.
_HURRY, _REST = 3, 2.0
# Bytes of a cache below which nobody would notice.
_LEAST = 2**25


class _Array(NamedTuple):
    """Where K or V of a layer lie, and how many bytes a block of them has."""

    address: int
    block_bytes: int


class KvPages:
    """Has the system supply a cache's memory a little ahead of the blocks that are used, in a thread of low priority.

    Blocks that nobody has used are taken in order. So all arrays reach their next huge page in the same step, where the
    kernel clears each of them, and a virtual machine's host has to find them first: 60 arrays made that step 0.3 s
    longer on one.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        """Take what lies in the memory of this machine; `caches` is of each layer, K and V first."""
        pages = [each for cache in caches for each in cache[:2] if each.device.type == "cpu"]
        self._arrays = [_Array(each.data_ptr(), each.stride(0) * each.itemsize) for each in pages]
        self._num_blocks = pages[0].shape[0] if pages else 0
        self._ready = 0
        self._wanted = 0
        self._asked = threading.Event()
        if self._num_blocks * sum(array.block_bytes for array in self._arrays) < _LEAST:
            self._ready = self._num_blocks
            return
        self._span = max(_HUGE_PAGE // min(array.block_bytes for array in self._arrays), 1)
        thread = threading.Thread(target=_keep_ready, args=(weakref.ref(self), self._asked), daemon=True)
        thread.name = "kv pages"
        weakref.finalize(self, self._asked.set)
        thread.start()
        lower(thread)
        # A server that nobody uses takes no more than its first request will.
        self._want(self._span)

    def use(self, block: int) -> None:
        """Note that this block, and all before it, are used, or will be in the coming step."""
        if not self.is_done:
            self._want(block + 1 + _AHEAD * self._span)

    def _want(self, blocks: int) -> None:
        if blocks > self._wanted:
            self._wanted = min(blocks, self._num_blocks)
            self._asked.set()

    def supply(self) -> bool:
        """Supply the next span, if it is wanted; return whether there may be more to do. For the thread."""
        if self._ready >= self._wanted:
            return False
        stop = min(self._ready + self._span, self._num_blocks)
        for address, block_bytes in self._arrays:
            started = time.thread_time()
            begin = (address + self._ready * block_bytes) // _SMALL_PAGE * _SMALL_PAGE
            end = address + stop * block_bytes
            if _madvise(begin, end - begin, _MADV_POPULATE_WRITE):
                self._ready = self._num_blocks
                return False
            if self._ready + self._span * _HURRY < self._wanted:
                continue
            time.sleep(_REST * (time.thread_time() - started))
        self._ready = stop
        return True

    @property
    def is_done(self) -> bool:
        """Whether all of it has been supplied, or nothing can be."""
        return self._ready >= self._num_blocks


def _keep_ready(owner: "weakref.ref[KvPages]", asked: threading.Event) -> None:
    """Supply spans as they are wanted, until there are none left or nobody has the cache any more."""
    while asked.wait():
        asked.clear()
        while (pages := owner()) is not None and pages.supply():
            pass
        if pages is None or pages.is_done:
            return
        # Not while it waits: it would never be let go of.
        del pages


def _madvise(address: int, size: int, advice: int) -> int:
    library = ctypes.CDLL(None)
    if not hasattr(library, "madvise"):
        return -1
    return int(library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(advice)))
