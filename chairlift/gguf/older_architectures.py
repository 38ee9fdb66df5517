"""Architectures before Llama: joint projections, LayerNorms, no gates, and positions that are learned, or slopes.

Their files have all queries of a layer first, then all keys, then all values, and projections as [out, in].
"""

from chairlift.errors import UnsupportedModel
from chairlift.folders.tensor_names import BLOOM, FALCON, GPT2, GPT_BIGCODE, GPT_NEOX, MPT
from chairlift.gguf.architecture import Architecture, Told
from chairlift.gguf.gguf_file import shown

_HEADS, _KEY_HEADS, _BASE = "attention.head_count", "attention.head_count_kv", "rope.freq_base"
_SLOPES, _PARALLEL = "attention.max_alibi_bias", "use_parallel_residual"
_EPS = {"attention.layer_norm_epsilon": "layer_norm_epsilon"}
_GPT_NORMS = {"attn_norm": "ln_1", "ffn_norm": "ln_2"}


def _as_many_keys(told: Told, prefix: str) -> Told:
    """There is a head of keys for each of queries."""
    if told.get(_KEY_HEADS, told.get(_HEADS)) != told.get(_HEADS):
        raise UnsupportedModel(
            f"{prefix}{_KEY_HEADS} = {shown(told[_KEY_HEADS])} in a GGUF file: nothing here computes that"
        )
    return told


def _neox(told: Told, prefix: str) -> Told:
    if told.get(_PARALLEL) not in (True, False):
        raise UnsupportedModel(f"{prefix}{_PARALLEL} must be true or false, got {shown(told.get(_PARALLEL))}")
    return _as_many_keys(told, prefix)


def _falcon(told: Told, prefix: str) -> Told:
    """Converters don't write how fast heads are rotated. Of those with one norm, Falcon 2 has another base than 1."""
    if _BASE not in told and told.get(_KEY_HEADS, 1) != 1:
        problem = f"{prefix}{_BASE} is missing, which of those with several heads of keys and one norm (Falcon 2) is"
        raise UnsupportedModel(f"{problem} not what it would be taken for")
    return told


def _mpt(told: Told, prefix: str) -> Told:
    """What says how steep slopes are lies in a config of attention's own."""
    steepness = told.get(_SLOPES)
    if type(steepness) not in (int, float) or not steepness:
        problem = f"{prefix}{_SLOPES} = {shown(steepness)} in a GGUF file"
        raise UnsupportedModel(f"{problem}: of this family only models with slopes are computed here")
    others = {key: value for key, value in _as_many_keys(told, prefix).items() if key != _SLOPES}
    return others | {"attn_config": {"alibi_bias_max": steepness}}


_FALCON_FIELDS = {"new_decoder_architecture": True}
_FALCON_KEYS = _EPS | {_KEY_HEADS: "num_kv_heads", "feed_forward_length": "ffn_hidden_size"}
# As converters have put rows in order.
_FALCON_ROWS = {"tensor_data_layout": "jploski"}

OLDER: dict[str, Architecture] = {
    "gpt2": Architecture(
        "gpt2",
        dialect=_as_many_keys,
        family=GPT2,
        names=_GPT_NORMS,
        present={},
        keys=_EPS | {"feed_forward_length": "n_inner"},
    ),
    "starcoder": Architecture(
        "gpt_bigcode",
        family=GPT_BIGCODE,
        names=_GPT_NORMS,
        present={},
        keys=_EPS | {"feed_forward_length": "n_inner"},
        switches={_KEY_HEADS: 1},
    ),
    # Which GELU it is no file says: most are the exact one, and the others nearly so.
    "gptneox": Architecture(
        "gpt_neox",
        dialect=_neox,
        family=GPT_NEOX,
        fields={"hidden_act": "gelu", _PARALLEL: False},
        present={"attn_qkv.bias": "attention_bias"},
        keys={"attention.layer_norm_epsilon": "layer_norm_eps", _PARALLEL: _PARALLEL},
    ),
    "falcon": Architecture(
        "falcon",
        dialect=_falcon,
        family=FALCON,
        fields=_FALCON_FIELDS | {"num_ln_in_parallel_attn": 1},
        present={},
        keys=_FALCON_KEYS,
        switches=_FALCON_ROWS,
    ),
    "bloom": Architecture(
        "bloom",
        dialect=_as_many_keys,
        family=BLOOM,
        fields={"hidden_act": "gelu_pytorch_tanh"},
        present={},
        keys=_EPS,
    ),
    "mpt": Architecture(
        "mpt",
        dialect=_mpt,
        family=MPT,
        names={"attn_norm": "norm_1", "ffn_norm": "norm_2"},
        fields={"hidden_act": "gelu"},
        present={},
        keys=_EPS | {"attn_config": "attn_config"},
    ),
}
# Its attention has a norm of its own.
FALCON_TWO_NORMS = Architecture(
    "falcon",
    family=FALCON,
    names={"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
    fields=_FALCON_FIELDS | {"num_ln_in_parallel_attn": 2},
    present={},
    keys=_FALCON_KEYS,
    switches=_FALCON_ROWS,
)
