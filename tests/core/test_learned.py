"""How long a batch takes: what is learned from few calls, what is not fallen for, and what others lean on."""

import random

import pytest

from chairlift.core.items.learned import BatchTime, MemoryLimit

EXECUTORS = [(0.008, 0.00025), (0.001, 0.004), (0.001, 0.00005), (0.0001, 0.01), (0.02, 0.0)]


def feed(time: BatchTime, alpha: float, beta: float, counts: list[int], unit: float = 1.0, noise: float = 0.0) -> None:
    rng = random.Random(1)
    for count in counts:
        seconds = (alpha + beta * count) * rng.lognormvariate(0, noise)
        time.observe(seconds, seconds, count * unit, count)


@pytest.mark.parametrize(("alpha", "beta"), EXECUTORS)
@pytest.mark.parametrize("unit", [1.0, 1e-3, 1e6])
def test_three_calls_of_different_sizes_settle_it_whatever_the_unit(alpha: float, beta: float, unit: float) -> None:
    time = BatchTime()
    feed(time, alpha, beta, [1, 2, 4], unit)
    for count in (1, 8, 32):
        assert time.expected.seconds(count * unit) == pytest.approx(alpha + beta * count, rel=0.1)


@pytest.mark.parametrize(("alpha", "beta"), EXECUTORS)
def test_noise_and_outliers(alpha: float, beta: float) -> None:
    time = BatchTime()
    counts = random.Random(2).choices((1, 2, 3, 5, 8, 13, 21, 32), k=60)
    feed(time, alpha, beta, counts, noise=0.05)
    assert time.expected.seconds(32) == pytest.approx(alpha + beta * 32, rel=0.1)
    before = time.expected.seconds(8)
    time.observe(20 * before, 20 * before, 8, 8)
    assert time.expected.seconds(8) == pytest.approx(before, rel=0.02)


@pytest.mark.parametrize("factor", [0.1, 0.5, 3.0, 100.0])
def test_a_machine_that_changes_its_speed_is_followed(factor: float) -> None:
    time = BatchTime()
    feed(time, 0.008, 0.00025, [1, 4, 9, 16, 32] * 4)
    feed(time, 0.008 * factor, 0.00025 * factor, [16] * 12)
    assert time.expected.seconds(16) == pytest.approx(0.012 * factor, rel=0.1)


def test_a_slow_first_call_is_forgotten() -> None:
    time = BatchTime()
    time.observe(3.0, 3.0, 1, 1)
    feed(time, 0.008, 0.00025, [1, 2, 8, 16, 4, 9, 20, 3])
    assert time.expected.seconds(16) == pytest.approx(0.012, rel=0.15)


def test_nothing_is_predicted_before_the_first_call() -> None:
    assert BatchTime().expected.seconds(100) == 0
    assert BatchTime().cautious.seconds(100) == 0


def test_caution_covers_noise_and_answers_that_come_after_the_call() -> None:
    time = BatchTime()
    feed(time, 0.008, 0.00025, [1, 4, 9, 16, 32] * 12)
    exact = time.expected.seconds(16)
    assert time.cautious.seconds(16) == pytest.approx(exact, rel=0.01)
    for _ in range(40):
        time.observe(exact, exact + 0.002, 16, 16)
    assert time.cautious.seconds(16) == pytest.approx(exact + 0.002, rel=0.05)
    noisy = BatchTime()
    feed(noisy, 0.008, 0.00025, [1, 4, 9, 16, 32] * 40, noise=0.1)
    assert 1.08 < noisy.cautious.seconds(16) / noisy.expected.seconds(16) < 1.3


def test_caution_has_an_end() -> None:
    time = BatchTime()
    feed(time, 0.008, 0.00025, [1, 4, 9, 16, 32])
    for _ in range(100):
        time.observe(0.012, 1.0, 16, 16)
    assert time.cautious.seconds(16) == pytest.approx(1.5 * time.expected.seconds(16))


def grow(limit: MemoryLimit, calls: int, most: int = 32, size: float = 1.0) -> int:
    """Have calls go well that are as large as the limit lets them be; return how large the last was."""
    count = 0
    for _ in range(calls):
        count = max(int(min(limit.max_size / size, limit.max_items, most)), 1)
        limit.fitted(count * size, count)
    return count


@pytest.mark.parametrize("first", range(2, 17))
@pytest.mark.parametrize("size", [1.0, 0.25, 300.0])
def test_one_call_that_ran_out_of_memory_holds_batches_down_for_a_while_only(first: int, size: float) -> None:
    limit = MemoryLimit()
    limit.exceeded(first * size, first)
    assert limit.max_size == first * size / 2
    assert grow(limit, 3000, size=size) == 32


def test_where_the_number_of_items_counts_that_grows_back_too() -> None:
    limit = MemoryLimit()
    for count in (2, 2, 1):
        limit.fitted(2, 2)
        limit.exceeded(2, count)
    assert (limit.max_size, limit.max_items) == (1, 1)
    assert grow(limit, 20_000) == 32


def test_calls_that_had_room_for_one_more_do_not_raise_the_memory_limit() -> None:
    limit = MemoryLimit()
    limit.exceeded(64, 64)
    for _ in range(1000):
        limit.fitted(31, 31)
    assert limit.max_size == 32


def test_an_item_that_runs_out_of_memory_alone_limits_no_batch() -> None:
    limit = MemoryLimit()
    limit.fitted(32, 32)
    for _ in range(3):
        limit.exceeded(1, 1)
    assert grow(limit, 1) == 32
    before = limit.room
    for count in (32, 16, 8, 4, 2):
        limit.exceeded(count, count, before)
    assert (limit.max_size, limit.max_items) == (1, 1)
    limit.exceeded(1, 1, before)
    assert limit.room == before


def test_what_fits_of_a_batch_that_did_not_is_the_least_that_the_limit_allows() -> None:
    limit = MemoryLimit()
    for count in (32, 16, 8):
        limit.exceeded(count, count)
    limit.fitted(10, 10)
    assert limit.max_size == 4, "it may be another instance that has more"
    limit.fitted(8, 8, again=True)
    assert limit.max_size == 8
    limit.exceeded(8, 8)
    assert limit.max_items == 4
    limit.fitted(6, 6, again=True)
    assert (limit.max_size, limit.max_items) == (6, 6)
