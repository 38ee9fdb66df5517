"""What the cost model knows before the first request: a few real steps, timed."""

from collections.abc import Iterator
from typing import NamedTuple

from chairlift.core.cost import CostModel
from chairlift.core.sequences.request import Request, SamplingParams, Start, Step
from chairlift.runners.sequences import SequenceInfo, SequenceRunner

# A model too slow for all of it starts with what there was time for.
_SECONDS = 0.5
_PARAMS = SamplingParams(temperature=0, max_tokens=None)


class TimedStep(NamedTuple):
    """What a step held, as `CostModel` counts it, and the seconds that it took."""

    sequences: int
    tokens: int
    kv_tokens: int
    pairs: int
    seconds: float


class Probe(NamedTuple):
    """So many sequences after so much context, a chunk of prompt for each, and then so many decodes."""

    width: int
    context: int
    chunk: int
    decodes: int


# Decodes of one and of many, small and large chunks, before and after a context: what tells the coefficients apart.
_PROBES = (
    Probe(1, 0, 16, 2),
    Probe(16, 0, 1, 2),
    Probe(1, 1024, 64, 2),
    Probe(1, 0, 192, 1),
)
# Makes the system back the KV memory that the others use, which takes longer than the step itself.
_TOUCH = Probe(1, 1024, 1, 0)


def calibrate(
    model: CostModel, runner: SequenceRunner, info: SequenceInfo, slots: int, max_num_batched_tokens: int
) -> None:
    """Time some steps of a loaded and warm runner, on blocks that nobody holds yet, for about half a second at most.

    Contexts are not computed first: whatever lies in their blocks takes as long to read. The runner is left as it was.
    Where nothing fits, the cost model keeps its first guess.
    """
    spent = 0.0
    for probe in (_TOUCH, *_PROBES):
        if is_on_gpu(info):
            # Steps of a new shape are computed as they are, then recorded, and only then cost what they will.
            timed_steps(probe._replace(decodes=2), runner, info, slots, max_num_batched_tokens)
        for timed in timed_steps(probe, runner, info, slots, max_num_batched_tokens):
            spent += timed.seconds
            if probe is not _TOUCH:
                model.observe(timed.seconds, timed.tokens, timed.kv_tokens, timed.pairs)
        if spent > _SECONDS:
            return


def is_on_gpu(info: SequenceInfo) -> bool:
    """Whether the first steps of a shape show what is set up for it, and not what it costs."""
    return info.device.startswith("cuda")


def timed_steps(
    wanted: Probe,
    runner: SequenceRunner,
    info: SequenceInfo,
    slots: int,
    max_num_batched_tokens: int,
    params: SamplingParams = _PARAMS,
) -> list[TimedStep]:
    """Run the steps of a probe, cut to what fits, as `calibrate` does; none if nothing does."""
    probe = _fitted(wanted, info, slots, max_num_batched_tokens)
    if probe is None:
        return []
    found, width = [], probe.width
    names = [f"calibration-{index}" for index in range(width)]
    for step, computed, count in _steps(probe, names, info, params):
        seconds = runner.execute(step).seconds
        read, pairs = computed + count, count * computed + count * (count + 1) // 2
        found.append(TimedStep(width, width * count, width * read, width * pairs, seconds))
    runner.execute(Step(-1, {}, [], {}, names, []))
    return found


def _fitted(probe: Probe, info: SequenceInfo, slots: int, max_num_batched_tokens: int) -> Probe | None:
    """Cut a probe to what this model and these settings allow; None if nothing of it is left."""
    width = min(probe.width, slots, max_num_batched_tokens, info.num_blocks)
    chunk = min(probe.chunk, max_num_batched_tokens)
    longest = min(info.max_model_len, info.num_blocks // width * info.block_size)
    context = min(probe.context, longest - chunk - probe.decodes)
    return None if context < 0 else Probe(width, context, chunk, probe.decodes)


def _steps(
    probe: Probe, names: list[str], info: SequenceInfo, params: SamplingParams
) -> Iterator[tuple[Step, int, int]]:
    """Yield each step, the tokens that each sequence has computed before it, and those that it computes."""
    computed = probe.context
    for count in (probe.chunk, *(1 for _ in range(probe.decodes))):
        step = Step(-1, dict.fromkeys(names, count), [], {}, [], [])
        if computed == probe.context:
            step.started = _starts(probe, names, info, params)
        yield step, computed, count
        computed += count


def _starts(probe: Probe, names: list[str], info: SequenceInfo, params: SamplingParams) -> list[Start]:
    prompt = [0] * (probe.context + probe.chunk)
    width = -(-(len(prompt) + probe.decodes) // info.block_size)
    starts = []
    for index, name in enumerate(names):
        request = Request(id=name, prompt_ids=prompt, params=params, max_tokens=probe.decodes + 1, arrival=0.0)
        starts.append(Start(request, prompt, probe.context, list(range(index * width, (index + 1) * width))))
    return starts
