"""What the rows of one step may choose, by the grammars that some of them follow."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.ops.base import Int32s
from chairlift.runners.decoder.grammar import Follower


class AllowedBits:
    """Memory for what rows may choose, kept from step to step, as new memory of this size comes page by page."""

    def __init__(self) -> None:
        self._bits: Int32s = np.empty((0, 0), np.int32)
        # Places that hold all bits, as they did in the step before.
        self._full: set[int] = set()

    def fill(self, rows: Sequence[Int32s | None], words: int) -> Int32s:
        """Return [len(rows), words] with the bits of each row, or all bits for None, until it is filled again."""
        if len(self._bits) < len(rows):
            self._bits, self._full = np.empty((len(rows), words), np.int32), set()
        for index, bits in enumerate(rows):
            if bits is not None:
                self._bits[index] = bits
                self._full.discard(index)
            elif index not in self._full:
                self._bits[index] = -1
                self._full.add(index)
        return self._bits[: len(rows)]


class Ruling:
    """R rows of a step, of which those at `tried` choose by trial, and others from what is known to be allowed."""

    def __init__(self, followers: Sequence[Follower | None], device: torch.device, bits: AllowedBits) -> None:
        """`followers` [R] are the rows' own, None for one that follows no grammar; `bits` nobody else fills now."""
        self._followers = followers
        self._device = device
        self._bits = bits
        self.tried = [index for index, each in enumerate(followers) if each is not None and each.is_tried]
        # Those who are to say it again: no token that was tried may be next, and what may be is not known yet.
        self.refused: list[int] = []

    def allowed(self, indices: Iterable[int] | None = None) -> Tensor:
        """What rows may choose, as `Ops.exclude` has it: all rows, of which those that are tried may choose anything.

        Or only those at `indices`, of which all must be known.
        """
        if indices is None:
            words = [None if each is None or each.is_tried else each.allowed for each in self._followers]
        else:
            words = [each.allowed for index in indices if (each := self._followers[index]) is not None]
        width = next(len(each.allowed) for each in self._followers if each is not None)
        return torch.from_numpy(self._bits.fill(words, width)).to(self._device)

    def pick(self, index: int, candidates: Iterable[int]) -> int | None:
        """Return the first of a tried row's candidates that may be next; None if none of them may.

        If it is not known what may be, the row is `refused` then, or if others would have to wait for that.
        """
        follower = self._followers[index]
        assert follower is not None
        if not follower.can_be_tried:
            self.refused.append(index)
            return None
        for token in candidates:
            if follower.accept(token):
                return token
            if follower.error is not None:
                break
        if follower.is_open:
            follower.refuse()
            self.refused.append(index)
        return None
