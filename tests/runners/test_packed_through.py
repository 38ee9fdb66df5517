"""Quantized folders of families that transformers computes: what is read, what it takes, and what is refused."""

import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.decoder_harness import Harness, all_logits, make_runner, prompts, requests
from support.device import DEVICE
from support.foreign_factory import FOREIGN, folder_that_sees, foreign_folder
from support.model_factory import edited_folder, model_folder, temporary_root
from support.packers import LAYOUTS, packed_pair

from chairlift.errors import UnsupportedModel
from chairlift.folders.tensor_files import count_numbers
from chairlift.runners.decoder.runner import DecoderRunner
from chairlift.runners.quantized_weights import QuantizedWeights

# What tools that pack leave as it is.
LEFT = ("embed", "lm_head", "router", ".gate.weight", "visual.")
NAMES = ["lfm2", "qwen3_5_text", "granitemoehybrid"]
WITH_EXPERTS = ["lfm2_moe", "qwen3_5_moe_text", "minimax_m2", "jamba"]
# A projection of each that is packed.
PROJECTION = "model.layers.1.feed_forward.w1."


def through(folder: Path, **settings: Any) -> DecoderRunner:
    return make_runner(folder, **{"implementation": "transformers", **settings})


def is_packed(name: str, tensor: torch.Tensor) -> bool:
    if not name.endswith(".weight") or tensor.ndim != 2 or any(left in name for left in LEFT):
        return False
    return not tensor.shape[0] % 16 and not tensor.shape[1] % 32


def folders(layout: str, name: str = "lfm2") -> tuple[Path, Path]:
    """A model with packed projections, and one with the numbers that they are."""
    return made(layout, name)


@functools.cache
def made(layout: str, name: str) -> tuple[Path, Path]:
    source = folder_that_sees(name) if name == "qwen3_5" else foreign_folder(FOREIGN[name][0], name)
    return packed_pair(temporary_root() / f"through-{layout}-{name}", source, layout, is_packed)


@functools.cache
def pair(layout: str, name: str) -> tuple[DecoderRunner, DecoderRunner]:
    found, plain = (through(each, ops="native") for each in folders(layout, name))
    return found, plain


def changed_folder(target: Path, source: Path, **changed: torch.Tensor | None) -> Path:
    """A folder whose tensors of these names, with "/" for ".", are others, or are not there."""
    folder = edited_folder(target, source)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changed.items():
        tensors.pop(name.replace("/", "."), None)
        if tensor is not None:
            tensors[name.replace("/", ".")] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def refused(folder: Path, **settings: Any) -> str:
    with pytest.raises(UnsupportedModel) as error:
        through(folder, ops="native", **settings)
    return str(error.value)


def assert_near(packed: DecoderRunner, plain: DecoderRunner) -> None:
    texts = list(prompts().values())
    for found, wanted in zip(all_logits(packed, texts), all_logits(plain, texts), strict=True):
        assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_that_of_the_numbers(name: str, layout: str) -> None:
    packed, plain = pair(layout, name)
    assert packed.info.ops.endswith("through transformers")
    assert_near(packed, plain)


@pytest.mark.parametrize("layout", ["gptq", "awq", "compressed", "fp8, blocks"])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_that_are_packed_one_by_one_are_put_together(name: str, layout: str) -> None:
    assert any("experts.3." in each for each in load_file(folders(layout, name)[0] / "model.safetensors"))
    assert_near(*pair(layout, name))


def test_eight_bits_go_by_two_names(tmp_path: Path) -> None:
    """As MiniMax M2's own folder says it."""
    packed, plain = folders("fp8, blocks", "minimax_m2")
    about = LAYOUTS["fp8, blocks"][0] | {"fmt": "float8_e4m3fn", "activation_scheme": "dynamic"}
    about |= {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
    folder = edited_folder(tmp_path / "m", packed, quantization_config=about)
    assert_near(*(through(each, ops="native") for each in (folder, plain)))


def test_a_native_family_too_if_it_is_asked_for() -> None:
    folder, _ = packed_pair(temporary_root() / "through-llama", model_folder("llama"), "awq", is_packed)
    assert_near(*(through(folder, ops="native", implementation=kind) for kind in ("transformers", "native")))


@pytest.mark.parametrize("is_nested", [False, True])
def test_the_part_for_texts_of_a_model_that_sees(is_nested: bool, tmp_path: Path) -> None:
    """The whole model's config.json may say how it is packed, or that of its part."""
    packed, plain = folders("fp8", "qwen3_5")
    folder = edited_folder(tmp_path / "m", packed)
    if is_nested:
        raw = json.loads((folder / "config.json").read_text())
        raw["text_config"]["quantization_config"] = raw.pop("quantization_config")
        (folder / "config.json").write_text(json.dumps(raw))
    assert_near(*(through(each, ops="native") for each in (folder, plain)))


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_alone_and_in_company_are_those_of_the_numbers(name: str) -> None:
    packed, plain = pair("gptq", name)
    wanted = Harness(plain).generate(requests(), 16)
    assert Harness(packed).generate(requests(), 16) == wanted
    for request in requests():
        assert Harness(packed).generate([request], 16) == {request.id: wanted[request.id]}


@pytest.mark.parametrize("layout", ["gptq", "compressed", "fp8"])
@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
def test_other_settings_apply_to_what_was_unpacked(settings: dict[str, str], layout: str) -> None:
    packed, plain = (through(folder, ops="native", **settings) for folder in folders(layout))
    assert Harness(packed).generate(requests(), 16) == Harness(plain).generate(requests(), 16)
    assert packed.info.weight_bytes == plain.info.weight_bytes < pair(layout, "lfm2")[1].info.weight_bytes


@pytest.mark.parametrize(("saved", "taken"), [("float16", "bfloat16"), ("float32", "float32")])
def test_what_was_float16_becomes_bfloat16(saved: str, taken: str, tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "m", folders("awq")[0], dtype=saved)
    assert through(folder, ops="native").info.dtype == taken


def test_it_is_said_to_take_more_here(caplog: pytest.LogCaptureFixture) -> None:
    packed, plain = folders("gptq")
    through(plain)
    assert "MB on the disk take" not in caplog.text
    through(packed)
    assert "MB on the disk take" in caplog.text
    # On CUDA they are only imitated.
    assert ("quantization int8 or int4 keeps them small" in caplog.text) is (DEVICE == "cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_counted_as_they_are_unpacked(layout: str) -> None:
    packed, plain = folders(layout)
    assert count_numbers(packed) == count_numbers(plain)


def test_projections_are_unpacked_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes some times its memory meanwhile, and transformers asks in several threads."""
    busy, read, seen = threading.Lock(), QuantizedWeights.read, []

    def alone(self: QuantizedWeights, name: str, shape: tuple[int, int]) -> torch.Tensor:
        assert busy.acquire(blocking=False)
        try:
            seen.append(name)
            return read(self, name, shape)
        finally:
            busy.release()

    packed, _ = folders("gptq")
    monkeypatch.setattr(QuantizedWeights, "read", alone)
    through(packed, ops="native")
    assert len(seen) == len(set(seen)) > 10


def test_biases_of_zero_are_no_biases(tmp_path: Path) -> None:
    packed, _ = folders("gptq")
    add = {f"{PROJECTION.replace('.', '/')}bias": torch.zeros(128)}
    through(changed_folder(tmp_path / "zero", packed, **add), ops="native")
    add = {name: tensor + 0.5 for name, tensor in add.items()}
    assert f"unexpected tensors: {PROJECTION}bias" in refused(changed_folder(tmp_path / "half", packed, **add))


def test_biases_of_zero_are_no_biases_where_transformers_has_other_names(tmp_path: Path) -> None:
    packed, _ = folders("gptq", "minimax_m2")
    bias = "model.layers.1.block_sparse_moe.experts.2.w1.bias"
    through(changed_folder(tmp_path / "zero", packed, **{bias: torch.zeros(128)}), ops="native")
    problem = refused(changed_folder(tmp_path / "half", packed, **{bias: torch.full((128,), 0.5)}))
    assert "unexpected tensors: model.layers.1.mlp.experts.2.w1.bias" in problem


def test_biases_of_zero_are_kept_where_the_model_has_some() -> None:
    source = foreign_folder("phi", "phi")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.bias"
    source = changed_folder(temporary_root() / "through-zeros", source, **{name: torch.zeros_like(tensors[name])})
    found = packed_pair(temporary_root() / "through-zeros-packed", source, "awq", is_packed)
    assert_near(*(through(each, ops="native") for each in found))


@pytest.mark.parametrize(
    ("layout", "part", "changed", "said"),
    [
        ("gptq", "qweight", lambda tensor: tensor[:-1], "has shape [256, 56], but config.json asks for [256, 64]"),
        ("gptq", "qweight", lambda tensor: tensor.long(), "not int32"),
        ("gptq", "scales", lambda tensor: tensor[:, :-1], "scales"),
        ("gptq", "scales", lambda tensor: None, "scales' is missing"),
        ("gptq", "g_idx", lambda tensor: tensor + 1, "g_idx"),
        ("awq", "qweight", lambda tensor: tensor.repeat(1, 2), "scales"),
        ("awq", "qzeros", lambda tensor: tensor[:, :-1], "qzeros"),
        ("compressed", "weight_shape", lambda tensor: tensor * 2**40, "weight_packed"),
        ("compressed", "weight_shape", lambda tensor: tensor.float() * 1e38, "can't be read"),
        ("compressed", "weight_shape", lambda tensor: tensor[:1], "can't be read"),
        ("compressed", "weight_shape", lambda tensor: None, "weight_shape' is missing"),
        ("compressed", "weight_packed", lambda tensor: tensor[:, :-1], "weight_packed"),
        ("compressed, int8", "weight", lambda tensor: tensor.float(), "none of the packed types"),
        ("compressed, int8", "weight", lambda tensor: None, "w1.weight' is missing"),
        ("fp8", "weight_scale_inv", lambda tensor: None, "is torch.float8_e4m3fn; float32,"),
        ("fp8", "weight", lambda tensor: tensor.view(4, 64, 64), "is packed, but no projection"),
        ("fp8", "weight", lambda tensor: tensor.T, "has shape [64, 256], but config.json asks for [256, 64]"),
        ("fp8, blocks", "weight_scale_inv", lambda tensor: tensor[:-1], "weight_scale_inv"),
    ],
)
def test_a_tensor_that_is_wrong_is_named(layout: str, part: str, changed: Any, said: str, tmp_path: Path) -> None:
    source, _ = folders(layout)
    tensor = load_file(source / "model.safetensors")[PROJECTION + part]
    problem = refused(changed_folder(tmp_path / "m", source, **{PROJECTION + part: changed(tensor)}))
    assert "feed_forward.w1" in problem
    assert said in problem


def test_what_config_json_says_of_the_packing_is_held_against_the_tensors(tmp_path: Path) -> None:
    for layout, fields, said in (
        ("gptq", {"bits": 8}, "in_proj.weight' has shape [192, 32], but config.json asks for [192, 64]"),
        ("gptq", {"bits": 2}, "in_proj.g_idx' must name one of 2 groups for each of 128 inputs"),
        ("gptq", {"bits": 3}, "bits=3 is not read"),
        ("awq", {"group_size": 64}, "group_size in config.json is wrong"),
    ):
        given = {"quantization_config": LAYOUTS[layout][0] | fields}
        folder = edited_folder(tmp_path / f"{layout}{fields}", folders(layout)[0], **given)
        assert said in refused(folder)
    source, _ = folders("gptq")
    for name, fields, said in (
        ("layers", {"num_hidden_layers": 400, "layer_types": ["conv"] * 400}, "by config.json it has"),
        ("tokens", {"vocab_size": 400}, "tensor 'model.embed_tokens.weight' has shape [320, 64], but"),
        ("fewer", {"vocab_size": 300}, "tensor 'model.embed_tokens.weight' has shape [320, 64], but"),
    ):
        assert said in refused(edited_folder(tmp_path / name, source, **fields))


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "m", folders("gptq")[0])
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors" in refused(folder)


@pytest.mark.parametrize("name", ["granitemoehybrid", "gemma4_experts"])
def test_several_experts_in_one_packed_tensor_are_refused_by_name(name: str, tmp_path: Path) -> None:
    source, _ = folders("fp8", name)
    tensors = load_file(source / "model.safetensors")
    joint = next(each for each in tensors if tensors[each].ndim == 3 and "conv" not in each)
    packed = {joint: tensors[joint].to(torch.float8_e4m3fn)}
    packed[joint + ("_scale" if joint.endswith(".weight") else "_scale_inv")] = torch.ones(4, 1, 1)
    problem = refused(changed_folder(tmp_path / "m", source, **packed))
    assert joint in problem
    assert "packed, but no projection" in problem or "is torch.float8_e4m3fn" in problem


@functools.cache
def with_joint_experts(source: Path, target: str) -> tuple[Path, Path]:
    """A model whose experts are in one tensor of 8 bits, as llm-compressor writes Granite's, and one of its numbers."""
    joint = {name: each for name, each in load_file(source / "model.safetensors").items() if "linear.weight" in name}
    packed, plain = {}, {}
    for name, tensor in joint.items():
        if tensor.ndim == 3:
            scale = tensor.abs().amax(-1, keepdim=True) / 448
            packed |= {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
            plain[name] = packed[name].float() * scale
    assert packed
    about = {"quantization_config": LAYOUTS["compressed, fp8"][0]}
    folder = edited_folder(temporary_root() / f"{target}-about", source, **about)
    root = temporary_root()
    return changed_folder(root / f"{target}-packed", folder, **packed), changed_folder(root / target, source, **plain)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("granitemoehybrid", "transformers"), ("granitemoehybrid", "native"), ("granitemoe", "native")],
)
def test_experts_of_8_bits_in_one_tensor(name: str, implementation: str) -> None:
    source = model_folder(name) if name == "granitemoe" else foreign_folder(name, name)
    packed, plain = (
        through(each, ops="native", implementation=implementation)
        for each in with_joint_experts(source, f"joint-{name}-{implementation}")
    )
    assert_near(packed, plain)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda scale: scale[:, :1], "weight_scale"),
        (lambda scale: scale[..., 0], "weight_scale"),
        (lambda scale: scale.int(), "weight_scale"),
        (lambda scale: None, "is torch.float8_e4m3fn; float32,"),
    ],
)
def test_scales_of_experts_in_one_tensor_are_looked_at(changed: Any, said: str, tmp_path: Path) -> None:
    source, _ = with_joint_experts(foreign_folder("granitemoehybrid", "granitemoehybrid"), "joint-granitemoehybrid")
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    scale = load_file(source / "model.safetensors")[f"{name}_scale"]
    problem = refused(changed_folder(tmp_path / "m", source, **{f"{name}_scale": changed(scale)}))
    assert f"tensor '{name}" in problem
    assert said in problem


def test_experts_one_by_one_are_refused_by_name_where_transformers_has_them_in_one(tmp_path: Path) -> None:
    source, _ = folders("fp8", "gemma4_experts")
    joint = "model.layers.0.experts.down_proj"
    experts = load_file(source / "model.safetensors")[joint]
    parts: dict[str, torch.Tensor | None] = {joint: None}
    for index, expert in enumerate(experts):
        name = f"model.layers.0.experts.{index}.down_proj"
        parts |= {f"{name}.weight": expert.to(torch.float8_e4m3fn), f"{name}.weight_scale_inv": torch.ones(1)}
    assert f"missing tensors: {joint}" in refused(changed_folder(tmp_path / "m", source, **parts))


def test_an_expert_of_another_size_is_named(tmp_path: Path) -> None:
    source, _ = folders("fp8", "lfm2_moe")
    name = next(name for name in load_file(source / "model.safetensors") if name.endswith("experts.1.w2.weight"))
    expert = load_file(source / "model.safetensors")[name]
    fused = f"{name.partition('.1.')[0]}.down_proj"
    problem = refused(changed_folder(tmp_path / "one", source, **{name: expert.repeat(2, 1)}))
    assert f"what {fused!r} is made of can't be put together" in problem
    assert "[64, 64]" in problem
    assert "[128, 64]" in problem


def test_weights_that_are_transposed_are_refused() -> None:
    folder, _ = packed_pair(temporary_root() / "through-gpt2", foreign_folder("gpt2", "gpt2"), "gptq", is_packed)
    problem = "quantization_config is not read for gpt2, whose weights are transposed"
    assert problem in refused(folder, implementation="transformers")
