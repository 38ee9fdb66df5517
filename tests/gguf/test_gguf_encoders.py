"""GGUF files of encoders: their vectors and tokens are those of the folders that they were made of."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.encoder_factory import encoder_folder
from support.gguf_encoders import (
    TEXTS,
    bert_file,
    jina_file,
    jina_folder,
    modern_file,
    modern_words,
    nomic_experts_file,
    nomic_experts_folder,
    nomic_file,
    unigrams,
    with_modules,
    word_pieces,
    xlm_roberta_file,
)

from chairlift.errors import UnsupportedModel
from chairlift.folders.kind import is_encoder
from chairlift.folders.sentence_files import SentenceFiles
from chairlift.gguf import side_folder
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.side_folder import folder_of
from chairlift.runners.encoder.runner import EncoderRunner
from chairlift.runners.items import Encoding
from chairlift.text.encoding import TextEncoder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def embedded(folder: Path) -> tuple[list[Encoding], NDArray[np.float32]]:
    """The tokens of TEXTS, and their vectors."""
    runner = EncoderRunner(str(folder), dtype="float32", num_threads=1)
    texts = TextEncoder(folder, runner.load().max_tokens, SentenceFiles.read(folder)).encode_texts(list(TEXTS))
    return texts, np.stack(runner.run(texts))  # type: ignore[arg-type]


def assert_same(file: Path, folder: Path) -> None:
    """As the folder: which tokens there are, and what is made of them."""
    found, wanted = embedded(folder_of(file)), embedded(folder)
    assert [each.token_ids for each in found[0]] == [each.token_ids for each in wanted[0]]
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-5)


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (2, "cls"), (3, "lasttoken"), (None, "mean")])
def test_a_bert_is_that_of_its_folder(number: int | None, pooling: str, tmp_path: Path) -> None:
    """One that does not say how it pools is made of a folder that does not say, whose vectors are means."""
    folder = with_modules(tmp_path / "plain", encoder_folder("bert"), word_pieces(), pooling)
    file = bert_file(number)
    assert is_encoder(folder_of(file))
    assert_same(file, folder)


@pytest.mark.parametrize("lowers", [True, False])
def test_an_older_bert_is_as_its_words_tell(lowers: bool, tmp_path: Path) -> None:
    """It says neither what becomes of capitals nor which tokens are special, and leaves brackets unmarked."""
    folder = with_modules(tmp_path / "plain", encoder_folder("bert"), word_pieces(lowers), "cls")
    assert_same(bert_file(lowers=lowers, says=False), folder)


def test_an_xlm_roberta_is_that_of_its_folder(tmp_path: Path) -> None:
    assert_same(xlm_roberta_file(), with_modules(tmp_path / "plain", encoder_folder("xlm-roberta"), unigrams(), "cls"))


@pytest.mark.parametrize("labels", [1, 3])
def test_what_ranks_or_classifies_has_the_logits_of_its_folder(labels: int, tmp_path: Path) -> None:
    """As bge-reranker-v2-m3, whose file has a head and no pooling."""
    folders = (
        folder_of(xlm_roberta_file(labels)),
        with_modules(tmp_path / "plain", encoder_folder("xlm-roberta", labels), unigrams(), None),
    )
    assert_same_logits(*folders, "rerank" if labels == 1 else "classify")


def assert_same_logits(found: Path, wanted: Path, task: str) -> None:
    """Of pairs, and their tokens."""
    runners = [EncoderRunner(str(each), dtype="float32", num_threads=1) for each in (found, wanted)]
    one, other = (runner.load() for runner in runners)
    assert (one.task, one.labels) == (task, other.labels)
    pairs = [(first, second) for first in TEXTS for second in TEXTS[:3]]
    texts = [
        TextEncoder(each, one.max_tokens, SentenceFiles.read(each)).encode_pairs(pairs) for each in (found, wanted)
    ]
    assert [each.token_ids for each in texts[0]] == [each.token_ids for each in texts[1]]
    logits = [np.stack(runner.run(each)) for runner, each in zip(runners, texts, strict=True)]  # type: ignore[arg-type]
    np.testing.assert_allclose(*logits, atol=1e-5)


def test_a_nomic_is_that_of_its_folder(tmp_path: Path) -> None:
    folder = with_modules(tmp_path / "plain", encoder_folder("nomic_bert"), word_pieces(), "mean")
    assert_same(nomic_file(), folder)


def test_a_nomic_with_experts_is_that_of_its_folder(tmp_path: Path) -> None:
    folder = with_modules(tmp_path / "plain", nomic_experts_folder(), unigrams(), "mean")
    assert_same(nomic_experts_file(), folder)


@pytest.mark.parametrize("in_two", [False, True])
def test_a_jina_is_that_of_its_folder(in_two: bool, tmp_path: Path) -> None:
    assert_same(jina_file(in_two), with_modules(tmp_path / "plain", jina_folder(), word_pieces(), "mean"))


@pytest.mark.parametrize("in_list", [False, True])
def test_a_modern_bert_is_that_of_its_folder(in_list: bool, tmp_path: Path) -> None:
    folder = with_modules(tmp_path / "plain", encoder_folder("modernbert"), modern_words(), "mean")
    assert_same(modern_file(in_list=in_list), folder)


def test_a_modern_bert_that_ranks_has_the_logits_of_its_folder(tmp_path: Path) -> None:
    """As gte-reranker-modernbert-base."""
    folder = with_modules(tmp_path / "plain", encoder_folder("modernbert", 1), modern_words(), None)
    assert_same_logits(folder_of(modern_file(1)), folder, "rerank")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("bert.attention.causal", True, "bert.attention.causal = True"),
        ("bert.attention.head_count_kv", 2, "bert.attention.head_count_kv = 2"),
        ("bert.attention.sliding_window", 64, "bert.attention.sliding_window = 64"),
        ("bert.pooling_type", 0, "bert.pooling_type = 0"),
        ("bert.pooling_type", 4, "has not all of its head: it needs 'cls.weight', 'cls.output.weight'"),
        ("bert.expert_count", 8, "bert.expert_count = 8"),
        ("tokenizer.ggml.token_type_count", 3, "token_type_count = 3 in a GGUF file, but 'token_types.weight' has 2"),
        ("tokenizer.ggml.model", "llama", "tokenizer.ggml.model 'llama'"),
        ("tokenizer.ggml.unknown_token_id", 320, "tokenizer.ggml.unknown_token_id"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(
    key: str, value: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = GgufFile(bert_file())
    file.metadata = file.metadata | {key: value}
    monkeypatch.setattr(side_folder, "GgufFile", lambda path: file)
    with pytest.raises(UnsupportedModel) as refused:
        folder_of(bert_file())
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.1.attn_qkv.weight", "rope_freqs.weight"])
def test_a_tensor_that_is_not_computed_is_refused_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of Jina's later ones, whose queries and keys are normed."""
    folder, file = folder_of(bert_file()), GgufFile(bert_file())
    file.tensors[name] = file.tensors["token_types.weight"]
    monkeypatch.setattr("chairlift.gguf.gguf_tensors.GgufFile", lambda *given, **named: file)
    with pytest.raises(UnsupportedModel, match=f"tensor '{name}' of model.gguf is none that such encoders have here"):
        EncoderRunner(str(folder), dtype="float32").load()
