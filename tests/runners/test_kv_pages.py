"""The memory of KV blocks is there before they are used, and no more of it than that."""

import ctypes
import gc
import time
import weakref
from pathlib import Path

import pytest
import torch

from chairlift.ops.base import HeadShape
from chairlift.ops.native import LIBRARY, find_library
from chairlift.runners.decoder import kv_pages
from chairlift.runners.decoder.kv_pages import KvPages
from chairlift.runners.low_priority import while_computing

HEADS = HeadShape(4, 4, 64, 1.0)
PAGE = 4096
TASKS = Path("/proc/self/task")

pytestmark = pytest.mark.skipif(
    not LIBRARY.exists() or not TASKS.exists(), reason="needs Linux, and the native library"
)


def caches(num_blocks: int, layers: int = 2) -> list[tuple[torch.Tensor, ...]]:
    from chairlift.ops.cpu import CpuOps

    ops = CpuOps(torch.bfloat16)
    return [ops.allocate_kv_cache(num_blocks, 16, HEADS, torch.bfloat16, torch.device("cpu")) for _ in range(layers)]


def there(pages: torch.Tensor, block: int) -> bool:
    """Whether a block's memory is."""
    found = ctypes.c_ubyte()
    address = (pages.data_ptr() + block * pages.stride(0) * pages.itemsize) // PAGE * PAGE
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), ctypes.byref(found)) == 0
    return bool(found.value & 1)


def until(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_blocks_are_there_a_little_before_they_are_used() -> None:
    with while_computing():
        check_what_is_there(caches(16_000))


def check_what_is_there(every: list[tuple[torch.Tensor, ...]]) -> None:
    pages = KvPages(every)
    if pages.is_done:
        pytest.skip("this system can't supply memory beforehand")
    last = kv_pages._AHEAD * pages._span
    arrays = [array for cache in every for array in cache]
    until(lambda: all(there(array, pages._span - 1) for array in arrays))
    assert not any(there(array, 3 * pages._span) for array in arrays)
    pages.use(0)
    until(lambda: all(there(array, last - 1) for array in arrays))
    assert not any(there(array, last + 3 * pages._span) for array in arrays)
    pages.use(2 * pages._span)
    until(lambda: all(there(array, last + 2 * pages._span) for array in arrays))
    assert not any(there(array, 15_999) for array in arrays)
    assert all(not array.any() for array in arrays)
    pages.use(15_999)
    until(lambda: pages.is_done)
    assert all(there(array, 15_999) for array in arrays)


def test_all_of_it_comes_when_a_model_that_was_used_has_nothing_to_do() -> None:
    every = caches(16_000)
    arrays = [array for cache in every for array in cache]
    pages = KvPages(every)
    if pages.is_done:
        pytest.skip("this system can't supply memory beforehand")
    until(lambda: all(there(array, pages._span - 1) for array in arrays))
    time.sleep(0.3)
    assert not any(there(array, 3 * pages._span) for array in arrays)
    pages.use(0)
    until(lambda: pages.is_done)
    assert all(there(array, 15_999) for array in arrays)
    assert all(not array.any() for array in arrays)


def threads() -> set[Path]:
    """Of this process, those that Python does not know of among them."""
    return set(TASKS.iterdir())


def test_its_threads_end_with_the_cache() -> None:
    before = threads()
    every = caches(16_000)
    pages = KvPages(every)
    until(lambda: len(threads() - before) == 2)
    memory, owner = weakref.ref(every[0][0]), weakref.ref(pages)
    del pages, every
    gc.collect()
    assert (owner(), memory()) == (None, None)
    assert not threads() - before


def test_what_is_written_meanwhile_stays() -> None:
    every = caches(16_000)
    pages = KvPages(every)
    arrays = [array for cache in every for array in cache]
    pages.use(15_999)
    for number, array in enumerate(arrays):
        array.fill_(number + 1)
    until(lambda: pages.is_done)
    assert all(bool((array == number + 1).all()) for number, array in enumerate(arrays))


def test_a_small_cache_has_no_thread() -> None:
    before = threads()
    pages = KvPages(caches(16))
    assert pages.is_done
    pages.use(15)
    assert not threads() - before


def test_without_a_thread_pages_come_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_library(), "chairlift_begin_supply", lambda *_: None)
    pages = KvPages(caches(16_000))
    assert pages.is_done
    pages.use(5)
