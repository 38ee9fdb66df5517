"""What the config.json of Gemma 4 has, which transformers computes, out of a GGUF file's metadata.

Layers that see all of a text have wider heads than others, and of the last layers none has keys and values of its own.
"""

from collections.abc import Sequence

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.told_fields import Fields, embeddings_of_layers, optional_experts, rotation
from chairlift.gguf.told_settings import ToldSettings

_FREQUENCIES = "rope_freqs.weight"
_KEY_HEADS, _WIDTHS, _WINDOWED = "attention.head_count_kv", "feed_forward_length", "attention.sliding_window_pattern"
_CAP = "final_logit_softcapping"
# By what files divide the angles of what is not rotated.
_STILL = 1e20


def gemma4(told: ToldSettings, file: GgufFile) -> Fields:
    """The fields of a config.json. Raises UnsupportedModel naming the key or tensor at fault."""
    hidden, windowed = told.size("embedding_length"), [bool(each) for each in told.sizes(_WINDOWED)]
    if windowed[-1]:
        raise told.wrong(_WINDOWED, "such that the last layer does not see all of a text")
    for end in ("", "_swa"):
        width = told.size(f"attention.key_length{end}")
        told.must_be(f"attention.value_length{end}", width)
        told.must_be(f"rope.dimension_count{end}", width)
    wide, narrow = told.size("attention.key_length"), told.size("attention.key_length_swa")
    softmax = 1
    told.must_be("expert_gating_func", softmax)
    shared = told.size("attention.shared_kv_layers", 0, least=0, most=told.num_layers - 1)
    return {
        "num_attention_heads": told.size("attention.head_count", most=hidden),
        "head_dim": narrow,
        "global_head_dim": wide,
        "max_position_embeddings": told.size("context_length"),
        "rms_norm_eps": told.number("attention.layer_norm_rms_epsilon"),
        "sliding_window": told.size("attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "num_kv_shared_layers": shared,
        "rope_parameters": _rotations(told, file, wide),
        "final_logit_softcapping": told.number(_CAP) if told.has(_CAP) else None,
        **_key_heads(told, file, windowed, told.num_layers - shared),
        **_mlps(told, told.num_layers - shared),
        **embeddings_of_layers(told, file),
        **_experts(told),
    }


def _rotations(told: ToldSettings, file: GgufFile, wide: int) -> Fields:
    """Those of layers with windows, and of others, of whose heads the first part is rotated."""
    base = rotation(told)
    factors = file.floats(_FREQUENCIES) if _FREQUENCIES in file.tensors else [1.0] * (wide // 2)
    turned = factors.count(1.0)
    if len(factors) != wide // 2 or not turned or not all(each >= _STILL for each in factors[turned:]):
        raise UnsupportedModel(f"tensor {_FREQUENCIES!r} of {told.file_name} is not for a first part of {wide} numbers")
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": told.number("rope.freq_base_swa", 1e4)},
        "full_attention": base | {"rope_type": "proportional", "partial_rotary_factor": turned / (wide // 2)},
    }


def _key_heads(told: ToldSettings, file: GgufFile, windowed: Sequence[bool], own: int) -> Fields:
    """How many heads share keys and values, of the first layers, which have their own: values may be the keys."""
    counts = [*zip(told.sizes(_KEY_HEADS, told.size("attention.head_count")), windowed, strict=True)][:own]
    near, far = ({count for count, is_near in counts if is_near == kind} for kind in (True, False))
    if len(near) != 1 or len(far) != 1 or 0 in near | far:
        raise told.wrong(_KEY_HEADS, "not one number for layers with windows, and one for others")
    has_values = {
        f"blk.{layer}.attn_v.weight" in file.tensors for layer, (_, is_near) in enumerate(counts) if not is_near
    }
    if len(has_values) != 1:
        raise UnsupportedModel(f"{told.file_name} has attn_v in some of the layers that see all of a text alone")
    if has_values == {True} and near != far:
        raise told.wrong(_KEY_HEADS, "not the same for all layers, of which all have values of their own")
    return {
        "num_key_value_heads": near.pop(),
        "num_global_key_value_heads": far.pop(),
        "attention_k_eq_v": has_values == {False},
    }


def _mlps(told: ToldSettings, own: int) -> Fields:
    """How wide MLPs are, which may be twice that in layers without keys and values of their own."""
    widths = told.sizes(_WIDTHS)
    first, behind = widths[0], {*widths[own:]}
    doubled = behind == {2 * first}
    if not first or {*widths[:own]} != {first} or not (doubled or behind <= {first}):
        raise told.wrong(_WIDTHS, f"neither the same for all layers nor twice that behind the first {own}")
    return {"intermediate_size": first, "use_double_wide_mlp": doubled}


def _experts(told: ToldSettings) -> Fields:
    """Those beside each MLP, if there are any."""
    count, used = optional_experts(told)
    if not count:
        told.has("expert_feed_forward_length")
        return {"enable_moe_block": False}
    width = told.size("expert_feed_forward_length")
    return {"enable_moe_block": True, "num_experts": count, "top_k_experts": used, "moe_intermediate_size": width}
