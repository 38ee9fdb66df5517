"""The config.json of a model of attention and MLPs that transformers computes, out of a GGUF file's metadata."""

from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.rotation_fields import part_that_turns, scaled, unscaled
from chairlift.gguf.told_fields import Fields, attention_fields
from chairlift.gguf.told_settings import ToldSettings, numbers_of_layers

RMS_EPS, _EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_KEY_HEADS, _WIDTH, _TURNED = "attention.head_count_kv", "feed_forward_length", "rope.dimension_count"
XIELU = tuple(f"xielu.{part}" for part in ("alpha_n", "alpha_p", "beta", "eps"))


def heads_of_all(told: ToldSettings) -> Fields:
    """The heads of a model all of whose layers have keys and values."""
    found = attention_fields(told)
    heads, counts = found["num_attention_heads"], told.sizes(_KEY_HEADS, found["num_attention_heads"])
    if 0 in counts or heads % found["num_key_value_heads"]:
        raise told.wrong(_KEY_HEADS, f"not a part of {heads} heads in each layer")
    return found


def has_bias(file: GgufFile, part: str) -> bool:
    """Whether this projection of layers has a bias."""
    return f"blk.0.{part}.bias" in file.tensors


def phi2(told: ToldSettings, file: GgufFile) -> Fields:
    """Phi 1 and 2: attention and an MLP side by side, all with biases."""
    heads = heads_of_all(told)
    return {
        **heads,
        "rope_parameters": unscaled(told, file) | part_that_turns(told, heads["head_dim"]),
        "intermediate_size": told.size(_WIDTH),
        "hidden_act": "gelu_new",
        "layer_norm_eps": told.number(_EPS),
    }


def nemotron(told: ToldSettings, file: GgufFile) -> Fields:
    """Nemotron and Minitron: squared ReLUs, and LayerNorms."""
    heads = heads_of_all(told)
    part = part_that_turns(told, heads["head_dim"])
    # Converters write it for norms that there are not.
    told.has(RMS_EPS)
    return {
        **heads,
        "rope_parameters": scaled(told, file, heads["head_dim"], by_waves=False) | part,
        "intermediate_size": told.size(_WIDTH),
        "hidden_act": "relu2",
        "norm_eps": told.number(_EPS),
        "attention_bias": has_bias(file, "attn_q"),
        "mlp_bias": has_bias(file, "ffn_up"),
    }


def arcee(told: ToldSettings, file: GgufFile) -> Fields:
    """Llama with squared ReLUs and no gates."""
    heads = heads_of_all(told)
    told.must_be(_TURNED, heads["head_dim"])
    return {
        **heads,
        "rope_parameters": scaled(told, file, heads["head_dim"], by_waves=True),
        "intermediate_size": told.size(_WIDTH),
        "hidden_act": "relu2",
        "rms_norm_eps": told.number(RMS_EPS),
        "attention_bias": has_bias(file, "attn_q"),
        "mlp_bias": has_bias(file, "ffn_up"),
    }


def hunyuan_dense(told: ToldSettings, file: GgufFile) -> Fields:
    """Hunyuan, which norms queries and keys behind rotating them. What its `alpha` stretches is in the base."""
    heads = heads_of_all(told)
    told.must_be(_TURNED, heads["head_dim"])
    # Some say that an MLP is one expert.
    for key in ("expert_count", "expert_used_count"):
        told.must_be(key, 0, 1)
    told.has("rope.scaling.original_context_length")
    return {
        **heads,
        "rope_parameters": unscaled(told, file),
        "intermediate_size": told.size(_WIDTH),
        "rms_norm_eps": told.number(RMS_EPS),
        "attention_bias": has_bias(file, "attn_q"),
    }


def apertus(told: ToldSettings, file: GgufFile) -> Fields:
    """Apertus, whose activation has numbers of its own in each layer, which are metadata in files."""
    heads = heads_of_all(told)
    told.must_be(_TURNED, heads["head_dim"])
    for key in XIELU:
        numbers_of_layers(file.metadata, key, told.num_layers, told.file_name)
    return {
        **heads,
        "rope_parameters": scaled(told, file, heads["head_dim"], by_waves=True),
        "intermediate_size": told.size(_WIDTH),
        "hidden_act": "xielu",
        "rms_norm_eps": told.number(RMS_EPS),
        "attention_bias": has_bias(file, "attn_q"),
    }
