"""What of a sequence is computed already, and what others may find of it: blocks of KV memory, snapshots of states."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from chairlift.core.sequences.blocks import BlockPool
from chairlift.core.sequences.sequence import Sequence
from chairlift.core.sequences.snapshots import SnapshotPool
from chairlift.core.sequences.step import Step


class Hit(NamedTuple):
    """What a sequence finds: blocks that hold its first tokens, how many of these it need not compute, and a snapshot.

    Behind the blocks a snapshot may bring some tokens more. Others have computed the first `known` tokens.
    """

    blocks: list[int]
    num_tokens: int
    snapshot: int | None = None
    known: int = 0


class PrefixCache:
    """Which blocks a sequence finds filled already, and which of its own others may find.

    Where layers have states there are `snapshots`, and a sequence begins at one of them, or anew.
    """

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool, snapshots: SnapshotPool | None = None) -> None:
        self.enabled = enabled
        self.snapshots = snapshots
        self._pool = pool
        self._block_size = block_size
        self._published: dict[str, list[int]] = {}
        self._kept: dict[str, int] = {}
        self._hashed: Sequence | None = None
        self.queried_tokens = 0
        self.hit_tokens = 0

    def may_read(self, sequence: Sequence) -> bool:
        """Whether cached blocks may stand in for computing; log-probabilities of the prompt need all of it computed."""
        request = sequence.request
        return self.enabled and request.use_prefix_cache and request.params.prompt_logprobs is None

    def match(self, sequence: Sequence) -> Hit:
        """Find what is cached of a sequence's prefix, leaving at least one token to compute."""
        if not self.may_read(sequence):
            return Hit([], 0)
        size = self._block_size
        most = (len(sequence.token_ids) - 1) // size
        if len(sequence.hashes) < most:
            self._hash(sequence, most)
        blocks = self._pool.match(sequence.hashes[:most])
        if self.snapshots is None:
            return Hit(blocks, len(blocks) * size)
        found = self.snapshots.find(sequence, len(blocks))
        if found is None:
            return Hit([], 0, None, len(blocks) * size)
        num_tokens, slot = found
        return Hit(blocks[: num_tokens // size], num_tokens, slot, len(blocks) * size)

    def _hash(self, sequence: Sequence, count: int) -> None:
        """Hash the first blocks of a sequence, not before they are looked for: many may wait, and leave before that.

        Samples of one prompt come one after the other, often into one step. The first is hashed, the others share it.
        """
        request, last = sequence.request, self._hashed
        if not sequence.hashes and last is not None and last.request.cache_salt == request.cache_salt:
            prompt = request.prompt_ids
            if last.request.prompt_ids == prompt:
                sequence.hashes = last.hashes[: len(prompt) // self._block_size]
        sequence.hash_blocks(count, self._block_size)
        self._hashed = sequence

    def count(self, sequence: Sequence, num_tokens: int) -> None:
        """Count what a sequence asked for as it began, and what it found."""
        if self.may_read(sequence):
            self.queried_tokens += len(sequence.token_ids)
            self.hit_tokens += num_tokens

    def hold(self, hit: Hit) -> None:
        """Have a snapshot that was found outlast this step: whoever gives way for the finder leaves a state as well."""
        if self.snapshots is not None and hit.snapshot is not None:
            self.snapshots.use(hit.snapshot)

    def begin(self, sequence: Sequence, hit: Hit) -> None:
        """Have a sequence begin with what it found, and choose where its states are kept for others.

        That is where it parts from what others have computed, and before the last token that it begins with: whoever
        has the same ones has that one to compute.
        """
        for block in hit.blocks:
            self._pool.share(block)
        sequence.num_published = len(hit.blocks)
        if self.snapshots is None:
            return
        self.hold(hit)
        if self.enabled and sequence.request.use_prefix_cache:
            wanted = {hit.known, len(sequence.token_ids) - 1}
            least = max(hit.num_tokens + 1, self._block_size)
            sequence.saves_at = sorted((each for each in wanted if each >= least), reverse=True)

    def publish(self, step: Step, sequence: Sequence, num_tokens: int) -> None:
        """Let others find the blocks that this step fills; the runner writes all KV before any attention reads it.

        The states that it comes by are found once it has ended.
        """
        size = self._block_size
        full = num_tokens // size
        if self.enabled and sequence.request.use_prefix_cache:
            sequence.hash_blocks(full, size)
            for index in range(sequence.num_published, full):
                block = sequence.block_table[index]
                if self._pool.publish(block, sequence.hashes[index]):
                    self._published.setdefault(sequence.id, []).append(block)
            if sequence.saves_at:
                self._save(step, sequence, num_tokens)
        sequence.num_published = full
        sequence.news_at = min([(full + 1) * size, *sequence.saves_at[-1:]])

    def _save(self, step: Step, sequence: Sequence, num_tokens: int) -> None:
        assert self.snapshots is not None
        while sequence.saves_at and sequence.saves_at[-1] <= num_tokens:
            position = sequence.saves_at.pop()
            slot = self.snapshots.save(self.snapshots.place(sequence, position))
            if slot is not None:
                step.saves.setdefault(sequence.id, []).append((position, slot))

    def keep(self, sequence: Sequence) -> None:
        """Have the state of a sequence that leaves kept as it is, for whoever goes on from there."""
        count = sequence.num_computed_tokens
        wanted = self.enabled and sequence.request.use_prefix_cache and count >= self._block_size
        if self.snapshots is not None and wanted:
            slot = self.snapshots.keep(self.snapshots.place(sequence, count))
            if slot is not None:
                self._kept[sequence.id] = slot

    def take_kept(self) -> dict[str, int]:
        """Where the states of those that left since the last step are to be kept."""
        kept, self._kept = self._kept, {}
        return kept

    def end_step(self, step: Step, errors: Collection[str], sequences: Mapping[str, Sequence]) -> set[int]:
        """Make unfindable what failed requests published in this step, and what was computed on top of it; return it.

        Who was aborted meanwhile counts as failed if any did: its block table is gone, so nobody can tell any more.
        """
        if self.snapshots is not None:
            self.snapshots.end_step(bool(errors))
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
