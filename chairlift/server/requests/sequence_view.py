"""What is told of the sequences of a language model; its worker is asked where they are, if somebody wants to know."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from chairlift.config.sequences import SequenceConfig
from chairlift.core.decision import Reason
from chairlift.core.sequences.standing import SequenceState, Standing
from chairlift.core.sequences.strategy import STRATEGIES
from chairlift.engine.sequences.client import Stream
from chairlift.server.models.request_log import EndedRequest, Viewer, request_of
from chairlift.server.models.sequence_service import Sample, SequenceService
from chairlift.server.requests.request_view import (
    MOST_NAMED,
    MOST_OWN,
    WHY_WAITING,
    AheadView,
    HintView,
    PhasesView,
    RequestView,
    created_at,
    ended_view,
    predicted,
    without_others,
)

_WAITING = (SequenceState.WAITING, SequenceState.PREEMPTED)
_GAVE_UP = "it gave up its place to a more urgent one, and is computed anew later"
# What is said of those of which the worker says nothing.
_IN_FRONT = {
    SequenceState.WAITING: "it waits",
    SequenceState.PREFILLING: "its prompt is read",
    SequenceState.RUNNING: "it is being answered",
    SequenceState.PREEMPTED: _GAVE_UP,
}
# What would have saved less than this, in seconds and as a share of the whole, is not worth a word.
_LEAST_S, _LEAST_SHARE = 0.05, 0.05


async def live_views(service: SequenceService, viewer: Viewer, samples: Sequence[Sample]) -> list[RequestView]:
    """What is told of sequences that have not ended."""
    mine = {sample.stream.request.id: sample for sample in islice(service.log.live_of(viewer), MOST_OWN)}
    mine |= {sample.stream.request.id: sample for sample in samples}
    ids = [sample.stream.request.id for sample in samples]
    waiting = [request_id for request_id, sample in mine.items() if not sample.stream.started]
    found = await service.client.explain(dict.fromkeys((*ids, *waiting)))
    foreseen = service.client.foresee(ids)
    now = time.monotonic()
    queues = {background: _in_line(mine, found, background) for background in (False, True)}
    views = []
    for request_id, sample in zip(ids, samples, strict=True):
        standing = found.get(request_id)
        view = _live_view(service, sample, standing, mine, now)
        view.predicted = predicted(foreseen.get(request_id), now)
        if standing is not None and standing.state in _WAITING:
            view.position, view.ahead = standing.ahead + 1, _ahead(standing, queues[view.background])
        elif (standing is not None or sample.stream.running_since) and view.predicted is not None:
            view.predicted.start = None  # it has begun
        views.append(view)
    return views


def _in_line(mine: Mapping[str, Sample], found: Mapping[str, Standing], background: bool) -> list[tuple[int, str]]:
    """A viewer's own sequences in one of the two queues: how many are ahead of each, and its id."""
    return sorted(
        (standing.ahead, request_id)
        for request_id, sample in mine.items()
        if sample.stream.request.background is background
        and (standing := found.get(request_id)) is not None
        and standing.state in _WAITING
    )


def _ahead(standing: Standing, queue: list[tuple[int, str]]) -> AheadView:
    own = [request_id for _, request_id in queue[: bisect_left(queue, (standing.ahead, ""))]]
    return AheadView(standing.ahead, own[:MOST_NAMED], standing.ahead - len(own), standing.more_urgent)


def _live_view(
    service: SequenceService, sample: Sample, standing: Standing | None, mine: Mapping[str, Sample], now: float
) -> RequestView:
    """A sequence as far as it is known where it is."""
    stream, request = sample.stream, sample.stream.request
    state, why = _state(sample, standing)
    began = stream.beginning
    return RequestView(
        id=request.id,
        request=request_of(request.id),
        model=service.name,
        kind="sequence",
        state=state,
        why=why,
        reason=standing.reason if standing else None,
        detail=without_others(standing.detail, mine) if standing and standing.detail else None,
        background=request.background,
        priority=request.priority,
        created=created_at(request.arrival, now),
        prompt_tokens=len(request.prompt_ids),
        cached_tokens=began.num_cached_tokens if began and service.config.show_cached_tokens else None,
        tokens=max(sample.num_tokens, standing.tokens if standing else 0),
        phases=_phases(sample, standing, now),
        preemptions=stream.preemptions,
    )


def _state(sample: Sample, standing: Standing | None) -> tuple[str, str]:
    """Where it is, in one word and in some."""
    stream = sample.stream
    if stream.done:
        return "delivering", "it is computed, and its client has yet to read the rest"
    if standing is None:
        state = _state_in_front(stream)
        return state, f"{_IN_FRONT[state]}; the model has not said more, since a long step runs: ask again"
    if standing.state is SequenceState.PREPARING:
        return standing.state, "the form that its answer must have is compiled; then it joins the queue"
    if standing.state is SequenceState.PREFILLING:
        prompt = len(stream.request.prompt_ids)
        return standing.state, f"its prompt is read: {standing.computed} of {prompt + standing.tokens} tokens"
    if standing.state is SequenceState.RUNNING:
        return standing.state, "it is being answered"
    just_come = standing.detail or "it has just come"
    why = just_come if standing.reason is None else WHY_WAITING.get(standing.reason, just_come)
    if standing.state is SequenceState.PREEMPTED:
        why = f"{_GAVE_UP}; {why}"
    return standing.state, why


def _state_in_front(stream: Stream) -> SequenceState:
    """Where one is by what its worker's last step said: whether it took a slot, and gave tokens."""
    if stream.running_since:
        return SequenceState.PREFILLING if stream.beginning is None else SequenceState.RUNNING
    return SequenceState.PREEMPTED if stream.started or stream.preemptions else SequenceState.WAITING


def _phases(sample: Sample, standing: Standing | None, now: float) -> PhasesView:
    """What its phases have taken so far."""
    arrival, began = sample.arrival, sample.stream.beginning
    # When it took its slot, as far as that is known.
    start = sample.stream.running_since if standing is None else standing.started
    if began is not None:
        phases = PhasesView(prefill_s=began.first_token - began.scheduled)
        phases.queued_s = max(began.scheduled - arrival, 0.0)
        phases.decode_s = (sample.stream.ended or now) - began.first_token
    elif start:
        phases = PhasesView(queued_s=max(start - arrival, 0.0), prefill_s=now - start)
    else:
        phases = PhasesView(queued_s=now - arrival)
    phases.total_s = now - arrival
    return phases.rounded()


def ended_views(service: SequenceService, ended: Iterable[EndedRequest]) -> list[RequestView]:
    """What is told of sequences that have ended."""
    show_cached = service.config.show_cached_tokens
    views = []
    for each in ended:
        view = ended_view(each, service.name, "sequence", show_cached)
        # Of a wait those settings tell which held when it began.
        config = service.former.at(each.ended - (each.total_s or 0.0), service.client.config)
        view.hints = _hints(each, config, show_cached)
        views.append(view)
    return views


# What would have made it faster


def _hints(ended: EndedRequest, config: SequenceConfig, show_cached: bool) -> list[HintView]:
    """What its own times say, the most important first; of times too short to matter nothing."""
    least = max(_LEAST_S, _LEAST_SHARE * (ended.total_s or 0.0))
    hints = []
    queued = ended.queued_s or 0.0
    for reason, waited in ended.waits.items():
        seconds = min(waited, queued)
        if seconds >= least and (hint := _hint_of_wait(reason, seconds, config)) is not None:
            hints.append(hint)
    if show_cached and (hint := _hint_of_prompt(ended, config, least)) is not None:
        hints.append(hint)
    hints.sort(key=lambda hint: -(hint.seconds or 0.0))
    if ended.preemptions:
        text = f"it gave up its KV memory {ended.preemptions} times, and what it had was computed anew each time"
        hints.append(HintView("kv_cache_gb", None, f"{text}; with more of that it would have kept it"))
    return hints


def _hint_of_wait(reason: str, seconds: float, config: SequenceConfig) -> HintView | None:
    """What a wait came from; None for one that no setting mends."""
    waited, strategy = f"it waited {seconds:.2f} s", STRATEGIES[config.strategy]
    continuous = 'with strategy = "continuous" it would have joined those that ran'
    hints = {
        Reason.BLOCKS: ("kv_cache_gb", "for room in the KV cache: with more of that it would have started sooner"),
        Reason.TOKENS: ("max_num_batched_tokens", "for steps whose tokens were given to those before it"),
        Reason.ITL: (
            "step_time_ms" if config.target_itl_ms is None else "target_itl_ms",
            "since a prompt would have slowed those that ran beyond that",
        ),
        Reason.WINDOW: ("max_wait_ms", "for company: with a shorter window it would have left sooner"),
        Reason.BATCH: ("batch_size", "for company: a smaller batch, or the dynamic strategy, would have left sooner"),
        Reason.SLOTS: ("strategy", f"until those that ran had ended: {continuous}"),
    }
    if strategy.slots_setting is not None and not strategy.closes_batch:
        more = f"for one of {config.slots} places: with more it would have begun sooner, if the machine can carry them"
        hints[Reason.SLOTS] = (strategy.slots_setting, more)
    found = hints.get(Reason(reason))
    return None if found is None else HintView(found[0], round(seconds, 4), f"{waited} {found[1]}")


def _hint_of_prompt(ended: EndedRequest, config: SequenceConfig, least: float) -> HintView | None:
    """What reading the prompt took, where much of it was not in the prefix cache."""
    prompt, seconds = ended.prompt_tokens or 0, ended.prefill_s or 0.0
    missing = prompt - (ended.cached_tokens or 0)
    if seconds < least or missing < 2 * config.block_size:
        return None
    text = f"its prompt took {seconds:.2f} s: {missing} of {prompt} tokens were not in the prefix cache"
    if not config.enable_prefix_caching:
        return HintView("enable_prefix_caching", round(seconds, 4), f"{text}, which is off")
    advice = "prompts that begin with the same text, word for word, have that part computed once"
    return HintView(None, round(seconds, 4), f"{text}; {advice}")
