"""Threads whose work takes long pause while a model computes, and only where nobody waits for what they hold."""

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import llguidance
import numpy as np
import pytest

from chairlift import StructuredOutputsParams
from chairlift.demo import demo_path
from chairlift.ops.native import load_library
from chairlift.runners import low_priority
from chairlift.runners.grammars.grammar import GrammarTokenizer
from chairlift.runners.low_priority import Patience, hold_back, rest, while_computing, while_waiting
from chairlift.text.structured import grammar_of

try:
    LIBRARY = load_library()[0]
except OSError:
    pytest.skip("needs the native library", allow_module_level=True)
if not hasattr(low_priority.os, "SCHED_IDLE"):
    pytest.skip("needs Linux", allow_module_level=True)

# What follows the first letter takes some hundreds of milliseconds to find.
NESTED = StructuredOutputsParams(regex="[xy](((a{50}){50}){50})")


@pytest.fixture(scope="module")
def words() -> GrammarTokenizer:
    return GrammarTokenizer(Path(demo_path()), 2048)


@pytest.fixture
def follow(words: GrammarTokenizer) -> Callable[[], None]:
    """Work of the library without the interpreter's lock."""

    def work() -> None:
        matcher = llguidance.LLMatcher(words.tokens, grammar_of(NESTED))
        bits = np.zeros(words.words, np.int32)
        assert matcher.consume_tokens(words.tokens.tokenize_str("x"))
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    return work


def pauses_of(work: Callable[[], None], seconds: float = 0.0015, is_held_back: bool = False) -> int:
    """How often a thread pauses that does the work, of which so many seconds are not long yet."""
    counts: list[int] = []

    def patient() -> None:
        patience = Patience(seconds)
        begin.wait()
        counts.append(LIBRARY.chairlift_count_pauses())
        with patience:
            work()
        counts.append(LIBRARY.chairlift_count_pauses())

    begin, thread = threading.Event(), threading.Thread(target=patient)
    thread.start()
    if is_held_back:
        hold_back(thread)
    begin.set()
    thread.join()
    return counts[1] - counts[0]


def test_work_that_takes_long_pauses_while_a_model_computes(follow: Callable[[], None]) -> None:
    with while_computing():
        assert pauses_of(follow) > 5


def test_it_does_not_where_none_does(follow: Callable[[], None]) -> None:
    low_priority._busy_until.value = 0
    assert pauses_of(follow) == 0


def test_it_does_not_between_two_steps_that_nobody_waits_for(follow: Callable[[], None]) -> None:
    with while_computing():
        rest()
        assert pauses_of(follow) > 0
    rest()
    assert pauses_of(follow) == 0


def test_it_goes_on_while_a_model_waits_unless_another_computes(follow: Callable[[], None]) -> None:
    with while_computing(), while_waiting():
        assert pauses_of(follow) == 0
        with while_computing():
            assert pauses_of(follow) > 5


def test_work_that_is_not_long_yet_does_not_unless_its_thread_is_held_back(follow: Callable[[], None]) -> None:
    with while_computing():
        assert pauses_of(follow, seconds=600) == 0
        assert pauses_of(follow, seconds=600, is_held_back=True) > 5


def test_one_that_is_held_back_amid_its_work_pauses(follow: Callable[[], None]) -> None:
    def late() -> None:
        hold_back(threading.current_thread())
        follow()

    with while_computing():
        assert pauses_of(late, seconds=600) > 5


def test_after_its_work_it_does_not(follow: Callable[[], None]) -> None:
    counts: list[int] = []

    def twice() -> None:
        patience = Patience(0.0)
        counts.append(LIBRARY.chairlift_count_pauses())
        with patience:
            follow()
        counts.append(LIBRARY.chairlift_count_pauses())
        follow()
        counts.append(LIBRARY.chairlift_count_pauses())

    with while_computing():
        thread = threading.Thread(target=twice)
        thread.start()
        thread.join()
    assert counts[1] - counts[0] > 5
    assert counts[2] == counts[1]


def test_it_does_not_while_it_holds_the_interpreter(words: GrammarTokenizer) -> None:
    """Everybody would pause with it. The library lists what follows without letting go of it."""
    constant = StructuredOutputsParams(json={"const": "lift " * 4000})
    matcher = llguidance.LLMatcher(words.tokens, grammar_of(constant))

    def work() -> None:
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            assert len(matcher.compute_ff_tokens()) > 4000

    with while_computing():
        assert pauses_of(work, seconds=0) == 0


def test_it_does_not_in_other_code() -> None:
    """It may hold a lock there that all threads need, as the allocator's."""

    def hashes() -> None:
        hashlib.pbkdf2_hmac("sha256", b"lift", b"", 100_000)

    with while_computing():
        assert pauses_of(hashes, seconds=0) == 0


def test_what_a_thread_takes_is_given_back(follow: Callable[[], None]) -> None:
    """There is room for 64 at a time."""
    with while_computing():
        for _ in range(200):
            pauses_of(lambda: None)
        assert pauses_of(follow) > 5
    assert len(low_priority._numbers) < 64
