"""Encoders whose code is in their folders alone: held against their definitions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.defined_encoders import Definition, JinaBert, NomicExperts
from support.encoder_factory import encodings
from support.model_factory import edited_folder
from support.native_isa import needs_native

from chairlift.errors import UnsupportedModel
from chairlift.runners.encoder.config import read_encoder_config
from chairlift.runners.encoder.runner import EncoderRunner, texts_of


@pytest.mark.parametrize("ops", ["reference", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize(("kind", "heads"), [(JinaBert, 4), (JinaBert, 12), (NomicExperts, 4)])
def test_states_are_those_of_the_definition(kind: type[Definition], heads: int, ops: str, tmp_path: Path) -> None:
    defined, texts = kind(heads), encodings(True)
    folder, batch = defined.folder(tmp_path / "model"), texts_of(texts)
    for dtype in ("float32", "bfloat16"):
        runner = EncoderRunner(str(folder), num_threads=1, ops=ops, dtype=dtype)
        assert runner.load().task == "embed"
        with torch.inference_mode():
            found = np.split(runner.forward(batch, "tokens").numpy(), batch.starts[1:-1])
        for one, text in zip(found, texts, strict=True):
            wanted = defined.states(text.token_ids, text.type_ids or [0] * len(text.token_ids)).numpy()
            if dtype == "float32":
                assert np.abs(one - wanted).max() <= 1e-4 * np.abs(wanted).max()
            else:
                products = (one * wanted).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(wanted, axis=-1)
                assert np.median(products) > 0.999


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (JinaBert, {"feed_forward_type": "original"}),
        (JinaBert, {"hidden_act": "relu"}),
        (JinaBert, {"position_embedding_type": "relative_key"}),
        (JinaBert, {"auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}}),
        (NomicExperts, {"moe_top_k": 5}),
        (NomicExperts, {"num_experts": None}),
        (NomicExperts, {"moe_every_n_layers": -2}),
        (NomicExperts, {"moe_normalize_expert_weights": True}),
        (NomicExperts, {"num_shared_experts": 1}),
        (NomicExperts, {"activation_function": "swiglu"}),
        (NomicExperts, {"mlp_fc1_bias": False}),
    ],
)
def test_what_it_is_not_made_of_is_refused(kind: type[Definition], fields: dict[str, Any], tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "other", kind(4).folder(tmp_path / "model"), **fields)
    ((name, _),) = fields.items()
    said = {"activation_function": "hidden_act"}.get(name, name)
    with pytest.raises(UnsupportedModel, match=said):
        read_encoder_config(folder)


def test_biases_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    folder = edited_folder(tmp_path / "other", JinaBert(4).folder(tmp_path / "model"), max_position_embeddings=2**24)
    with pytest.raises(UnsupportedModel, match=r"max_position_embeddings is too large: .* for 8388608 tokens, not for"):
        EncoderRunner(str(folder), num_threads=1, dtype="float32").load()
