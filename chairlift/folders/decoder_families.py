"""The model families, one row each: everything in which they differ."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from chairlift.folders.expert_rules import (
    DOTS1,
    ERNIE4_5,
    GLM4,
    GPT_OSS,
    GRANITE,
    MIXTRAL,
    OLMOE,
    QWEN2,
    QWEN3,
    ExpertRule,
)
from chairlift.folders.layer_rules import (
    Raw,
    Rotated,
    Windows,
    no_window,
    one_rope,
    one_window,
    rope_of_cwm,
    rope_of_gpt_oss,
    rope_per_type,
    rope_scaled_without_window,
    rotated_all,
    rotated_but_every_fourth,
    rotated_with_window,
    window_after,
    window_but,
    window_by_turns,
    window_if_set,
    window_if_used,
    window_per_layer,
)

# True, False, or the config field that decides, alone (absent means False) or with what it means to leave it out.
Bias = bool | str | tuple[str, bool]


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """What the files call a layer's norms: of what attention and the MLP are given (pre) and of what they give (post).

    None where there is none. What they give is normalized before it is added to the residual.
    """

    attention_pre: str | None = "input_layernorm"
    attention_post: str | None = None
    mlp_pre: str | None = "post_attention_layernorm"
    mlp_post: str | None = None


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """Where one architecture departs from the common decoder.

    `fused_qkv` and `fused_gate_up`: the files hold these projections as one. `norm_kind`: RMS norms, LayerNorms, or
    those without weights. `qk_norm`: queries and keys are normalized each head by itself or the whole projection at
    once, if the config field `qk_norm_if` says so where there is one. `norm_offset` is added to the weights of
    norms. With `float_norms` what is normalized is multiplied by those weights before it is rounded, not after.
    `activation`: the MLP's config field and what it means to leave it out. `head_dim=None` means hidden_size /
    num_attention_heads. `query_pre_attn_scalar`: scores are divided by the square root of this config field, whose
    default this is, and not of head_dim. `scaled_embedding`: embeddings are multiplied by the square root of
    hidden_size. `multipliers`: the config has factors of embeddings, scores, logits, and of what is added to the
    residual. `tied`, `rms_norm_eps` (which the config has as `eps_field`) and `rope_theta` are used where the
    config leaves them out. `windows` gives each layer's sliding window from the raw config, `rope` the fields with
    the rotation of layers with or without one, and `rotated` which layers are. What is rotated together are the two
    halves of a head, or `neighbours`; of each head a part, if there is a `rotary_share`, which a config can change.
    `caps`: the fields with caps of scores and logits, and what it means to leave them out. `sinks`: the files have
    one for each head. `quantized`: the `quant_method` of folders that are packed so. `experts`: how the config
    describes those of layers that have any in place of one MLP.
    """

    qkv_bias: Bias = False
    o_bias: Bias = False
    mlp_bias: Bias = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    norms: LayerNorms = LayerNorms()
    norm_kind: Literal["rms", "layer", "bare"] = "rms"
    qk_norm: Literal["head", "projection"] | None = None
    qk_norm_if: str | None = None
    norm_offset: float = 0.0
    float_norms: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    head_dim: int | None = None
    query_pre_attn_scalar: int | None = None
    scaled_embedding: bool = False
    multipliers: bool = False
    tied: bool = False
    rms_norm_eps: float = 1e-6
    eps_field: str = "rms_norm_eps"
    rope_theta: float = 1e4
    windows: Callable[[Raw, int], Windows] = no_window
    rope: Callable[[Raw, bool], Raw] = one_rope
    rotated: Callable[[Raw, Windows], Rotated] = rotated_all
    neighbours: bool = False
    rotary_share: float | None = None
    caps: Mapping[str, float] | None = None
    sinks: bool = False
    quantized: str | None = None
    experts: ExpertRule | None = None

    @property
    def honoured(self) -> set[str]:
        """The fields of a config that only some families read, and this one does."""
        found = set(_MULTIPLIERS) if self.multipliers else set()
        if self.query_pre_attn_scalar is not None:
            found.add("query_pre_attn_scalar")
        if self.rotary_share is not None:
            found.add("partial_rotary_factor")
        if self.rotated is rotated_but_every_fourth:
            found.add("no_rope_layers")
        found.update(self.caps or ())
        if self.experts is not None:
            found.update(self.experts.count)
        return found


_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
_SANDWICH = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_AFTER = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")

FAMILIES: dict[str, DecoderFamily] = {
    "llama": DecoderFamily(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": DecoderFamily(windows=one_window),
    "ministral": DecoderFamily(windows=window_but(-1, 0, optional=True)),
    "qwen2": DecoderFamily(qkv_bias=True, windows=window_per_layer),
    "qwen3": DecoderFamily(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head", head_dim=128, windows=window_per_layer
    ),
    "gemma3_text": DecoderFamily(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=_SANDWICH,
        qk_norm="head",
        norm_offset=1.0,
        float_norms=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        head_dim=256,
        query_pre_attn_scalar=256,
        scaled_embedding=True,
        tied=True,
        windows=window_but(-1, 6),
        rope=rope_per_type,
    ),
    "gemma": DecoderFamily(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norm_offset=1.0,
        float_norms=True,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        head_dim=256,
        scaled_embedding=True,
        tied=True,
    ),
    "gemma2": DecoderFamily(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=_SANDWICH,
        norm_offset=1.0,
        float_norms=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        head_dim=256,
        query_pre_attn_scalar=256,
        scaled_embedding=True,
        tied=True,
        windows=window_but(-1, 2),
        caps={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "olmo2": DecoderFamily(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=_AFTER,
        qk_norm="projection",
        float_norms=True,
        rms_norm_eps=1e-5,
    ),
    "olmo3": DecoderFamily(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=_AFTER,
        qk_norm="projection",
        float_norms=True,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        windows=window_but(-1, 4),
        rope=rope_scaled_without_window,
    ),
    "granite": DecoderFamily(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", multipliers=True),
    "smollm3": DecoderFamily(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        tied=True,
        rope_theta=2e6,
        rotated=rotated_but_every_fourth,
    ),
    "phi3": DecoderFamily(
        fused_qkv=True, fused_gate_up=True, rms_norm_eps=1e-5, windows=window_if_set, rotary_share=1.0
    ),
    "glm": DecoderFamily(
        qkv_bias=("attention_bias", True),
        fused_gate_up=True,
        head_dim=128,
        rms_norm_eps=1.5625e-7,
        neighbours=True,
        rotary_share=0.5,
    ),
    "glm4": DecoderFamily(
        qkv_bias=("attention_bias", True),
        fused_gate_up=True,
        norms=LayerNorms(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        ),
        head_dim=128,
        rms_norm_eps=1.5625e-7,
        neighbours=True,
        rotary_share=0.5,
    ),
    "exaone4": DecoderFamily(
        norms=_AFTER,
        qk_norm="head",
        rms_norm_eps=1e-5,
        windows=window_but(-1, 4, optional=True),
        rotated=rotated_with_window,
    ),
    "ernie4_5": DecoderFamily(
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        head_dim=128,
        tied=True,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        neighbours=True,
    ),
    "seed_oss": DecoderFamily(
        qkv_bias=("attention_bias", True), o_bias="attention_out_bias", mlp_bias="mlp_bias", head_dim=128
    ),
    "helium": DecoderFamily(
        qkv_bias="attention_bias",
        mlp_bias="mlp_bias",
        float_norms=True,
        head_dim=128,
        rms_norm_eps=1e-8,
        rope_theta=1e5,
        neighbours=True,
    ),
    "olmo": DecoderFamily(
        qkv_bias="attention_bias", o_bias="attention_bias", norm_kind="bare", float_norms=True, rms_norm_eps=1e-5
    ),
    "stablelm": DecoderFamily(
        qkv_bias="use_qkv_bias",
        norm_kind="layer",
        float_norms=True,
        rms_norm_eps=1e-5,
        eps_field="layer_norm_eps",
        rotary_share=0.25,
    ),
    "cwm": DecoderFamily(
        mlp_bias="mlp_bias",
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        windows=window_but(0, 4, 8192),
        rope=rope_of_cwm,
    ),
    "mixtral": DecoderFamily(rms_norm_eps=1e-5, rope_theta=1e6, windows=window_if_set, experts=MIXTRAL),
    "qwen2_moe": DecoderFamily(qkv_bias=("qkv_bias", True), windows=window_by_turns, experts=QWEN2),
    "qwen3_moe": DecoderFamily(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head", windows=window_if_used, experts=QWEN3
    ),
    "olmoe": DecoderFamily(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="projection", rms_norm_eps=1e-5, experts=OLMOE
    ),
    "flex_olmo": DecoderFamily(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=_AFTER,
        qk_norm="projection",
        float_norms=True,
        rope_theta=5e5,
        experts=OLMOE,
    ),
    "granitemoe": DecoderFamily(qkv_bias="attention_bias", o_bias="attention_bias", multipliers=True, experts=GRANITE),
    "glm4_moe": DecoderFamily(
        qkv_bias="attention_bias",
        qk_norm="head",
        qk_norm_if="use_qk_norm",
        rms_norm_eps=1e-5,
        rotary_share=0.5,
        experts=GLM4,
    ),
    "dots1": DecoderFamily(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head", windows=window_after, experts=DOTS1
    ),
    "ernie4_5_moe": DecoderFamily(
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        tied=True,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        neighbours=True,
        experts=ERNIE4_5,
    ),
    "gpt_oss": DecoderFamily(
        qkv_bias=("attention_bias", True),
        o_bias=("attention_bias", True),
        float_norms=True,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1.5e5,
        windows=window_but(-1, 2, 128),
        rope=rope_of_gpt_oss,
        sinks=True,
        quantized="mxfp4",
        experts=GPT_OSS,
    ),
}
