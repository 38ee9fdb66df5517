"""Incremental detokenization equals full decoding, for every kind of tokenizer and any chunks."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.text_tokenizers import KINDS, SAMPLE, build

from chairlift.text.detokenize import ByteDetokenizer, WindowDetokenizer, make_detokenizer
from chairlift.text.tokenizer import Tokenizer

TOKENIZERS = {kind: Tokenizer(build(kind)) for kind in KINDS}
texts = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            ["👩‍👩‍👧‍👦", "漢字", "e\u0301", " ", "  ", "hello world", "\ufffd", "<|end|>", "🇩🇪", "नमस्ते", "\n\n"]
        ),
    ),
    max_size=8,
).map("".join)


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True, prompt: tuple[int, ...] = ()) -> list[str]:
    detokenizer = make_detokenizer(tokenizer.vocabulary, skip, prompt)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=texts, skip=st.booleans())
def test_pieces_join_to_the_full_decode(kind: str, text: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids, skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, TOKENIZERS["bytelevel"].vocab_size + 3), max_size=40), skip=st.booleans())
def test_random_tokens_of_a_byte_level_tokenizer_give_the_full_decode(ids: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS["bytelevel"]
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace", "bytelevel"])
@settings(max_examples=100, deadline=None)
@given(prompt=texts, text=texts)
def test_with_a_prompt_the_text_is_what_follows_the_prompt(kind: str, prompt: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt_ids, ids = tokenizer.encode("x" + prompt), tokenizer.encode(text)
    joined = "".join(stream(tokenizer, ids, prompt=tuple(prompt_ids)))
    assert tokenizer.decode(prompt_ids) + joined == tokenizer.decode(prompt_ids + ids)


def test_the_leading_space_of_a_continuation_stays() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.encode("world")
    assert "".join(stream(tokenizer, ids)) == "world"
    assert "".join(stream(tokenizer, ids, prompt=tuple(tokenizer.encode("hello")))) == " world"


@pytest.mark.parametrize("kind", ["bytelevel", "sentencepiece"])
def test_half_a_character_is_held_and_flushed_as_broken(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("a🦊")
    pieces = stream(tokenizer, ids[:-1])
    assert [p for p in pieces if p] == ["a", "\ufffd"]
    assert pieces[-1] == "\ufffd"


def test_broken_bytes_do_not_hold_the_text_back_for_ever() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    continuation = tokenizer.vocabulary._backend.token_to_id("<0x80>")
    detokenizer = make_detokenizer(tokenizer.vocabulary)
    assert "".join(detokenizer.push(continuation) for _ in range(10)) == "\ufffd" * 10
    window = WindowDetokenizer(tokenizer.vocabulary, frozenset(), ())
    assert "".join(window.push(continuation) for _ in range(10)).count("\ufffd") >= 5


def test_the_fast_way_is_taken_where_it_is_exact() -> None:
    kinds = {kind: type(make_detokenizer(TOKENIZERS[kind].vocabulary)) for kind in KINDS}
    assert kinds["bytelevel"] is kinds["sentencepiece"] is ByteDetokenizer
    assert kinds["metaspace"] is kinds["wordpiece"] is WindowDetokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_the_window_stays_small(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    detokenizer = WindowDetokenizer(tokenizer.vocabulary, frozenset(), ())
    for token_id in tokenizer.encode(SAMPLE * 20):
        detokenizer.push(token_id)
        assert len(detokenizer._window) <= 12


def test_tokens_without_text_do_not_pile_up() -> None:
    detokenizer = WindowDetokenizer(TOKENIZERS["metaspace"].vocabulary, frozenset(), ())
    for _ in range(50):
        detokenizer.push(10**6)
    assert len(detokenizer._window) <= 10


@pytest.mark.parametrize("kind", ["bytelevel", "sentencepiece"])
def test_token_bytes_join_to_the_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    text = "héllo 漢字 😀 wörld"
    joined = b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text)).decode()
    assert joined.removeprefix(" ") == text
    assert "".join(map(tokenizer.token_text, tokenizer.encode("plain words"))).strip() == "plain words"


def test_special_tokens_are_shown_only_on_demand() -> None:
    tokenizer = TOKENIZERS["bytelevel"]
    ids = tokenizer.encode("a<|end|>b")
    assert "".join(stream(tokenizer, ids, skip=True)) == "ab"
    assert "".join(stream(tokenizer, ids, skip=False)) == "a<|end|>b"
    assert tokenizer.token_text(ids[1]) == "<|end|>"


def test_a_saved_truncation_or_padding_is_switched_off() -> None:
    backend: tokenizers.Tokenizer = build("bytelevel")
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE
    assert tokenizer.encode_batch(["a", SAMPLE]) == [tokenizer.encode("a"), tokenizer.encode(SAMPLE)]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_that_are_shown_are_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    start, end = (tokenizer.backend.token_to_id(text) for text in ("<s>", "<|end|>"))
    ids = [*tokenizer.encode("hello", add_special_tokens=False), start, *tokenizer.encode("world", False), end]
    detokenizer = make_detokenizer(tokenizer.vocabulary, shown=frozenset({start}))
    text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert "<|end|>" not in text
    before, marker, after = text.partition("<s>")
    assert (before.strip(), marker, after.strip()) == ("hello", "<s>", "world")
