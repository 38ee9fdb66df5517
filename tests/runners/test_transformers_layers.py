"""Layers of the most common shape are computed without transformers' modules, and give the same."""

from typing import Any

import pytest
import torch
from support.decoder_harness import Harness, all_logits, make_runner, prompts, requests
from support.foreign_factory import greedy
from support.model_factory import model_folder, reference_model

from chairlift.runners.decoder.runner import DecoderRunner
from chairlift.runners.decoder.transformers_rotation import give_back


def through_transformers(name: str, **settings: Any) -> DecoderRunner:
    return make_runner(model_folder(name), implementation="transformers", **settings)


def layers_of(runner: DecoderRunner) -> list[Any]:
    return list(runner.model._model.model.layers)  # type: ignore[union-attr]


def num_short(runner: DecoderRunner) -> int:
    return sum("forward" in vars(layer) for layer in layers_of(runner))


@pytest.mark.parametrize("ops", ["native", "reference"])
@pytest.mark.parametrize(
    "name", ["llama", "llama_biases", "llama_yarn_attention", "qwen2", "mistral_window", "ministral", "gemma"]
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


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",  # norms of queries and keys
        "granite",  # what is added to a residual is scaled
        "gemma3",  # more norms
        "smollm3",  # layers without rotation
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
