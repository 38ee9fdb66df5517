"""Folders of decoders that embed, classify and rerank: against transformers, alone, in company and in many passes."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support.encoder_factory import (
    BOTH_WAYS,
    DECODERS,
    encoder_folder,
    encodings,
    expected_logits,
    expected_states,
    judge_folder,
    reference_encoder,
    sentence_folder,
)
from support.model_factory import EXACT, edited_folder, model_folder, reference_model
from support.native_isa import ISAS, kernels_of, needs_native

from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.errors import UnsupportedModel
from chairlift.folders.kind import is_encoder
from chairlift.ops.formats import PANEL
from chairlift.runners.check_model import check_model
from chairlift.runners.decoder import decoder_encoder
from chairlift.runners.encoder.runner import EncoderRunner
from chairlift.runners.items import Encoding

OPS = ["reference", pytest.param("native", marks=needs_native)]
LENGTHS = (200, 1, 7, 64, 16, 2, 129, 33)
TEXTS = encodings(lengths=LENGTHS)


def load(folder: Path, **settings: Any) -> EncoderRunner:
    runner = EncoderRunner(str(folder), **{"dtype": "float32", "num_threads": 1} | settings)
    runner.load()
    return runner


def vectors(runner: EncoderRunner, texts: list[Encoding]) -> NDArray[np.float32]:
    found = runner.run(texts)
    assert not any(isinstance(vector, Exception) for vector in found), found
    return np.stack(found)  # type: ignore[arg-type]


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    wide, others = one.astype(np.float64), other.astype(np.float64)
    product: NDArray[np.float64] = (wide * others).sum(-1)
    return product / np.linalg.norm(wide, axis=-1) / np.linalg.norm(others, axis=-1)


POOLED = {
    "lasttoken": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
    "cls": lambda states: states[0],
    "weightedmean": lambda states: np.average(states, 0, np.arange(1, len(states) + 1)),
}


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("pooling", POOLED)
@pytest.mark.parametrize("variant", DECODERS)
def test_pooled_vectors_are_those_of_transformers(variant: str, pooling: str, ops: str, tmp_path: Path) -> None:
    source = encoder_folder(variant)
    folder = sentence_folder(tmp_path / "model", source, [("Pooling", {"pooling_mode": pooling}), ("Normalize", {})])
    wanted = np.stack([POOLED[pooling](states) for states in expected_states(source, TEXTS)])
    runner = load(folder, ops=ops)
    assert (runner.info.task, runner.info.pooling, runner.info.normalized) == ("embed", pooling, True)
    assert (runner.info.dimensions, runner.info.max_tokens) == (64, 402)
    together = vectors(runner, TEXTS)
    assert cosine(together, wanted).min() >= 0.999999
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-6)
    alone = np.concatenate([vectors(runner, [text]) for text in TEXTS])
    np.testing.assert_allclose(alone, together, atol=1e-5)
    rounded = vectors(load(folder, ops=ops, dtype="bfloat16"), TEXTS)
    assert cosine(rounded, wanted).min() >= 0.999
    assert cosine(rounded, wanted).min() < 1 - 1e-8


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("variant", BOTH_WAYS)
def test_tokens_that_see_both_ways(variant: str, ops: str, tmp_path: Path) -> None:
    """Texts of 200 and 129 tokens are longer than the windows."""
    source, modules = encoder_folder(variant), [("Pooling", {"pooling_mode": "mean"}), ("Normalize", {})]
    wanted = np.stack([states.mean(0) for states in expected_states(source, TEXTS)])
    runner = load(sentence_folder(tmp_path / "model", source, modules), ops=ops)
    together = vectors(runner, TEXTS)
    assert cosine(together, wanted).min() >= 0.999999
    np.testing.assert_allclose(np.concatenate([vectors(runner, [text]) for text in TEXTS]), together, atol=1e-5)
    for settings, least in (({"dtype": "bfloat16"}, 0.999), ({"quantization": "int8"}, 0.995)):
        rounded = load(tmp_path / "model", ops=ops, **settings)
        assert cosine(vectors(rounded, TEXTS), wanted).min() >= least
    unsaid = load(source, ops=ops)
    assert (unsaid.info.pooling, unsaid.info.task) == ("mean", "embed")
    # The first token sees the last: what a decoder that writes never does.
    ends = [Encoding([*TEXTS[2].token_ids[:-1], last]) for last in (7, 9)]
    first = load(sentence_folder(tmp_path / "first", source, [("Pooling", {"pooling_mode": "cls"})]), ops=ops)
    one, other = vectors(first, ends)
    assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize("variant", BOTH_WAYS)
def test_what_sees_both_ways_writes_nothing(variant: str) -> None:
    for implementation in ("auto", "native"):
        config = SequenceConfig(model=str(encoder_folder(variant)), implementation=implementation)
        with pytest.raises(UnsupportedModel, match='writes no text: serve it with kind = "encoder"'):
            check_model(config)


@pytest.mark.parametrize(
    "variant", ["llama", "llama_sharded", "llama_tied", "qwen2_window", "qwen3_window", "gemma3", "olmo2"]
)
def test_a_language_models_folder_embeds_by_its_last_token(variant: str) -> None:
    """Names begin with `model.` there, and the head stays in the file."""
    model = reference_model(variant).model
    with torch.no_grad():
        states = [model(input_ids=torch.tensor([text.token_ids])).last_hidden_state[0, -1].numpy() for text in TEXTS]
    runner = load(model_folder(variant))
    assert (runner.info.pooling, runner.info.normalized, runner.info.max_tokens) == ("lasttoken", False, 512)
    weights = [value for name, value in model.named_parameters() if not name.endswith("bias")]
    plain = 4 * sum(value.numel() for value in weights)
    assert load(model_folder(variant), ops="reference").info.weight_bytes == plain
    # Packed, each is filled up to whole panels of outputs.
    packed = 4 * sum(-(-len(value) // PANEL) * PANEL * value[0].numel() for value in weights)
    assert plain <= runner.info.weight_bytes <= packed
    np.testing.assert_allclose(vectors(runner, TEXTS), states, atol=1e-4 * np.abs(states).max())


@needs_native
@pytest.mark.parametrize("variant", ["gpt2", "gpt_neox", "opt"])
def test_what_the_last_norm_adds_is_there_in_a_fused_pass_too(variant: str) -> None:
    wanted = vectors(load(model_folder(variant), ops="reference"), TEXTS)
    fused = vectors(load(model_folder(variant), ops="native"), TEXTS)
    np.testing.assert_allclose(fused, wanted, atol=1e-4 * np.abs(wanted).max())
    assert cosine(vectors(load(model_folder(variant), ops="native", dtype="bfloat16"), TEXTS), wanted).min() >= 0.999


@pytest.mark.parametrize("pooling", ["lasttoken", "mean", "max"])
def test_a_batch_of_many_passes(pooling: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "model", encoder_folder("qwen3"), [("Pooling", {"pooling_mode": pooling})])
    wanted = vectors(load(folder), TEXTS * 3)
    lengths = []

    class Counting(decoder_encoder.DecoderEncoder):
        def _forward(self, texts: Any, output: Any) -> torch.Tensor:
            lengths.append(len(texts.token_ids))
            return super()._forward(texts, output)

    monkeypatch.setattr("chairlift.runners.encoder.backbone.DecoderEncoder", Counting)
    monkeypatch.setattr(decoder_encoder, "_PASS_TOKENS", dict.fromkeys(decoder_encoder._PASS_TOKENS, 80))
    np.testing.assert_allclose(vectors(load(folder), TEXTS * 3), wanted, atol=1e-5)
    # The longest texts go alone, the others together as far as they fit.
    assert lengths[:5] == [200, 72, 18, 129, 33]
    lengths.clear()
    # Each of these takes a block.
    singles, runner = [Encoding([index]) for index in range(200)], load(folder)
    together = vectors(runner, singles)
    assert lengths == [80, 80, 40]
    np.testing.assert_allclose(together, np.concatenate([vectors(runner, [one]) for one in singles]), atol=1e-5)


@functools.cache
def plainly(variant: str, dtype: str) -> NDArray[np.float32]:
    """What the reference makes of 8 bits."""
    return vectors(load(encoder_folder(variant), ops="reference", dtype=dtype, quantization="int8"), TEXTS)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_every_instruction_set(variant: str, isa: str) -> None:
    with kernels_of(isa):
        for dtype in ("float32", "bfloat16"):
            runner = load(encoder_folder(variant), ops="native", dtype=dtype, quantization="int8")
            alike = cosine(vectors(runner, TEXTS), plainly(variant, dtype))
            # They sum in other orders, and an input halfway between two steps may take the other one.
            assert alike.mean() > (0.9999 if dtype == "float32" else 0.999)
            assert alike.min() > (0.999 if dtype == "float32" else 0.995)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_a_head_sees_the_last_token_that_is_no_padding(variant: str, labels: int, tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "model", encoder_folder(variant, labels), pad_token_id=7)
    texts = [Encoding([*text.token_ids, *padding]) for text in TEXTS[:3] for padding in ([], [7], [9, 7, 7, 7])]
    texts += [Encoding([7, 7])]
    wanted = np.stack(expected_logits(folder, texts))
    runner = load(folder)
    assert (runner.info.task, runner.info.pooling) == ("rerank" if labels == 1 else "classify", "lasttoken")
    np.testing.assert_allclose(vectors(runner, texts), wanted, atol=1e-4 * np.abs(wanted).max())
    reference_encoder.cache_clear()


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("variant", ["qwen3", "qwen3_window", "granite", "gpt2"])
def test_a_score_of_logits_is_what_transformers_gives(variant: str, ops: str, tmp_path: Path) -> None:
    """With a head of its own, one that is the embedding, logits that are scaled, and LayerNorms that add something."""
    source = model_folder(variant)
    with torch.no_grad():
        logits = torch.stack(
            [reference_model(variant)(input_ids=torch.tensor([text.token_ids])).logits[0, -1] for text in TEXTS]
        ).numpy()
    # The last token is never taken for padding.
    padded = edited_folder(tmp_path / "padded", source, pad_token_id=TEXTS[0].token_ids[-1])
    for name, false_id in (("difference", 9), ("one", None)):
        folder = judge_folder(tmp_path / name, padded, 7, false_id)
        assert is_encoder(folder)
        runner = load(folder, ops=ops)
        assert (runner.info.task, runner.info.labels, runner.info.pooling) == ("rerank", ("LABEL_0",), "lasttoken")
        wanted = logits[:, 7:8] - (0 if false_id is None else logits[:, 9:10])
        np.testing.assert_allclose(vectors(runner, TEXTS), wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("variant", "score", "message"),
    [
        ("qwen3", {"true_token_id": 320}, "LogitScore is of token 320, but vocab_size is 320"),
        ("qwen3", {}, "true_token_id must be the id of a token, got None"),
        ("qwen3", {"true_token_id": 1, "false_token_id": "no"}, "false_token_id must be the id of a token, got 'no'"),
        ("qwen3", {"true_token_id": True}, "true_token_id must be"),
        ("qwen3", {"true_token_id": 1, "module_input_name": "logits"}, "module_input_name = 'logits'"),
        ("gemma2", {"true_token_id": 1}, "final_logit_softcapping is not supported with LogitScore"),
    ],
)
def test_scores_of_logits_that_are_refused(variant: str, score: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "model", model_folder(variant), [("LogitScore", score)])
    for refuse in (load, lambda folder: check_model(ItemConfig(model=str(folder), kind="encoder"))):
        with pytest.raises(UnsupportedModel, match=message):
            refuse(folder)
    with pytest.raises(UnsupportedModel, match="LogitScore is of language models"):
        load(sentence_folder(tmp_path / "bert", encoder_folder("bert"), [("LogitScore", {"true_token_id": 1})]))


def test_padding_at_the_end_is_part_of_what_is_embedded(tmp_path: Path) -> None:
    """Qwen3's embedders end every text in the token that they also pad with."""
    runner = load(edited_folder(tmp_path / "model", encoder_folder("qwen3"), pad_token_id=7))
    one, other = vectors(runner, [Encoding([5, 6]), Encoding([5, 6, 7])])
    assert not np.allclose(one, other, atol=0.01)


def test_padding_at_the_end_is_part_of_what_modules_score(tmp_path: Path) -> None:
    dense = {"in_features": 64, "out_features": 1, "bias": False, "module_output_name": "scores"}
    modules = [("Pooling", {"pooling_mode": "lasttoken"}), ("Dense", dense)]
    source = edited_folder(tmp_path / "source", encoder_folder("qwen3"), pad_token_id=7)
    folder = sentence_folder(tmp_path / "model", source, modules)
    weight = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)) / 64
    save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors")
    texts = [Encoding([5, 6]), Encoding([5, 6, 7])]
    states = np.stack([states[-1] for states in expected_states(encoder_folder("qwen3"), texts)])
    np.testing.assert_allclose(vectors(load(folder), texts), np.tanh(states @ weight.numpy().T), atol=1e-5)


@pytest.mark.parametrize("variant", EXACT)
def test_what_writes_does_not_embed_unasked(variant: str) -> None:
    assert not is_encoder(model_folder(variant))


def test_which_decoders_embed_unasked(tmp_path: Path) -> None:
    for name in ("Qwen2ForRewardModel", "GPT2DoubleHeadsModel"):
        assert not is_encoder(edited_folder(tmp_path / name, encoder_folder("qwen3"), architectures=[name]))
    assert is_encoder(sentence_folder(tmp_path / "modules", model_folder("qwen3"), [("Pooling", {})]))
    for variant in DECODERS:
        assert is_encoder(encoder_folder(variant))
        assert is_encoder(encoder_folder(variant, 2))
    assert not is_encoder(edited_folder(tmp_path / "unknown", encoder_folder("llama"), model_type="llama9"))
    assert not is_encoder(edited_folder(tmp_path / "unsaid", encoder_folder("llama"), remove=("architectures",)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ({"is_causal": "no"}, "is_causal must be true or false, got 'no'"),
        ({"model_type": "bloom", "is_causal": False, "n_layer": 2, "n_head": 4}, "is_causal=False .* for bloom"),
        ({"pad_token_id": "x"}, "pad_token_id"),
        ({"num_hidden_layers": 1}, "unexpected tensor 'layers.1"),
        ({"intermediate_size": 96}, "shape"),
        ({"model_type": "t5"}, "bert.*and of decoders.*llama"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(edited_folder(tmp_path / "model", encoder_folder("llama"), **fields))


def test_a_missing_head_is_named(tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "model", encoder_folder("llama", 3))
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"score\.weight"):
        load(folder)
    # Embedding needs none.
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["LlamaModel"]}))
    assert load(folder).info.task == "embed"


def test_layers_take_turns_in_one_cache() -> None:
    runner = load(encoder_folder("llama"), ops="reference")
    caches = runner.forward._decoder.caches  # type: ignore[attr-defined]
    assert len(caches) == 2
    assert caches[0][0].data_ptr() == caches[1][0].data_ptr()


def test_code_of_a_folder_s_own_may_look_ahead(tmp_path: Path) -> None:
    own = {"AutoModel": "modeling_qwen.Qwen2Model"}
    with pytest.raises(UnsupportedModel, match=r'may let tokens see those that follow.*"is_causal": true'):
        load(edited_folder(tmp_path / "unsaid", encoder_folder("qwen2"), auto_map=own))
    said = load(edited_folder(tmp_path / "said", encoder_folder("qwen2"), auto_map=own, is_causal=True))
    np.testing.assert_array_equal(vectors(said, TEXTS[:1]), vectors(load(encoder_folder("qwen2")), TEXTS[:1]))


def test_a_bare_opt_has_a_prefix_of_its_own(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel

    sizes = {"vocab_size": 1024, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model("opt", **sizes, num_attention_heads=4))
    model.save_pretrained(tmp_path)
    assert "decoder.embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        wanted = model.eval()(torch.tensor([TEXTS[2].token_ids])).last_hidden_state[0, -1].numpy()
    found = vectors(load(tmp_path), [TEXTS[2]])[0]
    assert cosine(found[None], wanted[None])[0] > 1 - 1e-6
