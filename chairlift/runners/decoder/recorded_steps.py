"""Steps in which each sequence has one token, recorded as CUDA graphs.

A GPU is done with a small operation before Python asks for the next. A graph asks for all of a step's at once.
"""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chairlift.ops.base import AttentionBatch, Forward, Inputs
from chairlift.runners.uncollected import nothing_collected

log = logging.getLogger(__name__)

# The shortest context that is recorded for, and how many graphs are kept: each takes some megabytes.
_SHORTEST, _MOST = 256, 96
# Of how many tokens keys and values are read in a recorded step. With more, a GPU is busy for longer than Python asks.
_MOST_KEYS = 1 << 20

Run = Callable[[], None]


@dataclass(slots=True)
class _Step:
    """A step of some shape: what goes in and out lies at the same place each time."""

    inputs: Inputs
    hidden: Tensor | None = None
    run: Run | None = None


class RecordedSteps:
    """Runs a forward pass as recorded where each sequence has one token, and else as it is.

    Steps are padded to a few shapes with their first sequence, which writes to its place in the cache what it writes
    there anyway. A shape is computed as it is when it is first met, and recorded when it comes back. Steps of very many
    keys, and of shapes for which memory has run out, are neither padded nor recorded.
    """

    def __init__(
        self, forward: Forward, block_size: int, max_model_len: int, record: Callable[[Run], Run] | None = None
    ) -> None:
        """`record` returns what does again what it is given, without looking at anything but memory."""
        self._forward, self._block_size = forward, block_size
        self._longest = -(-max_model_len // block_size) * block_size
        self._record = record or GraphRecorder()
        self._steps: OrderedDict[tuple[int, int], _Step] = OrderedDict()
        self._too_large: set[tuple[int, int]] = set()
        # What steps give, by the power of two up to which they have sequences. Logits of all shapes would be gigabytes.
        self._given: dict[int, Tensor] = {}

    @property
    def has_recordings(self) -> bool:
        """Whether any shape has been recorded."""
        return any(step.run is not None for step in self._steps.values())

    def forward(self, inputs: Inputs) -> Tensor:
        """Return hidden states [R, H], or what else it gives for rows, which are there until the next call."""
        batch, count = inputs.attention, len(inputs.token_ids)
        if batch.max_query_len != 1 or len(inputs.logit_rows) != count:
            return self._forward(inputs)
        shape = _padded(count), min(max(_power(batch.max_context_len), _SHORTEST), self._longest)
        if shape in self._too_large or shape[0] * shape[1] > _MOST_KEYS:
            return self._forward(inputs)
        try:
            return self._step_of(shape, inputs)[:count]
        except torch.OutOfMemoryError:
            # It takes more than the step as it is, and while PyTorch records it frees nothing of what it keeps.
            log.warning("decodes of %d sequences over %d tokens are not recorded, for want of memory", *shape)
        self._too_large.add(shape)
        self._steps.pop(shape, None)
        return self._forward(inputs)

    def _step_of(self, shape: tuple[int, int], inputs: Inputs) -> Tensor:
        step = self._steps.get(shape)
        if step is None:
            if len(self._steps) == _MOST:
                self._steps.popitem(last=False)
            step = self._steps[shape] = _Step(self._room(*shape, inputs.token_ids.device))
        self._steps.move_to_end(shape)
        _fill(step.inputs, inputs)
        return self._compute(step)

    def _compute(self, step: _Step) -> Tensor:
        def compute() -> None:
            step.hidden = self._kept(self._forward(step.inputs))

        if step.hidden is None:
            # What libraries set up for a shape is not to become a part of the recording.
            compute()
        elif step.run is None:
            step.run = self._record(compute)
        if step.run is not None:
            step.run()
        assert step.hidden is not None
        return step.hidden

    def _kept(self, found: Tensor) -> Tensor:
        """Its copy where steps of like numbers of sequences all leave theirs."""
        count, room = len(found), _power(len(found))
        if room not in self._given:
            self._given[room] = found.new_empty(room, *found.shape[1:])
        return self._given[room][:count].copy_(found)

    def _room(self, count: int, context: int, device: torch.device) -> Inputs:
        """Inputs of so many sequences."""

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        attention = AttentionBatch(
            query_start=torch.arange(count + 1, dtype=torch.int32, device=device),
            context_len=zeros(count, dtype=torch.int32),
            block_tables=zeros(count, -(-context // self._block_size), dtype=torch.int32),
            slot_mapping=zeros(count),
            positions=zeros(count),
            max_query_len=1,
            max_context_len=context,
        )
        return Inputs(zeros(count), attention, torch.arange(count, device=device))


def _fill(room: Inputs, inputs: Inputs) -> None:
    """Write a step's inputs where they are read, with the first sequence as many times as there is room left."""
    count, (to, given) = len(inputs.token_ids), (room.attention, inputs.attention)
    width = given.block_tables.shape[1]
    pairs = [
        (room.token_ids, inputs.token_ids),
        (to.context_len, given.context_len),
        (to.slot_mapping, given.slot_mapping),
        (to.positions, given.positions),
        (to.block_tables[:, :width], given.block_tables),
    ]
    for where, what in pairs:
        where[:count] = what
        where[count:] = what[:1]
    to.known_on_host = None


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()


def _padded(count: int) -> int:
    """The next multiple of an eighth of the next power of two."""
    part = max(_power(count) // 8, 1)
    return -(-count // part) * part


class GraphRecorder:
    """Records on the GPU. Recordings share their memory, as one runs after the other."""

    def __init__(self, is_trusted: bool = True) -> None:
        """What is not trusted is looked at once, whether it waits for the GPU."""
        self._is_trusted = is_trusted
        self._pool: Any = None

    def __call__(self, compute: Run) -> Run:
        """Raises RuntimeError for what waits, and OutOfMemoryError."""
        if not self._is_trusted:
            _run_without_waiting(compute)
            self._is_trusted = True
        graph = torch.cuda.CUDAGraph()
        # Circles of objects may hold graphs, which must not be freed while another is recorded.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"), nothing_collected():
            compute()
        self._pool = graph.pool()
        replay: Run = graph.replay
        return replay


def _run_without_waiting(compute: Run) -> None:
    """Raise RuntimeError if it waits for the GPU.

    It would not be recorded either, but PyTorch is not itself again after a recording that broke off. For as long as
    this takes, threads that wait for a GPU get the error too.
    """
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        compute()
    finally:
        torch.cuda.set_sync_debug_mode(before)
