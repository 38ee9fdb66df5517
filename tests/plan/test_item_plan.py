"""Plans for models that answer in one call: what is chosen, where that can be told beforehand."""

import pickle
from collections.abc import Iterator
from math import inf
from typing import Any

import msgspec
import pytest
from support.simulated import exact_calls, few_candidates

from chairlift.config.items import ItemConfig
from chairlift.errors import ConfigError
from chairlift.plan.advice import facts_of
from chairlift.plan.case import changed
from chairlift.plan.item_advice import item_decision
from chairlift.plan.item_candidates import FULL_MS, ITEM_STRATEGIES
from chairlift.plan.item_case import ItemCase
from chairlift.plan.machine_profile import FrontCost
from chairlift.plan.planner import make_plan, with_mode
from chairlift.plan.targets import LatencyTargets
from chairlift.plan.trace import TraceRequest
from chairlift.plan.traffic import Traffic, synthetic

CALL, SIZE = 0.010, 0.001
BASE = ItemConfig(model="module:Class", max_wait_ms=0.0)


def case(targets: LatencyTargets | None = None, items: int = 1, count: int = 200, **profile: Any) -> ItemCase:
    made = msgspec.structs.replace(exact_calls(CALL, SIZE), **profile)
    traffic = Traffic(arrivals="poisson:50", input_length="constant:1", items=items)
    return ItemCase(made, tuple(synthetic(traffic, 20.0)[:count]), targets or LatencyTargets())


def config(**settings: Any) -> ItemConfig:
    return ItemConfig(model="module:Class", **settings)


def test_what_a_server_can_do_at_all() -> None:
    assert case().capacity(config(max_batch_size=1), 200) == pytest.approx(1 / (CALL + SIZE))
    for full in ({}, {"max_wait_ms": FULL_MS}):
        assert case().capacity(config(max_batch_size=8, **full), 200) == pytest.approx(8 / (CALL + 8 * SIZE))
    assert case(items=8).capacity(config(max_batch_size=8), 200) == pytest.approx(1 / (CALL + 8 * SIZE))
    slow = ItemCase(case().profile, case(items=4).trace, front=FrontCost(request=0.01, item=0.01))
    assert slow.capacity(config(), 200) == pytest.approx(1 / 0.05), "the front is one thread"
    for contention, slower in ((2.0, 2.0 * 0.001), (1000.0, CALL + SIZE)):
        beside = ItemCase(case().profile, case().trace, front=FrontCost(request=0.001, contention=contention))
        assert beside.capacity(config(max_batch_size=1), 200) == pytest.approx(1 / (CALL + SIZE + slower))


def test_where_nothing_can_be_answered_the_reason_is_told() -> None:
    traffic = Traffic(arrivals="poisson:50", input_length="constant:64")
    encoder = ItemConfig(model="encoder", kind="encoder", max_batch_tokens=16, max_wait_ms=0.0)
    too_long = ItemCase(exact_calls(CALL, SIZE), tuple(synthetic(traffic, 1.0)))
    with pytest.raises(ConfigError, match=r"no request of the traffic can be answered: .*64.*16 \(max_batch_tokens\)"):
        too_long.alone(encoder, 10)


def test_a_crowd_is_never_refused() -> None:
    assert case().capacity(config(max_batch_size=1, max_waiting=3, timeout_ms=5.0, max_queue_ms=1.0), 200) > 80


@pytest.mark.parametrize(("cores", "gain"), [(0.1, 2.0), (1.0, 2.0), (1.5, 4 / 3), (2.0, 1.0)])
def test_instances_share_the_cores(cores: float, gain: float) -> None:
    it = case(cores=cores, cpus=2)
    one, two = (it.capacity(config(max_batch_size=4, instances=count), 200) for count in (1, 2))
    assert two / one == pytest.approx(gain, rel=0.02)


def test_what_is_not_known_to_be_apart_is_shared() -> None:
    one, two = (case().capacity(config(max_batch_size=4, instances=count), 200) for count in (1, 2))
    assert two == pytest.approx(one, rel=0.02)
    base = msgspec.structs.replace(BASE, instances=3)
    assert {each.instances for each in case().candidates(base, "dynamic")} == {3}


def test_candidates_are_those_that_can_have_an_effect() -> None:
    it = case(LatencyTargets(e2e=0.2))
    found = {name: it.candidates(BASE, name) for name in ITEM_STRATEGIES}
    assert all(each.count(one) == 1 for each in found.values() for one in each)
    assert [one.max_batch_size for one in found["none"]] == [1]
    assert {one.max_wait_ms for one in found["static"]} == {FULL_MS}
    # 32 is the default, and the largest that was measured.
    assert {one.max_batch_size for one in found["dynamic"]} == {2, 4, 8, 16, None}
    targets = {one.target_latency_ms for one in found["dynamic"]}
    assert targets == {None, 100.0, 160.0, 200.0}
    assert all(one.max_wait_ms is None for one in found["dynamic"] if one.target_latency_ms)
    assert {one.instances for one in found["dynamic"]} == {1}
    assert {one.background_step_ms for one in found["dynamic"]} == {40.0}
    assert {one.instances for one in case(cores=0.5, cpus=2).candidates(BASE, "dynamic")} == {1, 2, 4}
    late = ItemCase(it.profile, (*it.trace, TraceRequest(arrival=99.0, input_length=1, items=1, background=True)))
    assert len({one.background_step_ms for one in late.candidates(BASE, "dynamic")}) == 3


def test_what_the_model_says_itself_is_left_to_it() -> None:
    found = case(max_batch_size=8, max_wait_ms=10.0).candidates(BASE, "dynamic")
    assert {} in [changed(one) for one in found]
    assert {"max_wait_ms": 0.0} in [changed(one) for one in found]
    assert {"max_batch_size": 4} in [changed(one) for one in found]


@pytest.fixture(scope="module")
def few() -> Iterator[None]:
    with few_candidates():
        yield


def test_a_plan_shares_calls_where_that_saves_something(few: None) -> None:
    it = case(LatencyTargets(e2e=0.1))
    plan = make_plan(it, BASE, 500.0)
    assert [each.strategy for each in plan.strategies] == list(ITEM_STRATEGIES)
    assert plan.chosen == "dynamic"
    assert plan.best is not None
    assert plan.best.at is not None
    assert plan.best.at.missed == ()
    assert plan.best.at == it.point(config(**plan.best.settings), plan.best.rate, 200)
    assert plan.best.at.items == pytest.approx(plan.best.at.throughput)
    assert 0 < plan.best.at.busy <= 1
    assert plan.best.rate > plan.strategies[0].rate
    assert plan.replicas is not None
    assert plan.replicas.count >= 500 / plan.best.rate
    assert make_plan(pickle.loads(pickle.dumps(it)), BASE, 500.0) == plan
    lines = item_decision(plan, facts_of(it.trace), it.profile)
    assert "8 items in one call are 4.9 times as fast" in lines[1]
    assert lines[-1].endswith("Take dynamic.")


def test_where_calls_cost_nothing_a_batch_saves_nothing(few: None) -> None:
    it = case(call=0.0, calls=exact_calls(0.0, SIZE).calls)
    plan = make_plan(it, BASE, 50.0)
    assert all(each.capacity == pytest.approx(1 / SIZE) for each in plan.strategies)
    lines = item_decision(plan, facts_of(it.trace), it.profile)
    assert "a batch saves next to nothing" in lines[3]


@pytest.mark.parametrize(
    ("most", "size", "saved"),
    [
        (1, 0.0, "No: the model takes one item in a call, which costs 10 ms."),
        (4, SIZE, "4 items in one call are 3.1 times as fast"),
    ],
)
def test_advice_goes_by_the_batch_that_the_model_takes(few: None, most: int, size: float, saved: str) -> None:
    """Such as an ONNX file without a batch axis: what a plan leaves to it is not the server's default."""
    one = [call for call in exact_calls(CALL, size).calls if call.items <= most]
    it = case(size=size, calls=one * 32, max_batch_size=most)
    lines = item_decision(make_plan(it, BASE, 50.0), facts_of(it.trace), it.profile)
    assert f" A full batch of {most} takes " in lines[0]
    assert saved in lines[1]
    assert any("Do several wait" in line for line in lines) == (most > 1)


def test_modes_are_of_the_whole_answer() -> None:
    it = case()
    alone = it.alone(BASE, 200)
    assert alone.e2e == pytest.approx(CALL + SIZE)
    assert with_mode(it, BASE, "low-latency").targets == LatencyTargets(e2e=2 * alone.e2e)
    assert it.mode_targets("high-throughput", alone).e2e == inf


@pytest.mark.parametrize(
    ("settings", "rate", "by"),
    [
        ({"max_batch_size": 4}, 400.0, "batch size"),
        ({"max_batch_size": 32, "max_wait_ms": 100.0}, 50.0, "batch"),
        ({"max_batch_size": 32}, 20.0, "targets"),
        ({"max_batch_size": 32}, 3000.0, "compute"),
        ({"max_batch_size": 1}, 95.0, "batch size"),
    ],
)
def test_what_limits(settings: dict[str, Any], rate: float, by: str) -> None:
    it, wanted = case(), config(**settings)
    assert it.limit(wanted, it.run(wanted, rate, 200)).by == by


def test_the_front_limits() -> None:
    it = ItemCase(case().profile, case().trace, front=FrontCost(request=0.02))
    assert it.limit(config(), it.run(config(), 100.0, 200)).by == "front"
