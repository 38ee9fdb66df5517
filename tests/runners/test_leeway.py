"""What is taken unseen is what the grammar allows, and nothing that a grammar would make of its own is."""

import json
import random
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chairlift import StructuredOutputsParams
from chairlift.demo import demo_path
from chairlift.ops.base import Int32s
from chairlift.runners.grammars.grammar import CompiledGrammar, Follower, GrammarTokenizer, TrialKind
from chairlift.runners.grammars.leeway import Leeway
from chairlift.text.structured import grammar_of

VOCAB = json.loads((Path(demo_path()) / "config.json").read_text())["vocab_size"]
WORDS = GrammarTokenizer(Path(demo_path()), VOCAB)
WORD = WORDS.plain.spelled
# Also texts that a look for words would take for free ones, if only one was looked for.
TEXTS = st.sampled_from(["", "a", WORD, f"{WORD}s and {WORD}", f'"{WORD}', "7" * 39, "7" * 80, "12", "é"])
STRINGS = st.builds(
    lambda least, more, bounded: {
        "type": "string",
        "minLength": least,
        **({"maxLength": least + more} if bounded else {}),
    },
    st.integers(0, 9),
    st.sampled_from([0, 1, 7, 30, 70, 300]),
    st.booleans(),
)
NUMBERS = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "number"},
        {"type": "integer", "minimum": 3, "maximum": 400},
        {"type": "number", "exclusiveMinimum": -1.5},
        {"type": "integer", "multipleOf": 7},
        {"enum": [10, 11, 12, 19, 7777]},
    ]
)
FORMATS = ["date-time", "time", "date", "duration", "email", "uuid", "hostname", "ipv4", "ipv6", "uri"]
FORMS = st.sampled_from(FORMATS).map(lambda form: {"type": "string", "format": form})
LEAVES = st.one_of(
    STRINGS,
    NUMBERS,
    FORMS,
    st.lists(TEXTS, min_size=1, max_size=3, unique=True).map(lambda texts: {"enum": texts}),
    st.just({"type": "boolean"}),
)


def inner(of: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    objects = st.dictionaries(st.sampled_from(["a", "bb", WORD, WORD + "s"]), of, max_size=3)
    return st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "minItems": 1}, of),
        st.builds(lambda first, second: {"anyOf": [first, second]}, of, of),
        st.builds(
            lambda properties, others: {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": others,
            },
            objects,
            st.one_of(st.just(False), of),
        ),
    )


SCHEMAS = st.recursive(LEAVES, inner, max_leaves=5)


def compiled(schema: dict[str, Any]) -> CompiledGrammar:
    return WORDS.compile(grammar_of(StructuredOutputsParams(json=schema)))


def after(follower: Follower, said: list[int]) -> llguidance.LLMatcher:
    """What the library has of a sequence that follows all that was said, token by token."""
    matcher = follower.grammar.matcher.deep_copy()
    assert all(matcher.try_consume_tokens([token]) for token in said)
    return matcher


def mask(matcher: llguidance.LLMatcher) -> set[int]:
    bits = np.zeros(WORDS.words, np.int32)
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    return tokens_of(bits)


def tokens_of(bits: Int32s) -> set[int]:
    return set(np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def pick(rng: random.Random, allowed: set[int], likes_digits: bool) -> int:
    """Mostly what goes on with text or digits; seldom what ends them."""
    goes_on = sorted(token for token in allowed if WORDS.plain.length(token) > 0)
    if likes_digits:
        goes_on = [token for token in goes_on if WORDS.plain.is_digits(token)] or goes_on
    return rng.choice(goes_on if goes_on and rng.random() < 0.95 else sorted(allowed))


def write(schema: dict[str, Any], trial: TrialKind, seed: int, likes_digits: bool, turns: int = 60) -> None:
    """Have a sequence say what the library allows, and see that it takes just that."""
    rng = random.Random(seed)
    follower = compiled(schema).begin(trial)
    said = follower.take_forced()
    for _ in range(turns):
        if follower.ended:
            break
        assert follower.error is None
        matcher = after(follower, said)
        allowed = mask(matcher)
        if not follower.is_open:
            assert tokens_of(follower.allowed) == allowed
        for token in rng.sample(range(VOCAB), 20):
            if not matcher.deep_copy().try_consume_tokens([token]):
                assert not follower.accept(token), WORDS.tokens.decode_bytes([token])
        token = pick(rng, allowed, likes_digits)
        assert follower.accept(token), WORDS.tokens.decode_bytes([token])
        follower.say(token)
        said.append(token)
        if not follower.go_on():
            follower.advance()
            said += follower.take_forced()


@settings(max_examples=150, deadline=None)
@given(SCHEMAS, st.sampled_from(TrialKind), st.integers(0, 2**32), st.booleans())
@example({"type": "string", "maxLength": 70}, TrialKind.NEVER, 0, True)
@example({"type": "string", "maxLength": 70}, TrialKind.OF_DRAWN, 0, False)
@example({"const": "7" * 400}, TrialKind.NEVER, 0, True)
def test_it_allows_what_the_library_allows(
    schema: dict[str, Any], trial: TrialKind, seed: int, likes_digits: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Always quick enough, however slow this machine is.
        patch.setattr("chairlift.runners.grammars.grammar._QUICK", 60)
        write(schema, trial, seed, likes_digits)


def state(follower: Follower) -> tuple[Any, ...]:
    """What of it others see."""
    known = not follower.is_open and not follower.ended
    return follower.error, follower.ended, follower.is_open, follower.is_tried, known and tokens_of(follower.allowed)


@settings(max_examples=100, deadline=None)
@given(SCHEMAS, st.sampled_from(TrialKind), st.integers(0, 2**32), st.booleans())
@example({"const": "a long text, " * 40}, TrialKind.NEVER, 0, False)
@example({"enum": [f"and {WORD}s", f"or {WORD}s"]}, TrialKind.OF_BEST, 0, False)
def test_in_two_parts_it_comes_to_the_same(
    schema: dict[str, Any], trial: TrialKind, seed: int, likes_digits: bool
) -> None:
    rng, grammar = random.Random(seed), compiled(schema)
    whole, parts = grammar.begin(trial), grammar.begin(trial)
    said = whole.take_forced()
    assert parts.take_forced() == said
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_QUICK", "_SLOW"):
            patch.setattr(f"chairlift.runners.grammars.grammar.{name}", 60)
        for _ in range(40):
            if whole.ended:
                break
            token = pick(rng, mask(after(whole, said)), likes_digits)
            said.append(token)
            for follower in (whole, parts):
                assert follower.accept(token)
                follower.say(token)
            went_on = whole.go_on()
            assert parts.go_on() == went_on
            if not went_on:
                whole.advance()
                if not parts.advance_in_part():
                    parts.advance()
                forced = whole.take_forced()
                assert parts.take_forced() == forced
                said += forced
            assert state(parts) == state(whole)


@pytest.mark.parametrize(
    ("begins", "goes_on"), [('{"a":"', "and so on, "), ('{"a":1', "234567890"), ('{"a":[0.5', "0")]
)
def test_long_texts_and_numbers_are_seldom_looked_at(
    begins: str, goes_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.runners.grammars.grammar._QUICK", 60)
    follower = compiled({"type": "object"}).follow(
        WORDS.tokens.tokenize_str(begins), forces=True, trial=TrialKind.OF_DRAWN
    )
    follower.advance()
    tokens, looks = WORDS.tokens.tokenize_str(goes_on * 40), 0
    for token in tokens:
        waiting = len(follower._said)
        assert follower.accept(token)
        follower.say(token)
        if not follower.go_on():
            follower.advance()
        looks += len(follower._said) <= waiting
    assert follower.error is None
    assert looks < 0.2 * len(tokens)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": WORD * 40},
        {"const": "7" * 60},
        *({"type": "string", "format": form} for form in FORMATS),
        {"type": "string", "pattern": "^[a-z]{60,}$"},
    ],
)
def test_none_is_seen_where_texts_have_a_form(schema: dict[str, Any]) -> None:
    follower = compiled(schema).begin(TrialKind.OF_DRAWN)
    assert follower._leeway.room == 0
    assert not follower._leeway.has_digits


def test_what_is_no_text_is_never_taken_for_it() -> None:
    leeway = Leeway(compiled({"type": "string"}).free)
    special = [token for token in range(VOCAB) if WORDS.tokens.is_special_token(token)]
    assert special
    assert {leeway.takes_text(token, 0) for token in special} == {False}
