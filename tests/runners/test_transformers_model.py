"""Families through transformers: the same logits and tokens as its own, however the work is cut into steps."""

import dataclasses
import functools
import re
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.decoder_harness import Harness, all_logits, make_request, make_runner, prompts, requests
from support.foreign_factory import (
    ALIKE,
    FOREIGN,
    NATIVE_TOO,
    REFUSED,
    folder_that_sees,
    foreign_folder,
    foreign_reference,
    greedy,
)
from support.model_factory import edited_folder, model_folder, reference_model
from support.multimodal_factory import THROUGH_TRANSFORMERS, multimodal_folder

from chairlift.errors import UnsupportedModel
from chairlift.folders import transformers_config
from chairlift.folders.multimodal import MULTIMODAL
from chairlift.folders.transformers_config import TransformersConfig
from chairlift.ops.base import Linear
from chairlift.ops.reference import ReferenceOps
from chairlift.ops.select import select_ops
from chairlift.runners.decoder import runner, transformers_parts
from chairlift.runners.decoder.config import DecoderConfig, read_any_config
from chairlift.runners.decoder.runner import DecoderRunner

NUM_OUTPUT = 64
FEW = 20
THOROUGH = ["gpt2", "opt", "starcoder2", "cohere2", "phimoe", "minimax_m2", "deepseek_v3", "gemma4_text"]


@functools.cache
def mixed(name: str) -> dict[str, list[int]]:
    """Greedy continuations in one mixed batch."""
    return Harness(runner_of(name)).generate(requests(), NUM_OUTPUT)


@functools.cache
def expected(name: str) -> dict[str, list[int]]:
    model, guess = foreign_reference(name), mixed(name)
    return {prompt_name: greedy(model, prompt, guess[prompt_name]) for prompt_name, prompt in prompts().items()}


@functools.cache
def runner_of(name: str, ops: str = "native") -> DecoderRunner:
    return make_runner(foreign_folder(FOREIGN[name][0], name), ops=ops, implementation="transformers")


@pytest.mark.parametrize("name", FOREIGN)
def test_logits_equal_transformers(name: str) -> None:
    found = all_logits(runner_of(name), list(prompts().values()))
    for logits, prompt in zip(found, prompts().values(), strict=True):
        with torch.no_grad():
            wanted = foreign_reference(name)(torch.tensor([prompt])).logits[0]
        assert (logits - wanted).abs().max() <= 1e-3 * wanted.abs().max()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in FOREIGN]
)
def test_greedy_tokens_equal_transformers(name: str) -> None:
    """In one mixed batch, and in chunks of 7 tokens, whose last chunks mix with other requests' decodes."""
    assert mixed(name) == expected(name)
    chunked = Harness(runner_of(name)).generate(requests(), FEW, chunk=7)
    assert chunked == {prompt_name: tokens[:FEW] for prompt_name, tokens in expected(name).items()}


def test_a_window_that_kernels_do_not_count_to_hides_nothing(tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "m", model_folder("mistral_window"), sliding_window=2**32 + 1)
    found = all_logits(make_runner(folder, ops="native", implementation="transformers"), [prompts()["100"]])[0]
    wanted = all_logits(make_runner(folder, ops="native"), [prompts()["100"]])[0]
    assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()


def test_a_window_that_layers_are_not_told_of_is_refused(tmp_path: Path) -> None:
    """It may be in a mask alone, and nothing makes masks here."""

    def load(name: str, family: str = "phi", **fields: object) -> None:
        folder = edited_folder(tmp_path / name, foreign_folder(family, family), **fields)
        make_runner(folder, ops="reference", implementation="transformers", max_model_len=16)

    with pytest.raises(UnsupportedModel, match=r"sliding_window=20 is not supported for phi, .*embeddings=20"):
        load("untold", sliding_window=20)
    load("unused", sliding_window=20, use_sliding_window=False)
    load("followed", sliding_window=20, max_position_embeddings=20)
    with pytest.raises(UnsupportedModel, match="sliding_window as a positive whole number, got 0"):
        load("none", "phimoe", sliding_window=0)


def test_models_in_threads_of_their_own_do_not_meet() -> None:
    names = ["gpt2", "opt", "phimoe"]
    runners = [runner_of(name) for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(lambda runner: Harness(runner).generate(requests(), NUM_OUTPUT), runners))
    assert found == [expected(name) for name in names]


@pytest.mark.parametrize("ops", ["native", "reference"])
@pytest.mark.parametrize("name", THOROUGH)
def test_prefix_hits_and_preemption(name: str, ops: str) -> None:
    harness = Harness(runner_of(name, ops))
    size = harness.block_size
    for request in requests("first"):
        harness.add(request)
    harness.step()
    for prompt_name in ("17", "100", "300"):
        prompt = prompts()[prompt_name]
        cached = (len(prompt) - 1) // size * size
        harness.add(make_request(prompt_name, prompt), cached, harness.tables[f"first{prompt_name}"][: cached // size])
    harness.step()
    harness.preempt("100")
    harness.step()
    found = harness.finish(["17", "100", "300"], FEW)
    assert found == {prompt_name: expected(name)[prompt_name][:FEW] for prompt_name in ("17", "100", "300")}


@pytest.mark.parametrize("name", ["gpt2", "phi", "phimoe", "lfm2", "falcon_h1", "nemotron_h"])
def test_bfloat16_and_eight_bits_are_near(name: str) -> None:
    folder = foreign_folder(FOREIGN[name][0], name)
    for settings in ({"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}):
        found = all_logits(
            make_runner(folder, ops="native", implementation="transformers", **settings), list(prompts().values())
        )
        alike, far = [], []
        for logits, prompt in zip(found, prompts().values(), strict=True):
            with torch.no_grad():
                wanted = foreign_reference(name)(torch.tensor([prompt])).logits[0]
            alike.append(torch.cosine_similarity(logits.float(), wanted, dim=-1))
            assert alike[-1].mean() > 0.99
            far.append((logits - wanted).abs().max() / wanted.abs().max())
        # Of a mixture a token may go to another expert.
        assert torch.cat(alike).min() > (0.6 if name == "phimoe" else 0.95)
        # Were the setting ignored, float32 would be far nearer.
        assert max(far) > 1e-4


def test_a_native_family_too_if_it_is_asked_for() -> None:
    runner = make_runner(model_folder("llama"), ops="native", implementation="transformers")
    assert runner.info.ops.endswith("through transformers")
    for logits, prompt in zip(all_logits(runner, list(prompts().values())), prompts().values(), strict=True):
        with torch.no_grad():
            wanted = reference_model("llama")(torch.tensor([prompt])).logits[0]
        assert (logits - wanted).abs().max() <= 1e-3 * wanted.abs().max()
    native = make_runner(model_folder("llama"), ops="native")
    assert runner.model.kv_bytes_per_token() == native.model.kv_bytes_per_token()


@pytest.mark.parametrize(
    "name", ["qwen3_5", "lfm2_vl", "gemma3", "mistral3", "gemma4", "gemma4_larger", *THROUGH_TRANSFORMERS]
)
def test_the_part_for_texts_of_a_model_that_sees(name: str) -> None:
    from transformers import AutoModelForImageTextToText

    folder = multimodal_folder(name) if name in MULTIMODAL or name in THROUGH_TRANSFORMERS else folder_that_sees(name)
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for logits, prompt in zip(
        all_logits(make_runner(folder, ops="native", implementation="transformers"), list(prompts().values())),
        prompts().values(),
        strict=True,
    ):
        with torch.no_grad():
            wanted = whole(input_ids=torch.tensor([prompt])).logits[0]
        assert (logits - wanted).abs().max() <= 1e-3 * wanted.abs().max()


def replaced(runner: DecoderRunner) -> Counter[str]:
    return Counter(type(module).__name__ for module in runner.model._model.modules())  # type: ignore[union-attr]


def test_modules_that_compute_the_same_are_ours() -> None:
    found = replaced(make_runner(model_folder("llama_biases"), ops="native", implementation="transformers"))
    assert (found["RmsNorm"], found["_Mlp"], found["ProjectionPart"], found["_PackedLinear"]) == (5, 2, 6, 2)
    assert (found["Linear"], found["LlamaRMSNorm"]) == (0, 0)
    # Gemma adds one to its norms' weights, and has them in float32.
    assert replaced(make_runner(model_folder("gemma"), ops="native", implementation="transformers"))["RmsNorm"] == 5


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama_tied", "gemma3"])
def test_a_tied_embedding_lies_in_memory_once(name: str, quantization: str) -> None:
    settings = {"ops": "native", "dtype": "bfloat16", "quantization": quantization}
    ours, native = (
        make_runner(model_folder(name), implementation=kind, **settings) for kind in ("transformers", "auto")
    )
    assert replaced(ours)["_HeadEmbedding"] == 1
    # Norms are held in another type.
    assert ours.info.weight_bytes == pytest.approx(native.info.weight_bytes, rel=0.05)


def test_modules_that_only_look_alike_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    norm, mlp = LlamaRMSNorm.forward, LlamaMLP.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: norm(self, x) + 0.1)
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: mlp(self, x) + 0.1)
    runner = make_runner(model_folder("llama"), ops="native", implementation="transformers")
    found = replaced(runner)
    assert (found["RmsNorm"], found["_Mlp"], found["LlamaRMSNorm"], found["LlamaMLP"]) == (0, 0, 5, 2)
    prompt = prompts()["17"]
    with torch.no_grad():
        wanted = reference_model("llama")(torch.tensor([prompt])).logits[0]
    (logits,) = all_logits(runner, [prompt])
    assert (logits - wanted).abs().max() <= 1e-3 * wanted.abs().max()


def test_projections_are_set_apart_for_modules_that_look_at_them_in_other_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    own = LlamaAttention.forward

    def forward(self: LlamaAttention, hidden_states: torch.Tensor, *args: Any, **others: Any) -> Any:
        self.k_proj(hidden_states).view(-1)
        return own(self, hidden_states, *args, **others)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    runner = make_runner(model_folder("llama"), ops="native", implementation="transformers")
    prompt = prompts()["17"]
    with torch.no_grad():
        wanted = reference_model("llama")(torch.tensor([prompt])).logits[0]
    (logits,) = all_logits(runner, [prompt])
    assert (logits - wanted).abs().max() <= 1e-3 * wanted.abs().max()


def test_what_is_put_in_is_held_against_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    part = transformers_parts._Joint.part
    monkeypatch.setattr(transformers_parts._Joint, "part", lambda self, index, x: part(self, index, x) * 2)
    with pytest.raises(UnsupportedModel, match="with our products in place of its own"):
        make_runner(model_folder("llama"), ops="native", implementation="transformers")


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_honoured_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what its modules do, where no table has the family."""
    monkeypatch.setattr(transformers_config, "REFUSED", ())
    model_type, _, problem = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=problem):
        make_runner(foreign_folder(model_type, name), ops="native", implementation="transformers")


def test_an_old_transformers_is_named_where_it_may_be_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_config, "REFUSED", ())
    model_type, _, problem = REFUSED["zamba2"]
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    with pytest.raises(UnsupportedModel, match=f"{problem}.* this is transformers 5.17.0, .* 5.21 or newer"):
        make_runner(foreign_folder(model_type, "zamba2"), ops="native", implementation="transformers")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"auto_map": {"AutoModel": "modeling.X"}, "model_type": "phi9"}, "auto_map names code.* no 'phi9' of its own"),
        ({"auto_map": {"AutoModel": "modeling.X"}, "model_type": "../auto"}, "auto_map names code"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config: quant_method 'hqq' is not read"),
        ({"quantization_config": "awq"}, "quantization_config: quant_method None is not read"),
        ({"compression_config": {"quant_method": "hqq"}}, "quantization_config: quant_method 'hqq' is not read"),
        ({"architectures": ["PhiModel"]}, "none writes texts"),
        ({"hidden_size": 2**40}, "no model with more"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"alibi": True}, "alibi=True means slopes .* native kernels alone compute"),
        *(
            ({"model_type": name}, f"model_type '{name}' is not supported: it has {refused.what}, and {refused.why}")
            for refused in transformers_config.REFUSED
            for name in refused.models
        ),
    ],
)
def test_folders_are_refused_by_name_before_anything_is_loaded(
    fields: dict[str, object], problem: str, tmp_path: Path
) -> None:
    folder = edited_folder(tmp_path / "m", foreign_folder("phi", "phi"), **fields)
    with pytest.raises(UnsupportedModel, match=problem):
        read_any_config(folder, "auto")


@pytest.mark.parametrize("variant", ["bloom", "mpt", "falcon_slopes"])
def test_slopes_are_computed_by_native_kernels_alone(variant: str) -> None:
    folder = model_folder(variant)
    assert isinstance(read_any_config(folder, "auto"), DecoderConfig)
    with pytest.raises(UnsupportedModel, match="means slopes in place of positions, which native kernels alone"):
        read_any_config(folder, "transformers")


def test_code_in_a_folder_is_not_asked_where_transformers_has_the_family(tmp_path: Path) -> None:
    own = {"AutoConfig": "configuration_phi.PhiConfig", "AutoModelForCausalLM": "modeling_phi.PhiForCausalLM"}
    folder = edited_folder(tmp_path / "m", foreign_folder("phi", "phi"), auto_map=own)
    (folder / "modeling_phi.py").write_text("raise SystemExit('was run')")
    (folder / "configuration_phi.py").write_text("raise SystemExit('was run')")
    make_runner(folder, ops="reference", implementation="transformers")


def test_of_two_lists_of_frequencies_one_holds_for_all(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "short_factor": [1.0],
        "long_factor": [2.0],
    }
    for name, where in (("new", {"rope_parameters": rope}), ("old", {"rope_scaling": {"type": "longrope"}})):
        fields = where | {"original_max_position_embeddings": 64, "max_position_embeddings": 256}
        folder = edited_folder(tmp_path / name, foreign_folder("phi", "phi"), **fields)
        assert read_any_config(folder, "transformers").max_positions == 64
    plain = edited_folder(tmp_path / "plain", foreign_folder("phi", "phi"), max_position_embeddings=256)
    assert read_any_config(plain, "transformers").max_positions == 256


def test_a_large_weight_does_not_hide_what_a_norm_adds() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    norm = Gemma3RMSNorm(2560).to(torch.bfloat16)
    with torch.no_grad():
        norm.weight.normal_(0, 3, generator=torch.Generator().manual_seed(0))
        norm.weight[0] = 300
    found = transformers_parts._norm_like(norm, select_ops("reference", torch.device("cpu"), torch.bfloat16, 64))
    assert found is not None
    assert torch.equal(found.scale, 1 + norm.weight.detach().float())


def test_what_was_replaced_is_gone_before_the_next_is_packed() -> None:
    """Else a loading model would take its memory twice."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))

        def get_output_embeddings(self) -> None:
            return

    class QuantizationConfig(ReferenceOps):
        def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
            there.append(sum(known() is not None for known in weights))
            return super().linear(weight.clone(), bias)

    model, there = Model(), list[int]()
    weights = [weakref.ref(layer.weight) for layer in model.layers]
    transformers_parts.put_in(model, QuantizationConfig())
    assert there == [4, 3, 2, 1]


def test_logits_for_more_tokens_than_the_vocabulary_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rows may choose is read as far as their logits go."""
    folder = foreign_folder("phi", "phi")
    known = read_any_config(folder, "transformers")
    assert isinstance(known, TransformersConfig)
    smaller = dataclasses.replace(known, vocab_size=known.vocab_size - 1)
    monkeypatch.setattr(runner, "read_any_config", lambda *given: smaller)
    with pytest.raises(UnsupportedModel, match=f"logits for {known.vocab_size} tokens"):
        make_runner(folder, ops="native", implementation="transformers")


def test_families_that_are_refused_are_called_as_transformers_calls_them() -> None:
    names = [name for refused in transformers_config.REFUSED for name in refused.models]
    assert all(map(transformers_config._is_known, names))


def test_parts_of_weights_need_no_index(tmp_path: Path) -> None:
    source = foreign_folder("phi", "phi")
    folder = edited_folder(tmp_path / "parts", source)
    tensors = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    for number in (1, 2):
        part = dict(tensors[number - 1 :: 2])
        save_file(part, folder / f"model-0000{number}-of-00002.safetensors", {"format": "pt"})
    found, wanted = (all_logits(make_runner(each, ops="native"), [prompts()["17"]])[0] for each in (folder, source))
    assert torch.equal(found, wanted)
    assert sorted(path.name for path in folder.iterdir() if "model" in path.name) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_weights_that_are_not_there_are_not_made_up(tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "more", foreign_folder("phi", "phi"), num_hidden_layers=9)
    with pytest.raises(UnsupportedModel, match=r"by config\.json it has .* numbers, and its files hold"):
        make_runner(folder, ops="native")
    # As many numbers, by other names.
    folder = edited_folder(tmp_path / "other", foreign_folder("phi", "phi"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.input_layernorm.gain"] = tensors.pop("model.layers.1.input_layernorm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"missing tensors: model\.layers\.1\.input_layernorm\.weight"):
        make_runner(folder, ops="native")


@pytest.mark.parametrize("shape", [[128, 64], [64, 64], [1, 128, 64]])
def test_a_tensor_of_another_shape_is_named(shape: list[int], tmp_path: Path) -> None:
    """Whether there are as many numbers as config.json asks for, or not."""
    folder, name = edited_folder(tmp_path / "m", foreign_folder("phi", "phi")), "model.layers.1.mlp.fc2.weight"
    tensors = load_file(folder / "model.safetensors")
    assert list(tensors[name].shape) == [64, 128]
    tensors[name] = torch.zeros(shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = f"tensor {name!r} has shape {shape}, but config.json asks for [64, 128]"
    with pytest.raises(UnsupportedModel, match=re.escape(said)):
        make_runner(folder, ops="native")


def test_experts_of_unlike_shapes_are_named(tmp_path: Path) -> None:
    """Transformers says in its log alone which can't be put together."""
    folder = edited_folder(tmp_path / "m", foreign_folder("lfm2_moe", "lfm2_moe"))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("experts.1.w2.weight"))
    tensors[name] = tensors[name].repeat(2, 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = rf"what '{name.partition('.1.')[0]}\.down_proj' is made of can't be put together: .*\[64, 64\].*\[128, 64\]"
    with pytest.raises(UnsupportedModel, match=said):
        make_runner(folder, ops="native", implementation="transformers")


def test_tokens_that_see_what_follows_are_refused(tmp_path: Path) -> None:
    """Of Llama only a mask tells, and its layers would attend as ever."""
    folder = edited_folder(tmp_path / "m", model_folder("llama"), is_causal=False)
    with pytest.raises(UnsupportedModel, match="is_causal=False is not supported through transformers"):
        make_runner(folder, implementation="transformers")


def test_without_transformers_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_config, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match=r"pip install 'chairlift\[transformers\]'"):
        read_any_config(foreign_folder("phi", "phi"), "auto")
    with pytest.raises(UnsupportedModel, match="these are: llama"):
        read_any_config(foreign_folder("phi", "phi"), "native")


def test_the_page_of_models_names_these_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import models_doc

    kinds = [kind for name, (kind, _) in FOREIGN.items() if name not in NATIVE_TOO]
    assert list(models_doc.FOREIGN) == list(dict.fromkeys(kinds))
    assert {*models_doc.SEEING} == transformers_config._READ_MORE - MULTIMODAL.keys()
    assert list(models_doc.KNOWN_MULTIMODAL) == list(MULTIMODAL)


@pytest.mark.parametrize("name", ["cohere", "stablelm_parallel"])
def test_what_a_native_family_has_that_is_not_native_goes_through_transformers(name: str) -> None:
    folder = foreign_folder(FOREIGN[name][0], name)
    assert isinstance(read_any_config(folder, "auto"), TransformersConfig)
    with pytest.raises(UnsupportedModel, match="not supported by the native kernels"):
        read_any_config(folder, "native")
