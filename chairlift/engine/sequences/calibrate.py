"""What the cost model knows before the first request: a few real steps, timed."""

from chairlift.core.cost import CostModel
from chairlift.core.sequences.calibration import Probe, ProbeStep, fitted, learn, steps_of
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.step import Start, Step
from chairlift.runners.sequences import SequenceInfo, SequenceRunner

_PARAMS = SamplingParams(temperature=0, max_tokens=None)


def calibrate(
    model: CostModel, runner: SequenceRunner, info: SequenceInfo, slots: int, max_num_batched_tokens: int
) -> None:
    """Time some steps of a loaded and warm runner, on blocks that nobody holds yet, for about half a second at most.

    Contexts are not computed first: whatever lies in their blocks takes as long to read. The runner is left as it was.
    Where nothing fits, the cost model keeps its first guess.
    """

    def timed(probe: Probe) -> list[tuple[ProbeStep, float]]:
        if is_on_gpu(info):
            # Steps of a new shape are computed as they are, then recorded, and only then cost what they will.
            timed_steps(probe._replace(decodes=2), runner, info, slots, max_num_batched_tokens)
        return timed_steps(probe, runner, info, slots, max_num_batched_tokens)

    learn(model, timed)


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
) -> list[tuple[ProbeStep, float]]:
    """Run the steps of a probe, cut to what fits, as `calibrate` does, and time each; none if nothing fits."""
    probe = fitted(
        wanted,
        slots=slots,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=info.max_model_len,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
    )
    if probe is None:
        return []
    found: list[tuple[ProbeStep, float]] = []
    names = [f"calibration-{index}" for index in range(probe.width)]
    for shape in steps_of(probe):
        step = Step(-1, dict.fromkeys(names, shape.new), [], {}, [], [])
        if not found:
            step.started = _starts(probe, names, info, params)
        found.append((shape, runner.execute(step).seconds))
    runner.execute(Step(-1, {}, [], {}, names, []))
    return found


def _starts(probe: Probe, names: list[str], info: SequenceInfo, params: SamplingParams) -> list[Start]:
    prompt = [0] * (probe.context + probe.chunk)
    width = -(-(len(prompt) + probe.decodes) // info.block_size)
    starts = []
    for index, name in enumerate(names):
        request = Request(id=name, prompt_ids=prompt, params=params, max_tokens=probe.decodes + 1, arrival=0.0)
        starts.append(Start(request, prompt, probe.context, list(range(index * width, (index + 1) * width))))
    return starts
