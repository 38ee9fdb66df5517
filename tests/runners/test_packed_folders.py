"""Quantized folders: the numbers of their projections to the bit, models of them, and what is wrong with others."""

import functools
import json
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.decoder_harness import Harness, all_logits, make_runner, prompts, requests
from support.device import DEVICE
from support.model_factory import edited_folder, model_folder, temporary_root
from support.packers import LAYOUTS, packed_pair

from chairlift.errors import UnsupportedModel
from chairlift.folders.quantization_config import parse_quantization
from chairlift.runners.decoder.config import read_config
from chairlift.runners.encoder.runner import EncoderRunner
from chairlift.runners.items import Encoding
from chairlift.runners.weights import Weights

FEW, MANY = 40, 2000
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
PARTS += ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
# Sizes of latent attention and of its experts in the tests are no whole groups.
OF_ANY_SIZE = ("compressed, int8", "fp8", "fp8, blocks")
WITH_EXPERTS = [
    *[(layout, "mixtral") for layout in ("gptq", "awq", "compressed")],
    *[(layout, variant) for layout in ("gptq", "awq", "compressed") for variant in ("olmoe", "ernie4_5_moe")],
    *[(layout, variant) for layout in OF_ANY_SIZE for variant in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")],
]


@functools.cache
def folders(layout: str, variant: str = "llama") -> tuple[Path, Path]:
    """A model with packed projections, and one with the numbers that they are."""
    return packed_pair(
        temporary_root() / f"packed-{layout}-{variant}",
        model_folder(variant),
        layout,
        lambda name, _: name.split(".")[-2] in PARTS and name.endswith(".weight"),
    )


def test_a_packed_folder_is_said_to_take_more_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = edited_folder(tmp_path / "model", folders("gptq")[0])
    # The same weights as they were, which nobody reads.
    (folder / "consolidated.safetensors").write_bytes((folders("gptq")[1] / "model.safetensors").read_bytes())
    make_runner(folder)
    assert "MB on the disk take" in caplog.text
    # On CUDA they are only imitated.
    assert ("quantization int8 or int4 keeps them small" in caplog.text) is (DEVICE == "cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_those_that_were_packed(layout: str) -> None:
    packed, plain = folders(layout)
    wanted = load_file(plain / "model.safetensors")
    with Weights(packed, torch.float32, torch.device("cpu"), read_config(packed).packing) as weights:
        for name, tensor in wanted.items():
            assert torch.equal(weights.take([name], [tuple(tensor.shape)]), tensor), name
        weights.refuse_unused()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_is_that_of_the_numbers(layout: str) -> None:
    packed, plain = (make_runner(folder, ops="native") for folder in folders(layout))
    for found, wanted in zip(*(all_logits(each, list(prompts().values())) for each in (packed, plain)), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("layout", ["gptq", "awq", "compressed", "fp8"])
def test_a_packed_decoder_embeds_as_its_numbers_do(layout: str) -> None:
    found = []
    for folder in folders(layout):
        runner = EncoderRunner(str(folder), dtype="float32", num_threads=1)
        runner.load()
        found.append(runner.run([Encoding([5, 6, 7])])[0])
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize(("layout", "variant"), WITH_EXPERTS)
def test_experts_and_latents_are_those_of_the_numbers(layout: str, variant: str) -> None:
    packed, plain = (make_runner(folder, ops="native") for folder in folders(layout, variant))
    for found, wanted in zip(*(all_logits(each, list(prompts().values())) for each in (packed, plain)), strict=True):
        assert torch.equal(found, wanted)


def test_experts_in_one_packed_tensor_are_refused_by_name(tmp_path: Path) -> None:
    """As transformers would save them; tools that pack have a tensor for each expert."""
    folder = edited_folder(tmp_path / "m", folders("fp8", "olmoe")[0])
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.0.mlp.experts"
    parts = [f"{prefix}.{index}.{part}.weight" for index in range(4) for part in ("gate_proj", "up_proj")]
    tensors[f"{prefix}.gate_up_proj"] = torch.stack([tensors.pop(name) for name in parts]).view(4, 256, 64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"experts\.gate_up_proj' is torch\.float8_e4m3fn"):
        make_runner(folder)


@pytest.mark.parametrize("variant", ["gpt2", "gpt_oss"])
def test_families_with_transposed_weights_are_refused(variant: str, tmp_path: Path) -> None:
    fields = {"quant_method": "fp8"}
    folder = edited_folder(tmp_path / "m", model_folder(variant), quantization_config=fields)
    with pytest.raises(UnsupportedModel, match=f"quantization_config is not read for {variant}"):
        make_runner(folder)


@pytest.mark.parametrize("layout", ["gptq", "compressed"])
def test_other_settings_apply_to_what_was_unpacked(layout: str) -> None:
    for settings in ({"dtype": "bfloat16"}, {"quantization": "int8"}):
        found = [
            Harness(make_runner(folder, ops="native", **settings)).generate(requests(), 16)
            for folder in folders(layout, "qwen2")
        ]
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("saved", "taken"), [("float16", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32")]
)
def test_what_was_float16_becomes_bfloat16(saved: str, taken: str, tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "m", folders("awq")[0], dtype=saved)
    assert make_runner(folder, ops="native").info.dtype == taken


def test_biases_of_zero_are_no_biases(tmp_path: Path) -> None:
    """Some writers add them to every projection; others are not dropped."""
    source, _ = folders("gptq")
    for value, is_refused in ((0.0, False), (0.5, True)):
        folder = edited_folder(tmp_path / str(value), source)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.full((64,), value)
        save_file(tensors, folder / "model.safetensors")
        if is_refused:
            with pytest.raises(UnsupportedModel, match=r"unexpected tensor .*q_proj\.bias"):
                make_runner(folder)
        else:
            make_runner(folder)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not read; these are: awq"),
        ("int4", "quant_method None"),
        ({"quant_method": "gptq", "bits": 3}, "bits=3"),
        ({"quant_method": "gptq", "bits": True}, "bits=True"),
        ({"quant_method": "gptq", "group_size": 0}, "group_size"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "dynamic": {"-:x": {}}}, "dynamic"),
        ({"quant_method": "awq", "bits": 8}, "bits=8"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}}, "sparse-24"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 3}}}},
            "3 bits of type 'int'",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(fields: Any, said: str) -> None:
    with pytest.raises(UnsupportedModel, match="quantization_config") as refused:
        parse_quantization({"quantization_config": fields})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("layout", "part", "changed", "said"),
    [
        ("gptq", "qweight", lambda tensor: tensor[:-1], "qweight"),
        ("gptq", "qweight", lambda tensor: tensor.long(), "not int32"),
        ("gptq", "scales", lambda tensor: tensor[:, :-1], "scales"),
        ("gptq", "scales", lambda tensor: None, "scales' is missing"),
        ("gptq", "qzeros", lambda tensor: tensor[:-1], "qzeros"),
        ("gptq", "g_idx", lambda tensor: tensor + 1, "g_idx"),
        ("gptq", "g_idx", lambda tensor: tensor - 1, "g_idx"),
        ("gptq", "g_idx", lambda tensor: tensor[:-1], "g_idx"),
        ("awq", "qweight", lambda tensor: tensor[:, :-1], "qweight"),
        ("awq", "scales", lambda tensor: tensor[:-1], "qzeros"),
        ("compressed", "weight_shape", lambda tensor: tensor * 2, "weight_shape"),
        ("compressed", "weight_packed", lambda tensor: tensor[:, :-1], "weight_packed"),
        ("compressed", "weight_scale", lambda tensor: tensor[:-1], "weight_scale"),
        ("compressed", "weight_scale", lambda tensor: tensor[:, :-1], "weight_g_idx' is missing"),
        ("compressed, int8", "weight", lambda tensor: tensor.float(), "none of the packed types"),
        ("fp8, blocks", "weight_scale_inv", lambda tensor: tensor[:-1], "weight_scale_inv"),
    ],
)
def test_a_tensor_that_is_wrong_is_named(layout: str, part: str, changed: Any, said: str, tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "m", folders(layout)[0])
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.1.mlp.down_proj.{part}"
    value = changed(tensors.pop(name))
    if value is not None:
        tensors[name] = value.contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="down_proj") as refused:
        make_runner(folder)
    assert said in str(refused.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_whole", [False, True])
def test_whatever_lies_in_a_folder_is_read_or_refused(layout: str, count: int, is_whole: bool, tmp_path: Path) -> None:
    """Tensors of random types and shapes, fields of random values, and files cut short or written over."""
    rng = random.Random(layout)
    before, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    source = folders(layout)[0]
    about = json.loads((source / "config.json").read_text())["quantization_config"]
    whole = {name: tensor for name, tensor in load_file(source / "model.safetensors").items() if "layers.0" in name}
    base = "model.layers.0.self_attn.q_proj."
    file = tmp_path / "model.safetensors"
    for _ in range(count):
        tensors = {name.removeprefix(base): tensor for name, tensor in whole.items() if name.startswith(base)}
        for _ in range(rng.randint(0, 2)):
            part = rng.choice(list(tensors))
            tensors[part] = mangled(rng, tensors[part])
        save_file({base + part: tensor.contiguous() for part, tensor in tensors.items()}, file)
        if rng.random() < 0.4:
            file.write_bytes(written_over(rng, file.read_bytes()))
        given = dict(about)
        if rng.random() < 0.3:
            given[rng.choice(list(given))] = rng.choice([None, -1, 2**40, "x", [], {}, [3, 7], True])
        try:
            packing = parse_quantization({"quantization_config": given})
            with Weights(tmp_path, torch.float32, torch.device("cpu"), packing) as weights:
                if is_whole:
                    # Of the shape that it says it has, as for transformers.
                    for name in weights.names():
                        assert weights.whole(name).shape == weights.shape(name)
                    continue
                found = weights.take([f"{base}weight"], [(64, 64)])
        except UnsupportedModel as error:
            refused.append(str(error))
            continue
        assert found.shape == (64, 64)
    assert count / 3 < len(refused) < count
    assert not [each for each in refused if "\n" in each or len(each) > 1000]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


def written_over(rng: random.Random, data: bytes) -> bytes:
    """A file cut short, or with a few bytes of its head changed."""
    if rng.random() < 0.4:
        return data[: rng.randrange(len(data))]
    found, head = bytearray(data), min(len(data), 800)
    for _ in range(rng.randint(1, 3)):
        found[rng.randrange(head)] = rng.randrange(256)
    return bytes(found)


def mangled(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    kind = rng.randrange(5)
    if kind == 0:
        return tensor.to(rng.choice([torch.int32, torch.int64, torch.float32, torch.uint8, torch.float16]))
    if kind == 1:
        return tensor[: rng.randint(0, len(tensor))] if tensor.ndim else tensor
    if kind == 2:
        return tensor.flatten()
    if kind == 3:
        return torch.zeros([rng.randint(0, 3) for _ in range(rng.randint(0, 3))], dtype=tensor.dtype)
    return tensor.repeat(2, *[1] * (tensor.ndim - 1)) if tensor.ndim else tensor
