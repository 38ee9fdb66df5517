import random
from typing import NamedTuple

import pytest

from chairlift.core.sequences.waiting import WaitingQueue


class Rider(NamedTuple):
    key: tuple[int, float, int]


def line_of(*keys: tuple[int, float, int]) -> WaitingQueue[Rider]:
    line: WaitingQueue[Rider] = WaitingQueue()
    for key in keys:
        line.push(Rider(key))
    return line


def test_by_priority_then_arrival_then_serial_number() -> None:
    line = line_of((0, 2.0, 1), (0, 1.0, 2), (1, 0.0, 3), (-1, 9.0, 4), (0, 1.0, 5))
    assert [line.pop().key[2] for _ in range(5)] == [4, 2, 5, 1, 3]


def test_an_empty_line() -> None:
    line = line_of()
    assert (len(line), line.head(), line.oldest_arrival()) == (0, None, None)
    with pytest.raises(IndexError):
        line.pop()


def test_head_and_oldest_look_without_taking() -> None:
    line = line_of((0, 2.0, 1), (5, 1.0, 2))
    assert line.head() == Rider((0, 2.0, 1))
    assert line.oldest_arrival() == 1.0
    assert len(line) == 2


def test_remove_wherever_one_stands() -> None:
    line = line_of((0, 1.0, 1), (0, 2.0, 2), (0, 3.0, 3))
    line.remove(Rider((0, 1.0, 1)))
    assert line.head() == Rider((0, 2.0, 2))
    assert line.oldest_arrival() == 2.0
    line.remove(Rider((0, 3.0, 3)))
    assert [line.pop().key[2], line.head()] == [2, None]
    with pytest.raises(KeyError):
        line.remove(Rider((0, 1.0, 1)))


def test_who_was_taken_out_may_come_back_to_the_same_place() -> None:
    line = line_of((0, 1.0, 1), (0, 2.0, 2))
    first = line.pop()
    assert line.oldest_arrival() == 2.0
    line.push(first)
    assert line.oldest_arrival() == 1.0
    assert line.head() is first


def test_random_use_against_a_sorted_list_and_bounded_memory() -> None:
    rng = random.Random(5)
    line = line_of()
    living: list[Rider] = []
    for serial in range(20_000):
        # The line swells, then thins out, over and over.
        if rng.random() < (0.7 if serial // 500 % 2 else 0.3):
            rider = Rider((rng.randrange(3), float(rng.randrange(50)), serial))
            line.push(rider)
            living.append(rider)
        elif living and rng.random() < 0.5:
            line.remove(living.pop(rng.randrange(len(living))))
        elif living:
            first = min(living)
            assert line.head() == first
            assert line.pop() == first
            living.remove(first)
        assert len(line) == len(living)
        assert line.oldest_arrival() == min((r.key[1] for r in living), default=None)
        most = 2 * len(living) + 17
        assert line._age is not None
        assert len(line._age) <= most
        assert len(line._urgency) <= max(most, 1100)


@pytest.mark.parametrize("leave", ["pop", "remove"])
def test_those_long_gone_leave_nothing_behind(leave: str) -> None:
    """One patient rider stays while a thousand pass; nobody ever asks for the oldest."""
    line = line_of((9, 0.0, 0))
    for serial in range(1, 1000):
        rider = Rider((0, float(serial), serial))
        line.push(rider)
        line.pop() if leave == "pop" else line.remove(rider)
    assert len(line._urgency) < 30
    assert not line._age
