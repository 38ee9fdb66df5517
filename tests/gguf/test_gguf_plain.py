"""GGUF files of models without states that transformers computes: their tensors, and what of them is refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.decoder_harness import all_logits, make_runner, prompts
from support.gguf_files import add, filled_file
from support.gguf_hybrids import hybrid_file, plain_hybrid, told
from support.gguf_plain import WRITTEN_PLAIN

from chairlift.errors import UnsupportedModel
from chairlift.gguf.dense_fields import XIELU
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.hybrid_config import hybrid_config
from chairlift.gguf.hybrid_tensors import HybridTensors
from chairlift.gguf.model_config import FACTORS
from chairlift.gguf.rotation_fields import part_that_turns
from chairlift.gguf.side_folder import folder_of
from chairlift.gguf.told_settings import ToldSettings
from chairlift.runners.decoder.transformers_loading import load_model

TEXTS = list(prompts().values())[:2]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    model = load_model(folder, None, torch.float32, torch.device("cpu"))
    found: dict[str, torch.Tensor] = model.state_dict()
    return found


def small_file(path: Path, arch: str, fill: Callable[[gguf.GGUFWriter], object]) -> Path:
    def of_three_layers(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(3)
        fill(writer)

    return filled_file(path, arch, of_three_layers)


@pytest.mark.parametrize("name", WRITTEN_PLAIN)
def test_tensors_are_those_of_the_folder(name: str) -> None:
    """Also those that no name of a layer tells of; to weights of norms one was added and taken away."""
    found, wanted = loaded(folder_of(hybrid_file(name))), loaded(plain_hybrid(name))
    assert found.keys() == wanted.keys()
    for own, tensor in wanted.items():
        if name.startswith("nemotron") and own.endswith("norm.weight"):
            torch.testing.assert_close(found[own], tensor, atol=2e-7, rtol=0)
        else:
            assert torch.equal(found[own], tensor), own


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("phi2", {"attention.layer_norm_epsilon": None}, "phi2.attention.layer_norm_epsilon is missing"),
        ("phi2", {"rope.dimension_count": 7}, "phi2.rope.dimension_count = 7"),
        ("phi2", {"rope.dimension_count": 18}, "phi2.rope.dimension_count = 18"),
        ("phi2", {"rope.scaling.type": "yarn"}, "phi2.rope.scaling.type = 'yarn'"),
        ("phi2", {"use_parallel_residual": True}, "phi2.use_parallel_residual = True"),
        ("phi2", {"attention.head_count_kv": [4, 0]}, "phi2.attention.head_count_kv = [4, 0]"),
        ("phi2", {"attention.head_count_kv": 3}, "phi2.attention.head_count_kv = 3"),
        ("phi2", {"attention.value_length": 8}, "phi2.attention.value_length = 8"),
        ("phi2", {"attention.causal": False}, "phi2.attention.causal = False"),
        ("nemotron_linear", {"rope.scaling.type": "longrope"}, "nemotron.rope.scaling.type = 'longrope'"),
        ("nemotron_linear", {"rope.scaling.type": "none"}, "nemotron.rope.scaling.factor = 3.0"),
        ("nemotron_linear", {"rope.scaling.factor": -1.0}, "nemotron.rope.scaling.factor = -1.0"),
        ("nemotron_linear", {"attention.clamp_kqv": 8.0}, "nemotron.attention.clamp_kqv = 8.0"),
        ("arcee_yarn", {"rope.dimension_count": 8}, "arcee.rope.dimension_count = 8"),
        ("arcee_yarn", {"rope.scaling.yarn_ext_factor": 0.5}, "arcee.rope.scaling.yarn_ext_factor = 0.5"),
        ("arcee_yarn", {"rope.scaling.attn_factor": 0.5}, "arcee.rope.scaling.attn_factor = 0.5"),
        ("arcee_yarn", {"rope.scaling.yarn_log_multiplier": 0.1}, "arcee.rope.scaling.yarn_log_multiplier = 0.1"),
        ("arcee_llama3", {"rope.scaling.type": "yarn"}, "arcee.rope.scaling.type = 'yarn'"),
        ("arcee_llama3", {"rope.scaling.factor": 2.0}, "arcee.rope.scaling.factor = 2.0"),
        ("arcee_llama3", {"attention.scale": 0.5}, "arcee.attention.scale = 0.5"),
        ("hunyuan", {"expert_count": 2}, "hunyuan-dense.expert_count = 2"),
        ("hunyuan", {"rope.scaling.alpha": 50.0}, "hunyuan-dense.rope.scaling.alpha = 50.0"),
        ("hunyuan", {"rope.dimension_sections": [8, 8, 0, 0]}, "hunyuan-dense.rope.dimension_sections = [8, 8, 0, 0]"),
        ("hunyuan_stretched", {"rope.scaling.factor": 2.0}, "hunyuan-dense.rope.scaling.factor = 2.0"),
        ("apertus", {"attention.sliding_window": 20}, "apertus.attention.sliding_window = 20"),
        ("phimoe_biased", {"expert_used_count": 1}, "phimoe.expert_used_count = 1"),
        ("phimoe_biased", {"rope.scaling.attn_factor": 1.19}, "phimoe.rope.scaling.attn_factor = 1.19"),
        ("phimoe_biased", {"rope.scaling.type": "longrope"}, "phimoe.rope.scaling.type = 'longrope'"),
        ("minimax_m2_part", {"expert_gating_func": 1}, "minimax-m2.expert_gating_func = 1"),
        ("minimax_m2_part", {"expert_gating_func": None}, "minimax-m2.expert_gating_func is missing"),
        ("minimax_m2_part", {"expert_weights_norm": False}, "minimax-m2.expert_weights_norm = False"),
        ("minimax_m2_part", {"expert_weights_scale": 2.5}, "minimax-m2.expert_weights_scale = 2.5"),
        ("minimax_m2_part", {"expert_group_count": 2}, "minimax-m2.expert_group_count = 2"),
        ("minimax_m2_part", {"expert_shared_count": 1}, "minimax-m2.expert_shared_count = 1"),
        ("minimax_m2_part", {"expert_used_count": 5}, "minimax-m2.expert_used_count = 5"),
        ("exaone_moe_four", {"expert_gating_func": 1}, "exaone-moe.expert_gating_func = 1"),
        ("exaone_moe_four", {"expert_group_count": 3}, "exaone-moe.expert_group_count = 3"),
        ("exaone_moe_four", {"expert_shared_feed_forward_length": 32}, "expert_shared_feed_forward_length = 32"),
        ("exaone_moe_four", {"attention.sliding_window": None}, "exaone-moe.attention.sliding_window is missing"),
        ("exaone_moe_four", {"rope.freq_base_swa": 7.0}, "exaone-moe.rope.freq_base_swa = 7.0"),
        ("exaone_moe_four", {"leading_dense_block_count": 5}, "exaone-moe.leading_dense_block_count = 5"),
        ("afmoe_four", {"expert_weights_norm": False}, "afmoe.expert_weights_norm = False"),
        ("afmoe_four", {"expert_weights_norm": None}, "afmoe.expert_weights_norm is missing"),
        ("afmoe_four", {"expert_gating_func": 1}, "afmoe.expert_gating_func = 1"),
        ("afmoe_four", {"expert_group_used_count": 2}, "afmoe.expert_group_used_count = 2"),
        ("afmoe_four", {"expert_shared_count": 0}, "afmoe.expert_shared_count = 0"),
        ("afmoe_four", {"attention.sliding_window_pattern": [1, 0]}, "afmoe.attention.sliding_window_pattern = [1, 0]"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(name: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        told(name, **more)
    assert said in str(refused.value)


@pytest.mark.parametrize("key", XIELU)
@pytest.mark.parametrize("value", [None, [], [0.5], [0.5] * 3, [0.5, math.nan], [0.5, -math.inf], [1, 1], "no", True])
def test_what_is_no_number_of_each_layer_is_named(key: str, value: Any) -> None:
    file = GgufFile(hybrid_file("apertus"))
    file.metadata[key] = value
    with pytest.raises(UnsupportedModel, match=rf"{key} = .* in apertus-F32-0\.gguf is not "):
        hybrid_config(file)


def test_one_number_is_that_of_all_layers(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        for number, key in enumerate(XIELU):
            writer.add_float32(key, number / 4)

    found = HybridTensors(small_file(tmp_path / "m.gguf", "apertus", fill), "apertus")
    assert found.count_told() == len(found.keys()) == 3 * len(XIELU)
    for number, part in enumerate(("alpha_n", "alpha_p", "beta", "eps")):
        for layer in range(3):
            tensor = found.get_tensor(f"model.layers.{layer}.mlp.act_fn.{part}")
            assert tensor.tolist() == ([number / 4] if part.startswith("alpha") else number / 4)


@pytest.mark.parametrize(
    "name", ["phi2", "hunyuan", "nemotron_linear", "phimoe_whole", "minimax_m2_part", "afmoe_four"]
)
@pytest.mark.parametrize("tensor", FACTORS)
def test_tensors_that_stretch_what_nothing_here_does_are_refused(name: str, tensor: str) -> None:
    file = GgufFile(hybrid_file(name))
    file.tensors[tensor] = GgufFile(hybrid_file("apertus")).tensors["rope_freqs.weight"]
    with pytest.raises(UnsupportedModel, match=rf"tensor '{tensor}' of .*: nothing here computes that"):
        hybrid_config(file)


@pytest.mark.parametrize("factors", [[1.0] * 7, [1.0] * 9, [1.0] * 7 + [0.0], [1.0] * 7 + [math.nan], [math.inf] * 8])
def test_factors_that_are_none_are_named(factors: list[float], tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        add(writer, "rope_freqs.weight", np.array(factors, np.float32))

    file = GgufFile(hybrid_file("apertus"))
    file.tensors |= GgufFile(small_file(tmp_path / "m.gguf", "apertus", fill)).tensors
    with pytest.raises(UnsupportedModel, match=r"'rope_freqs\.weight' of apertus-F32-0\.gguf is not 8 factors above"):
        hybrid_config(file)


def test_queries_keys_and_values_in_one_are_taken_apart(tmp_path: Path) -> None:
    """As some converters put them together, and for Arcee in the order in which neighbours are rotated."""
    apart = {each.name: each.data for each in gguf.GGUFReader(hybrid_file("arcee_biased")).tensors}

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        for kind in ("weight", "bias"):
            parts = [apart[f"blk.0.attn_{part}.{kind}"] for part in "qkv"]
            add(writer, f"blk.0.attn_qkv.{kind}", np.concatenate(parts))

    found = HybridTensors(small_file(tmp_path / "m.gguf", "arcee", fill), "arcee")
    wanted = load_file(plain_hybrid("arcee_biased") / "model.safetensors")
    assert len(found.keys()) == 6
    for name in found.keys():  # noqa: SIM118
        assert torch.equal(found.get_tensor(name), wanted[name])


def test_how_much_of_a_head_is_rotated_is_what_a_file_says() -> None:
    """Also where a share is not to be had in a float: transformers rounds its product with a head down."""
    plain = {"general.architecture": "phi2", "phi2.block_count": 1}
    unlike = 0
    for head_dim in range(2, 257, 2):
        for turned in range(2, head_dim + 1, 2):
            found = part_that_turns(ToldSettings(plain | {"phi2.rope.dimension_count": turned}, "m.gguf"), head_dim)
            assert int(head_dim * found["partial_rotary_factor"]) == turned
            unlike += int(head_dim * (turned / head_dim)) != turned
    assert unlike


def test_layers_that_guess_tokens_are_left_out() -> None:
    files = hybrid_file("exaone_moe_four", num_guessing=1), hybrid_file("exaone_moe_four")
    found, wanted = (make_runner(folder_of(file), ops="native") for file in files)
    for one, other in zip(all_logits(found, TEXTS), all_logits(wanted, TEXTS), strict=True):
        assert torch.equal(one, other)
