"""The scheduler's own record of one request, and the hashes by which its prefixes are found."""

from array import array
from collections.abc import Iterable
from hashlib import blake2b

from chairlift.core.finished import Finished, FinishReason
from chairlift.core.queue import Rank
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.step import Step, StepResult

BlockHash = bytes

# A sequence that is late again has a token in one step of so many at least.
_MOST_REST = 64


def root_hash(salt: str) -> BlockHash:
    """Return the parent of a sequence's first block; different salts never share a block."""
    return blake2b(salt.encode(), digest_size=16).digest()


def block_hash(parent: BlockHash, token_ids: Iterable[int]) -> BlockHash:
    """Chain a full block's tokens to all that precede them, so that equal hashes mean equal prefixes.

    128 bits of BLAKE2b, not Python's `hash`: a collision would show one user another user's text.
    """
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class Sequence:
    """A request, the tokens it has so far, how many of them are in the KV cache, and in which blocks.

    `saves_at`: the numbers of tokens after which its state is yet to be kept, the next one last. `news_at`: the number
    of computed tokens at which others may find more of it. `resumes_at`: the first step that it need not be left out
    of, as it was late.
    """

    __slots__ = (
        "arrival",
        "block_table",
        "ends_at",
        "hashes",
        "id",
        "known_at_start",
        "news_at",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_published",
        "rank",
        "request",
        "resumes_at",
        "saves_at",
        "started",
        "stop_ids",
        "token_ids",
    )

    def __init__(self, request: Request, rank: Rank) -> None:
        self.request = request
        self.id = request.id
        self.arrival = request.arrival
        self.rank = rank
        self.token_ids = list(request.prompt_ids)
        self.stop_ids = request.stop_ids
        self.ends_at = len(request.prompt_ids) + request.max_tokens
        self.num_computed_tokens = 0
        self.known_at_start = len(self.token_ids)
        self.num_cached_tokens = 0
        self.block_table: list[int] = []
        self.hashes: list[BlockHash] = []
        self.num_published = 0
        self.saves_at: list[int] = []
        self.news_at = 0
        self.started: float | None = None
        self.resumes_at = -1

    @property
    def reads_prompt(self) -> bool:
        """Whether it computes what it began with: its prompt, and what it had generated before a preemption."""
        return self.num_computed_tokens < self.known_at_start

    def start_anew(self) -> None:
        """Forget all that was computed, which lies in blocks that it holds no more."""
        self.block_table = []
        self.num_computed_tokens = 0
        self.num_published = 0
        self.saves_at = []

    def take(self, tokens: list[int] | None, ended: bool = False) -> Finished | None:
        """Append what was sampled, and drop from `tokens` what is behind an end; say if that ends the sequence.

        `ended` does in any case: nothing can follow.
        """
        if tokens:
            known, stop_ids = self.token_ids, self.stop_ids
            before = len(known)
            for token in tokens:
                known.append(token)
                if token in stop_ids or len(known) >= self.ends_at:
                    end = self._end(token)
                    if end is not None:
                        del tokens[len(known) - before :]
                        return end
        if ended:
            return Finished(self.id, FinishReason.STOP)
        if tokens or self.num_computed_tokens < len(self.token_ids):
            return None  # what it knows is computed in the next step
        return Finished(self.id, FinishReason.ERROR, "the runner gave no token for a sequence that was due one")

    def take_unevenly(self, step: Step, result: StepResult) -> Finished | None:
        """Take in what came of a step of which some failed, are late, or can't go on.

        Whoever is late has its last token computed again, so it would cost the others a row each time. It comes with
        the next step; if it is late again, not before it is ready, unless it is the most urgent.
        """
        if self.id in result.errors:
            return result.failure(self.id)
        is_late = self.id in result.late
        self.num_computed_tokens += step.num_tokens[self.id] - is_late
        if is_late:
            self.resumes_at = step.id + (_MOST_REST if step.id == self.resumes_at else 1)
        return self.take(result.tokens.get(self.id), self.id in result.ended)

    def _end(self, token: int) -> Finished | None:
        """Say how a last token ends the sequence, if it does: not by a stop token before `min_tokens`."""
        request = self.request
        made = len(self.token_ids) - len(request.prompt_ids)
        if token in request.stop_ids and made >= request.params.min_tokens:
            return Finished(self.id, FinishReason.STOP, token)
        return Finished(self.id, FinishReason.LENGTH) if made >= request.max_tokens else None

    def hash_blocks(self, count: int, block_size: int) -> None:
        """Make sure that the first `count` blocks are hashed; each block is hashed once in a sequence's life."""
        hashes = self.hashes
        if len(hashes) >= count:
            return
        parent = hashes[-1] if hashes else root_hash(self.request.cache_salt)
        for start in range(len(hashes) * block_size, count * block_size, block_size):
            parent = block_hash(parent, self.token_ids[start : start + block_size])
            hashes.append(parent)


def at_rest(running: list[Sequence], step: int) -> set[str]:
    """Return the ids of those that are left out of a step, as they were late: never the most urgent, the first."""
    return {sequence.id for sequence in running[1:] if sequence.resumes_at > step}


def end_rest(sequences: dict[str, Sequence], ready: set[str], step: int) -> None:
    """Have those that are ready come with this step, which is the next."""
    for name in ready & sequences.keys():
        sequences[name].resumes_at = step
