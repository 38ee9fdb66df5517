"""Several models on one machine: real workers, which compute nothing, take turns."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from support.model_factory import model_folder
from support.streams import num_tokens, updates_of
from support.stub_runner import spare_workers_torch

from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.engine.machine import Machine
from chairlift.engine.sequences.client import SequenceClient

pytestmark = pytest.mark.processes
GREEDY = SamplingParams(temperature=0, max_tokens=None)
SERIAL = itertools.count()


def client(machine: Machine, weight: float = 1.0) -> SequenceClient:
    config = SequenceConfig(model=str(model_folder()), max_model_len=400, kv_cache_gb=0.01, num_threads=1)
    return SequenceClient(config, machine=machine, weight=weight)


def request(max_tokens: int = 100, background: bool = False) -> Request:
    prompt = [next(SERIAL) % 300, 1, 2, 3]
    return Request(
        id=f"r{next(SERIAL)}",
        prompt_ids=prompt,
        params=GREEDY,
        max_tokens=max_tokens,
        arrival=time.monotonic(),
        background=background,
    )


async def generate(model: SequenceClient, max_tokens: int = 100) -> int:
    (stream,) = model.submit(request(max_tokens))
    return await num_tokens(stream)


class Meter(Machine):
    """Remembers who had the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[str] = []

    def _grant(self) -> None:
        super()._grant()
        if self.shares.holder is not None:
            self.turns.append(self.shares.holder)


Test = Callable[[SequenceClient, SequenceClient, Meter], Awaitable[None]]


class TwoModels:
    """Two models on a machine, and the event loop that they belong to; tests run in it one after the other."""

    def __init__(self) -> None:
        self.machine = Meter()
        self.models = client(self.machine), client(self.machine, 3)
        self._runner = asyncio.Runner()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "TwoModels":
        async def start() -> None:
            for model in self.models:
                await model.start()
            for model in self.models:
                await model.wait_ready()

        spare_workers_torch(self._patch)
        try:
            self._runner.run(asyncio.wait_for(start(), 60))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        async def stop() -> None:
            for model in self.models:
                await model.stop()

        self._patch.undo()
        self._runner.run(stop())
        self._runner.close()

    def run(self, test: Test) -> None:
        """Run a test, which finds and leaves the machine idle."""

        async def go() -> None:
            self.machine.turns.clear()
            await test(*self.models, self.machine)
            await idle(self.machine)

        self._runner.run(asyncio.wait_for(go(), 60))


async def idle(machine: Meter) -> None:
    """An idle worker keeps no turn: the last to work gives it back as soon as it sees that there is nothing left."""
    while machine.shares.holder is not None or machine.shares.contended:
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def two_models() -> Iterator[TwoModels]:
    with TwoModels() as models:
        yield models


def test_two_models_serve_in_turn_and_nothing_is_lost(two_models: TwoModels) -> None:
    async def go(a: SequenceClient, b: SequenceClient, machine: Meter) -> None:
        counts = await asyncio.gather(*(generate(model, 50) for model in [a, b] * 20))
        assert counts == [50] * 40
        assert len(set(machine.turns)) == 2

    two_models.run(go)


def test_alone_a_model_keeps_the_turn_until_its_work_is_done(two_models: TwoModels) -> None:
    async def go(a: SequenceClient, b: SequenceClient, machine: Meter) -> None:
        assert await generate(a, 300) == 300
        assert len(machine.turns) == 1

    two_models.run(go)


def test_a_killed_worker_gives_its_turn_back() -> None:
    async def go(a: SequenceClient, b: SequenceClient, machine: Meter) -> None:
        (doomed,) = a.submit(request(390))
        await anext(updates_of(doomed))
        os.kill(a.worker_pid, signal.SIGKILL)
        assert await generate(b) == 100
        await a.wait_ready()
        assert await generate(a) == 100

    with TwoModels() as models:
        models.run(go)


def test_a_cancelled_request_leaves_no_turn_behind(two_models: TwoModels) -> None:
    async def go(a: SequenceClient, b: SequenceClient, machine: Meter) -> None:
        for _ in range(20):
            (stream,) = a.submit(request())
            stream.cancel()
            assert await generate(b, 5) == 5

    two_models.run(go)


def test_a_models_background_work_takes_no_turn_from_anothers_live_work(two_models: TwoModels) -> None:
    async def go(a: SequenceClient, b: SequenceClient, machine: Meter) -> None:
        (job,) = a.submit(request(390, background=True))
        updates = updates_of(job)
        await anext(updates)
        (name,) = set(machine.turns)
        begun = len(machine.turns)
        (live,) = b.submit(request(100))
        await num_tokens(live)
        # What follows the live request's last turn is the job's again, perhaps before its end is heard of here.
        turns = "".join("j" if turn == name else "l" for turn in machine.turns[begun:])
        assert "jl" not in turns.lstrip("j"), "the job had a turn"
        assert 1 + sum([len(update.token_ids) async for update in updates]) == 390

    two_models.run(go)
