"""Layers with states by native kernels: a short convolution in place of attention (LFM2), against transformers."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoder_harness import Harness, all_logits, make_runner, prompts, requests
from support.foreign_factory import FOREIGN, foreign_folder, foreign_reference, greedy
from support.model_factory import TINY, edited_folder, temporary_root, write_model
from support.native_isa import ISAS, kernels_of, needs_native
from support.packers import packed_pair

from chairlift.config.items import ItemConfig
from chairlift.errors import UnsupportedModel
from chairlift.folders import transformers_config
from chairlift.runners.check_model import check_model
from chairlift.runners.decoder.config import DecoderConfig, parse_config, read_any_config
from chairlift.runners.decoder.model import Decoder
from chairlift.runners.decoder.runner import DecoderRunner

NUM_OUTPUT = 64
NAMES = ["lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid", "granite4_dense"]
pytestmark = needs_native


def is_packed(name: str, tensor: torch.Tensor) -> bool:
    sizes = tensor.shape if tensor.ndim == 2 and name.endswith("proj.weight") else (1, 1)
    return not sizes[0] % 16 and not sizes[1] % 32


@functools.cache
def runner_of(name: str, **settings: Any) -> DecoderRunner:
    return make_runner(foreign_folder(FOREIGN[name][0], name), ops="native", implementation="native", **settings)


@functools.cache
def expected(name: str) -> dict[str, list[int]]:
    guess, model = Harness(runner_of(name)).generate(requests(), NUM_OUTPUT), foreign_reference(name)
    return {prompt_name: greedy(model, prompt, guess[prompt_name]) for prompt_name, prompt in prompts().items()}


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str) -> None:
    for logits, prompt in zip(all_logits(runner_of(name), list(prompts().values())), prompts().values(), strict=True):
        with torch.no_grad():
            wanted = foreign_reference(name)(torch.tensor([prompt])).logits[0]
        assert (logits - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(name: str) -> None:
    """In company, alone, in chunks of 7, and after a preemption."""
    wanted, harness = expected(name), Harness(runner_of(name))
    assert harness.generate(requests(), NUM_OUTPUT) == wanted
    assert {each.id: harness.generate([each], 20)[each.id] for each in requests()} == {
        prompt_name: tokens[:20] for prompt_name, tokens in wanted.items()
    }
    assert harness.generate(requests(), NUM_OUTPUT, chunk=7) == wanted
    for request in requests():
        harness.add(request)
    for _ in range(20):
        harness.step(chunk=9)
    harness.preempt("300")
    harness.preempt("17")
    assert harness.finish(list(prompts()), 30, chunk=30) == {each: tokens[:30] for each, tokens in wanted.items()}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, "float32") for name in NAMES] + [("lfm2", "bfloat16"), ("qwen3_5_text", "bfloat16")]
)
@pytest.mark.parametrize("isa", ISAS)
def test_the_whole_pass_is_that_of_one_operation_after_the_other(isa: str, name: str, dtype: str) -> None:
    with kernels_of(isa):
        runner = make_runner(foreign_folder(FOREIGN[name][0], name), ops="native", dtype=dtype)
        texts = list(prompts().values())
        assert isinstance(runner.model, Decoder)
        if runner.model.fused is None:
            pytest.skip("it is fused only where our own products take it: from AVX2 on")
        fused = torch.cat(all_logits(runner, texts)).float()
        runner.model.fused = None
        plain = torch.cat(all_logits(runner, texts)).float()
    if dtype == "float32":
        assert (fused - plain).abs().max() <= 1e-5 * plain.abs().max()
    else:
        assert torch.cosine_similarity(fused, plain, dim=-1).mean() > 0.9995


@pytest.mark.parametrize(
    ("settings", "least"),
    [({"dtype": "bfloat16"}, 0.999), ({"quantization": "int8"}, 0.99), ({"kv_cache_dtype": "int8"}, 0.999)],
    ids=str,
)
def test_fewer_bits_are_near(settings: dict[str, str], least: float) -> None:
    runner = make_runner(foreign_folder("lfm2", "lfm2"), ops="native", **settings)
    alike, far = [], []
    for logits, prompt in zip(all_logits(runner, list(prompts().values())), prompts().values(), strict=True):
        with torch.no_grad():
            wanted = foreign_reference("lfm2")(torch.tensor([prompt])).logits[0]
        alike.append(torch.cosine_similarity(logits.float(), wanted, dim=-1))
        far.append((logits - wanted).abs().max() / wanted.abs().max())
    assert torch.cat(alike).mean() > least
    # Were the setting ignored, float32 would be far nearer.
    assert max(far) > 1e-4


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "granite4_dense"])
def test_a_row_is_the_same_in_any_company(name: str, quantization: str) -> None:
    runner = runner_of(name, quantization=quantization, dtype="bfloat16")
    texts = list(prompts().values())
    together = all_logits(runner, texts)
    for text, logits in zip(texts, together, strict=True):
        assert torch.equal(all_logits(runner, [text])[0], logits)


@pytest.mark.parametrize("layout", ["gptq, ordered", "awq", "compressed, int8", "fp8, blocks"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text"])
def test_packed_projections_are_unpacked(name: str, layout: str) -> None:
    folders = packed_pair(temporary_root() / f"native-{layout}-{name}", foreign_folder(name, name), layout, is_packed)
    texts = list(prompts().values())
    packed, plain = (all_logits(make_runner(each, ops="native", implementation="native"), texts) for each in folders)
    for found, wanted in zip(packed, plain, strict=True):
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_sizes_are_those_that_check_tells() -> None:
    runner = runner_of("lfm2")
    config = runner.model.config
    assert isinstance(runner.model, Decoder)
    assert runner.model.kv_bytes_per_token() == config.kv_bytes_per_token(4, 0)
    assert runner.model.state_bytes == config.state_bytes(4) == 3 * 64 * 3 * 4
    held = sum(pages.nbytes for cache in runner.model.caches for pages in cache)
    snapshots = runner.info.num_snapshots
    assert snapshots is not None
    assert held == (runner.info.num_blocks + snapshots) * runner.info.block_size * config.kv_bytes_per_token(4, 0)


def parsed(**fields: Any) -> DecoderConfig:
    sizes = {"vocab_size": 65536, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16}
    return parse_config({"model_type": "lfm2", **sizes, "max_position_embeddings": 128000, **fields})


def test_the_size_of_an_mlp_is_two_thirds_of_what_it_says() -> None:
    """LFM2 350M, 700M and 1.2B have these fields, and these sizes."""
    kinds = {"full_attn_idxs": [2], "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
    for said, size in ((6656, 4608), (10240, 6912), (12288, 8192)):
        assert parsed(block_ff_dim=said, **kinds).intermediate_size == size
    assert parsed(intermediate_size=4608, block_auto_adjust_ff_dim=False, **kinds).intermediate_size == 4608
    found = parsed(intermediate_size=300, block_ffn_dim_multiplier=None, full_attn_idxs=[1, 3])
    assert found.intermediate_size == 200
    assert found.mixers is not None
    assert found.mixers.layers == (True, False, True, False)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"layer_types": ["conv"] * 4}, "layer_types has no 'full_attention'"),
        ({"layer_types": ["conv"] * 3}, "for each of 4 layers, and names 3"),
        ({"layer_types": ["conv", "mamba", "conv", "full_attention"]}, "and has 'mamba'"),
        ({"full_attn_idxs": [1], "conv_L_cache": 17}, "conv_L_cache must be at most 16, got 17"),
        ({"full_attn_idxs": [1], "conv_L_cache": 0}, "conv_L_cache as a positive whole number, got 0"),
        ({"full_attn_idxs": [1], "block_multiple_of": 0}, "block_multiple_of as a positive whole number, got 0"),
        ({"full_attn_idxs": [1], "block_ffn_dim_multiplier": float("inf")}, "a value that is none of its kind"),
        ({"full_attn_idxs": [[]]}, "a value that is none of its kind"),
        ({"full_attn_idxs": [1], "intermediate_size": 0}, "intermediate_size as a positive whole number, got 0"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedModel, match=problem):
        parsed(**fields)


_QWEN = {"model_type": "qwen3_5_text", "intermediate_size": 64}
_GRANITE = {"model_type": "granitemoehybrid", "num_local_experts": 0, "hidden_size": 64, "mamba_n_heads": 8}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (_QWEN | {"linear_num_value_heads": 24}, r"linear_num_value_heads \(24\) must be a multiple of"),
        (_QWEN | {"linear_conv_kernel_dim": 40}, "linear_conv_kernel_dim must be at most 16, got 40"),
        (_QWEN | {"full_attention_interval": 0}, "full_attention_interval as a positive whole number, got 0"),
        (_QWEN | {"full_attention_interval": 5}, "layer_types has no 'full_attention'"),
        (_QWEN | {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported by the native kernels"),
        (_QWEN | {"attn_output_gate": False}, "attn_output_gate=False is not supported by the native kernels"),
        (_QWEN | {"linear_key_head_dim": 2**40}, "no model with more than 16384 is served"),
        (_GRANITE, "layer_types has no 'full_attention'"),
        (
            _GRANITE | {"layer_types": ["mamba"] * 3 + ["attention"], "mamba_d_head": 32},
            "do not make up the 128 numbers",
        ),
        (
            _GRANITE | {"layer_types": ["mamba"] * 3 + ["attention"], "mamba_d_conv": 17},
            "mamba_d_conv must be at most 16",
        ),
        (
            _GRANITE | {"layer_types": ["mamba"] * 3 + ["attention"], "time_step_limit": [1, 0]},
            "time_step_limit must be two ascending numbers",
        ),
        (_GRANITE | {"layer_types": ["mamba"] * 3 + ["attention"], "time_step_limit": 7}, "none of its kind"),
    ],
)
def test_what_is_refused_of_others(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedModel, match=problem):
        parsed(**fields)


@pytest.mark.parametrize("count", [0, None])
def test_without_experts_the_shared_mlp_is_all_there_is(count: int | None) -> None:
    kinds = {"layer_types": ["mamba"] * 3 + ["attention"]}
    sizes = {"shared_intermediate_size": 96, "intermediate_size": 512, "num_local_experts": count}
    found = parsed(**_GRANITE | kinds | sizes)
    assert (found.experts, found.intermediate_size) == (None, 96)


def test_experts_without_a_bias_are_left_to_transformers(tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "m", foreign_folder("lfm2_moe", "lfm2_moe"), use_expert_bias=False)
    assert not isinstance(read_any_config(folder, "auto"), DecoderConfig)
    with pytest.raises(UnsupportedModel, match="use_expert_bias=False is not supported by the native kernels"):
        read_any_config(folder, "native")


def test_without_kernels_transformers_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = foreign_folder("lfm2", "lfm2")
    assert make_runner(folder, ops="reference").info.ops.endswith("through transformers")
    with pytest.raises(UnsupportedModel, match="know no layers with states: leave implementation at 'auto'"):
        make_runner(folder, ops="reference", implementation="native")
    monkeypatch.setattr(transformers_config, "find_spec", lambda name: None)
    with pytest.raises(
        UnsupportedModel, match=r"not computed by native kernels as it is here; pip install 'chairlift\["
    ):
        make_runner(folder, ops="reference")


def test_it_is_no_embedder(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'lfm2' is served to write texts, and not to embed them"):
        check_model(ItemConfig(model=str(foreign_folder("lfm2", "lfm2")), kind="encoder"))


def test_all_of_a_layer_may_have_biases(tmp_path: Path) -> None:
    """And a convolution over other than three tokens, of channels that are no whole blocks."""
    fields = TINY | {"num_hidden_layers": 4, "hidden_size": 96, "conv_bias": True, "conv_L_cache": 5}
    fields |= {"layer_types": ["full_attention", "conv", "full_attention", "conv"]}
    write_model(tmp_path / "m", "lfm2", fields)
    from transformers import AutoModelForCausalLM

    assert json.loads((tmp_path / "m" / "config.json").read_text())["conv_bias"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    runner = make_runner(tmp_path / "m", ops="native", implementation="native")
    for logits, prompt in zip(all_logits(runner, list(prompts().values())), prompts().values(), strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0]
        assert (logits - wanted).abs().max() <= 1e-4 * wanted.abs().max()
