"""Layers with a short convolution in the place of attention, as config.json has them."""

from dataclasses import dataclass

from chairlift.errors import UnsupportedModel
from chairlift.folders.layer_rules import Raw
from chairlift.folders.model_json import positive_size

# As in native/kernels.h.
_MOST_TAPS = 16
_KIND = "conv"


@dataclass(frozen=True, slots=True)
class ShortConvolutions:
    """`layers` says which have one; each sees `taps` tokens, its own the last. Their products may have a `bias`."""

    layers: tuple[bool, ...]
    taps: int
    bias: bool


def parse_short_convolutions(raw: Raw, num_layers: int) -> ShortConvolutions | None:
    """Read which layers have one; None if no layer has. Raises UnsupportedModel naming the field at fault."""
    kinds = raw.get("layer_types") or ["full_attention"] * num_layers
    unknown = sorted({*kinds} - {_KIND, "full_attention"})
    if unknown or len(kinds) != num_layers:
        raise UnsupportedModel(
            f"layer_types must be {_KIND!r} or 'full_attention' for each of {num_layers} layers"
            + (f", and has {unknown[0]!r}" if unknown else f", and names {len(kinds)}")
        )
    if _KIND not in kinds:
        return None
    if {*kinds} == {_KIND}:
        raise UnsupportedModel("layer_types has no 'full_attention': a model of short convolutions alone is not served")
    taps = positive_size({"conv_L_cache": 3, **raw}, "conv_L_cache")
    if taps > _MOST_TAPS:
        raise UnsupportedModel(f"conv_L_cache must be at most {_MOST_TAPS}, got {taps}")
    return ShortConvolutions(tuple(kind == _KIND for kind in kinds), taps, bool(raw.get("conv_bias", False)))
