"""The model families, one row each: everything in which they differ."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chairlift.errors import UnsupportedModel

Windows = tuple[int | None, ...]
Raw = Mapping[str, Any]


def _no_window(raw: Raw, num_layers: int) -> Windows:
    return (None,) * num_layers


def _one_window(raw: Raw, num_layers: int) -> Windows:
    # A Mistral config without the field means 4096; only an explicit null means full attention.
    return (raw.get("sliding_window", 4096),) * num_layers


def _window_per_layer(raw: Raw, num_layers: int) -> Windows:
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    types = raw.get("layer_types")
    if types is not None:
        if window is None and "sliding_attention" in types:
            raise UnsupportedModel("layer_types has sliding_attention, but use_sliding_window or sliding_window is off")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = raw.get("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(num_layers))


@dataclass(frozen=True, slots=True)
class Family:
    """Where one architecture departs from the common decoder.

    A bias is True, False, or the name of the config field that decides (absent means False). `windows` gives each
    layer's sliding window from the raw config. `head_dim=None` means hidden_size / num_attention_heads.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    head_dim: int | None = None
    windows: Callable[[Raw, int], Windows] = _no_window


FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(windows=_one_window),
    "qwen2": Family(qkv_bias=True, windows=_window_per_layer),
    "qwen3": Family(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, head_dim=128, windows=_window_per_layer
    ),
}
