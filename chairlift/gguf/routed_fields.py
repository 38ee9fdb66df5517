"""What the config.json of a model with experts and no states has, which transformers computes, out of a GGUF file."""

from chairlift.gguf.dense_fields import RMS_EPS, has_bias, heads_of_all
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.rotation_fields import part_that_turns, scaled, unscaled
from chairlift.gguf.routed_experts import MOST_EXPERTS
from chairlift.gguf.told_fields import Fields, expert_fields
from chairlift.gguf.told_settings import ToldSettings

_SCORES, _SIGMOID = "expert_gating_func", 2
_GROUPS, _OF_GROUPS = "expert_group_count", "expert_group_used_count"
_NORM, _SCALE, _SHARED = "expert_weights_norm", "expert_weights_scale", "expert_shared_count"
_SHARED_WIDTH = "expert_shared_feed_forward_length"
_WINDOW, _PATTERN, _WINDOW_BASE = (
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
)
# Experts of a token, which are not to be chosen.
_OF_PHI = 2
# Of so many layers all but the last have a window, where files don't say which.
_TURN = 4


def minimax_m2(told: ToldSettings, file: GgufFile) -> Fields:
    """MiniMax M2, which norms queries and keys of all heads together."""
    heads, experts = heads_of_all(told), expert_fields(told)
    _must_be_sigmoids(told)
    told.must_be(_NORM, True)
    told.must_be(_SCALE, 1.0)
    _refuse_groups(told)
    # Of MLPs in layers without experts, of which there are none.
    told.has("feed_forward_length")
    return {
        **heads,
        "rope_parameters": unscaled(told, file) | part_that_turns(told, heads["head_dim"]),
        "intermediate_size": experts["moe_intermediate_size"],
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "rms_norm_eps": told.number(RMS_EPS),
    }


def phimoe(told: ToldSettings, file: GgufFile) -> Fields:
    """Phi mini and tiny MoE. Of Phi 3.5's, whose rotation is stretched, files don't say by how much its scores grow."""
    heads = heads_of_all(told)
    told.must_be("rope.dimension_count", heads["head_dim"])
    # The second is sought among what the first has left, and there is no third.
    told.must_be("expert_used_count", _OF_PHI)
    told.must_be(_SCORES, 1)
    told.has("rope.scaling.original_context_length")
    return {
        **heads,
        "rope_parameters": unscaled(told, file),
        "intermediate_size": told.size("feed_forward_length"),
        "num_local_experts": told.size("expert_count", least=_OF_PHI, most=MOST_EXPERTS),
        "num_experts_per_tok": _OF_PHI,
        "rms_norm_eps": told.number(RMS_EPS),
        "sliding_window": told.size(_WINDOW, 0, least=0) or None,
        "attention_bias": has_bias(file, "attn_q"),
        "lm_head_bias": "output.bias" in file.tensors,
    }


def exaone_moe(told: ToldSettings, file: GgufFile) -> Fields:
    """K-EXAONE, whose layers without a window are not rotated."""
    heads, experts = heads_of_all(told), expert_fields(told)
    told.must_be("rope.dimension_count", heads["head_dim"])
    _must_be_sigmoids(told)
    groups = told.size(_GROUPS, 1, most=experts["num_experts"])
    if experts["num_experts"] % groups:
        raise told.wrong(_GROUPS, f"not for {experts['num_experts']} experts")
    shared = told.size(_SHARED)
    told.must_be(_SHARED_WIDTH, shared * experts["moe_intermediate_size"])
    return {
        **heads,
        **experts,
        **_windows_by_turns(told),
        "rope_parameters": scaled(told, file, heads["head_dim"], by_waves=True),
        "intermediate_size": told.size("feed_forward_length"),
        "rms_norm_eps": told.number(RMS_EPS),
        "mlp_layer_types": ["dense" if layer < _dense_ones(told) else "sparse" for layer in range(told.num_layers)],
        "num_shared_experts": shared,
        "norm_topk_prob": told.flag(_NORM, False),
        "routed_scaling_factor": told.number(_SCALE, 1.0),
        "n_group": groups,
        "topk_group": told.size(_OF_GROUPS, 1, most=groups),
    }


def afmoe(told: ToldSettings, file: GgufFile) -> Fields:
    """Trinity: attention that is gated, norms before and behind, and layers without a window that are not rotated."""
    heads, experts = heads_of_all(told), expert_fields(told)
    told.must_be("rope.dimension_count", heads["head_dim"])
    told.must_be(_SCORES, _SIGMOID)
    if not told.flag(_NORM, False):
        raise told.wrong(_NORM, "not true, as it is of all such models here")
    _refuse_groups(told)
    return {
        **heads,
        **experts,
        **_windows_by_turns(told),
        "rope_parameters": scaled(told, file, heads["head_dim"], by_waves=False),
        "intermediate_size": told.size("feed_forward_length"),
        "rms_norm_eps": told.number(RMS_EPS),
        "num_dense_layers": _dense_ones(told),
        "num_shared_experts": told.size(_SHARED),
        "route_scale": told.number(_SCALE, 1.0),
        # Files don't say that embeddings are multiplied by the root of their size, which those of all models are.
        "mup_enabled": True,
    }


def _must_be_sigmoids(told: ToldSettings) -> None:
    """Refuse another way to score experts, also where a file says none."""
    if told.size(_SCORES) != _SIGMOID:
        raise told.not_computed(_SCORES)


def _refuse_groups(told: ToldSettings) -> None:
    for key in (_GROUPS, _OF_GROUPS):
        told.must_be(key, 0, 1)


def _dense_ones(told: ToldSettings) -> int:
    """How many of the first layers have an MLP in place of experts."""
    return told.size("leading_dense_block_count", 0, least=0, most=told.num_layers)


def _windows_by_turns(told: ToldSettings) -> Fields:
    """Layers with windows, and in between some that see all."""
    # Windows of another base have a rotation of their own.
    told.must_be(_WINDOW_BASE, told.number("rope.freq_base", 1e4))
    turns = [int((layer + 1) % _TURN > 0) for layer in range(told.num_layers)]
    windowed = told.sizes(_PATTERN) if told.has(_PATTERN) else turns
    return {
        "sliding_window": told.size(_WINDOW),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
    }
