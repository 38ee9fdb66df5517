"""Turns on a shared machine, as models see them: when a step may run or a batch leave, and when to ask and give way."""

from typing import Any

from chairlift.core.items.turns import Turns
from chairlift.core.sequences.turn import Turn


def sequences(shared: bool = True) -> tuple[Turn, list[Any]]:
    """A worker's turn, and what it says: what it asks for, and how it ends."""
    said: list[Any] = []
    return Turn(said.append, lambda *over: said.append(over), shared), said


def items() -> tuple[Turns, list[Any]]:
    said: list[Any] = []
    return Turns(said.append, lambda *over: said.append(over)), said


def test_background_work_gives_its_turn_up_at_once_and_asks_again_for_more() -> None:
    turn, said = sequences()
    assert not turn.want(background=True)
    assert not turn.want(background=True)
    assert not turn.want(background=False)
    assert said == [True, False]
    turn.given()
    assert turn.want(background=True)
    turn.others_wait(live=False)
    assert turn.want(background=True), "the others want no more than the same"
    turn.others_wait(live=True)
    assert not turn.want(background=True)
    assert said[2:] == [(True, 0.0, True)]
    turn.others_wait(live=True)
    assert not turn.want(background=True), "said of a turn that is over"
    assert len(said) == 3


def test_a_turn_lasts_until_others_wait_and_is_asked_for_again_in_the_same_breath() -> None:
    turn, said = sequences()
    assert not turn.want(background=False)
    turn.given()
    for _ in range(3):
        assert turn.want(background=False)
        turn.after_step(0.5, background=False)
    assert said == [False], "it asks once, and keeps the turn while nobody waits"
    turn.others_wait(live=True)
    assert turn.want(background=False), "live requests give way after the step only"
    turn.after_step(0.5, background=False)
    assert not turn.want(background=False)
    assert said == [False, (True, 2.0, False)]
    turn.given()
    turn.others_wait(live=False)
    turn.after_step(0.25, background=True)
    assert said[2:] == [(True, 0.25, True)]


def test_who_has_nothing_to_do_gives_the_turn_back() -> None:
    turn, said = sequences()
    turn.nothing_to_do(background=False)
    assert said == [], "there is none to give back"
    turn.want(background=False)
    turn.given()
    turn.nothing_to_do(background=False)
    assert said == [False, (False, 0.0, False)]
    assert not turn.want(background=False)
    turn.given()
    turn.nothing_to_do(background=True)
    assert said[2:] == [False, (True, 0.0, True)], "its background requests had to yield"


def test_a_worker_with_a_machine_of_its_own_never_asks() -> None:
    turn, said = sequences(shared=False)
    assert turn.want(background=True)
    turn.after_step(1.0, background=False)
    turn.nothing_to_do(background=True)
    assert turn.want(background=False)
    assert said == []


def test_batches_leave_while_nobody_else_waits_and_those_that_run_end_first() -> None:
    turns, said = items()
    assert not turns.allow(0, 0, 0)
    assert said == [], "it wants nothing"
    assert not turns.allow(0, 0, 2)
    assert not turns.allow(0, 1, 2)
    assert said == [True, False]
    turns.given()
    assert turns.allow(0, 5, 0)
    turns.rest(1)
    turns.others_wait(live=False)
    assert not turns.allow(1, 5, 0)
    assert len(said) == 2, "the batch that runs is waited for"
    assert not turns.allow(0, 5, 1)
    assert said[2:] == [(True, False)]
    assert not turns.allow(0, 5, 1)
    assert said[3:] == [False]
    turns.given()
    turns.others_wait(live=True)
    assert not turns.allow(0, 0, 1)
    assert said[4:] == [(True, True)]


def test_a_model_without_batches_gives_the_turn_back() -> None:
    turns, said = items()
    turns.rest(0)
    turns.given()
    turns.rest(1)
    assert said == []
    turns.rest(0)
    assert said == [(False, False)]
    turns.given()
    turns.left()
    turns.rest(0)
    assert len(said) == 1, "it has no turn any more"
