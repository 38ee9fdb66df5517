"""Background requests to a decoder: they record in empty slots, yield at once, and come to the same text."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.model_factory import model_folder
from support.sequences_world import Setup, World, make_request
from support.streams import num_tokens
from support.stub_runner import spare_workers_torch

from chairlift.config.sequences import SequenceConfig
from chairlift.core.decision import Reason
from chairlift.core.sequences.budget import FLOOR, LatencyBudget
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.step import Step, StepResult
from chairlift.engine.sequences.client import SequenceClient
from chairlift.engine.sequences.engine import Engine
from chairlift.errors import QueueFull
from chairlift.runners.decoder.runner import DecoderRunner

GREEDY = SamplingParams(temperature=0, max_tokens=None)


def world(*requests: Request, **setup: Any) -> World:
    """A checked scheduler with 4 slots, 64 blocks of 4 tokens and 64 tokens a step, unless told otherwise."""
    made = World(Setup(**setup))
    for request in requests:
        assert made.add(request)
    return made


def later(id: str, prompt: Any, max_tokens: int = 8, **fields: Any) -> Request:
    return make_request(id, prompt, max_tokens, background=True, **fields)


def go(w: World, yields: bool = False) -> Step | None:
    step = w.schedule(yields)
    if step is not None:
        w.update({name: [0] for name in step.num_tokens}, {})
    return step


def why(w: World, name: str) -> Reason:
    decision = w.scheduler.explain(name)
    assert decision is not None
    return decision.reason


# Who goes first


def test_live_requests_are_admitted_first_whatever_their_priorities() -> None:
    w = world(later("job", 5, priority=-9), make_request("a", 5, priority=9))
    assert go(w).num_tokens == {"a": 5}
    assert why(w, "job") is Reason.LIVE


def test_a_prompt_pauses_background_requests_which_keep_their_blocks() -> None:
    w = world(later("job", 6), max_num_batched_tokens=10)
    go(w)
    w.add(make_request("a", 25))
    (job,) = w.scheduler.background.running
    table = list(job.block_table)
    assert [go(w).num_tokens for _ in range(2)] == [{"a": 10}, {"a": 10}]
    assert (why(w, "job"), job.block_table) == (Reason.LIVE, table)
    assert go(w).num_tokens == {"a": 5}
    assert go(w).num_tokens == {"a": 1, "job": 1}
    assert why(w, "job") is Reason.ADMITTED


def test_a_prompt_of_which_one_token_is_left_still_goes_alone() -> None:
    w = world(later("job", 6), max_num_batched_tokens=10)
    go(w)
    w.add(make_request("a", 11))
    assert [go(w).num_tokens for _ in range(3)] == [{"a": 10}, {"a": 1}, {"a": 1, "job": 1}]


def test_nobody_is_admitted_in_the_background_while_a_live_request_waits() -> None:
    w = world(make_request("a", 4), make_request("b", 4), later("job", 4), strategy="none")
    go(w)
    assert [why(w, name) for name in ("a", "b", "job")] == [Reason.ADMITTED, Reason.SLOTS, Reason.LIVE]


def test_they_ride_while_live_ones_only_wait_for_company() -> None:
    w = world(make_request("a", 4), later("job", 4), strategy="static", slots=2)
    assert go(w).num_tokens == {"job": 4}
    assert why(w, "a") is Reason.BATCH


def test_another_models_live_requests_come_first_too() -> None:
    w = world(make_request("a", 4), later("job", 4))
    go(w)
    go(w)
    assert go(w, yields=True).num_tokens == {"a": 1}
    assert go(w).num_tokens == {"a": 1, "job": 1}


# Places


def test_the_youngest_gives_up_its_slot_and_finds_its_prefix_again() -> None:
    w = world(later("old", 9), later("young", 9), slots=2)
    go(w)
    w.add(make_request("a", 9, max_tokens=2))
    step = go(w)
    assert step.num_tokens == {"a": 9}
    assert step.released == ["young"]
    assert why(w, "young") is Reason.LIVE
    go(w)
    resumed = go(w)
    assert resumed.started[0].request.id == "young"
    assert resumed.started[0].num_computed_tokens == 8
    assert resumed.num_tokens == {"old": 1, "young": 2}


def test_a_live_request_takes_the_blocks_it_needs_and_no_more() -> None:
    w = world(later("old", 8), later("young", 8), num_blocks=6, prefix_caching=False)
    go(w)
    w.add(make_request("a", 12, max_tokens=1))
    assert go(w).num_tokens == {"a": 12}
    assert [s.id for s in w.scheduler.background.running] == ["old"]


def test_a_decoding_live_request_takes_a_block_rather_than_wait() -> None:
    w = world(later("job", 7, max_tokens=2), num_blocks=3)
    go(w)
    w.add(make_request("a", 4, max_tokens=3))
    go(w)
    step = go(w)
    assert step.num_tokens == {"a": 1}
    assert step.released == ["job"]
    go(w)
    assert go(w).num_tokens == {"job": 4}, "but for the block that is still there"


def test_a_live_batch_puts_background_requests_off_and_they_come_back() -> None:
    w = world(later("one", 4, max_tokens=20), later("two", 4, max_tokens=20), strategy="static", slots=2)
    go(w)
    w.add(make_request("a", 4, max_tokens=2))
    assert go(w).num_tokens == {"one": 1, "two": 1}
    w.add(make_request("b", 4, max_tokens=2))
    assert go(w).num_tokens == {"a": 4, "b": 4}
    assert not w.scheduler.background.running
    go(w)
    assert go(w).num_tokens.keys() == {"one", "two"}


# Turns


def test_who_gets_no_token_goes_first_in_the_next_step() -> None:
    w = world(*(later(name, 1, max_tokens=9) for name in "abc"), max_num_batched_tokens=3)
    go(w)
    w.scheduler.max_num_batched_tokens = 2
    assert [list(go(w).num_tokens) for _ in range(4)] == [["a", "b"], ["c", "a"], ["b", "c"], ["a", "b"]]


def test_whoever_waits_for_a_slot_is_not_admitted_while_one_that_runs_gets_nothing() -> None:
    w = world(later("a", 1), later("b", 1), later("c", 1), max_num_batched_tokens=2)
    go(w)
    assert why(w, "c") is Reason.TOKENS
    w.scheduler.max_num_batched_tokens = 1
    go(w)
    assert "c" in {name for name in w.records if why(w, name) is Reason.TOKENS}


def test_before_any_step_was_timed_one_holds_few_tokens() -> None:
    w = world(later("job", 40), background=0.05)
    assert go(w).num_tokens == {"job": FLOOR}


def test_steps_stay_within_their_time_live_decodes_included() -> None:
    w = world(make_request("a", 4, 30), *(later(f"j{i}", 90, 30) for i in range(3)), num_blocks=200, background=0.02)
    budget = w.scheduler.background.budget
    assert isinstance(budget, LatencyBudget)
    sizes = []
    for _ in range(20):
        step = w.schedule()
        sizes.append(step.total_tokens)
        # 5 ms a step and 1 ms a token, so that 15 tokens fit.
        w.update({name: [0] for name in step.num_tokens}, {}, seconds=5e-3 + 1e-3 * step.total_tokens)
    assert all(size in range(13, 17) for size in sizes[5:]), sizes


# The same text


class Timed(DecoderRunner):
    """A runner whose steps take 4 ms, and 0.2 ms a token."""

    def execute(self, step: Step) -> StepResult:
        result = super().execute(step)
        result.seconds = 4e-3 + 2e-4 * step.total_tokens
        return result


def jobs(background: bool, count: int = 10) -> list[Request]:
    rng = random.Random(1)
    return [
        Request(
            id=f"r{index}",
            prompt_ids=[rng.randrange(320) for _ in range(rng.choice([1, 15, 16, 17, 60, 130]))],
            params=GREEDY,
            max_tokens=rng.randint(1, 50),
            arrival=index * 1e-3,
            background=background,
        )
        for index in range(count)
    ]


def run(engine: Engine, alone: list[Request], among: list[Request]) -> dict[str, list[int]]:
    """Serve all; those `among` come one by one while the others record."""
    made: dict[str, list[int]] = {request.id: [] for request in alone + among}
    for request in alone:
        engine.add(request)
    coming = among[::-1]
    number = 0
    while engine.num_unfinished or coming:
        number += 1
        if coming and number % 9 == 0:
            engine.add(coming.pop())
        output = engine.step()
        for update in output.updates if output is not None else ():
            made[update.id] += update.token_ids
    engine.scheduler.pool.check()
    assert engine.scheduler.pool.num_used == 0
    return made


@pytest.mark.parametrize("kv_cache_gb", [0.01, 54 * 2 / 2**20], ids=["roomy", "tight"])
def test_paused_and_preempted_requests_make_the_tokens_of_an_undisturbed_run(kv_cache_gb: float) -> None:
    config = SequenceConfig(
        model=str(model_folder()),
        max_model_len=200,
        block_size=4,
        kv_cache_gb=kv_cache_gb,
        max_num_seqs=6,
        background_step_ms=6.0,
    )
    undisturbed = run(Engine(config, Timed(config)), jobs(background=False), [])
    rng = random.Random(2)
    live = [
        Request(
            id=f"live-{index}",
            prompt_ids=[rng.randrange(320) for _ in range(rng.choice([5, 40, 90]))],
            params=GREEDY,
            max_tokens=12,
            arrival=1.0,
        )
        for index in range(8)
    ]
    engine = Engine(config, Timed(config))
    pauses = 0
    schedule = engine.scheduler.schedule

    def counting(now: float, yields: bool = False) -> Step | None:
        nonlocal pauses
        step = schedule(now, yields)
        pauses += step is not None and any(decision.reason is Reason.LIVE for decision in step.decisions)
        return step

    engine.scheduler.schedule = counting  # type: ignore[method-assign]
    made = run(engine, jobs(background=True), live)
    assert {name: made[name] for name in undisturbed} == undisturbed
    assert all(len(made[request.id]) == 12 for request in live)
    assert pauses >= 8
    assert engine.scheduler.num_preemptions > 0


# The queue, and the machine


def with_client(test: Callable[[SequenceClient], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        config = SequenceConfig(model=str(model_folder()), max_model_len=400, kv_cache_gb=0.01, num_threads=1)
        client = SequenceClient(config, **settings)
        await client.start()
        try:
            await client.wait_ready()
            await test(client)
        finally:
            await client.stop()

    with pytest.MonkeyPatch.context() as patch:
        spare_workers_torch(patch)
        asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.processes
def test_neither_takes_the_others_places_in_the_queue() -> None:
    def request(name: str, background: bool) -> Request:
        return Request(
            id=name,
            prompt_ids=[1, 2, 3],
            params=GREEDY,
            max_tokens=5,
            arrival=time.monotonic(),
            background=background,
        )

    async def test(client: SequenceClient) -> None:
        streams = client.submit(*(request(f"job-{index}", True) for index in range(2)))
        with pytest.raises(QueueFull, match="2 background requests wait"):
            client.submit(request("job-2", True))
        streams += client.submit(*(request(f"live-{index}", False) for index in range(2)))
        with pytest.raises(QueueFull, match="2 requests wait"):
            client.submit(request("live-2", False))
        for stream in streams:
            assert await num_tokens(stream) == 5
        assert (client.stats.background_running, client.stats.background_waiting) == (0, 0)
        streams = client.submit(*(request(f"job-{index}", True) for index in range(2)))
        assert await num_tokens(streams[1]) == 5

    with_client(test, max_waiting=2)
