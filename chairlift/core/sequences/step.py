"""A forward pass: what the scheduler tells the runner to compute, and what that gave."""

import msgspec

from chairlift.core.decision import Decision
from chairlift.core.finished import Finished, FinishReason
from chairlift.core.sequences.request import Request


class Start(msgspec.Struct):
    """All that a runner needs to begin (or, after a preemption, begin again) a sequence.

    `token_ids` is the prompt and whatever was generated before a preemption; the first `num_computed_tokens` of them
    already lie in the KV cache, in the first blocks of `block_table`. Where layers have states these are to be found in
    a `snapshot`, with the keys and values of those tokens that fill no block.
    """

    request: Request
    token_ids: list[int]
    num_computed_tokens: int
    block_table: list[int]
    snapshot: int | None = None


class Step(msgspec.Struct):
    """One forward pass: how many tokens of each request; those that ran already, most urgent first, then who starts.

    Background requests follow in the same order, save for those that run but are left out of this step.
    `started` come before their first pass; `new_blocks` are appended to the block table of a request that already runs.
    `released` ended or were preempted since the last step: a runner drops all it holds for them. Before that, and
    before anybody starts, it copies the states of some, which are `kept`, to these snapshots. During the pass it
    `saves` states of requests, as they are after so many of their tokens, in these snapshots.
    """

    id: int
    num_tokens: dict[str, int]
    started: list[Start]
    new_blocks: dict[str, list[int]]
    released: list[str]
    decisions: list[Decision]
    kept: dict[str, int] = {}
    saves: dict[str, list[tuple[int, int]]] = {}

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this pass, over all requests."""
        return sum(self.num_tokens.values())


class TokenLogprob(msgspec.Struct, array_like=True):
    """A token's log-probability, its rank (1 is the likeliest), and the likeliest alternatives as (id, logprob)."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class StepResult(msgspec.Struct):
    """What a forward pass gave. A request whose prompt is not yet fully computed has no entry in `tokens`.

    `prompt_logprobs` holds one entry per prompt token of this pass, for requests that asked for them; the prompt's very
    first token has none. `errors` ends a request and says why. `seconds` is the time that the pass took. `num_rows` is
    how many rows of activations the model computed; what exceeds the step's tokens is padding.

    A request may have more than one token if the others follow from its grammar: the next pass computes them all. Those
    in `ended` are complete by their grammar. Those in `late` were due a token, but it is not known yet what the grammar
    allows: their last token is computed again in a later pass. Of those that were late and left out, the `ready` ones
    need not be any longer. The `invalid` ones failed by what they asked for.
    """

    tokens: dict[str, list[int]]
    num_rows: int = 0
    seconds: float = 0.0
    logprobs: dict[str, list[TokenLogprob]] = {}
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}
    errors: dict[str, str] = {}
    ended: set[str] = set()
    late: set[str] = set()
    ready: set[str] = set()
    invalid: set[str] = set()

    def failure(self, request_id: str) -> Finished:
        """How a request in `errors` ended."""
        reason = FinishReason.INVALID if request_id in self.invalid else FinishReason.ERROR
        return Finished(request_id, reason, self.errors[request_id])
