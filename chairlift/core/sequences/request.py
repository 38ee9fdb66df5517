"""The contract between deciding and computing: what nearly every other file speaks."""

import msgspec

from chairlift.core.decision import Decision
from chairlift.core.sequences.sampling import SamplingParams


class Request(msgspec.Struct, kw_only=True):
    """One sequence to generate, validated and tokenized; `n` samples are `n` requests.

    `arrival` is in seconds on the clock that `schedule(now)` is given. `priority` 0 is the default, lower is sooner.
    `stop_ids` holds every token id that ends the sequence (the model's EOS unless ignored, and the client's own).
    `max_tokens` is the client's, or what `max_model_len` leaves. `cache_salt` keeps tenants' prefix caches apart.
    A `background` request runs in slots that no other needs, and yields at once; priorities count among its like.
    With `hold_updates` nobody reads along: what follows the first token comes all at once, at the end.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    arrival: float
    priority: int = 0
    stop_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    use_prefix_cache: bool = True
    background: bool = False
    hold_updates: bool = False


class Start(msgspec.Struct):
    """All that a runner needs to begin (or, after a preemption, begin again) a sequence.

    `token_ids` is the prompt and whatever was generated before a preemption; the first `num_computed_tokens` of them
    already lie in the KV cache, in the first blocks of `block_table`.
    """

    request: Request
    token_ids: list[int]
    num_computed_tokens: int
    block_table: list[int]


class Step(msgspec.Struct):
    """One forward pass: how many tokens of each request; those that ran already, most urgent first, then who starts.

    Background requests follow in the same order, save for those that run but are left out of this step.
    `started` come before their first pass; `new_blocks` are appended to the block table of a request that already runs.
    `released` ended or were preempted since the last step: a runner drops all it holds for them.
    """

    id: int
    num_tokens: dict[str, int]
    started: list[Start]
    new_blocks: dict[str, list[int]]
    released: list[str]
    decisions: list[Decision]

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
    """

    tokens: dict[str, list[int]]
    num_rows: int = 0
    seconds: float = 0.0
    logprobs: dict[str, list[TokenLogprob]] = {}
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}
    errors: dict[str, str] = {}


def check_fits(num_prompt: int, max_tokens: int, *, max_model_len: int, num_blocks: int, block_size: int) -> None:
    """Raise ValueError, saying what to change, if a sequence of these lengths (in tokens) can never fit."""
    if num_prompt < 1 or max_tokens < 1:
        raise ValueError(
            f"a request needs a prompt and max_tokens of at least 1 token, got {num_prompt} and {max_tokens}"
        )
    total = num_prompt + max_tokens
    if total > max_model_len:
        raise ValueError(
            f"This model's maximum context length is {max_model_len} tokens. However, you asked for {total}: "
            f"{num_prompt} in the prompt and {max_tokens} of output. Shorten the prompt or max_tokens."
        )
    # The last token generated is never fed back, so it needs no place.
    if -(-(total - 1) // block_size) > num_blocks:
        raise ValueError(
            f"{num_prompt} prompt tokens and max_tokens={max_tokens} need more than the KV cache's "
            f"{num_blocks * block_size} tokens. Shorten the request, or have the server raise kv_cache_gb."
        )
