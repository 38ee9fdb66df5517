"""The encoder families, one row each: everything in which they differ. Without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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

    Tensors of the encoder itself are under `prefix` where the folder holds a task's head as well. `qkv` is one fused
    tensor or three. `fields` gives the names in config.json of what most families name as BERT does.
    `after_padding`: positions start one after this field's value (or after the number). A flag is True, False, or the
    name of the config field that decides (absent means False).
    """

    prefix: str
    layer: str
    words: str
    qkv: tuple[str, ...]
    out: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str
    positions: str | None = "embeddings.position_embeddings"
    types: str | None = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    final_norm: str | None = None
    relative_bias: str | None = None
    pre_norm: bool = False
    gated: bool = False
    attention_bias: bool | str = True
    mlp_bias: bool | str = True
    norm_bias: bool | str = True
    after_padding: str | int | None = None
    rotary: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    head: tuple[Stage, ...] = ()
    head_bias: bool | str = True
    mask_head: MaskHead | None = None


_BERT_HEAD = (Stage("pooler.dense", "tanh"), Stage("classifier"))
_ROBERTA_HEAD = (Stage("classifier.dense", "tanh"), Stage("classifier.out_proj"))
_ROBERTA_MASK_HEAD = MaskHead("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")

_BERT = EncoderFamily(
    prefix="bert.",
    layer="encoder.layer.{}.",
    words="embeddings.word_embeddings",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
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


def _roberta() -> EncoderFamily:
    same = {name: getattr(_BERT, name) for name in ("layer", "words", "qkv", "out", "attention_norm", "up", "down")}
    return EncoderFamily(
        prefix="roberta.",
        mlp_norm=_BERT.mlp_norm,
        after_padding="pad_token_id",
        head=_ROBERTA_HEAD,
        mask_head=_ROBERTA_MASK_HEAD,
        **same,
    )


FAMILIES: dict[str, EncoderFamily] = {
    "bert": _BERT,
    "roberta": _roberta(),
    "xlm-roberta": _roberta(),
    "camembert": _roberta(),
    "distilbert": EncoderFamily(
        prefix="distilbert.",
        layer="transformer.layer.{}.",
        words="embeddings.word_embeddings",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        attention_norm="sa_layer_norm",
        up="ffn.lin1",
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
        prefix="mpnet.",
        layer="encoder.layer.{}.",
        words="embeddings.word_embeddings",
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        attention_norm="attention.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        mlp_norm="output.LayerNorm",
        types=None,
        relative_bias="encoder.relative_attention_bias.weight",
        after_padding=1,
        head=_ROBERTA_HEAD,
        mask_head=_ROBERTA_MASK_HEAD,
    ),
    "modernbert": EncoderFamily(
        prefix="model.",
        layer="layers.{}.",
        words="embeddings.tok_embeddings",
        qkv=("attn.Wqkv",),
        out="attn.Wo",
        attention_norm="attn_norm",
        up="mlp.Wi",
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
        fields={"layer_norm_eps": "norm_eps", "hidden_act": "hidden_activation"},
        head=(Stage("head.dense", "classifier_activation", "head.norm"), Stage("classifier")),
        head_bias="classifier_bias",
    ),
}
