"""GGUF files of small random models that transformers computes, by the package's writer and its names of tensors."""

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from support.foreign_factory import FOREIGN, foreign_folder
from support.gguf_files import add, add_words, together
from support.gguf_plain import PLAIN, WRITTEN_PLAIN, Config, Named, Written, add_xielu
from support.model_factory import temporary_root, write_model
from torch import Tensor

from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.hybrid_config import hybrid_config


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


def _describe_delta(writer: gguf.GGUFWriter, config: Config) -> None:
    _describe(writer, config)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_feed_forward_length(config.get("intermediate_size", 128))
    writer.add_rope_dimension_count(int(config["rope_parameters"]["partial_rotary_factor"] * config["head_dim"]))
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    writer.add_full_attention_interval(4)
    if config["model_type"] != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _in_turns(rows: Tensor, config: Config) -> Tensor:
    """Rows of heads of values, which follow those of keys by turns in a file."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    order = [group * (values // keys) + turn for turn in range(values // keys) for group in range(keys)]
    return torch.cat([rows.chunk(values)[head] for head in order])


def _change_delta(name: str, tensor: Tensor, config: Config) -> Named:
    is_next = config["model_type"] == "qwen3_next"
    num_keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    before, _, part = name.partition("linear_attn.")
    if name.endswith("norm.weight") and part != "norm.weight":
        tensor = tensor + 1
    elif part == "A_log":
        tensor = -tensor.exp()
    elif part == "conv1d.weight":
        tensor = tensor.squeeze(1)
    elif part == "in_proj_qkvz.weight":
        # Of each head of keys: queries, keys, values, gates.
        sizes = [num_keys // 2, num_keys // 2] + [
            config["linear_num_value_heads"] * config["linear_value_head_dim"]
        ] * 2
        groups = tensor.chunk(config["linear_num_key_heads"])
        kinds = zip(*(group.split([size // len(groups) for size in sizes]) for group in groups), strict=True)
        *qkv, gates = (torch.cat(kind) for kind in kinds)
        yield f"{before}linear_attn.in_proj_qkv.weight", torch.cat(qkv)
        yield f"{before}linear_attn.in_proj_z.weight", gates
        return
    if part in ("conv1d.weight", "in_proj_qkv.weight") and not is_next:
        tensor = torch.cat([tensor[:num_keys], _in_turns(tensor[num_keys:], config)])
    elif part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias") and not is_next:
        tensor = _in_turns(tensor, config)
    elif part == "out_proj.weight" and not is_next:
        tensor = _in_turns(tensor.T, config).T
    if name.endswith("experts.gate_up_proj"):
        for kind, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
            yield name.replace("gate_up_proj", f"{kind}_proj.weight"), half
        return
    yield name.replace(".dt_bias", ".dt_proj.bias"), tensor


def _describe_states(writer: gguf.GGUFWriter, config: Config) -> None:
    """What is said of Mamba, by whichever names a family calls it."""

    def found(*names: str) -> Any:
        return next(config[name] for name in names if name in config)

    writer.add_ssm_conv_kernel(found("mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(found("mamba_d_state", "ssm_state_size", "state_size"))
    if config["model_type"] == "jamba":
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_ssm_time_step_rank(config["mamba_dt_rank"])
        return
    heads = found("mamba_n_heads", "mamba_num_heads", "num_heads")
    writer.add_ssm_inner_size(heads * found("mamba_d_head", "mamba_head_dim", "head_dim"))
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(found("mamba_n_groups", "n_groups"))


def _describe_granite(writer: gguf.GGUFWriter, config: Config) -> None:
    _describe(writer, config)
    _describe_states(writer, config)
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config["layer_types"]])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_rope_scaling_finetuned(False)
    writer.add_rope_dimension_count(16)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _describe_falcon(writer: gguf.GGUFWriter, config: Config) -> None:
    _describe(writer, config)
    _describe_states(writer, config)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["hidden_size"] // config["num_attention_heads"])
    writer.add_value_length(config["hidden_size"] // config["num_attention_heads"])
    writer.add_feed_forward_length(config["intermediate_size"])


def _describe_mamba2(writer: gguf.GGUFWriter, config: Config) -> None:
    _describe(writer, config)
    _describe_states(writer, config)
    writer.add_context_length(2**20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)


def _describe_nemotron(writer: gguf.GGUFWriter, config: Config) -> None:
    _describe(writer, config)
    _describe_states(writer, config)
    kinds, is_moe = config["layers_block_type"], "moe" in config["layers_block_type"]
    width = config["moe_intermediate_size" if is_moe else "intermediate_size"]
    writer.add_head_count_kv([config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds])
    writer.add_feed_forward_length([width * (kind in ("mlp", "moe")) for kind in kinds])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_scaling_finetuned(False)
    if is_moe:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(width)
        writer.add_uint32(f"{writer.arch}.moe_latent_size", config["moe_latent_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _describe_jamba(writer: gguf.GGUFWriter, config: Config) -> None:
    _describe(writer, config)
    _describe_states(writer, config)
    period, offset, heads = (
        config[f"{name}"] for name in ("attn_layer_period", "attn_layer_offset", "num_key_value_heads")
    )
    layers = range(config["num_hidden_layers"])
    writer.add_head_count_kv([heads if layer % period == offset else 0 for layer in layers])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])


def _change_mamba(name: str, tensor: Tensor, config: Config) -> Named:
    """What is the same for all that have it."""
    is_first = config["model_type"] == "jamba"
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith("conv1d.weight"):
        tensor = tensor.squeeze(1)
    elif name.endswith((".A_log", ".D")) and not is_first:
        tensor = tensor[:, None]
    elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        tensor = tensor.view(config.get("mamba_n_groups", config.get("n_groups")), -1)
    if config["model_type"] in ("granitemoehybrid", "nemotron_h"):
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                tensor = tensor.view(config[heads], 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
    name = name.replace(".dt_bias", ".dt_proj.bias").replace("e_score_correction_bias", "e_score_correction.bias")
    if ".experts." in name:
        name = name.replace(".mixer.", ".mlp.").replace(".feed_forward.", ".mlp.").replace("backbone.", "model.")
    yield name, tensor


def _change_granite(name: str, tensor: Tensor, config: Config) -> Named:
    """Gates and projections up are cut apart; a shared expert alone is an MLP."""
    layer, shared = name.split(".")[2] if ".layers." in name else "", "_shexp" if config["num_local_experts"] else ""
    if name.endswith("shared_mlp.output_linear.weight"):
        yield f"blk.{layer}.ffn_down{shared}.weight", tensor
    elif name.endswith("shared_mlp.input_linear.weight"):
        for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"blk.{layer}.ffn_{part}{shared}.weight", half
    else:
        yield from _change_mamba(name, tensor, config)


def _change_falcon(name: str, tensor: Tensor, config: Config) -> Named:
    """Multipliers go into the weights."""
    gate, down = config["mlp_multipliers"]
    inputs, states, heads = (
        config["mamba_d_ssm"],
        config["mamba_n_groups"] * config["mamba_d_state"],
        config["mamba_n_heads"],
    )
    rows = zip((inputs, inputs, states, states, heads), config["ssm_multipliers"], strict=True)
    factors: dict[str, Any] = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
        "q_proj": config["attention_in_multiplier"],
        "k_proj": config["attention_in_multiplier"] * config["key_multiplier"],
        "v_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "mamba.out_proj": config["ssm_out_multiplier"],
        "mamba.in_proj": config["ssm_in_multiplier"] * torch.cat([torch.full((n, 1), by) for n, by in rows]),
    }
    for part, factor in factors.items():
        if name.endswith(f"{part}.weight"):
            tensor = tensor * factor
    yield from _change_mamba(name, tensor, config)


def _describe_gemma(writer: gguf.GGUFWriter, config: Config) -> None:
    """What is said of 3n and 4."""
    ropes, kinds = config["rope_parameters"], config["layer_types"]
    _describe(writer, config | {"rope_parameters": ropes["full_attention"]})
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])


def _describe_gemma3n(writer: gguf.GGUFWriter, config: Config) -> None:
    _describe_gemma(writer, config)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_altup_active_idx(config["altup_active_idx"])
    normal = torch.distributions.Normal(0, 1)
    shares = torch.tensor(config["activation_sparsity_pattern"])
    writer.add_activation_sparsity_scale(normal.icdf(shares).tolist())


def _change_gemma3n(name: str, tensor: Tensor, config: Config) -> Named:
    yield f"{name}.weight" if name.endswith("_scale") else name, tensor


def _gemma3n_tensors(tensors: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Of the streams' all but one lie in one; and layers have keys and values that nobody reads."""
    found, layers = dict(tensors), config["num_hidden_layers"]
    for layer in range(layers - config["num_kv_shared_layers"], layers):
        for part in ("k_proj", "v_proj", "k_norm"):
            found[f"model.layers.{layer}.self_attn.{part}.weight"] = tensors[f"model.layers.0.self_attn.{part}.weight"]
    for part in ("altup_projections", "altup_unembed_projections"):
        own = sorted(name for name in tensors if name.startswith(f"model.{part}."))
        found[f"model.{part}.weight"] = torch.stack([found.pop(name) for name in own])
    return found


def _describe_gemma4(writer: gguf.GGUFWriter, config: Config) -> None:
    kinds = config["layer_types"]
    _describe_gemma(writer, config)
    far = next(iter(config["per_layer_config"].values()))
    for add_width, width in (
        (writer.add_key_length, far["head_dim"]),
        (writer.add_value_length, far["head_dim"]),
        (writer.add_rope_dimension_count, far["head_dim"]),
        (writer.add_key_length_swa, config["head_dim"]),
        (writer.add_value_length_swa, config["head_dim"]),
        (writer.add_rope_dimension_count_swa, config["head_dim"]),
    ):
        add_width(width)
    near_heads = config["num_key_value_heads"]
    far_heads = far.get("num_key_value_heads", near_heads)
    writer.add_head_count_kv([near_heads if kind == "sliding_attention" else far_heads for kind in kinds])
    wide = 2 if config["use_double_wide_mlp"] else 1
    own = len(kinds) - config["num_kv_shared_layers"]
    widths = [config["intermediate_size"] * (wide if layer >= own else 1) for layer in range(len(kinds))]
    writer.add_feed_forward_length(widths if wide > 1 else widths[0])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _change_gemma4(name: str, tensor: Tensor, config: Config) -> Named:
    """What is not rotated has a factor for its angles; what the experts give is scaled, and so is a router's input."""
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", tensor
    elif name.endswith("per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", tensor
    else:
        yield name if name.endswith(".weight") else f"{name}.weight", tensor
    if name == "model.norm.weight":
        far = next(iter(config["per_layer_config"].values()))["head_dim"]
        turned = int(far * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
        yield "rope_freqs.weight", torch.tensor([1.0] * turned + [1e30] * (far // 2 - turned))


_DENSE = {
    "num_local_experts": 0,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "tie_word_embeddings": True,
}
_NEMOTRON = FOREIGN["nemotron_h"][1]
_MOE = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 96,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "topk_group": 1,
}
_MULTIPLIED = {
    "mlp_multipliers": [0.5, 0.7],
    "ssm_multipliers": [0.6, 0.7, 0.8, 0.9, 1.1],
    "mamba_n_groups": 2,
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.25,
    "key_multiplier": 0.7,
    "ssm_in_multiplier": 1.3,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_out_multiplier": 0.6,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
}
# Those that foreign_factory.py has not.
_MORE = {
    "granitemoehybrid_dense": ("granitemoehybrid", FOREIGN["granitemoehybrid"][1] | _DENSE),
    "nemotron_h_moe": ("nemotron_h", _NEMOTRON | _MOE),
    "falcon_h1_multiplied": ("falcon_h1", FOREIGN["falcon_h1"][1] | _MULTIPLIED),
    "gemma4_wide": ("gemma4_text", FOREIGN["gemma4_text"][1] | {"use_double_wide_mlp": True}),
} | PLAIN
WRITTEN = {
    "lfm2": Written("lfm2", _describe_lfm2, _change_lfm2),
    "lfm2_moe": Written("lfm2moe", _describe_lfm2, _change_lfm2),
    "qwen3_5_text": Written("qwen35", _describe_delta, _change_delta),
    "qwen3_5_moe_text": Written("qwen35moe", _describe_delta, _change_delta),
    "qwen3_next": Written("qwen3next", _describe_delta, _change_delta),
    "granitemoehybrid": Written("granitehybrid", _describe_granite, _change_granite),
    "granitemoehybrid_dense": Written("granitehybrid", _describe_granite, _change_granite),
    "falcon_h1": Written("falcon-h1", _describe_falcon, _change_falcon),
    "falcon_h1_multiplied": Written("falcon-h1", _describe_falcon, _change_falcon),
    "mamba2": Written("mamba2", _describe_mamba2, _change_mamba),
    "nemotron_h": Written("nemotron_h", _describe_nemotron, _change_mamba),
    "nemotron_h_moe": Written("nemotron_h_moe", _describe_nemotron, _change_mamba),
    "jamba": Written("jamba", _describe_jamba, _change_mamba),
    "gemma3n_text": Written("gemma3n", _describe_gemma3n, _change_gemma3n),
    "gemma4_text": Written("gemma4", _describe_gemma4, _change_gemma4),
    "gemma4_experts": Written("gemma4", _describe_gemma4, _change_gemma4),
    "gemma4_wide": Written("gemma4", _describe_gemma4, _change_gemma4),
} | WRITTEN_PLAIN


@functools.cache
def plain_hybrid(name: str) -> Path:
    """The model as a folder of Hugging Face."""
    if name not in _MORE:
        return foreign_folder(FOREIGN[name][0], name)
    folder = temporary_root() / f"for-gguf-{name}"
    write_model(folder, *_MORE[name])
    return folder


@functools.cache
def hybrid_file(name: str, kind: str = "F32", num_guessing: int = 0) -> Path:
    """The same model in a GGUF file, its matrices in a type of ggml where their rows can have it.

    Behind its layers lie some that guess tokens.
    """
    written, path = WRITTEN[name], temporary_root() / f"{name}-{kind}-{num_guessing}.gguf"
    config = json.loads((plain_hybrid(name) / "config.json").read_text())
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type") or ()))
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == written.arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, written.arch)
    written.describe(writer, config)
    if num_guessing:
        layers = config["num_hidden_layers"]
        writer.add_nextn_predict_layers(num_guessing)
        writer.add_block_count(layers + num_guessing)
        for layer in range(layers, layers + num_guessing):
            add(writer, f"blk.{layer}.nextn.eh_proj.weight", np.zeros((32, 64), np.float32))
            add(writer, f"blk.{layer}.attn_norm.weight", np.zeros(32, np.float32))
    add_words(writer, config["vocab_size"])
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    tensors = load_file(plain_hybrid(name) / "model.safetensors")
    if written.arch == "gemma3n":
        tensors = _gemma3n_tensors(tensors, config)
    if written.arch == "apertus":
        add_xielu(writer, tensors)
    # Folders of Gemma 4 have its experts in one as files do.
    for own, tensor in (tensors if written.arch.startswith("gemma") else together(tensors)).items():
        for changed, array in written.change(own, tensor.float(), config):
            is_own = changed.startswith(("blk.", "rope_freqs."))
            new = changed if is_own else names.get_name(changed, try_suffixes=(".weight", ".bias"))
            assert new is not None, changed
            is_matrix = array.ndim >= 2 and not array.shape[-1] % block and "gate_inp" not in new and "ssm_" not in new
            add(writer, new, array.numpy(), kind if is_matrix else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def told(name: str, **more: Any) -> dict[str, Any]:
    """The config.json of a file of which more is told, under its architecture's name; None takes a key away."""
    file = GgufFile(hybrid_file(name))
    prefix = f"{file.metadata['general.architecture']}."
    file.metadata |= {f"{prefix}{key}": value for key, value in more.items()}
    file.metadata = {key: value for key, value in file.metadata.items() if value is not None}
    return hybrid_config(file)
