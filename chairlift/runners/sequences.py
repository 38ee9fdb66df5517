"""What a runner of a language model is: it gets a `Step` and knows nothing of queues."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from chairlift.core.cost import ExpertReads
from chairlift.core.sequences.step import Step, StepResult

# Called with what holds a compiled grammar, which is found as long as somebody has it, or with what is wrong with it.
GrammarDone = Callable[[object], None]
# A line of a grammar that begins so says whose the following lines are, for whoever tells of what is wrong with them.
GRAMMAR_PART = "// of "


class SequenceInfo(msgspec.Struct, kw_only=True):
    """What the front and the scheduler need to know of a loaded model. Sizes in tokens, blocks and bytes.

    There are `num_snapshots` places for states, which is None where no layer has one; `experts` is None where there are
    none.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    dtype: str
    device: str
    ops: str
    weight_bytes: int
    kv_bytes: int
    num_snapshots: int | None = None
    experts: ExpertReads | None = None


class SequenceRunner(Protocol):
    """Computes steps. Calls come from one thread, one at a time."""

    def load(self) -> SequenceInfo:
        """Read the weights and allocate the KV cache. Raises UnsupportedModel or ConfigError."""
        ...

    def warm_up(self) -> None:
        """Run what the first requests would otherwise pay for."""
        ...

    def find_grammar(self, grammar: str) -> object | None:
        """Return what holds a grammar, if it is compiled."""
        ...

    def compile_grammar(self, grammar: str, done: GrammarDone) -> None:
        """Compile a grammar in another thread, which calls `done` with what holds it, or with a ValueError."""
        ...

    def cancel_grammar(self, grammar: str) -> bool:
        """Forget a grammar that waits to be compiled; return whether it did, so that nobody will call its `done`."""
        ...

    def execute(self, step: Step) -> StepResult:
        """Compute one forward pass and sample; KV for the step's tokens is written as a side effect."""
        ...

    def close(self) -> None:
        """Release the weights and the cache."""
        ...
