"""Layers with the gated delta rule in the place of attention, as config.json has them."""

from dataclasses import dataclass, replace

from chairlift.errors import UnsupportedModel
from chairlift.folders.layer_kinds import MOST_TAPS, which_layers
from chairlift.folders.layer_rules import Raw
from chairlift.folders.model_json import positive_size


@dataclass(frozen=True, slots=True)
class DeltaNets:
    """`layers` says which have one; sizes are as in `GatedDeltaNet`, and its convolution sees `taps` tokens.

    What one product makes of tokens may lie `by_key_heads` in two tensors, and not by its parts in four.
    """

    layers: tuple[bool, ...]
    taps: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    by_key_heads: bool = False

    @property
    def values(self) -> int:
        """Numbers of all heads of values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What the convolution sees of a token: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    def state_bytes(self, hidden_size: int, itemsize: int) -> int:
        """Bytes of a layer's states of one sequence."""
        return self.channels * self.taps * itemsize + self.key_dim * self.values * 4


def parse_delta_nets(raw: Raw, num_layers: int) -> DeltaNets | None:
    """Read which layers have one; None if no layer has. Raises UnsupportedModel naming the field at fault."""
    kinds = raw.get("layer_types")
    if kinds is None:
        every = positive_size({"full_attention_interval": 4, **raw}, "full_attention_interval")
        kinds = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]
    layers = which_layers(kinds, "linear_attention", num_layers)
    if layers is None:
        return None
    sizes = {
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    taps, key_heads, value_heads, key_dim, value_dim = (positive_size({**sizes, **raw}, name) for name in sizes)
    if taps > MOST_TAPS:
        raise UnsupportedModel(f"linear_conv_kernel_dim must be at most {MOST_TAPS}, got {taps}")
    if value_heads % key_heads:
        raise UnsupportedModel(
            f"linear_num_value_heads ({value_heads}) must be a multiple of linear_num_key_heads ({key_heads})"
        )
    return DeltaNets(layers, taps, key_heads, value_heads, key_dim, value_dim)


def parse_delta_nets_by_heads(raw: Raw, num_layers: int) -> DeltaNets | None:
    """The same of Qwen3-Next."""
    found = parse_delta_nets(raw, num_layers)
    return None if found is None else replace(found, by_key_heads=True)
