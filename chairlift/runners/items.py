"""What every runner of a model that answers in one call is: payloads in, results out, one call for a batch."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from chairlift.folders.kind import Task

# Of models that take texts; see `ItemInfo`.
TEXT_TASKS: tuple[Task, ...] = ("embed", "classify", "rerank")


class TensorSpec(msgspec.Struct, frozen=True):
    """A named tensor; `datatype` as the Open Inference Protocol spells it (FP32, INT64, BYTES), -1 where any size goes.

    `shape` is that of one item, so it has no batch dimension.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


class ItemInfo(msgspec.Struct, kw_only=True):
    """What the front needs to know of a loaded model of items; `device` and `dtype` are empty where only it knows.

    `task` says what a payload is. "embed", "classify" and "rerank": an `Encoding`, to a float32 vector (for the two
    others the logits, one for each of `labels`). "tensors": a dict of NumPy arrays without a batch dimension, named as
    in `inputs`, to the same of `outputs`. "python": whatever the user's class takes and gives, as JSON and arrays.
    `activation` is what makes probabilities of logits where it is another than for one label of several: that of
    labels of which any number may hold, or none for a number that is meant as it is. `own_activation` is that of
    sentence-transformers' files, where `activation` is not known by the kind of labels.
    `shape_keys` says that items must have equal shapes to share a batch. `max_tokens`, `dimensions` and
    `hidden_size`, the numbers of a token's vector, are of encoders.
    `batch_axis` says that protocols put a batch dimension before the shapes of `inputs` and `outputs`; without it, a
    request's tensors are one item as they are. `max_batch_size` and `max_wait_ms` hold where the settings leave them
    open.
    """

    task: Task
    device: str
    dtype: str
    ops: str = ""
    weight_bytes: int = 0
    max_tokens: int | None = None
    dimensions: int | None = None
    hidden_size: int | None = None
    labels: tuple[str, ...] = ()
    activation: str | None = None
    own_activation: str | None = None
    pooling: str | None = None
    normalized: bool = False
    vocab_size: int | None = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    shape_keys: bool = False
    streams: bool = False
    batch_axis: bool = True
    max_batch_size: int | None = None
    max_wait_ms: float | None = None

    @property
    def score_activation(self) -> str | None:
        """What makes scores of logits as in vLLM and sentence-transformers; TEI goes by `activation` alone."""
        return self.activation or self.own_activation


class Encoding(msgspec.Struct, array_like=True):
    """A text, or a pair of texts, as token ids with special tokens in place; `type_ids` marks the second of a pair.

    With `every_token` the result is what the backbone gives for each token, [tokens, hidden size], and is not pooled.
    """

    token_ids: list[int]
    type_ids: list[int] | None = None
    every_token: bool = False


class ItemRunner(Protocol):
    """Computes batches. Calls come from one thread, one at a time."""

    def load(self) -> ItemInfo:
        """Read the weights. Raises UnsupportedModel or ConfigError."""
        ...

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Run batches of these many items, so that no request pays for what happens only once."""
        ...

    def run(self, payloads: Sequence[Any]) -> list[Any]:
        """Compute one batch: a result for each payload, in their order; an exception instance where one item failed.

        Raises MemoryError (or torch's or ONNX Runtime's own kind) if the batch is too large, anything else if the call
        failed as a whole.
        """
        ...

    def close(self) -> None:
        """Release the weights."""
        ...


class StreamingRunner(ItemRunner, Protocol):
    """A runner whose `ItemInfo.streams` is set: results come in parts."""

    def stream(self, payloads: Sequence[Any], emit: Callable[[dict[int, Any]], None]) -> list[Any]:
        """Like `run`, and hand each new part of a result to `emit` as soon as it is there, by its item's index."""
        ...
