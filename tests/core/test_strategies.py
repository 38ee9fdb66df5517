import pytest

from chairlift.core.decision import Reason
from chairlift.core.sequences.strategy import STRATEGIES, Admission, make_strategy


class Queue:
    """A queue of so many, the oldest of whom came at `oldest`."""

    def __init__(self, count: int, oldest: float = 0.0, closed: bool = False) -> None:
        self.count, self.oldest, self.closed = count, oldest, closed

    def __len__(self) -> int:
        return self.count

    def oldest_arrival(self) -> float | None:
        return self.oldest if self.count else None


def admission_of(strategy: str, waiting: Queue, running: int = 0, now: float = 0.0) -> Admission:
    return make_strategy(strategy, 4, 2.0).admit(waiting, running, now)


def test_none_has_one_slot() -> None:
    assert admission_of("none", Queue(9)).slots == 1
    assert admission_of("none", Queue(9), running=1) == (
        0,
        Reason.SLOTS,
        "one request at a time, and one is running",
        None,
    )


@pytest.mark.parametrize(("running", "slots"), [(0, 4), (3, 1), (4, 0)])
def test_continuous_gives_every_free_slot(running: int, slots: int) -> None:
    admission = admission_of("continuous", Queue(1), running)
    assert admission == (slots, Reason.SLOTS, "all 4 slots are taken", None)


@pytest.mark.parametrize(
    ("waiting", "running", "expected"),
    [
        (Queue(4), 0, (4, Reason.SLOTS)),
        (Queue(9), 0, (4, Reason.SLOTS)),
        (Queue(3), 0, (0, Reason.BATCH)),
        (Queue(3, closed=True), 0, (4, Reason.SLOTS)),
        (Queue(9, closed=True), 1, (0, Reason.SLOTS)),
    ],
)
def test_static_fills_an_empty_batch_when_all_have_come(
    waiting: Queue, running: int, expected: tuple[int, Reason]
) -> None:
    admission = admission_of("static", waiting, running, now=1e9)
    assert admission[:2] == expected
    assert admission.ask_again is None


@pytest.mark.parametrize(
    ("waiting", "running", "now", "expected"),
    [
        (Queue(4), 0, 0.0, (4, Reason.SLOTS, None)),
        (Queue(1, oldest=5.0), 0, 5.0, (0, Reason.WINDOW, 7.0)),
        (Queue(1, oldest=5.0), 0, 6.9, (0, Reason.WINDOW, 7.0)),
        (Queue(1, oldest=5.0), 0, 7.0, (4, Reason.SLOTS, None)),
        (Queue(1, oldest=5.0, closed=True), 0, 5.0, (4, Reason.SLOTS, None)),
        (Queue(9, oldest=5.0), 1, 99.0, (0, Reason.SLOTS, None)),
        (Queue(0), 0, 0.0, (0, Reason.WINDOW, None)),
    ],
)
def test_dynamic_leaves_full_or_when_the_oldest_has_waited_enough(
    waiting: Queue, running: int, now: float, expected: tuple[int, Reason, float | None]
) -> None:
    admission = admission_of("dynamic", waiting, running, now)
    assert (admission.slots, admission.reason, admission.ask_again) == expected


def test_asking_again_at_the_moment_given_is_not_in_vain() -> None:
    for oldest in (0.1, 1e9 + 0.3, 123456.789):
        when = admission_of("dynamic", Queue(1, oldest), now=oldest).ask_again
        assert when is not None
        assert admission_of("dynamic", Queue(1, oldest), now=when).slots == 4


def test_which_strategies_bind_their_members_together() -> None:
    closed = {name for name in STRATEGIES if make_strategy(name, 4, 1.0).closes_batch}
    assert closed == {"static", "dynamic"}
