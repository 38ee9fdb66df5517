"""The config.json of a model that transformers computes, out of a GGUF file's metadata."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from chairlift.errors import UnsupportedModel
from chairlift.folders.model_json import values_checked
from chairlift.gguf.dense_fields import apertus, arcee, hunyuan_dense, nemotron, phi2
from chairlift.gguf.gemma3n_fields import gemma3n
from chairlift.gguf.gemma4_fields import gemma4
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.hybrid_fields import delta_dense, delta_with_experts, lfm2, lfm2_moe
from chairlift.gguf.mamba_fields import falcon_h1, granite_hybrid, jamba, mamba2, nemotron_h
from chairlift.gguf.model_config import dtype_of
from chairlift.gguf.routed_fields import afmoe, exaone_moe, minimax_m2, phimoe
from chairlift.gguf.told_fields import Fields
from chairlift.gguf.told_settings import ToldSettings


class _Hybrid(NamedTuple):
    """A folder's `model_type`, and what its config.json has besides what those of all have."""

    model_type: str
    fields: Callable[[ToldSettings, GgufFile], Fields]


@values_checked()
def hybrid_config(file: GgufFile) -> Fields:
    """Return a config.json. Raises UnsupportedModel naming the key or tensor at fault."""
    told, row = ToldSettings(file.metadata, file.path.name), HYBRIDS[file.metadata["general.architecture"]]
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise UnsupportedModel(f"tensor 'token_embd.weight' is missing in {file.path.name}")
    told.must_be("attention.causal", True)
    found = {
        "model_type": row.model_type,
        "architectures": ["GgufForCausalLM"],
        "vocab_size": embeddings.shape[0],
        "hidden_size": told.size("embedding_length"),
        "num_hidden_layers": told.num_layers,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": dtype_of(embeddings, file.tensors.values()),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **row.fields(told, file),
    }
    told.refuse_unread()
    return found


# By a file's `general.architecture`.
HYBRIDS: Mapping[str, _Hybrid] = {
    "lfm2": _Hybrid("lfm2", lfm2),
    "lfm2moe": _Hybrid("lfm2_moe", lfm2_moe),
    "qwen35": _Hybrid("qwen3_5_text", delta_dense),
    "qwen35moe": _Hybrid("qwen3_5_moe_text", delta_with_experts),
    "qwen3next": _Hybrid("qwen3_next", delta_with_experts),
    "granitehybrid": _Hybrid("granitemoehybrid", granite_hybrid),
    "falcon-h1": _Hybrid("falcon_h1", falcon_h1),
    "mamba2": _Hybrid("mamba2", mamba2),
    "nemotron_h": _Hybrid("nemotron_h", nemotron_h),
    "nemotron_h_moe": _Hybrid("nemotron_h", nemotron_h),
    "jamba": _Hybrid("jamba", jamba),
    "gemma3n": _Hybrid("gemma3n_text", gemma3n),
    "gemma4": _Hybrid("gemma4_text", gemma4),
    "phi2": _Hybrid("phi", phi2),
    "nemotron": _Hybrid("nemotron", nemotron),
    "arcee": _Hybrid("arcee", arcee),
    "hunyuan-dense": _Hybrid("hunyuan_v1_dense", hunyuan_dense),
    "apertus": _Hybrid("apertus", apertus),
    "phimoe": _Hybrid("phimoe", phimoe),
    "minimax-m2": _Hybrid("minimax_m2", minimax_m2),
    "exaone-moe": _Hybrid("exaone_moe", exaone_moe),
    "afmoe": _Hybrid("afmoe", afmoe),
}
