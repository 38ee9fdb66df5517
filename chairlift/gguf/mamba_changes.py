"""The tensors of architectures with Mamba: their names, and what converters change of them, changed back."""

from collections.abc import Sequence

from torch import Tensor

from chairlift.gguf.hybrid_names import HybridNames, TensorChange
from chairlift.gguf.row_orders import unpaired
from chairlift.gguf.tensor_forms import flat, joined, joined_experts, logarithm, of_one, with_channel
from chairlift.gguf.told_settings import ToldSettings

_ATTENTION = {f"attn_{part}": f"{part}_proj" for part in ("q", "k", "v")} | {"attn_output": "o_proj"}
_MIXER = {"ssm_in": "in_proj", "ssm_out": "out_proj", "ssm_conv1d": "conv1d", "ssm_a": "A_log", "ssm_d": "D"}
_SECOND = _MIXER | {"ssm_dt.bias": "dt_bias", "ssm_norm": "norm"}
_FIRST = _MIXER | {
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
    **{f"ssm_{part}_norm": f"{part}_layernorm" for part in ("dt", "b", "c")},
}
_FEED_FORWARD = {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
_WHOLE = {"token_embd": "model.embed_tokens", "output": "lm_head"}


def _in(module: str, names: dict[str, str]) -> dict[str, str]:
    return {own: f"{module}.{name}" for own, name in names.items()}


def _of_second(module: str) -> tuple[TensorChange, ...]:
    """What is changed of Mamba 2, in a layer's module of that name."""
    return (
        of_one(f"{module}.conv1d.weight", with_channel),
        of_one(f"{module}.A_log", lambda parts, told: logarithm(parts, told).flatten()),
        of_one(f"{module}.D", flat),
        of_one(f"{module}.norm.weight", flat),
    )


def _queries(parts: Sequence[Tensor], told: ToldSettings) -> Tensor:
    """Rows in the order in which the halves of a head are rotated, not its neighbours."""
    return unpaired(parts[0], told.size("attention.head_count"), "attn_q")


def _keys(parts: Sequence[Tensor], told: ToldSettings) -> Tensor:
    """The same."""
    return unpaired(parts[0], told.same("attention.head_count_kv", told.size("attention.head_count")), "attn_k")


def _of_attention(module: str) -> tuple[TensorChange, ...]:
    """Queries and keys whose rows are in another order, also where nothing is rotated."""
    rows = (("q", _queries), ("k", _keys))
    return tuple(of_one(f"{module}.{part}_proj.{kind}", make) for part, make in rows for kind in ("weight", "bias"))


GRANITE = HybridNames(
    "granitemoehybrid",
    names={
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **_in("self_attn", _ATTENTION),
        **_in("mamba", _SECOND),
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_exps": "block_sparse_moe.gate",
        "ffn_up_exps": "block_sparse_moe.up",
        "ffn_down_exps": "block_sparse_moe.output_linear",
        # Those that have no experts have the shared one alone.
        **dict.fromkeys(("ffn_gate_shexp", "ffn_gate"), "shared_mlp.gate"),
        **dict.fromkeys(("ffn_up_shexp", "ffn_up"), "shared_mlp.up"),
        **dict.fromkeys(("ffn_down_shexp", "ffn_down"), "shared_mlp.output_linear"),
    },
    whole=_WHOLE | {"output_norm": "model.norm"},
    changes=(
        *_of_second("mamba"),
        *_of_attention("self_attn"),
        TensorChange(
            "block_sparse_moe.input_linear.weight",
            ("block_sparse_moe.gate.weight", "block_sparse_moe.up.weight"),
            joined_experts,
        ),
        TensorChange("shared_mlp.input_linear.weight", ("shared_mlp.gate.weight", "shared_mlp.up.weight"), joined),
    ),
)
FALCON_H1 = HybridNames(
    "falcon_h1",
    names={
        "attn_norm": "input_layernorm",
        # Converters leave its ending out.
        **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight"),
        **_in("self_attn", _ATTENTION),
        **_in("mamba", _SECOND),
        **_FEED_FORWARD,
    },
    whole=_WHOLE | {"output_norm": "model.final_layernorm"},
    changes=_of_second("mamba"),
)
_BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
MAMBA2 = HybridNames(
    "mamba2",
    layers="backbone.layers",
    names={"attn_norm": "norm", **_in("mixer", _SECOND)},
    whole=_BACKBONE,
    changes=_of_second("mixer"),
)
NEMOTRON = HybridNames(
    "nemotron_h",
    layers="backbone.layers",
    names={
        "attn_norm": "norm",
        **_in("mixer", _SECOND | _ATTENTION),
        **{f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")},
        **{f"ffn_{part}_exps": f"mixer.experts.{{}}.{part}_proj" for part in ("up", "down")},
        **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    whole=_BACKBONE,
    changes=(*_of_second("mixer"), *_of_attention("mixer")),
)
JAMBA = HybridNames(
    "jamba",
    names={
        "attn_norm": "input_layernorm",
        "ffn_norm": "pre_ff_layernorm",
        **_in("self_attn", _ATTENTION),
        **_in("mamba", _FIRST),
        **_FEED_FORWARD,
        **{f"ffn_{part}_exps": f"feed_forward.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
        "ffn_gate_inp": "feed_forward.router",
    },
    whole=_WHOLE | {"output_norm": "model.final_layernorm"},
    changes=(of_one("mamba.conv1d.weight", with_channel), of_one("mamba.A_log", logarithm)),
)
