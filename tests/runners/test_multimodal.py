"""The part for texts of models that read more: natively, as transformers' whole model computes it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.decoder_harness import Harness, all_logits, make_runner, prompts, requests
from support.encoder_factory import encodings, sentence_folder
from support.foreign_factory import GEMMA3_TEXTS, gemma3_folder, greedy
from support.model_factory import edited_folder
from support.multimodal_factory import (
    MODELS,
    flat_folder,
    folder_by_modules,
    multimodal_folder,
    multimodal_reference,
)

from chairlift.config.items import ItemConfig
from chairlift.errors import UnsupportedModel
from chairlift.folders import multimodal
from chairlift.folders.decoder_families import FAMILIES
from chairlift.folders.kind import is_encoder
from chairlift.folders.multimodal import MULTIMODAL
from chairlift.runners.check_model import check_model
from chairlift.runners.decoder.config import DecoderConfig, read_any_config
from chairlift.runners.decoder.runner import DecoderRunner
from chairlift.runners.encoder.runner import EncoderRunner

# Reference operations know no layers with states.
WITH_STATES = ("qwen3_5", "qwen3_5_moe", "lfm2_vl")


def check_logits(runner: DecoderRunner, name: str) -> None:
    foreign = name in WITH_STATES and runner.config.ops == "reference"
    assert runner.info.ops.endswith("through transformers") is foreign
    for logits, prompt in zip(all_logits(runner, list(prompts().values())), prompts().values(), strict=True):
        with torch.no_grad():
            wanted = multimodal_reference(name)(input_ids=torch.tensor([prompt])).logits[0]
        # Which the whole model leaves out in transformers, and the part for texts does not.
        wanted *= MODELS[name][1].get("logit_scale", 1)
        assert (logits - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_all_families_are_tried() -> None:
    assert {name.removesuffix("_growing") for name in MODELS} == MULTIMODAL.keys()
    assert all(family.called.get(family.text, family.text) in FAMILIES for family in MULTIMODAL.values())


@pytest.mark.parametrize("ops", ["native", "reference"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, ops: str) -> None:
    check_logits(make_runner(multimodal_folder(name), ops=ops), name)


@pytest.mark.parametrize("name", MODELS)
def test_tensors_may_be_called_as_modules_are(name: str, tmp_path: Path) -> None:
    check_logits(make_runner(folder_by_modules(name, tmp_path / "model"), ops="native"), name)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_older_folders_have_one_config_for_all_parts(name: str, tmp_path: Path) -> None:
    check_logits(make_runner(flat_folder(name, tmp_path / "model"), ops="native"), name)


@pytest.mark.parametrize("name", ["gemma3", "mistral3_growing", "qwen3_vl", "qwen3_5", "lfm2_vl"])
def test_greedy_tokens_equal_transformers(name: str) -> None:
    harness = Harness(make_runner(multimodal_folder(name), ops="native"))
    found = harness.generate(requests(), 64)
    for key, prompt in prompts().items():
        assert greedy(multimodal_reference(name), prompt, found[key]) == found[key]
    assert harness.generate(requests(), 64, chunk=7) == found


def test_one_that_embeds(tmp_path: Path) -> None:
    """As its part for texts would by itself: what is pooled is what transformers' last norm gives."""
    folder = sentence_folder(tmp_path / "model", multimodal_folder("qwen3_vl"), [("Pooling", {"pooling_mode": "mean"})])
    assert is_encoder(folder)
    assert not is_encoder(multimodal_folder("qwen3_vl"))
    check_model(ItemConfig(model=str(folder), kind="encoder"))
    runner = EncoderRunner(str(folder), dtype="float32", num_threads=1)
    runner.load()
    texts = encodings(lengths=(1, 40, 200))
    for found, text in zip(runner.run(texts), texts, strict=True):
        with torch.no_grad():
            states = multimodal_reference("qwen3_vl").model(input_ids=torch.tensor([text.token_ids]))[0][0]
        assert isinstance(found, np.ndarray)
        assert torch.cosine_similarity(torch.from_numpy(found), states.mean(0), dim=0) >= 0.999999


@pytest.mark.parametrize("name", multimodal._LEFT_OUT)
def test_sizes_that_folders_leave_out_are_those_of_the_part_s_class(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

    own = Qwen3VLTextConfig() if name == "qwen3_vl_text" else transformers.AutoConfig.for_model(name)
    for field, value in multimodal._LEFT_OUT[name].items():
        found = own.rope_parameters["rope_theta"] if field == "rope_theta" else getattr(own, field)
        assert (field, found) == (field, value)


@pytest.mark.parametrize("size", GEMMA3_TEXTS)
def test_what_gemma_3_leaves_out(size: str, tmp_path: Path) -> None:
    from transformers import Gemma3TextConfig

    own = Gemma3TextConfig(**GEMMA3_TEXTS[size])
    found = read_any_config(gemma3_folder(tmp_path / "model", size), "auto")
    assert isinstance(found, DecoderConfig)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (
        own.num_attention_heads,
        own.num_key_value_heads,
        own.head_dim,
    )
    assert found.attention_scale == own.query_pre_attn_scalar**-0.5
    assert (found.vocab_size, found.max_positions, found.dtype) == (
        own.vocab_size,
        own.max_position_embeddings,
        "bfloat16",
    )
    assert [window is not None for window in found.windows] == [kind == "sliding_attention" for kind in own.layer_types]
    assert {rope.theta for rope in found.ropes} == {1e4, 1e6}


def test_tensors_of_no_part_are_refused(tmp_path: Path) -> None:
    """What belongs to a part that is left out is known by its name."""
    folder = edited_folder(tmp_path / "model", multimodal_folder("llava"), text_config=MODELS["llava"][1])
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors | {"model.ears.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"unexpected tensor 'model\.ears\.weight'"):
        make_runner(folder, ops="native")


def test_a_part_for_texts_of_an_unknown_family_is_named(tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "model", multimodal_folder("llava"), text_config={"model_type": "phi"})
    with pytest.raises(UnsupportedModel, match="model_type 'phi'"):
        make_runner(folder, ops="native", implementation="native")
    for wrong in ("phi", 7):
        folder = edited_folder(tmp_path / f"model{wrong}", multimodal_folder("llava"), text_config=wrong)
        with pytest.raises(UnsupportedModel, match="text_config"):
            make_runner(folder, ops="native")
