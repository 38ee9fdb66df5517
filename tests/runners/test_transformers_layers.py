"""Layers of the most common shape, and mixers with states, give the same without transformers' modules."""

from typing import Any

import pytest
import torch
from support.decoder_harness import Harness, all_logits, make_runner, prompts, requests
from support.foreign_factory import FOREIGN, foreign_folder, foreign_reference, greedy
from support.model_factory import model_folder, reference_model

from chairlift.ops.fused_mlp import FusedMlp
from chairlift.runners.decoder import transformers_mixers, transformers_states
from chairlift.runners.decoder.runner import DecoderRunner
from chairlift.runners.decoder.transformers_rotation import give_back
from chairlift.runners.decoder.wide_convolutions import WideConvolutions


def through_transformers(name: str, **settings: Any) -> DecoderRunner:
    return make_runner(model_folder(name), implementation="transformers", **settings)


def layers_of(runner: DecoderRunner) -> list[Any]:
    return list(runner.model._model.base_model.layers)  # type: ignore[union-attr]


def with_states(name: str, **settings: Any) -> DecoderRunner:
    return make_runner(foreign_folder(FOREIGN[name][0], name), ops="native", implementation="transformers", **settings)


def with_lfm2(**settings: Any) -> DecoderRunner:
    return with_states("lfm2", **settings)


def num_short_mixers(runner: DecoderRunner) -> int:
    spanned = runner.model._stateful._spanned  # type: ignore[union-attr]
    return sum(getattr(each, "__module__", None) == transformers_mixers.__name__ for each in spanned.values())


def num_short(runner: DecoderRunner) -> int:
    return sum("forward" in vars(layer) for layer in layers_of(runner))


@pytest.mark.parametrize("ops", ["native", "reference"])
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama_biases", "llama_yarn_attention", "qwen2", "qwen3", "mistral_window", "ministral", "gemma"),
        # Some of its layers rotate nothing, so its attention is run as it is.
        "smollm3",
    ],
)
def test_they_give_the_same_logits_and_tokens(name: str, ops: str) -> None:
    runner = through_transformers(name, ops=ops)
    assert num_short(runner) == len(layers_of(runner)) > 0
    model = reference_model(name)
    for logits, prompt in zip(all_logits(runner, list(prompts().values())), prompts().values(), strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0]
        assert (logits - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    found = Harness(runner).generate(requests(), 16, chunk=7)
    assert found == {name: greedy(model, prompt, found[name]) for name, prompt in prompts().items()}


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}])
def test_they_are_so_in_fewer_bits_too(settings: dict[str, str]) -> None:
    runner, own = (through_transformers("llama", ops="native", **settings) for _ in range(2))
    assert num_short(runner) > 0
    give_back(layers_of(own))
    assert num_short(own) == 0
    for logits, wanted in zip(*(all_logits(each, list(prompts().values())) for each in (runner, own)), strict=True):
        assert torch.cosine_similarity(logits.float(), wanted.float(), dim=-1).min() > 0.999


@pytest.mark.parametrize("make", [lambda **how: through_transformers("llama", ops="native", **how), with_lfm2])
def test_an_mlp_its_norm_and_both_additions_are_one_call(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, calls, call = make(quantization="int8"), [], FusedMlp.__call__
    monkeypatch.setattr(FusedMlp, "__call__", lambda *given: (calls.append(given[0]), call(*given)))
    all_logits(runner, [[1, 2, 3]])
    assert len(set(calls)) == num_short(runner) == len(layers_of(runner)) > 0


@pytest.mark.parametrize(
    "name",
    [
        "granite",  # what is added to a residual is scaled
        "gemma3",  # more norms
    ],
)
def test_all_others_are_left_as_they_are(name: str) -> None:
    assert num_short(through_transformers(name, ops="native")) == 0


def test_what_only_looks_like_one_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    def forward(self: Any, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **others)
        hidden_states = hidden_states + 1.5 * attended
        made: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + made

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    assert num_short(through_transformers("llama", ops="native")) == 0


# By layers and by mixers with states: how many there are of each.
@pytest.mark.parametrize(
    ("name", "layers", "mixers"),
    [
        ("lfm2", 4, 3),
        ("lfm2_moe", 4, 3),
        ("lfm3", 0, 2),
        ("qwen3_5_text", 4, 3),
        ("qwen3_5_moe_text", 4, 3),
        ("qwen3_next", 4, 0),
        ("granitemoehybrid", 0, 3),
        ("bamba", 0, 3),
        ("nemotron_h", 0, 2),
        ("mamba2", 0, 2),
        ("jamba", 4, 0),
    ],
)
def test_those_with_states_are_so_too(name: str, layers: int, mixers: int) -> None:
    runner = with_states(name)
    assert (num_short(runner), num_short_mixers(runner)) == (layers, mixers)
    model = foreign_reference(name)
    for logits, prompt in zip(all_logits(runner, list(prompts().values())), prompts().values(), strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0]
        assert (logits - wanted).abs().max() <= 1e-3 * wanted.abs().max()


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int4"}])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "granitemoehybrid"])
def test_mixers_are_so_in_fewer_bits_too(name: str, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = with_states(name, **settings)
    monkeypatch.setattr(transformers_states, "shortened", lambda *_: None)
    own = with_states(name, **settings)
    assert num_short_mixers(runner) == 3 > num_short_mixers(own) == 0
    for logits, wanted in zip(*(all_logits(each, list(prompts().values())) for each in (runner, own)), strict=True):
        assert torch.cosine_similarity(logits.float(), wanted.float(), dim=-1).min() > 0.999


def test_a_mixer_that_only_looks_like_one_is_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.lfm2 import modeling_lfm2

    def forward(self: Any, hidden_states: torch.Tensor, cache: Any = None, **_: Any) -> torch.Tensor:
        first, gate, x = self.in_proj(hidden_states).transpose(-1, -2).chunk(3, dim=-2)
        gated = first * x
        if cache is not None:
            cache.get_conv_state(self.layer_idx, state_idx=0)
            gated = cache.update_conv_state(gated, self.layer_idx, conv_kernel_size=self.conv_kernel_size)
        given = modeling_lfm2.causal_conv1d_fn(gated, self.conv.weight.squeeze(1), self.conv.bias)[..., -x.shape[-1] :]
        out: torch.Tensor = self.out_proj((gate * given + first).transpose(-1, -2).contiguous())
        return out

    monkeypatch.setattr(modeling_lfm2.Lfm2ShortConv, "forward", forward)
    runner = with_states("lfm2")
    assert num_short_mixers(runner) == 0
    model = foreign_reference("lfm2")
    for logits, prompt in zip(all_logits(runner, list(prompts().values())), prompts().values(), strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0]
        assert (logits - wanted).abs().max() <= 1e-3 * wanted.abs().max()


def test_convolutions_of_bfloat16_are_computed_in_float32_and_rounded() -> None:
    x, weight = torch.randn(1, 8, 11), torch.randn(8, 1, 4)
    wanted = torch.conv1d(x.bfloat16().float(), weight.bfloat16().float(), None, padding=3, groups=8)
    with WideConvolutions():
        for_each = torch.conv1d(x.bfloat16(), weight.bfloat16(), None, padding=3, groups=8)
        by_name = torch.conv1d(input=x.bfloat16(), weight=weight.bfloat16(), padding=3, groups=8)
        exact = torch.conv1d(x, weight, None, padding=3, groups=8)
    assert for_each.dtype == by_name.dtype == torch.bfloat16
    assert torch.equal(for_each, wanted.bfloat16())
    assert torch.equal(by_name, wanted.bfloat16())
    assert torch.equal(exact, torch.conv1d(x, weight, None, padding=3, groups=8))
