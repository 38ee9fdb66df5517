"""Which blocks a sequence finds filled already, and which of its own others may find."""

from collections.abc import Collection, Mapping

from chairlift.core.sequences.blocks import BlockPool
from chairlift.core.sequences.request import Step
from chairlift.core.sequences.sequence import Sequence


class PrefixCache:
    """What the scheduler asks of the pool's index of contents, for sequences that take part in it."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool) -> None:
        self.enabled = enabled
        self._pool = pool
        self._block_size = block_size
        self._published: dict[str, list[int]] = {}

    def may_read(self, sequence: Sequence) -> bool:
        """Whether cached blocks may stand in for computing; log-probabilities of the prompt need all of it computed."""
        request = sequence.request
        return self.enabled and request.use_prefix_cache and request.params.prompt_logprobs is None

    def match(self, sequence: Sequence) -> list[int]:
        """Find cached blocks for a sequence's prefix, leaving at least one token to compute."""
        if not self.may_read(sequence):
            return []
        most = (len(sequence.token_ids) - 1) // self._block_size
        return self._pool.match(sequence.hashes[:most])

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others find the blocks that this step fills; the runner writes all KV before any attention reads it."""
        full = num_tokens // self._block_size
        if not (self.enabled and sequence.request.use_prefix_cache):
            sequence.num_published = full
            return
        sequence.hash_blocks(full, self._block_size)
        for index in range(sequence.num_published, full):
            block = sequence.block_table[index]
            if self._pool.publish(block, sequence.hashes[index]):
                self._published.setdefault(sequence.id, []).append(block)
        sequence.num_published = full

    def end_step(self, step: Step, errors: Collection[str], sequences: Mapping[str, Sequence]) -> set[int]:
        """Make unfindable what failed requests published in this step, and what was computed on top of it; return it.

        Who was aborted meanwhile counts as failed if any did: its block table is gone, so nobody can tell any more.
        """
        spoilt: set[int] = set()
        for request_id in step.num_tokens if errors else ():  # whoever fills a block comes before those who share it
            sequence = sequences.get(request_id)
            table = sequence.block_table if sequence is not None else []
            if request_id in errors or not table or not spoilt.isdisjoint(table):
                spoilt.update(self._published.get(request_id, ()))
        for block in spoilt:
            self._pool.forget(block)
        self._published.clear()
        return spoilt
