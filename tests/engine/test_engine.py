"""The engine with a real runner: every strategy, chunk size and shortage of memory gives the same tokens."""

import ctypes
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from support.model_factory import model_folder

from chairlift.config.sequences import SequenceConfig
from chairlift.core.finished import FinishReason
from chairlift.core.sequences.budget import StepTimeBudget
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.step import Step, StepResult
from chairlift.engine.sequences.engine import Engine
from chairlift.engine.sequences.messages import SequenceUpdate, StepOutput
from chairlift.runners.decoder.runner import DecoderRunner
from chairlift.runners.low_priority import busy_until, while_computing
from chairlift.runners.sequences import SequenceInfo

# 54 blocks of 4 tokens, each with K and V of 2 layers, 2 heads, 16 dimensions in float32: 2 KB a block.
TIGHT: dict[str, Any] = {"max_model_len": 200, "block_size": 4, "kv_cache_gb": 54 * 2 / 2**20}
GREEDY = SamplingParams(temperature=0, max_tokens=None)


def config(**settings: Any) -> SequenceConfig:
    given = {"model": str(model_folder()), "max_model_len": 400, "kv_cache_gb": 0.01}
    slots = {"max_num_seqs": 8} if settings.get("strategy", "continuous") == "continuous" else {}
    return SequenceConfig(**(given | slots | settings))


def requests(count: int = 12, seed: int = 0, params: SamplingParams = GREEDY) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            id=f"r{i}",
            prompt_ids=[rng.randrange(320) for _ in range(rng.choice([1, 15, 16, 17, 60, 130]))],
            params=params,
            max_tokens=rng.randint(1, 60),
            arrival=i * 1e-3,
        )
        for i in range(count)
    ]


def run(engine: Engine, jobs: Iterable[Request]) -> dict[str, list[int]]:
    """Serve to the end and return each request's tokens; each must end exactly once."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, SequenceUpdate] = {}
    for job in jobs:
        engine.add(job)
        tokens[job.id] = []
    engine.close_queue()
    while engine.num_unfinished:
        output = engine.step()
        assert output is not None
        for update in output.updates:
            tokens[update.id] += update.token_ids
            if update.finish_reason is not None:
                assert update.id not in ends
                ends[update.id] = update
    assert ends.keys() == tokens.keys()
    engine.scheduler.pool.check()
    assert engine.scheduler.pool.num_used == 0
    return tokens


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """What each request gives when nothing else runs."""
    engine = Engine(config(enable_prefix_caching=False), DecoderRunner(config()))
    return {name: made for job in requests() for name, made in run(engine, [job]).items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "none"},
        {"strategy": "static", "batch_size": 5},
        {"strategy": "dynamic", "batch_size": 5, "max_wait_ms": 0.0},
        {"strategy": "continuous"},
        {"strategy": "continuous", "max_num_batched_tokens": 8},
        {"strategy": "continuous", "block_size": 3},
        {"strategy": "static", "batch_size": 5, "max_num_batched_tokens": 7},
    ],
    ids=str,
)
def test_strategy_does_not_change_the_answer(settings: dict[str, Any], alone: dict[str, list[int]]) -> None:
    engine = Engine(config(**settings), DecoderRunner(config(**settings)))
    assert run(engine, requests()) == alone


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 8}, TIGHT], ids=str)
def test_who_reads_along_does_not_change_the_answer(settings: dict[str, Any]) -> None:
    """Held updates: the first token as soon as it is there, and all others with the end."""
    params = SamplingParams(temperature=0, max_tokens=None, logprobs=1, prompt_logprobs=0)
    jobs = requests(params=params)
    given = config(**settings)
    engine = Engine(given, DecoderRunner(given))
    step_by_step: dict[str, list[SequenceUpdate]] = {job.id: [] for job in jobs}
    held: dict[str, list[SequenceUpdate]] = {job.id: [] for job in jobs}
    for hold, updates in ((False, step_by_step), (True, held)):
        for job in jobs:
            engine.add(msgspec.structs.replace(job, hold_updates=hold, use_prefix_cache=False))
        while engine.num_unfinished:
            output = engine.step()
            assert output is not None
            for update in output.updates:
                updates[update.id].append(update)
    for job in jobs:
        each, (first, *rest) = step_by_step[job.id], held[job.id]
        assert len(rest) == (len(each) > 1)
        assert first.token_ids == each[0].token_ids
        assert first.prompt_logprobs == each[0].prompt_logprobs
        last = rest[0] if rest else first
        assert (last.finish_reason, last.detail) == (each[-1].finish_reason, each[-1].detail)
        assert [t for u in held[job.id] for t in u.token_ids] == [t for u in each for t in u.token_ids]
        entries = [entry.token_id for u in held[job.id] for entry in u.logprobs or []]
        assert entries == [entry.token_id for u in each for entry in u.logprobs or []]
        assert len(entries) == job.max_tokens


@pytest.mark.parametrize("strategy", ["continuous", "static"])
def test_preemption_does_not_change_the_answer(strategy: str, alone: dict[str, list[int]]) -> None:
    settings = config(strategy=strategy, batch_size=8, **TIGHT)
    engine = Engine(settings, DecoderRunner(settings))
    assert run(engine, requests()) == alone
    assert engine.scheduler.num_preemptions > 0


def test_whoever_takes_a_slot_or_gives_way_is_named_with_the_step() -> None:
    settings = config(**TIGHT)
    engine = Engine(settings, DecoderRunner(settings))
    for job in requests():
        engine.add(job)
    named = 0
    running: set[str] = set()
    while engine.num_unfinished:
        output = engine.step()
        assert output is not None
        named += len(output.preempted)
        running = (running - set(output.preempted)) | set(output.started)
        running -= {update.id for update in output.updates if update.finish_reason}
        assert len(running) == output.stats.running
    assert named == engine.scheduler.num_preemptions > 0


def test_seeded_sampling_survives_preemption_and_company() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=None, logprobs=2)
    jobs = requests(params=params)
    roomy = Engine(config(), DecoderRunner(config()))
    expected = {name: made for job in jobs for name, made in run(roomy, [job]).items()}
    tight = config(**TIGHT)
    engine = Engine(tight, DecoderRunner(tight))
    assert run(engine, jobs) == expected
    assert engine.scheduler.num_preemptions > 0


def test_shared_prefix_is_computed_once_even_within_one_step(alone: dict[str, list[int]]) -> None:
    job = next(job for job in requests() if len(job.prompt_ids) == 130)
    twins = [
        Request(id=f"t{i}", prompt_ids=job.prompt_ids, params=GREEDY, max_tokens=job.max_tokens, arrival=0)
        for i in range(6)
    ]
    engine = Engine(config(max_num_batched_tokens=1024), DecoderRunner(config()))
    made = run(engine, twins)
    assert all(tokens == alone[job.id] for tokens in made.values())
    assert engine.scheduler.prefixes.hit_tokens == 5 * 128


class Timed(DecoderRunner):
    """A runner whose steps take 4 ms, and 0.2 ms a token."""

    def execute(self, step: Step) -> StepResult:
        result = super().execute(step)
        result.seconds = 4e-3 + 2e-4 * step.total_tokens
        return result


def test_latency_target_holds_from_the_first_prompt_on_and_changes_no_answer(alone: dict[str, list[int]]) -> None:
    settings = config(target_itl_ms=10.0)
    engine = Engine(settings, Timed(settings))
    assert engine.scheduler.num_steps == engine.scheduler.pool.num_used == 0, "calibration left something behind"
    assert not engine.runner.batch.row_of
    seen: list[tuple[int, float]] = []
    step = engine.step

    def noted() -> StepOutput | None:
        output = step()
        assert output is not None
        assert output.stats.cost is not None
        seen.append((output.stats.step_tokens, output.stats.cost.seconds))
        return output

    engine.step = noted
    assert run(engine, requests()) == alone
    assert max(seconds for _, seconds in seen) < 11.5e-3
    assert max(tokens for tokens, _ in seen) > 24, "most of the target went unused"


def test_steps_that_a_stream_waits_for_are_bounded_without_a_target() -> None:
    settings = config(step_time_ms=60.0, max_num_seqs=4, kv_cache_gb=0.02)
    engine = Engine(settings, Timed(settings))
    assert engine.scheduler.meter.model.num_observed == 0, "nothing is timed at the start"
    engine.add(long_one("stream", 30, 200))
    for _ in range(40):
        engine.step()
    assert engine.scheduler.coefficients is not None, "learned from its prompt and its first decodes"
    for name in ("a", "b", "c"):
        engine.add(long_one(name, 390, 2))
    tokens: list[int] = []
    for _ in range(20):
        output = engine.step()
        assert output is not None
        assert output.stats.cost is None, "there is no target to tell of"
        tokens.append(output.stats.step_tokens)
    assert sum(tokens) > 3 * 390
    assert 150 < max(tokens[2:]) < 300, f"{tokens}: 60 ms are 280 tokens"


def long_one(name: str, prompt: int, max_tokens: int) -> Request:
    ids = [(len(name) + ord(name[0]) + index) % 320 for index in range(prompt)]
    return Request(id=name, prompt_ids=ids, params=GREEDY, max_tokens=max_tokens, arrival=0.0)


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 0.3),
        ({"step_time_ms": 50}, 0.05),
        ({"step_time_ms": 0}, None),
        ({"target_itl_ms": 20}, None),
        ({"strategy": "dynamic"}, None),
        ({"strategy": "none"}, None),
    ],
    ids=str,
)
def test_a_step_time_is_for_continuous_batching_without_a_target(
    settings: dict[str, Any], seconds: float | None
) -> None:
    given = SequenceConfig(model="m", **settings)
    budget = given.make_scheduler(64, 16, 128).budget
    assert (budget.step_time if isinstance(budget, StepTimeBudget) else None) == seconds
    limits = given.step_limits(64, 16)
    assert limits is None or limits.step_time == seconds


def test_unreachable_target_starves_no_prompt(alone: dict[str, list[int]]) -> None:
    settings = config(target_itl_ms=1.0)
    engine = Engine(settings, Timed(settings))
    assert run(engine, requests()) == alone


@pytest.mark.parametrize(
    "settings",
    [{"max_model_len": 8}, {"max_num_batched_tokens": 8}, {"kv_cache_gb": 2e-5, "max_model_len": 10}, {}],
    ids=str,
)
def test_calibration_fits_into_any_settings(settings: dict[str, Any]) -> None:
    given = config(target_itl_ms=10.0, **settings)
    engine = Engine(given, Timed(given))
    model = engine.scheduler.meter.model
    assert model.num_observed > 0
    assert model.predict(1, 1) == pytest.approx(4.2e-3, rel=0.2)


class Recording(Timed):
    """A runner whose decodes of a new shape take a second, twice: as they are, and recorded."""

    def load(self) -> SequenceInfo:
        self.seen = Counter[int]()
        info = super().load()
        info.device = "cuda"
        return info

    def execute(self, step: Step) -> StepResult:
        result = super().execute(step)
        if set(step.num_tokens.values()) == {1}:
            self.seen[len(step.num_tokens)] += 1
            if self.seen[len(step.num_tokens)] <= 2:
                result.seconds = 1.0
        return result


def test_calibration_takes_no_recording_for_a_decode() -> None:
    given = config(target_itl_ms=10.0)
    engine = Engine(given, Recording(given))
    assert engine.scheduler.meter.model.predict(1, 1) == pytest.approx(4.2e-3, rel=0.2)
    assert engine.scheduler.meter.model.predict(8, 8) == pytest.approx(5.6e-3, rel=0.2)


class FailsOnce(DecoderRunner):
    """A runner whose third step breaks, as it would out of memory."""

    def execute(self, step: Step) -> StepResult:
        if step.id == 2:
            raise MemoryError("no room for the activations\nof 4 sequences")
        return super().execute(step)


def test_failed_step_ends_only_its_own_requests(alone: dict[str, list[int]], caplog: pytest.LogCaptureFixture) -> None:
    settings = config(max_num_seqs=4)
    engine = Engine(settings, FailsOnce(settings))
    jobs = requests()
    for job in jobs:
        engine.add(job)
    ends: dict[str, SequenceUpdate] = {}
    tokens: dict[str, list[int]] = {job.id: [] for job in jobs}
    while engine.num_unfinished:
        output = engine.step()
        assert output is not None
        for update in output.updates:
            tokens[update.id] += update.token_ids
            if update.finish_reason is not None:
                ends[update.id] = update
    failed = {name for name, end in ends.items() if end.finish_reason is FinishReason.ERROR}
    assert 1 <= len(failed) <= 4
    assert all("no room for the activations" in str(ends[name].detail) for name in failed)
    assert {n: t for n, t in tokens.items() if n not in failed} == {n: t for n, t in alone.items() if n not in failed}
    assert engine.scheduler.pool.num_used == 0
    (line,) = caplog.messages
    assert line.startswith("step 2 with ")
    assert line.endswith(" ran out of memory: MemoryError: no room for the activations")
    assert caplog.records[0].exc_info is None


def test_prompt_logprobs_come_once_and_whole_across_a_preemption() -> None:
    params = SamplingParams(temperature=0, max_tokens=None, prompt_logprobs=1)
    tight = config(**TIGHT, max_num_batched_tokens=32)
    engine = Engine(tight, DecoderRunner(tight))
    jobs = requests(params=params)
    for job in jobs:
        engine.add(job)
    seen: dict[str, list[int]] = {}
    while engine.num_unfinished:
        output = engine.step()
        assert output is not None
        for update in output.updates:
            if update.prompt_logprobs is not None:
                assert update.id not in seen
                seen[update.id] = [entry.token_id for entry in update.prompt_logprobs]
    assert engine.scheduler.num_preemptions > 0
    assert seen == {job.id: job.prompt_ids[1:] for job in jobs}


def test_what_waits_for_the_next_step_goes_on_once_nobody_is_left() -> None:
    until = ctypes.c_int64.from_address(busy_until())
    given = config()
    engine = Engine(given, DecoderRunner(given))
    run(engine, requests(1))
    assert until.value > 0, "somebody else may come soon"
    assert engine.step() is None
    assert until.value == 0
    # Who waits for more of a batch is not served yet, but is here.
    given = config(strategy="static", batch_size=4)
    engine = Engine(given, DecoderRunner(given))
    with while_computing():
        pass
    engine.add(requests(1)[0])
    assert engine.step() is None
    assert until.value > 0


def test_abort_frees_blocks_and_the_rest_go_on(alone: dict[str, list[int]]) -> None:
    engine = Engine(config(), DecoderRunner(config()))
    jobs = requests()
    for job in jobs:
        engine.add(job)
    engine.step()
    engine.abort([job.id for job in jobs[::2]])
    tokens: dict[str, list[int]] = {}
    while engine.num_unfinished:
        output = engine.step()
        assert output is not None
        for update in output.updates:
            tokens.setdefault(update.id, []).extend(update.token_ids)
    assert tokens
    for job in jobs[1::2]:
        made = tokens.get(job.id, [])  # without the first step's, which was not collected
        assert alone[job.id][len(alone[job.id]) - len(made) :] == made
    assert not set(tokens) & {job.id for job in jobs[::2]}
    assert engine.scheduler.pool.num_used == 0
