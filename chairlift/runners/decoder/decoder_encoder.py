"""A decoder that reads texts and writes none: an encoder whose tokens see what comes before them, or all of it."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.ops.base import AttentionBatch, Forward, Inputs, Int32s
from chairlift.ops.encoder import Output, Texts, text_means
from chairlift.runners.decoder.model import Decoder

_BLOCK = 16
# Tokens of a pass. Enough to use each weight many times; with more, what a layer makes no longer fits into caches, and
# the memory for it would grow with the batch.
_PASS_TOKENS = {"cpu": 1024, "cuda": 16384}


class DecoderEncoder:
    """Implements `EncoderForward` by prefills of whole texts, packed end to end.

    K and V of a layer are written and read within that layer, so one layer's cache serves them all, and the next pass
    writes over it.
    """

    def __init__(self, decoder: Decoder, max_tokens: int) -> None:
        """Take a decoder that has no cache yet, for texts of up to `max_tokens`."""
        self._decoder = decoder
        self._pass_tokens = _PASS_TOKENS[decoder.device.type]
        # At worst all texts of a pass are single tokens, and each has a block of its own.
        num_blocks = max(-(-max_tokens // _BLOCK), self._pass_tokens)
        decoder.allocate(num_blocks, _BLOCK, max_tokens, one_layer=True)
        self._hidden: Forward = decoder.forward
        self.nbytes = decoder.weight_bytes

    def __call__(self, texts: Texts, output: Output) -> Tensor:
        """Return hidden states after the last norm, float32: [T, H] for "tokens", else [S, H]."""
        return torch.cat([self._forward(part, output) for part in self._passes(texts)])

    def _passes(self, texts: Texts) -> Iterator[Texts]:
        """Cut the batch into parts of as many tokens as a pass has; a text that is longer is a part of its own."""
        starts, first = texts.starts, 0
        for end in range(1, len(starts)):
            if end == len(starts) - 1 or starts[end + 1] - starts[first] > self._pass_tokens:
                yield Texts(texts.token_ids[starts[first] : starts[end]], None, starts[first : end + 1] - starts[first])
                first = end

    def _forward(self, texts: Texts, output: Output) -> Tensor:
        starts = texts.starts
        inputs = Inputs(
            self._tensor(texts.token_ids, np.int64),
            self._attention(starts),
            self._tensor(
                {"first": starts[:-1], "last": starts[1:] - 1}.get(output, np.arange(starts[-1], dtype=np.int32)),
                np.int64,
            ),
        )
        hidden = self._hidden(inputs).float()
        return text_means(hidden, self._tensor(starts, np.int64)) if output == "mean" else hidden

    def _attention(self, starts: Int32s) -> AttentionBatch:
        """Give each text the blocks that it needs, one after the other."""
        lengths = np.diff(starts)
        counts = -(-lengths // _BLOCK)
        blocks = np.cumsum(counts) - counts
        places = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        return AttentionBatch(
            query_start=self._tensor(starts, np.int32),
            context_len=self._tensor(lengths, np.int32),
            block_tables=self._tensor(blocks[:, None] + np.arange(counts.max()), np.int32),
            slot_mapping=self._tensor(places + np.repeat(blocks * _BLOCK, lengths), np.int64),
            positions=self._tensor(places, np.int64),
            max_query_len=int(lengths.max()),
            max_context_len=int(lengths.max()),
        )

    def _tensor(self, values: NDArray[np.integer], kind: type[np.integer]) -> Tensor:
        return torch.from_numpy(values.astype(kind)).to(self._decoder.device)
