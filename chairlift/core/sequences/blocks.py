"""The KV cache as a pool of equal blocks: who holds which, which may be shared, and what is found in them again."""

from collections import OrderedDict
from collections.abc import Iterable

from chairlift.core.sequences.sequence import BlockHash


class BlockPool:
    """`num_blocks` blocks with reference counts, and an index from content hash to block.

    A block that nobody holds stays in the index until it is taken for new content, least recently used first; so the
    free list is also the prefix cache.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_count = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        # Of the free ones, those whose content can still be found.
        self.num_cached = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached content or not."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.num_blocks - len(self._free)

    def lack(self, needed: int, hits: list[int], kept: int) -> str:
        """Say how many blocks are missing for so many, the hits among them, beside those kept; nothing if none are.

        One is kept for each that runs, else the next block any of them needs would throw the newcomer off again. None
        is owed more than that: had one been given less than its known tokens, there would be none to give.
        """
        # A hit that nobody holds lies in the free list, so it uses up a free block as well.
        free = len(self._free) - sum(1 for block in hits if self.ref_count[block] == 0)
        needed -= len(hits)
        if needed <= free - kept:
            return ""
        return f"needs {needed} blocks; of {free} free, {kept} are kept for those running"

    def take(self) -> int:
        """Take the least recently used free block and forget its content. Raises IndexError when none is free."""
        if not self._free:
            raise IndexError("no free block")
        block, _ = self._free.popitem(last=False)
        self.forget(block)
        self.ref_count[block] = 1
        return block

    def share(self, block: int) -> None:
        """Hold a block that `match` found."""
        if self.ref_count[block] == 0:
            del self._free[block]
            self.num_cached -= 1
        self.ref_count[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of a sequence's blocks, given first to last.

        The last is reused first: a prefix is worth more than what follows it. A block without reusable
        content goes before all others.
        """
        for block in reversed(list(blocks)):
            count = self.ref_count[block] - 1
            if count < 0:
                raise ValueError(f"block {block} was released more often than it was held")
            self.ref_count[block] = count
            if count == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)
                else:
                    self.num_cached += 1

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the blocks that hold the longest known prefix of these hashes, without holding them."""
        found = []
        for wanted in hashes:
            block = self._block_of.get(wanted)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, block: int, content: BlockHash) -> bool:
        """Make a held block findable by its content; False if another block already is found under it."""
        if self._block_of.setdefault(content, block) != block:
            return False
        self._hash_of[block] = content
        return True

    def forget(self, block: int) -> None:
        """Make a block's content unfindable (it is overwritten, or was never truly computed)."""
        content = self._hash_of[block]
        if content is not None:
            del self._block_of[content]
            self._hash_of[block] = None
            self.num_cached -= self.ref_count[block] == 0

    def check(self) -> None:
        """Raise AssertionError if the pool contradicts itself; for tests and idle-time self-checks."""
        held = {b for b, count in enumerate(self.ref_count) if count > 0}
        if held & self._free.keys() or len(held) + len(self._free) != self.num_blocks:
            raise AssertionError("a block is both free and held, or neither")
        indexed = {b for b, content in enumerate(self._hash_of) if content is not None}
        if indexed != set(self._block_of.values()) or len(indexed) != len(self._block_of):
            raise AssertionError("the content index and the blocks disagree")
        if self.num_cached != len(indexed & self._free.keys()):
            raise AssertionError("the blocks that are free and cached are miscounted")
