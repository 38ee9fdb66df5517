"""Texts and pairs as encoders take them, against transformers' own handling of the same tokenizer.json."""

from pathlib import Path
from typing import Any

import pytest
from text_tokenizers import build
from tokenizers import processors

from chairlift.errors import InvalidRequest
from chairlift.text.encoding import Cut, encode_pairs, encode_texts
from chairlift.text.tokenizer import Tokenizer

TEXTS = ["hello world", "the quick brown fox sees and sees hello world hello", "Hello", ""]
PAIRS = [("hello world", "the quick brown fox"), ("the quick brown fox sees words", "hello"), ("", "hello world")]


@pytest.fixture(params=["wordpiece", "bytelevel"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tokenizer that puts special tokens around texts and pairs, and saved settings that must not count."""
    tokenizer = build(request.param)
    special = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "<|end|>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|end|>", pair="<s> $A <|end|> $B:1 <|end|>:1", special_tokens=special
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def expected(folder: Path, max_tokens: int, given: list[Any]) -> list[tuple[list[int], list[int]]]:
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    found = [
        reference(
            *((one,) if isinstance(one, str) else one),
            truncation=True,
            max_length=max_tokens,
            return_token_type_ids=True,
        )
        for one in given
    ]
    return [(one["input_ids"], one["token_type_ids"]) for one in found]


@pytest.mark.parametrize("max_tokens", [100, 12, 9, 8, 7, 5])
def test_texts_and_pairs(folder: Path, max_tokens: int) -> None:
    tokenizer, cut = Tokenizer.from_folder(folder), Cut(max_tokens)
    for found, given in ((encode_texts(tokenizer, TEXTS, cut), TEXTS), (encode_pairs(tokenizer, PAIRS, cut), PAIRS)):
        for one, (ids, types) in zip(found, expected(folder, max_tokens, given), strict=True):
            assert one.token_ids == ids
            assert (one.type_ids or [0] * len(ids)) == types
            assert len(ids) <= max_tokens


def test_the_start_can_be_cut_off_instead(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    (whole,) = encode_texts(tokenizer, TEXTS[1:2])
    (cut,) = encode_texts(tokenizer, TEXTS[1:2], Cut(5, "left"))
    assert cut.token_ids == [whole.token_ids[0], *whole.token_ids[-4:]]


def test_the_second_of_a_pair_may_have_a_limit_of_its_own(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    (whole,) = encode_pairs(tokenizer, PAIRS[:1])
    (cut,) = encode_pairs(tokenizer, PAIRS[:1], Cut(100, second=2))
    assert sum(cut.type_ids or ()) == 3
    assert cut.token_ids == [*whole.token_ids[: len(cut.token_ids) - 1], whole.token_ids[-1]]


def test_types_are_left_out_where_all_are_of_one_kind(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert encode_texts(tokenizer, ["hello"])[0].type_ids is None
    assert encode_pairs(tokenizer, [("hello", "world")])[0].type_ids is not None


def test_lowercase(folder: Path) -> None:
    lower, plain = Tokenizer.from_folder(folder, lowercase=True), Tokenizer.from_folder(folder)
    assert encode_texts(lower, ["HELLO World"]) == encode_texts(plain, ["hello world"])
    assert encode_pairs(lower, [("HELLO", "World")]) == encode_pairs(plain, [("hello", "world")])


def test_a_lone_surrogate_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        encode_texts(Tokenizer.from_folder(folder), ["a\ud800"])
