"""GGUF files of models with states, and of others that converters change: what is made of them is their folder's."""

from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from support.decoder_harness import all_logits, make_runner, prompts
from support.gguf_files import add, gguf_file
from support.gguf_hybrids import WRITTEN, hybrid_file, plain_hybrid, told
from support.model_factory import edited_folder

from chairlift.errors import UnsupportedModel
from chairlift.folders import transformers_config
from chairlift.gguf.architectures import WITH_CHANGES
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.hybrid_changes import HYBRID_NAMES
from chairlift.gguf.hybrid_config import HYBRIDS, hybrid_config
from chairlift.gguf.hybrid_tensors import HybridTensors
from chairlift.gguf.side_folder import folder_of

TEXTS = list(prompts().values())[:3]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_each_that_is_named_is_told_of_and_tried() -> None:
    assert {*WITH_CHANGES} == {*HYBRIDS} == {*HYBRID_NAMES} == {written.arch for written in WRITTEN.values()}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_model_is_that_of_its_folder(name: str) -> None:
    found, wanted = (make_runner(folder, ops="native") for folder in (folder_of(hybrid_file(name)), plain_hybrid(name)))
    for one, other in zip(all_logits(found, TEXTS), all_logits(wanted, TEXTS), strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", "none"), ("float32", "int8"), ("float32", "int4")])
def test_it_is_served_in_the_type_that_is_asked_for(dtype: str, quantization: str, tmp_path: Path) -> None:
    """The numbers that a file has in few bits are those that are rounded again."""
    kind = gguf.GGMLQuantizationType.Q8_0
    tensors = load_file(plain_hybrid("lfm2_moe") / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and not name.endswith("gate.weight"):
            tensors[name] = torch.from_numpy(dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind))
    folder = edited_folder(tmp_path / "plain", plain_hybrid("lfm2_moe"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = {"ops": "native", "dtype": dtype, "quantization": quantization}
    runners = (make_runner(each, **settings) for each in (folder_of(hybrid_file("lfm2_moe", "Q8_0")), folder))
    for one, other in zip(*(all_logits(each, TEXTS) for each in runners), strict=True):
        assert torch.equal(one, other)


def test_of_native_architectures_transformers_gets_none() -> None:
    """Their config.json is what native kernels read, of which transformers makes something else here and there."""
    with pytest.raises(UnsupportedModel, match=r"of lfm2, .* here, not of 'olmo2'"):
        make_runner(folder_of(gguf_file("olmo3")), implementation="transformers")


def test_without_transformers_it_is_refused_as_its_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_config, "find_spec", lambda name: None)
    said = []
    for folder in (folder_of(hybrid_file("jamba")), plain_hybrid("jamba")):
        with pytest.raises(UnsupportedModel, match=r"pip install 'chairlift\[transformers\]'") as refused:
            make_runner(folder)
        said.append(str(refused.value))
    assert said[0] == said[1]
    # Native kernels need none.
    for name in ("lfm2", "lfm2_moe"):
        assert make_runner(folder_of(hybrid_file(name)), ops="native").info.ops.startswith("native")


@pytest.mark.parametrize(
    ("implementation", "problem"),
    [
        ("native", r"tensor 'model\.layers\.1\.conv\.conv\.weight' is missing from the model's GGUF file"),
        ("transformers", r"missing tensors: model\.layers\.1\.conv\.conv\.weight"),
    ],
)
def test_a_tensor_that_is_missing_is_named(
    implementation: Literal["native", "transformers"], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    own = b"blk.1.shortconv.conv.weight"
    path.write_bytes(hybrid_file("lfm2").read_bytes().replace(own, own.replace(b"1", b"9")))
    with pytest.raises(UnsupportedModel, match=problem):
        make_runner(folder_of(path), ops="native", implementation=implementation)


@pytest.mark.parametrize("length", [192, 512])
def test_a_tensor_of_another_shape_is_named(length: int, tmp_path: Path) -> None:
    """Whether the file holds enough numbers, or not."""
    path = tmp_path / "m.gguf"
    own = b"lfm2.feed_forward_length" + (4).to_bytes(4, "little")
    data = hybrid_file("lfm2").read_bytes()
    assert own + (256).to_bytes(4, "little") in data
    path.write_bytes(data.replace(own + (256).to_bytes(4, "little"), own + length.to_bytes(4, "little")))
    said = r"'model\.layers\.0\.feed_forward\.w\d\.weight' has shape \[(256, 64|64, 256)\], but config\.json asks for"
    with pytest.raises(UnsupportedModel, match=rf"{said} \[({length}, 64|64, {length})\]"):
        make_runner(folder_of(path))


def test_layers_that_guess_tokens_are_left_out() -> None:
    """As transformers leaves them out of a folder."""
    files = hybrid_file("qwen3_next", num_guessing=1), hybrid_file("qwen3_next")
    found, wanted = (make_runner(folder_of(file), ops="native") for file in files)
    for one, other in zip(all_logits(found, TEXTS), all_logits(wanted, TEXTS), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_decays_that_are_none_are_named(value: float, tmp_path: Path) -> None:
    data, place = bytearray(hybrid_file("qwen3_next").read_bytes()), GgufFile(hybrid_file("qwen3_next")).tensors
    offset = place["blk.1.ssm_a"].offset
    data[offset : offset + 4] = np.float32(value).tobytes()
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(UnsupportedModel, match=r"'model\.layers\.1\.linear_attn\.A_log' can't be made of .*below zero"):
        make_runner(folder_of(tmp_path / "m.gguf"))


def test_a_tensor_in_one_piece_and_in_several_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3next")
    writer.add_block_count(1)
    for part in ("ssm_in", "attn_qkv", "attn_gate"):
        add(writer, f"blk.0.{part}.weight", np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModel, match=r"has tensor 'model\.layers\.0\.linear_attn\.in_proj_qkvz\.weight' twice"
    ):
        HybridTensors(tmp_path / "m.gguf", "qwen3next")


def test_embeddings_of_falcon_that_are_the_last_projection_are_refused() -> None:
    """They were multiplied by what only one of the two has."""
    file = GgufFile(hybrid_file("falcon_h1"))
    del file.tensors["output.weight"]
    with pytest.raises(
        UnsupportedModel, match=r"tensor 'output\.weight' is missing .* multiplied by what no file says"
    ):
        hybrid_config(file)


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("lfm2", {"shortconv.l_cache": None}, "lfm2.shortconv.l_cache is missing in lfm2-F32-0.gguf"),
        ("lfm2", {"shortconv.l_cache": 0}, "lfm2.shortconv.l_cache = 0"),
        ("lfm2", {"attention.causal": False}, "lfm2.attention.causal = False"),
        ("lfm2", {"attention.sliding_window": 16}, "lfm2.attention.sliding_window = 16"),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, "lfm2.attention.head_count_kv = [0, 2]"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 4, 0]}, "not one number for all layers that have any"),
        ("lfm2", {"attention.key_length": 32}, "lfm2.attention.key_length = 32"),
        ("lfm2", {"rope.scaling.type": "yarn"}, "lfm2.rope.scaling.type = 'yarn'"),
        ("lfm2", {"pooling_type": 1}, "lfm2.pooling_type = 1"),
        ("lfm2", {"embedding_length_out": 64}, "lfm2.embedding_length_out = 64"),
        ("lfm2", {"nextn_predict_layers": 4}, "lfm2.nextn_predict_layers = 4"),
        ("qwen3_next", {"attention.recurrent_layers": [2, 2]}, "is not a number for each of 4 layers"),
        ("qwen3_next", {"ssm.time_step_rank": 5}, "qwen3next.ssm.time_step_rank = 5"),
        ("qwen3_next", {"ssm.dt_b_c_rms": True}, "qwen3next.ssm.dt_b_c_rms = True"),
        ("qwen3_next", {"expert_gating_func": 2}, "qwen3next.expert_gating_func = 2"),
        ("qwen3_next", {"expert_weights_scale": 2.5}, "qwen3next.expert_weights_scale = 2.5"),
        ("qwen3_next", {"rope.dimension_count": 32}, "qwen3next.rope.dimension_count = 32"),
        ("granitemoehybrid", {"rope.scaling.finetuned": True}, "is true, as of Bamba, which is not read"),
        ("granitemoehybrid", {"rope.scaling.finetuned": None}, "granitehybrid.rope.scaling.finetuned is missing"),
        ("granitemoehybrid", {"ssm.inner_size": 96}, "granitehybrid.ssm.inner_size = 96"),
        ("granitemoehybrid", {"ssm.group_count": 3}, "granitehybrid.ssm.time_step_rank = 4"),
        ("granitemoehybrid", {"deepstack_mapping": [1]}, "granitehybrid.deepstack_mapping = [1]"),
        ("granitemoehybrid", {"expert_used_count": 5}, "granitehybrid.expert_used_count = 5"),
        ("falcon_h1", {"rope.scaling.type": "linear"}, "falcon-h1.rope.scaling.type = 'linear'"),
        ("mamba2", {"attention.head_count": 4}, "mamba2.attention.head_count = 4"),
        ("nemotron_h", {"rope.scaling.finetuned": True}, "nemotron_h.rope.scaling.finetuned = True"),
        ("nemotron_h", {"feed_forward_length": [0, 64, 0, 128]}, "not one number for all layers that have any"),
        ("nemotron_h_moe", {"expert_group_used_count": 3}, "nemotron_h_moe.expert_group_used_count = 3"),
        ("nemotron_h_moe", {"expert_used_count": [2, 2, 2, 3]}, "nemotron_h_moe.expert_used_count = [2, 2, 2, 3]"),
        ("jamba", {"attention.head_count_kv": [2, 2, 0, 2]}, "don't come in equal turns"),
        ("jamba", {"ssm.dt_b_c_rms": True}, "jamba.ssm.dt_b_c_rms = True"),
        ("lfm2_moe", {"expert_gating_func": 1}, "lfm2moe.expert_gating_func = 1"),
        ("lfm2_moe", {"expert_group_count": 2}, "lfm2moe.expert_group_count = 2"),
        ("lfm2_moe", {"expert_count": 2**20}, "lfm2moe.expert_count = 1048576"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(name: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        told(name, **more)
    assert said in str(refused.value)
