"""Threads that follow grammars beside the model: who is set aside, lowered, or given up."""

import json
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from chairlift.demo import demo_path
from chairlift.runners.grammars.grammar import Follower, GrammarTokenizer, TrialKind
from chairlift.runners.grammars.look_ahead import LookAhead

VOCAB = json.loads((Path(demo_path()) / "config.json").read_text())["vocab_size"]


@pytest.fixture(scope="module")
def words() -> GrammarTokenizer:
    return GrammarTokenizer(Path(demo_path()), VOCAB)


def follower_of(words: GrammarTokenizer) -> Follower:
    """One whose grammar nobody else follows."""
    return words.compile('start: "a" "b"').follow([], True)


def test_one_that_is_left_alone_costs_the_others_no_waiting(words: GrammarTokenizer) -> None:
    ahead, follower, other = LookAhead(), follower_of(words), follower_of(words)
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
    monkeypatch.setattr("chairlift.runners.grammars.look_ahead.hold_back", lowered.append)
    monkeypatch.setattr("chairlift.runners.grammars.stopwatch._LONG", 600)
    ahead, follower = LookAhead(), follower_of(words)

    def busy() -> None:
        while not lowered:
            pass

    follower.advance = busy  # type: ignore[method-assign]
    ahead.post([follower])
    while not lowered:
        time.sleep(0.001)
    assert follower.grammar.is_aside
    ahead.close()


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="needs a thread's clock")
@pytest.mark.parametrize(("seconds", "fails"), [(0.005, False), (0.5, True)])
def test_where_all_slow_ones_have_their_threads_one_more_has_ten_times_as_long(
    words: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch, seconds: float, fails: bool
) -> None:
    monkeypatch.setattr("chairlift.runners.grammars.look_ahead._MOST_SLOW", 0)
    monkeypatch.setattr("chairlift.runners.grammars.stopwatch._LONG", 600)
    ahead, follower = LookAhead(), follower_of(words)
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
    monkeypatch.setattr("chairlift.runners.grammars.look_ahead.hold_back", lowered.append)
    monkeypatch.setattr("chairlift.runners.grammars.stopwatch._LONG", 600)
    ahead, follower = LookAhead(), follower_of(words)
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
    monkeypatch.setattr("chairlift.runners.grammars.stopwatch._LONG", 0.0)
    ahead, follower = LookAhead(), follower_of(words)
    slowed, plain = threading.Event(), follower.advance
    follower.advance = lambda: slowed.wait(60) and plain()  # type: ignore[method-assign]
    for _ in range(3):
        slowed.clear()
        ahead.post([follower])
        while not follower.grammar.is_aside:
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
    monkeypatch.setattr("chairlift.runners.grammars.look_ahead.hold_back", lambda thread: None)
    monkeypatch.setattr("chairlift.runners.grammars.stopwatch._LONG", 600)
    ahead, follower = LookAhead(), follower_of(words)

    def work(seconds: float) -> None:
        began = time.thread_time()
        while time.thread_time() - began < seconds or (seconds and not follower.grammar.is_aside):
            time.sleep(0)
        follower.busy = False

    was_aside = []
    slow, quick = 0.003, 0.0
    for seconds in (quick, slow, slow, quick, quick, quick, slow, quick, quick, quick, quick, quick):
        follower.advance = partial(work, seconds)  # type: ignore[method-assign]
        ahead.post([follower])
        while follower.busy or not ahead._idle.is_set() or ahead._slow_threads:
            time.sleep(0.001)
        was_aside.append(follower.grammar.is_aside)
    # One quick time was asked for, then two, and when it took long anew four.
    assert was_aside == [False, True, True, True, False, False, True, True, True, True, False, False]
    ahead.close()


def test_without_a_thread_those_fail_who_are_to_be_advanced(
    words: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, follower = LookAhead(), follower_of(words)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        ahead.post([follower])
        while follower.busy:
            time.sleep(0.001)
    assert "can't start new thread" in str(follower.error)
    other = follower_of(words)
    ahead.post([other])
    while other.busy:
        time.sleep(0.001)
    assert other.error is None
    ahead.close()


def test_threads_of_what_nobody_waits_for_count_as_long_as_they_go_on(words: GrammarTokenizer) -> None:
    ahead, gate = LookAhead(), threading.Event()
    refused = []
    for follower in [follower_of(words) for _ in range(6)]:
        follower.advance = lambda: gate.wait(60)  # type: ignore[method-assign]
        ahead.post([follower])
        assert ahead._idle.wait(60)
        refused.append(follower.error is not None)
        follower.give_up("nobody waits for it")
    assert refused == [False] * 4 + [True] * 2
    gate.set()
    ahead.close()


class Worked:
    """Followers of a grammar, each of which takes so many seconds of a core, and who of all had a turn when."""

    def __init__(self, words: GrammarTokenizer, count: int, seconds: float, turns: list["Worked"]) -> None:
        grammar = words.compile('start: "a" "b"')
        self.followers = [grammar.follow([], True) for _ in range(count)]
        self.turns, self._seconds, self._here = turns, seconds, 0
        self.most_at_once = 0
        for follower in self.followers:
            follower.advance = partial(self._work, follower)  # type: ignore[method-assign]

    def _work(self, follower: Follower) -> None:
        self._here += 1
        self.most_at_once = max(self.most_at_once, self._here)
        self.turns.append(self)
        began = time.thread_time()
        while time.thread_time() - began < self._seconds:
            time.sleep(0)
        self._here -= 1
        follower.seconds = self._seconds
        follower.busy = False

    def wait(self) -> None:
        while any(follower.busy for follower in self.followers):
            time.sleep(0.001)


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="needs a thread's clock")
def test_all_that_follow_a_grammar_that_takes_long_are_set_aside_and_have_their_turns(words: GrammarTokenizer) -> None:
    """One at a time, as they share a lexer; those of another grammar do not wait behind all of them."""
    turns: list[Worked] = []
    ahead, many, few = LookAhead(), Worked(words, 12, 0.004, turns), Worked(words, 1, 0.004, turns)
    quick = Worked(words, 20, 0.0, turns)
    ahead.post([*many.followers, *few.followers, *quick.followers])
    assert ahead._idle.wait(60)
    assert not any(follower.busy for follower in quick.followers)
    for each in (many, few):
        each.wait()
        assert each.most_at_once == 1
    assert turns.count(many) == 12
    assert turns.index(few) < len(turns) - 5
    # It is known from now on: the others never wait for it.
    del turns[:]
    ahead.post([*many.followers, *quick.followers])
    assert ahead._idle.wait(60)
    many.wait()
    assert many.followers[0].grammar.is_aside
    assert not quick.followers[0].grammar.is_aside
    ahead.close()


def test_those_that_nobody_waits_for_have_no_turn(words: GrammarTokenizer) -> None:
    turns: list[Worked] = []
    ahead, gate = LookAhead(), threading.Event()
    first, others = follower_of(words), Worked(words, 3, 0.0, turns)
    first.advance = lambda: gate.wait(60)  # type: ignore[method-assign]
    ahead.post([first, *others.followers])
    others.followers[1].give_up("nobody waits for it")
    gate.set()
    others.wait()
    assert len(turns) == 2
    ahead.close()


def test_those_that_wait_too_long_behind_others_of_their_grammar_fail(
    words: GrammarTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar, gate = words.compile('start: "a" "b"'), threading.Event()
    ahead, followers = LookAhead(), [grammar.follow([], True) for _ in range(3)]
    followers[0].advance = lambda: gate.wait(60)  # type: ignore[method-assign]
    ahead.post(followers)
    while not grammar.is_aside:
        time.sleep(0.001)
    ahead.tend(followers)
    assert [follower.error for follower in followers] == [None] * 3
    monkeypatch.setattr("chairlift.runners.grammars.look_ahead._TOO_LONG", 0.0)
    ahead.tend(followers)
    # The others have only waited.
    assert "needs more than 0 s" in str(followers[0].error)
    assert [follower.error for follower in followers[1:]] == [None] * 2
    monkeypatch.setattr("chairlift.runners.grammars.look_ahead._TOO_LONG_IN_ALL", 0.0)
    ahead.tend(followers)
    assert all("so do others before it" in str(follower.error) for follower in followers[1:])
    gate.set()
    ahead.close()


def test_one_can_wait_for_the_first_that_takes_long(words: GrammarTokenizer) -> None:
    """A step does where it has nothing else."""
    turns: list[Worked] = []
    ahead, slow = LookAhead(), Worked(words, 3, 0.02, turns)
    ahead.post(slow.followers)
    while not slow.followers[0].grammar.is_aside:
        time.sleep(0.001)
    ahead.wait_for_slow(slow.followers, 0.0)
    while busy := [follower for follower in slow.followers if follower.busy]:
        ahead.wait_for_slow(busy, 60)
        assert not all(follower.busy for follower in busy)
    ahead.close()


def test_nobody_waits_for_a_sequence_while_another_of_its_grammar_advances(words: GrammarTokenizer) -> None:
    """They share a lexer, and its lock would be waited for with that of the interpreter."""
    grammar = words.compile('{"grammars":[{"json_schema":{"type":"string"}}]}')
    one, other = (grammar.follow([], True, TrialKind.OF_BEST) for _ in range(2))
    quote, letter = words.tokens.tokenize_str('"a')
    for follower in (one, other):
        follower.advance()
        follower.say(quote)
        follower.advance()
    assert other.is_open
    assert other.can_be_tried
    assert other.is_light
    seen: list[bool] = []

    def look(began: float, finds_allowed: bool) -> None:
        seen.extend([other.can_be_tried, other.is_light, other.go_on()])
        Follower._follow(one, began, finds_allowed)

    one._follow = look  # type: ignore[method-assign]
    one.say(letter)
    one.advance()
    assert seen == [False] * 3
    assert other.can_be_tried
    assert other.accept(letter)
    other.say(letter)
    assert other.go_on()


def test_one_that_is_done_leaves_another_of_its_grammar_in_hand(words: GrammarTokenizer) -> None:
    """That another thread has begun with meanwhile."""
    grammar = words.compile('{"grammars":[{"json_schema":{"type":"string"}}]}')
    one, other = (grammar.follow([], True) for _ in range(2))
    find = one._find_allowed

    def find_beside_another() -> None:
        find()
        grammar.in_hand = other

    one._find_allowed = find_beside_another  # type: ignore[method-assign]
    one.advance()
    assert grammar.in_hand is other
    other.advance()
    assert grammar.in_hand is None


@pytest.mark.processes
def test_a_process_that_ends_waits_for_what_goes_on() -> None:
    """A thread that comes back from the library to no interpreter ends it by a signal."""
    script = f"""
import time
from pathlib import Path
from chairlift.runners.grammars.grammar import GrammarTokenizer
from chairlift.runners.grammars.look_ahead import LookAhead
from chairlift.runners.low_priority import while_computing
words, ahead = GrammarTokenizer(Path({str(demo_path())!r}), {VOCAB}), LookAhead()
x = words.tokens.tokenize_str("x")[0]
patterns = ["[xy]" + "(" * 6 + "a" + f"{{{{{{50 - number}}}}}}" + "){{50}}" * 5 + ")" for number in range(4)]
followers = [words.compile(f"start: /{{pattern}}/").follow([x], True) for pattern in patterns]
with while_computing():
    ahead.post(followers)
    while not all(follower.grammar.is_aside for follower in followers):
        time.sleep(0.001)
    assert any(follower.busy for follower in followers), [follower.error for follower in followers]
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
