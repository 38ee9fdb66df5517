"""States of layers that remember by a state instead of keys and values: of sequences that run, and kept snapshots."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift.core.sequences.step import Start, Step
from chairlift.ops.base import KVCache, StateSpans
from chairlift.runners.decoder.batch import PersistentBatch, Prepared
from chairlift.runners.grammars.grammar_rows import GrammarRows


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a layer's state, of one sequence. A new text begins with zeros."""

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        size = self.dtype.itemsize
        for each in self.shape:
            size *= each
        return size


Saves = Mapping[str, list[tuple[int, int]]]
# Each tensor begins at a multiple of this many bytes.
_ALIGNMENT = 64


class RecurrentStates:
    """States of all layers in so many rows, each in one piece of memory."""

    def __init__(self, shapes: Sequence[StateShape], rows: int, device: torch.device) -> None:
        starts, width = [], 0
        for each in shapes:
            starts.append(width)
            width += -(-each.nbytes // _ALIGNMENT) * _ALIGNMENT
        # Only rows that are used take memory.
        self._all = torch.zeros((rows, width), dtype=torch.uint8, device=device)
        self._tensors: dict[int, dict[str, Tensor]] = {}
        self._columns: dict[int, slice] = {}
        for each, start in zip(shapes, starts, strict=True):
            numbers = self._all[:, start : start + each.nbytes].view(each.dtype)
            self._tensors.setdefault(each.layer, {})[each.name] = numbers.view(rows, *each.shape)
            first = self._columns.get(each.layer, slice(start, start)).start
            self._columns[each.layer] = slice(first, start + each.nbytes)

    @staticmethod
    def bytes_of(shapes: Sequence[StateShape]) -> int:
        """Bytes of a row."""
        return sum(-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in shapes)

    def of_layer(self, layer: int) -> Mapping[str, Tensor]:
        """The tensors of a layer, each [rows, ...]."""
        return self._tensors[layer]

    def copy(self, source: int, target: int, layer: int | None = None) -> None:
        """Copy a row, or what of it is a layer's."""
        columns = slice(None) if layer is None else self._columns[layer]
        self._all[target, columns] = self._all[source, columns]

    @contextmanager
    def passing(self, spans: StateSpans) -> Iterator[None]:
        """Around a pass through these states: copy those that are wanted as they are before it, or behind it."""
        self._copy_all(spans, lambda index: 0)
        yield
        self._copy_all(spans, lambda index: spans.starts[index + 1] - spans.starts[index])

    def _copy_all(self, spans: StateSpans, at: Callable[[int], int]) -> None:
        for index, cuts in spans.cuts.items():
            for count, target in cuts:
                if count == at(index):
                    self.copy(spans.rows[index], target)

    def clear(self, row: int) -> None:
        """Have a new text begin in a row."""
        self._all[row] = 0


class StateKeeper:
    """Has the states of a runner's sequences in their rows of its batch, and copies them where a step says.

    Behind the rows of sequences lie as many for those that may have to compute a token again, and then the snapshots.
    Tokens of a snapshot that fill no block have their keys and values in a block of its own, behind all others.
    """

    def __init__(self, states: RecurrentStates, caches: Sequence[KVCache], slots: int, num_blocks: int) -> None:
        self._states, self._caches, self._slots, self._num_blocks = states, caches, slots, num_blocks

    def keep(self, step: Step, batch: PersistentBatch) -> None:
        """Copy the states of those that leave, if they are kept."""
        for name, slot in step.kept.items():
            row = batch.row_of[name]
            self._states.copy(row, self._snapshot(slot))
            self._copy_tail(batch, row, int(batch.num_computed[row]), slot)

    def begin(self, row: int, start: Start, block_size: int) -> None:
        """Give a sequence the state that it starts with."""
        if start.snapshot is None:
            self._states.clear(row)
            return
        self._states.copy(self._snapshot(start.snapshot), row)
        full, rest = divmod(start.num_computed_tokens, block_size)
        if rest:
            self._copy_block(self._num_blocks + start.snapshot, start.block_table[full])

    def spans(self, prepared: Prepared, saves: Saves, ruled: GrammarRows | None) -> StateSpans:
        """Say through which states a pass goes, and where it copies them; `ruled` rows may have to go back a token."""
        rows, starts, before = (each.tolist() for each in (prepared.rows, prepared.query_start, prepared.first))
        cuts: dict[int, list[tuple[int, int]]] = {}
        for index, (name, row) in enumerate(zip(prepared.ids, rows, strict=True)):
            found = [(position - before[index], self._snapshot(slot)) for position, slot in saves.get(name, ())]
            if ruled is not None and row in ruled and prepared.samples[index]:
                found.append((starts[index + 1] - starts[index] - 1, self._slots + row))
            if found:
                cuts[index] = sorted(found)
        return StateSpans(rows, before, starts, cuts)

    def save_tails(self, prepared: Prepared, saves: Saves, batch: PersistentBatch) -> None:
        """Copy keys and values that belong to what a pass has saved."""
        if saves:
            rows = dict(zip(prepared.ids, prepared.rows.tolist(), strict=True))
            for name, places in saves.items():
                for position, slot in places:
                    self._copy_tail(batch, rows[name], position, slot)

    def take_back(self, row: int) -> None:
        """Have a sequence forget the last token of the pass that was."""
        self._states.copy(self._slots + row, row)

    def _snapshot(self, slot: int) -> int:
        return 2 * self._slots + slot

    def _copy_tail(self, batch: PersistentBatch, row: int, num_tokens: int, slot: int) -> None:
        full, rest = divmod(num_tokens, batch.block_size)
        if rest:
            self._copy_block(int(batch.block_tables[row, full]), self._num_blocks + slot)

    def _copy_block(self, source: int, target: int) -> None:
        for cache in self._caches:
            for each in cache:
                each[target] = each[source]
