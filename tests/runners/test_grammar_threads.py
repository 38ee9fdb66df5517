"""Threads that compile and follow grammars beside the model: who is left alone, lowered, or given up."""

import json
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest

from chairlift.demo import demo_path
from chairlift.runners.decoder.grammar import CompiledGrammar, Follower, GrammarTokenizer
from chairlift.runners.decoder.grammar_threads import GrammarCompiler, LookAhead

VOCAB = json.loads((Path(demo_path()) / "config.json").read_text())["vocab_size"]


@pytest.fixture(scope="module")
def words() -> GrammarTokenizer:
    return GrammarTokenizer(Path(demo_path()), VOCAB)


def is_aside(ahead: LookAhead, follower: Follower) -> bool:
    """Whether a thread of its own advances it."""
    aside = ahead._aside.get(follower)
    return aside is not None and aside.thread is not None


def test_one_that_is_left_alone_costs_the_others_no_waiting(words: GrammarTokenizer) -> None:
    ahead, follower, other = LookAhead(), *(words.compile('start: "a" "b"').follow([], True) for _ in range(2))
    gate, advance = threading.Event(), follower.advance
    follower.advance = lambda: gate.wait(60) and advance()  # type: ignore[method-assign]
    ahead.post([follower, other])
    while other.busy:
        time.sleep(0.001)
    assert ahead._idle.wait(60)
    assert (follower.busy, other.busy) == (True, False)
    gate.set()
    ahead.close()


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="needs a thread's clock")
def test_one_that_takes_a_core_is_lowered_while_the_model_computes(
    words: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks after it meanwhile: what watches is a thread."""
    lowered: list[threading.Thread] = []
    monkeypatch.setattr("chairlift.runners.decoder.grammar_threads.hold_back", lowered.append)
    monkeypatch.setattr("chairlift.runners.decoder.grammar_threads._LONG", 600)
    ahead, follower = LookAhead(), words.compile('start: "a" "b"').follow([], True)

    def busy() -> None:
        while not lowered:
            pass

    follower.advance = busy  # type: ignore[method-assign]
    ahead.post([follower])
    while not lowered:
        time.sleep(0.001)
    assert is_aside(ahead, follower)
    ahead.close()


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="needs a thread's clock")
@pytest.mark.parametrize(("seconds", "fails"), [(0.005, False), (0.5, True)])
def test_where_all_slow_ones_have_their_threads_one_more_has_ten_times_as_long(
    words: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch, seconds: float, fails: bool
) -> None:
    monkeypatch.setattr("chairlift.runners.decoder.grammar_threads._MOST_SLOW", 0)
    monkeypatch.setattr("chairlift.runners.decoder.grammar_threads._LONG", 600)
    ahead, follower = LookAhead(), words.compile('start: "a" "b"').follow([], True)
    done = threading.Event()

    def busy() -> None:
        while time.thread_time() < seconds:
            pass
        done.set()

    follower.advance = busy  # type: ignore[method-assign]
    ahead.post([follower])
    assert done.wait(60)
    assert ahead._idle.wait(60)
    assert (follower.error is not None) == fails
    ahead.close()


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="needs a thread's clock")
def test_one_that_has_no_core_is_not_slow(words: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the model's threads have them all: ten times as long as it may take of one."""
    lowered: list[threading.Thread] = []
    monkeypatch.setattr("chairlift.runners.decoder.grammar_threads.hold_back", lowered.append)
    monkeypatch.setattr("chairlift.runners.decoder.grammar_threads._LONG", 600)
    ahead, follower = LookAhead(), words.compile('start: "a" "b"').follow([], True)
    follower.advance = lambda: time.sleep(0.05)  # type: ignore[method-assign]
    ahead.post([follower])
    assert ahead._idle.wait(60)
    assert (lowered, follower.error) == ([], None)
    ahead.close()


def test_who_posts_starts_no_threads(words: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin when there is a core for them, and nobody else is to wait for that."""
    starters = set[str]()
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        if thread.name != "starter":
            starters.add(threading.current_thread().name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    monkeypatch.setattr("chairlift.runners.decoder.grammar_threads._LONG", 0.0)
    ahead, follower = LookAhead(), words.compile('start: "a" "b"').follow([], True)
    slowed, plain = threading.Event(), follower.advance
    follower.advance = lambda: slowed.wait(60) and plain()  # type: ignore[method-assign]
    for _ in range(3):
        slowed.clear()
        ahead.post([follower])
        while not is_aside(ahead, follower):
            time.sleep(0.001)
        slowed.set()
        while follower.busy:
            time.sleep(0.001)
    assert starters == {"starter"}
    ahead.close()


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="needs a thread's clock")
def test_one_that_took_long_comes_back_once_it_does_not(
    words: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have had no core. One that takes long again and again has to be quick ever more often."""
    monkeypatch.setattr("chairlift.runners.decoder.grammar_threads.hold_back", lambda thread: None)
    monkeypatch.setattr("chairlift.runners.decoder.grammar_threads._LONG", 600)
    ahead, follower = LookAhead(), words.compile('start: "a" "b"').follow([], True)

    def work(seconds: float) -> None:
        began = time.thread_time()
        while time.thread_time() - began < seconds or (seconds and not is_aside(ahead, follower)):
            time.sleep(0)
        follower.busy = False

    was_aside = []
    for seconds in (0.0, 0.003, 0.003, 0.0, 0.0, 0.003, 0.0, 0.0, 0.0):
        follower.advance = partial(work, seconds)  # type: ignore[method-assign]
        ahead.post([follower])
        while follower.busy or not ahead._idle.is_set():
            time.sleep(0.001)
        was_aside.append(is_aside(ahead, follower))
    assert was_aside == [False, True, True, False, False, True, True, False, False]
    ahead.close()


def test_without_a_thread_those_fail_who_are_to_be_advanced(
    words: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, follower = LookAhead(), words.compile('start: "a" "b"').follow([], True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        ahead.post([follower])
        while follower.busy:
            time.sleep(0.001)
    assert "can't start new thread" in str(follower.error)
    other = words.compile('start: "a" "b"').follow([], True)
    ahead.post([other])
    while other.busy:
        time.sleep(0.001)
    assert other.error is None
    ahead.close()


def test_threads_of_what_nobody_waits_for_count_as_long_as_they_go_on(words: GrammarTokenizer) -> None:
    ahead, gate = LookAhead(), threading.Event()
    followers = [words.compile('start: "a" "b"').follow([], True) for _ in range(6)]
    for follower in followers:
        follower.advance = lambda: gate.wait(60)  # type: ignore[method-assign]
        ahead.post([follower])
        assert ahead._idle.wait(60)
        while not is_aside(ahead, follower) and follower.error is None:
            time.sleep(0.001)
        ahead.forget(follower)
    assert [follower.error is None for follower in followers] == [True] * 4 + [False] * 2
    gate.set()
    ahead.close()


def test_grammars_that_take_long_to_compile_leave_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    go, done = threading.Event(), threading.Semaphore(0)
    results: dict[str, object] = {}
    compile_one = GrammarTokenizer.compile

    def slowly(tokenizer: GrammarTokenizer, grammar: str) -> CompiledGrammar:
        if "slow" in grammar:
            assert go.wait(60)
        return compile_one(tokenizer, grammar)

    monkeypatch.setattr(GrammarTokenizer, "compile", slowly)
    compiler = GrammarCompiler(Path(demo_path()), VOCAB)
    assert compiler.tokenizer

    def keep(name: str) -> Any:
        def take(result: object) -> None:
            results[name] = result
            done.release()

        return take

    for number in range(4):
        compiler.compile_aside(f'start: "slow{number}"', keep(f"slow{number}"))
    while compiler._num_slow < 4:
        time.sleep(0.001)
    # All that may take long do: the rest waits, in no thread of its own, and some are not wanted any more.
    before = threading.active_count()
    for number in range(2000):
        compiler.compile_aside(f'start: "quick{number}"', keep(f"quick{number}"))
    assert threading.active_count() <= before
    assert all(compiler.cancel(f'start: "quick{number}"') for number in range(1000))
    assert not compiler.cancel('start: "quick0"')
    assert not compiler.cancel('start: "slow0"')
    assert results == {}
    go.set()
    for _ in range(1004):
        assert done.acquire(timeout=60)
    assert results.keys() == {f"slow{number}" for number in range(4)} | {f"quick{i}" for i in range(1000, 2000)}
    assert all(isinstance(result, CompiledGrammar) for result in results.values())


def test_without_a_thread_to_compile_it_a_grammar_fails_and_the_next_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler, results = GrammarCompiler(Path(demo_path()), VOCAB), SimpleQueue[object]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        compiler.compile_aside('start: "a"', results.put)
        assert "can't start new thread" in str(results.get(timeout=60))
    compiler.compile_aside('start: "a"', results.put)
    assert isinstance(results.get(timeout=60), CompiledGrammar)


def test_large_grammars_are_compiled_where_others_leave_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[threading.Thread] = []
    monkeypatch.setattr("chairlift.runners.decoder.grammar_threads.hold_back", lowered.append)
    # Nothing takes so long, or so much of a core, that it would be noticed.
    monkeypatch.setattr("chairlift.runners.decoder.grammar_threads._LONG", 600)
    monkeypatch.setattr("chairlift.runners.decoder.grammar_threads._MUCH", 600)
    compiler, results = GrammarCompiler(Path(demo_path()), VOCAB), SimpleQueue[object]()
    assert compiler.tokenizer
    for text, count in (("a", 0), ("b" * 20_000, 1), ("c", 1)):
        compiler.compile_aside(f'start: "{text}"', results.put)
        assert isinstance(results.get(timeout=60), CompiledGrammar)
        assert len(lowered) == count
    while compiler._num_slow:
        time.sleep(0.001)


@pytest.mark.processes
def test_a_process_that_ends_waits_for_what_goes_on() -> None:
    """A thread that comes back from the library to no interpreter ends it by a signal."""
    script = f"""
import time
from pathlib import Path
from chairlift.runners.decoder.grammar import GrammarTokenizer
from chairlift.runners.decoder.grammar_threads import LookAhead
from chairlift.runners.low_priority import while_computing
words, ahead = GrammarTokenizer(Path({str(demo_path())!r}), {VOCAB}), LookAhead()
x = words.tokens.tokenize_str("x")[0]
patterns = ["[xy]" + "(" * 6 + "a" + f"{{{{{{50 - number}}}}}}" + "){{50}}" * 5 + ")" for number in range(4)]
followers = [words.compile(f"start: /{{pattern}}/").follow([x], True) for pattern in patterns]
with while_computing():
    ahead.post(followers)
    while len(ahead._aside) < 4:
        time.sleep(0.001)
    assert any(follower.busy for follower in followers), [follower.error for follower in followers]
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
