"""Reading a model folder: old and new forms of config.json, and every refusal by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.decoder_harness import all_logits, make_runner, prompts
from support.device import DEVICE
from support.model_factory import TINY, edited_folder, model_folder, reference_model

from chairlift.errors import ConfigError, UnsupportedModel
from chairlift.folders.config_names import NotNative
from chairlift.folders.decoder_families import FAMILIES
from chairlift.ops.contract import Ops
from chairlift.ops.select import select_ops
from chairlift.runners.decoder import kv_memory, runner
from chairlift.runners.decoder.config import max_length, parse_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

YARN = {"type": "yarn", "factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}

_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def config(model_type: str = "llama", **fields: Any) -> Any:
    experts = FAMILIES[model_type].experts if model_type in FAMILIES else None
    names = [] if experts is None else [experts.count[0], experts.chosen, experts.width, experts.shared_width]
    counts = {name: 4 for name in names if name is not None and name not in TINY}
    if model_type in FAMILIES and FAMILIES[model_type].latent:
        counts |= dict.fromkeys(_LATENT_SIZES, 8) | {"num_key_value_heads": None}
    if model_type in FAMILIES and FAMILIES[model_type].mixers is not None:
        counts |= {"layer_types": ["full_attention"] * TINY["num_hidden_layers"]}
    return parse_config(TINY | {"model_type": model_type} | counts | fields)


def test_old_and_new_forms_mean_the_same() -> None:
    new = config(dtype="bfloat16", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3)
    assert new.dtype == "bfloat16"
    assert new == config(torch_dtype="bfloat16", rope_theta=5e5, rope_scaling={"rope_type": "llama3"} | LLAMA3)
    old = {"type": "linear", "factor": 2.0}
    assert config(rope_theta=7.0, rope_scaling=old) == config(
        rope_parameters={"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0}
    )
    assert config(rope_theta=7.0, rope_scaling=None).ropes[0].theta == 7.0
    assert config().ropes[0].theta == 10000.0


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "linear", "factor": 2.0},
        {"type": "yarn", "factor": 4.0},
        {"type": "yarn", "factor": 4.0, "finetuned": True},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 32, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0, "beta_slow": 0},
    ],
)
def test_rope_of_old_folders_equals_transformers(scaling: dict[str, Any] | None) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    # transformers fills in the dictionary that it is given.
    fields = {"rope_theta": 3000.0, "rope_scaling": scaling and dict(scaling)}
    table = config(**fields).ropes[0].table(16, 512)
    rotary = LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict(TINY | {"model_type": "llama"} | fields))
    cos, sin = rotary(torch.zeros(1), torch.arange(512)[None])
    assert torch.equal(table[:, :8], cos[0, :, :8])
    assert torch.equal(table[:, 8:], sin[0, :, :8])


def test_a_factor_on_yarns_own() -> None:
    """As vLLM reads it, and whoever made DeepSeek R1 distilled into Qwen 3, which has none by it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    plain = config(rope_scaling=yarn).ropes[0].table(16, 512)
    usual = 0.1 * math.log(4) + 1
    own = config(rope_scaling=yarn | {"attn_factor": 1 / usual, "extrapolation_factor": 1.0}).ropes[0].table(16, 512)
    whole = config(rope_scaling=yarn | {"attention_factor": 1.0}).ropes[0].table(16, 512)
    torch.testing.assert_close(own, plain / usual)
    torch.testing.assert_close(own, whole)


def test_scaling_that_was_added_to_a_config_lengthens_it(tmp_path: Path) -> None:
    """As model cards say: a factor over the original length, and no word of the length that is reached."""
    transformers = pytest.importorskip("transformers")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert config(max_position_embeddings=40, rope_scaling=yarn).max_positions == 128
    assert config(max_position_embeddings=400, rope_scaling=yarn).max_positions == 400
    assert config(max_position_embeddings=40, rope_scaling=yarn | {"rope_type": "linear"}).max_positions == 128
    with pytest.raises(UnsupportedModel, match="max_position_embeddings as 32000000000"):
        config(rope_scaling=yarn | {"factor": 1e9})
    # That may be the length before or after it.
    linear = {"rope_type": "linear", "factor": 4.0}
    told = config(max_position_embeddings=40, rope_scaling=linear)
    assert told.max_positions == 40
    with pytest.raises(ConfigError, match=r"\(40\). If that is without the scaling by 4 .*, raise the field there"):
        max_length(160, told)
    source = model_folder("llama")
    folder = edited_folder(
        tmp_path / "model", source, ("rope_parameters",), max_position_embeddings=40, rope_scaling=yarn
    )
    prompt = [7 * index % 320 for index in range(120)]
    found = all_logits(make_runner(folder, max_model_len=None), [prompt])[0]
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        wanted = reference(torch.tensor([prompt])).logits[0]
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_dynamic_rope_is_the_plain_one_up_to_the_models_length() -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = {"rope_theta": 3000.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    read, length = config(**fields), TINY["max_position_embeddings"]
    assert read == config(rope_theta=3000.0)
    rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(TINY | {"model_type": "llama"} | fields))
    cos, _ = rotary(torch.zeros(1), torch.arange(length)[None])
    assert torch.equal(read.ropes[0].table(16, length)[:, :8], cos[0, :, :8])


def test_gemmas_first_folders_mean_the_gelu_by_tanh() -> None:
    for fields in ({"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, {}):
        assert config(model_type="gemma", **fields).activation == config(model_type="gemma").activation
    assert config(model_type="gemma", hidden_act="silu").activation != config(model_type="gemma").activation


def test_what_only_transformers_computes_of_a_native_family_is_told_apart() -> None:
    with pytest.raises(NotNative, match="clip_qkv"):
        config(model_type="olmo", clip_qkv=8.0)
    with pytest.raises(UnsupportedModel, match="clip_qkv") as refusal:
        config(clip_qkv=8.0)
    assert not isinstance(refusal.value, NotNative)


# Gemma 3 as folders of its first months have it, and as those of today do.
OLD_GEMMA = {
    "num_hidden_layers": 6,
    "sliding_window": 9,
    "sliding_window_pattern": 3,
    "rope_theta": 5e5,
    "rope_local_base_freq": 200.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
NEW_GEMMA = {
    "num_hidden_layers": 6,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
    },
}


@pytest.mark.parametrize("fields", [OLD_GEMMA, NEW_GEMMA, {"num_hidden_layers": 6}], ids=["old", "new", "defaults"])
def test_each_kind_of_layer_has_the_rotation_of_transformers(fields: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    ours = config("gemma3_text", **fields)
    # transformers fills in the dictionaries that it is given.
    theirs = transformers.Gemma3TextConfig.from_dict(TINY | json.loads(json.dumps(fields)))
    rotary = Gemma3RotaryEmbedding(theirs)
    for kind, rope, window in zip(theirs.layer_types, ours.ropes, ours.windows, strict=True):
        assert window == (theirs.sliding_window if kind == "sliding_attention" else None)
        cos, sin = rotary(torch.zeros(1), torch.arange(512)[None], kind)
        table = rope.table(256, 512)
        assert torch.equal(table[:, :128], cos[0, :, :128])
        assert torch.equal(table[:, 128:], sin[0, :, :128])


def test_old_and_new_forms_of_layers_unlike_each_other_mean_the_same() -> None:
    assert config("gemma3_text", **OLD_GEMMA) == config("gemma3_text", **NEW_GEMMA)
    # Both kinds of layers share what is equal, so that there is one table of it.
    assert len(set(config("gemma3_text", **NEW_GEMMA).ropes)) == 2
    window = {"use_sliding_window": True, "max_window_layers": 1}
    assert len(set(config("qwen2", **window).ropes)) == 1


def test_what_a_family_means_by_leaving_a_field_out() -> None:
    gemma, olmo = config("gemma3_text"), config("olmo2")
    assert (gemma.tied, gemma.activation, gemma.rms_norm_eps) == (True, "gelu_tanh", 1e-6)
    assert (gemma.attention_scale, gemma.embedding_scale, gemma.windows) == (1 / 16, 8.0, (4096, 4096))
    assert (olmo.tied, olmo.activation, olmo.rms_norm_eps) == (False, "silu", 1e-5)
    assert (olmo.attention_scale, olmo.embedding_scale, olmo.windows) == (0.25, 1.0, (None, None))
    assert config("gemma3_text", hidden_activation="gelu", hidden_act="silu").activation == "gelu"


def test_defaults_of_newer_families() -> None:
    layers = {"num_hidden_layers": 8}
    assert config("olmo3", **layers).windows == (4096, 4096, 4096, None) * 2
    assert config("cwm", **layers).windows == (None, 8192, 8192, 8192) * 2
    assert config("ministral").windows == (4096, 4096)
    assert config("ministral", sliding_window=None).windows == (None, None)
    assert config("phi3").windows == (None, None)
    kinds = [rope.kind for rope in config("smollm3", **layers).ropes]
    assert kinds == ["default", "default", "default", "none"] * 2
    exaone = config("exaone4", **layers)
    assert exaone.windows == (4096, 4096, 4096, None) * 2
    assert [rope.kind for rope in exaone.ropes] == kinds
    assert {rope.kind for rope in config("exaone4", sliding_window=None, **layers).ropes} == {"default"}
    cwm = config("cwm").ropes[0]
    assert (cwm.kind, cwm.theta, cwm.original_max_positions) == ("llama3", 1e6, 8192)
    assert [config(name).ropes[0].theta for name in ("smollm3", "ernie4_5", "helium", "olmo3")] == [2e6, 5e5, 1e5, 5e5]
    assert config("seed_oss").qkv_bias
    assert not config("seed_oss", attention_bias=False).qkv_bias
    granite = config("granite", logits_scaling=4, residual_multiplier=0.5, embedding_multiplier=3)
    assert (granite.logit_scale, granite.residual_scale, granite.embedding_scale) == (0.25, 0.5, 3.0)


@pytest.mark.parametrize("length", [128, 512])
def test_longrope_goes_by_how_long_a_text_may_become(length: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    factors = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 6.0]}
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5} | factors
    fields = {"original_max_position_embeddings": 128, "rope_parameters": scaling}
    table = config("phi3", **json.loads(json.dumps(fields))).ropes[0].table(16, length)
    # Their first tokens are rotated by the other list until the text is longer.
    rotary = Phi3RotaryEmbedding(transformers.Phi3Config.from_dict(TINY | fields))
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    assert torch.allclose(table[:, :4], cos[0, :, :4], atol=1e-6)
    assert torch.allclose(table[:, 8:12], sin[0, :, :4], atol=1e-6)
    assert torch.equal(table[:, 4:8], torch.ones(length, 4))
    assert not table[:, 12:].any()


def test_windows() -> None:
    assert config("mistral", sliding_window=9).windows == (9, 9)
    assert config("mistral", sliding_window=None).windows == (None, None)
    assert config("mistral").windows == (4096, 4096)
    assert config("qwen2", sliding_window=9).windows == (None, None)
    assert config("qwen2", sliding_window=9, use_sliding_window=True, max_window_layers=1).windows == (None, 9)
    types = ["sliding_attention", "full_attention"]
    assert config("qwen3", sliding_window=9, use_sliding_window=True, layer_types=types).windows == (9, None)
    assert config("llama", sliding_window=9).windows == (None, None)
    smollm = {"num_hidden_layers": 4, "sliding_window": 9}
    assert config("smollm3", **smollm).windows == (None,) * 4
    assert config("smollm3", use_sliding_window=True, **smollm).windows == (None, None, None, 9)
    every = {"use_sliding_window": True, "no_rope_layer_interval": 2, "layer_types": None}
    assert config("smollm3", **every, **smollm).windows == (None, 9, None, 9)
    assert config("smollm3", use_sliding_window=True, layer_types=types * 2, **smollm).windows == (9, None) * 2
    with pytest.raises(UnsupportedModel, match="use_sliding_window or sliding_window is off"):
        config("smollm3", layer_types=types * 2, **smollm)
    # One as long as any text is none, and may be more than kernels count to.
    for size, kept in ((511, 511), (512, None), (2**32 + 9, None)):
        assert config("mistral", sliding_window=size).heads(0).window == kept


def test_defaults_of_head_dim() -> None:
    found = {name: config(name).head_dim for name in FAMILIES}
    with_256 = {"gemma", "gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}
    assert {name for name, size in found.items() if size == 256} == with_256
    with_128 = {"qwen3", "glm", "glm4", "ernie4_5", "seed_oss", "helium", "cwm", "ministral3"}
    assert {name for name, size in found.items() if size == 128} == with_128
    assert found["gpt_oss"] == 64
    assert {size for name, size in found.items() if name not in {*with_128, "gpt_oss"}} == {16, 256}
    assert config(num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "xglm"}, ["xglm", "llama", "mistral", "qwen2", "qwen3"]),
        ({"model_type": None}, ["None", "llama"]),
        ({"model_type": "bloom", "apply_residual_connection_post_layernorm": True}, ["_post_layernorm=True"]),
        *(
            ({"model_type": "mpt", "attn_config": {name: value}}, [f"attn_config.{name}={value}"])
            for name, value in (("clip_qkv", 6), ("alibi", False), ("qk_ln", True), ("softmax_scale", 0.1))
        ),
        ({"model_type": "mpt", "no_bias": False}, ["no_bias=False"]),
        # Times the hidden size it would fill the memory.
        ({"model_type": "mpt", "expansion_ratio": "4" * 1000}, ["expansion_ratio", "whole number"]),
        ({"model_type": "mpt", "expansion_ratio": 2**9}, ["expansion_ratio as 512"]),
        ({"model_type": "mpt", "norm_type": "rmsnorm"}, ["norm_type='rmsnorm'"]),
        ({"model_type": "mpt", "attn_config": {"alibi_bias_max": "8"}}, ["alibi_bias_max"]),
        ({"model_type": "gemma3", "text_config": {"model_type": "xglm"}}, ["'xglm'", "gemma3_text"]),
        ({"hidden_act": "quick_gelu"}, ["hidden_act", "quick_gelu", "silu"]),
        ({"model_type": "gemma3_text", "hidden_activation": "sigmoid"}, ["hidden_activation", "sigmoid"]),
        ({"query_pre_attn_scalar": 16}, ["query_pre_attn_scalar"]),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 0}, ["query_pre_attn_scalar"]),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "all"]),
        ({"model_type": "qwen3", "use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"model_type": "gemma3_text", "sliding_window": None}, ["sliding_window"]),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, ["sliding_window_pattern"]),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}}, ["rope_type", "full_"]),
        ({"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": 2}}, ["sliding_attention", "object"]),
        ({"model_type": "gemma3_text", "num_hidden_layers": 6, "rope_scaling": "linear"}, ["rope_scaling"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quantization_config", "hqq", "awq"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0}, ["attn_logit_softcapping", "above zero"]),
        ({"model_type": "gemma2", "final_logit_softcapping": "30"}, ["final_logit_softcapping", "above zero"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["longrope", "short_factor"]),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, ["8 numbers"]),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": ["1"], "long_factor": [1.0]}},
            ["must be a number"],
        ),
        ({"rope_scaling": {"rope_type": "none"}}, ["none", "default, linear, dynamic, llama3, yarn"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 9.0}}, ["dynamic", "alpha"]),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}},
            ["dynamic", "beyond the length"],
        ),
        ({"model_type": "glm", "partial_rotary_factor": 0.01}, ["partial_rotary_factor=0.01"]),
        ({"model_type": "glm", "partial_rotary_factor": 2}, ["partial_rotary_factor"]),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, ["no_rope_layers"]),
        ({"no_rope_layers": [1, 0]}, ["no_rope_layers"]),
        ({"embedding_multiplier": 2.0}, ["embedding_multiplier"]),
        ({"model_type": "olmo3", "sliding_window": None}, ["sliding_window"]),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, ["sliding_window_pattern"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "extrapolation_factor": 0.5}}, ["extrapolation_factor"]),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attn_factor": 0.5, "attention_factor": 1.0}},
            ["attn_factor", "attention_factor"],
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}}, ["mscale"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor"]),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, ["mrope_section"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "linear"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["factor", "number"]),
        # Of these no frequencies could be made.
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ["'factor' must be from 1e-09"]),
        ({"rope_scaling": LLAMA3 | {"type": "llama3", "low_freq_factor": 0.0}}, ["'low_freq_factor' must be"]),
        ({"rope_scaling": YARN | {"beta_fast": -1}}, ["'beta_fast' must be from", "got -1"]),
        ({"rope_scaling": YARN | {"beta_slow": math.inf}}, ["'beta_slow' must be from"]),
        ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": -7.2}}, ["'mscale_all_dim' must be from"]),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": -8}}, ["original_max_position_embeddings", "-8"]),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, ["'rope_theta' must be above 1 for 'yarn'"]),
        ({"rope_theta": -1e4}, ["'rope_theta' must be above 0"]),
        ({"rope_theta": math.nan}, ["'rope_theta' must be above 0"]),
        ({"rope_scaling": LONGROPE | {"original_max_position_embeddings": 1}}, ["must be 2 or more for 'longrope'"]),
        ({"layer_types": ["chunked_attention"] * 2}, ["chunked_attention"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers"]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, ["sliding_attention", "llama"]),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, ["use_sliding_window"]),
        ({"model_type": "mistral", "sliding_window": 0}, ["sliding_window"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"num_hidden_layers": "2"}, ["num_hidden_layers"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads"]),
        ({"head_dim": 15}, ["head_dim"]),
        ({"dtype": "float8_e4m3fn"}, ["float8_e4m3fn"]),
    ],
)
def test_unsupported_models_are_refused_by_name(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        config(**fields)
    for word in words:
        assert word in str(caught.value)


def test_missing_folder_and_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"meta-llama.*local Hugging Face folder"):
        make_runner(Path("meta-llama/Llama-3.2-1B"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        make_runner(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        make_runner(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="object"):
        make_runner(tmp_path)


def test_missing_and_broken_weight_files(tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "model", model_folder("llama_sharded"))
    shard = max(folder.glob("model-*.safetensors"))
    whole = shard.read_bytes()
    shard.unlink()
    with pytest.raises(UnsupportedModel, match=shard.name):
        make_runner(folder)
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnsupportedModel, match=shard.name):
        make_runner(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="weight_map"):
        make_runner(folder)
    # Without an index the parts' names tell which they are.
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(UnsupportedModel, match=f"{shard.name} cannot be read"):
        make_runner(folder)
    shard.write_bytes(whole)
    prompt = [[5, 9, 300, 7]]
    found, wanted = (all_logits(make_runner(each), prompt)[0] for each in (folder, model_folder("llama_sharded")))
    assert torch.equal(found, wanted)
    shard.unlink()
    with pytest.raises(UnsupportedModel, match=f"but not its other part '{shard.name}'"):
        make_runner(folder)
    for part in folder.glob("model-*.safetensors"):
        part.unlink()
    with pytest.raises(UnsupportedModel, match="only safetensors"):
        make_runner(folder)


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "model", model_folder("llama"))
    tensors = load_file(model_folder("llama") / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    def load(**changes: torch.Tensor | None) -> None:
        changed = {key: value for key, value in (tensors | changes).items() if value is not None}
        save_file(changed, folder / "model.safetensors")
        make_runner(folder)

    with pytest.raises(UnsupportedModel, match=f"{name}.*missing"):
        load(**{name: None})
    with pytest.raises(UnsupportedModel, match=rf"{name}.*\[128, 63\].*\[128, 64\]"):
        load(**{name: torch.zeros(128, 63)})
    with pytest.raises(UnsupportedModel, match=f"{name}.*int8"):
        load(**{name: torch.zeros(128, 64, dtype=torch.int8)})
    with pytest.raises(UnsupportedModel, match=r"unexpected.*q_proj\.bias"):
        load(**{"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(UnsupportedModel, match=r"lm_head\.weight.*missing"):
        load(**{"lm_head.weight": None})
    load(**{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})


def test_scaling_that_was_added_beside_the_base_keeps_it() -> None:
    base = {"rope_type": "default", "rope_theta": 1e6}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    (rope, _) = config("qwen3", rope_parameters=base, rope_scaling=yarn).ropes
    assert (rope.kind, rope.theta, rope.values["factor"]) == ("yarn", 1e6, 4.0)
    (rope, _) = config("qwen3", rope_parameters=base, rope_scaling=yarn | {"rope_theta": 5e5}).ropes
    assert rope.theta == 5e5
    shared = base | {"partial_rotary_factor": 0.5}
    assert config("phi3", rope_parameters=shared, rope_scaling=yarn).ropes[0].share == 0.5


@torch.inference_mode()
def test_of_a_tied_pair_the_files_may_have_the_head_alone(tmp_path: Path) -> None:
    """As safetensors' own save_model leaves it: of shared tensors it keeps the first by name."""
    tensors = dict(reference_model("llama").state_dict())
    tied = tensors.pop("model.embed_tokens.weight")
    tensors["lm_head.weight"] = tied
    folder = edited_folder(tmp_path / "model", model_folder("llama"), tie_word_embeddings=True)
    (folder / "model.safetensors").unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    both = {**tensors, "model.embed_tokens.weight": tied.clone()}
    whole = edited_folder(tmp_path / "whole", model_folder("llama"), tie_word_embeddings=True)
    (whole / "model.safetensors").unlink()
    save_file({name: tensor.contiguous() for name, tensor in both.items()}, whole / "model.safetensors")
    prompt = [[5, 9, 300, 7]]
    assert torch.equal(all_logits(make_runner(folder), prompt)[0], all_logits(make_runner(whole), prompt)[0])
    apart = edited_folder(tmp_path / "apart", folder, tie_word_embeddings=False)
    with pytest.raises(UnsupportedModel, match=r"embed_tokens\.weight"):
        make_runner(apart)


@torch.inference_mode()
def test_a_head_in_the_files_wins_over_tying(tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "model", model_folder("llama"), tie_word_embeddings=True)
    hidden = torch.randn(3, 64)
    wanted = reference_model("llama").lm_head(hidden)
    assert torch.allclose(make_runner(folder).model.logits(hidden.to(DEVICE)).cpu(), wanted, atol=1e-4)


def test_dtype_follows_the_folder_or_the_setting() -> None:
    assert make_runner(model_folder("llama", "float16")).info.dtype == "float32"
    assert make_runner(model_folder("llama", "bfloat16")).info.dtype == "bfloat16"
    assert make_runner(model_folder("llama", "bfloat16"), dtype="float32").info.dtype == "float32"
    assert make_runner(model_folder("llama"), dtype="bfloat16").info.dtype == "bfloat16"


def test_a_folder_of_float16_is_computed_in_float32_over_its_own_numbers() -> None:
    half = model_folder("llama", "float16")
    found, plain = make_runner(half), make_runner(half, ops="reference")
    texts = list(prompts().values())
    for one, other in zip(all_logits(found, texts), all_logits(plain, texts), strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()
    if found.model.fused is not None:
        assert found.info.weight_bytes < 0.75 * plain.info.weight_bytes


def test_sizes_that_are_reported() -> None:
    info = make_runner(model_folder("llama"), max_model_len=None, max_num_seqs=3).info
    per_token = 2 * 2 * 2 * 16 * 4
    assert (info.vocab_size, info.max_model_len, info.block_size, info.num_blocks) == (320, 512, 16, 3 * 32)
    assert info.kv_bytes == info.num_blocks * 16 * per_token
    parameters = sum(value.numel() for value in reference_model("llama").parameters())
    assert info.weight_bytes == 4 * parameters
    given = make_runner(model_folder("llama"), max_model_len=100, kv_cache_gb=0.01).info
    assert given.num_blocks == int(0.01 * 2**30 / (16 * per_token))


def test_kv_memory_is_for_requests_as_they_are_expected() -> None:
    shape = {"expected_input_tokens": 60, "expected_output_tokens": 20}
    blocks = make_runner(model_folder("llama"), max_num_seqs=8, max_model_len=512, **shape).info.num_blocks
    assert blocks == 2 * 8 * 5
    # One of the longest always has room, and both lengths must be known.
    assert make_runner(model_folder("llama"), max_num_seqs=1, max_model_len=512, **shape).info.num_blocks == 32
    with pytest.raises(ConfigError, match="expected_output_tokens must be at most"):
        make_runner(model_folder("llama"), expected_output_tokens=2**60)
    one = make_runner(model_folder("llama"), max_num_seqs=8, max_model_len=512, expected_input_tokens=60).info
    assert one.num_blocks == 8 * 32


def test_settings_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len \(513\).*max_position_embeddings \(512\)"):
        make_runner(model_folder("llama"), max_model_len=513)
    with pytest.raises(ConfigError, match=r"max_model_len.*kv_cache_gb"):
        make_runner(model_folder("llama"), kv_cache_gb=1e-4)
    monkeypatch.setattr(runner, "available_bytes", lambda device: 10_000)
    with pytest.raises(ConfigError, match=r"max_model_len=400.*40%.*lower max_model_len"):
        make_runner(model_folder("llama"))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="cuda"):
            make_runner(model_folder("llama"), device="cuda")


def test_threads_are_set_before_anything_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, before = [], torch.get_num_threads()

    def selected(*given: Any) -> Ops:
        seen.append(torch.get_num_threads())
        return select_ops(*given)

    monkeypatch.setattr(runner, "select_ops", selected)
    torch.set_num_threads(3)
    try:
        make_runner(model_folder("llama"), num_threads=2)
        assert (seen, torch.get_num_threads()) == ([2], 2)
        make_runner(model_folder("llama"), num_threads=None)
        assert torch.get_num_threads() == 1, "it is small"
    finally:
        torch.set_num_threads(before)


def test_memory_is_measured_in_plausible_bytes() -> None:
    assert 2**20 < kv_memory.available_bytes(torch.device("cpu")) < 2**50


def test_config_of_a_real_folder_survives_a_round_trip(tmp_path: Path) -> None:
    folder = model_folder("qwen3_window")
    raw = json.loads((folder / "config.json").read_text())
    assert parse_config(raw).windows == (33, None)
    assert parse_config(raw).qkv_bias
    assert parse_config(raw).tied
