"""Slopes in place of positions, held against transformers' own."""

import pytest
import torch
from support.decoder_harness import all_logits, make_runner, prompts
from support.model_factory import model_folder

from chairlift.folders.alibi import slopes_of_bloom, slopes_of_falcon, slopes_of_mpt

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

HEADS = (1, 2, 4, 12, 14, 32, 71, 112)


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_are_those_of_transformers(heads: int) -> None:
    two = torch.ones(1, 2, dtype=torch.int64)
    raw = {"num_attention_heads": heads, "hidden_size": heads * 64, "alibi": True}
    wanted = modeling_bloom.build_alibi_tensor(two, heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(slopes_of_bloom(raw)), wanted)
    rounded = modeling_falcon.build_alibi_tensor(two, heads, torch.float32)[:, 0, 1] / 8
    torch.testing.assert_close(torch.tensor(slopes_of_falcon(raw)), rounded, rtol=0, atol=0)
    for most in (8, 3):
        steep = slopes_of_mpt(raw | {"attn_config": {"alibi_bias_max": most}})
        torch.testing.assert_close(-torch.tensor(steep), build_mpt_alibi_tensor(heads, 2, most)[:, 0, 0])
    assert slopes_of_falcon(raw | {"alibi": False}) is None


def test_falcon_is_that_of_transformers_as_far_as_that_rounds_nothing() -> None:
    folder, prompt = model_folder("falcon_slopes"), prompts()["100"]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0]
    (found,) = all_logits(make_runner(folder), [prompt])
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
