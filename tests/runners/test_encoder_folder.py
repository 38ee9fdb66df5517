"""What a folder says: poolings, dense layers, limits, tasks; and what is refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support.encoder_factory import (
    encoder_folder,
    encodings,
    expected_states,
    expected_words,
    sentence_folder,
    splade_folder,
)
from support.model_factory import edited_folder, model_folder, randomize

from chairlift.config.items import ItemConfig
from chairlift.errors import ConfigError, InvalidRequest, UnsupportedModel
from chairlift.folders.kind import is_encoder
from chairlift.folders.sentence_files import POOLINGS, ChatFormat, SentenceFiles
from chairlift.runners.check_model import check_model
from chairlift.runners.encoder import runner as encoder_runner
from chairlift.runners.encoder.runner import EncoderRunner
from chairlift.runners.items import Encoding

POOLED = {
    "cls": lambda states: states[0],
    "max": lambda states: states.max(0),
    "mean": lambda states: states.mean(0),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / np.sqrt(len(states)),
    "weightedmean": lambda states: np.average(states, 0, np.arange(1, len(states) + 1)),
    "lasttoken": lambda states: states[-1],
}


def load(folder: Path, **settings: Any) -> EncoderRunner:
    runner = EncoderRunner(str(folder), **{"dtype": "float32", "num_threads": 1} | settings)
    runner.load()
    return runner


def vectors(runner: EncoderRunner, texts: list[Encoding]) -> NDArray[np.float32]:
    found = runner.run(texts)
    assert not any(isinstance(vector, Exception) for vector in found)
    return np.stack(found)  # type: ignore[arg-type]


@pytest.mark.parametrize("ops", ["reference", "auto"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_poolings(pooling: str, ops: str, tmp_path: Path) -> None:
    source, texts = encoder_folder("bert"), encodings()
    folder = sentence_folder(tmp_path / "model", source, [("Pooling", {"pooling_mode": pooling}), ("Normalize", {})])
    wanted = np.stack([POOLED[pooling](states) for states in expected_states(source, texts)])
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    runner = load(folder, ops=ops, dtype="auto" if ops == "auto" else "float32")
    assert (runner.info.task, runner.info.pooling, runner.info.normalized) == ("embed", pooling, True)
    assert runner.info.dimensions == 64
    found = vectors(runner, texts)
    assert (found * wanted).sum(1).min() > (0.9999 if ops == "reference" else 0.998)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("ops", ["reference", "auto"])
def test_vectors_of_tokens_are_those_of_the_backbone(ops: str, tmp_path: Path) -> None:
    source, texts = encoder_folder("bert"), encodings()
    folder = sentence_folder(tmp_path / "model", source, [("Pooling", {"pooling_mode": "mean"}), ("Normalize", {})])
    runner = load(folder, ops=ops)
    asked = [Encoding(text.token_ids, text.type_ids, index % 2 == 0) for index, text in enumerate(texts)]
    found = runner.run([*asked, Encoding([], None, True)])
    assert isinstance(found.pop(), InvalidRequest)
    for encoding, vector, states in zip(asked, found, expected_states(source, texts), strict=True):
        assert not isinstance(vector, Exception)
        wanted = states if encoding.every_token else states.mean(0) / np.linalg.norm(states.mean(0))
        np.testing.assert_allclose(vector, wanted, atol=2e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("ops", ["reference", "auto"])
@pytest.mark.parametrize("variant", ["bert", "bert_tanh", "roberta", "distilbert", "mpnet", "gte"])
def test_splade_weighs_words(variant: str, ops: str, tmp_path: Path) -> None:
    folder = splade_folder(tmp_path / "model", variant)
    runner = load(folder, ops=ops)
    assert (runner.info.task, runner.info.pooling, runner.info.dimensions) == ("embed", "splade", 320)
    texts = encodings()
    wanted = expected_words(folder, texts)
    found = vectors(runner, texts)
    np.testing.assert_allclose(found, wanted, atol=2e-4 * wanted.max())
    assert (found == 0).any()
    assert runner.run([Encoding([5, 6], None, True)])[0].shape == (2, 64)  # type: ignore[union-attr]


def test_splade_weighs_words_of_some_tokens_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, rows = load(splade_folder(tmp_path / "model", "bert")), list[int]()
    wanted = vectors(runner, encodings())
    monkeypatch.setattr(encoder_runner, "_WORD_ROWS", 7)
    monkeypatch.setattr(runner, "_stages", [lambda x: rows.append(len(x)) or x, *runner._stages])
    np.testing.assert_allclose(vectors(runner, encodings()), wanted, atol=1e-5 * wanted.max())
    assert max(rows) == 7
    assert sum(rows) == sum(len(each.token_ids) for each in encodings())


def test_other_splades_are_refused_by_name(tmp_path: Path) -> None:
    for number, (name, value) in enumerate((("pooling_strategy", "sum"), ("activation_function", "log1p_relu"))):
        folder = splade_folder(tmp_path / str(number), "bert", **{name: value})
        with pytest.raises(UnsupportedModel, match=f"{name} = '{value}' is not supported"):
            load(folder)
    with pytest.raises(UnsupportedModel, match="SPLADE with model_type 'modernbert'"):
        load(splade_folder(tmp_path / "modern", "modernbert"))


def test_the_modules_of_a_splade_that_newer_versions_save(tmp_path: Path) -> None:
    folder = splade_folder(tmp_path / "model", "bert")
    wanted = vectors(load(folder), encodings())
    modules = folder / "modules.json"
    modules.write_text(modules.read_text().replace("MLMTransformer", "Transformer"))
    with pytest.raises(UnsupportedModel, match="'feature-extraction' is not supported with SpladePooling"):
        load(folder)
    with_settings(folder, transformer_task="fill-mask", module_output_name="token_embeddings")
    runner = load(folder)
    assert (runner.info.task, runner.info.pooling, runner.info.dimensions) == ("embed", "splade", 320)
    assert np.array_equal(vectors(runner, encodings()), wanted)
    pooled = sentence_folder(tmp_path / "pooled", encoder_folder("bert"), [("Pooling", {})])
    with pytest.raises(UnsupportedModel, match="transformer_task = 'fill-mask' is not supported with Pooling"):
        with_settings(pooled, transformer_task="fill-mask")


def test_poolings_of_older_files_are_concatenated(tmp_path: Path) -> None:
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
    source, texts = encoder_folder("roberta"), encodings()
    runner = load(sentence_folder(tmp_path / "model", source, [("Pooling", flags)]))
    assert (runner.info.pooling, runner.info.dimensions, runner.info.normalized) == ("cls+mean", 128, False)
    wanted = [np.concatenate((states[0], states.mean(0))) for states in expected_states(source, texts)]
    np.testing.assert_allclose(vectors(runner, texts), wanted, atol=1e-4 * np.abs(wanted).max())


def test_without_files_of_sentence_transformers(tmp_path: Path) -> None:
    runner = load(encoder_folder("bert"))
    assert (runner.info.pooling, runner.info.normalized, runner.info.max_tokens) == ("mean", False, 402)
    assert load(encoder_folder("roberta")).info.max_tokens == 400
    wanted = [states.mean(0) for states in expected_states(encoder_folder("bert"), encodings())]
    np.testing.assert_allclose(vectors(runner, encodings()), wanted, atol=1e-4 * np.abs(wanted).max())


def pickled(folder: Path, parts: int = 1) -> Path:
    """The same with weights as older repositories have them, some of which are views of others."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors = {name: tensor.T.clone().T if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    for part in range(parts):
        some = {name: tensor for index, (name, tensor) in enumerate(tensors.items()) if index % parts == part}
        torch.save(some, folder / f"pytorch_model-{part}.bin")
    return folder


def converted(folder: Path, made: Path) -> None:
    """Do as the refusal of a folder advises, to what lies in a folder in it."""
    with pytest.raises(UnsupportedModel, match="may run code when it is read") as refused:
        load(folder)
    found = re.search(r'convert it: python -c "(.*)"', str(refused.value))
    assert found is not None
    assert str(made) in found[1]
    exec(found[1], {})


def test_pickled_weights_are_refused_with_what_converts_them(tmp_path: Path) -> None:
    dense = {"in_features": 64, "out_features": 24, "bias": False, "activation_function": "torch.nn.Identity"}
    modules = [("Pooling", {}), ("Dense", dense)]
    folder = sentence_folder(tmp_path / "model", encoder_folder("bert"), modules)
    save_file({"linear.weight": torch.randn(24, 64)}, folder / "2_Dense" / "model.safetensors")
    wanted = vectors(load(folder), encodings())
    pickled(pickled(folder, 2) / "2_Dense")
    converted(folder, folder)
    converted(folder, folder / "2_Dense")
    assert np.array_equal(vectors(load(folder), encodings()), wanted)


@pytest.mark.parametrize("activation", ["torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"])
def test_a_dense_module(activation: str, tmp_path: Path) -> None:
    settings = {"in_features": 64, "out_features": 24, "bias": True, "activation_function": activation}
    folder = sentence_folder(
        tmp_path / "model", encoder_folder("bert"), [("Pooling", {"pooling_mode": "mean"}), ("Dense", settings)]
    )
    weight, bias = torch.randn(24, 64) / 8, torch.randn(24)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    runner = load(folder)
    assert (runner.info.dimensions, runner.info.hidden_size) == (24, 64)
    wanted = np.stack([s.mean(0) for s in expected_states(encoder_folder("bert"), encodings())]) @ weight.numpy().T
    wanted = wanted + bias.numpy()
    if "Tanh" in activation:
        wanted = np.tanh(wanted)
    np.testing.assert_allclose(vectors(runner, encodings()), wanted, atol=2e-4 * np.abs(wanted).max())


@pytest.mark.parametrize(("variant", "labels"), [("modernbert", 1), ("bert", 3)])
def test_a_head_that_is_made_of_modules(variant: str, labels: int, tmp_path: Path) -> None:
    """As the rerankers made of Ettin have it."""
    source, texts = encoder_folder(variant), encodings()
    first = {"in_features": 64, "out_features": 64, "bias": False, "module_output_name": "sentence_embedding"}
    first["activation_function"] = "torch.nn.modules.activation.GELU"
    last = {"in_features": 64, "out_features": labels, "bias": True, "module_output_name": "scores"}
    last["activation_function"] = "torch.nn.modules.linear.Identity"
    modules = [("Pooling", {"pooling_mode": "cls"}), ("Dense", first), ("LayerNorm", {"dimension": 64})]
    folder = sentence_folder(tmp_path / "model", source, [*modules, ("Dense", last)])
    torch.manual_seed(0)
    parts = {"2_Dense": torch.nn.Linear(64, 64, False), "3_LayerNorm": torch.nn.LayerNorm(64)}
    parts["4_Dense"] = torch.nn.Linear(64, labels)
    randomize(parts["3_LayerNorm"])
    for name, part in parts.items():
        prefix = "norm" if "Norm" in name else "linear"
        tensors = {f"{prefix}.{key}": tensor for key, tensor in part.state_dict().items()}
        save_file(tensors, folder / name / "model.safetensors")
    runner = load(folder)
    task = "rerank" if labels == 1 else "classify"
    assert (runner.info.task, runner.info.pooling, runner.info.dimensions) == (task, "cls", None)
    assert runner.info.labels == tuple(f"LABEL_{index}" for index in range(labels))
    states = torch.from_numpy(np.stack([states[0] for states in expected_states(source, texts)]))
    with torch.no_grad():
        made = torch.nn.functional.gelu(parts["2_Dense"](states))
        wanted = parts["4_Dense"](parts["3_LayerNorm"](made)).numpy()
    np.testing.assert_allclose(vectors(runner, texts), wanted, atol=2e-4 * np.abs(wanted).max())


def test_the_longest_text_is_the_tokenizers_where_modules_say_nothing(tmp_path: Path) -> None:
    """As sentence-transformers saves it since version 5.4."""
    folder = sentence_folder(tmp_path / "model", encoder_folder("bert"), [("Pooling", {})])
    plain = edited_folder(tmp_path / "plain", encoder_folder("bert"))
    for limit, most in ((48, 48), (10**30, 402), (1e30, 402), (None, 402)):
        for each in (folder, plain):
            (each / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
        assert load(folder).info.max_tokens == most
        # Nobody has said that it is a model of sentence-transformers.
        assert load(plain).info.max_tokens == 402
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 48}))
    assert with_settings(folder, max_seq_length=32).max_tokens == 32
    found = with_settings(folder, processing_kwargs={"text": {"max_length": 24, "padding": True, "truncation": True}})
    assert found.max_tokens == 24
    assert with_settings(folder, processing_kwargs={"common": {"max_length": 16}}).max_tokens == 16
    for part, said in (
        ({"text": {"max_length": "9"}}, "text.max_length must be a positive whole number, got '9'"),
        ({"common": {"add_special_tokens": False}}, "common.add_special_tokens is not supported"),
        ({"text": [9]}, "text must be an object"),
    ):
        with pytest.raises(UnsupportedModel, match=said):
            with_settings(folder, processing_kwargs=part)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 0}')
    with pytest.raises(UnsupportedModel, match="model_max_length must be a positive whole number, got 0"):
        with_settings(folder)


def test_limits_and_prompts(tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "model", encoder_folder("bert"))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": true}')
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    files = SentenceFiles.read(folder)
    assert (files.prompts, files.default_prompt, files.lowercase) == ({"query": "query: "}, "query", True)
    assert load(folder).info.max_tokens == 32
    assert load(folder, max_tokens=100).info.max_tokens == 100
    with pytest.raises(ConfigError, match=r"max_tokens \(403\)"):
        load(folder, max_tokens=403)


def test_threads_are_set_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(encoder_runner, "has_bf16_products", lambda: seen.append(torch.get_num_threads()))
    torch.set_num_threads(3)
    try:
        load(encoder_folder("bert"), dtype="auto", num_threads=2)
    finally:
        torch.set_num_threads(before)
    assert seen == [2]


def test_what_is_wrong_with_one_text_is_its_own_error() -> None:
    good = encodings()[0]
    bad = [
        Encoding([]),
        Encoding([5] * 403),
        Encoding([5, 320]),
        Encoding([-1]),
        Encoding([5, 6], [0]),
        Encoding([5, 6], [0, 2]),
    ]
    runner = load(encoder_folder("bert"))
    found = runner.run([good, *bad, good])
    assert all(isinstance(error, InvalidRequest) for error in found[1:-1])
    assert np.array_equal(found[0], found[-1])
    np.testing.assert_allclose(found[0], runner.run([good])[0], rtol=1e-4, atol=1e-5)
    assert all(isinstance(error, InvalidRequest) for error in runner.run(bad))
    assert runner.run([]) == []
    runner.warm_up([1, 4])
    runner.close()


def test_type_ids_are_ignored_by_models_without_types() -> None:
    runner = load(encoder_folder("distilbert"))
    plain, typed = encodings()[0], encodings(True)[0]
    assert np.array_equal(runner.run([plain])[0], runner.run([typed])[0])


@pytest.mark.parametrize(
    ("problem", "activation"),
    [("multi_label_classification", "sigmoid"), ("regression", "none"), ("single_label_classification", None)],
)
def test_what_labels_are_is_read(problem: str, activation: str | None, tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "model", encoder_folder("bert", 3), problem_type=problem)
    assert load(folder).info.activation == activation


IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
OLDER: dict[str, Any] = {"sbert_ce_default_activation_function": IDENTITY}


@pytest.mark.parametrize(
    ("fields", "file", "activation"),
    [
        ({}, None, None),
        ({"sentence_transformers": {"version": "4.1.0"}}, None, None),
        ({"sentence_transformers": {"activation_fn": IDENTITY}}, None, "none"),
        (OLDER, None, "none"),
        ({"sentence_transformers": {"activation_fn": SIGMOID}} | OLDER, None, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": None}} | OLDER, None, None),
        ({"sentence_transformers": {"activation_fn": SIGMOID}}, IDENTITY, "none"),
        ({"problem_type": "single_label_classification"}, IDENTITY, None),
        ({"problem_type": "regression"} | OLDER, "mine.Odd", "none"),
    ],
)
def test_what_a_cross_encoder_makes_of_its_logits_is_read(
    fields: dict[str, Any], file: str | None, activation: str | None, tmp_path: Path
) -> None:
    folder = edited_folder(tmp_path / "model", encoder_folder("bert", 1), **fields)
    if file is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"activation_fn": file}))
    info = load(folder).info
    assert (info.task, info.score_activation) == ("rerank", activation)
    # TEI goes by what labels are alone.
    assert info.activation == ("none" if fields.get("problem_type") == "regression" else None)


def test_other_activations_of_a_cross_encoder_are_refused_by_name(tmp_path: Path) -> None:
    odd: list[Any] = ["torch.nn.modules.activation.Softmax", "mine.Sigmoid", 5]
    for number, function in enumerate(odd):
        own = {"sentence_transformers": {"activation_fn": function}}
        folder = edited_folder(tmp_path / str(number), encoder_folder("bert", 1), **own)
        named = f"sentence_transformers.activation_fn {function!r} is not supported; torch.nn.Identity and torch"
        with pytest.raises(UnsupportedModel, match=re.escape(named)):
            check_model(ItemConfig(model=str(folder), kind="encoder"))
    # It has no say where vectors are made, nor over what a language model is asked.
    embeds = edited_folder(tmp_path / "embeds", encoder_folder("bert"), sbert_ce_default_activation_function="mine.Odd")
    assert SentenceFiles.read(embeds).activation is None
    score = [("LogitScore", {"true_token_id": 1})]
    judge = sentence_folder(tmp_path / "judge", model_folder("llama"), score)
    (judge / "config_sentence_transformers.json").write_text(json.dumps({"activation_fn": IDENTITY}))
    assert SentenceFiles.read(judge).activation is None


def test_positions_that_a_rotary_model_has_no_table_of(tmp_path: Path) -> None:
    plain = encoder_folder("modernbert")
    folder = edited_folder(tmp_path / "model", plain, position_embedding_type="sans_pos")
    assert np.array_equal(load(folder).run(encodings()[:1])[0], load(plain).run(encodings()[:1])[0])


@pytest.mark.parametrize(
    ("variant", "fields", "message"),
    [
        ("bert", {"hidden_act": "mish"}, "hidden_act 'mish'"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention"),
        ("bert", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("bert", {"hidden_size": 63}, "hidden_size"),
        ("bert", {"num_hidden_layers": 1}, "unexpected tensor 'encoder.layer.1"),
        ("bert", {"num_hidden_layers": 3}, "'encoder.layer.2.attention"),
        ("bert", {"intermediate_size": 96}, "shape"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets"),
        ("roberta", {"pad_token_id": "x"}, "pad_token_id"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
        ("modernbert", {"local_attention": 0}, "local_attention"),
        ("bert", {"model_type": "t5"}, "model_type 't5'"),
    ],
)
def test_refused_by_name(variant: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(edited_folder(tmp_path / "model", encoder_folder(variant), **fields))


_DENSE = {"in_features": 64, "out_features": 8}
_SCORES = _DENSE | {"module_output_name": "scores"}


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([("WordWeights", {})], "WordWeights module"),
        ([("LayerNorm", {"dimension": 64})], "has no Pooling module"),
        ([("Pooling", {}), ("LayerNorm", {})], "must give dimension"),
        ([("Pooling", {}), ("LayerNorm", {"dimension": 63})], "takes 63 numbers by its config.json, and gets 64"),
        ([("Pooling", {"pooling_mode": ["cls", "max"]}), ("Dense", _DENSE)], "takes 64 numbers .* gets 128"),
        ([("Pooling", {}), ("Dense", _DENSE | {"module_output_name": "x"})], "module_output_name = 'x'"),
        ([("Pooling", {}), ("Dense", _SCORES), ("Normalize", {})], "Normalize module after one that makes scores"),
        ([("Pooling", {}), ("Dense", _SCORES | {"out_features": 0})], "out_features above zero, got 0"),
        ([("Pooling", {}), ("Normalize", {"module_input_name": "token_embeddings"})], "'token_embeddings'"),
        ([("Pooling", {}), ("Normalize", {"module_output_name": "x"})], "module_output_name = 'x'"),
        ([("LogitScore", {}), ("Normalize", {})], "LogitScore module"),
        ([("Normalize", {}), ("Pooling", {})], "Pooling module after Normalize"),
        ([("Normalize", {})], "has no Pooling module"),
        ([("Dense", {"in_features": 64, "out_features": 8, "activation_function": "Tanh"})], "has no Pooling module"),
        ([("Dense", {"in_features": 64, "out_features": 8}), ("Pooling", {})], "once, and before Dense"),
        ([("Pooling", {}), ("Pooling", {})], "once, and before Dense"),
        ([], "has no Pooling module"),
        ([("Pooling", {"pooling_mode": "median"})], "'median'"),
        ([("Pooling", {"pooling_mode": 5})], "pooling_mode must be a name"),
        ([("Pooling", {}), ("Dense", {"in_features": 1e999, "out_features": 8})], "in_features and out_features"),
        ([("Pooling", {"pooling_mode_first_last_avg": True})], "first_last_avg"),
        ([("Pooling", {"include_prompt": False})], "include_prompt"),
        ([("Dense", {"in_features": 64, "out_features": 8, "activation_function": "x.Mish"})], "Mish"),
        ([("Dense", {"in_features": 64, "out_features": 8, "use_residual": True})], "use_residual"),
        ([("Dense", {"in_features": 64})], "out_features"),
    ],
)
def test_modules_refused_by_name(modules: list[tuple[str, dict[str, Any]]], message: str, tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "model", encoder_folder("bert"), modules)
    for refuse in (load, lambda folder: check_model(ItemConfig(model=str(folder), kind="encoder"))):
        with pytest.raises(UnsupportedModel, match=message):
            refuse(folder)


def test_a_classifier_needs_no_pooling(tmp_path: Path) -> None:
    """As sentence-transformers saves cross-encoders since version 5.4."""
    folder = sentence_folder(tmp_path / "model", encoder_folder("bert", 1))
    assert load(folder).info.task == "rerank"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prompts": ["query: "]}, "prompts must be an object of texts"),
        ({"prompts": {"query": None}}, "prompts must be an object of texts"),
        ({"prompts": {str(name): "q: " for name in range(1001)}}, "prompts has 1001 texts; models of up to 1000 are"),
        ({"default_prompt_name": "query"}, "'query' must be one of the prompts: there are none"),
        ({"prompts": {"query": "q: "}, "default_prompt_name": 3}, "3 must be one of the prompts: query"),
    ],
)
def test_broken_prompts_are_refused_by_name(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "model", encoder_folder("bert"))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModel, match=said):
        SentenceFiles.read(folder)
    with pytest.raises(UnsupportedModel, match=said):
        check_model(ItemConfig(model=str(folder), kind="encoder"))


def with_settings(folder: Path, **settings: Any) -> SentenceFiles:
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    return SentenceFiles.read(folder)


def test_whose_texts_are_messages(tmp_path: Path) -> None:
    chats = {"modality_config": {"text": {}, "message": {"format": "structured"}}}
    score = [("LogitScore", {"true_token_id": 1})]
    judge = sentence_folder(tmp_path / "judge", model_folder("llama"), score)
    assert SentenceFiles.read(judge).chat == ChatFormat(parts=False, arguments={})
    assert SentenceFiles.read(judge).judges
    assert with_settings(judge, modality_config={"text": {}}).chat is None
    arguments = {"add_generation_prompt": True, "restore_suffix": True}
    found = with_settings(judge, **chats, processing_kwargs={"chat_template": arguments, "text": {}})
    assert found.chat == ChatFormat(parts=True, arguments={"add_generation_prompt": True})
    # A classification head goes by what is said.
    head = sentence_folder(tmp_path / "head", encoder_folder("qwen2", 1))
    (head / "modules.json").unlink()
    assert with_settings(head).chat is None
    assert with_settings(head, **chats).chat == ChatFormat(parts=True, arguments={})
    pooled = sentence_folder(tmp_path / "pooled", model_folder("llama"), [("Pooling", {})])
    found = with_settings(pooled, **chats, processing_kwargs={"text": {"padding": True}, "image": {"size": 9}})
    assert (found.chat, found.judges) == (ChatFormat(parts=True, arguments={}), False)
    assert with_settings(pooled).chat is None
    for settings, named in (
        ({"modality_config": {"message": {"format": "odd"}}}, "format 'odd'"),
        ({"processing_kwargs": {"text": {"max_length": 9}}}, "text is not supported"),
        ({"processing_kwargs": {"chat_template": {"max_length": 9}}}, "chat_template.max_length is not supported"),
        ({"processing_kwargs": {"chat_template": {"restore_suffix": False}}}, "chat_template.restore_suffix"),
        ({"processing_kwargs": {"chat_template": {"continue_final_message": True}}}, "continue_final_message is not"),
        ({"do_lower_case": True}, "do_lower_case is not supported where modality_config has a message"),
        ({"modality_config": [1]}, "modality_config must be an object"),
    ):
        with pytest.raises(UnsupportedModel, match=named):
            with_settings(judge, **settings)


@pytest.mark.parametrize(
    ("modalities", "named"),
    [
        ({"image": {}, "audio": {}}, "modality_config has image, audio; only models that take a text or message"),
        ({"text": {"method": "get_text_features"}}, "method = 'get_text_features' is not supported, only 'forward'"),
        ({"text": {"method_output_name": "pooler_output"}}, "'pooler_output' is not supported, only 'last"),
        ({"text": {}, "message": {"method_output_name": ["hidden_states", 1]}}, "only 'last_hidden_state'"),
    ],
)
def test_other_than_texts_is_refused_by_name(modalities: Any, named: str, tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "model", encoder_folder("bert"), [("Pooling", {})])
    with pytest.raises(UnsupportedModel, match=named):
        with_settings(folder, modality_config=modalities)
    form = {"method": "forward", "method_output_name": "last_hidden_state"}
    assert with_settings(folder, modality_config={"text": form, "image": {"method": "other"}}).chat is None


def test_what_is_an_encoder(tmp_path: Path) -> None:
    assert is_encoder(encoder_folder("modernbert"))
    assert not is_encoder(model_folder("llama"))
    for kind, reads in (("Pooling", True), ("LogitScore", True), ("WordWeights", False)):
        assert is_encoder(sentence_folder(tmp_path / kind, model_folder("llama"), [(kind, {})])) is reads
    with pytest.raises(ConfigError, match="there is no folder"):
        is_encoder(tmp_path / "missing")


def test_heads_for_other_tasks_are_left_out() -> None:
    """A classifier's folder embeds once its modules say so."""
    from chairlift.folders.kind import task_of
    from chairlift.folders.model_json import read_model_json

    folder = encoder_folder("mpnet", 2)
    assert task_of(folder, read_model_json(folder)) == "classify"
    assert task_of(folder, {**read_model_json(folder), "architectures": ["MPNetForMaskedLM"]}) == "embed"


def test_old_names_of_norms(tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "old", encoder_folder("bert"))
    tensors = load_file(folder / "model.safetensors")
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
           for name, tensor in tensors.items()}  # fmt: skip
    save_file(old | {"embeddings.position_ids": torch.arange(402)}, folder / "model.safetensors", {"format": "pt"})
    found, wanted = (vectors(load(some), encodings()) for some in (folder, encoder_folder("bert")))
    assert np.array_equal(found, wanted)


def test_a_pooling_without_its_settings_is_refused(tmp_path: Path) -> None:
    """As a copy or download of a part has it: what is not said would be the mean."""
    folder = sentence_folder(tmp_path / "model", encoder_folder("bert"), [("Pooling", {"pooling_mode": "cls"})])
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"1_Pooling/config\.json is missing, by which a Pooling module"):
        load(folder)
