"""What folders with experts may look like, and what of them is refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.decoder_harness import all_logits, make_runner, prompts
from support.model_factory import edited_folder, model_folder

from chairlift.errors import UnsupportedModel
from chairlift.ops.base import DenseMlp
from chairlift.ops.experts import Experts, Routing
from chairlift.runners.decoder.config import parse_config, read_config
from chairlift.runners.decoder.mxfp4 import dequantize


def rewritten(target: Path, variant: str, change: Any, **fields: Any) -> Path:
    """A copy of a model's folder, of whose tensors `change` makes others."""
    folder = edited_folder(target, model_folder(variant), **fields)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def together(tensors: dict[str, torch.Tensor]) -> None:
    """All experts of a layer in two tensors, as newer folders have them."""
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp.experts."
        count = len({name for name in tensors if re.match(rf"{re.escape(prefix)}\d+\.up_proj", name)})
        gates, ups, downs = (
            torch.stack([tensors.pop(f"{prefix}{index}.{part}_proj.weight") for index in range(count)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{prefix}gate_up_proj"], tensors[f"{prefix}down_proj"] = torch.cat((gates, ups), 1), downs


def test_experts_that_lie_together(tmp_path: Path) -> None:
    folder = rewritten(tmp_path / "together", "olmoe", together)
    wanted = all_logits(make_runner(model_folder("olmoe"), ops="reference"), list(prompts().values()))
    found = all_logits(make_runner(folder, ops="reference"), list(prompts().values()))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_layers_that_predict_further_tokens_are_left_alone(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.eh_proj.weight"] = torch.zeros(64, 128)

    make_runner(rewritten(tmp_path / "with", "glm4_moe", add, num_nextn_predict_layers=1), ops="reference")
    with pytest.raises(UnsupportedModel, match=r"unexpected tensor 'model\.layers\.2\.eh_proj\.weight'"):
        make_runner(rewritten(tmp_path / "without", "glm4_moe", add, num_nextn_predict_layers=0), ops="reference")


def test_what_guesses_ahead_is_left_alone(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.mtp_block.0.input_layernorm.weight"] = torch.zeros(64)
        tensors["model.mtp_linear_proj.0.weight"] = torch.zeros(64, 128)

    make_runner(rewritten(tmp_path / "with", "ernie4_5_moe", add), ops="reference")
    with pytest.raises(UnsupportedModel, match=r"unexpected tensor 'model\.mtp_block"):
        make_runner(rewritten(tmp_path / "qwen", "qwen3_moe", add), ops="reference")


@pytest.mark.parametrize("variant", ["deepseek_v3", "glm4_moe_lite", "deepseek_v2", "glm4_moe"])
def test_what_a_folder_leaves_out_is_as_in_transformers(variant: str) -> None:
    from transformers import AutoConfig

    raw = json.loads((model_folder(variant) / "config.json").read_text())
    # Room for as many groups as there are by default.
    raw |= {"n_routed_experts": 64, "num_experts_per_tok": 4}
    left = {
        name: value for name, value in raw.items() if name not in ("routed_scaling_factor", "n_group", "topk_group")
    }
    theirs = AutoConfig.for_model(raw["model_type"])
    ours = parse_config(left).experts
    assert ours is not None
    assert (ours.scale, ours.groups) == (theirs.routed_scaling_factor, theirs.n_group or 1)
    assert ours.groups_chosen == (theirs.topk_group or 1)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    with pytest.raises(UnsupportedModel, match=re.escape(name)):
        make_runner(rewritten(tmp_path / "less", "olmoe", lambda tensors: tensors.pop(name)), ops="reference")


def packed(tensors: dict[str, torch.Tensor]) -> None:
    """gpt-oss's experts in MXFP4, and what these numbers are beside them, as if they had never been packed."""
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, ins, outs = tensors[name].shape
        blocks = torch.randint(0, 256, (count, outs, ins // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, (count, outs, ins // 32), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        tensors[name] = dequantize(blocks, scales, torch.float32).transpose(1, 2)


def test_numbers_of_four_bits_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).repeat(2).view(2, 4, 4, 16)
    scales = torch.arange(100, 132, dtype=torch.uint8).view(2, 4, 4)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(dequantize(blocks, scales, torch.float32).transpose(1, 2), theirs)


@pytest.mark.parametrize("ops", ["reference", "native"])
def test_packed_experts_are_the_numbers_that_they_stand_for(ops: str, tmp_path: Path) -> None:
    def without(tensors: dict[str, torch.Tensor], ends: tuple[str, ...]) -> None:
        packed(tensors)
        for name in [name for name in tensors if name.endswith(ends)]:
            del tensors[name]

    plain = rewritten(tmp_path / "plain", "gpt_oss", lambda each: without(each, ("_blocks", "_scales")))
    folder = rewritten(
        tmp_path / "packed",
        "gpt_oss",
        lambda each: without(each, ("experts.gate_up_proj", "experts.down_proj")),
        quantization_config={"quant_method": "mxfp4"},
    )
    found, wanted = (all_logits(make_runner(each, ops=ops), list(prompts().values())) for each in (folder, plain))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_packed_experts_of_another_shape_or_type_are_named(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        packed(tensors)
        tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"][:, :, :-1]

    def wide(tensors: dict[str, torch.Tensor]) -> None:
        packed(tensors)
        tensors[f"{name}_scales"] = tensors[f"{name}_scales"].float()

    with pytest.raises(UnsupportedModel, match=re.escape(f"{name}_blocks")):
        make_runner(rewritten(tmp_path / "cut", "gpt_oss", cut), ops="reference")
    with pytest.raises(UnsupportedModel, match=re.escape(f"{name}_scales' is torch.float32")):
        make_runner(rewritten(tmp_path / "wide", "gpt_oss", wide), ops="reference")


@pytest.mark.parametrize(
    ("variant", "fields", "message"),
    [
        ("olmoe", {"num_experts_per_tok": 5}, "must not be more than there are experts"),
        ("olmoe", {"num_experts": 2**40}, "num_experts"),
        ("olmoe", {"num_experts": 0}, "num_experts"),
        ("olmoe", {"num_local_experts": 8}, "counts experts twice"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("glm4_moe", {"n_group": 3}, "n_group"),
        ("glm4_moe", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers"),
        ("glm4_moe", {"first_k_dense_replace": "one"}, "none of its kind"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen2_moe", {"mlp_only_layers": 3}, "none of its kind"),
        ("ernie4_5_moe", {"moe_norm_min": "small"}, "none of its kind"),
        ("llama", {"num_experts": 8}, "num_experts"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "experts"),
        ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
    ],
)
def test_what_is_refused(variant: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_config(edited_folder(tmp_path / "model", model_folder(variant), **fields))


def test_layers_may_all_be_without_experts(tmp_path: Path) -> None:
    assert read_config(edited_folder(tmp_path / "m", model_folder("glm4_moe"), first_k_dense_replace=2)).experts is None


def test_no_rows_at_all() -> None:
    def linear(x: torch.Tensor) -> torch.Tensor:
        return x

    linear.nbytes = 0  # type: ignore[attr-defined]
    mlp = DenseMlp(linear, linear)  # type: ignore[arg-type]
    experts = Experts(Routing(2, 1), torch.ones(2, 4), None, None, [mlp, mlp], None, False)
    assert experts(torch.empty(0, 4)).shape == (0, 4)
