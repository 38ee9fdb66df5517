"""What the config.json of a model with short convolutions or delta rules has, out of a GGUF file's metadata."""

from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.told_fields import Fields, attention_fields, expert_fields, plain_rotation, rotation
from chairlift.gguf.told_settings import ToldSettings


def lfm2(told: ToldSettings, file: GgufFile) -> Fields:
    """Short convolutions, and attention in between."""
    attention = attention_fields(told)
    told.must_be("attention.key_length", told.size("embedding_length") // attention["num_attention_heads"])
    kinds = ["full_attention" if each else "conv" for each in told.sizes("attention.head_count_kv")]
    return {
        **attention,
        **plain_rotation(told, attention["head_dim"]),
        "intermediate_size": told.size("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": told.size("shortconv.l_cache"),
        "norm_eps": told.number("attention.layer_norm_rms_epsilon"),
        "layer_types": kinds,
    }


def lfm2_moe(told: ToldSettings, file: GgufFile) -> Fields:
    """The same with experts behind the first layers."""
    sigmoid = 2
    if told.size("expert_gating_func") != sigmoid:
        raise told.not_computed("expert_gating_func")
    return {
        **lfm2(told, file),
        **expert_fields(told),
        "num_dense_layers": told.size("leading_dense_block_count", 0, least=0),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in file.tensors),
        "norm_topk_prob": True,
        "routed_scaling_factor": told.number("expert_weights_scale", 1.0),
    }


def _delta(told: ToldSettings, file: GgufFile) -> Fields:
    """Layers with a delta rule, all but some."""
    attention = attention_fields(told)
    head_dim, heads = attention["head_dim"], told.size("ssm.time_step_rank")
    turned = told.size("rope.dimension_count", head_dim, most=head_dim)
    # Which of a position's three numbers turn what: of texts all three are the same.
    told.has("rope.dimension_sections")
    keys, inner = told.size("ssm.group_count", most=heads), told.size("ssm.inner_size")
    if heads % keys or inner % heads:
        raise told.wrong("ssm.time_step_rank", f"not for {keys} heads of keys, and {inner} numbers of values")
    interval = told.size("full_attention_interval", 4)
    by_turns = [int((layer + 1) % interval > 0) for layer in range(told.num_layers)]
    recurrent = told.sizes("attention.recurrent_layers") if told.has("attention.recurrent_layers") else by_turns
    return {
        **attention,
        "rope_parameters": rotation(told) | {"partial_rotary_factor": turned / head_dim},
        "rms_norm_eps": told.number("attention.layer_norm_rms_epsilon"),
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "linear_conv_kernel_dim": told.size("ssm.conv_kernel"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": told.size("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
    }


def delta_dense(told: ToldSettings, file: GgufFile) -> Fields:
    """Layers with a delta rule, and with MLPs."""
    return {**_delta(told, file), "intermediate_size": told.size("feed_forward_length")}


def delta_with_experts(told: ToldSettings, file: GgufFile) -> Fields:
    """Layers with a delta rule, and with experts of which one is shared."""
    # That of MLPs in layers without experts, of which there are none.
    told.has("feed_forward_length")
    softmax = 1
    told.must_be("expert_gating_func", softmax)
    told.must_be("expert_weights_scale", 1.0)
    return {
        **_delta(told, file),
        **expert_fields(told),
        "shared_expert_intermediate_size": told.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }
