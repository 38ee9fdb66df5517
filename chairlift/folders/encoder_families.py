"""The encoder families, one row each: everything in which they differ. Without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a classification head: tensor name, activation (or the config field that names it), norm."""

    dense: str
    activation: str | None = None
    norm: str | None = None


@dataclass(frozen=True, slots=True)
class MaskHead:
    """Where a head that guesses words keeps its tensors; `projector` is the embedding where it is not there.

    `activation` None is that of the encoder's layers.
    """

    dense: str
    norm: str
    projector: str
    bias: str
    activation: str | None = "gelu"


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """Where one architecture keeps its tensors, how its config names things, and what it computes otherwise.

    Tensors of the encoder itself are under one of `prefixes` where the folder holds a task's head as well. `qkv` and
    `up` are one fused tensor or several, a gated `up` first what is activated, unless `gate_last`. `fields` gives the
    names in config.json of what most families name as BERT does, `defaults` what is meant where it is silent, and
    `neutral` the values, of fields that this family alone has, with which nothing else is computed. `renamed`: what of
    this row is otherwise where transformers named the tensors, and not the model's authors. `after_padding`: positions
    start one after this field's value (or after the number). A flag is True, False, or the name of the config field
    that decides (absent means False); `up_bias` False leaves an MLP's bias to `down`. With `ntk` rotations may be
    scaled as GTE does, with `slopes` scores lose what alibi.py says for each token between two, to either side, with
    `windows` only some layers see all of a text, with `grouped` heads may share keys and values. `experts`: names of
    the router, of all experts' weights before and behind what is activated, and of their one bias.
    """

    prefixes: tuple[str, ...]
    layer: str
    words: str
    qkv: tuple[str, ...]
    out: str
    attention_norm: str
    up: tuple[str, ...]
    down: str
    mlp_norm: str
    positions: str | None = "embeddings.position_embeddings"
    types: str | None = "embeddings.token_type_embeddings"
    embedding_norm: str | None = "embeddings.LayerNorm"
    final_norm: str | None = None
    relative_bias: str | None = None
    pre_norm: bool = False
    rms: bool = False
    gated: bool = False
    gate_last: bool = False
    attention_bias: bool | str = True
    mlp_bias: bool | str = True
    up_bias: bool = True
    norm_bias: bool | str = True
    after_padding: str | int | None = None
    rotary: bool = False
    ntk: bool = False
    slopes: bool = False
    windows: bool = False
    grouped: bool = False
    experts: tuple[str, str, str, str] | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, Any] = field(default_factory=dict)
    head: tuple[Stage, ...] = ()
    head_bias: bool | str = True
    mask_head: MaskHead | None = None


_BERT_HEAD = (Stage("pooler.dense", "tanh"), Stage("classifier"))
_ROBERTA_HEAD = (Stage("classifier.dense", "tanh"), Stage("classifier.out_proj"))
_ROBERTA_MASK_HEAD = MaskHead("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")

_BERT = EncoderFamily(
    prefixes=("bert.",),
    layer="encoder.layer.{}.",
    words="embeddings.word_embeddings",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
    head=_BERT_HEAD,
    mask_head=MaskHead(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
        "cls.predictions.bias",
        activation=None,
    ),
)


# Jina's, which call themselves BERT (Guenther et al., 2023, arXiv:2310.19923).
_JINA = replace(
    _BERT,
    positions=None,
    slopes=True,
    up=("mlp.gated_layers",),
    up_bias=False,
    gated=True,
    down="mlp.wo",
    mlp_norm="mlp.layernorm",
    neutral={"position_embedding_type": "alibi", "feed_forward_type": "geglu", "hidden_act": "gelu"},
)


def _roberta() -> EncoderFamily:
    same = {name: getattr(_BERT, name) for name in ("layer", "words", "qkv", "out", "attention_norm", "up", "down")}
    return EncoderFamily(
        prefixes=("roberta.",),
        mlp_norm=_BERT.mlp_norm,
        after_padding="pad_token_id",
        head=_ROBERTA_HEAD,
        mask_head=_ROBERTA_MASK_HEAD,
        **same,
    )


# What transformers calls the tensors of encoders that came with code of their own.
_BY_TRANSFORMERS = {
    "layer": "layers.{}.",
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": "self_attn.o_proj",
    "attention_norm": "post_attention_layernorm",
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": "mlp.down_proj",
    "mlp_norm": "post_mlp_layernorm",
    "embedding_norm": "embeddings.LayerNorm",
}


def _gte(theta: float) -> EncoderFamily:
    mask_head = MaskHead("lm_head.dense", "lm_head.norm", "lm_head.decoder", "lm_head.decoder.bias")
    return EncoderFamily(
        prefixes=("new.", "gte."),
        layer="encoder.layer.{}.",
        words="embeddings.word_embeddings",
        qkv=("attention.qkv_proj",),
        out="attention.o_proj",
        attention_norm="attn_ln",
        up=("mlp.up_gate_proj",),
        down="mlp.down_proj",
        mlp_norm="mlp_ln",
        positions=None,
        gated=True,
        gate_last=True,
        up_bias=False,
        rotary=True,
        ntk=True,
        defaults={"rope_theta": theta, "type_vocab_size": 1},
        neutral={
            "position_embedding_type": "rope",
            "layer_norm_type": "layer_norm",
            "logn_attention_scale": False,
            "pack_qkv": True,
        },
        renamed=_BY_TRANSFORMERS | {"gate_last": False, "mask_head": replace(mask_head, norm="lm_head.layer_norm")},
        head=_BERT_HEAD,
        mask_head=mask_head,
    )


_NOMIC = EncoderFamily(
    prefixes=("bert.", "nomic_bert."),
    layer="encoder.layers.{}.",
    words="embeddings.word_embeddings",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_norm="norm2",
    positions=None,
    embedding_norm="emb_ln",
    gated=True,
    attention_bias=False,
    mlp_bias=False,
    rotary=True,
    fields={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
        "rope_theta": "rotary_emb_base",
    },
    defaults={"hidden_act": "silu", "rope_theta": 1000.0, "type_vocab_size": 2, "max_trained_positions": 2048},
    neutral={
        "moe_every_n_layers": 0,
        "activation_function": "swiglu",
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_head_dim": False,
        "prenorm": False,
        "parallel_block": False,
        "use_rms_norm": False,
        "causal": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
    },
    renamed=_BY_TRANSFORMERS,
    head=_BERT_HEAD,
)
# The later one, of whose layers every second has experts, and no MLP a gate (Nussbaum and Duderstadt, 2025,
# arXiv:2502.07972).
_NOMIC_EXPERTS = replace(
    _NOMIC,
    up=("mlp.fc1",),
    gated=False,
    attention_bias=True,
    mlp_bias=True,
    fields={**_NOMIC.fields, "hidden_act": "activation_function"},
    defaults={**_NOMIC.defaults, "hidden_act": "gelu"},
    neutral={
        **{
            name: value
            for name, value in _NOMIC.neutral.items()
            if name not in ("moe_every_n_layers", "activation_function")
        },
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True),
        **dict.fromkeys(("moe_normalize_expert_weights", "expert_choice_router"), False),
        "num_shared_experts": 0,
    },
    renamed={},
    experts=("mlp.router.layer.weight", "mlp.experts.mlp.w1", "mlp.experts.mlp.w2", "mlp.experts.bias"),
)

FAMILIES: dict[str, EncoderFamily] = {
    "bert": _BERT,
    "roberta": _roberta(),
    "xlm-roberta": _roberta(),
    "camembert": _roberta(),
    "distilbert": EncoderFamily(
        prefixes=("distilbert.",),
        layer="transformer.layer.{}.",
        words="embeddings.word_embeddings",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        attention_norm="sa_layer_norm",
        up=("ffn.lin1",),
        down="ffn.lin2",
        mlp_norm="output_layer_norm",
        types=None,
        fields={
            "hidden_size": "dim",
            "intermediate_size": "hidden_dim",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "hidden_act": "activation",
        },
        head=(Stage("pre_classifier", "relu"), Stage("classifier")),
        mask_head=MaskHead("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias", None),
    ),
    "mpnet": EncoderFamily(
        prefixes=("mpnet.",),
        layer="encoder.layer.{}.",
        words="embeddings.word_embeddings",
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        attention_norm="attention.LayerNorm",
        up=("intermediate.dense",),
        down="output.dense",
        mlp_norm="output.LayerNorm",
        types=None,
        relative_bias="encoder.relative_attention_bias.weight",
        after_padding=1,
        head=_ROBERTA_HEAD,
        mask_head=_ROBERTA_MASK_HEAD,
    ),
    "modernbert": EncoderFamily(
        prefixes=("model.",),
        layer="layers.{}.",
        words="embeddings.tok_embeddings",
        qkv=("attn.Wqkv",),
        out="attn.Wo",
        attention_norm="attn_norm",
        up=("mlp.Wi",),
        down="mlp.Wo",
        mlp_norm="mlp_norm",
        positions=None,
        types=None,
        embedding_norm="embeddings.norm",
        final_norm="final_norm",
        pre_norm=True,
        gated=True,
        attention_bias="attention_bias",
        mlp_bias="mlp_bias",
        norm_bias="norm_bias",
        rotary=True,
        windows=True,
        fields={"layer_norm_eps": "norm_eps", "hidden_act": "hidden_activation"},
        defaults={"layer_norm_eps": 1e-5},
        head=(Stage("head.dense", "classifier_activation", "head.norm"), Stage("classifier")),
        head_bias="classifier_bias",
    ),
    "nomic_bert": _NOMIC,
    "gte": _gte(theta=160000.0),
    # What most of GTE's folders call themselves, by their authors' own code.
    "new": _gte(theta=10000.0),
    "eurobert": EncoderFamily(
        prefixes=("model.",),
        layer="layers.{}.",
        words="embed_tokens",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.o_proj",
        attention_norm="input_layernorm",
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        mlp_norm="post_attention_layernorm",
        positions=None,
        types=None,
        embedding_norm=None,
        final_norm="norm",
        pre_norm=True,
        rms=True,
        gated=True,
        attention_bias="attention_bias",
        mlp_bias="mlp_bias",
        norm_bias=False,
        rotary=True,
        grouped=True,
        fields={"layer_norm_eps": "rms_norm_eps"},
        defaults={"layer_norm_eps": 1e-5, "hidden_act": "silu", "classifier_pooling": "late"},
        neutral={"clip_qkv": None},
        head=(Stage("dense", "gelu"), Stage("classifier")),
    ),
}


def family_of(raw: Mapping[str, Any]) -> EncoderFamily | None:
    """The row of an encoder with this config.json; None for any other model."""
    name = raw.get("model_type")
    if name == "bert" and raw.get("position_embedding_type") == "alibi":
        return _JINA
    if name == "nomic_bert" and raw.get("moe_every_n_layers"):
        return _NOMIC_EXPERTS
    return FAMILIES.get(str(name))
