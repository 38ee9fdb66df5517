import random
from typing import NamedTuple

import pytest

from chairlift.core.queue import Rank, WaitingQueue


class Entry(NamedTuple):
    rank: Rank
    arrival: float


def entry(moment: float, serial: int, arrival: float | None = None) -> Entry:
    return Entry((moment, serial), moment if arrival is None else arrival)


def queue_of(*entries: Entry) -> WaitingQueue[Entry]:
    queue: WaitingQueue[Entry] = WaitingQueue()
    for each in entries:
        queue.push(each)
    return queue


def test_by_moment_then_serial_number() -> None:
    queue = queue_of(entry(2.0, 1), entry(1.0, 2), entry(9.0, 3, 0.0), entry(-1.0, 4, 9.0), entry(1.0, 5))
    assert [queue.pop().rank[1] for _ in range(5)] == [4, 2, 5, 1, 3]


def test_an_empty_queue() -> None:
    queue = queue_of()
    assert (len(queue), queue.head(), queue.oldest_arrival()) == (0, None, None)
    with pytest.raises(IndexError):
        queue.pop()


def test_head_and_oldest_look_without_taking() -> None:
    queue = queue_of(entry(2.0, 1), entry(5.0, 2, 1.0))
    assert queue.head() == entry(2.0, 1)
    assert queue.oldest_arrival() == 1.0
    assert len(queue) == 2


def test_remove_wherever_one_stands() -> None:
    queue = queue_of(entry(1.0, 1), entry(2.0, 2), entry(3.0, 3))
    queue.remove(entry(1.0, 1))
    assert queue.head() == entry(2.0, 2)
    assert queue.oldest_arrival() == 2.0
    queue.remove(entry(3.0, 3))
    assert [queue.pop().rank[1], queue.head()] == [2, None]
    with pytest.raises(KeyError):
        queue.remove(entry(1.0, 1))


def test_who_was_taken_out_may_come_back_to_the_same_place() -> None:
    queue = queue_of(entry(1.0, 1), entry(2.0, 2))
    first = queue.pop()
    assert queue.oldest_arrival() == 2.0
    queue.push(first)
    assert queue.oldest_arrival() == 1.0
    assert queue.head() is first


def test_random_use_against_a_sorted_list_and_bounded_memory() -> None:
    rng = random.Random(5)
    queue = queue_of()
    living: list[Entry] = []
    for serial in range(20_000):
        # The queue swells, then thins out, over and over.
        if rng.random() < (0.7 if serial // 500 % 2 else 0.3):
            each = entry(float(rng.randrange(50)), serial, float(rng.randrange(50)))
            queue.push(each)
            living.append(each)
        elif living and rng.random() < 0.5:
            queue.remove(living.pop(rng.randrange(len(living))))
        elif living:
            first = min(living)
            assert queue.head() == first
            assert queue.pop() == first
            living.remove(first)
        assert len(queue) == len(living)
        assert queue.oldest_arrival() == min((each.arrival for each in living), default=None)
        most = 2 * len(living) + 17
        assert queue._ages is not None
        assert len(queue._ages) <= most
        assert len(queue._ranks) <= max(most, 1100)


@pytest.mark.parametrize("leave", ["pop", "remove"])
def test_those_long_gone_leave_nothing_behind(leave: str) -> None:
    """One patient entry stays while a thousand pass; nobody ever asks for the oldest."""
    queue = queue_of(entry(9e9, 0))
    for serial in range(1, 1000):
        each = entry(float(serial), serial)
        queue.push(each)
        queue.pop() if leave == "pop" else queue.remove(each)
    assert len(queue._ranks) < 30
    assert not queue._ages
