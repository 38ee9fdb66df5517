"""Memory of the KV cache that is there before it is needed."""

import weakref
from collections.abc import Sequence

import numpy as np

from chairlift.ops.base import KVCache
from chairlift.ops.native import find_library
from chairlift.runners.low_priority import busy_until

_HUGE_PAGE = 2**21
# Spans that are kept ready behind the last block in use, of which half a one is urgent. A span is a huge page of every
# array.
_AHEAD = 4
# Bytes of a cache below which nobody would notice.
_LEAST = 2**25


class KvPages:
    """Has the system supply a cache's memory a little ahead of the blocks that are used, by threads of its own.

    Blocks that nobody has used are taken in order. So all arrays reach their next huge page in the same step, where the
    kernel clears each of them, and a virtual machine's host has to find them first: 60 arrays made that step 0.3 s
    longer on one. Once a model is used, all of its memory is supplied while no model of this process computes. The
    threads are the native library's (native/page_supply.cpp).
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        """Take what lies in the memory of this machine; `caches` is of each layer, K and V first."""
        pages = [each for cache in caches for each in cache[:2] if each.device.type == "cpu"]
        self._num_blocks = pages[0].shape[0] if pages else 0
        self._wanted = 0
        self._supply: int | None = None
        library = find_library()
        block_bytes = np.array([each.stride(0) * each.itemsize for each in pages], np.int64)
        if library is None or self._num_blocks * int(block_bytes.sum()) < _LEAST:
            return
        self._library = library
        self._span = max(_HUGE_PAGE // int(block_bytes.min()), 1)
        addresses = np.array([each.data_ptr() for each in pages], np.uint64)
        # The threads write to it.
        self._held = pages
        self._supply = library.chairlift_begin_supply(
            addresses.ctypes.data,
            block_bytes.ctypes.data,
            len(pages),
            self._num_blocks,
            self._span,
            _AHEAD * self._span - self._span // 2,
            busy_until(),
        )
        if self._supply is not None:
            weakref.finalize(self, library.chairlift_end_supply, self._supply)
        # A server that nobody uses takes no more than its first request will.
        self._want(self._span)

    def use(self, block: int) -> None:
        """Note that this block, and all before it, are used, or will be in the coming step."""
        if self._supply is not None:
            self._want(block + 1 + _AHEAD * self._span)

    def _want(self, blocks: int) -> None:
        if self._supply is not None and blocks > self._wanted:
            self._wanted = blocks
            self._library.chairlift_supply(self._supply, blocks)

    @property
    def is_done(self) -> bool:
        """Whether all of it has been supplied, or nothing can be; for tests."""
        return self._supply is None or self._library.chairlift_supply(self._supply, 0) >= self._num_blocks
