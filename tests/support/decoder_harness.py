"""Drives DecoderRunner.execute with hand-built steps: the smallest scheduler that can make every situation."""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device import DEVICE
from support.native_isa import needs_native

from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.step import Start, Step, StepResult
from chairlift.runners.decoder.runner import DecoderRunner

LENGTHS = (1, 2, 15, 16, 17, 100, 300)
GREEDY = SamplingParams(temperature=0, max_tokens=None)


def make_runner(folder: Path, **settings: Any) -> DecoderRunner:
    """A runner that is loaded; on CUDA, where nothing is native, of the operations that there are."""
    settings = {
        "model": str(folder),
        "device": DEVICE,
        "ops": "reference",
        "max_num_seqs": 16,
        "max_num_batched_tokens": 4096,
        "max_model_len": 400,
        "num_threads": 1,
    } | settings
    if settings["device"] == "cuda":
        settings["ops"] = "auto"
    runner = DecoderRunner(SequenceConfig(**settings))
    runner.load()
    return runner


def make_request(
    id: str, prompt: list[int], params: SamplingParams = GREEDY, stop_ids: frozenset[int] = frozenset()
) -> Request:
    return Request(
        id=id, prompt_ids=prompt, params=params, max_tokens=params.max_tokens or 10_000, arrival=0.0, stop_ids=stop_ids
    )


class Harness:
    """Holds sequences, hands out blocks and makes steps. `outputs` are each request's tokens so far."""

    def __init__(self, runner: DecoderRunner) -> None:
        self.runner = runner
        self.block_size = runner.info.block_size
        # Out of order, so that a physical block never equals the logical one.
        order = torch.randperm(runner.info.num_blocks, generator=torch.Generator().manual_seed(1))
        self.free: list[int] = order.tolist()
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.owned: dict[str, list[int]] = {}
        # A runner shared between tests may still hold an earlier harness's sequences.
        self.released: list[str] = list(runner.batch.row_of)
        self.fresh: set[str] = set()
        self.step_id = 0
        # For the next step: what of states it saves and keeps, and who starts with a snapshot.
        self.saves: dict[str, list[tuple[int, int]]] = {}
        self.kept: dict[str, int] = {}
        self.snapshots: dict[str, int] = {}

    def add(self, request: Request, cached: int = 0, shared: Iterable[int] = (), snapshot: int | None = None) -> None:
        """Make a request known; `cached` of its tokens already lie in the `shared` blocks, and in a snapshot."""
        if snapshot is not None:
            self.snapshots[request.id] = snapshot
        self.requests[request.id] = request
        self.outputs.setdefault(request.id, [])
        self.computed[request.id] = cached
        self.tables[request.id] = list(shared)
        self.owned[request.id] = []
        self.fresh.add(request.id)

    def start(self, id: str, blocks: list[int]) -> Start:
        """What tells the runner of a request, with these more blocks."""
        self.tables[id] += blocks
        self.owned[id] += blocks
        self.fresh.discard(id)
        snapshot = self.snapshots.pop(id, None)
        return Start(self.requests[id], self.tokens(id), self.computed[id], list(self.tables[id]), snapshot)

    def tokens(self, id: str) -> list[int]:
        return self.requests[id].prompt_ids + self.outputs[id]

    def remaining(self, id: str) -> int:
        return len(self.tokens(id)) - self.computed[id]

    def release(self, id: str) -> None:
        """Drop a sequence, by its end or by preemption."""
        self.free += self.owned.pop(id)
        self.released.append(id)
        del self.tables[id], self.computed[id]

    def preempt(self, id: str) -> None:
        """Drop a sequence and let it start again with all of its tokens."""
        self.release(id)
        self.add(self.requests[id])

    def step(self, counts: dict[str, int] | None = None, chunk: int = 10_000) -> StepResult:
        """Run one pass over these requests, or over all of them with at most `chunk` tokens each."""
        if counts is None:
            counts = {id: min(chunk, self.remaining(id)) for id in self.tables}
        started, new_blocks = [], {}
        for id, count in counts.items():
            need = -(-(self.computed[id] + count) // self.block_size) - len(self.tables[id])
            blocks = [self.free.pop() for _ in range(max(need, 0))]
            if id in self.fresh:
                started.append(self.start(id, blocks))
            elif blocks:
                self.tables[id] += blocks
                self.owned[id] += blocks
                new_blocks[id] = blocks
        step = Step(self.step_id, counts, started, new_blocks, self.released, [], self.kept, self.saves)
        self.step_id += 1
        self.released, self.kept, self.saves = [], {}, {}
        result = self.runner.execute(step)
        for id, count in counts.items():
            self.computed[id] += count
            assert (id in result.tokens or id in result.errors) == (self.remaining(id) == 0)
            self.outputs[id] += result.tokens.get(id, [])
        return result

    def generate(self, requests: list[Request], count: int, chunk: int = 10_000) -> dict[str, list[int]]:
        """Run these together until each has `count` tokens; finish them and return their tokens."""
        for request in requests:
            self.add(request)
        return self.finish([request.id for request in requests], count, chunk)

    def finish(self, ids: list[str], count: int, chunk: int = 10_000) -> dict[str, list[int]]:
        while any(len(self.outputs[id]) < count for id in ids):
            live = [id for id in ids if len(self.outputs[id]) < count]
            self.step({id: min(chunk, self.remaining(id)) for id in live})
        for id in ids:
            self.release(id)
        return {id: self.outputs.pop(id) for id in ids}


# For tests that are to hold whatever computes.
OPS = ["reference", pytest.param("native", marks=needs_native)]


@functools.cache
def prompts() -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(5)
    return {str(n): torch.randint(0, 320, (n,), generator=generator).tolist() for n in LENGTHS}


def requests(prefix: str = "") -> list[Any]:
    return [make_request(prefix + name, prompt) for name, prompt in prompts().items()]


def check_every_way(harness: Harness, count: int) -> None:
    """A request's tokens are the same alone, in company, in chunks, after a prefix hit and after a preemption."""
    alone = {request.id: harness.generate([request], count)[request.id] for request in requests()}
    assert harness.generate(requests(), count) == alone
    assert harness.generate(requests(), count, chunk=7) == alone

    harness.add(make_request("first", prompts()["300"]))
    harness.step()
    cached = 299 // harness.block_size * harness.block_size
    harness.add(make_request("300", prompts()["300"]), cached, harness.tables["first"][: cached // harness.block_size])
    harness.add(make_request("17", prompts()["17"]))
    for _ in range(3):
        harness.step()
    harness.preempt("17")
    assert harness.finish(["300", "17"], count) == {name: alone[name] for name in ("300", "17")}
    harness.release("first")
    harness.step({})


@torch.inference_mode()
def all_logits(runner: DecoderRunner, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Logits after every token of each sequence, computed in one pass, on the host."""
    harness = Harness(runner)
    for index, tokens in enumerate(sequences):
        harness.add(make_request(f"logits{index}", tokens))
    started, counts = [], {}
    for id, request in harness.requests.items():
        blocks = [harness.free.pop() for _ in range(-(-len(request.prompt_ids) // harness.block_size))]
        started.append(harness.start(id, blocks))
        counts[id] = len(request.prompt_ids)
    runner._update(Step(0, counts, started, {}, [], []))
    prepared = runner.batch.prepare(Step(0, counts, [], {}, [], []))
    rows = torch.arange(sum(counts.values())).numpy()
    hidden = runner.model.forward(runner._inputs(prepared, rows, {}))
    runner._update(Step(1, {}, [], {}, list(counts), []))
    return list(runner.model.logits(hidden).cpu().split(list(counts.values())))
