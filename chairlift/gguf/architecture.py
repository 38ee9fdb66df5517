"""One of llama.cpp's architectures, and what of it is otherwise than in folders of Hugging Face."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from chairlift.folders.tensor_names import LLAMA, TensorNames

# What a file says below its architecture's name.
Told = Mapping[str, Any]

_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
}
LAYER_NAME = re.compile(r"blk\.(\d{1,6})\.([a-z_][a-z0-9_.]*)\.(weight|bias)")


def as_told(told: Told, prefix: str) -> Told:
    """Files say it as others do."""
    return told


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of llama.cpp's architectures: the `model_type` of the same family, and what files of it do differently.

    `dialect` makes what a file says uniform; it raises UnsupportedModel naming a key. Where queries and keys are
    `paired`, neighbours are rotated together, so their rows are in another order. `lift` is what was added to the
    weights of norms. `family` are the family's names of tensors, and `names` those of a layer's tensors that differ, in
    full where a folder's has no ending. `fields` are more of config.json, `present` those of it that say whether layers
    have such a tensor, `absent` those that say whether they have none, and `keys` metadata that becomes such a field.
    `stages` are tensors of what is behind the model, and the modules of sentence-transformers that they are of.
    `scaling` is what files leave out of YaRN. `switches` is metadata that changes what this architecture computes, with
    the value that is served.
    """

    model_type: str
    dialect: Callable[[Told, str], Told] = as_told
    paired: bool = False
    lift: float = 0.0
    family: TensorNames = LLAMA
    names: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=lambda: {"attn_q.bias": "attention_bias"})
    absent: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    stages: Mapping[str, str] = field(default_factory=dict)
    scaling: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, Any] = field(default_factory=dict)

    def name_of(self, name: str) -> str:
        """What a folder calls a tensor of a file; as it is, if that is not known. Of several parts' it has braces."""
        base, _, part = name.rpartition(".")
        whole = _whole(self.family)
        if base in whole:
            return f"{whole[base]}.{part}"
        if name in self.stages:
            return f"{self.stages[name]}.linear.weight"
        found = LAYER_NAME.fullmatch(name)
        if found is None:
            return name
        number, base, part = found.groups()
        full, known = self.names.get(f"{base}.{part}"), (_of_a_layer(self.family) | dict(self.names)).get(base)
        if full is None and known is None:
            return name
        return f"{self.family.base}{self.family.layers}{number}.{full or f'{known}.{part}'}"


@cache
def _whole(family: TensorNames) -> dict[str, str]:
    """What is of no layer."""
    base = family.base
    found = {"token_embd": base + family.embedding, "output_norm": base + family.norm, "output": family.head[0]}
    if family.positions is not None:
        found["position_embd"] = base + family.positions
    if family.embedding_norm is not None:
        found["token_embd_norm"] = base + family.embedding_norm
    return found


@cache
def _of_a_layer(family: TensorNames) -> dict[str, str]:
    joint = {"attn_qkv": family.qkv[0]} if len(family.qkv) == 1 else {}
    mlp = {"ffn_up": family.mlp + family.gate_up[-1], "ffn_down": family.mlp + family.down}
    return {**_OF_A_LAYER, "attn_output": family.out, **joint, **mlp}
