"""One sequence's way through its grammar: where it begins, and of which grammars tokens are tried."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from chairlift import LLM, SamplingParams, StructuredOutputsParams
from chairlift.demo import demo_path
from chairlift.runners.grammars.grammar import Follower, GrammarError, GrammarTokenizer, TrialKind
from chairlift.text.structured import grammar_of

VOCAB = json.loads((Path(demo_path()) / "config.json").read_text())["vocab_size"]
LETTERS = {"type": "string", "maxLength": 200}


@pytest.fixture(scope="module")
def words() -> GrammarTokenizer:
    return GrammarTokenizer(Path(demo_path()), VOCAB)


def written(follower: Follower, turns: int) -> list[int]:
    """What a sequence says that takes the first token it may, and what follows from each."""
    said = follower.take_forced()
    for token in range(VOCAB):
        if turns and not follower.ended and follower.accept(token):
            said.append(token)
            follower.say(token)
            follower.advance()
            return said + written(follower, turns - 1)
    return said


@pytest.mark.parametrize("trial", TrialKind)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": LETTERS, "b": {"type": "integer"}}, "required": ["a", "b"]},
        LETTERS,
        {"const": "nothing else"},
        {"type": "string", "pattern": "^[a-z]{3,8}$"},
    ],
)
def test_a_sequence_begins_where_following_its_grammar_leads(
    words: GrammarTokenizer, schema: dict[str, Any], trial: TrialKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Always quick enough, however slow this machine is.
    monkeypatch.setattr("chairlift.runners.grammars.grammar._QUICK", 60)
    grammar = words.compile(grammar_of(StructuredOutputsParams(json=schema)))
    begun, others = grammar.begin(trial), [grammar.begin(trial), grammar.follow([], forces=True, trial=trial)]
    others[1].advance()
    for other in others:
        told = (other.forced, other.ended, other.is_tried, other.is_open)
        assert (begun.forced, begun.ended, begun.is_tried, begun.is_open) == told
        assert np.array_equal(begun.allowed, other.allowed) or begun.is_open
    # None of them is moved by what another says.
    first = written(begun, 4)
    assert first
    assert [written(other, 4) for other in others] == [first, first]


def with_image_token(folder: Path) -> Path:
    """The demo model with one more token in its tokenizer than it has numbers for, as Gemma 3 1B has it."""
    shutil.copytree(demo_path(), folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<image>"])
    assert backend.token_to_id("<image>") == VOCAB
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("less", [0, 5, 40])
def test_a_tokenizer_may_have_more_tokens_than_the_model(words: GrammarTokenizer, less: int, tmp_path: Path) -> None:
    found = GrammarTokenizer(with_image_token(tmp_path / "model"), VOCAB - less)
    for schema in (LETTERS, {"type": "object", "properties": {"long name": {"type": "integer"}}}):
        grammar = grammar_of(StructuredOutputsParams(json=schema))
        own, other = (each.compile(grammar).begin(TrialKind.NEVER) for each in (found, words))
        assert own.forced == other.forced
        bits = [np.unpackbits(each.allowed.view(np.uint8), bitorder="little") for each in (own, other)]
        assert len(own.allowed) == -(-(VOCAB - less) // 32)
        assert np.array_equal(bits[0][: VOCAB - less], bits[1][: VOCAB - less])
        assert not bits[0][VOCAB - less :].any()
        assert own.bits.data_ptr() == own.allowed.ctypes.data
    with pytest.raises(GrammarError, match="only tokens here that the model has not"):
        found.compile("start: <image>")


def test_a_model_of_fewer_tokens_than_its_tokenizer_is_held_to_a_schema(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
    llm = LLM(str(with_image_token(tmp_path / "model")), kv_cache_gb=0.01)
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            max_tokens=60, temperature=temperature, structured_outputs=StructuredOutputsParams(json=schema)
        )
        text = llm.generate(["hello"], params)[0].outputs[0].text
        assert json.loads(text)["a"] in ("x", "yy")
    llm.close()


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ({"type": "string", "maxLength": 9}, True),
        ({"type": "string", "format": "date-time"}, True),
        ({"type": "string", "pattern": "a+"}, False),
        ({"type": "object", "patternProperties": {"a+": {"type": "string"}}}, False),
    ],
)
def test_tokens_are_tried_where_no_client_describes_what_is_allowed(
    words: GrammarTokenizer, text: dict[str, Any], is_plain: bool
) -> None:
    schema = {"type": "array", "items": text}
    assert words.compile(grammar_of(StructuredOutputsParams(json=schema))).is_plain == is_plain


def test_a_token_is_quiet_if_it_forced_nothing_when_it_was_last_said(words: GrammarTokenizer) -> None:
    first, second = {"enum": ["ax", "ay", "b"]}, {"enum": ["abc", "b"]}
    schema = {"type": "array", "prefixItems": [first, second], "minItems": 2, "items": False}
    grammar = words.compile(grammar_of(StructuredOutputsParams(json=schema)))
    a, x = (words.tokens.tokenize_str(letter)[0] for letter in "ax")
    follower, other = grammar.begin(TrialKind.NEVER), grammar.begin(TrialKind.NEVER)
    for each in (follower, other):
        each.take_forced()
        each.say(a)
    assert not other.is_quiet
    follower.advance()
    assert follower.take_forced() == []
    assert other.is_quiet
    follower.say(x)
    follower.advance()
    assert follower.take_forced() != []
    follower.say(a)
    follower.advance()
    assert follower.take_forced() != []
    assert not other.is_quiet
