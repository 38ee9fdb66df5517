"""What a cost model learns from before the first request: which steps are timed, and when that ends."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from chairlift.core.cost import CostModel

# A model too slow for all of it starts with what there was time for.
_SECONDS = 0.5


class Probe(NamedTuple):
    """So many sequences after so much context, a chunk of prompt for each, and then so many decodes."""

    width: int
    context: int
    chunk: int
    decodes: int


# Decodes of one and of many, small and large chunks, before and after a context: what tells the coefficients apart.
PROBES = (
    Probe(1, 0, 16, 2),
    Probe(16, 0, 1, 2),
    Probe(1, 1024, 64, 2),
    Probe(1, 0, 192, 1),
)
# Makes the system back the KV memory that the others use, which takes longer than the step itself.
_TOUCH = Probe(1, 1024, 1, 0)


class ProbeStep(NamedTuple):
    """A step of a probe: each of `width` sequences has so many tokens computed before it, and new ones in it."""

    width: int
    computed: int
    new: int

    @property
    def tokens(self) -> int:
        """As in `CostModel`."""
        return self.width * self.new

    @property
    def kv_tokens(self) -> int:
        """As in `CostModel`."""
        return self.width * (self.computed + self.new)

    @property
    def pairs(self) -> int:
        """As in `CostModel`."""
        return self.width * (self.new * self.computed + self.new * (self.new + 1) // 2)


def fitted(
    probe: Probe, *, slots: int, max_num_batched_tokens: int, max_model_len: int, num_blocks: int, block_size: int
) -> Probe | None:
    """Cut a probe to what the model and its settings allow; None if nothing of it is left."""
    width = min(probe.width, slots, max_num_batched_tokens, num_blocks)
    chunk = min(probe.chunk, max_num_batched_tokens)
    longest = min(max_model_len, num_blocks // width * block_size)
    context = min(probe.context, longest - chunk - probe.decodes)
    return None if context < 0 else Probe(width, context, chunk, probe.decodes)


def steps_of(probe: Probe) -> Iterator[ProbeStep]:
    """Yield the steps of a probe: the chunk, then each decode."""
    computed = probe.context
    for new in (probe.chunk, *(1 for _ in range(probe.decodes))):
        yield ProbeStep(probe.width, computed, new)
        computed += new


def learn(model: CostModel, time_steps: Callable[[Probe], Iterable[tuple[ProbeStep, float]]]) -> None:
    """Have a cost model learn from the steps of all probes, or as many as there is time for.

    `time_steps` cuts a probe to what fits, and returns its steps with the seconds that each took.
    """
    spent = 0.0
    for probe in (_TOUCH, *PROBES):
        for step, seconds in time_steps(probe):
            spent += seconds
            if probe is not _TOUCH:
                model.observe(seconds, step.tokens, step.kv_tokens, step.pairs)
        if spent > _SECONDS:
            return
