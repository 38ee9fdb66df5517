"""In what layers of one decoder are unlike each other, by its config.json: windows, and how they are rotated."""

from collections.abc import Callable, Mapping
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.folders.model_json import optional_object, positive_size

Windows = tuple[int | None, ...]
Rotated = tuple[bool, ...]
Raw = Mapping[str, Any]

CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1.5e5,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
    "llama_4_scaling_beta": 0.1,
}


def no_window(raw: Raw, num_layers: int) -> Windows:
    """Full attention everywhere."""
    return (None,) * num_layers


def one_window(raw: Raw, num_layers: int) -> Windows:
    """The same window for all layers, as Mistral has it."""
    # A Mistral config without the field means 4096; only an explicit null means full attention.
    return (raw.get("sliding_window", 4096),) * num_layers


def window_per_layer(raw: Raw, num_layers: int) -> Windows:
    """Qwen: windows if they are used, from one layer on, or as `layer_types` say."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    types = raw.get("layer_types")
    if types is not None:
        if window is None and "sliding_attention" in types:
            raise UnsupportedModel("layer_types has sliding_attention, but use_sliding_window or sliding_window is off")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = raw.get("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def window_if_set(raw: Raw, num_layers: int) -> Windows:
    """The same window for all layers, if there is one."""
    return (raw.get("sliding_window"),) * num_layers


def window_if_used(raw: Raw, num_layers: int) -> Windows:
    """Qwen 3 with experts: the same window for all layers, if `use_sliding_window` says so."""
    return (raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None,) * num_layers


def window_by_turns(raw: Raw, num_layers: int) -> Windows:
    """Qwen 2 with experts: as `layer_types` say, or for every second of the first layers, if windows are used."""
    if raw.get("layer_types") is not None or not raw.get("use_sliding_window"):
        return window_per_layer(raw, num_layers)
    window, last = raw.get("sliding_window", 4096), raw.get("max_window_layers", 28)
    return tuple(window if (layer + 1) % 2 and layer < last else None for layer in range(num_layers))


def window_after(raw: Raw, num_layers: int) -> Windows:
    """dots.llm1: as `layer_types` say, or from `max_window_layers` on."""
    window, types, first = raw.get("sliding_window", 4096), raw.get("layer_types"), raw.get("max_window_layers", 62)
    if types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def window_without_rotation(raw: Raw, num_layers: int) -> Windows:
    """SmolLM3: as `layer_types` say, or for the layers that are not rotated, if windows are used."""
    if raw.get("layer_types") is not None:
        return window_per_layer({"sliding_window": None, **raw}, num_layers)
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    rotated = rotated_but_every_fourth(raw, (None,) * num_layers)
    return tuple(None if each else window for each in rotated)


def window_but(full: int, every: int, default: int = 4096, optional: bool = False) -> Callable[[Raw, int], Windows]:
    """Windows, `default` tokens unless said, but for one layer of so `every` many, the `full`-th of them.

    `every` is what `sliding_window_pattern` says, where there is that; 0 is a window for all. `layer_types` win. If
    windows are `optional`, a null in the config means that there are none.
    """

    def windows(raw: Raw, num_layers: int) -> Windows:
        window, types = raw.get("sliding_window", default), raw.get("layer_types")
        if window is not None or not optional:
            window = positive_size({"sliding_window": default, **raw}, "sliding_window")
        if types is not None:
            return tuple(window if kind == "sliding_attention" else None for kind in types)
        if window is None or not every:
            return (window,) * num_layers
        step = positive_size({"sliding_window_pattern": every, **raw}, "sliding_window_pattern")
        return tuple(None if layer % step == full % step else window for layer in range(num_layers))

    return windows


def rotated_all(raw: Raw, windows: Windows) -> Rotated:
    """All layers are."""
    return (True,) * len(windows)


def rotated_without_slopes(raw: Raw, windows: Windows) -> Rotated:
    """Falcon: all layers are, or have slopes in place of it."""
    return (not raw.get("alibi"),) * len(windows)


def rotated_if_rope(raw: Raw, windows: Windows) -> Rotated:
    """Granite 4: all layers are, or none."""
    return (raw.get("position_embedding_type") == "rope",) * len(windows)


def rotated_none(raw: Raw, windows: Windows) -> Rotated:
    """No layer is: positions are learned, or there are slopes."""
    return (False,) * len(windows)


def rotated_but_every_fourth(raw: Raw, windows: Windows) -> Rotated:
    """SmolLM3: a list of which layers are rotated, or the interval at which one is not."""
    given = raw.get("no_rope_layers")
    if given is None:
        every = positive_size({"no_rope_layer_interval": 4, **raw}, "no_rope_layer_interval")
        return tuple(bool((layer + 1) % every) for layer in range(len(windows)))
    if len(given) != len(windows):
        raise UnsupportedModel(f"no_rope_layers has {len(given)} entries, but num_hidden_layers is {len(windows)}")
    return tuple(map(bool, given))


def rotated_with_window(raw: Raw, windows: Windows) -> Rotated:
    """EXAONE 4: where some layers have a window, those without one are not rotated."""
    if raw.get("sliding_window", 4096) is None:
        return (True,) * len(windows)
    return tuple(window is not None for window in windows)


def one_rope(raw: Raw, sliding: bool) -> Raw:
    """All layers have what the config says."""
    return raw


def rope_scaled_without_window(raw: Raw, sliding: bool) -> Raw:
    """OLMo 3: only layers without a window are scaled."""
    given = optional_object(raw, "rope_parameters")
    if given.keys() & {"full_attention", "sliding_attention"}:
        return {**raw, "rope_parameters": optional_object(given, "sliding_attention" if sliding else "full_attention")}
    theta = {"rope_theta": raw.get("rope_theta") or given.get("rope_theta")}
    if not sliding:
        return raw
    return {**raw, "rope_scaling": None, "rope_parameters": theta}


def rope_or(authors: Mapping[str, Any]) -> Callable[[Raw, bool], Raw]:
    """All layers have what the config says; without the field, what its `authors` have."""

    def rope(raw: Raw, sliding: bool) -> Raw:
        return raw if raw.get("rope_parameters") or raw.get("rope_scaling") else {**raw, "rope_parameters": authors}

    return rope


def rope_per_type(raw: Raw, sliding: bool) -> Raw:
    """Gemma 3: one rotation for layers with a window, and one for those without."""
    given = optional_object(raw, "rope_parameters")
    unknown = sorted(given.keys() - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(f"rope_parameters has {unknown[0]!r}, where it must have full_ and sliding_attention")
    if sliding:
        found = {"rope_theta": raw.get("rope_local_base_freq") or 1e4} | optional_object(given, "sliding_attention")
    else:
        found = {"rope_theta": raw.get("rope_theta") or 1e6} | optional_object(given, "full_attention")
        # In older folders the rotation of these layers alone is scaled.
        found |= optional_object(raw, "rope_scaling")
    return {**raw, "rope_scaling": None, "rope_parameters": found}
