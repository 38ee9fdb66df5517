"""What a server saw begins where nobody waited, or the twin would begin without those who did."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.plan.seen_traffic import SeenRequest, quiet_moment


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
