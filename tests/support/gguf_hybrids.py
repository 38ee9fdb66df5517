"""GGUF files of small random models with states, by the package's writer and its names of tensors."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
from safetensors.torch import load_file
from support.foreign_factory import FOREIGN, foreign_folder
from support.gguf_files import add, add_words, together
from support.model_factory import temporary_root
from torch import Tensor

Config = dict[str, Any]
# Under the names that the package's map knows.
Named = Iterator[tuple[str, Tensor]]


class Written(NamedTuple):
    """How converters write a model: as which architecture, what they say of it, and what becomes of a tensor."""

    arch: str
    describe: Callable[[gguf.GGUFWriter, Config], None]
    change: Callable[[str, Tensor, Config], Named]


def _describe(writer: gguf.GGUFWriter, config: Config) -> None:
    """What is said of all."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_vocab_size(config["vocab_size"])
    eps = [config[name] for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if name in config]
    writer.add_layer_norm_rms_eps(eps[0])
    if "max_position_embeddings" in config:
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_head_count(config["num_attention_heads"])
    if rope := config.get("rope_parameters"):
        writer.add_rope_freq_base(rope["rope_theta"])


def _describe_lfm2(writer: gguf.GGUFWriter, config: Config) -> None:
    _describe(writer, config)
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([0 if kind == "conv" else heads for kind in config["layer_types"]])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "num_experts" not in config:
        # As Lfm2MLP rounds it.
        wide = config["block_multiple_of"]
        writer.add_feed_forward_length(-(-int(2 * config["intermediate_size"] / 3) // wide) * wide)
        return
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _change_lfm2(name: str, tensor: Tensor, config: Config) -> Named:
    if "conv.conv" in name:
        tensor = tensor.squeeze(1)
    if ".experts." in name:
        name = name.removeprefix("model.")
    yield name.replace("expert_bias", "expert_bias.bias"), tensor


# By their names in foreign_factory.py.
WRITTEN = {
    "lfm2": Written("lfm2", _describe_lfm2, _change_lfm2),
    "lfm2_moe": Written("lfm2moe", _describe_lfm2, _change_lfm2),
}


def plain_hybrid(name: str) -> Path:
    """The model as a folder of Hugging Face."""
    return foreign_folder(FOREIGN[name][0], name)


@functools.cache
def hybrid_file(name: str, kind: str = "F32") -> Path:
    """The same model in a GGUF file, its matrices in a type of ggml where their rows can have it."""
    written, path = WRITTEN[name], temporary_root() / f"{name}-{kind}.gguf"
    config = json.loads((plain_hybrid(name) / "config.json").read_text())
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type") or ()))
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == written.arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, written.arch)
    written.describe(writer, config)
    add_words(writer, config["vocab_size"])
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    for own, tensor in together(load_file(plain_hybrid(name) / "model.safetensors")).items():
        for changed, array in written.change(own, tensor.float(), config):
            new = names.get_name(changed, try_suffixes=(".weight", ".bias"))
            assert new is not None, changed
            is_matrix = array.ndim >= 2 and not array.shape[-1] % block and "gate_inp" not in new and "ssm_" not in new
            add(writer, new, array.numpy(), kind if is_matrix else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
