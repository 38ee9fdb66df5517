"""The contract between deciding and computing: what nearly every other file speaks."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from chairlift.core.decision import Decision
from chairlift.core.finished import Finished, FinishReason
from chairlift.core.sequences.sampling import SamplingParams


class Request(msgspec.Struct, kw_only=True):
    """One sequence to generate, validated and tokenized; `n` samples are `n` requests.

    `arrival` is in seconds on the clock that `schedule(now)` is given. `priority` 0 is the default, lower is sooner.
    `stop_ids` holds every token id that ends the sequence (the model's EOS unless ignored, and the client's own);
    `ignored_ids` is the EOS that is ignored, which like them is not sampled before `min_tokens`.
    `max_tokens` is the client's, or what `max_model_len` leaves. `cache_salt` keeps tenants' prefix caches apart.
    A `background` request runs in slots that no other needs, and yields at once; priorities count among its like.
    With `hold_updates` nobody reads along: what follows the first token comes all at once, at the end.
    No `bad_word_ids`, each the tokens of a word, are generated one after the other.
    All that is generated follows the `grammar`, if there is one, and ends at the latest when that can't go on.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    arrival: float
    priority: int = 0
    stop_ids: frozenset[int] = frozenset()
    ignored_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    use_prefix_cache: bool = True
    background: bool = False
    hold_updates: bool = False
    grammar: str | None = None
    bad_word_ids: list[list[int]] = []


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

    A request may have more than one token if the others follow from its grammar: the next pass computes them all. Those
    in `ended` are complete by their grammar. Those in `late` were due a token, but it is not known yet what the grammar
    allows: their last token is computed again in the next pass. The `invalid` ones failed by what they asked for.
    """

    tokens: dict[str, list[int]]
    num_rows: int = 0
    seconds: float = 0.0
    logprobs: dict[str, list[TokenLogprob]] = {}
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}
    errors: dict[str, str] = {}
    ended: set[str] = set()
    late: set[str] = set()
    invalid: set[str] = set()

    def failure(self, request_id: str) -> Finished:
        """How a request in `errors` ended."""
        reason = FinishReason.INVALID if request_id in self.invalid else FinishReason.ERROR
        return Finished(request_id, reason, self.errors[request_id])


class Unservable(ValueError):
    """The request can never be served as it is; `field` is the one at fault."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class ModelLimits(Protocol):
    """What a loaded model can take, in tokens and blocks."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int


def check_fits(num_prompt: int, max_tokens: int, *, max_model_len: int, num_blocks: int, block_size: int) -> None:
    """Raise Unservable, saying what to change, if a sequence of these lengths (in tokens) can never fit."""
    if num_prompt < 1 or max_tokens < 1:
        raise Unservable(
            f"a request needs a prompt and max_tokens of at least 1 token, got {num_prompt} and {max_tokens}",
            "prompt",
        )
    total = num_prompt + max_tokens
    if total > max_model_len:
        raise Unservable(
            f"This model's maximum context length is {max_model_len} tokens. However, you asked for {total}: "
            f"{num_prompt} in the prompt and {max_tokens} of output. Shorten the prompt or max_tokens.",
            "prompt",
        )
    # The last token generated is never fed back, so it needs no place.
    if -(-(total - 1) // block_size) > num_blocks:
        raise Unservable(
            f"{num_prompt} prompt tokens and max_tokens={max_tokens} need more than the KV cache's "
            f"{num_blocks * block_size} tokens. Shorten the request, or have the server raise kv_cache_gb.",
            "prompt",
        )


def fan_out(
    request_id: str,
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    model: ModelLimits,
    eos_ids: Sequence[int],
    arrival: float,
    priority: int = 0,
    cache_salt: str = "",
    use_prefix_cache: bool = True,
    background: bool = False,
    hold_updates: bool = False,
    grammar: str | None = None,
    bad_word_ids: Sequence[list[int]] = (),
) -> list[Request]:
    """Return `params.n` requests. Sample i of a seeded request uses `seed + i`; ids end in `-i` when n > 1.

    Raises Unservable, naming the field, for lengths or token ids that this model can't take.
    """
    max_tokens = params.max_tokens or max(model.max_model_len - len(prompt_ids), 1)
    limits = {name: getattr(model, name) for name in ("max_model_len", "num_blocks", "block_size")}
    check_fits(len(prompt_ids), max_tokens, **limits)
    _check_token_ids("prompt", prompt_ids, model.vocab_size)
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        _check_token_ids(name, getattr(params, name) or (), model.vocab_size)
    stop_ids = frozenset((*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_ids)))
    ignored_ids = frozenset(eos_ids) if params.ignore_eos and params.min_tokens else frozenset[int]()
    if params.structured_outputs is not None or params.bad_words:
        # By now a grammar, and token ids.
        params = msgspec.structs.replace(params, structured_outputs=None, bad_words=None)
    requests = []
    for index in range(params.n):
        one = params
        if params.n > 1:
            seed = None if params.seed is None else params.seed + index
            one = msgspec.structs.replace(params, n=1, seed=seed)
        requests.append(
            Request(
                id=request_id if params.n == 1 else f"{request_id}-{index}",
                prompt_ids=prompt_ids,
                params=one,
                max_tokens=max_tokens,
                arrival=arrival,
                priority=priority,
                stop_ids=stop_ids,
                ignored_ids=ignored_ids,
                cache_salt=cache_salt,
                use_prefix_cache=use_prefix_cache,
                background=background,
                hold_updates=hold_updates,
                grammar=grammar,
                bad_word_ids=list(bad_word_ids),
            )
        )
    return requests


def _check_token_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise Unservable(f"{name} holds token id {bad}, outside the vocabulary of {vocab_size}", name)
