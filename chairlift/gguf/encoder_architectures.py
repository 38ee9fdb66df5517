"""What GGUF files call encoders, their tensors and settings, and what folders of Hugging Face call the same."""

import math
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.gguf.encoder_architecture import EncoderArchitecture, size_of
from chairlift.gguf.gguf_file import GgufFile, shown

# What older files of Jina's have of the first projection by itself: what is activated.
GATE = "mlp.gated_layers_w"
HEAD, PROJECTOR = "cls", "cls.output"
_NORMS = {"attn_output_norm": "attention.output.LayerNorm", "layer_output_norm": "output.LayerNorm"}
_BERT_ATTENTION = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
}
_EMBEDDINGS = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}

_BASE = "rope.freq_base"


def _base(file: GgufFile, prefix: str) -> dict[str, Any]:
    """How fast heads are rotated: llama.cpp takes another base than the models where a file does not say."""
    base = file.metadata.get(f"{prefix}{_BASE}")
    if not isinstance(base, int | float) or isinstance(base, bool) or not 0 < base < math.inf:
        raise UnsupportedModel(f"{prefix}{_BASE} must be a number above zero in a GGUF file, got {shown(base)}")
    return {"rope_theta": base}


def _experts(file: GgufFile, prefix: str) -> dict[str, Any]:
    """How many experts there are, how many are chosen, and of how many layers the second has them."""
    fields = {"expert_count": "num_experts", "expert_used_count": "moe_top_k", _EVERY: "moe_every_n_layers"}
    return {ours: size_of(file.metadata, prefix, key) for key, ours in fields.items()} | _base(file, prefix)


_EVERY = "moe_every_n_layers"
_NOMIC = {
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}
_NOMIC_EXPERTS = {
    "ffn_up": "mlp.fc1",
    "ffn_gate_inp": "mlp.router.layer",
    "ffn_up_exps.weight": "mlp.experts.mlp.w1",
    "ffn_down_exps.weight": "mlp.experts.mlp.w2",
}
_NOMIC_EMBEDDINGS = _EMBEDDINGS | {"token_embd_norm": "emb_ln"}

ENCODERS: dict[str, EncoderArchitecture] = {
    # BERT, and RoBERTa, XLM-R and DistilBERT, too: of their tables converters cut off the rows before the first
    # position, so that nothing else is left that they compute.
    "bert": EncoderArchitecture(
        "bert",
        names=_BERT_ATTENTION | _NORMS | {"ffn_up": "intermediate.dense", "ffn_down": "output.dense"},
        whole=_EMBEDDINGS
        | {"position_embd": "embeddings.position_embeddings", HEAD: "pooler.dense", PROJECTOR: "classifier"},
        # No file says which activation there is: it is BERT's own, where llama.cpp has what is near it.
        fields={"hidden_act": "gelu"},
    ),
    "nomic-bert": EncoderArchitecture(
        "nomic_bert",
        layers="encoder.layers.{}.",
        names=_NOMIC | {"ffn_up": "mlp.fc11", "ffn_gate": "mlp.fc12"},
        whole=_NOMIC_EMBEDDINGS,
        also=(_BASE,),
        more=_base,
    ),
    "nomic-bert-moe": EncoderArchitecture(
        "nomic_bert",
        layers="encoder.layers.{}.",
        names=_NOMIC | _NOMIC_EXPERTS,
        whole=_NOMIC_EMBEDDINGS,
        also=(_BASE, _EVERY, "expert_count", "expert_used_count"),
        more=_experts,
    ),
    "jina-bert-v2": EncoderArchitecture(
        "bert",
        names=_BERT_ATTENTION
        | {
            "attn_output_norm": "attention.output.LayerNorm",
            "layer_output_norm": "mlp.layernorm",
            "ffn_gate": GATE,
            "ffn_up": "mlp.gated_layers",
            "ffn_down": "mlp.wo",
        },
        whole=_EMBEDDINGS,
        fields={
            "position_embedding_type": "alibi",
            "feed_forward_type": "geglu",
            "hidden_act": "gelu",
        },
        # How steep slopes are; files leave it out.
        switches={"attention.max_alibi_bias": 8},
    ),
}
