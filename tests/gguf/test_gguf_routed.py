"""GGUF files of models with latent attention or experts of DeepSeek's kind, and what of them is refused."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from support.gguf_files import add, filled_file, gguf_file

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.gguf_tensors import GgufTensors
from chairlift.gguf.model_config import config_of

_BOTH = "model.layers.0.self_attn.kv_b_proj.weight"


def test_which_of_deepseek_s_models_it_is_goes_by_how_experts_are_scored() -> None:
    found = {name: config_of(GgufFile(gguf_file(name))) for name in ("deepseek_v2", "deepseek_v2_older", "deepseek_v3")}
    found["lite"] = config_of(GgufFile(gguf_file("glm4_moe_lite_ahead")))
    assert [each["model_type"] for each in found.values()] == ["deepseek_v2"] * 2 + ["deepseek_v3"] * 2
    assert [each["n_group"] for each in found.values()] == [2, 1, 2, 1]
    assert [each["num_hidden_layers"] for each in found.values()] == [3] * 4
    assert found["lite"]["num_nextn_predict_layers"] == 1
    stretched = found["deepseek_v2"]["rope_scaling"]
    assert stretched["mscale"] == stretched["mscale_all_dim"] == 0.707


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("deepseek_v3", "expert_gating_func", 3, "deepseek2.expert_gating_func = 3"),
        ("deepseek_v3", "attention.head_count_kv", 3, "deepseek2.attention.head_count_kv = 3"),
        ("deepseek_v3", "attention.key_length_mla", 16, "attention.key_length (16) must be more than"),
        ("deepseek_v3", "rope.dimension_count", "all", "deepseek2.rope.dimension_count = 'all'"),
        ("deepseek_v3", "attention.temperature_scale", 0.1, "deepseek2.attention.temperature_scale = 0.1"),
        ("glm4_moe_lite_ahead", "nextn_predict_layers", 4, "nextn_predict_layers = 4 of deepseek2.block_count = 4"),
        ("mistral3", "attention.temperature_scale", 0.1, "mistral3.rope.scaling.type = yarn"),
        ("llama", "attention.temperature_scale", 0.1, "llama.attention.temperature_scale = 0.1"),
        ("minicpm", "attention.key_length", -4, "minicpm.attention.key_length = -4"),
        ("minicpm", "logit_scale", 0.0, "minicpm.logit_scale is missing"),
        ("deepseek_v2", "expert_used_count", 0, "deepseek2.expert_used_count is missing"),
        ("glm4_moe_ahead", "rope.dimension_sections", [8, 4, 4], "glm4moe.rope.dimension_sections = [8, 4, 4]"),
        ("glm4_moe_ahead", "expert_gating_func", 1, "glm4moe.expert_gating_func = 1"),
        ("dots1", "expert_gating_func", 1, "dots1.expert_gating_func = 1"),
        ("minicpm3", "attention.head_count", 0, "minicpm3.attention.value_length = None"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(name: str, key: str, value: object, said: str) -> None:
    file = GgufFile(gguf_file(name))
    file.metadata[f"{file.metadata['general.architecture']}.{key}"] = value
    with pytest.raises(UnsupportedModel) as refused:
        config_of(file)
    assert said in str(refused.value)


@pytest.mark.parametrize("values", [(3, 4, 5), (2, 4, 6), (2, 20)])
def test_keys_and_values_that_are_not_of_one_latent_are_named(values: tuple[int, ...], tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        add(writer, "blk.0.attn_k_b.weight", np.zeros((2, 5, 3), np.float32))
        add(writer, "blk.0.attn_v_b.weight", np.zeros(values, np.float32))

    with pytest.raises(UnsupportedModel, match=r"'blk\.0\.attn_k_b\.weight' is for \[2, 5, 3\], and"):
        GgufTensors(filled_file(tmp_path / "m.gguf", "deepseek2", fill))


def test_keys_and_values_of_a_latent_are_those_of_a_folder(tmp_path: Path) -> None:
    keys = np.arange(30, dtype=np.float32).reshape(2, 5, 3)
    values = 100 + np.arange(40, dtype=np.float32).reshape(2, 4, 5)

    def fill(writer: gguf.GGUFWriter) -> None:
        add(writer, "blk.0.attn_v_b.weight", values)
        add(writer, "blk.0.attn_k_b.weight", keys)

    tensors = GgufTensors(filled_file(tmp_path / "m.gguf", "deepseek2", fill))
    assert tensors.keys() == [_BOTH]
    found = tensors.get_tensor(_BOTH).numpy()
    assert list(found.shape) == tensors.get_slice(_BOTH).get_shape() == [14, 5]
    for head in range(2):
        np.testing.assert_array_equal(found[7 * head : 7 * head + 3], keys[head].T)
        np.testing.assert_array_equal(found[7 * head + 3 : 7 * head + 7], values[head])


def test_without_its_values_a_latent_s_keys_are_missed(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        add(writer, "blk.0.attn_k_b.weight", np.zeros((2, 5, 3), np.float32))

    path = filled_file(tmp_path / "m.gguf", "deepseek2", fill)
    assert GgufTensors(path).keys() == ["model.layers.0.self_attn.k_b_proj.weight"]
