"""GGUF files of embedders whose tokens see what follows them, too: as embeddinggemma, and as gte-Qwen2."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from support.encoder_factory import sentence_folder
from support.gguf_files import gguf_file, plain_folder, projections
from tokenizers import Tokenizer, processors

from chairlift.errors import UnsupportedModel
from chairlift.folders.kind import is_encoder
from chairlift.folders.sentence_files import SentenceFiles
from chairlift.gguf.side_folder import folder_of
from chairlift.runners.encoder.runner import EncoderRunner
from chairlift.text.encoding import TextEncoder

# As long as some windows, and longer.
TEXTS = ["ab a", "b" * 90, "ba", "a b" * 12]


def embedded(folder: Path) -> NDArray[np.float32]:
    runner = EncoderRunner(str(folder), dtype="float32", num_threads=1)
    most = runner.load().max_tokens
    found = runner.run(TextEncoder(folder, most, SentenceFiles.read(folder)).encode_texts(TEXTS))
    return np.stack(found)  # type: ignore[arg-type]


def with_tokens(folder: Path, name: str) -> Path:
    """The folder of a model with the words of its file, whose texts end with the end token."""
    words = Tokenizer.from_file(str(folder_of(gguf_file(name)) / "tokenizer.json"))
    words.post_processor = processors.TemplateProcessing("$A <|end|>", None, [("<|end|>", 257)])
    words.save(str(folder / "tokenizer.json"))
    return folder


def gemma_folder(target: Path, *, projected: bool) -> Path:
    dense = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    modules: list[tuple[str, dict[str, Any]]] = [("Pooling", {"pooling_mode": "mean"})]
    if projected:
        for outs, ins in (each.shape for each in projections().values()):
            modules.append(("Dense", dense | {"in_features": ins, "out_features": outs}))
    folder = sentence_folder(target, plain_folder("gemma_embedding"), [*modules, ("Normalize", {})])
    for name, weight in projections().items() if projected else ():
        save_file(
            {"linear.weight": weight},
            folder / name.replace("dense_", "").replace(".weight", "_Dense") / "model.safetensors",
        )
    return with_tokens(folder, "gemma_embedding")


def test_embeddinggemma_is_that_of_its_folder(tmp_path: Path) -> None:
    found = folder_of(gguf_file("gemma_embedding", pooling=1))
    assert is_encoder(found)
    wanted = embedded(gemma_folder(tmp_path / "plain", projected=True))
    np.testing.assert_allclose(embedded(found), wanted, atol=1e-5)
    rounded = embedded(folder_of(gguf_file("gemma_embedding", "Q8_0", pooling=1)))
    assert 0.99 < (rounded * wanted).sum(-1).min() < 1 - 1e-7


def test_without_projections_it_is_what_is_before_them(tmp_path: Path) -> None:
    """As files are that were converted without the option; and where no pooling is said, it is the mean."""
    found = folder_of(gguf_file("gemma_embedding"))
    assert is_encoder(found)
    modules = json.loads((found / "modules.json").read_text())
    assert [each["type"].rsplit(".", 1)[1] for each in modules] == ["Transformer", "Pooling", "Normalize"]
    folder = gemma_folder(tmp_path / "plain", projected=False)
    # Without a pooling the file does not say that texts end with a token either.
    with_end = Tokenizer.from_file(str(found / "tokenizer.json"))
    with_end.save(str(folder / "tokenizer.json"))
    np.testing.assert_allclose(embedded(found), embedded(folder), atol=1e-5)


def test_what_is_said_to_see_both_ways_does(tmp_path: Path) -> None:
    modules: list[tuple[str, dict[str, Any]]] = [("Pooling", {"pooling_mode": "lasttoken"}), ("Normalize", {})]
    folder = with_tokens(
        sentence_folder(tmp_path / "plain", plain_folder("qwen2_both_ways"), modules), "qwen2_both_ways"
    )
    found = folder_of(gguf_file("qwen2_both_ways", pooling=3))
    np.testing.assert_allclose(embedded(found), embedded(folder), atol=1e-5)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_causal": True}))
    assert np.abs(embedded(folder) - embedded(found)).max() > 0.01


def test_a_projection_that_is_not_all_there_is_refused_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outputs, about which it lies, follow its name, the number of its dimensions and its inputs."""
    data, name = bytearray(gguf_file("gemma_embedding", pooling=1).read_bytes()), b"dense_2.weight"
    at = data.index(name) + len(name) + 4
    assert int.from_bytes(data[at + 8 : at + 16], "little") == 96
    data[at + 8 : at + 16] = (2**33).to_bytes(8, "little")
    # What else would tell.
    (tmp_path / "m.gguf").write_bytes(data.replace(b"dense_2_feat_out", b"dense_2_feat_xxx"))
    monkeypatch.setattr(SentenceFiles, "width", lambda self, size: size)
    with pytest.raises(UnsupportedModel, match=r"tensor 'dense_2\.weight' lies beyond the end of model\.gguf"):
        EncoderRunner(str(folder_of(tmp_path / "m.gguf")), dtype="float32", num_threads=1).load()


@pytest.mark.parametrize(
    ("model", "old", "new", "message"),
    [
        ("gemma_embedding", b"dense_3.weight", b"dense_9.weight", "has not all of dense_2.weight, dense_3.weight"),
        # Of a family that has none it would be left out as a head is.
        ("qwen3", b"output.weight", b"dense_2.weigh", "unexpected tensor 'dense_2.weigh'"),
    ],
)
def test_projections_that_are_not_known_are_named(
    model: str, old: bytes, new: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file(model, pooling=1).read_bytes().replace(old, new, 1))
    with pytest.raises(UnsupportedModel, match=message):
        EncoderRunner(str(folder_of(path)), dtype="float32", num_threads=1).load()
