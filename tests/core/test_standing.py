"""Where requests are, as a person is told it."""

from typing import Any

from support.sequences_world import Setup, World, make_request

from chairlift.core.decision import Reason
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.standing import SequenceState, Standing, standings


def world(*requests: Request, **setup: Any) -> World:
    made = World(Setup(**setup))
    for request in requests:
        assert made.add(request)
    return made


def go(w: World, yields: bool = False) -> None:
    step = w.schedule(yields=yields)
    if step is not None:
        w.update({name: [0] for name in step.num_tokens}, {})


def found(w: World, *names: str) -> dict[str, Standing]:
    return {each.id: each for each in standings(w.scheduler, set(names or w.records))}


def test_who_runs_and_who_waits_where() -> None:
    w = world(*(make_request(name, 3) for name in "ab"), make_request("c", 3, priority=-1, arrival=0.5), slots=1)
    go(w)
    told = found(w)
    # The one of a lower number is worth a second, and came half a second later.
    assert [(told[name].state, told[name].ahead, told[name].more_urgent) for name in "cab"] == [
        (SequenceState.RUNNING, 0, 0),
        (SequenceState.WAITING, 0, 0),
        (SequenceState.WAITING, 1, 0),
    ]
    assert told["b"].reason is Reason.SLOTS
    assert "behind a" in told["b"].detail
    assert told["c"].tokens == 1
    w.add(make_request("d", 3, priority=-1, arrival=0.5))
    assert (found(w)["b"].ahead, found(w)["b"].more_urgent) == (2, 1)


def test_only_those_that_were_asked_for_are_told() -> None:
    w = world(*(make_request(name, 3) for name in "abc"), slots=1)
    go(w)
    assert found(w, "c", "nobody").keys() == {"c"}


def test_whoever_has_just_come_waits_for_no_reason_yet() -> None:
    w = world(make_request("a", 3))
    assert found(w)["a"] == Standing("a", SequenceState.WAITING)


def test_a_long_prompt_is_read_in_parts() -> None:
    w = world(make_request("a", 20), max_num_batched_tokens=8)
    step = w.schedule()
    w.update({}, {})
    assert step.num_tokens == {"a": 8}
    told = found(w)["a"]
    assert (told.state, told.computed, told.tokens, told.started) == (SequenceState.PREFILLING, 8, 0, w.now)


def test_who_was_preempted_waits_again() -> None:
    w = world(make_request("a", 4, 12), make_request("b", 4, 12), num_blocks=4)
    while w.scheduler.num_preemptions == 0:
        go(w)
    told = found(w)["b"]
    assert (told.state, told.ahead, told.reason) == (SequenceState.PREEMPTED, 0, Reason.BLOCKS)
    assert told.tokens > 0


def test_the_background_has_a_queue_of_its_own_and_pauses() -> None:
    names = ("x", "y", "z")
    w = world(*(make_request(name, 3, 30, background=True) for name in names), slots=2)
    go(w)
    assert [found(w)[name].state for name in names] == [SequenceState.RUNNING] * 2 + [SequenceState.WAITING]
    assert found(w)["z"].ahead == 0
    go(w, yields=True)
    told = found(w)
    assert [told[name].state for name in names] == [SequenceState.PAUSED] * 2 + [SequenceState.WAITING]
    assert {told[name].reason for name in names} == {Reason.LIVE}
