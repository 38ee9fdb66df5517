"""What keeps a server from more: slots, memory, arithmetic, bandwidth, calls, the front, or its latency targets."""

from typing import Literal, NamedTuple

import msgspec

from chairlift.config.sequences import SequenceConfig
from chairlift.core.cost import Coefficients
from chairlift.core.items.limits import BatchLimits
from chairlift.core.sequences.strategy import STRATEGIES
from chairlift.plan.figures import Gauges, report
from chairlift.plan.machine_profile import ItemProfile
from chairlift.plan.simulated_run import SimulatedRun

# Shares from which on something counts as full, and below which a machine has time to spare.
_FULL, _IDLE = 0.9, 0.85
# A closed batch with more of its slots empty is what limits.
_EMPTY = 0.3

Bottleneck = Literal[
    "KV memory",
    "front",
    "empty slots",
    "slots",
    "compute",
    "memory bandwidth",
    "targets",
    "batch",
    "batch size",
    "calls",
]


class Limit(msgspec.Struct, kw_only=True, frozen=True):
    """What limits a server, and how that shows. `compute` is the share of its steps' time that goes into arithmetic."""

    by: Bottleneck
    why: str
    compute: float


class _Shares(NamedTuple):
    """Seconds of all steps: of tokens and of pairs of tokens, and of reading weights and KV."""

    compute: float
    reading: float


def sequence_limit(config: SequenceConfig, num_blocks: int, cost: Coefficients, run: SimulatedRun) -> Limit:
    """Return what limits a language model's server, from a run at which it misses its targets, or does all it can."""
    found = report(run)
    (gauge,) = found.gauges.values()
    shares = _shares(cost, run)
    compute = shares.compute / ((shares.compute + shares.reading) or 1.0)
    front = run.front_seconds / found.seconds if found.seconds else 0.0
    by, why = _bottleneck(config, num_blocks, gauge, found.preemptions, front)
    if by == "compute":
        by = "compute" if compute >= 0.5 else "memory bandwidth"
        why = f"steps take {gauge.busy:.0%} of the time: {compute:.0%} of that is arithmetic, which grows with tokens"
        why += f", {1 - compute:.0%} reading weights and KV, which more sequences in a step share"
    return Limit(by=by, why=why, compute=compute)


def item_limit(limits: BatchLimits, instances: int, profile: ItemProfile, run: SimulatedRun) -> Limit:
    """Return what limits a server of a model that answers in one call, from such a run; `profile` is as simulated."""
    found = report(run)
    (gauge,) = found.gauges.values()
    busy, front = gauge.busy / instances, run.front_seconds / found.seconds if found.seconds else 0.0
    (steps,) = run.steps.values()
    size, calls = profile.size * sum(steps.tokens), profile.call * len(steps)
    compute = size / ((size + calls) or 1.0)
    share = f"calls take {busy:.0%} of the time"
    cost = f"{1 - compute:.0%} of that is what a call costs by itself"
    if front >= _FULL:
        return Limit(by="front", why=f"the front's one thread is busy {front:.0%} of the time", compute=compute)
    if busy < _IDLE and limits.max_wait > 0:
        return Limit(by="batch", why=f"{share}: requests wait for a batch to fill", compute=compute)
    if busy < _IDLE:
        return Limit(by="targets", why=f"{share}: bursts and large requests miss the targets before", compute=compute)
    if compute < 1 - _EMPTY and gauge.mean_batch >= _FULL * limits.max_batch_size:
        why = f"{share}, full with {gauge.mean_batch:.1f} items: {cost}, which larger batches share"
        return Limit(by="batch size", why=why, compute=compute)
    return Limit(by="compute" if compute >= 0.5 else "calls", why=f"{share}: {cost}", compute=compute)


def _bottleneck(
    config: SequenceConfig, blocks: int, gauge: Gauges, preemptions: int, front: float
) -> tuple[Bottleneck, str]:
    """The first thing that is full; "compute" stands for the steps themselves."""
    slots = config.slots
    held, taken = gauge.mean_kv_blocks / blocks, gauge.mean_running / slots
    closes = STRATEGIES[config.strategy].closes_batch
    if preemptions or held >= _FULL:
        return "KV memory", f"{held:.0%} of its KV blocks are held on average, and {preemptions} requests had to pause"
    if front >= _FULL:
        return "front", f"the front's one thread is busy {front:.0%} of the time"
    if gauge.busy < _IDLE and closes:
        return "batch", f"steps take {gauge.busy:.0%} of the time: requests wait for a batch to fill, or for one to end"
    if gauge.busy < _IDLE:
        return "targets", f"steps take {gauge.busy:.0%} of the time: bursts and long prompts miss the targets before"
    if closes and slots > 1 and taken < 1 - _EMPTY:
        return "empty slots", f"{1 - taken:.0%} of a batch's slots are empty, as it goes on for its longest answer"
    if taken >= _FULL and gauge.mean_waiting >= 1 and slots > 1:
        return "slots", f"all {slots} slots are taken, and {gauge.mean_waiting:.1f} requests wait for one on average"
    return "compute", ""


def _shares(cost: Coefficients, run: SimulatedRun) -> _Shares:
    """What steps are predicted to take for all requests that had tokens; a prompt counts as one chunk."""
    (steps,) = run.steps.values()
    compute = reading = 0.0
    for life in run.requests:
        if not life.num_tokens:
            continue
        prompt, decodes, cached = life.request.input_length, life.num_tokens - 1, life.cached_tokens
        own = prompt - cached
        seen = decodes * prompt + decodes * (decodes + 1) // 2
        compute += cost.token * (own + decodes) + cost.pair * (own * cached + own * (own + 1) // 2 + seen)
        reading += cost.kv_token * (prompt + seen)
    return _Shares(compute, reading + cost.step * len(steps))
