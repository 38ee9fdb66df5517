"""What the front takes for a request and a token, and by how much it slows its worker down: seen on a server."""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec

from chairlift.bench.completion_stream import Target
from chairlift.bench.latency import Slo, figures
from chairlift.bench.load import Load, closed_loop
from chairlift.bench.measure_sequences import TEMPERATURE
from chairlift.bench.replay import PromptMaker
from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.config.settings import ENV_PREFIX
from chairlift.errors import RequestFailed
from chairlift.own_server import OwnServer, own_server
from chairlift.plan.as_copied import as_flags
from chairlift.plan.case import changed
from chairlift.plan.machine_profile import FrontCost, SequenceProfile, StepDelay
from chairlift.plan.resampler import StepTimes
from chairlift.plan.trace import TraceRequest

# Under this name a model is served to be measured.
MEASURED = "measured"
# Token ids below this are in every vocabulary.
_VOCAB = 100
_TICKS = os.sysconf("SC_CLK_TCK")
_NO_TARGET = Slo(1e9, 1e9)
# Prompts and answers in tokens, and requests at most: short ones, long prompts, and long answers of crowds.
_SHORT, _LONG, _ANSWER, _LEAST_ANSWER = 16, 512, 128, 8
_CROWDS = (1, 4, 16, 64)
_MOST_SHORT, _MOST_LONG, _MOST_ROUNDS = 200, 60, 3
# What these may take of the time, the crowds together, and how many times as long all of them.
_SHORT_SHARE, _LONG_SHARE, _CROWDS_SHARE = 0.15, 0.15, 0.7
_TOO_LONG = 2.0
# The share of tokens that must have been seen one by one for the gaps between them to tell the pace.
_MOSTLY = 0.9
# A step in a server is no shorter than alone: where it is by more than this, the machine has become faster.
_STEADY = 0.95
_LEAST_HOP_S = 2e-5


class _FrontLoad(NamedTuple):
    """Requests of so many tokens, of which `crowd` are sent at once."""

    prompt: int
    answer: int
    crowd: int
    number: int


def measure_front(
    config: SequenceConfig, profile: SequenceProfile, seconds: float, on_progress: Callable[[float], object]
) -> FrontCost:
    """Serve a model that was measured alone, and see what its front takes, in about so many seconds.

    Where nobody says what time a process takes, it counts as free. Raises Unavailable if the model can't be served, and
    RequestFailed with the server's error.
    """
    if not Path("/proc/self/stat").exists():
        return FrontCost()
    # With a target some would be refused, and settings turned meanwhile.
    config = msgspec.structs.replace(config, target_ttft_ms=None, target_itl_ms=None, auto=False)
    with measured_server(config) as server:
        target = Target.of(server.url, MEASURED)
        return front_cost(target, server.pid, profile, config.slots, seconds, on_progress=on_progress)


@contextmanager
def measured_server(config: SequenceConfig | ItemConfig) -> Iterator[OwnServer]:
    """Serve a model with these settings, whatever a file and variables say, which have had their say before."""
    # What was fetched in a revision is a folder, which has none.
    settings = {name: value for name, value in changed(config).items() if name != "revision"}
    flags = [*as_flags(settings), "--served-model-name", MEASURED, "--config", os.devnull]
    if isinstance(config, ItemConfig):
        flags += ["--kind", config.kind]
    names = SequenceConfig.__struct_fields__ + ItemConfig.__struct_fields__
    unset = {f"{ENV_PREFIX}{name.upper()}": "" for name in names}
    with own_server(config.model, flags, {**unset, f"{ENV_PREFIX}LOG_LEVEL": "error"}) as server:
        yield server


def front_cost(
    target: Target,
    pid: int,
    profile: SequenceProfile,
    slots: int,
    seconds: float,
    *,
    vocab: int = _VOCAB,
    on_progress: Callable[[float], object] = lambda share: None,
) -> FrontCost:
    """What the front takes, which is process `pid`, for a request, a prompt's token and an answer's, and what it costs.

    That is how much longer steps of so many sequences take than those measured alone, with what the client and the
    messages take of the same cores. Of a model so slow that this would take twice the time it counts as free:
    next to such steps it is. Raises RequestFailed with the first error of the server.
    """
    times = StepTimes(profile, random.Random(0))
    short, long, *crowds = jobs = _jobs(times, slots, seconds, profile.max_model_len)
    if sum(_seconds(times, job) * (1 + job.number // job.crowd) for job in jobs) > _TOO_LONG * seconds:
        on_progress(1.0)
        return FrontCost()
    used: list[float] = []
    loads: list[Load] = []
    for number, job in enumerate(jobs, 1):
        cpu, load = _used(pid, target, vocab, job)
        used.append(cpu)
        loads.append(load)
        on_progress(number / len(jobs))
    request = max(used[0] / short.number, 0.0)
    prompt_token = max((used[1] / long.number - request) / max(long.prompt - short.prompt, 1), 0.0)
    many = crowds[-1]
    output_token = max((used[-1] / many.number - request) / (many.answer - 1), 1e-7)
    delays = _delays([_decode(times, job) for job in crowds], [_pace(load) for load in loads[2:]], crowds)
    first = figures(loads[0], _NO_TARGET)["ttft_ms"]["p50"] / 1000
    hop = (first - _prefill(times, short) - request - output_token) / 2
    return FrontCost(
        request=request,
        prompt_token=prompt_token,
        output_token=output_token,
        hop=max(hop, _LEAST_HOP_S),
        # What works for a request has a core each meanwhile: the front, and the client.
        contention=_contention(delays, output_token, 1 + loads[0].cpu / used[0] if used[0] > 0 else 0.0),
        delays=delays,
    )


def _delays(alone: Sequence[float], served: Sequence[float], crowds: Sequence[_FrontLoad]) -> tuple[StepDelay, ...]:
    """By how much longer steps are in a server, in seconds of the machine that it was when they were timed alone."""
    faster = min(pace / own for own, pace in zip(alone, served, strict=True))
    if not 0 < faster < _STEADY:
        faster = 1.0
    return tuple(
        StepDelay(job.crowd, max(pace / faster - own, 0.0))
        for job, own, pace in zip(crowds, alone, served, strict=True)
    )


def _pace(load: Load) -> float:
    """Seconds from one token of an answer to the next, at which all of a crowd have theirs."""
    seen = figures(load, _NO_TARGET)
    # Between two tokens of an answer lie some steps with prompts of the others, which its mean holds and the median of
    # all gaps leaves out. That knows only tokens with text.
    with_text = sum(len(outcome.times) for outcome in load.outcomes) >= _MOSTLY * seen["tokens"]
    pace: float = seen["itl_ms" if with_text else "tpot_ms"]["p50"] / 1000
    return pace


def _contention(delays: Sequence[StepDelay], output_token: float, most: float) -> float:
    """Seconds that one of the front adds, as seen from the least of the crowds to the largest, but no more than `most`.

    For a crowd's tokens the client does more than for requests, which is in the delays.
    """
    least, last = min(delays, key=lambda delay: delay.seconds), delays[-1]
    if last.sequences <= least.sequences:
        return 0.0
    rise = (last.seconds - least.seconds) / (last.sequences - least.sequences)
    return min(rise / output_token, most)


def _jobs(times: StepTimes, slots: int, seconds: float, max_model_len: int) -> list[_FrontLoad]:
    """What fits into the time, by what was measured alone: shorter answers, and fewer requests, of a slower model."""
    room = max(max_model_len // 2, 1)
    short, long = min(_SHORT, room), min(_LONG, room)
    crowds = [crowd for crowd in _CROWDS if crowd < slots] + [min(_CROWDS[-1], max(slots, 1))]
    share = _CROWDS_SHARE * seconds / len(crowds)
    step = _decode(times, _FrontLoad(short, _ANSWER, crowds[-1], 0))
    answer = max(min(int(share / (2 * step)), _ANSWER, room), min(_LEAST_ANSWER, room), 2)

    def count(job: _FrontLoad, limit: float, most: int) -> _FrontLoad:
        # Once more, before it counts.
        return job._replace(number=job.crowd * min(max(int(limit / _seconds(times, job)) - 1, 1), most))

    return [
        count(_FrontLoad(short, 1, 1, 0), _SHORT_SHARE * seconds, _MOST_SHORT),
        count(_FrontLoad(long, 1, 1, 0), _LONG_SHARE * seconds, _MOST_LONG),
        *(count(_FrontLoad(short, answer, crowd, 0), share, _MOST_ROUNDS) for crowd in dict.fromkeys(crowds)),
    ]


def _seconds(times: StepTimes, job: _FrontLoad) -> float:
    """What it takes to answer as many requests as are sent at once."""
    return _prefill(times, job) + (job.answer - 1) * _decode(times, job)


def _decode(times: StepTimes, job: _FrontLoad) -> float:
    """Seconds of a step with a token for each, and of the time to the next, measured alone."""
    read = job.crowd * (job.prompt + job.answer // 2)
    return fmean(times.seconds(job.crowd, read, read) + times.gap(job.crowd) for _ in range(200))


def _prefill(times: StepTimes, job: _FrontLoad) -> float:
    """Seconds of the step, or of the steps one after the other, with the prompts of all."""
    read, pairs = job.prompt, job.prompt * (job.prompt + 1) // 2
    return job.crowd * fmean(times.seconds(job.prompt, read, pairs) + times.gap(1) for _ in range(200))


def _used(pid: int, target: Target, vocab: int, job: _FrontLoad) -> tuple[float, Load]:
    """The seconds of processor time that a process spent on requests of these lengths."""
    prompts = PromptMaker(vocab, random.randrange(2**32))
    requests = [
        target.request(
            prompts.token_ids(TraceRequest(arrival=0.0, input_length=job.prompt), number),
            job.answer,
            temperature=TEMPERATURE,
        )
        for number in range(job.number)
    ]
    _answered(target, requests[: job.crowd], job.crowd)
    before = cpu_seconds(pid)
    load = _answered(target, requests, job.crowd)
    return cpu_seconds(pid) - before, load


def _answered(target: Target, requests: Sequence[bytes], crowd: int) -> Load:
    load = closed_loop(target, requests, crowd, "front")
    errors = [outcome.error for outcome in load.outcomes if outcome.error]
    if errors:
        raise RequestFailed(f"the server failed {len(errors)} of {len(requests)} requests: {errors[0]}")
    return load


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
