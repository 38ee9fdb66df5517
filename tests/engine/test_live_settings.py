"""Settings that change while a model runs: between two steps, in its worker, and in the worker after that."""

import asyncio
import os
import signal
import time

import msgspec
import pytest
from support.model_factory import model_folder
from support.streams import num_tokens
from support.stub_runner import spare_workers_torch

from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.budget import LatencyBudget, StepTimeBudget
from chairlift.core.sequences.live_settings import apply_settings
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.engine.sequences.client import SequenceClient
from chairlift.engine.sequences.messages import EngineStats


def request(name: str, max_tokens: int = 20) -> Request:
    params = SamplingParams(temperature=0, max_tokens=None)
    return Request(id=name, prompt_ids=[1, 2, 3], params=params, max_tokens=max_tokens, arrival=time.monotonic())


@pytest.mark.processes
def test_a_worker_goes_by_them_and_so_does_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    spare_workers_torch(monkeypatch)
    config = SequenceConfig(model=str(model_folder()), max_model_len=400, kv_cache_gb=0.01, num_threads=1)

    async def most_at_once(client: SequenceClient, lap: str) -> int:
        seen: list[EngineStats] = []
        client.on_step = seen.append
        streams = client.submit(*(request(f"{lap}{number}") for number in range(4)))
        assert await asyncio.gather(*map(num_tokens, streams)) == [20] * 4
        return max(stats.running for stats in seen)

    async def main() -> None:
        client = SequenceClient(config)
        await client.start()
        try:
            await client.wait_ready()
            assert await most_at_once(client, "a") == 4
            client.retune(msgspec.structs.replace(config, max_num_seqs=2))
            assert await most_at_once(client, "b") == 2
            assert client.shedder.limits is not None
            assert client.shedder.limits.slots == 2
            assert client.worker_pid is not None
            os.kill(client.worker_pid, signal.SIGKILL)
            while client.restarts == 0:
                await asyncio.sleep(0.01)
            await client.wait_ready()
            assert await most_at_once(client, "c") == 2, "a new worker is told too"
            client.retune(config)
            assert await most_at_once(client, "d") == 4
        finally:
            await client.stop()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_each_setting_finds_its_place() -> None:
    config = SequenceConfig(model="m")
    scheduler = config.make_scheduler(64, 16, 256)
    other = msgspec.structs.replace(
        config, max_num_seqs=8, max_num_batched_tokens=100, step_time_ms=50.0, background_step_ms=20.0
    )
    apply_settings(other.live_settings, scheduler)
    assert (scheduler.strategy.slots, scheduler.max_num_batched_tokens) == (8, 100)
    budget, background = scheduler.budget, scheduler.background.budget
    assert isinstance(budget, StepTimeBudget)
    assert (budget.step_time, budget.most) == (0.05, 100)
    assert isinstance(background, LatencyBudget)
    assert (background.target, background.most) == (0.02, 100)
    with_target = msgspec.structs.replace(config, target_itl_ms=30.0)
    scheduler = with_target.make_scheduler(64, 16, 256)
    apply_settings(msgspec.structs.replace(with_target, target_itl_ms=10.0).live_settings, scheduler)
    assert isinstance(scheduler.budget, LatencyBudget)
    assert scheduler.budget.target == 0.01
    assert isinstance(scheduler.background.budget, LatencyBudget)
    assert scheduler.background.budget.target == 0.01, "no more than the target"
    dynamic = SequenceConfig(model="m", strategy="dynamic")
    scheduler = dynamic.make_scheduler(64, 16, 256)
    apply_settings(msgspec.structs.replace(dynamic, batch_size=3, max_wait_ms=70.0).live_settings, scheduler)
    assert (scheduler.strategy.slots, scheduler.strategy.max_wait) == (3, 0.07)
