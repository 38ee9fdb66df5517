"""The scheduler of items, rule by rule."""

import random
from collections.abc import Callable, Iterable

import pytest

from chairlift.core.decision import Reason
from chairlift.core.finished import Finished, FinishReason, Shed, ShedReason
from chairlift.core.items.item import Batch, BatchResult, Failure, Item
from chairlift.core.items.limits import BatchLimits
from chairlift.core.items.scheduler import ItemScheduler


def item(name: object, arrival: float = 0.0, **fields: object) -> Item:
    return Item(id=str(name), arrival=arrival, **fields)


def scheduler(num_instances: int = 1, **limits: object) -> ItemScheduler:
    return ItemScheduler(BatchLimits(**limits), num_instances)


def fill(s: ItemScheduler, names: Iterable[object], now: float = 0.0, **fields: object) -> None:
    for name in names:
        s.add(item(name, now, **fields))


def ids(batch: Batch | None) -> list[str]:
    assert batch is not None
    return [item.id for item in batch.items]


def went_well(s: ItemScheduler, batch: Batch, now: float, seconds: float | None = None) -> list[Finished]:
    seconds = now - batch.started if seconds is None else seconds
    return s.update(batch, BatchResult(seconds=seconds), now)


def trained(alpha: float, beta: float, **limits: object) -> ItemScheduler:
    """A scheduler that knows its executor: alpha + beta * b seconds."""
    s = scheduler(**limits)
    for number, count in enumerate((1, 4, 2, 8, 3)):
        fill(s, (f"warm {number} {i}" for i in range(count)), -100.0 + number, deadline=1e9)
        batch = s.schedule(-100.0 + number)
        assert batch is not None
        went_well(s, batch, batch.started + alpha + beta * batch.computed)
    return s


def run_all(
    s: ItemScheduler, fails: Callable[[list[str]], Failure | None], now: float = 0.0
) -> tuple[dict[str, Finished], list[int]]:
    """Run everything that waits, one call after the other; return how each ended, and the sizes of the calls."""
    ended, calls = {}, []
    while (batch := s.schedule(now)) is not None:
        names = ids(batch)
        calls.append(len(names))
        now += 0.01
        outcome = BatchResult(seconds=0.01, failure=fails(names), detail="broke")
        for each in s.update(batch, outcome, now):
            assert each.id not in ended
            ended[each.id] = each
    return ended, calls


def run_side_by_side(s: ItemScheduler, fails: Callable[[list[str]], Failure | None]) -> tuple[dict[str, Finished], int]:
    """Run everything that waits, on all instances at once; return how each ended, and the number of calls."""
    ended, num_calls = {}, 0
    while running := [batch for _ in s.instances if (batch := s.schedule(0.0)) is not None]:
        num_calls += len(running)
        for batch in running:
            outcome = BatchResult(seconds=0.0, failure=fails(ids(batch)))
            ended |= {each.id: each for each in s.update(batch, outcome, 0.0)}
    return ended, num_calls


# When a batch leaves


def test_without_a_window_whoever_is_there_leaves_at_once() -> None:
    s = scheduler()
    fill(s, "abc")
    assert ids(s.schedule(0.0)) == ["a", "b", "c"]


def test_a_batch_waits_for_its_window_and_no_longer() -> None:
    s = scheduler(max_wait=0.01, max_batch_size=3)
    fill(s, "a", 1.0)
    fill(s, "b", 1.005)
    assert s.schedule(1.005) is None
    assert s.ask_again == pytest.approx(1.01)
    assert s.explain("b").reason is Reason.WINDOW
    assert ids(s.schedule(s.ask_again)) == ["a", "b"]
    fill(s, "cde", 1.02)
    fill(s, "f", 1.02)
    assert s.schedule(1.02) is None, "the instance is busy"
    assert s.explain("f").reason is Reason.SLOTS


def test_a_full_batch_or_a_closed_queue_does_not_wait() -> None:
    s = scheduler(max_wait=9.0, max_batch_size=2)
    fill(s, "abc")
    batch = s.schedule(0.0)
    assert ids(batch) == ["a", "b"]
    went_well(s, batch, 0.1)
    assert s.schedule(0.1) is None
    s.close()
    assert ids(s.schedule(0.1)) == ["c"]


def test_membership_is_bound_when_the_instance_is_free() -> None:
    s = scheduler()
    fill(s, "a")
    first = s.schedule(0.0)
    fill(s, "b", 0.001)
    assert s.schedule(0.001) is None
    fill(s, "c", 0.009)
    went_well(s, first, 0.01)
    assert ids(s.schedule(0.01)) == ["b", "c"]


def test_shapes_neither_mix_nor_block_each_other() -> None:
    s = scheduler(num_instances=2, max_wait=0.01, max_batch_size=2)
    fill(s, "a", 0.0, shape_key="large")
    fill(s, "bc", 0.001, shape_key="small")
    assert ids(s.schedule(0.001)) == ["b", "c"], "a full queue does not wait for an older one's window"
    assert s.schedule(0.001) is None
    assert ids(s.schedule(0.01)) == ["a"]


def test_the_oldest_shape_goes_first() -> None:
    s = scheduler()
    fill(s, "a", 0.0, shape_key=1)
    fill(s, "bcd", 0.0, shape_key=2)
    assert ids(s.schedule(0.0)) == ["a"]


def test_max_batch_tokens_bounds_the_sum_and_lets_smaller_ones_fill_the_rest() -> None:
    s = scheduler(max_batch_tokens=10, max_passed_over=1)
    for name, size in zip("abcde", (6, 5, 4, 5, 5), strict=True):
        s.add(item(name, size=size))
    first = s.schedule(0.0)
    assert ids(first) == ["a", "c"]
    assert (first.size, first.computed) == (10, 10)
    went_well(s, first, 0.1)
    assert ids(s.schedule(0.1)) == ["b", "d"]


def test_nobody_is_passed_over_more_often_than_is_allowed() -> None:
    s = scheduler(max_batch_tokens=10, max_passed_over=2)
    s.add(item("first", size=4))
    s.add(item("wide", size=10))
    taken = []
    for number in range(5):
        fill(s, (f"{number} {i}" for i in range(10)), 0.0)
        batch = s.schedule(float(number))
        taken.append("wide" in ids(batch))
        went_well(s, batch, number + 0.5)
    assert taken == [False, True, False, False, False], "the first of its queue is never passed over"


def test_priorities_overtake_by_their_ageing_and_no_further() -> None:
    s = scheduler(max_batch_size=1, priority_ageing=1.0)
    s.add(item("patient", 0.0, priority=1))
    s.add(item("urgent", 0.9))
    s.add(item("late", 1.1))
    order = []
    now = 2.0
    while (batch := s.schedule(now)) is not None:
        order += ids(batch)
        now += 1
        went_well(s, batch, now)
    assert order == ["urgent", "patient", "late"]


def test_the_shortest_overtake_by_their_size_and_no_further() -> None:
    s = scheduler(max_batch_size=1, order="shortest", order_ageing=0.1)
    s.add(item("long", 0.0, size=20))
    s.add(item("middle", 0.5, size=10))
    s.add(item("short", 1.0, size=1))
    s.add(item("late", 2.0, size=1))
    order = []
    now = 2.0
    while (batch := s.schedule(now)) is not None:
        order += ids(batch)
        now += 1
        went_well(s, batch, now)
    assert order == ["short", "middle", "long", "late"]


def test_who_is_overtaken_does_not_count_as_ahead() -> None:
    refused = {}
    for order in ("arrival", "shortest"):
        s = trained(0.01, 0.001, max_batch_size=8, order=order)
        fill(s, ["first"])
        s.schedule(0.0)
        fill(s, (f"long {number}" for number in range(64)), size=10)
        s.add(item("small", deadline=10.0))
        with pytest.raises(Shed):
            s.add(item("large", size=10, deadline=0.2))
        try:
            s.add(item("small too", deadline=0.2))
        except Shed as shed:
            refused[order] = shed.reason
    assert refused == {"arrival": ShedReason.DEADLINE}


@pytest.mark.parametrize("shapes", [1, 7, 200])
@pytest.mark.parametrize("background", [False, True])
def test_how_many_are_ahead_is_told_of_many_at_once(background: bool, shapes: int) -> None:
    rng = random.Random(shapes)
    s = scheduler(max_wait=9.0, priority_ageing=3.0)
    s.instance_lost(0)
    items = [
        item(number, rng.random(), shape_key=number % shapes, priority=rng.randrange(3), background=background)
        for number in range(200)
    ]
    for each in items:
        s.add(each)
    line = sorted(items, key=lambda each: each.arrival + 3.0 * each.priority)
    expected = {each.id: place for place, each in enumerate(line)}
    assert s.num_ahead([*expected, "unknown"]) == expected
    some = rng.sample(sorted(expected), 20)
    assert s.num_ahead(some) == {name: expected[name] for name in some}
    for name in some:
        said = f"{expected[name]} of 200 "
        assert said in s.explain(name).detail
        assert said in s.explain(name, expected[name]).detail


@pytest.mark.parametrize("window", [0, 8])
def test_sorting_by_length_saves_padding(window: int) -> None:
    rng = random.Random(0)
    s = trained(0.008, 0.0001, sort_window=window, max_waiting=100_000)
    now, count, computed, size = 0.0, 0, 0.0, 0.0
    for _ in range(200):
        while s.num_waiting < 256:
            count += 1
            s.add(item(count, now, size=min(round(rng.lognormvariate(3.7, 0.9)) + 1, 512)))
        batch = s.schedule(now)
        longest = max(item.size for item in batch.items) * len(batch.items)
        assert batch.computed == (longest if window else batch.size)
        computed, size = computed + longest, size + batch.size
        now += 0.008 + 0.0001 * batch.computed
        went_well(s, batch, now)
    waste = 1 - size / computed
    assert waste < 0.35 if window else waste > 0.6


def test_where_padding_costs_more_than_a_call_the_long_one_goes_alone() -> None:
    s = trained(0.001, 0.001, sort_window=4)
    s.add(item("long", size=500))
    fill(s, "abcdefgh", 0.0, size=4)
    first = s.schedule(0.0)
    assert ids(first) == ["long"]
    went_well(s, first, 0.5)
    assert len(ids(s.schedule(0.5))) == 8


# The queue


def test_aborted_items_leave_wherever_they_are() -> None:
    s = scheduler(max_batch_size=2)
    fill(s, "abcd")
    batch = s.schedule(0.0)
    assert s.abort("a")
    assert not s.abort("a")
    assert s.abort("c")
    assert not s.abort("nobody")
    assert [each.id for each in went_well(s, batch, 0.1)] == ["b"]
    assert ids(s.schedule(0.1)) == ["d"]


def test_the_queue_is_bounded_in_items_and_in_seconds() -> None:
    s = scheduler(max_waiting=3)
    fill(s, "abc")
    with pytest.raises(Shed, match="3 requests wait") as refused:
        s.add(item("d"))
    assert refused.value.reason is ShedReason.QUEUE_FULL
    s = trained(0.01, 0.01, max_batch_size=8, max_queue_seconds=0.17)
    fill(s, range(16))
    assert s.queue_seconds() == pytest.approx(0.18, rel=0.05)
    with pytest.raises(Shed, match="of work wait") as refused:
        s.add(item("more"))
    assert refused.value.reason is ShedReason.QUEUE_SECONDS
    assert 0 < refused.value.retry_after < 0.02


def test_what_can_never_run_is_an_error() -> None:
    s = scheduler(max_batch_tokens=5)
    fill(s, "a")
    with pytest.raises(ValueError, match="already in use"):
        s.add(item("a"))
    with pytest.raises(ValueError, match="max_batch_tokens"):
        s.add(item("b", size=6))
    for size in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive"):
            s.add(item("c", size=size))


@pytest.mark.parametrize(
    "limits",
    [
        {"max_batch_size": 0},
        {"max_wait": -1},
        {"max_waiting": 0},
        {"max_batch_tokens": 0},
        {"default_timeout": float("inf")},
        {"retries": -1},
        {"target_latency": 0.05, "max_wait": 0.01},
    ],
)
def test_absurd_limits_are_refused_by_name(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(reversed(limits))):
        BatchLimits(**limits)


# Deadlines


@pytest.mark.parametrize("background", [False, True])
def test_a_shape_that_can_not_be_looked_up_is_refused_and_leaves_nothing(background: bool) -> None:
    s = scheduler(target_latency=1.0)
    for key in ([3, 4], ("rows", [3])):
        with pytest.raises(ValueError, match=r"shape_key must be hashable: unhashable type: 'list'; a tuple will do"):
            s.add(item("a", shape_key=key, background=background))
    assert (s.num_waiting, s.num_background_waiting, s.abort("a")) == (0, 0, False)
    s.add(item("a", shape_key=(3, 4), background=background))
    assert ids(s.schedule(0.0)) == ["a"]


def test_an_item_that_can_not_be_in_time_is_refused_at_the_door() -> None:
    s = trained(0.01, 0.001)
    fill(s, "a")
    s.schedule(0.0)
    with pytest.raises(Shed, match="after its deadline") as refused:
        s.add(item("b", 0.0, deadline=0.015))
    assert refused.value.reason is ShedReason.DEADLINE
    s.add(item("c", 0.0, deadline=0.025))
    fill(s, range(100), 0.0)
    with pytest.raises(Shed):
        s.add(item("d", 0.0, deadline=0.06))
    s.add(item("urgent", 0.0, deadline=0.06, priority=-1))
    assert s.num_shed[ShedReason.DEADLINE] == 2


def test_a_batch_is_such_that_all_its_members_are_in_time() -> None:
    s = trained(0.001, 0.004, default_timeout=0.06)
    fill(s, range(14), 0.0)
    batch = s.schedule(0.02)
    assert 1 < len(ids(batch)) <= 9
    assert batch.predicted <= 0.04
    for each in went_well(s, batch, 0.02 + batch.predicted):
        assert each.reason is FinishReason.DONE


def test_under_overload_the_stale_are_dropped_for_a_full_batch_of_fresh_ones() -> None:
    s = trained(0.008, 0.00025, default_timeout=0.05)
    fill(s, "ab", 0.0)
    fill(s, range(62), 0.03)
    batch = s.schedule(0.037)
    dropped = s.take_dropped()
    assert [each.id for each in dropped] == ["a", "b"]
    assert {each.shed for each in dropped} == {ShedReason.DEADLINE}
    assert len(ids(batch)) == 32


def test_who_is_too_late_is_dropped_while_everything_is_busy() -> None:
    s = trained(0.01, 0.001)
    fill(s, "a")
    s.schedule(0.0)
    s.add(item("b", deadline=0.05))
    assert s.schedule(0.0) is None
    assert s.ask_again == pytest.approx(0.04, abs=0.002)
    assert s.schedule(s.ask_again) is None
    assert [each.id for each in s.take_dropped()] == ["b"]


def test_a_wrong_prediction_does_not_refuse_for_ever() -> None:
    s = trained(0.01, 0.001, default_timeout=0.05)
    now = 0.0
    for number in range(6):
        fill(s, [number], now)
        batch = s.schedule(now)
        now += 1.0
        went_well(s, batch, now)
    assert batch.predicted > 0.05, "it believes that nothing can be in time"
    good = 0
    for number in range(100, 120):
        fill(s, [number], now)
        batch = s.schedule(now)
        now += 0.011
        good += went_well(s, batch, now)[0].reason is FinishReason.DONE
    assert good == 20
    assert batch.predicted == pytest.approx(0.011, rel=0.2)


def test_another_instance_may_take_whom_this_batch_leaves_out() -> None:
    s = scheduler(num_instances=2, max_batch_size=32, default_timeout=1.0)
    now = 0.0
    for count in (1, 8, 4, 16) * 2:
        for number in range(2):
            fill(s, (f"{now}{number}{i}" for i in range(count)), now)
            batch = s.schedule(now)
            went_well(s, batch, now + 0.01 + 0.01 * count)
        now += 1
    s.add(item("old", now, deadline=now + 0.05))
    fill(s, range(32), now)
    first, second = s.schedule(now), s.schedule(now)
    assert "old" in ids(first) + ids(second)
    assert not s.take_dropped()


# Failures

DEADLY = pytest.mark.parametrize("failure", [Failure.DIED, Failure.TIMED_OUT])


@pytest.mark.parametrize("culprit", [0, 17, 63])
def test_one_poison_item_among_64_costs_12_calls_and_one_error(culprit: int) -> None:
    s = scheduler(max_batch_size=64)
    fill(s, range(64))
    ended, calls = run_all(s, lambda names: Failure.RAISED if str(culprit) in names else None)
    assert len(ended) == 64
    assert [name for name, each in ended.items() if each.reason is not FinishReason.DONE] == [str(culprit)]
    assert ended[str(culprit)].detail == "broke"
    assert len(calls) - 1 <= 12
    assert s.num_bisections == 6


def test_halves_run_before_new_work() -> None:
    s = scheduler(max_batch_size=4)
    fill(s, "abcdef")
    batch = s.schedule(0.0)
    s.update(batch, BatchResult(seconds=0.1, failure=Failure.RAISED), 0.1)
    assert s.explain("d").reason is Reason.BATCH
    assert "raised an error" in s.explain("d").detail
    assert ids(s.schedule(0.1)) == ["a", "b"]


def test_what_is_tried_again_keeps_to_a_limit_that_was_lowered_meanwhile() -> None:
    s = scheduler(max_batch_size=4)
    fill(s, "abcde")
    batch = s.schedule(0.0)
    s.update(batch, BatchResult(seconds=0.1, failure=Failure.RAISED), 0.1)
    s.change_limits(BatchLimits(max_batch_size=1))
    order = []
    while (batch := s.schedule(0.1)) is not None:
        order.append(ids(batch))
        went_well(s, batch, 0.1)
    assert order == [["a"], ["b"], ["c"], ["d"], ["e"]]


def test_a_model_that_always_fails_is_not_asked_for_each_item() -> None:
    s = scheduler(max_batch_size=64)
    fill(s, range(64))
    ended, calls = run_all(s, lambda names: Failure.RAISED)
    assert {each.reason for each in ended.values()} == {FinishReason.ERROR}
    assert len(calls) <= 1 + 8 * 6
    assert any("smaller batches of the same items failed as well" in each.detail for each in ended.values())


def test_four_culprits_are_found() -> None:
    s = scheduler(max_batch_size=64)
    fill(s, range(64))
    bad = {"3", "20", "40", "63"}
    ended, _ = run_all(s, lambda names: Failure.RAISED if bad & set(names) else None)
    assert {name for name, each in ended.items() if each.reason is FinishReason.ERROR} == bad


@pytest.mark.parametrize("num_instances", [1, 8])
@pytest.mark.parametrize("in_turn", [False, True])
def test_a_request_whose_items_all_raise_takes_nobody_of_another_along(num_instances: int, in_turn: bool) -> None:
    s = scheduler(num_instances, max_batch_size=64)
    requests = ["bad", None] * 32 if in_turn else ["bad"] * 32 + [None] * 32
    for name, request in enumerate(requests):
        s.add(item(name, request=request))
    bad = {str(name) for name, request in enumerate(requests) if request}
    ended, num_calls = run_side_by_side(s, lambda names: Failure.RAISED if bad & set(names) else None)
    assert {name for name, each in ended.items() if each.reason is FinishReason.ERROR} == bad
    assert len(ended) == 64
    assert num_calls <= 1 + 2 * 6 + 8 * 6, "what one culprit among many costs, and what a request may spend"


@DEADLY
def test_items_of_a_request_that_kill_are_told_from_those_between_them(failure: Failure) -> None:
    s = scheduler(num_instances=16, max_batch_size=1000)
    bad = {str(name) for name in range(0, 1000, 2)}
    for name in range(1000):
        s.add(item(name, request="bad" if str(name) in bad else None))
    ended, _ = run_side_by_side(s, lambda names: failure if bad & set(names) else None)
    assert {name for name, each in ended.items() if each.reason is FinishReason.ERROR} == bad


def test_without_bisect_nothing_runs_twice() -> None:
    s = scheduler(bisect=False)
    fill(s, "abcd")
    ended, calls = run_all(s, lambda names: Failure.RAISED)
    assert calls == [4]
    assert {each.reason for each in ended.values()} == {FinishReason.ERROR}


def test_errors_of_single_items_need_no_second_call() -> None:
    s = scheduler()
    fill(s, "abc")
    ended = s.update(s.schedule(0.0), BatchResult(seconds=0.1, errors={"b": "no such word"}), 0.1)
    assert [(each.id, each.reason, each.detail) for each in ended] == [
        ("a", FinishReason.DONE, None),
        ("b", FinishReason.ERROR, "no such word"),
        ("c", FinishReason.DONE, None),
    ]


def test_out_of_memory_halves_the_batch_and_is_remembered() -> None:
    s = scheduler(max_batch_size=32)
    fill(s, range(128))
    ended, calls = run_all(s, lambda names: Failure.OUT_OF_MEMORY if len(names) > 16 else None)
    assert {each.reason for each in ended.values()} == {FinishReason.DONE}
    assert calls == [32] + [16] * 8


def test_the_memory_limit_grows_back_and_is_more_patient_each_time() -> None:
    s = scheduler(max_batch_size=32, max_waiting=100_000)
    fill(s, range(20_000))
    ended, calls = run_all(s, lambda names: Failure.OUT_OF_MEMORY if len(names) > 20 else None)
    assert {each.reason for each in ended.values()} == {FinishReason.DONE}
    assert max(calls[200:]) > 16, "it tries more again"
    assert sum(count > 20 for count in calls) <= 6, "but not often"
    assert calls.count(20) > len(calls) / 3


def test_an_item_that_alone_runs_out_of_memory_gets_the_error() -> None:
    s = scheduler(max_batch_size=8)
    fill(s, range(8))
    ended, _ = run_all(s, lambda names: Failure.OUT_OF_MEMORY if "5" in names else None)
    assert [name for name, each in ended.items() if each.reason is FinishReason.ERROR] == ["5"]


@pytest.mark.parametrize("culprit", [0, 13, 31])
@pytest.mark.parametrize("background", [False, True])
def test_an_item_that_no_memory_is_enough_for_leaves_batches_as_they_were(culprit: int, background: bool) -> None:
    s = scheduler(max_batch_size=32, background_step=10.0)
    fill(s, ["first"], background=background)
    went_well(s, s.schedule(0.0), 0.01)
    for round_ in range(5):
        names = [f"{round_} {number}" for number in range(32)]
        fill(s, names, background=background)
        ended, calls = run_all(s, lambda each, bad=names[culprit]: Failure.OUT_OF_MEMORY if bad in each else None)
        assert [name for name, each in ended.items() if each.reason is FinishReason.ERROR] == [names[culprit]]
        assert calls[0] == 32
    fill(s, ["alone"], background=background)
    run_all(s, lambda each: Failure.OUT_OF_MEMORY)
    fill(s, range(32), background=background)
    assert len(ids(s.schedule(1.0))) == 32


def test_a_batch_beside_one_with_a_culprit_does_not_keep_the_limit_down() -> None:
    s = scheduler(num_instances=2, max_batch_size=8)
    fill(s, [*"abcdefg", "bad one", *"hijklmn", "bad two"])
    running = [s.schedule(0.0), s.schedule(0.0)]
    while running:
        batch = running.pop(0)
        failure = Failure.OUT_OF_MEMORY if any("bad" in name for name in ids(batch)) else None
        s.update(batch, BatchResult(seconds=0.01, failure=failure), 0.1)
        if (batch := s.schedule(0.1)) is not None:
            running.append(batch)
    assert s.num_waiting == 0
    fill(s, range(8))
    assert len(ids(s.schedule(1.0))) == 8


def test_the_memory_limit_counts_size_so_that_small_items_are_not_held_back() -> None:
    s = scheduler(max_batch_size=32)
    fill(s, range(2), size=1000)
    run_all(s, lambda names: Failure.OUT_OF_MEMORY if len(names) > 1 else None)
    fill(s, range(32), size=1)
    assert len(ids(s.schedule(1.0))) == 32


@DEADLY
@pytest.mark.parametrize("culprit", ["0", "9", "63"])
def test_who_kills_or_hangs_an_instance_is_found_with_one_more_such_call(failure: Failure, culprit: str) -> None:
    s = scheduler(max_batch_size=64, retries=2)
    fill(s, range(64))
    deaths: list[set[str]] = []

    def fails(names: list[str]) -> Failure | None:
        if culprit in names:
            deaths.append(set(names))
            return failure
        return None

    ended, _ = run_all(s, fails)
    assert [name for name, each in ended.items() if each.reason is FinishReason.ERROR] == [culprit]
    assert ended[culprit].detail == "broke (in each of 3 calls)"
    assert [name for name, each in ended.items() if each.deadly] == [culprit]
    assert [len(names) for names in deaths] == [64, 1, 1]
    assert list(ended)[-1] == culprit, "nobody waits for the last try"
    assert s.num_bisections == 1
    assert not s.searching


@DEADLY
def test_a_large_batch_is_taken_into_few_parts(failure: Failure) -> None:
    s = scheduler(max_batch_size=1000)
    fill(s, range(1000))
    ended, calls = run_all(s, lambda names: failure if "500" in names else None)
    assert [name for name, each in ended.items() if each.reason is FinishReason.ERROR] == ["500"]
    assert calls.count(16) == 62
    assert len(calls) <= 1 + 64 + 16 + 1


@DEADLY
def test_more_than_four_who_kill_end_the_search_for_all_who_wait_in_it(failure: Failure) -> None:
    s = scheduler(max_batch_size=64)
    fill(s, range(64))
    bad = {"3", "20", "40", "41", "50"}
    ended, calls = run_all(s, lambda names: failure if bad & set(names) else None)
    errors = {name: each.detail for name, each in ended.items() if each.reason is FinishReason.ERROR}
    assert errors.keys() == bad | {str(number) for number in range(51, 64)}
    assert all("too many to look for each" in detail for detail in errors.values())
    assert not ended["51"].deadly, "it was not tried alone"
    assert len(calls) == 1 + 51
    assert not s.searching
    fill(s, "a")
    assert ids(s.schedule(1.0)) == ["a"], "and others are served"


@DEADLY
@pytest.mark.parametrize("size", [32, 200])
def test_a_request_whose_items_kill_takes_nobody_of_another_along(failure: Failure, size: int) -> None:
    s = scheduler(max_batch_size=size)
    bad = {str(number) for number in range(size - 1)}
    fill(s, sorted(bad), request="0")
    fill(s, ["innocent"])
    ended, calls = run_all(s, lambda names: failure if bad & set(names) else None)
    assert {name for name, each in ended.items() if each.reason is FinishReason.ERROR} == bad
    assert len(calls) <= 30
    assert not s.searching


def test_four_who_kill_are_found() -> None:
    s = scheduler(max_batch_size=64)
    fill(s, range(64))
    bad = {"3", "20", "40", "63"}
    ended, _ = run_all(s, lambda names: Failure.DIED if bad & set(names) else None)
    assert {name for name, each in ended.items() if each.reason is FinishReason.ERROR} == bad


def test_suspects_run_side_by_side_and_leave_an_instance_for_new_work() -> None:
    s = scheduler(num_instances=2, max_batch_size=4)
    fill(s, "abcd")
    s.update(s.schedule(0.0), BatchResult(seconds=0.0, failure=Failure.TIMED_OUT), 0.1)
    assert s.searching
    first, second = s.schedule(0.1), s.schedule(0.1)
    assert (ids(first), ids(second)) == (["a"], ["b"])
    assert s.schedule(0.1) is None
    fill(s, "xy", 0.2)
    went_well(s, second, 0.2)
    new = s.schedule(0.2)
    assert ids(new) == ["x", "y"], "while the other may hang"
    went_well(s, new, 0.3)
    third = s.schedule(0.3)
    assert ids(third) == ["c"], "nobody new waits"
    s.instance_lost(first.instance)
    s.update(first, BatchResult(seconds=0.0, failure=Failure.TIMED_OUT), 0.4)
    fill(s, "z", 0.4)
    went_well(s, third, 0.4)
    assert ids(s.schedule(0.4)) == ["d"], "there is no other instance now"


def test_nothing_is_sent_ahead_to_an_instance_that_may_hang() -> None:
    s = ItemScheduler(BatchLimits(max_batch_size=2), ahead=True)
    fill(s, "ab")
    s.update(s.schedule(0.0), BatchResult(seconds=0.0, failure=Failure.DIED), 0.1)
    for now in (0.2, 0.3):
        suspect = s.schedule(now)
        assert len(ids(suspect)) == 1
        fill(s, [f"new {now}"], now)
        assert s.schedule(now) is None
        went_well(s, suspect, now)
    assert s.schedule(0.4).ahead is False


@pytest.mark.parametrize("background", [False, True])
def test_deadlines_hold_for_those_who_are_tried_again(background: bool) -> None:
    s = trained(0.001, 0.001)
    fill(s, "abc", deadline=1.0, background=background)
    fill(s, "d", background=background)
    batch = s.schedule(0.0)
    assert len(ids(batch)) == 4
    s.instance_lost(0)
    s.update(batch, BatchResult(seconds=0.0, failure=Failure.TIMED_OUT), 0.5)
    assert s.schedule(0.5) is None
    assert s.ask_again == pytest.approx(1.0)
    assert s.schedule(s.ask_again) is None
    assert [each.id for each in s.take_dropped()] == ["a", "b", "c"]
    s.instance_back(0)
    assert ids(s.schedule(2.0)) == ["d"]


def test_an_aborted_suspect_ends_the_search() -> None:
    s = scheduler(max_batch_size=2)
    fill(s, "ab")
    s.update(s.schedule(0.0), BatchResult(seconds=0.0, failure=Failure.DIED), 0.1)
    for name in "ab":
        assert s.searching
        s.abort(name)
    assert not s.searching
    assert not s._bisections._parts, "nothing is left of it"


def test_an_item_alone_is_tried_again_as_often_as_allowed() -> None:
    for retries in (0, 1, 3):
        s = scheduler(retries=retries)
        only = item("a")
        s.add(only)
        ended, calls = run_all(s, lambda names: Failure.DIED)
        assert len(calls) == only.attempts == 1 + retries
        assert ended["a"].reason is FinishReason.ERROR
        assert ended["a"].deadly
    s = scheduler(retries=0)
    fill(s, "ab")
    ended, _ = run_all(s, lambda names: Failure.DIED)
    assert not any(each.deadly for each in ended.values()), "either may have done it"
    s = scheduler()
    fill(s, "a")
    assert not run_all(s, lambda names: Failure.RAISED)[0]["a"].deadly


def test_an_instance_that_is_lost_gets_no_work_until_it_is_back() -> None:
    s = scheduler(num_instances=2, max_batch_size=1)
    fill(s, "abc")
    first, second = s.schedule(0.0), s.schedule(0.0)
    assert {first.instance, second.instance} == {0, 1}
    s.instance_lost(first.instance)
    assert s.update(first, BatchResult(seconds=0.0, failure=Failure.DIED), 0.1) == []
    assert s.schedule(0.1) is None
    went_well(s, second, 0.2)
    assert ids(s.schedule(0.2)) == ["a"], "on the other one"
    assert s.schedule(0.2) is None
    s.instance_back(first.instance)
    assert ids(s.schedule(0.3)) == ["c"]
    s.instance_back(2)
    fill(s, "d", 0.3)
    assert s.schedule(0.3).instance == 2


def test_a_batch_is_updated_once() -> None:
    s = scheduler()
    fill(s, "a")
    batch = s.schedule(0.0)
    went_well(s, batch, 0.1)
    with pytest.raises(ValueError, match="not running"):
        went_well(s, batch, 0.1)
