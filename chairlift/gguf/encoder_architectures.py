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

_BASE, _WINDOW_BASE, _EVERY = "rope.freq_base", "rope.freq_base_swa", "moe_every_n_layers"
_WINDOW, _PATTERN, _ACTIVATION = "attention.sliding_window", "attention.sliding_window_pattern", "hidden_activation"
_EPS, RMS_EPS = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
HEAD_POOLING, _HEAD_POOLINGS, _MOST_LAYERS = "classifier.pooling_type", {1: "mean", 2: "cls"}, 2**12
_LONGEST_NAME = 64


def _positive(file: GgufFile, prefix: str, key: str) -> float:
    value = file.metadata.get(f"{prefix}{key}")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UnsupportedModel(f"{prefix}{key} must be a number above zero in a GGUF file, got {shown(value)}")
    return value


def _base(file: GgufFile, prefix: str) -> dict[str, Any]:
    """How fast heads are rotated: llama.cpp takes another base than the models where a file does not say."""
    return {"rope_theta": _positive(file, prefix, _BASE)}


def _experts(file: GgufFile, prefix: str) -> dict[str, Any]:
    """How many experts there are, how many are chosen, and of how many layers the second has them."""
    fields = {"expert_count": "num_experts", "expert_used_count": "moe_top_k", _EVERY: "moe_every_n_layers"}
    return {ours: size_of(file.metadata, prefix, key) for key, ours in fields.items()} | _base(file, prefix)


def _modern(file: GgufFile, prefix: str) -> dict[str, Any]:
    """Which layers have windows, how all are rotated, and what a head pools."""
    told = {key.removeprefix(prefix): value for key, value in file.metadata.items()}
    pooling, activation = told.get(HEAD_POOLING, 2), told.get(_ACTIVATION, "gelu")
    if type(pooling) is not int or pooling not in _HEAD_POOLINGS:
        raise UnsupportedModel(f"{prefix}{HEAD_POOLING} = {shown(pooling)} in a GGUF file: nothing here computes that")
    if not isinstance(activation, str) or len(activation) > _LONGEST_NAME:
        raise UnsupportedModel(f"{prefix}{_ACTIVATION} = {shown(activation)} in a GGUF file is no name")
    eps = told.get(_EPS)
    if eps is not None and told.get(RMS_EPS, eps) != eps:
        raise UnsupportedModel(f"{prefix}{RMS_EPS} = {shown(told[RMS_EPS])} in a GGUF file, but {_EPS} is {shown(eps)}")
    layers = size_of(file.metadata, prefix, "block_count")
    pattern = told.get(_PATTERN, 3)
    if not told.get(_WINDOW):
        pattern = 1
    if type(pattern) is int and pattern > 0:
        every = pattern
        pattern = [layer % every != 0 for layer in range(min(layers, _MOST_LAYERS))]
    if not isinstance(pattern, list) or len(pattern) != layers or not all(type(each) is bool for each in pattern):
        raise UnsupportedModel(f"{prefix}{_PATTERN} = {shown(pattern)} in a GGUF file is not for {layers} layers")
    found = {
        "hidden_activation": activation,
        "classifier_pooling": _HEAD_POOLINGS[pooling],
        "global_rope_theta": _positive(file, prefix, _BASE),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in pattern],
    }
    if not any(pattern):
        return found
    window = {"local_attention": size_of(file.metadata, prefix, _WINDOW)}
    return found | window | {"local_rope_theta": _positive(file, prefix, _WINDOW_BASE)}


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
        # Of BERT's own head converters leave out the first layer, and by what DistilBERT's activates, which has no
        # types, nobody says.
        head=("cls.weight", "cls.output.weight", "token_types.weight"),
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
    "modern-bert": EncoderArchitecture(
        "modernbert",
        layers="layers.{}.",
        names={
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
        whole={
            "token_embd": "embeddings.tok_embeddings",
            "token_embd_norm": "embeddings.norm",
            "output_norm": "final_norm",
            HEAD: "head.dense",
            "cls.norm": "head.norm",
            PROJECTOR: "classifier",
        },
        switches={"rope.scaling.type": "none"},
        also=(_BASE, _WINDOW_BASE, _WINDOW, _PATTERN, RMS_EPS, HEAD_POOLING, _ACTIVATION),
        head=("cls.weight", "cls.norm.weight", "cls.output.weight"),
        more=_modern,
    ),
}
