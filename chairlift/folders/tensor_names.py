"""What the files of a family call its tensors."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of a decoder's tensors, without `.weight` and `.bias`.

    All but the head begin with `base`, where the files have any prefix, and those of a layer with `layers` and its
    number. What is one projection, of `qkv` or of `gate_up`, may be one tensor, or one for each part. Names of
    `gate_up` and `down` follow that of the `mlp`. With `grouped` heads the rows of `qkv` are, for each head of
    keys, the queries' that belong to it, its own and its values'. `head_norms` are those of queries and keys.
    `transposed`: projections of layers are [in, out]. The embedding may have an `embedding_norm`. `position_offset`: so
    many rows come before the first position's. `head` has all names that it may have. `derived`: endings of names of
    what only follows from config.json. `ahead`: beginnings of names of what only guesses the tokens after the next.
    """

    base: str = "model."
    embedding: str = "embed_tokens"
    embedding_norm: str | None = None
    positions: str | None = None
    position_offset: int = 0
    layers: str = "layers."
    norm: str = "norm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    grouped: bool = False
    out: str = "self_attn.o_proj"
    head_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    mlp: str = "mlp."
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    transposed: bool = False
    head: tuple[str, ...] = ("lm_head",)
    derived: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()


LLAMA = TensorNames()
ERNIE = TensorNames(ahead=("mtp_",))
GRANITE4 = TensorNames(mlp="shared_mlp.", gate_up=("input_linear",), down="output_linear")
QWEN3_5 = TensorNames(ahead=("mtp.",))
LFM2 = TensorNames(
    norm="embedding_norm",
    out="self_attn.out_proj",
    head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    mlp="feed_forward.",
    gate_up=("w1", "w3"),
    down="w2",
)
JOINT_MLP = TensorNames(gate_up=("gate_up_proj",))
JOINT = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("gate_up_proj",))
STARCODER2 = TensorNames(gate_up=("c_fc",), down="c_proj")
GPT2 = TensorNames(
    base="transformer.",
    embedding="wte",
    positions="wpe",
    layers="h.",
    norm="ln_f",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    gate_up=("c_fc",),
    down="c_proj",
    transposed=True,
    derived=(".attn.bias", ".attn.masked_bias"),
)
GPT_BIGCODE = replace(GPT2, transposed=False)
GPT_NEOX = TensorNames(
    base="gpt_neox.",
    embedding="embed_in",
    norm="final_layer_norm",
    qkv=("attention.query_key_value",),
    grouped=True,
    out="attention.dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
    head=("lm_head", "embed_out"),
    derived=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
)
FALCON = TensorNames(
    base="transformer.",
    embedding="word_embeddings",
    layers="h.",
    norm="ln_f",
    qkv=("self_attention.query_key_value",),
    grouped=True,
    out="self_attention.dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
)
BLOOM = replace(FALCON, embedding_norm="word_embeddings_layernorm")
MPT = TensorNames(
    base="transformer.",
    embedding="wte",
    layers="blocks.",
    norm="norm_f",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    mlp="ffn.",
    gate_up=("up_proj",),
)
OPT = TensorNames(
    base="model.decoder.",
    positions="embed_positions",
    position_offset=2,
    norm="final_layer_norm",
    out="self_attn.out_proj",
    mlp="",
    gate_up=("fc1",),
    down="fc2",
)
