"""Rotary position embedding: frequencies for each scaling rule, and the table of cosines and sines.

torch is imported where it computes, since the front reads configurations without it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chairlift.errors import UnsupportedModel, clip
from chairlift.folders.model_json import optional_object, positive_size

if TYPE_CHECKING:
    # Whoever only reads a config.json needs no torch.
    from torch import Tensor

_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "attn_factor",
        "extrapolation_factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "truncate",
        "finetuned",
    },
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}
# What Phi-3's first folders call it.
_ALIASES = {"su": "longrope"}
_LISTS = ("short_factor", "long_factor")
# What is rotated, and how fast, before any scaling.
_UNSCALED = ("rope_theta", "partial_rotary_factor")
_ORIGINAL, _POSITIONS = "original_max_position_embeddings", "max_position_embeddings"
_GROWTH = "llama_4_scaling_beta"
# What is divided by, or is in a logarithm, lies between these; of some 0 is the same as nothing.
_LEAST, _MOST = 1e-9, 1e12
_BOUNDED = ("factor", "low_freq_factor", "high_freq_factor")
_BOUNDED_OR_0 = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": _LISTS,
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """RoPE's base, kind of scaling, and that kind's own parameters under their names in config.json.

    `original_max_positions` is the context length before scaling, in tokens, and `max_positions` that which is reached
    by it, or which the config says, if that is more. Of a head's dimensions the first `share` are rotated. Kind "none"
    rotates nothing. Queries grow with each `original_max_positions` tokens by `query_growth` and a logarithm.
    """

    kind: str
    theta: float
    max_positions: int
    original_max_positions: int
    values: Mapping[str, Any] = field(hash=False)
    share: float = 1.0
    query_growth: float = 0.0

    @classmethod
    def parse(
        cls,
        raw: Mapping[str, Any],
        max_positions: int,
        theta: float = 10000.0,
        share: float | None = None,
        grows: bool = False,
    ) -> "RopeConfig":
        """Read `rope_parameters`, or the older `rope_theta` and `rope_scaling`. Raises UnsupportedModel.

        `theta` and `share` are meant where the fields are missing; without a `share` heads must be rotated as a whole.
        Only of families whose queries `grows` may say so.
        """
        scaling, found = optional_object(raw, "rope_scaling"), optional_object(raw, "rope_parameters")
        if scaling:
            # Where model cards have it added to what newer releases of transformers save, it scales what is there.
            found = {name: found[name] for name in _UNSCALED if name in found} | scaling
        values = {name: value for name, value in found.items() if value is not None}
        kind = values.pop("rope_type", values.pop("type", "default"))
        kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
        if not isinstance(kind, str) or kind not in _KEYS:
            raise UnsupportedModel(f"RoPE type {kind!r} is not supported; these are: {', '.join(_KEYS)}")
        theta = float(values.pop("rope_theta", raw.get("rope_theta") or theta))
        rotated = _share(values.pop("partial_rotary_factor", raw.get("partial_rotary_factor")), share)
        growth = _query_growth(values.pop(_GROWTH, 0.0)) if grows else 0.0
        if grows:
            # Of these families some have it there, too, and nobody reads it.
            values.pop(_POSITIONS, None)
        # transformers lets the field beside the dictionary win.
        told = raw.get(_ORIGINAL) or values.get(_ORIGINAL)
        original = told or max_positions
        _check_values(kind, values)
        _check_lengths(kind, theta, int(original))
        if told and kind in ("yarn", "linear") and values.get("factor"):
            # Model cards have the scaling added to a config whose length stays as it was.
            reached = {_POSITIONS: int(int(told) * values["factor"])}
            max_positions = max(max_positions, positive_size(reached, _POSITIONS))
        if kind == "dynamic":
            # Only beyond the model's own length are there other frequencies, and nothing here is as long.
            if int(original) != max_positions:
                raise UnsupportedModel("RoPE type 'dynamic' is not supported beyond the length that it was made for")
            kind, values = "default", {}
        return cls(kind, theta, max_positions, int(original), values, rotated, growth)

    @classmethod
    def none(cls, max_positions: int) -> "RopeConfig":
        """That of layers without one."""
        return cls("none", 1.0, max_positions, max_positions, {})

    def dims(self, head_dim: int) -> int:
        """How many of a head's dimensions are rotated. Raises UnsupportedModel if they are no pairs."""
        # A share that is itself a quotient must not fall short of the number that it was made of.
        rotated = int(head_dim * self.share + 1e-6)
        if rotated % 2 or not rotated:
            raise UnsupportedModel(f"partial_rotary_factor={self.share:g} rotates {rotated} of {head_dim} dimensions")
        for name in _LISTS:
            if len(self.values.get(name, [0] * (rotated // 2))) != rotated // 2:
                raise UnsupportedModel(f"RoPE parameter {name!r} must have {rotated // 2} numbers")
        return rotated

    def frequencies(self, dims: int, length: int) -> "tuple[Tensor, float]":
        """Return the dims / 2 inverse wavelengths (radians a token) and the factor on cosines and sines.

        `length` is the most tokens that a sequence may have.
        """
        import torch

        powers = self.theta ** (torch.arange(0, dims, 2, dtype=torch.int64).float() / dims)
        return _RULES[self.kind](self, powers, length)

    def table(self, head_dim: int, length: int) -> "Tensor":
        """Return [length, head_dim] float32: cosines of each position, then sines.

        Pairs that are not rotated come last, with a cosine of 1 and a sine of 0.
        """
        import torch

        dims = self.dims(head_dim)
        inverse, factor = self.frequencies(dims, length)
        # float32 like transformers: at long positions the rounding of this very product is part of the model.
        angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse
        still = torch.zeros(length, (head_dim - dims) // 2)
        return torch.cat((angles.cos() * factor, still + 1, angles.sin() * factor, still), dim=-1)

    def query_factors(self, length: int) -> "Tensor | None":
        """Return [length] float32: what queries at each position are multiplied by; None where that is 1 for all.

        As in Llama 4: 1 + growth * ln(1 + how often the original length has passed).
        """
        import torch

        if not self.query_growth or length <= self.original_max_positions:
            return None
        passed = torch.arange(length, dtype=torch.float32) / self.original_max_positions
        return 1 + self.query_growth * torch.log(1 + passed.floor())


def _check_values(kind: str, values: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for parameters that this kind has not, that are missing, or are no numbers."""
    unknown = sorted(values.keys() - _KEYS[kind] - {_ORIGINAL})
    if unknown:
        raise UnsupportedModel(
            f"RoPE parameter {unknown[0]!r} is not supported for {kind!r}; "
            f"these are: {', '.join(sorted(_KEYS[kind] | {'rope_theta'}))}"
        )
    for name in _REQUIRED.get(kind, ()):
        if name not in values:
            raise UnsupportedModel(f"RoPE type {kind!r} needs the parameter {name!r}")
    for name, value in values.items():
        numbers = value if name in _LISTS and isinstance(value, list) else [value]
        if not all(isinstance(number, (int, float)) for number in numbers):
            raise UnsupportedModel(f"RoPE parameter {name!r} must be a number, got {str(value)[:80]}")
        is_bounded = name in _BOUNDED or (name in _BOUNDED_OR_0 and value != 0)
        if is_bounded and not _LEAST <= value <= _MOST:
            allowed = f"from {_LEAST:g} to {_MOST:g}"
            raise UnsupportedModel(f"RoPE parameter {name!r} must be {allowed}, got {clip(repr(value), 80)}")
    if values.get("extrapolation_factor", 1) != 1:
        given = values["extrapolation_factor"]
        raise UnsupportedModel(f"RoPE parameter 'extrapolation_factor' = {given!r} is not supported, only 1 is")
    if "attention_factor" in values and values.get("attn_factor", 1) != 1:
        raise UnsupportedModel("RoPE parameter 'attn_factor' is not supported beside 'attention_factor'")


def _check_lengths(kind: str, theta: float, original: int) -> None:
    """Raise UnsupportedModel for a base, or a length before scaling, of which this kind can't make frequencies."""
    least = 1 if kind == "yarn" else 0
    if not least < theta < math.inf:
        raise UnsupportedModel(f"RoPE parameter 'rope_theta' must be above {least} for {kind!r}, got {theta!r}")
    shortest = 2 if kind == "longrope" else 1
    if original < shortest:
        raise UnsupportedModel(f"RoPE parameter {_ORIGINAL!r} must be {shortest} or more for {kind!r}, got {original}")


def _share(given: Any, default: float | None) -> float:
    """The part of a head that is rotated."""
    if given is None:
        return 1.0 if default is None else default
    if not isinstance(given, (int, float)) or not 0 < given <= 1 or (default is None and given != 1):
        allowed = "a number above 0, and 1 at most" if default is not None else "1 in models of this family"
        raise UnsupportedModel(f"RoPE's partial_rotary_factor must be {allowed}, got {given!r}")
    return float(given)


def _query_growth(given: Any) -> float:
    if not isinstance(given, int | float) or not 0 <= given <= _MOST:
        raise UnsupportedModel(f"RoPE parameter {_GROWTH!r} must be from 0 to {_MOST:g}, got {clip(repr(given), 80)}")
    return float(given)


def _none(rope: RopeConfig, powers: "Tensor", length: int) -> "tuple[Tensor, float]":
    return 0.0 * powers, 1.0


def _default(rope: RopeConfig, powers: "Tensor", length: int) -> "tuple[Tensor, float]":
    return 1.0 / powers, 1.0


def _linear(rope: RopeConfig, powers: "Tensor", length: int) -> "tuple[Tensor, float]":
    return 1.0 / powers / rope.values["factor"], 1.0


def _llama3(rope: RopeConfig, powers: "Tensor", length: int) -> "tuple[Tensor, float]":
    """Llama 3.1: divide long wavelengths by the factor, keep short ones, blend between (transformers' formula)."""
    import torch

    factor, low, high = (rope.values[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    inverse = 1.0 / powers
    wavelength = 2 * math.pi / inverse
    blend = (rope.original_max_positions / wavelength - low) / (high - low)
    blended = (1 - blend) * inverse / factor + blend * inverse
    long = wavelength > rope.original_max_positions / low
    short = wavelength < rope.original_max_positions / high
    return torch.where(long, inverse / factor, torch.where(short, inverse, blended)), 1.0


def _yarn(rope: RopeConfig, powers: "Tensor", length: int) -> "tuple[Tensor, float]":
    """YaRN (Peng et al., 2023, arXiv:2309.00071): interpolate long wavelengths, keep short ones, ramp between."""
    import torch

    values, dim = rope.values, 2 * len(powers)
    factor = values.get("factor") or rope.max_positions / rope.original_max_positions

    def boundary(rotations: float) -> float:
        """Frequency index that turns this often within the original context."""
        ratio = rope.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = boundary(values.get("beta_fast") or 32), boundary(values.get("beta_slow") or 1)
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(len(powers), dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    inverse = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return inverse, _yarn_attention_factor(values, factor)


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    given = values.get("attention_factor")
    if given is not None:
        return float(given)

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    numerator, denominator = values.get("mscale"), values.get("mscale_all_dim")
    usual = scale(numerator) / scale(denominator) if numerator and denominator else scale(1.0)
    # As in vLLM; transformers passes it over. DeepSeek R1 distilled into Qwen 3 has it undo the usual factor.
    return usual * float(values.get("attn_factor", 1.0))


def _longrope(rope: RopeConfig, powers: "Tensor", length: int) -> "tuple[Tensor, float]":
    """LongRoPE (Ding et al., 2024, arXiv:2402.13753): each wavelength has a factor of its own.

    There is one list for texts up to the original length, and one for longer ones. What is in the KV cache was rotated
    once and for all, so the list goes by how long a sequence may become.
    """
    import torch

    values, original = rope.values, rope.original_max_positions
    stretched = torch.tensor(values["long_factor" if length > original else "short_factor"], dtype=torch.float32)
    factor = values.get("factor") or rope.max_positions / original
    given = values.get("attention_factor")
    if given is None:
        given = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / (stretched * powers), float(given)


_RULES: dict[str, "Callable[[RopeConfig, Tensor, int], tuple[Tensor, float]]"] = {
    "none": _none,
    "longrope": _longrope,
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
