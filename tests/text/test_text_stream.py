"""TextStream: what the client sees of a sequence, and when it ends."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.text_tokenizers import SAMPLE, build

from chairlift.core.finished import FinishReason
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.text import TextDelta, TextStream, Tokenizer
from chairlift.text.detokenize import stop_automaton

TOKENIZER = Tokenizer(build("bytelevel"))
END = TOKENIZER.encode("<|end|>")[0]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def stream(**params: Any) -> TextStream:
    wanted = SamplingParams(**params)
    return TextStream(TOKENIZER.vocabulary, wanted, automaton=stop_automaton(wanted))


def test_plain_text_then_length() -> None:
    s = stream()
    assert s.push(ids("hello")).text == "hello"
    delta = s.push(ids(" world"), FinishReason.LENGTH)
    assert delta == TextDelta(" world", len(ids(" world")), FinishReason.LENGTH)
    assert s.num_tokens == len(ids("hello")) + len(ids(" world"))
    assert s.push(ids("late")) == TextDelta("", 0, FinishReason.LENGTH)


def test_the_models_own_eos_is_silent_and_counted() -> None:
    s = stream(skip_special_tokens=False)
    delta = s.push([*ids("hello"), END], FinishReason.STOP, END)
    assert (delta.text, delta.finish_reason, delta.stop_reason, delta.stopped) == ("hello", "stop", None, False)
    assert delta.num_tokens == s.num_tokens == len(ids("hello")) + 1


def test_a_named_stop_token_is_the_reason_and_may_be_shown() -> None:
    token = ids("x")[0]
    assert stream(stop_token_ids=[token]).push([*ids("ab"), token], FinishReason.STOP, token).text == "ab"
    shown = stream(stop_token_ids=[token], include_stop_str_in_output=True)
    delta = shown.push([*ids("ab"), token], FinishReason.STOP, token)
    assert (delta.text, delta.stop_reason) == ("abx", token)


def test_a_stop_string_ends_the_text_and_later_tokens_do_not_count() -> None:
    s = stream(stop=["STOP"])
    tokens = ids("abSTOP")
    delta = s.push([*tokens, *ids("more and more")])
    assert (delta.text, delta.finish_reason, delta.stop_reason, delta.stopped) == ("ab", "stop", "STOP", True)
    assert delta.num_tokens == s.num_tokens == len(tokens)
    assert s.push(ids("late")) == TextDelta("", 0, FinishReason.STOP, "STOP", True)


def test_a_stop_string_in_the_last_push_beats_length() -> None:
    delta = stream(stop="b").push(ids("a b c"), FinishReason.LENGTH)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a ", "stop", "b")


def test_held_back_text_comes_out_at_the_end() -> None:
    s = stream(stop="world!")
    assert s.push(ids("hello wor")).text == "hello "
    assert s.push([END], FinishReason.STOP, END).text == "wor"


def test_include_stop() -> None:
    assert stream(stop="b", include_stop_str_in_output=True).push(ids("a b c")).text == "a b"


def test_stop_strings_wait_for_min_tokens() -> None:
    tokens = [*ids("b"), *ids("b"), *ids("a"), *ids("b"), *ids("c")]
    assert len(tokens) == 5
    delta = stream(stop="b", min_tokens=2).push(tokens)
    assert (delta.text, delta.num_tokens) == ("bba", 4)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip: bool) -> None:
    delta = stream(skip_special_tokens=skip).push([*ids("a"), END, *ids("b")], FinishReason.LENGTH)
    assert delta.text == ("ab" if skip else "a<|end|>b")


def test_a_broken_last_character_is_flushed() -> None:
    assert stream().push(ids("a🦊")[:-1], FinishReason.LENGTH).text == "a\ufffd"


def test_offsets_only_when_logprobs_are_asked_for() -> None:
    assert stream().offsets is None
    s = stream(logprobs=0)
    tokens = ids("hello 😀 world")
    for token in tokens:
        s.push([token])
    assert s.offsets is not None
    assert len(s.offsets) == s.num_tokens == len(tokens)
    assert s.offsets[0] == 0
    text = "hello 😀 world"
    for token, offset in zip(tokens, s.offsets, strict=True):
        piece = TOKENIZER.token_text(token)
        if "\ufffd" not in piece:
            assert text[offset : offset + len(piece)] == piece


def test_the_text_continues_the_prompt() -> None:
    tokenizer = Tokenizer(build("sentencepiece"))
    tokens, prompt = tokenizer.encode("world"), tokenizer.encode("hello")
    assert TextStream(tokenizer.vocabulary, SamplingParams()).push(tokens).text == "world"
    assert TextStream(tokenizer.vocabulary, SamplingParams(), prompt).push(tokens).text == " world"


@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(st.sampled_from([SAMPLE, "hello ", "漢字", "😀", "wor", "ld"]), max_size=6),
    sizes=st.lists(st.integers(1, 7), min_size=1),
    stops=st.lists(st.sampled_from(["world", "字", "hello h", "o w", "zzz"]), max_size=3),
)
def test_chunks_make_no_difference(words: list[str], sizes: list[int], stops: list[str]) -> None:
    tokens = ids("".join(words))
    whole = stream(stop=stops)
    expected = whole.push(tokens, FinishReason.LENGTH)
    parts = stream(stop=stops)
    text, position = "", 0
    while position < len(tokens):
        size = sizes[position % len(sizes)]
        delta = parts.push(tokens[position : position + size])
        position += size
        text += delta.text
    last = parts.push([], FinishReason.LENGTH)
    assert text + last.text == expected.text
    assert (last.finish_reason, last.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert parts.num_tokens == whole.num_tokens
