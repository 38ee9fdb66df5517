"""What is asked of a model that generates: one sequence each, checked against what the model can take."""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import msgspec

from chairlift.core.sequences.sampling_params import SamplingParams


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

    @property
    def may_stop(self) -> bool:
        """Whether anything can end it before it has all tokens that it may have."""
        return bool(self.stop_ids or self.params.stop_strings)


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
    request = Request(
        id=request_id,
        prompt_ids=prompt_ids,
        params=params,
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
    return [request] if params.n == 1 else [_sample(request, index) for index in range(params.n)]


def _sample(request: Request, index: int) -> Request:
    """One of the samples that a request asks for, as a request of its own."""
    seed = None if request.params.seed is None else request.params.seed + index
    params = msgspec.structs.replace(request.params, n=1, seed=seed)
    return msgspec.structs.replace(request, id=f"{request.id}-{index}", params=params)


def possible_words(words: Iterable[list[int]], vocab_size: int) -> list[list[int]]:
    """Those of the words, each its tokens, that a model can generate: a tokenizer may have tokens that it has not."""
    return [word for word in words if word and max(word) < vocab_size]


def _check_token_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    # By the two that are farthest out, as requests of many prompts bring very many.
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise Unservable(f"{name} holds token id {bad}, outside the vocabulary of {vocab_size}", name)
