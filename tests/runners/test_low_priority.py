"""Threads that are held back pause while a model computes, and only then."""

import hashlib
import threading
from collections.abc import Callable

import pytest

from chairlift.ops.native import load_library
from chairlift.runners import low_priority
from chairlift.runners.low_priority import hold_back, while_computing

try:
    LIBRARY = load_library()[0]
except OSError:
    pytest.skip("needs the native library", allow_module_level=True)


def pauses_of(work: Callable[[], None], num_threads: int = 1) -> int:
    """How often threads pause that do the work, held back before they begin."""
    before = LIBRARY.chairlift_count_pauses()
    for _ in range(num_threads):
        begin = threading.Event()
        thread = threading.Thread(target=lambda begin=begin: begin.wait() and work())
        thread.start()
        hold_back(thread)
        begin.set()
        thread.join()
    count: int = LIBRARY.chairlift_count_pauses() - before
    return count


def hashes() -> None:
    """Some tenths of a second without the interpreter's lock."""
    assert hashlib.pbkdf2_hmac("sha256", b"lift", b"", 500_000).hex().startswith(EXPECTED)


EXPECTED = hashlib.pbkdf2_hmac("sha256", b"lift", b"", 500_000).hex()


@pytest.mark.skipif(not hasattr(low_priority.os, "SCHED_IDLE"), reason="needs Linux")
def test_it_pauses_while_a_model_computes() -> None:
    with while_computing():
        assert pauses_of(hashes) > 10


def test_it_does_not_where_none_does() -> None:
    low_priority._busy_until.value = 0
    # A thread that has ended may still end a pause.
    assert pauses_of(hashes) <= 1


def test_it_does_not_while_it_holds_the_interpreter() -> None:
    """Everybody would pause with it."""
    counts: list[int] = []

    def work() -> None:
        counts.append(LIBRARY.chairlift_count_pauses())
        assert sorted(range(2_000_000), key=lambda each: -each)[0] == 1_999_999
        counts.append(LIBRARY.chairlift_count_pauses())

    with while_computing():
        pauses_of(work)
    # To count is a call without the lock, which may pause behind the first count and before the second.
    assert counts[1] - counts[0] <= 2


def test_what_a_thread_takes_is_given_back() -> None:
    """There is room for 64 at a time."""
    with while_computing():
        assert pauses_of(lambda: None, num_threads=200) < 200
        assert pauses_of(hashes) > 10
    assert len(low_priority._pausing) < 64
