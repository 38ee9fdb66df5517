"""How a model that generates is to choose tokens, and when to end, checked once on arrival."""

import math
from typing import Any

import msgspec

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
