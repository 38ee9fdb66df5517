"""The persistent batch: what the runner holds of each sequence between steps, and a step's inputs made from it."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from chairlift.core.sequences.step import Start, Step
from chairlift.ops.base import AttentionBatch, Inputs, Int32s, Ints


@dataclass(slots=True)
class Prepared:
    """A step's inputs and where its sequences lie. S sequences in the order of the step, T tokens.

    ids [S]; rows [S]: each sequence's row in the batch; first [S]: position of its first token in this step;
    context [S]: its length once the step is done; query_start [S + 1]: as in AttentionBatch; samples [S]: whether all
    of its tokens are then computed, so that the next one is sampled; longest_query, longest_context: the largest number
    of tokens of a sequence in this step, and its largest length.
    """

    ids: list[str]
    rows: Ints
    first: Ints
    context: Ints
    query_start: Ints
    samples: NDArray[np.bool_]
    tokens: Ints
    positions: Ints
    slots: Ints
    block_tables: Int32s
    longest_query: int
    longest_context: int

    def inputs(self, logit_rows: Ints, device: torch.device) -> Inputs:
        """Tensors for the model, which gives hidden states for these tokens of the step only (ascending)."""
        attention = AttentionBatch(
            query_start=torch.from_numpy(self.query_start.astype(np.int32)).to(device),
            context_len=torch.from_numpy(self.context.astype(np.int32)).to(device),
            block_tables=torch.from_numpy(self.block_tables).to(device),
            slot_mapping=torch.from_numpy(self.slots).to(device),
            positions=torch.from_numpy(self.positions).to(device),
            max_query_len=self.longest_query,
            max_context_len=self.longest_context,
        )
        return Inputs(
            token_ids=torch.from_numpy(self.tokens).to(device),
            attention=attention,
            logit_rows=torch.from_numpy(logit_rows).to(device),
        )


class PersistentBatch:
    """Token ids, block tables and progress of up to `slots` sequences, one row each.

    The arrays are reserved for the longest sequences, but touched (so backed by memory) only as far as they are used.
    """

    def __init__(self, slots: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.row_of: dict[str, int] = {}
        self._free = list(range(slots))[::-1]
        # One more than the longest context: the last token of a full sequence is sampled but never computed.
        self.tokens = np.zeros((slots, max_model_len + 1), np.int64)
        self.block_tables = np.zeros((slots, -(-max_model_len // block_size)), np.int32)
        self.num_tokens = np.zeros(slots, np.int64)
        self.num_computed = np.zeros(slots, np.int64)
        self._num_blocks = np.zeros(slots, np.int64)

    def add(self, start: Start) -> int:
        """Give a sequence a row and return it."""
        row = self._free.pop()
        self.row_of[start.request.id] = row
        self.num_tokens[row] = len(start.token_ids)
        self.tokens[row, : len(start.token_ids)] = start.token_ids
        self.num_computed[row] = start.num_computed_tokens
        self._num_blocks[row] = 0
        self.extend(row, start.block_table)
        return row

    def extend(self, row: int, blocks: list[int]) -> None:
        """Append physical blocks to a sequence's block table."""
        end = self._num_blocks[row] + len(blocks)
        self.block_tables[row, self._num_blocks[row] : end] = blocks
        self._num_blocks[row] = end

    def remove(self, request_id: str) -> int | None:
        """Free a sequence's row and return it; None if the sequence never started."""
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self._free.append(row)
        return row

    def prepare(self, step: Step) -> Prepared:
        """Lay the step's tokens end to end."""
        rows = np.array([self.row_of[name] for name in step.num_tokens], np.int64)
        counts = np.fromiter(step.num_tokens.values(), np.int64, len(rows))
        first = self.num_computed[rows]
        context = first + counts
        longest_query, longest_context = int(counts.max()), int(context.max())
        if longest_query == 1:
            query_start = np.arange(len(rows) + 1)
            row_of_token, positions = rows, first
        else:
            query_start = np.zeros(len(rows) + 1, np.int64)
            np.cumsum(counts, out=query_start[1:])
            row_of_token = np.repeat(rows, counts)
            positions = np.arange(query_start[-1]) + np.repeat(first - query_start[:-1], counts)
        logical, offset = np.divmod(positions, self.block_size)
        blocks = self.block_tables[row_of_token, logical].astype(np.int64)
        width = -(-longest_context // self.block_size)
        return Prepared(
            ids=list(step.num_tokens),
            rows=rows,
            first=first,
            context=context,
            query_start=query_start,
            samples=context == self.num_tokens[rows],
            tokens=self.tokens[row_of_token, positions],
            positions=positions,
            slots=blocks * self.block_size + offset,
            block_tables=self.block_tables[rows, :width],
            longest_query=longest_query,
            longest_context=longest_context,
        )

    def commit(self, prepared: Prepared) -> None:
        """Record that the step's tokens are computed."""
        self.num_computed[prepared.rows] = prepared.context

    def take_back(self, row: int) -> None:
        """Have a sequence's last token computed again."""
        self.num_computed[row] -= 1

    def append_forced(self, row: int, token_ids: list[int]) -> None:
        """Append tokens that a sequence goes on with; those beyond the longest that it can be are dropped."""
        first = self.num_tokens[row]
        some = token_ids[: self.tokens.shape[1] - first]
        self.tokens[row, first : first + len(some)] = some
        self.num_tokens[row] += len(some)

    def append(self, rows: Ints, token_ids: Ints) -> None:
        """Append one sampled token to each of these sequences."""
        self.tokens[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
