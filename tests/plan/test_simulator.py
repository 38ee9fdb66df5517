"""The simulator decides as the server does, loses nobody, and says the same for the same seed."""

import random
from itertools import pairwise
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.sequences_virtual import Arrival, Machine, VirtualModel, VirtualRunner
from support.simulated import COST, exact_calls, exact_profile, noisy_profile

from chairlift.config.sequences import SequenceConfig
from chairlift.core.cost import Coefficients, CostModel
from chairlift.core.finished import ShedReason
from chairlift.core.items.limits import BatchLimits
from chairlift.engine.sequences.calibrate import calibrate
from chairlift.errors import ConfigError
from chairlift.plan.agenda import Agenda
from chairlift.plan.figures import Targets, latencies, report
from chairlift.plan.items import ItemModel
from chairlift.plan.judge import Judge
from chairlift.plan.machine_profile import FrontCost, SequenceProfile
from chairlift.plan.sequences import SequenceModel, VirtualSequences
from chairlift.plan.simulated_run import SimulatedRun
from chairlift.plan.simulator import simulate
from chairlift.plan.targets import LatencyTargets
from chairlift.plan.trace import TraceRequest
from chairlift.plan.virtual_machine import VirtualFront, VirtualMachine

FRONT = FrontCost(
    request=3e-4,
    prompt_token=1e-6,
    output_token=2e-5,
    item=1e-5,
    hop=1e-4,
    contention=0.5,
)


def model(profile: SequenceProfile | None = None, name: str = "", weight: float = 1.0, **config: Any) -> SequenceModel:
    return SequenceModel(SequenceConfig(model="formula", **config), profile or exact_profile(), name, weight)


def random_trace(seed: int, count: int = 60, rate: float = 20.0, **fields: Any) -> list[TraceRequest]:
    rng, now = random.Random(seed), 0.0
    trace = []
    for _ in range(count):
        now += rng.expovariate(rate)
        trace.append(
            TraceRequest(arrival=now, input_length=rng.randint(1, 300), output_length=rng.randint(1, 60), **fields)
        )
    return trace


requests = st.tuples(
    st.floats(0, 0.4),  # seconds since the one before
    st.integers(1, 700),  # prompt
    st.integers(1, 40),  # output
    st.sampled_from([None, None, 50]),  # max_tokens
    st.integers(-1, 1),  # priority
    st.sampled_from([False, False, False, True]),  # background
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=25),
    st.sampled_from(["continuous", "continuous", "none"]),
    st.integers(1, 6),
    st.sampled_from([48, 64, 200, 10_000]),
    st.sampled_from([8, 64, 512]),
)
def test_it_decides_as_the_engine_does(
    drawn: list[tuple[float, int, int, int | None, int, bool]], strategy: str, slots: int, num_blocks: int, budget: int
) -> None:
    """The engine with a runner that takes as long meets the same requests: each has its tokens at the same moments."""
    own = {"max_num_seqs": slots} if strategy == "continuous" else {}
    config = SequenceConfig(model="formula", strategy=strategy, max_num_batched_tokens=budget, **own)
    now, trace, arrivals = 0.0, [], []
    for since, prompt, output, most, priority, background in drawn:
        now += since
        prompt = min(prompt, num_blocks * 16 - 60)
        about: dict[str, Any] = {"priority": priority, "background": background}
        trace.append(TraceRequest(arrival=now, input_length=prompt, output_length=output, max_tokens=most, **about))
        arrivals.append(Arrival(now, prompt, output, most, **about))
    outcome = simulate([SequenceModel(config, exact_profile(num_blocks=num_blocks))], trace)
    expected = VirtualModel(config, Machine(COST, num_blocks=num_blocks)).run(iter(arrivals))
    for life, real in zip(outcome.requests, expected.lives, strict=True):
        assert life.first == pytest.approx(real.first, abs=1e-9)
        assert life.end == pytest.approx(real.done, abs=1e-9)
        assert life.num_tokens == life.request.output_length


@pytest.mark.parametrize(
    ("config", "cost", "num_blocks", "num_steps"),
    [
        ({}, COST, 10_000, 11),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 8}, COST, 10_000, 11),
        ({"max_model_len": 128}, COST, 10_000, 9),
        ({}, COST, 2, 6),
        ({}, COST._replace(step=0.2), 10_000, 3),
    ],
    ids=["all", "cut", "short contexts", "few blocks", "slow"],
)
def test_its_cost_model_begins_with_the_steps_that_a_worker_times(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], cost: Coefficients, num_blocks: int, num_steps: int
) -> None:
    served = model(exact_profile(cost, num_blocks=num_blocks), target_itl_ms=50.0, **config)
    seen: list[tuple[float, ...]] = []
    monkeypatch.setattr(CostModel, "observe", lambda self, *step: seen.append(step))
    runner = VirtualRunner(Machine(cost, num_blocks=num_blocks), 0)
    info = msgspec.structs.replace(runner.load(), max_model_len=served.config.max_model_len or 4096)
    calibrate(CostModel(), runner, info, served.config.slots, served.config.max_num_batched_tokens)
    timed = seen.copy()
    seen.clear()
    VirtualSequences(served, VirtualMachine(Agenda(), FrontCost()), "", shares_machine=False)
    assert seen == timed
    assert len(timed) == num_steps


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 100), st.integers(1, 20)), min_size=1, max_size=20),
    st.integers(1, 4),
)
def test_steps_of_one_length_give_the_schedule_that_one_writes_by_hand(
    drawn: list[tuple[float, int, int]], slots: int
) -> None:
    step, gap, now = 0.01, 0.002, 0.0
    trace = []
    for since, prompt, output in drawn:
        now += since
        trace.append(TraceRequest(arrival=now, input_length=prompt, output_length=output))
    profile = exact_profile(Coefficients(step, 0.0, 0.0, 0.0), gap)
    outcome = simulate([model(profile, max_num_seqs=slots)], trace)

    coming, running, expected = list(enumerate(trace)), [], [[] for _ in trace]
    now = 0.0
    while coming or running:
        if not running:
            now = max(now, coming[0][1].arrival)
        else:
            # Who comes just as a step ends is in the next or not, by how sums are rounded.
            assume(all(abs(each.arrival - now) > 1e-9 for _, each in coming))
        while coming and coming[0][1].arrival <= now and len(running) < slots:
            running.append(coming.pop(0)[0])
        now += step + gap
        for index in running:
            expected[index].append(now)
        running = [index for index in running if len(expected[index]) < trace[index].output_length]
    for life, times in zip(outcome.requests, expected, strict=True):
        assert outcome.token_times(life) == pytest.approx(times, abs=1e-9)
        assert outcome.token_gaps(life) == pytest.approx([step + gap] * (len(times) - 1), abs=1e-9)


def test_a_window_and_a_full_batch_let_a_closed_batch_leave() -> None:
    profile = exact_profile(Coefficients(0.01, 0.0, 0.0, 0.0))
    trace = [TraceRequest(arrival=at, input_length=8, output_length=2) for at in (0.0, 0.004, 0.1, 0.101, 0.102)]
    late = simulate([model(profile, strategy="dynamic", batch_size=3, max_wait_ms=20.0)], trace)
    firsts = [life.scheduled for life in late.requests]
    # Two leave when the first has waited 20 ms (timers count whole milliseconds), three when they are three.
    assert firsts == pytest.approx([0.02, 0.02, 0.102, 0.102, 0.102], abs=1.1e-3)
    static = simulate([model(profile, strategy="static", batch_size=3)], trace)
    assert [life.scheduled for life in static.requests] == pytest.approx([0.1, 0.1, 0.1, 0.12, 0.12])


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_same_seed_gives_the_same_report(replicas: int) -> None:
    def run(seed: int) -> bytes:
        outcome = simulate([model(noisy_profile())], random_trace(1), front=FRONT, replicas=replicas, seed=seed)
        return msgspec.json.encode(report(outcome))

    assert run(5) == run(5)
    assert run(5) != run(6)


def check_complete(outcome: SimulatedRun, count: int) -> None:
    """Everybody is answered, refused or shed, once, at moments that follow each other."""
    assert len(outcome.requests) == count
    for life in outcome.requests:
        assert (life.end is not None) + (life.shed is not None) + (life.refusal is not None) == 1
        if life.shed is not None:
            assert life.shed_at is not None
            assert life.shed_at >= life.request.arrival
            if not life.request.items:
                times = outcome.token_times(life)
                assert len(times) == life.num_tokens
                assert all(moment <= life.shed_at for moment in times)
        if life.end is None:
            continue
        known = life.computed if life.request.items else life.end
        assert life.deadline is None or (known or 0.0) <= life.deadline
        assert life.scheduled is not None
        assert life.first is not None
        assert life.request.arrival <= life.scheduled <= life.first <= life.end
        if not life.request.items:
            times = outcome.token_times(life)
            assert len(times) == life.num_tokens == life.request.output_length
            assert times[0] == life.first
            assert times[-1] == life.end
            assert all(gap > 0 for gap in outcome.token_gaps(life))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**20),
    st.sampled_from(["continuous", "dynamic", "static", "none"]),
    st.sampled_from([64, 100, 10_000]),
    st.sampled_from([None, 400.0]),
    st.sampled_from([None, 60.0]),
    st.sampled_from([None, 0.5]),
    st.integers(1, 2),
)
def test_nobody_is_lost(
    seed: int,
    strategy: str,
    num_blocks: int,
    ttft: float | None,
    itl: float | None,
    timeout: float | None,
    replicas: int,
) -> None:
    rng = random.Random(seed)
    own: dict[str, Any] = {}
    if strategy == "continuous":
        own = {"max_num_seqs": rng.randint(1, 12), "target_itl_ms": itl}
    elif strategy != "none":
        own = {"batch_size": rng.randint(1, 5)}
    if strategy in ("none", "continuous"):
        own["target_ttft_ms"] = ttft
    trace = []
    for request in random_trace(seed, rate=60.0):
        more = {
            "max_tokens": rng.choice([None, request.output_length + 20]),
            "background": rng.random() < 0.2,
            "hash_ids": (rng.randint(0, 2), rng.randint(0, 2)) if rng.random() < 0.5 else (),
            "timeout": timeout if rng.random() < 0.5 else None,
            "priority": rng.randint(-1, 1),
            "input_length": 5000 if rng.random() < 0.03 else request.input_length,
        }
        trace.append(msgspec.structs.replace(request, **more))
    served = model(noisy_profile(num_blocks=num_blocks), strategy=strategy, **own)
    outcome = simulate([served], trace, front=FRONT, replicas=replicas, seed=seed)
    check_complete(outcome, len(trace))
    assert all((life.refusal is not None) == (life.request.input_length > 4000) for life in outcome.requests)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**20))
def test_nobody_is_lost_where_models_take_turns(seed: int) -> None:
    rng = random.Random(seed)
    trace = [
        msgspec.structs.replace(
            request, model=(name := rng.choice("abc")), items=2 if name == "c" else 0, background=rng.random() < 0.2
        )
        for request in random_trace(seed, count=80)
    ]
    models = [
        model(noisy_profile(), "a"),
        model(exact_profile(), "b", 2.0, max_num_seqs=4),
        ItemModel(BatchLimits(max_batch_size=8), exact_calls(0.01, 1e-5), "c", instances=2),
    ]
    check_complete(simulate(models, trace, front=FRONT, replicas=2, seed=seed), len(trace))


def test_models_have_the_machine_in_proportion_to_their_weights() -> None:
    """Both have far too much to do, for as long as requests come: the heavier one is served three times as long."""
    trace = sorted(
        (each for name in "ab" for each in random_trace(1, 300, 100.0, model=name)), key=lambda each: each.arrival
    )
    outcome = simulate([model(None, "a", 3.0), model(None, "b", 1.0)], trace)
    until = trace[-1].arrival
    served = {
        name: sum(length for began, length in zip(steps.began, steps.seconds, strict=True) if 0.2 < began < until)
        for (name, _), steps in outcome.steps.items()
    }
    assert served["a"] / served["b"] == pytest.approx(3.0, rel=0.05)
    both = sorted(
        (began, began + length)
        for steps in outcome.steps.values()
        for began, length in zip(steps.began, steps.seconds, strict=True)
    )
    assert all(end <= began + 1e-9 for (_, end), (began, _) in pairwise(both)), "two at a time"


def test_common_prefixes_are_computed_once() -> None:
    trace = [
        TraceRequest(arrival=float(index), input_length=1100, output_length=2, hash_ids=(7, 8, 100 + index))
        for index in range(4)
    ]
    outcome = simulate([model()], trace)
    assert [life.cached_tokens for life in outcome.requests] == [0, 1024, 1024, 1024]
    apart = [msgspec.structs.replace(request, tenant=str(index)) for index, request in enumerate(trace)]
    assert all(life.cached_tokens == 0 for life in simulate([model()], apart).requests)


def test_more_replicas_share_the_load() -> None:
    trace = random_trace(2, 200, 60.0)
    one, two = (report(simulate([model(max_num_seqs=8)], trace, replicas=count)) for count in (1, 2))
    assert two.e2e.p50 < one.e2e.p50
    steps = [gauges.steps for gauges in two.gauges.values()]
    assert max(steps) < 1.2 * min(steps)


def test_overload_is_shed_as_the_server_sheds_it() -> None:
    """Far above capacity, those who are let in have their first tokens in time."""
    trace = random_trace(3, 600, 60.0)
    outcome = simulate([model(max_num_seqs=8, target_ttft_ms=500.0)], trace)
    found = report(outcome, Targets(ttft=0.5))
    assert found.shed[ShedReason.TTFT] > 100
    assert found.ttft.p95 <= 0.5
    free = report(simulate([model(max_num_seqs=8)], trace), Targets(ttft=0.5))
    assert found.goodput > 2 * free.goodput


def test_the_first_deadline_is_held_against_all_who_wait() -> None:
    """Without a target the server learns of the others only then, those who wait in the worker included."""
    crowd = [TraceRequest(arrival=0.0, input_length=10, output_length=100) for _ in range(200)]
    late = TraceRequest(arrival=5.0, input_length=10, output_length=10, timeout=1.0)
    outcome = simulate([model(max_num_seqs=4)], [*crowd, late])
    assert [life.shed for life in outcome.requests] == [None] * 200 + [ShedReason.DEADLINE]


def test_whoever_is_not_done_by_its_deadline_makes_room() -> None:
    """By hand: one slot, steps of 50 ms. The step that runs at the deadline is computed, and nobody gets its token."""
    profile = exact_profile(Coefficients(0.05, 0.0, 0.0, 0.0))
    trace = [
        TraceRequest(arrival=0.0, input_length=40, output_length=100, timeout=1.02),
        TraceRequest(arrival=0.5, input_length=10, output_length=2),
    ]
    outcome = simulate([model(profile, max_num_seqs=1)], trace)
    late, other = outcome.requests
    assert (late.shed, late.shed_at, late.end) == (ShedReason.DEADLINE, 1.02, None)
    assert outcome.token_times(late) == pytest.approx([0.05 * (1 + step) for step in range(20)])
    assert late.num_tokens == 20
    assert (other.scheduled, other.end) == pytest.approx((1.05, 1.15))
    (steps,) = outcome.steps.values()
    assert steps.kv_blocks[19:] == [4, 4, 1, 1]
    found = report(outcome)
    assert (found.answered, found.shed) == (1, {"deadline": 1})
    assert latencies(outcome, 99.0).e2e == latencies(outcome, 99.0).ttft == inf
    assert latencies(outcome, 50.0).e2e == pytest.approx(0.65)
    assert Judge(LatencyTargets(e2e=9.0), trace).has_missed(outcome, 1.15)


@pytest.mark.parametrize(
    ("length", "timeout", "first", "num_tokens"),
    [(1, 0.13, None, 0), (30, 0.13, None, 0), (2, 0.23, 0.14, 1), (30, 0.21, 0.14, 1)],
    ids=["its only token", "its first", "its last", "one in between"],
)
def test_what_reaches_its_client_after_the_deadline_comes_too_late(
    length: int, timeout: float, first: float | None, num_tokens: int
) -> None:
    """A token is 20 ms on its way, and the next step begins meanwhile."""
    profile = exact_profile(Coefficients(0.1, 0.0, 0.0, 0.0))
    trace = [
        TraceRequest(arrival=0.0, input_length=10, output_length=length, timeout=timeout),
        TraceRequest(arrival=0.0, input_length=10, output_length=3),
    ]
    outcome = simulate([model(profile, max_num_seqs=1)], trace, front=FrontCost(hop=0.02))
    late, other = outcome.requests
    assert (late.first, late.num_tokens) == (pytest.approx(first), num_tokens)
    assert (late.shed, late.shed_at, late.end) == (ShedReason.DEADLINE, timeout, None)
    # One that has had its last token leaves its slot at once, another after the step in which the worker hears of it.
    begins = 0.02 + 0.1 * min(length, 2 if timeout < 0.2 else 3)
    assert (other.scheduled, other.end) == pytest.approx((begins, begins + 0.32))


deadlines = st.tuples(
    st.floats(0, 0.2),  # seconds since the one before
    st.integers(1, 60),  # prompt
    st.integers(1, 40),  # output
    st.sampled_from([None, 0.1, 0.3]),  # timeout
)


@settings(max_examples=60, deadline=None)
@given(st.lists(deadlines, min_size=1, max_size=25), st.integers(1, 6))
def test_who_is_given_up_takes_what_one_takes_that_ends_with_that_step(
    drawn: list[tuple[float, int, int, float | None]], slots: int
) -> None:
    now, trace = 0.0, []
    for since, prompt, output, timeout in drawn:
        now += since
        trace.append(TraceRequest(arrival=now, input_length=prompt, output_length=output, timeout=timeout))
    served = model(max_num_seqs=slots)
    outcome = simulate([served], trace)
    check_complete(outcome, len(trace))
    # Whoever never ran takes nothing, and of others the token of the step at the deadline is computed in vain.
    ran = [life for life in outcome.requests if life.scheduled is not None]
    lengths = [life.request.output_length if life.shed is None else life.num_tokens + 1 for life in ran]
    plain = [
        msgspec.structs.replace(life.request, timeout=None, output_length=length)
        for life, length in zip(ran, lengths, strict=True)
    ]
    expected = simulate([served], plain)
    for life, other in zip(ran, expected.requests, strict=True):
        assert life.scheduled == pytest.approx(other.scheduled, abs=1e-9)
        if life.shed is None:
            assert (life.first, life.end) == pytest.approx((other.first, other.end), abs=1e-9)
    (steps,), (others,) = outcome.steps.values(), expected.steps.values()
    assert steps.seconds == pytest.approx(others.seconds, abs=1e-12)
    assert (steps.running, steps.tokens, steps.kv_blocks) == (others.running, others.tokens, others.kv_blocks)


@pytest.mark.parametrize("config", [{}, {"strategy": "static", "batch_size": 7}])
def test_a_deadline_that_nobody_misses_changes_nothing(config: dict[str, Any]) -> None:
    """Nor does a batch that is not full wait for it once all else is over."""
    trace = random_trace(4)
    calm = [msgspec.structs.replace(request, timeout=3600.0) for request in trace]
    free, bound = (simulate([model(noisy_profile(), **config)], each, front=FRONT) for each in (trace, calm))
    assert [life.end for life in bound.requests] == [life.end for life in free.requests]
    assert bound.steps == free.steps


def test_a_full_queue_refuses() -> None:
    served = SequenceModel(SequenceConfig(model="formula", max_num_seqs=1), exact_profile(), max_waiting=3)
    trace = [TraceRequest(arrival=0.0, input_length=10, output_length=50) for _ in range(9)]
    outcome = simulate([served], trace)
    assert [life.shed for life in outcome.requests] == [None] * 3 + [ShedReason.QUEUE_FULL] * 6


def test_what_the_front_does_takes_time() -> None:
    """By hand: a request and its prompt's tokens, a message, a step, a message, and a token."""
    front = FrontCost(request=0.01, prompt_token=0.001, output_token=0.02, hop=0.003)
    profile = exact_profile(Coefficients(0.1, 0.0, 0.0, 0.0), gap=0.05)
    trace = [TraceRequest(arrival=1.0, input_length=10, output_length=2)]
    (life,) = simulate([model(profile)], trace, front=front).requests
    assert life.scheduled == pytest.approx(1.0 + 0.01 + 10 * 0.001 + 0.003)
    assert life.first == pytest.approx(life.scheduled + 0.1 + 0.05 + 0.003 + 0.02)
    # The next step began while the front was at the first token.
    assert life.end == pytest.approx(life.first + 0.15)


def test_what_the_front_does_for_requests_slows_down_the_next_step() -> None:
    front = FrontCost(request=0.01, prompt_token=0.001, output_token=0.002)
    profile = exact_profile(Coefficients(0.1, 0.0, 0.0, 0.0), gap=0.05)
    trace = [
        TraceRequest(arrival=1.0, input_length=10, output_length=3),
        TraceRequest(arrival=1.05, input_length=20, output_length=1),
    ]
    freely = simulate([model(profile)], trace, front=front).requests[0]
    slowly = simulate([model(profile)], trace, front=msgspec.structs.replace(front, contention=2.0)).requests[0]
    assert slowly.first == freely.first
    assert slowly.end == pytest.approx(freely.end + 2.0 * 0.03)
    # A worker has every second turn at least.
    hardly = simulate([model(profile)], trace, front=msgspec.structs.replace(front, contention=50.0)).requests[0]
    assert hardly.end == pytest.approx(freely.end + 0.1)


def test_what_the_front_has_yet_to_do_slows_down_nobody_yet() -> None:
    front = VirtualFront(FrontCost(contention=2.0))
    for _ in range(4):
        front.work(1.0, 0.1)
    assert front.slowdown(1.25, 1.0) == pytest.approx(2.0 * 0.25)
    assert front.slowdown(1.35, 1.0) == pytest.approx(2.0 * 0.1)
    front.work(1.36, 0.2, slows_down=False)
    assert front.slowdown(2.0, 1.0) == pytest.approx(2.0 * 0.05)
    assert front.slowdown(3.0, 1.0) == 0.0


def test_mistakes_are_told() -> None:
    early = [TraceRequest(arrival=at, input_length=1, output_length=1) for at in (1.0, 0.5)]
    with pytest.raises(ConfigError, match="request 1 of the trace comes before"):
        simulate([model()], early)
    stranger = [TraceRequest(arrival=0.0, input_length=1, model="c")]
    with pytest.raises(ConfigError, match="'c', which is not among a, b"):
        simulate([model(name="a"), model(name="b")], stranger)
    with pytest.raises(ConfigError, match="the same name"):
        simulate([model(), model()], [])
    with pytest.raises(ConfigError, match="a model and a replica"):
        simulate([model()], [], replicas=0)
