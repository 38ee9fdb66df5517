"""GGUF files of encoders that lie: read or refused by name, in bounded time and memory."""

import json
import random
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from support.gguf_encoders import (
    REPLACED,
    bert_file,
    charsmap,
    jina_file,
    modern_file,
    nomic_experts_file,
    nomic_file,
    xlm_roberta_file,
)
from support.gguf_lies import FEW, MANY, SAID, mangled
from tokenizers import Tokenizer

from chairlift.errors import UnsupportedModel
from chairlift.folders.sentence_files import SentenceFiles
from chairlift.folders.tokenizer_json import read_tokenizer
from chairlift.gguf import side_folder
from chairlift.gguf.encoder_tokenizers import encoder_tokenizer_files
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.gguf_tensors import GgufTensors
from chairlift.gguf.side_folder import folder_of
from chairlift.runners.encoder.config import read_encoder_config

FILES: dict[str, Callable[[], Path]] = {
    "bert": bert_file,
    "xlm_roberta": lambda: xlm_roberta_file(3),
    "nomic": nomic_file,
    "nomic_experts": nomic_experts_file,
    "jina": jina_file,
    "modern": lambda: modern_file(1),
    "jina_in_two": lambda: jina_file(True),
}


def read_whole(path: Path) -> None:
    """All that is read of a file that is served, but what is computed."""
    folder = folder_of(path)
    read_encoder_config(folder)
    SentenceFiles.read(folder)
    read_tokenizer(folder).backend.encode("A text, of some wörds [SEP]")
    tensors = GgufTensors(path)
    for name in tensors.keys():  # noqa: SIM118
        tensors.get_slice(name).get_shape()
        tensors.get_tensor(name)


def refusals(path: Path, cases: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is said of those that are refused, while memory grows but by little."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = []
    for change in cases:
        change()
        try:
            read_whole(path)
        except UnsupportedModel as error:
            refused.append(str(error))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000
    assert not [each for each in refused if "\n" in each or len(each) > 1000]
    return refused


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("count", [FEW // 2, pytest.param(MANY, marks=pytest.mark.slow)])
def test_whatever_an_encoder_s_file_holds_is_read_or_refused(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, rng, path = FILES[name]().read_bytes(), random.Random(name), tmp_path / "m.gguf"
    cases = [lambda: path.write_bytes(mangled(rng, whole)) and None] * count
    assert len(refusals(path, cases, monkeypatch, tmp_path)) > count / 3


@pytest.mark.parametrize("name", FILES)
def test_whatever_a_key_of_an_encoder_says_is_read_or_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, number = FILES[name](), iter(range(10**6))
    file = GgufFile(path)
    told = dict(file.metadata)
    monkeypatch.setattr(side_folder, "GgufFile", lambda path: file)
    monkeypatch.setattr("chairlift.gguf.gguf_tensors.GgufFile", lambda *given, **named: file)
    # Each is another file, of which a folder must be made.
    monkeypatch.setattr(side_folder, "parts_of", lambda path: [path])

    def say(key: str, value: object) -> None:
        file.metadata = told | {key: value}
        monkeypatch.setattr(side_folder, "_VERSION", next(number))

    keys = [key for key in told if key.startswith((told["general.architecture"], "tokenizer"))]
    lists = [[*told[key][:-1]] for key in keys if isinstance(told[key], list)]
    cases = [lambda key=key, value=value: say(key, value) for key in keys for value in (*SAID, *lists)]  # type: ignore[misc]
    refused = refusals(path, cases, monkeypatch, tmp_path)
    assert len(refused) > len(cases) / 3
    # By the name of the key, or of sizes that do not fit each other.
    names = (f"{told['general.architecture']}.", "tokenizer.ggml.", "hidden_size (", "moe_top_k (", "hidden_act ")
    assert not [each for each in refused if not any(name in each for name in names)]


def test_whatever_a_table_of_characters_holds_is_read_or_refused() -> None:
    """The library believes what it leads to, and panics where that is nowhere."""
    metadata = GgufFile(xlm_roberta_file()).metadata
    key, rng = "tokenizer.ggml.precompiled_charsmap", random.Random(0)
    whole, count, refused = metadata[key], 400, list[str]()
    used = [at for at, byte in enumerate(whole) if byte]
    for index in range(count):
        some = whole[: rng.randrange(len(whole))] if index % 8 == 0 else list(whole)
        for _ in range(rng.randint(1, 3)):
            if some:
                some[rng.choice(used) % len(some)] = rng.randrange(256)
        try:
            made = encoder_tokenizer_files(metadata | {key: some}, "m.gguf")
        except UnsupportedModel as error:
            refused.append(str(error))
            continue
        Tokenizer.from_str(json.dumps(made["tokenizer.json"])).encode("".join(REPLACED) + "\u00e4\uff22\U0001f642")
    assert count / 8 < len(refused) < count
    assert not [each for each in refused if "precompiled_charsmap of m.gguf is no whole table" not in each]


def test_a_table_of_characters_that_is_one_long_way_is_refused() -> None:
    """Each step of it would be looked at by itself."""
    metadata, key = GgufFile(xlm_roberta_file()).metadata, "tokenizer.ggml.precompiled_charsmap"
    encoder_tokenizer_files(metadata | {key: [*charsmap({"a" * 100: "b"})]}, "m.gguf")
    with pytest.raises(UnsupportedModel, match=r"precompiled_charsmap of m\.gguf is no whole table"):
        encoder_tokenizer_files(metadata | {key: [*charsmap({"a" * 700: "b"})]}, "m.gguf")
