"""What a client may ask of the sampler, checked once, on arrival."""

import math

import msgspec

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose the next token, and when to end. Field names and meanings are those of the OpenAI API and vLLM.

    `temperature=0` is greedy. `top_k` of 0 or -1 and `top_p=1` switch those filters off. `max_tokens=None` means "up to
    `max_model_len`". `logprobs=k` returns the chosen token's log-probability and the k likeliest (of the unmodified
    distribution). Raises ValueError naming the field when a value is out of range.
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

    def __post_init__(self) -> None:
        """Refuse, by name, any value outside its range."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} must be between {low:g} and {high:g}, got {value!r}")
        if self.top_p <= 0:
            raise ValueError(f"top_p must be above 0, got {self.top_p!r}")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise ValueError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stops)}")
        if any(not s for s in stops):
            raise ValueError("stop must not contain an empty string")
        if self.logit_bias is not None:
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise ValueError(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, got {len(self.logit_bias)}")
            for token, bias in self.logit_bias.items():
                if not -100 <= bias <= 100:
                    raise ValueError(f"logit_bias of token {token} must be between -100 and 100, got {bias!r}")

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list, whatever form it was given in."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


# `not low <= value <= high` is also true for NaN, so NaN is refused by every row.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, 128),
    ("temperature", 0, 100),
    ("top_p", 0, 1),
    ("top_k", -1, math.inf),
    ("min_p", 0, 1),
    ("seed", -(2**63), 2**64 - 1),
    ("repetition_penalty", 0, 100),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("max_tokens", 1, math.inf),
    ("min_tokens", 0, math.inf),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
