"""What every runner is: it gets a `Step` and knows nothing of queues."""

from typing import Protocol

import msgspec

from chairlift.core.sequences.request import Step, StepResult


class SequenceInfo(msgspec.Struct, kw_only=True):
    """What the front and the scheduler need to know of a loaded model. Sizes in tokens, blocks and bytes."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    dtype: str
    device: str
    ops: str
    weight_bytes: int
    kv_bytes: int


class SequenceRunner(Protocol):
    """Computes steps. Calls come from one thread, one at a time."""

    def load(self) -> SequenceInfo:
        """Read the weights and allocate the KV cache. Raises UnsupportedModel or ConfigError."""
        ...

    def warm_up(self) -> None:
        """Run what the first requests would otherwise pay for."""
        ...

    def execute(self, step: Step) -> StepResult:
        """Compute one forward pass and sample; KV for the step's tokens is written as a side effect."""
        ...

    def close(self) -> None:
        """Release the weights and the cache."""
        ...
