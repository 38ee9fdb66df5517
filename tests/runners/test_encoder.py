"""Encoders, and decoders that embed, against transformers, in every precision, alone and in ragged batches."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from support.encoder_factory import (
    DECODERS,
    VARIANTS,
    encoder_folder,
    encodings,
    expected_logits,
    expected_states,
    published_folder,
    renamed_folder,
)
from support.model_factory import edited_folder, rounded_folder
from support.native_isa import ISAS, kernels_of, needs_native, runs_here

from chairlift.errors import UnsupportedModel
from chairlift.ops import encoder as encoder_ops
from chairlift.ops.fused_encoder import FusedEncoder
from chairlift.runners.encoder.config import read_encoder_config
from chairlift.runners.encoder.runner import EncoderRunner, texts_of
from chairlift.runners.items import Encoding

OPS = ["reference", pytest.param("native", marks=needs_native)]
NEAR = {"bfloat16": 0.999, "int8": 0.99, "int4": 0.95}


@functools.cache
def runner_of(folder: Path, **settings: Any) -> EncoderRunner:
    runner = EncoderRunner(str(folder), num_threads=1, **settings)
    runner.load()
    return runner


def states(runner: EncoderRunner, texts: list[Encoding]) -> list[NDArray[np.float32]]:
    """Hidden states [tokens, H] of each text, computed in one batch."""
    batch = texts_of(texts)
    with torch.inference_mode():
        found = runner.forward(batch, "tokens").cpu().numpy()
    return np.split(found, batch.starts[1:-1])


def has_types(variant: str) -> bool:
    return variant.startswith(("bert", "nomic"))


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float32]:
    product: NDArray[np.float32] = (one * other).sum(-1)
    return product / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_states_equal_transformers(variant: str, ops: str) -> None:
    folder, texts = encoder_folder(variant), encodings(has_types(variant))
    found = states(runner_of(folder, ops=ops, dtype="float32"), texts)
    for one, wanted in zip(found, expected_states(folder, texts), strict=True):
        assert np.abs(one - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("variant", ["bert", "mpnet", "modernbert"])
def test_long_texts_are_attended_to_in_parts(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each text, and of what is added to its scores, there is only so much at once."""
    folder, texts = encoder_folder(variant), encodings(has_types(variant))
    runner, most, sizes = runner_of(folder, ops="reference", dtype="float32"), 5000, list[tuple[int, int]]()
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        sizes.append((q[..., 0].numel() * k.shape[2], 0 if mask is None else mask.numel()))
        return attend(q, k, v, mask)

    monkeypatch.setattr(encoder_ops, "_MOST_SCORES", most)
    monkeypatch.setattr(encoder_ops.F, "scaled_dot_product_attention", counted)
    found = states(runner, texts)
    assert max(map(max, sizes)) <= most
    assert any(added for _, added in sizes) == (variant != "bert")
    for one, wanted in zip(found, expected_states(folder, texts), strict=True):
        assert np.abs(one - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", "none"), ("bfloat16", "int8"), ("float32", "int8"), ("bfloat16", "int4")]
)
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_rounded_states_are_near_those_of_transformers(variant: str, ops: str, dtype: str, quantization: str) -> None:
    folder, texts = encoder_folder(variant), encodings(has_types(variant))
    found = states(runner_of(folder, ops=ops, dtype=dtype, quantization=quantization), texts)
    alike = cosine(np.concatenate(found), np.concatenate(expected_states(folder, texts)))
    near = NEAR["bfloat16" if quantization == "none" else quantization]
    assert alike.mean() > near
    # Under 4 bits one token in hundreds of a random model turns elsewhere.
    lowest = np.quantile(alike, 0.02) if quantization == "int4" else alike.min()
    assert 1 - lowest < 5 * (1 - near)
    # Were the setting ignored, it would be equal.
    assert alike.mean() < 1 - 1e-6


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("variant", ["bert", "mpnet", "modernbert", "llama", "qwen3"])
def test_four_bits_make_the_states_of_the_rounded_weights(variant: str, ops: str, tmp_path: Path) -> None:
    folder, texts = encoder_folder(variant), encodings(has_types(variant))
    found = np.concatenate(states(runner_of(folder, ops=ops, dtype="float32", quantization="int4"), texts))
    # Tables of embeddings and of distances are not multiplied with.
    rounded = rounded_folder(tmp_path / "m", folder, torch.float32, ("embed", "relative"))
    exact, unrounded = (np.concatenate(expected_states(each, texts)) for each in (rounded, folder))
    assert 1 - cosine(found, exact).mean() < 0.1 * (1 - cosine(found, unrounded).mean())


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, labels: int, ops: str) -> None:
    folder, texts = encoder_folder(variant, labels), encodings(has_types(variant))
    runner = runner_of(folder, ops=ops, dtype="float32")
    assert runner.info.task == ("rerank" if labels == 1 else "classify")
    assert runner.info.labels == tuple(f"LABEL_{index}" for index in range(labels))
    assert runner.info.dimensions is None
    for one, wanted in zip(runner.run(texts), expected_logits(folder, texts), strict=True):
        assert isinstance(one, np.ndarray)
        assert one.shape == (labels,)
        assert np.abs(one - wanted).max() <= 1e-4 * max(np.abs(wanted).max(), 1)


@pytest.mark.parametrize("make", [published_folder, renamed_folder])
@pytest.mark.parametrize("variant", ["nomic_bert", "gte"])
def test_folders_as_published_and_as_transformers_names_them(
    variant: str, make: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    texts, source, head = encodings(has_types(variant)), encoder_folder(variant), encoder_folder(variant, 1)
    folder = make(tmp_path / "bare", source)
    assert any("self_attn" in name for name in load_file(folder / "model.safetensors")) == (make is renamed_folder)
    runner = runner_of(folder, dtype="float32")
    alone = [states(runner, [text])[0] for text in texts]
    for wanted, *found in zip(expected_states(source, texts), states(runner, texts), alone, strict=True):
        assert all(np.abs(one - wanted).max() <= 1e-4 * np.abs(wanted).max() for one in found)
    runner = runner_of(make(tmp_path / "head", head), dtype="float32")
    assert runner.info.task == "rerank"
    for one, wanted in zip(runner.run(texts), expected_logits(head, texts), strict=True):
        assert np.abs(one - wanted).max() <= 1e-4 * max(np.abs(wanted).max(), 1)


@pytest.mark.parametrize(
    ("variant", "fields", "message"),
    [
        ("nomic_bert", {"activation_function": "gelu"}, "activation_function='gelu'"),
        ("nomic_bert", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction=0.5"),
        ("nomic_bert", {"rotary_emb_interleaved": True}, "rotary_emb_interleaved"),
        ("nomic_bert", {"rotary_emb_scale_base": 512}, "rotary_emb_scale_base"),
        ("nomic_bert", {"rotary_head_dim": True}, "rotary_head_dim"),
        ("nomic_bert", {"prenorm": True}, "prenorm"),
        ("nomic_bert", {"parallel_block": True}, "parallel_block"),
        ("nomic_bert", {"use_rms_norm": True}, "use_rms_norm"),
        ("nomic_bert", {"causal": True}, "causal"),
        ("nomic_bert", {"qkv_proj_bias": True}, "qkv_proj_bias"),
        ("nomic_bert", {"mlp_fc1_bias": True}, "mlp_fc1_bias"),
        ("nomic_bert", {"mlp_fc2_bias": True}, "mlp_fc2_bias"),
        ("nomic_bert", {"rotary_scaling_factor": 2, "max_trained_positions": 0}, "max_trained_positions"),
        ("nomic_bert", {"head_dim": 32}, "head_dim=32 is not supported; 16 is"),
        ("eurobert", {"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ("eurobert", {"clip_qkv": 8.0}, "clip_qkv"),
        ("eurobert", {"classifier_pooling": "max"}, "classifier_pooling 'max'"),
        ("gte", {"position_embedding_type": "absolute"}, "position_embedding_type='absolute'"),
        ("gte", {"layer_norm_type": "rms_norm"}, "layer_norm_type='rms_norm'"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale"),
        ("gte", {"pack_qkv": False}, "pack_qkv"),
        ("gte", {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}}, "'mixed_b' is not supported"),
        ("gte", {"rope_scaling": {"type": "ntk"}}, "'factor' must be from 1"),
        ("nomic_bert", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "ntk"),
        ("gte", {"rope_scaling": {"type": "ntk", "factor": 0.5}}, "'factor' must be from 1"),
    ],
)
def test_what_is_computed_otherwise_is_refused_by_name(
    variant: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = encoder_folder(variant)
    if variant != "eurobert":
        folder = published_folder(tmp_path / "published", folder)
    with pytest.raises(UnsupportedModel, match=message):
        read_encoder_config(edited_folder(tmp_path / "model", folder, **fields))


def test_dynamic_ntk_ends_at_the_length_that_was_trained(tmp_path: Path) -> None:
    folder = published_folder(tmp_path / "published", encoder_folder("nomic_bert"))
    scaled = edited_folder(tmp_path / "scaled", folder, rotary_scaling_factor=2, max_trained_positions=128)
    assert read_encoder_config(folder).max_tokens == 402
    assert read_encoder_config(scaled).max_tokens == 128


def test_ntk_scaling_is_that_of_gtes_own_code(tmp_path: Path) -> None:
    fields = {"rope_scaling": {"type": "ntk", "factor": 8.0}, "rope_theta": 20000}
    rope = read_encoder_config(edited_folder(tmp_path / "model", encoder_folder("gte"), **fields)).ropes[0]
    assert rope is not None
    inverse = 1.0 / (20000 * 8.0) ** (torch.arange(0, 16, 2).float() / 16) / 8.0 ** (2 / 16)
    angles = torch.arange(402.0)[:, None] * inverse
    assert torch.equal(rope.table(16, 402), torch.cat((angles.cos(), angles.sin()), dim=-1))


@needs_native
@pytest.mark.parametrize("labels", [0, 2])
@pytest.mark.parametrize("quantization", ["none", "float32", "int8", "int4"])
@pytest.mark.parametrize("variant", ["bert", "mpnet", "modernbert", "modernbert_biases", "eurobert", *DECODERS])
def test_a_result_is_the_same_alone_and_in_any_batch(variant: str, quantization: str, labels: int) -> None:
    """In company, in another order, and when threads share each text instead of taking some each.

    To the bit, but for a classification head, which torch multiplies in float32.
    """

    def same(one: Any, other: Any) -> bool:
        return np.allclose(one, other, rtol=1e-5, atol=1e-5) if labels else np.array_equal(one, other)

    settings = {"dtype": "bfloat16" if runs_here("avx2") else "float32", "quantization": quantization}
    if quantization == "float32":
        settings = {"dtype": "float32", "quantization": "none"}
    if not runs_here("avx2") and settings["quantization"] == "none":
        pytest.skip("plain torch rounds by the shape of the batch")
    texts = encodings(has_types(variant))
    runner = EncoderRunner(str(encoder_folder(variant, labels)), ops="native", **settings)  # type: ignore[arg-type]
    runner.load()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [runner.run([text])[0] for text in texts]
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for found in (runner.run(texts), runner.run(texts[::-1])[::-1], [runner.run([text])[0] for text in texts]):
                assert all(map(same, found, alone))
            many = runner.run(texts * 9)
            assert all(same(one, alone[index % len(texts)]) for index, one in enumerate(many))
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("variant", ["bert", "bert_odd", "mpnet", "modernbert", "nomic_bert", "eurobert"])
def test_every_instruction_set(variant: str, isa: str) -> None:
    folder, texts = encoder_folder(variant), encodings(has_types(variant))
    with kernels_of(isa):
        for dtype in ("float32", "bfloat16"):
            runner = EncoderRunner(str(folder), ops="native", dtype=dtype, quantization="int8")
            runner.load()
            assert isinstance(runner.forward, FusedEncoder)
            # The plain operations round otherwise, and so are no nearer.
            alike = cosine(np.concatenate(states(runner, texts)), np.concatenate(expected_states(folder, texts)))
            # A gated product multiplies what is rounded.
            gated = {"modernbert": (0.997, 0.98), "eurobert": (0.999, 0.995), "nomic_bert": (0.9998, 0.9995)}
            mean, least = gated.get(variant, (0.9999, 0.9998))
            assert alike.mean() > mean
            assert alike.min() > least


@needs_native
def test_sizes_that_the_native_pass_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that are no whole vectors: the operations run one by one."""
    fields = {"hidden_size": 40, "num_attention_heads": 5}
    monkeypatch.setitem(VARIANTS, "bert_40", ("bert", fields))
    folder, texts = encoder_folder("bert_40"), encodings()
    runner = EncoderRunner(str(folder), ops="native", dtype="float32", quantization="int8")
    runner.load()
    assert not isinstance(runner.forward, FusedEncoder)
    alike = cosine(np.concatenate(states(runner, texts)), np.concatenate(expected_states(folder, texts)))
    assert alike.mean() > NEAR["int8"]


def test_auto_takes_the_fastest_precision() -> None:
    runner = runner_of(encoder_folder("bert"))
    assert runner.info.dtype == ("bfloat16" if runs_here("avx2") else "float32")
