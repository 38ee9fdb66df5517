"""Layers with a short convolution in the place of attention, as config.json has them."""

from dataclasses import dataclass

from chairlift.errors import UnsupportedModel
from chairlift.folders.layer_kinds import MOST_TAPS, which_layers
from chairlift.folders.layer_rules import Raw
from chairlift.folders.model_json import positive_size


@dataclass(frozen=True, slots=True)
class ShortConvolutions:
    """`layers` says which have one; each sees `taps` tokens, its own the last. Their products may have a `bias`."""

    layers: tuple[bool, ...]
    taps: int
    bias: bool

    def state_bytes(self, hidden_size: int, itemsize: int) -> int:
        """Bytes of a layer's state of one sequence."""
        return hidden_size * self.taps * itemsize


def parse_short_convolutions(raw: Raw, num_layers: int) -> ShortConvolutions | None:
    """Read which layers have one; None if no layer has. Raises UnsupportedModel naming the field at fault."""
    layers = which_layers(raw.get("layer_types") or ["full_attention"] * num_layers, "conv", num_layers)
    if layers is None:
        return None
    taps = positive_size({"conv_L_cache": 3, **raw}, "conv_L_cache")
    if taps > MOST_TAPS:
        raise UnsupportedModel(f"conv_L_cache must be at most {MOST_TAPS}, got {taps}")
    return ShortConvolutions(layers, taps, bool(raw.get("conv_bias", False)))
