"""Bounds known before tokenizing: never above the true number of tokens, and cuts that change nothing."""

import sys
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.text_tokenizers import KINDS, SAMPLE, build
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from chairlift.errors import InputTooLong, InvalidRequest
from chairlift.text.encoding import Cut, TextEncoder
from chairlift.text.lengths import TextLengths

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
MIXTURES = ["qwen", "llama3", "starcoder", "bert", "xlm", "nfd"]
CUTTABLE = [kind for kind in KINDS + MIXTURES if kind != "sentencepiece"]
BOUNDED = ["bytelevel", "sentencepiece", "qwen", "llama3", "starcoder", "nfd"]


@cache
def made(kind: str) -> Tokenizer:
    """A tokenizer of a kind, or with the normalizer and the splitting of a known family."""
    if kind in KINDS:
        return build(kind)
    tokenizer = build({"bert": "wordpiece", "xlm": "metaspace"}.get(kind, "bytelevel"))
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split: Any = None
    if kind in ("qwen", "llama3"):
        tokenizer.normalizer = normalizers.NFC()
        pattern = Regex(QWEN if kind == "qwen" else LLAMA3)
        split = [pre_tokenizers.Split(pattern, "isolated"), in_bytes]
    elif kind == "starcoder":
        split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    elif kind == "nfd":
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Sequence([normalizers.NFC()])])
    elif kind == "bert":
        tokenizer.normalizer = normalizers.BertNormalizer()
    else:
        steps = [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace("``", '"')]
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Strip()])
        split = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    if split is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    return tokenizer


def ids(kind: str, text: str) -> list[int]:
    return list(made(kind).encode(text, add_special_tokens=False).ids)


WORDS = [
    *(
        "hello",
        "World",
        "a b",
        "it's",
        " 's",
        "I'LL",
        "x" * 30,
        "12345",
        " 7 ",
        "漢字",
        "😀",
        "naïve",
        "e\u0301",
        "\u1fef",
    ),
    *(
        "ᾂ",
        "\u03b9\u0308\u0301",
        "\u212b",
        "\u0344",
        "<|end|>",
        "<s>",
        "``",
        ",",
        " ",
        "  ",
        "\n",
        " \n ",
        "\t",
        "\r\n",
    ),
    *("\u3000", "\u0e33", "▁", "Σ", "İ", "\u0000", "\u200b", "\u00ad", "ﷺ"),
]
words = st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=25)
texts = st.builds(lambda words, glue: glue.join(words), words, st.sampled_from(["", " ", " ", "a a"]))
long_texts = st.builds(lambda text, times: text * times, texts, st.integers(1, 30))


@settings(max_examples=400, deadline=None)
@given(kind=st.sampled_from(KINDS + MIXTURES), text=texts)
def test_never_more_than_the_text_has(kind: str, text: str) -> None:
    assert TextLengths(made(kind)).least_tokens(text) <= len(ids(kind, text))


@pytest.mark.parametrize("kind", BOUNDED)
def test_long_texts_have_a_bound_that_grows_with_them(kind: str) -> None:
    lengths = TextLengths(made(kind))
    assert lengths.max_token_bytes is not None
    longest = max(made(kind).get_vocab(), key=lambda token: len(token.encode()))
    assert lengths.max_token_bytes <= len(longest.encode())
    for text in (SAMPLE * 100, "hello " * 100, "漢字" * 100):
        assert len(text) / lengths.max_token_bytes / 9 <= lengths.least_tokens(text)


def test_canonical_forms_change_bytes_by_a_factor_of_three_at_most() -> None:
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000:
            size = len(chr(code).encode())
            assert size <= 3 * len(unicodedata.normalize("NFD", chr(code)).encode()) <= 9 * size


def test_the_bound_allows_for_a_normalizer_that_shortens() -> None:
    tokenizer = with_token(content="`" * 9, normalized=True)
    tokenizer.normalizer = normalizers.NFC()
    text = "\u1fef" * 9  # three bytes each, of which NFC leaves one
    assert len(tokenizer.encode(text).ids) == 1 == TextLengths(tokenizer).least_tokens(text)


def changed(**changes: Any) -> Tokenizer:
    tokenizer = build("bytelevel")
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def with_token(**settings: Any) -> Tokenizer:
    tokenizer = build("bytelevel")
    tokenizer.add_special_tokens([AddedToken(settings.pop("content", "<mask>"), **settings)])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        build("wordpiece"),
        build("metaspace"),
        changed(normalizer=normalizers.StripAccents()),
        changed(normalizer=normalizers.Replace(Regex(" +"), " ")),
        changed(normalizer=normalizers.NFKC()),
        changed(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        changed(model=models.BPE({"a": 0, "b": 1}, [])),
        with_token(lstrip=True),
        with_token(rstrip=True),
    ],
)
def test_no_bound_where_a_token_may_stand_for_anything(tokenizer: Tokenizer) -> None:
    assert TextLengths(tokenizer).max_token_bytes is None
    assert TextLengths(tokenizer).least_tokens("a" * 1000) == 0


@settings(max_examples=600, deadline=None)
@given(kind=st.sampled_from(CUTTABLE), text=long_texts, num_tokens=st.integers(1, 40))
def test_the_tokens_of_a_head_are_the_texts_first_ones(kind: str, text: str, num_tokens: int) -> None:
    head = TextLengths(made(kind)).head(text, num_tokens)
    if head != text:
        found = ids(kind, head)
        assert num_tokens <= len(found)
        assert found == ids(kind, text)[: len(found)]


@pytest.mark.parametrize("kind", CUTTABLE)
def test_heads_of_long_texts_are_short(kind: str) -> None:
    lengths = TextLengths(made(kind))
    text = SAMPLE * 1000
    assert len(lengths.head(text, 50)) < 50 * 8 * 5
    # Many characters that are no tokens come first: the head grows until it has enough.
    if kind in ("bert", "xlm"):
        head = lengths.head("   \u0301 " * 500 + text, 50)
        assert 2500 < len(head) < 20_000


@pytest.mark.parametrize(
    "tokenizer",
    [
        build("sentencepiece"),
        changed(normalizer=normalizers.Replace(Regex("a .*"), "")),
        changed(normalizer=normalizers.Replace("a", " ")),
        changed(pre_tokenizer=pre_tokenizers.ByteLevel(use_regex=False)),
        changed(pre_tokenizer=pre_tokenizers.Split(Regex("o w"), "isolated")),
        changed(pre_tokenizer=pre_tokenizers.Metaspace(split=False)),
        changed(model=models.BPE({"a": 0, "b": 1}, [], dropout=0.5)),
        with_token(content="two words"),
    ],
)
def test_what_can_not_be_cut_exactly_is_not_cut(tokenizer: Tokenizer) -> None:
    text = "hello world " * 500
    assert TextLengths(tokenizer).head(text, 5) == text


class Recorded:
    """A backend that notes how many characters it tokenizes."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend, self.seen = backend, 0

    def encode_batch_fast(self, given: list[Any], **more: Any) -> Any:
        self.seen += sum(len(part) for text in given for part in ((text,) if isinstance(text, str) else text))
        return self.backend.encode_batch_fast(given, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


def encoder(kind: str, folder: Path, max_tokens: int) -> tuple[TextEncoder, Recorded]:
    tokenizer = Tokenizer.from_str(made(kind).to_str())
    special = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "<|end|>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|end|>", pair="<s> $A <|end|> $B:1 <|end|>:1", special_tokens=special
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    found = TextEncoder(folder, max_tokens)
    backend: Any = Recorded(found._backend)
    found._backend = found._lengths._backend = backend
    return found, backend


@pytest.mark.parametrize("kind", CUTTABLE)
def test_encodings_are_those_of_cutting_after_tokenizing(kind: str, tmp_path: Path) -> None:
    fast, slow = encoder(kind, tmp_path, 33)[0], encoder(kind, tmp_path, 33)[0]
    slow._lengths.can_be_cut = False

    @settings(max_examples=80, deadline=None)
    @given(
        pairs=st.lists(st.tuples(long_texts, long_texts), min_size=1, max_size=3),
        length=st.none() | st.integers(3, 40),
        side=st.sampled_from(["right", "right", "left"]),
        second=st.none() | st.integers(1, 40),
    )
    def check(pairs: list[tuple[str, str]], length: int | None, side: Any, second: int | None) -> None:
        cut = Cut(length, side, second)
        assert fast.encode_pairs(pairs, truncate=cut) == slow.encode_pairs(pairs, truncate=cut)
        only = [text for pair in pairs for text in pair]
        assert fast.encode_texts(only, truncate=cut) == slow.encode_texts(only, truncate=cut)

    check()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("second", [None, 1])
def test_pairs_that_are_cut_to_little_cost_no_more_than_others(side: Any, second: int | None, tmp_path: Path) -> None:
    """The library has what it cuts off in pieces as long as what is left, each of one text with each of the other."""
    found, _ = encoder("bytelevel", tmp_path, 33)
    [encoding] = found.encode_pairs([(SAMPLE * 50, SAMPLE * 49)], truncate=Cut(5, side, second))
    assert len(encoding.token_ids) == 5


@pytest.mark.parametrize("kind", ["bytelevel", "bert"])
def test_little_of_what_is_cut_off_is_tokenized(kind: str, tmp_path: Path) -> None:
    found, backend = encoder(kind, tmp_path, 33)
    huge = SAMPLE * 1000
    assert len(found.encode_texts([huge], truncate=True)[0].token_ids) == 33
    assert len(found.encode_pairs([("hello", huge)], truncate=Cut(second=7))[0].token_ids) <= 33
    assert backend.seen < 10_000
    with pytest.raises(InvalidRequest, match="Unicode"):
        found.encode_texts([huge + "\ud800"], truncate=True)


def test_what_is_too_long_in_any_case_is_refused_untokenized(tmp_path: Path) -> None:
    found, backend = encoder("bytelevel", tmp_path, 33)
    for call in (
        lambda: found.encode_texts(["hello", SAMPLE * 1000]),
        lambda: found.encode_pairs([("a", "b"), ("hello", SAMPLE * 1000)]),
    ):
        with pytest.raises(InputTooLong, match="at least") as caught:
            call()
        assert caught.value.index == 1
    assert backend.seen == 0
