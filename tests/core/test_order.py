"""The one rule of who is next: order is respected, and nobody starves, whatever comes."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from chairlift.core.items.item import Item
from chairlift.core.items.limits import BatchLimits
from chairlift.core.items.waiting import WaitingItems
from chairlift.core.queue import ORDERS, QueueOrder, WaitingQueue
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.sequence import Sequence

ORDER = st.builds(QueueOrder, st.sampled_from(list(ORDERS)), st.floats(0, 10), st.floats(0, 1))
# Arrival, priority, and size.
WORK = st.lists(st.tuples(st.floats(0, 100), st.integers(-3, 3), st.integers(1, 50)), min_size=1, max_size=30)


def by_sequences(order: QueueOrder, work: list[tuple[float, int, int]]) -> list[int]:
    """Indices of the work in the order in which a queue of sequences gives it out."""
    queue: WaitingQueue[Sequence] = WaitingQueue()
    for index, (arrival, priority, size) in enumerate(work):
        request = Request(
            id=str(index),
            prompt_ids=[0],
            params=SamplingParams(max_tokens=None),
            max_tokens=size,
            arrival=arrival,
            priority=priority,
        )
        queue.push(Sequence(request, (order.moment(arrival, priority, size), index)))
    return [int(queue.pop().id) for _ in work]


def by_items(order: QueueOrder, work: list[tuple[float, int, int]]) -> list[int]:
    """The same for items."""
    waiting = WaitingItems(order)
    for index, (arrival, priority, size) in enumerate(work):
        waiting.push(Item(id=str(index), arrival=arrival, priority=priority, size=size))
    (queue,) = waiting.queues.values()
    return [int(waiter.item.id) for waiter in queue.waiting]


@given(ORDER, WORK)
def test_both_queues_give_out_the_same_and_nobody_is_overtaken_beyond_the_bound(
    order: QueueOrder, work: list[tuple[float, int, int]]
) -> None:
    given_out = by_sequences(order, work)
    assert given_out == by_items(order, work)
    places = {index: place for place, index in enumerate(given_out)}
    for one, (arrival, priority, size) in enumerate(work):
        for other, (later, others_priority, others_size) in enumerate(work):
            head_start = (priority - others_priority) * order.priority_ageing
            if order.name == "shortest":
                head_start += (size - others_size) * order.size_ageing
            if later > arrival + head_start + 1e-6:
                assert places[other] > places[one], "overtaken by one that came too late for that"


@given(ORDER, WORK)
def test_what_counts_as_ahead_is_nearly_what_is(order: QueueOrder, work: list[tuple[float, int, int]]) -> None:
    """Of those that came before: all that are ahead in both respects, and nobody behind by more than rounding."""
    waiting = WaitingItems(order)
    for index, (_, priority, size) in enumerate(work):
        newcomer = Item(id=str(index), arrival=float(index), priority=priority, size=size)
        here = [waiter.item for queue in waiting.queues.values() for waiter in queue.waiting]
        larger = 1.0 if order.name == "arrival" or not order.size_ageing else 1.126
        least = sum(i.priority <= priority and (larger == 1 or i.size <= size) for i in here)
        most = sum(i.priority <= priority and (larger == 1 or i.size <= size * larger) for i in here)
        assert least <= waiting.load(newcomer)[0] <= most
        waiting.push(newcomer)
    assert waiting.load() == (len(work), sum(size for _, _, size in work))


def test_an_unknown_order_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="order must be one of arrival, shortest, got 'longest'"):
        BatchLimits(order="longest")
