"""The twin of a model whose past is known: it says of the past what was, and of changes what they would have done."""

import os
import subprocess
import sys
from itertools import cycle
from typing import Any

import msgspec
import pytest
from support.past import BEGAN, seen_requests, seen_steps, served, traffic
from support.simulated import COST, exact_calls, exact_profile

from chairlift.config.sequences import SequenceConfig
from chairlift.core.cost import CostModel, ExpertReads
from chairlift.core.items.limits import BatchLimits
from chairlift.plan.figures import Percentiles
from chairlift.plan.items import ItemModel
from chairlift.plan.machine_profile import CallSample
from chairlift.plan.seen_traffic import SeenRequest, SeenStep, sequence_profile, step_samples
from chairlift.plan.simulated_run import SimulatedRun
from chairlift.plan.simulator import simulate
from chairlift.plan.trace import TraceRequest
from chairlift.plan.what_if import Change, ItemQuestion, SequenceQuestion, WhatIfAnswer, _SequenceTwin, answer

FEW = SequenceConfig(model="formula", max_num_seqs=2)
MANY = SequenceConfig(model="formula", max_num_seqs=32)


def asked(run: SimulatedRun, config: SequenceConfig, *changes: Change, **more: Any) -> SequenceQuestion:
    about: dict[str, Any] = {"profile": exact_profile(), "cost": COST, "max_waiting": 1024, "since": BEGAN} | more
    about = {"loaded_slots": config.slots} | about
    about["profile"] = msgspec.structs.replace(about["profile"], steps=[])
    return SequenceQuestion(
        requests=seen_requests(run), steps=seen_steps(run), changes=list(changes), config=config, **about
    )


def told(question: SequenceQuestion | ItemQuestion) -> WhatIfAnswer:
    return answer(question, lambda: False)


def test_steps_are_known_again_by_those_who_were_in_them() -> None:
    run = served(MANY, traffic())
    samples = step_samples(seen_steps(run), seen_requests(run), 16)
    steps = seen_steps(run)
    assert [(each.sequences, each.tokens) for each in samples] == [(each.requests, each.tokens) for each in steps]
    for sample in samples:
        expected = COST.step + COST.token * sample.tokens + COST.kv_token * sample.kv_tokens + COST.pair * sample.pairs
        assert expected == pytest.approx(sample.seconds, rel=0.002), "a formula of what the step held"
    gaps = [each.gap for each in samples if each.gap is not None]
    assert gaps
    assert max(gaps) < 1e-6, "who waits for the next request has no gap"


def test_a_client_that_left_leaves_no_gap() -> None:
    """The step that was the last had it running; then nothing did until the next one came."""
    gone = SeenRequest(BEGAN, 10, 5, scheduled=BEGAN, first=BEGAN + 1, ended=BEGAN + 2.1)
    later = SeenRequest(BEGAN + 50, 10, 5, scheduled=BEGAN + 50, first=BEGAN + 51, ended=BEGAN + 60)
    steps = [SeenStep(BEGAN + end, 0.9, 1, tokens, 1, 1) for end, tokens in ((0.95, 10), (2.0, 1), (51.0, 10))]
    first, second, third = step_samples(steps, [gone, later], 16)
    assert first.gap == pytest.approx(0.15)
    assert (second.gap, third.gap) == (None, None)


def test_steps_of_nobody_known_hold_what_the_kv_blocks_say() -> None:
    steps = [SeenStep(BEGAN + index, 0.5, 2, 2, 2, 10) for index in range(3)]
    assert [(each.kv_tokens, each.pairs) for each in step_samples(steps, [], 16)] == [(160, 160)] * 3
    one = SeenRequest(BEGAN - 10.0, 100, 50, scheduled=BEGAN - 9, first=BEGAN - 8, ended=BEGAN + 90)
    for sample in step_samples(steps, [one], 16):
        assert 2 * 100 < sample.kv_tokens < 2 * 150, "the other is taken to be like it"


def test_the_past_is_told_as_it_was() -> None:
    run = served(FEW, traffic())
    found = told(asked(run, FEW))
    assert found.changed == []
    expected = Percentiles.of([life.ttft for life in run.requests if life.ttft is not None])
    measured, now = found.measured, found.now.figures
    assert (measured.requests, now.requests, now.refused) == (60, 60, 0)
    assert measured.ttft is not None
    assert now.ttft is not None
    assert measured.ttft.p50 == pytest.approx(expected.p50)
    assert measured.ttft.p95 == pytest.approx(expected.p95)
    for one, other in (
        (measured.ttft, now.ttft),
        (measured.itl, now.itl),
        (measured.latency, now.latency),
    ):
        assert one is not None
        assert other is not None
        assert (one.p50, one.p95) == pytest.approx((other.p50, other.p95), rel=0.03)
    assert now.outputs_per_s == pytest.approx(measured.outputs_per_s, rel=0.03)
    assert now.requests_per_s == pytest.approx(measured.requests_per_s, rel=0.03)


@pytest.mark.parametrize("slow_from", [0.0, 6.0, 20.0])
def test_a_machine_that_was_slow_for_a_while_was_so_then(slow_from: float) -> None:
    """Whoever came in these ten seconds waited, and whoever came later stood behind them."""
    profile = exact_profile()
    moments = [0.02 * index for index in range(3000)]
    profile.steps = [
        msgspec.structs.replace(
            each, seconds=each.seconds * (3.0 if 0.0 <= began - slow_from < 10.0 else 1.0), began=began
        )
        for began, each in zip(moments, cycle(profile.steps), strict=False)
    ]
    found = told(asked(served(FEW, traffic(200), profile), FEW))
    assert found.measured.ttft is not None
    assert found.now.figures.ttft is not None
    measured, now = found.measured.ttft, found.now.figures.ttft
    assert now.p50 == pytest.approx(measured.p50, rel=0.2)
    assert now.p95 == pytest.approx(measured.p95, rel=0.12)


def test_a_change_is_told_as_it_would_have_been() -> None:
    trace = traffic()
    found = told(asked(served(FEW, trace), FEW, Change(config=MANY)))
    really = told(asked(served(MANY, trace), MANY))
    (changed,) = found.changed
    assert changed is not None
    assert changed.figures.ttft is not None
    assert really.measured.ttft is not None
    assert changed.figures.ttft.p95 == pytest.approx(really.measured.ttft.p95, rel=0.05)
    assert found.measured.ttft is not None
    assert changed.figures.ttft.p95 < found.measured.ttft.p95 / 2


def test_only_those_who_came_since_then_and_were_answered_are_told_of() -> None:
    run = served(FEW, traffic())
    question = asked(run, FEW)
    question.since = question.requests[20].arrival
    question.requests[30] = msgspec.structs.replace(question.requests[30], answered=False)
    found = told(question)
    assert (found.measured.requests, found.now.figures.requests) == (39, 39)


def test_who_is_under_way_is_there_too() -> None:
    run = served(FEW, traffic(30))
    alone = told(asked(run, FEW))
    question = asked(run, FEW)
    crowd = [SeenRequest(BEGAN + 0.01 * index, 300, 0, most=40) for index in range(20)]
    question.requests = sorted([*question.requests, *crowd], key=lambda each: each.arrival)
    found = told(question)
    assert found.now.figures.requests == 30
    assert found.now.figures.ttft is not None
    assert alone.now.figures.ttft is not None
    assert found.now.figures.ttft.p50 > 2 * alone.now.figures.ttft.p50


def test_one_request_is_told_of_by_itself() -> None:
    run = served(FEW, traffic())
    late = max(range(60), key=lambda index: run.requests[index].ttft or 0.0)
    life = run.requests[late]
    question = asked(run, FEW, Change(config=MANY), Change(priority=-1000), Change(replicas=2), target=late)
    found = told(question)
    assert found.now.target is not None
    assert found.now.target.total_s == pytest.approx(life.e2e, rel=0.05)
    for each in found.changed:
        assert each is not None
        assert each.target is not None
        assert each.target.total_s is not None
        assert each.target.total_s < 0.7 * (life.e2e or 0.0)


def test_a_prompt_that_had_been_computed_before_is_not_computed_again() -> None:
    slow = exact_profile(COST._replace(token=5e-3))
    run = served(MANY, traffic(rate=0.1, input_length=300, output_length=5), slow)
    alone = min(range(60), key=lambda index: run.requests[index].ttft or 0.0)
    question = asked(run, MANY, Change(cached=True), target=alone, profile=slow, cost=slow.cost)
    found = told(question)
    (cached,) = found.changed
    assert found.now.target is not None
    assert cached is not None
    assert cached.target is not None
    assert (found.now.target.first_s or 0.0) > 1.0
    assert (cached.target.first_s or 0.0) < 0.2
    assert cached.figures.requests == 60, "what was put before is not counted"


def test_prefixes_that_were_found_are_found_again() -> None:
    shared = traffic(rate=1.0, input_length=320, output_length=5, hash_ids=tuple(range(20)), block_size=16)
    slow = exact_profile(COST._replace(token=5e-3))
    run = served(MANY, shared, slow)
    assert run.requests[30].cached_tokens > 300
    found = told(asked(run, MANY, profile=slow, cost=slow.cost))
    assert found.measured.ttft is not None
    assert found.now.figures.ttft is not None
    assert found.now.figures.ttft.p50 == pytest.approx(found.measured.ttft.p50, rel=0.05)
    assert found.now.figures.ttft.p50 < 0.2


def test_what_there_is_no_time_for_is_left_out() -> None:
    run = served(FEW, traffic())
    question = asked(run, FEW, Change(config=MANY), Change(replicas=2))
    looks = iter([False, True])
    found = answer(question, lambda: next(looks, True))
    assert [each is None for each in found.changed] == [False, True]
    looks = iter([False] * 3 + [True])
    assert all(answer(question, lambda: next(looks, True)).changed), "another seed that does not end counts for nothing"


def test_kv_blocks_follow_slots_where_these_were_all_that_they_could_fill() -> None:
    long = traffic(40, rate=50.0, input_length=300, output_length=40)
    bounded = exact_profile(num_blocks=2 * 256)  # two sequences of 4096 tokens
    run = served(FEW, long, bounded)
    (more,) = told(asked(run, FEW, Change(config=MANY), profile=bounded)).changed
    scarce = exact_profile(num_blocks=50)  # less than that: memory is short
    run = served(FEW, long, scarce)
    (short,) = told(asked(run, FEW, Change(config=MANY), profile=scarce)).changed
    assert more is not None
    assert short is not None
    assert more.figures.outputs_per_s > 2 * short.figures.outputs_per_s


@pytest.mark.parametrize(
    ("known", "loaded_slots", "config", "blocks"),
    [
        (2 * 256, 32, MANY, 2 * 256),  # memory was short, though what is left of the slots can't fill it
        (32 * 256, 32, FEW, 32 * 256),  # it is all there, however few there are by now
        (2 * 256, 2, MANY, 32 * 256),
    ],
    ids=["short", "fewer slots", "more slots"],
)
def test_kv_memory_is_what_it_was_made_for(known: int, loaded_slots: int, config: SequenceConfig, blocks: int) -> None:
    """Two slots are left, of so many, since somebody set that."""
    profile = exact_profile(num_blocks=known)
    question = asked(served(FEW, traffic(5), profile), FEW, profile=profile, loaded_slots=loaded_slots)
    assert _SequenceTwin(question)._num_blocks(config) == blocks


def test_what_could_never_be_served_counts_as_refused() -> None:
    tiny = SequenceConfig(model="formula", max_num_seqs=2, max_model_len=200)
    run = served(FEW, traffic())
    (found,) = told(asked(run, FEW, Change(config=tiny))).changed
    assert found is not None
    assert found.figures.refused == sum(each.input_length + each.output_length > 200 for each in traffic())


def item_question(limits: BatchLimits, run: SimulatedRun, *changes: Change, **more: Any) -> ItemQuestion:
    # As a server notes them: from when it had read one, until it knew the answer.
    requests = [
        SeenRequest(
            life.read or 0.0,
            life.request.input_length * life.request.items,
            life.request.items,
            answered=True,
            scheduled=life.scheduled,
            first=life.computed,
            ended=life.computed,
        )
        for life in run.requests
    ]
    return ItemQuestion(
        requests=requests,
        changes=list(changes),
        since=0.0,
        limits=limits,
        instances=1,
        ahead=True,
        sized=True,
        calls=exact_calls(0.05, 1e-3).calls,
        **more,
    )


def test_items_have_a_twin_too() -> None:
    profile = exact_calls(0.05, 1e-3)
    rng_trace = traffic(80, rate=40.0)
    trace = [TraceRequest(arrival=each.arrival, input_length=8, items=1) for each in rng_trace]
    one, many = BatchLimits(max_batch_size=1), BatchLimits(max_batch_size=16)
    run = simulate([ItemModel(one, profile)], trace)
    really = simulate([ItemModel(many, profile)], trace)
    found = told(item_question(one, run, Change(limits=many), Change(priority=-1000), target=40))
    assert found.measured.latency is not None
    assert found.now.figures.latency is not None
    assert found.now.figures.latency.p95 == pytest.approx(found.measured.latency.p95, rel=0.02)
    larger, urgent = found.changed
    assert larger is not None
    assert larger.figures.latency is not None
    expected = Percentiles.of([life.e2e for life in really.requests if life.e2e is not None])
    assert larger.figures.latency.p95 == pytest.approx(expected.p95, rel=0.1)
    assert urgent is not None
    assert urgent.target is not None
    assert found.now.target is not None
    assert (urgent.target.total_s or 0.0) < 0.5 * (found.now.target.total_s or 0.0)


def test_the_ways_of_calls_and_what_came_before_are_in_the_twin() -> None:
    bare, limits = exact_calls(0.05, 1e-3), BatchLimits(max_batch_size=4)
    # By turns sent to an instance that waited, and ahead.
    calls = [
        msgspec.structs.replace(call, lag=0.02, gap=0.01 if ahead else None)
        for call in bare.calls
        for ahead in (False, True)
    ]
    profile = msgspec.structs.replace(bare, calls=calls)
    trace = [TraceRequest(arrival=each.arrival, input_length=8, items=2) for each in traffic(80, rate=15.0)]

    def off(busy_s: float, told_busy_s: float, calls: list[CallSample]) -> float:
        run = simulate([ItemModel(limits, profile, busy_s=busy_s)], trace)
        question = msgspec.structs.replace(item_question(limits, run), calls=calls)
        # A server notes when a batch left.
        first = question.requests[0]
        question.requests[0] = msgspec.structs.replace(first, scheduled=first.arrival + told_busy_s)
        found = told(question)
        assert found.measured.latency is not None
        assert found.now.figures.latency is not None
        return found.now.figures.latency.p50 / found.measured.latency.p50 - 1

    assert off(0.0, 0.0, calls) == pytest.approx(0.0, abs=0.03)
    assert off(0.0, 0.0, bare.calls) < -0.1
    assert off(2.0, 2.0, calls) == pytest.approx(0.0, abs=0.03)
    assert off(2.0, 0.0, calls) < -0.5


def test_what_steps_of_experts_cost_is_what_all_of_them_take() -> None:
    """One token reads an eighth of them, and 32 nearly all."""
    experts, bare = ExpertReads(0.9, 0.125), exact_profile()
    steps = [
        msgspec.structs.replace(each, seconds=each.seconds - (1 - experts.read(each.tokens)) * COST.step)
        for each in bare.steps
    ]
    mixture = msgspec.structs.replace(bare, steps=steps, experts=experts)
    run = served(MANY, traffic(120, rate=20.0), mixture)
    found = sequence_profile(seen_steps(run), seen_requests(run), None, mixture)
    assert found.experts == experts
    assert found.cost.step == pytest.approx(COST.step, rel=0.01)


def test_what_steps_cost_is_learned_of_them_where_the_worker_has_not_told() -> None:
    run = served(FEW, traffic())
    found = told(asked(run, FEW, cost=None))
    assert found.measured.itl is not None
    assert found.now.figures.itl is not None
    assert found.now.figures.itl.p50 == pytest.approx(found.measured.itl.p50, rel=0.05)
    assert CostModel().num_observed == 0


@pytest.mark.processes
def test_the_process_answers_and_takes_only_what_others_leave() -> None:
    run = served(FEW, traffic())
    question = asked(run, FEW, Change(config=MANY))
    command = [sys.executable, "-m", "chairlift.plan.what_if_process"]
    done = subprocess.run(
        command, input=msgspec.msgpack.encode(question), capture_output=True, timeout=100, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    found = msgspec.msgpack.decode(done.stdout, type=WhatIfAnswer)
    assert (found.now, found.changed) == (told(question).now, told(question).changed), "the same, the same outcome"
    said = (
        "import chairlift.plan.what_if_process as p, os, resource, signal\n"
        "p._be_modest()\n"
        "print(os.sched_getscheduler(0) == os.SCHED_IDLE, os.nice(0), resource.getrlimit(resource.RLIMIT_CPU)[1],"
        " resource.getrlimit(resource.RLIMIT_AS)[1] <= 2**30, signal.alarm(0) > 0)"
    )
    limits = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=100)
    assert limits.stdout.split() == ["True", "19", "5", "True", "True"], limits.stderr
