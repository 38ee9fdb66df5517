"""GGUF files of encoders: their vectors and tokens are those of the folders that they were made of."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.encoder_factory import encoder_folder
from support.gguf_encoders import TEXTS, bert_file, with_modules, word_pieces

from chairlift.folders.kind import is_encoder
from chairlift.folders.sentence_files import SentenceFiles
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
