"""Models of items in virtual time: batches as the scheduler's own benchmark has them, instances, deadlines."""

import sys
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.simulated import exact_calls

from chairlift.core.finished import ShedReason
from chairlift.core.items.item import Item
from chairlift.core.items.limits import BatchLimits
from chairlift.plan import items as virtual_items
from chairlift.plan.figures import report
from chairlift.plan.items import ItemModel
from chairlift.plan.machine_profile import FrontCost
from chairlift.plan.simulator import simulate
from chairlift.plan.trace import TraceRequest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "dynamic"))
import virtual

CALL, SIZE = 0.008, 0.00025


def model(limits: BatchLimits | None = None, **more: Any) -> ItemModel:
    return ItemModel(limits or BatchLimits(max_batch_size=8), exact_calls(CALL, SIZE), **({"ahead": False} | more))


def at(*moments: float, **fields: Any) -> list[TraceRequest]:
    return [TraceRequest(arrival=moment, input_length=1, items=1, **fields) for moment in moments]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0, 0.01), min_size=1, max_size=60),
    st.integers(1, 16),
    st.integers(1, 3),
    st.sampled_from([None, 0.05]),
)
def test_batches_are_those_of_the_scheduler_alone(
    since: list[float], size: int, instances: int, timeout: float | None
) -> None:
    moments = [sum(since[: index + 1]) for index in range(len(since))]
    limits = BatchLimits(max_batch_size=size, default_timeout=timeout)
    # Those of the scheduler alone are not rounded to whole milliseconds, in which a call may end.
    with patch.object(virtual_items, "_TIMER", 1e-9):
        outcome = simulate([model(limits, instances=instances)], at(*moments))
    items = (Item(id=str(index), arrival=moment) for index, moment in enumerate(moments))
    expected = virtual.simulate(limits, virtual.Executor(CALL, SIZE), items, instances)
    # Who is in a call that ends after the deadline is not waited for.
    time = inf if timeout is None else timeout
    assume(all(abs(life.latency - time) > 1e-9 for life in expected.lives))
    in_time = [life for life in expected.lives if life.latency < time]
    late = len(expected.lives) - len(in_time)
    answered = sorted((life.request.arrival, life.end) for life in outcome.requests if life.end is not None)
    for found, wanted in zip(answered, sorted((life.arrival, life.done) for life in in_time), strict=True):
        assert found == pytest.approx(wanted)
    shed = [life for life in outcome.requests if life.shed is not None]
    assert len(shed) == expected.refused + expected.dropped + late
    assert len(answered) + len(shed) == len(moments)


def test_a_window_waits_for_company() -> None:
    limits = BatchLimits(max_batch_size=3, max_wait=0.02)
    lives = simulate([model(limits)], at(0.0, 0.004, 0.1, 0.101, 0.102)).requests
    assert [life.scheduled for life in lives] == pytest.approx([0.02, 0.02, 0.102, 0.102, 0.102], abs=1.1e-3)
    assert [life.batch_size for life in lives] == [2, 2, 3, 3, 3]


def test_what_is_sent_ahead_begins_when_the_one_before_ends() -> None:
    """Once it is known what calls take, and that messages take their time, an instance need not wait for them."""
    front = FrontCost(hop=0.002)
    busy = at(*(index * 0.0011 for index in range(3000)))

    def idle(ahead: bool) -> float:
        (steps,) = simulate([model(ahead=ahead)], busy, front=front).steps.values()
        ends = [began + seconds for began, seconds in zip(steps.began, steps.seconds, strict=True)]
        late = [began - end for began, end in zip(steps.began[1:], ends, strict=False)]
        return sum(late[-50:]) / 50

    assert idle(ahead=False) == pytest.approx(0.004, rel=0.01)
    assert idle(ahead=True) < 0.001


def test_while_the_front_holds_a_batch_others_join_it() -> None:
    profile = exact_calls(CALL, SIZE)
    held = [msgspec.structs.replace(call, hold=0.004) for call in profile.calls]
    wanted = ItemModel(BatchLimits(max_batch_size=8), msgspec.structs.replace(profile, calls=held))
    lives = simulate([wanted], at(0.0, 0.001, 0.003, 0.5)).requests
    assert [life.batch_size for life in lives] == [3, 3, 3, 1]
    assert [life.scheduled for life in lives] == pytest.approx([0.004, 0.004, 0.004, 0.504])
    assert simulate([model()], at(0.0, 0.001, 0.003)).requests[0].batch_size == 1


def test_an_instance_takes_a_moment_between_two_calls_and_learns_nothing_of_it() -> None:
    busy = at(*(index * 0.0011 for index in range(3000)))

    def gaps(between: float) -> list[float]:
        front = FrontCost(hop=0.002, between=between)
        (steps,) = simulate([model(ahead=True)], busy, front=front).steps.values()
        ends = [began + seconds for began, seconds in zip(steps.began, steps.seconds, strict=True)]
        return [began - end for began, end in zip(steps.began[1:], ends, strict=False)][-50:]

    # A batch that reaches an instance in that moment does not begin before it is over.
    assert min(gaps(0.003)) == pytest.approx(0.003)
    assert sum(gaps(0.003)) / 50 < 0.0035, "batches are sent ahead as early as ever"


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_holds_the_front_as_it_leaves_and_as_it_comes_back(count: int) -> None:
    lives = simulate([model()], at(*[0.0] * count), front=FrontCost(batch=0.006)).requests
    for life in lives:
        assert life.scheduled == pytest.approx(0.003)
        assert life.end == pytest.approx(0.006 + CALL + SIZE * count)


def test_what_the_front_does_meanwhile_makes_a_call_longer_and_what_it_did_before_does_not() -> None:
    profile = exact_calls(0.1, SIZE)
    front = FrontCost(request=0.01, contention=2.0)
    one = BatchLimits(max_batch_size=1)

    def calls(*moments: float) -> list[float]:
        (steps,) = simulate([ItemModel(one, profile, ahead=False)], at(*moments), front=front).steps.values()
        return steps.seconds

    alone = 0.1 + SIZE
    assert calls(0.0) == pytest.approx([alone])
    # Another is read while the first is computed, and a third while it takes longer for that.
    assert calls(0.0, 0.05)[0] == pytest.approx(alone + 2.0 * 0.01)
    assert calls(0.0, 0.05, 0.115)[0] == pytest.approx(alone + 2.0 * 0.02, abs=1e-5)
    # No more than twice as long.
    assert calls(0.0, *[0.02] * 30)[0] == pytest.approx(2 * alone)


def test_the_front_does_one_thing_after_the_other() -> None:
    """Whom it reads together leaves together, and the next batch is sent off before answers are."""
    limits = BatchLimits(max_batch_size=4)
    lives = simulate([model(limits)], at(*[0.0] * 4), front=FrontCost(request=0.002)).requests
    assert [life.batch_size for life in lives] == [4] * 4
    assert lives[0].scheduled == pytest.approx(0.008)
    lives = simulate([model(limits)], at(*[0.0] * 8), front=FrontCost(item=0.001)).requests
    first, second = lives[0], lives[-1]
    assert second.scheduled == pytest.approx((first.end or 0.0) - 4 * 0.001)


def test_instances_are_busy_with_what_came_before() -> None:
    lives = simulate([model(instances=2, busy_s=0.5)], at(0.0, 0.1, 0.7)).requests
    assert [life.scheduled for life in lives] == pytest.approx([0.5, 0.5, 0.7])


def test_a_request_of_many_items_ends_with_the_last_of_them() -> None:
    trace = [TraceRequest(arrival=0.0, input_length=10, items=20)]
    (life,) = simulate([model()], trace).requests
    calls = [CALL + SIZE * 10 * count for count in (8, 8, 4)]
    assert life.end == pytest.approx(sum(calls))


def test_a_request_is_refused_as_a_whole() -> None:
    limits = BatchLimits(max_batch_size=8, max_waiting=10)
    trace = [TraceRequest(arrival=0.0, input_length=10, items=count) for count in (6, 6, 4)]
    outcome = simulate([model(limits)], trace)
    assert [life.shed for life in outcome.requests] == [None, ShedReason.QUEUE_FULL, None]
    found = report(outcome)
    assert (found.requests, found.answered, found.shed) == (3, 2, {"queue_full": 1})
    (steps,) = outcome.steps.values()
    assert sum(steps.running) == 10, "what was refused is not computed"


@pytest.mark.parametrize("of_model", [False, True])
def test_whoever_is_in_a_call_at_its_deadline_is_given_up_and_the_call_goes_on(of_model: bool) -> None:
    """By hand: a call takes 0.1 s, and nothing is known of that yet. What waits at the deadline is not computed."""
    profile = exact_calls(0.1, 0.0)
    limits = BatchLimits(max_batch_size=2, default_timeout=0.05 if of_model else None)
    asked: dict[str, Any] = {} if of_model else {"timeout": 0.05}
    trace = [
        TraceRequest(arrival=0.0, input_length=1, items=3, **asked),
        TraceRequest(arrival=0.01, input_length=1, items=1, timeout=0.5),
        TraceRequest(arrival=0.02, input_length=1, items=1, background=True),
    ]
    outcome = simulate([ItemModel(limits, profile, ahead=False)], trace)
    late, other, patient = outcome.requests
    assert (late.shed, late.shed_at, late.end) == (ShedReason.DEADLINE, 0.05, None)
    assert (other.scheduled, other.end) == pytest.approx((0.1, 0.2))
    assert (patient.deadline, patient.end) == (None, pytest.approx(0.3))
    (steps,) = outcome.steps.values()
    assert steps.running == [2, 1, 1]
    assert steps.seconds == pytest.approx([0.1] * 3)
    found = report(outcome)
    assert (found.answered, found.shed) == (2, {"deadline": 1})


def test_what_is_larger_than_any_batch_is_refused_with_a_reason() -> None:
    limits = BatchLimits(max_batch_size=8, max_batch_tokens=100)
    (life,) = simulate([model(limits)], [TraceRequest(arrival=0.0, input_length=101, items=1)]).requests
    assert "max_batch_tokens" in (life.refusal or "")
