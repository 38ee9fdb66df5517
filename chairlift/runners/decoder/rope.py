"""Rotary position embedding: frequencies for each scaling rule, and the table of cosines and sines.

torch is imported where it computes, since the front reads configurations without it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chairlift.errors import UnsupportedModel
from chairlift.folders.model_json import optional_object

if TYPE_CHECKING:
    # Whoever only reads a config.json needs no torch.
    from torch import Tensor

_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "truncate",
    },
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """RoPE's base, kind of scaling, and that kind's own parameters under their names in config.json.

    `original_max_positions` is the context length before scaling, in tokens.
    """

    kind: str
    theta: float
    max_positions: int
    original_max_positions: int
    values: Mapping[str, Any] = field(hash=False)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], max_positions: int) -> "RopeConfig":
        """Read `rope_parameters`, or the older `rope_theta` and `rope_scaling`. Raises UnsupportedModel."""
        found = optional_object(raw, "rope_scaling") or optional_object(raw, "rope_parameters")
        values = {name: value for name, value in found.items() if value is not None}
        kind = values.pop("rope_type", values.pop("type", "default"))
        if not isinstance(kind, str) or kind not in _KEYS:
            raise UnsupportedModel(f"RoPE type {kind!r} is not supported; these are: {', '.join(_KEYS)}")
        theta = float(values.pop("rope_theta", raw.get("rope_theta") or 10000.0))
        if values.pop("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel("RoPE's partial_rotary_factor other than 1 is not supported")
        original = values.get("original_max_position_embeddings", max_positions)
        # transformers lets the field beside the dictionary win.
        original = raw.get("original_max_position_embeddings") or original
        unknown = sorted(values.keys() - _KEYS[kind] - {"original_max_position_embeddings"})
        if unknown:
            raise UnsupportedModel(
                f"RoPE parameter {unknown[0]!r} is not supported for {kind!r}; "
                f"these are: {', '.join(sorted(_KEYS[kind] | {'rope_theta'}))}"
            )
        for name, value in values.items():
            if not isinstance(value, (int, float)):
                raise UnsupportedModel(f"RoPE parameter {name!r} must be a number, got {value!r}")
        required = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
        for name in required.get(kind, ()):
            if name not in values:
                raise UnsupportedModel(f"RoPE type {kind!r} needs the parameter {name!r}")
        return cls(kind, theta, max_positions, int(original), values)

    def frequencies(self, head_dim: int) -> "tuple[Tensor, float]":
        """Return the head_dim / 2 inverse wavelengths (radians a token) and the factor on cosines and sines."""
        import torch

        powers = self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        return _RULES[self.kind](self, powers)

    def table(self, head_dim: int, length: int) -> "Tensor":
        """Return [length, head_dim] float32: cosines of each position, then sines."""
        import torch

        inverse, factor = self.frequencies(head_dim)
        # float32 like transformers: at long positions the rounding of this very product is part of the model.
        angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * factor


def _default(rope: RopeConfig, powers: "Tensor") -> "tuple[Tensor, float]":
    return 1.0 / powers, 1.0


def _linear(rope: RopeConfig, powers: "Tensor") -> "tuple[Tensor, float]":
    return 1.0 / powers / rope.values["factor"], 1.0


def _llama3(rope: RopeConfig, powers: "Tensor") -> "tuple[Tensor, float]":
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


def _yarn(rope: RopeConfig, powers: "Tensor") -> "tuple[Tensor, float]":
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
    return scale(numerator) / scale(denominator) if numerator and denominator else scale(1.0)


_RULES: dict[str, "Callable[[RopeConfig, Tensor], tuple[Tensor, float]]"] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
