"""Shedding between a real worker and its front: what the one tells, and what the other makes of it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from support.model_factory import model_folder
from support.sequences_virtual import Arrival, Machine, VirtualModel
from support.streams import num_tokens, updates_of
from support.stub_runner import spare_workers_torch

from chairlift.config.sequences import SequenceConfig
from chairlift.core.cost import Coefficients, ExpertReads
from chairlift.core.finished import ShedReason
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.engine.sequences.client import SequenceClient
from chairlift.engine.sequences.messages import EngineStats, SequenceUpdate, StepOutput
from chairlift.errors import ConfigError, DeadlineExceeded, QueueFull


def request(name: str, max_tokens: int, background: bool = False) -> Request:
    return Request(
        id=name,
        prompt_ids=[1, 2, 3],
        params=SamplingParams(temperature=0, ignore_eos=True, max_tokens=None),
        max_tokens=max_tokens,
        arrival=time.monotonic(),
        background=background,
    )


async def caught_running(client: SequenceClient) -> AsyncIterator[SequenceUpdate]:
    """The rest of a long answer that has begun, and that has not ended for the front: that may sleep for as long."""
    while True:
        (stream,) = client.submit(request("first", 390))
        updates = updates_of(stream)
        await anext(updates)
        if client.num_unfinished:
            return updates
        async for _ in updates:
            pass


@pytest.mark.processes
def test_a_worker_that_is_busy_for_longer_than_the_target() -> None:
    async def test(client: SequenceClient) -> None:
        updates = await caught_running(client)
        assert client.stats.coefficients is not None, "a target has steps timed before the first request"
        with pytest.raises(QueueFull, match=r"overloaded: .*target_ttft_ms") as caught:
            client.submit(request("second", 5))
        assert caught.value.retry_after > 0
        with pytest.raises(QueueFull):
            client.check_load(0)
        assert client.shedder.num_shed == {ShedReason.TTFT: 2}
        (job,) = client.submit(request("job", 5, background=True))
        assert sum([len(update.token_ids) async for update in updates]) == 389
        assert await num_tokens(job) == 5
        (third,) = client.submit(request("third", 5))
        assert await num_tokens(third) == 5
        assert client.shedder.num_waiting == 0

    with_client(test, max_num_seqs=1, target_ttft_ms=0.5)


@pytest.mark.processes
def test_who_waits_in_vain_is_told_and_forgotten() -> None:
    async def test(client: SequenceClient) -> None:
        (first,) = client.submit(request("first", 390))
        # Nothing has been predicted yet, so these are let in; then they turn out to be late.
        client.shedder.limits, limits = None, client.shedder.limits
        (waits,) = client.submit(request("waits", 5))
        (hurries,) = client.submit(request("hurries", 5), timeout=1e-3)
        client.shedder.limits = limits
        with pytest.raises(QueueFull, match="it waited"):
            await num_tokens(waits)
        with pytest.raises(DeadlineExceeded, match="after its deadline"):
            await num_tokens(hurries)
        assert await num_tokens(first) == 390
        assert client.num_unfinished == 0
        assert client.shedder.num_shed == {ShedReason.TTFT: 1, ShedReason.DEADLINE: 1}

    with_client(test, max_num_seqs=1, target_ttft_ms=0.5)


@pytest.mark.processes
def test_the_first_deadline_finds_those_known_who_were_here_before() -> None:
    async def test(client: SequenceClient) -> None:
        # So many that some still wait, however long the front sleeps.
        streams = client.submit(*(request(f"long-{index}", 390) for index in range(20)))
        updates = updates_of(streams[0])
        for _ in range(50):
            await anext(updates)
        client.check_load(0)
        assert client.shedder.num_waiting == 0, "nobody asked yet"
        with pytest.raises(QueueFull, match="after its deadline"):
            client.submit(request("hurried", 5), timeout=1e-4)
        waiting = client.shedder.num_waiting
        assert waiting > 0
        (patient,) = client.submit(request("patient", 5), timeout=1000.0)
        assert client.shedder.num_waiting == waiting + 1
        for stream in streams:
            stream.cancel()
        assert await num_tokens(patient) == 5
        assert client.shedder.num_waiting == 0

    with_client(test, max_num_seqs=1)


def with_client(test: Callable[[SequenceClient], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        config = SequenceConfig(
            model=str(model_folder()), max_model_len=400, kv_cache_gb=0.01, num_threads=1, **settings
        )
        client = SequenceClient(config)
        await client.start()
        try:
            await client.wait_ready()
            await test(client)
        finally:
            await client.stop()

    with pytest.MonkeyPatch.context() as patch:
        spare_workers_torch(patch)
        asyncio.run(asyncio.wait_for(main(), 60))


def test_the_first_who_asks_finds_how_far_those_are_who_lost_their_slots() -> None:
    client = SequenceClient(SequenceConfig(model="none", max_num_seqs=4))
    client.shedder.limits = client.config.step_limits(1000, 16)
    client._worker.send = lambda frames: None  # type: ignore[method-assign]
    client._worker.state, client._worker._socket = "ready", object()  # type: ignore[assignment]
    client.submit(request("a", 100), request("b", 100), request("c", 100))
    cost, steps = Coefficients(0.1, 0.0, 0.0, 0.0), 0

    def run(*names: str, count: int = 1, started: str = "", preempted: str = "") -> None:
        nonlocal steps
        for number in range(count):
            steps += 1
            stats = EngineStats(steps=steps, step_ended=time.monotonic(), coefficients=cost)
            moved = ([], []) if number else (list(preempted), list(started))
            client._take_step(StepOutput([SequenceUpdate(name, [1]) for name in names], stats, *moved))

    def tokens_left(*names: str) -> list[int]:
        told, now = client.foresee(names), time.monotonic()
        return [round((told[name].end.expected - now) / 0.1) for name in names]  # type: ignore[union-attr]

    run("a", "b", "c", count=10, started="abc")
    run("c", count=20, preempted="ab")
    run("b", "c", count=5, started="b")
    assert tokens_left("b", "c", "a") == [85, 65, 90]
    run("a", "b", "c", count=3, started="a")
    assert tokens_left("b", "c", "a") == [82, 62, 87]


def test_where_prompts_are_not_cut_steps_are_timed_under_load_and_only_then() -> None:
    model = VirtualModel(SequenceConfig(model="virtual", max_num_seqs=8, step_time_ms=0), Machine())
    for number in range(3):
        model.send(Arrival(0.0, 50, 100), number)
        model.step()
    while model.step():
        pass
    assert model.engine.stats().coefficients is None
    for number in range(3, 20):
        model.send(Arrival(model.now, 50, 100), number)
    for _ in range(40):
        model.step()
    found = model.engine.stats().coefficients
    assert found is not None
    tokens = 8
    predicted = found.step + found.token * tokens + (found.kv_token + found.pair) * tokens * 80
    actual = Machine().seconds(tokens, tokens * 80, tokens * 80)
    assert predicted == pytest.approx(actual, rel=0.15)
    aimed = VirtualModel(SequenceConfig(model="virtual", target_ttft_ms=1000), Machine())
    assert aimed.engine.stats().coefficients is not None


def test_of_a_mixture_of_experts_it_is_told_what_all_its_weights_take() -> None:
    plain = VirtualModel(SequenceConfig(model="virtual", max_num_seqs=8), Machine())
    mixture = VirtualModel(SequenceConfig(model="virtual", max_num_seqs=8), Machine(experts=ExpertReads(0.9, 0.125)))
    for model in (plain, mixture):
        assert model.engine.stats().all_weights is None
        for number in range(3):
            model.send(Arrival(0.0, 50, 100), number)
            model.step()
        while model.step():
            pass
    told = mixture.engine.stats()
    assert told.all_weights == mixture.engine.scheduler.meter.model.of_all_weights()
    assert told.coefficients is not None
    assert told.all_weights is not None
    assert told.coefficients.step < told.all_weights.step, "the last steps were of one token"
    assert plain.engine.stats().all_weights is None


def test_where_they_may_be_cut_prompts_and_the_first_decodes_are_timed() -> None:
    model = VirtualModel(SequenceConfig(model="virtual", max_num_seqs=8), Machine())
    assert model.engine.stats().coefficients is None
    for number in range(3):
        model.send(Arrival(0.0, 50, 100), number)
        model.step()
    while model.step():
        pass
    assert model.engine.stats().coefficients is not None


def test_the_target_belongs_to_strategies_that_admit_one_by_one() -> None:
    for strategy in ("none", "continuous"):
        assert SequenceConfig(model="m", strategy=strategy, target_ttft_ms=5.0).target_ttft_ms == 5.0
    for strategy in ("static", "dynamic"):
        with pytest.raises(ConfigError, match="target_ttft_ms has no effect under the"):
            SequenceConfig(model="m", strategy=strategy, target_ttft_ms=5.0)
    with pytest.raises(ConfigError, match="target_ttft_ms must be positive"):
        SequenceConfig(model="m", target_ttft_ms=0.0)
