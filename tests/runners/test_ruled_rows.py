"""Which thread has sequences follow their grammars: the one that all wait for, or one beside the model."""

import math
import threading
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from chairlift.core.sequences.step import StepResult
from chairlift.runners.grammars.grammar import CompiledGrammar, Follower
from chairlift.runners.grammars.grammar_rows import GrammarRows

HERE = threading.get_ident()


class Counted(Follower):
    """One that says which thread has advanced it, at a cost that the test names."""

    def __init__(self, cost: float, is_light: bool, leaves_some: bool = False, is_quiet: bool = False) -> None:
        self.cost, self._light, self._leaves_some, self._quiet = cost, is_light, leaves_some, is_quiet
        self.seconds = cost
        self.threads: list[int] = []
        self.forced: list[int] = []
        self.is_open = self.ended = self.busy = False
        self.grammar = CompiledGrammar(Mock(), Mock(), is_plain=True, free=Mock())
        self.error = None
        self.posted_at, self.begun_at = time.monotonic(), math.inf

    @property
    def is_light(self) -> bool:
        return self._light

    @property
    def is_quiet(self) -> bool:
        return self._quiet

    def say(self, token: int) -> None:
        """What was chosen changes nothing."""

    def go_on(self) -> bool:
        return False

    def advance_in_part(self) -> bool:
        if not self._leaves_some:
            self.advance()
        return not self._leaves_some

    def advance(self) -> None:
        self.threads.append(threading.get_ident())
        self.seconds = self.cost
        self.busy = False


@pytest.fixture
def rows() -> Iterator[GrammarRows]:
    rows = GrammarRows(tries=True, tries_best=True)
    yield rows
    rows.close()


def say(rows: GrammarRows, followers: list[Counted], seconds: float = 1.0) -> None:
    """Every sequence chooses a token in a step of so many seconds."""
    rows._followers = dict(enumerate(followers))
    names = [str(row) for row in rows._followers]
    rows.say(list(rows._followers), names, seconds, StepResult(tokens={name: [1] for name in names}))


def step(rows: GrammarRows, followers: list[Counted], seconds: float = 1.0) -> None:
    """The same, and the next step begins."""
    say(rows, followers, seconds)
    rows.go_on()
    rows.finish()
    assert rows._look_ahead._idle.wait(60)


def follow(rows: GrammarRows, *followers: Counted) -> None:
    """These are new, in the first rows."""
    rows._followers, rows._unsettled = dict(enumerate(followers)), dict(enumerate(followers))


def were_here(followers: list[Counted]) -> list[list[bool]]:
    return [[thread == HERE for thread in follower.threads] for follower in followers]


def test_of_many_sequences_those_that_are_soon_done_do_not_meet_the_model(rows: GrammarRows) -> None:
    light, heavy = Counted(0.0001, is_light=True), Counted(0.1, is_light=False)
    many = [light, heavy, *(Counted(0.0001, is_light=True) for _ in range(7))]
    step(rows, many)
    assert were_here(many) == [[True], [False], *[[True]] * 7]


def test_others_wait_for_part_of_a_step_at_most(rows: GrammarRows) -> None:
    many = [Counted(0.0001, is_light=True) for _ in range(9)]
    step(rows, many, seconds=0.0)
    assert were_here(many) == [[False]] * 9


def test_what_is_left_of_them_is_done_during_the_pass(rows: GrammarRows) -> None:
    many = [Counted(0.0003, is_light=True, leaves_some=index < 7) for index in range(9)]
    say(rows, many)
    assert were_here(many) == [[]] * 7 + [[True]] * 2
    rows.remove(2)
    assert rows.side_work is not None
    # A few in a row.
    assert rows.side_work()
    assert were_here(many[:7]) == [[True]] * 2 + [[]] + [[True]] * 2 + [[]] * 2
    # The pass had time for no more.
    rows.finish()
    assert rows.side_work is None
    assert were_here(many[:7]) == [[True]] * 2 + [[]] + [[True]] * 4


def test_one_that_is_likely_to_be_forced_to_nothing_is_left_to_the_pass(rows: GrammarRows) -> None:
    many = [Counted(0.0001, is_light=True, is_quiet=index == 3) for index in range(9)]
    say(rows, many)
    assert were_here(many) == [[True]] * 3 + [[]] + [[True]] * 5
    assert rows.side_work is not None
    assert not rows.side_work()
    assert were_here(many) == [[True]] * 9


def test_what_the_pass_is_left_with_counts_as_part_of_the_step(rows: GrammarRows) -> None:
    many = [Counted(0.0015, is_light=True, leaves_some=True) for _ in range(9)]
    say(rows, many, seconds=0.07)
    rows.go_on()
    assert rows._look_ahead._idle.wait(60)
    assert were_here(many) == [[]] * 4 + [[False]] * 5


def test_if_one_takes_long_during_the_pass_the_others_go_on_beside_it(rows: GrammarRows) -> None:
    many = [Counted(0.0001, is_light=True, leaves_some=True) for _ in range(9)]
    say(rows, many)
    many[1].cost = 0.02
    assert rows.side_work is not None
    assert not rows.side_work()
    assert rows.side_work is None
    assert rows._look_ahead._idle.wait(60)
    assert were_here(many) == [[True]] * 2 + [[False]] * 7


def test_one_whose_grammar_has_another_in_hand_goes_on_beside_the_pass(rows: GrammarRows) -> None:
    many = [Counted(0.0003, is_light=True, leaves_some=True) for _ in range(9)]
    say(rows, many)
    many[0].grammar.in_hand = many[0]
    assert rows.side_work is not None
    assert rows.side_work()
    rows.finish()
    assert rows._look_ahead._idle.wait(60)
    assert were_here(many) == [[False], *[[True]] * 8]


def test_a_few_are_advanced_beside_the_model(rows: GrammarRows) -> None:
    few = [Counted(0.0001, is_light=True) for _ in range(3)]
    step(rows, few)
    assert were_here(few) == [[False]] * 3


def test_where_nothing_is_tried_all_are_advanced_beside_the_model() -> None:
    """As on a GPU, which leaves the processor's cores alone."""
    rows, many = GrammarRows(tries=False, tries_best=False), [Counted(0.0001, is_light=True) for _ in range(9)]
    step(rows, many)
    assert were_here(many) == [[False]] * 9
    rows.close()


def test_after_one_that_took_long_none_is_waited_for_for_a_while(
    rows: GrammarRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("chairlift.runners.grammars.grammar_rows.time.monotonic", lambda: now[0])
    worse = Counted(0.02, is_light=True)
    many = [worse, *(Counted(0.0001, is_light=True) for _ in range(8))]
    here = []
    # Once it took long, then a minute is over, then two.
    for now[0] in (1000.0, 1059.0, 1061.0, 1062.0, 1180.0, 1182.0):
        step(rows, many)
        here.append([follower.threads[-1] == HERE for follower in many])
    once, none = [True, *[False] * 8], [False] * 9
    assert here == [once, none, once, none, none, once]


def test_it_is_for_some_hour_at_most_however_often(rows: GrammarRows, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("chairlift.runners.grammars.grammar_rows.time.monotonic", lambda: now[0])
    many = [Counted(0.02, is_light=True), *(Counted(0.0001, is_light=True) for _ in range(8))]
    for _ in range(20):
        step(rows, many)
        now[0] += 4000.0
    assert were_here(many)[0] == [True] * 20


def test_who_was_late_and_is_left_out_is_said_to_be_ready(rows: GrammarRows) -> None:
    """Once it is known what it may say, or that it can't go on."""
    several = [Counted(0.0, is_light=False) for _ in range(4)]
    follow(rows, *several)
    for follower in several:
        follower.busy = True

    def settled(*here: int) -> tuple[set[str], set[str]]:
        result = StepResult(tokens={})
        rows.settle(list(here), [str(row) for row in here], result)
        return result.late, result.ready

    assert settled(0, 1, 2, 3) == ({"0", "1", "2", "3"}, set())
    several[0].busy = several[1].busy = False
    several[2].give_up("it takes long")
    # Who is in the step need not be told; the last one is not ready.
    assert settled(1) == (set(), {"0", "2"})
    assert settled() == (set(), set())
    rows.remove(3)
    assert settled() == (set(), set())


def test_one_that_is_left_out_fails_if_it_takes_too_long(rows: GrammarRows) -> None:
    follower = Counted(0.0, is_light=False)
    follow(rows, follower)
    follower.busy = follower.grammar.is_aside = True
    late, later = StepResult(tokens={}), StepResult(tokens={})
    rows.settle([0], ["a"], late)
    follower.begun_at = time.monotonic() - 60
    rows.settle([], [], later)
    assert (late.late, later.ready) == ({"a"}, {"a"})
    assert "needs more than" in str(follower.error)


@pytest.mark.parametrize(
    ("here", "are_all", "waits"),
    [([0, 1], True, True), ([1], True, True), ([0, 1], False, False), ([0, 2], True, False), ([], True, False)],
)
def test_a_step_waits_for_those_that_take_long_where_it_has_nobody_else(
    rows: GrammarRows, monkeypatch: pytest.MonkeyPatch, here: list[int], are_all: bool, waits: bool
) -> None:
    """For those that rest as well."""
    waited: list[int] = []
    monkeypatch.setattr(rows._look_ahead, "wait_for_slow", lambda slow, seconds: waited.append(len(slow)))
    several = [Counted(0.0, is_light=False) for _ in range(3)]
    follow(rows, *several)
    for follower in several[:2]:
        follower.busy = follower.grammar.is_aside = True
    rows.settle(here, [str(row) for row in here], StepResult(tokens={}), are_all)
    assert waited == ([2] if waits else [])
