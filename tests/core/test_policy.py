import pytest

from chairlift.core.decision import Reason
from chairlift.core.sequences.policy import POLICIES, Admission, make_policy


class Line:
    """A line of so many, the oldest of whom came at `oldest`."""

    def __init__(self, count: int, oldest: float = 0.0, closed: bool = False) -> None:
        self.count, self.oldest, self.closed = count, oldest, closed

    def __len__(self) -> int:
        return self.count

    def oldest_arrival(self) -> float | None:
        return self.oldest if self.count else None


def board(strategy: str, line: Line, running: int = 0, now: float = 0.0) -> Admission:
    return make_policy(strategy, 4, 2.0).board(line, running, now)


def test_none_has_one_seat() -> None:
    assert board("none", Line(9)).seats == 1
    assert board("none", Line(9), running=1) == (0, Reason.SEATS, "one request at a time, and one is running", None)


@pytest.mark.parametrize(("running", "seats"), [(0, 4), (3, 1), (4, 0)])
def test_continuous_gives_every_free_seat(running: int, seats: int) -> None:
    boarding = board("continuous", Line(1), running)
    assert boarding == (seats, Reason.SEATS, "all 4 seats are taken", None)


@pytest.mark.parametrize(
    ("line", "running", "expected"),
    [
        (Line(4), 0, (4, Reason.SEATS)),
        (Line(9), 0, (4, Reason.SEATS)),
        (Line(3), 0, (0, Reason.BATCH)),
        (Line(3, closed=True), 0, (4, Reason.SEATS)),
        (Line(9, closed=True), 1, (0, Reason.SEATS)),
    ],
)
def test_static_fills_an_empty_car_when_all_have_come(line: Line, running: int, expected: tuple[int, Reason]) -> None:
    boarding = board("static", line, running, now=1e9)
    assert boarding[:2] == expected
    assert boarding.ask_again is None


@pytest.mark.parametrize(
    ("line", "running", "now", "expected"),
    [
        (Line(4), 0, 0.0, (4, Reason.SEATS, None)),
        (Line(1, oldest=5.0), 0, 5.0, (0, Reason.WINDOW, 7.0)),
        (Line(1, oldest=5.0), 0, 6.9, (0, Reason.WINDOW, 7.0)),
        (Line(1, oldest=5.0), 0, 7.0, (4, Reason.SEATS, None)),
        (Line(1, oldest=5.0, closed=True), 0, 5.0, (4, Reason.SEATS, None)),
        (Line(9, oldest=5.0), 1, 99.0, (0, Reason.SEATS, None)),
        (Line(0), 0, 0.0, (0, Reason.WINDOW, None)),
    ],
)
def test_dynamic_leaves_full_or_when_the_oldest_has_waited_enough(
    line: Line, running: int, now: float, expected: tuple[int, Reason, float | None]
) -> None:
    boarding = board("dynamic", line, running, now)
    assert (boarding.seats, boarding.why, boarding.ask_again) == expected


def test_asking_again_at_the_moment_given_is_not_in_vain() -> None:
    for oldest in (0.1, 1e9 + 0.3, 123456.789):
        when = board("dynamic", Line(1, oldest), now=oldest).ask_again
        assert when is not None
        assert board("dynamic", Line(1, oldest), now=when).seats == 4


def test_which_strategies_bind_their_riders_together() -> None:
    closed = {name for name in POLICIES if make_policy(name, 4, 1.0).closes_batch}
    assert closed == {"static", "dynamic"}
