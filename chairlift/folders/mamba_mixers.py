"""Layers with Mamba 2 in the place of attention, as config.json has them."""

import math
from dataclasses import dataclass
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.folders.layer_kinds import MOST_TAPS, which_layers
from chairlift.folders.layer_rules import Raw
from chairlift.folders.model_json import positive_size


@dataclass(frozen=True, slots=True)
class MambaMixers:
    """`layers` says which have one; sizes are as in `MambaMixer`, and its convolution sees `taps` tokens.

    Its products, and its convolution, may have biases.
    """

    layers: tuple[bool, ...]
    taps: int
    heads: int
    head_dim: int
    state_dim: int
    groups: int
    least_step: float
    most_step: float
    bias: bool
    conv_bias: bool

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """What the convolution sees of a token."""
        return self.inner + 2 * self.groups * self.state_dim

    def state_bytes(self, hidden_size: int, itemsize: int) -> int:
        """Bytes of a layer's states of one sequence."""
        return self.channels * self.taps * itemsize + self.inner * self.state_dim * 4


def parse_mamba_mixers(raw: Raw, num_layers: int) -> MambaMixers | None:
    """Read which layers have one; None if no layer has. Raises UnsupportedModel naming the field at fault."""
    kinds = raw.get("layer_types") or ["linear_attention"] * num_layers
    layers = which_layers(kinds, "linear_attention", num_layers)
    if layers is None:
        return None
    sizes = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}
    heads, groups, state_dim, taps, expand = (positive_size({**sizes, **raw}, name) for name in sizes)
    inner, said = expand * positive_size(raw, "hidden_size"), raw.get("mamba_d_head", "auto")
    if inner % heads or heads % groups or said not in ("auto", inner // heads):
        raise UnsupportedModel(
            f"mamba_n_heads ({heads}) of mamba_d_head ({said}) in mamba_n_groups ({groups}) do not make up the {inner} "
            "numbers that mamba_expand asks for"
        )
    if taps > MOST_TAPS:
        raise UnsupportedModel(f"mamba_d_conv must be at most {MOST_TAPS}, got {taps}")
    least, most = map(_bound, raw.get("time_step_limit") or (0.0, math.inf))
    if not least <= most:
        raise UnsupportedModel(f"time_step_limit must be two ascending numbers, got {raw['time_step_limit']!r}")
    biases = bool(raw.get("mamba_proj_bias", False)), bool(raw.get("mamba_conv_bias", True))
    return MambaMixers(layers, taps, heads, inner // heads, state_dim, groups, least, most, *biases)


def _bound(value: Any) -> float:
    """A number, which transformers writes as an object where JSON has none for it."""
    return float(value["__float__"] if isinstance(value, dict) else value)
