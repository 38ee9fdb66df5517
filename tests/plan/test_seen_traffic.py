"""What a server saw begins where nobody waited, or the twin would begin without those who did."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.plan.seen_traffic import SeenRequest, quiet_moment, sequence_trace


def waited(begin: float, end: float | None) -> SeenRequest:
    return SeenRequest(begin, 10, 5, scheduled=end)


@pytest.mark.parametrize(
    ("requests", "moment"),
    [
        ([], 100.0),
        ([waited(10, 20), waited(120, 130)], 100.0),
        ([waited(90, 110)], 90.0),
        ([waited(90, 110), waited(80, 91), waited(60, 79)], 80.0),
        # One that has not had its turn yet, behind a long line.
        ([waited(50, None), waited(40, 60), waited(10, 41)], 10.0),
        ([waited(95, 100), waited(90, 95)], 100.0),
        ([SeenRequest(20, 10, 5, background=True), waited(90, 110)], 90.0),
    ],
)
def test_the_moment_is_the_last_one_without_a_queue(requests: list[SeenRequest], moment: float) -> None:
    assert quiet_moment(requests, 100.0) == moment
    assert quiet_moment(requests[::-1], 100.0) == moment


spans: Any = st.tuples(st.floats(0, 150), st.one_of(st.none(), st.floats(0, 60)))


@given(st.lists(spans))
def test_at_that_moment_nobody_waits_and_at_none_later(found: list[tuple[float, float | None]]) -> None:
    requests = [waited(begin, None if long is None else begin + long) for begin, long in found]
    moment = quiet_moment(requests, 100.0)

    def waiting(when: float) -> int:
        return sum(each.arrival < when and (each.scheduled is None or each.scheduled > when) for each in requests)

    assert moment <= 100.0
    assert waiting(moment) == 0
    later = {each.arrival for each in requests} | {each.scheduled for each in requests if each.scheduled is not None}
    assert all(waiting(when) for when in (*later, 100.0) if moment < when <= 100.0)


def test_who_was_refused_comes_with_somebody_elses_lengths() -> None:
    done = SeenRequest(0.0, 30, 5, answered=True, scheduled=0.0, first=0.1, ended=0.5, most=50)
    exact = SeenRequest(1.0, 20, 7, answered=True, scheduled=1.0, first=1.1, ended=1.5)
    unread = SeenRequest(2.0, 0, 0, ended=2.0, refused=True)
    read = SeenRequest(3.0, 40, 0, ended=3.0, refused=True, most=6, hold_updates=True)
    trace = sequence_trace([done, exact, unread, read], 16, 4096)
    assert [each.input_length for each in trace[:2]] == [30, 20]
    assert trace[2].input_length in (30, 20, 40)
    assert [(each.output_length, each.max_tokens) for each in trace[:2]] == [(5, 50), (7, None)]
    assert trace[2].output_length in (5, 7)
    assert (trace[3].input_length, trace[3].max_tokens, trace[3].hold_updates) == (40, 6, True)
    assert trace[3].output_length in (5, 6)
    assert quiet_moment([unread, read], 10.0) == 10.0, "they wait for nothing"


def test_who_was_given_up_at_its_deadline_comes_with_it_and_had_more_to_say() -> None:
    done = SeenRequest(0.0, 30, 5, answered=True, scheduled=0.0, first=0.1, ended=0.5, most=50)
    ran = SeenRequest(1.0, 20, 7, scheduled=1.0, first=1.1, ended=3.0, most=40, timeout=2.0, late=True)
    begun = SeenRequest(2.0, 20, 2, scheduled=2.0, first=2.1, ended=4.0, timeout=2.0, late=True)
    waited = SeenRequest(3.0, 40, 0, ended=3.5, refused=True, timeout=0.5, late=True)
    in_time = SeenRequest(4.0, 20, 4, answered=True, scheduled=4.0, first=4.1, ended=4.5, timeout=0.75)
    trace = sequence_trace([done, ran, begun, waited, in_time], 16, 4096)
    assert [each.timeout for each in trace] == [None, 2.0, 2.0, 0.5, 0.75]
    lengths = [each.output_length for each in trace]
    assert (lengths[0], lengths[1], lengths[4]) == (5, 8, 4)
    assert {lengths[2], lengths[3]} <= {4, 5}
    assert [each.max_tokens for each in trace] == [50, 40, None, None, None]
