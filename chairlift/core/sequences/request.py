"""What is asked of a model that generates, checked once on arrival; and what deciding and computing tell each other."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from chairlift.core.decision import Decision
from chairlift.core.finished import Finished, FinishReason

MAX_LOGPROBS = 20
# Limits of `stop`: strings, characters of one, characters of all together.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_CHARS_TOTAL = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 8192
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 64, 256
# More than any model has room for, and little enough to be added to a prompt's length.
_MOST_TOKENS = 2**31 - 1
_MOST_SEED = 2**64 - 1


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What form an answer must have: one of these, named as in vLLM.

    `json` is a JSON schema, as an object or as text, and `json_object` any object; the answer is compact JSON, unless a
    `whitespace_pattern`, a regular expression, says what may stand between its parts. `regex` is a regular expression
    for the whole of it, `choice` a list of texts, `grammar` one in the syntax of Lark or GBNF. `structural_tag` leaves
    it free but for what follows certain words: see docs/guides/structured-output.md.
    """

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose the next token, and when to end. Field names and meanings are those of the OpenAI API and vLLM.

    `temperature=0` is greedy. `top_k` of 0 or -1 and `top_p=1` switch those filters off. `max_tokens=None` means "up to
    `max_model_len`". `logprobs=k` returns the chosen token's log-probability and the k likeliest (of the unmodified
    distribution). Of tokens only `allowed_token_ids` are chosen, if there are any, and none that completes one of the
    `bad_words`. Raises ValueError naming the field when a value is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None

    def __post_init__(self) -> None:
        """Refuse, by name, any value outside its range."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                wanted = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
                raise ValueError(f"{name} must be {wanted}, got {value!r}")
        if self.top_p <= 0:
            raise ValueError(f"top_p must be above 0, got {self.top_p!r}")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty!r}")
        for name in ("max_tokens", "min_tokens", "top_k"):
            if (getattr(self, name) or 0) > _MOST_TOKENS:
                raise ValueError(f"{name} must be at most {_MOST_TOKENS}, got {getattr(self, name)!r}")
        if self.seed is not None and self.seed + self.n - 1 > _MOST_SEED:
            problem = f"must be at most {_MOST_SEED - self.n + 1} with n={self.n}, as sample i draws with seed + i"
            raise ValueError(f"seed {problem}, got {self.seed!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        check_stop(self.stop)
        if self.stop_token_ids is not None and len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}")
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) > MAX_ALLOWED_TOKEN_IDS:
            problem = f"takes at most {MAX_ALLOWED_TOKEN_IDS} ids, got {len(self.allowed_token_ids)}"
            raise ValueError(f"allowed_token_ids {problem}")
        _check_bad_words(self.bad_words or [])
        if self.logit_bias is not None:
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise ValueError(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, got {len(self.logit_bias)}")
            for token, bias in self.logit_bias.items():
                if not -100 <= bias <= 100:
                    raise ValueError(f"logit_bias of token {token} must be between -100 and 100, got {bias!r}")

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list, whatever form it was given in."""
        return _as_list(self.stop)


def check_stop(
    stop: str | list[str] | None,
    max_strings: int = MAX_STOP_STRINGS,
    max_chars: int = MAX_STOP_CHARS,
    max_chars_total: int = MAX_STOP_CHARS_TOTAL,
) -> None:
    """Raise ValueError, naming the limit, for stop strings that are empty, too many or too long."""
    stops = _as_list(stop)
    if len(stops) > max_strings:
        raise ValueError(f"stop takes at most {max_strings} strings (max_stop_strings), got {len(stops)}")
    if not all(stops):
        raise ValueError("stop must not contain an empty string")
    longest = max(map(len, stops), default=0)
    if longest > max_chars:
        raise ValueError(f"stop takes strings of at most {max_chars} characters (max_stop_chars), got {longest}")
    total = sum(map(len, stops))
    if total > max_chars_total:
        limit = f"at most {max_chars_total} characters in all (max_stop_chars_total)"
        raise ValueError(f"stop takes {limit}, got {total}")


def _check_bad_words(words: list[str]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise ValueError(f"bad_words takes at most {MAX_BAD_WORDS} words, got {len(words)}")
    if not all(word.strip() for word in words):
        raise ValueError("bad_words must not contain an empty word")
    if (longest := max(map(len, words), default=0)) > MAX_BAD_WORD_CHARS:
        raise ValueError(f"bad_words takes words of at most {MAX_BAD_WORD_CHARS} characters, got {longest}")


def _as_list(stop: str | list[str] | None) -> list[str]:
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else stop


# `not low <= value <= high` is also true for NaN, so NaN is refused by every row.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, 128),
    ("temperature", 0, 100),
    ("top_p", 0, 1),
    ("top_k", -1, math.inf),
    ("min_p", 0, 1),
    ("seed", -(2**63), _MOST_SEED),
    ("repetition_penalty", 0, 100),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("max_tokens", 1, math.inf),
    ("min_tokens", 0, math.inf),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)


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
