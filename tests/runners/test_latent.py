"""Latent attention: what is kept, which experts in groups are chosen, and what a config.json may say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoder_harness import make_runner
from support.model_factory import edited_folder, model_folder

from chairlift.errors import UnsupportedModel
from chairlift.ops.experts import Experts, Routing
from chairlift.ops.latent import LatentShape
from chairlift.runners.decoder.config import read_config


def test_a_latent_lies_in_both_halves_behind_what_is_rotated() -> None:
    shape = LatentShape(num_heads=1, rank=6, plain=8, rotated=4, value=8)
    latent, rotated = torch.arange(6), -1 - torch.arange(4)
    head = shape.spread(rotated, latent)
    assert head.tolist() == [-1, -2, 0, 1, 2, -3, -4, 3, 4, 5]
    assert shape.latent_of(head).tolist() == latent.tolist()


@pytest.mark.parametrize("ops", ["native", "reference"])
@pytest.mark.parametrize(("dtype", "cache", "size"), [("float32", "auto", 4), ("bfloat16", "int8", 1)])
def test_the_cache_holds_latents_and_not_keys_and_values(ops: str, dtype: str, cache: str, size: int) -> None:
    runner = make_runner(model_folder("deepseek_v3"), ops=ops, dtype=dtype, kv_cache_dtype=cache)
    scales = 4 if cache == "int8" else 0
    # The native kernels fill rows of V up.
    values = 48 if runner.model.ops.pads_values else 32 + 8
    assert runner.model.kv_bytes_per_token() == 2 * ((32 + 8 + values) * size + 2 * scales)


@pytest.mark.parametrize("version", [2, 3])
def test_experts_in_groups_are_chosen_as_by_transformers(version: int) -> None:
    pytest.importorskip("transformers")
    from transformers import DeepseekV2Config, DeepseekV3Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    fields = {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "n_routed_experts": 24,
        "num_experts_per_tok": 5,
        "n_group": 6,
        "topk_group": 2,
    }
    torch.manual_seed(0)
    router: torch.nn.Module
    if version == 2:
        config = DeepseekV2Config(topk_method="group_limited_greedy", routed_scaling_factor=1.5, **fields)
        router, routing = DeepseekV2TopkRouter(config), Routing(24, 5, "softmax", False, 0.0, 1.5, 6, 2, 1)
    else:
        router = DeepseekV3TopkRouter(DeepseekV3Config(routed_scaling_factor=2.5, **fields))
        router.e_score_correction_bias.normal_()
        routing = Routing(24, 5, "sigmoid", True, 1e-20, 2.5, 6, 2, 2)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(500, 16)
    with torch.no_grad():
        _, shares, chosen = router(x)
    bias = getattr(router, "e_score_correction_bias", None)
    experts = Experts(routing, router.weight.detach(), None, bias, [], None, False)
    own, own_shares = experts._choose(x @ router.weight.detach().T)
    order, own_order = chosen.argsort(-1), own.argsort(-1)
    assert torch.equal(chosen.gather(1, order), own.gather(1, own_order))
    assert torch.allclose(shares.gather(1, order), own_shares.gather(1, own_order), atol=1e-6)
    assert all(len({*(row // 4).tolist()}) <= 2 for row in own)


@pytest.mark.parametrize(
    ("variant", "fields", "message"),
    [
        ("youtu", {"kv_lora_rank": 31}, "kv_lora_rank must be even"),
        ("youtu", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ("youtu", {"kv_lora_rank": 2**30}, "kv_lora_rank"),
        ("youtu", {"v_head_dim": 0}, "v_head_dim"),
        ("youtu", {"q_lora_rank": "many"}, "q_lora_rank"),
        ("youtu", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("youtu", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ("deepseek_v3", {"n_group": 3}, "n_group"),
        ("deepseek_v3", {"n_group": 4}, "n_group"),
        ("deepseek_v3", {"n_group": -2}, "n_group"),
        ("deepseek_v3", {"topk_group": 3}, "topk_group"),
        ("deepseek_v3", {"num_experts_per_tok": 3}, "topk_group"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "other"]}, "mlp_layer_types"),
        ("minicpm3", {"dim_model_base": 0}, "none of its kind"),
        ("minicpm3", {"scale_depth": "deep"}, "none of its kind"),
        ("llama", {"n_group": 2}, "n_group"),
    ],
)
def test_what_is_refused(variant: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_config(edited_folder(tmp_path / "model", model_folder(variant), **fields))


def test_layers_of_older_folders_are_not_listed(tmp_path: Path) -> None:
    source = model_folder("glm4_moe_lite")
    folder = edited_folder(tmp_path / "m", source, remove=("mlp_layer_types",), first_k_dense_replace=2)
    experts = read_config(folder).experts
    assert experts is not None
    assert experts.layers == (False, False, True)
