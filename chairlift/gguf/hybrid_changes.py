"""The tensors of each architecture with states: their names, and what converters change of them, changed back."""

from collections.abc import Sequence

from torch import Tensor

from chairlift.gguf.hybrid_names import HybridNames, TensorChange
from chairlift.gguf.told_settings import ToldSettings


def _with_channel(parts: Sequence[Tensor], told: ToldSettings) -> Tensor:
    """A convolution's weights [C, 1, K] of [C, K]: each channel is a group of one."""
    (taps,) = parts
    if taps.dim() != 2:
        raise ValueError("it has to be [channels, taps]")
    return taps.unsqueeze(1)


_SHORT_CONVOLUTIONS = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_EMBEDDING = {"token_embd": "model.embed_tokens", "output": "lm_head"}
_LFM2 = HybridNames(
    "lfm2",
    names=_SHORT_CONVOLUTIONS,
    whole=_EMBEDDING | {"token_embd_norm": "model.embedding_norm"},
    changes=(TensorChange("conv.conv.weight", ("conv.conv.weight",), _with_channel),),
)

# By a file's `general.architecture`.
HYBRID_NAMES: dict[str, HybridNames] = {"lfm2": _LFM2, "lfm2moe": _LFM2}
