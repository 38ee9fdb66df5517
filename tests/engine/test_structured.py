"""Answers that follow a grammar, on the demo model: against a walk through the grammar that forces nothing."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import msgspec
import numpy as np
import pytest
from support.native_isa import needs_native

from chairlift import LLM, SamplingParams, StructuredOutputsParams
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.standing import SequenceState, Standing
from chairlift.core.sequences.step import Step, StepResult
from chairlift.demo import demo_path
from chairlift.errors import InvalidRequest
from chairlift.library.outputs import CompletionOutput
from chairlift.runners.grammars.grammar import CompiledGrammar, Follower, GrammarError, GrammarTokenizer
from chairlift.text.structured import grammar_of

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "city": {"enum": ["Paris", "Pisa"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
PROMPTS = ["Hello", "The chairlift is", "Batching", "A", "Requests wait", "In the", "One two", "Why?"]
UNWANTED = 'start: "unwanted"'
AS_JSON = StructuredOutputsParams(json=PERSON)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    model = LLM(demo_path(), max_num_seqs=8, kv_cache_gb=0.1)
    yield model
    model.close()


@pytest.fixture(scope="module")
def quantized() -> Iterator[LLM]:
    """One that tries the likeliest tokens too, as its last product is our own."""
    model = LLM(demo_path(), max_num_seqs=8, kv_cache_gb=0.1, quantization="int8")
    yield model
    model.close()


@pytest.fixture(scope="module")
def words() -> GrammarTokenizer:
    return GrammarTokenizer(Path(demo_path()), LLM_VOCAB)


LLM_VOCAB = json.loads((Path(demo_path()) / "config.json").read_text())["vocab_size"]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for every follower, however busy the machine is."""
    monkeypatch.setattr("chairlift.runners.grammars.grammar_rows._MOST_WAIT", 60)
    monkeypatch.setattr("chairlift.runners.grammars.grammar_rows._WAIT_FOR_FORCED", 1e6)
    monkeypatch.setattr("chairlift.runners.grammars.stopwatch._LONG", 60)


def ask(
    llm: LLM, prompts: Any, wanted: StructuredOutputsParams | list[Any] | None = AS_JSON, **fields: Any
) -> list[CompletionOutput]:
    """Answers to prompts, all as `wanted`, or each as one of a list."""
    fields = {"max_tokens": 60, "temperature": 1.0, "seed": 3} | fields
    each = wanted if isinstance(wanted, list) else [wanted]
    params: Any = [SamplingParams(**fields, structured_outputs=one) for one in each]
    params = params if isinstance(wanted, list) else params[0]
    return [sample for output in llm.generate(prompts, params, use_tqdm=False) for sample in output.outputs]


def check_walk(words: GrammarTokenizer, wanted: StructuredOutputsParams, sample: CompletionOutput) -> None:
    """Every token was allowed when it came, and nothing is missing at the end."""
    matcher = llguidance.LLMatcher(words.tokens, grammar_of(wanted))
    for token in sample.token_ids:
        assert matcher.consume_token(token), (sample.text, matcher.get_error())
    assert sample.finish_reason != "stop" or matcher.is_accepting() or matcher.is_stopped()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_written_follows_the_schema(llm: LLM, words: GrammarTokenizer, temperature: float) -> None:
    for sample in ask(llm, PROMPTS, temperature=temperature):
        assert sample.finish_reason == "stop"
        jsonschema.validate(json.loads(sample.text), PERSON)
        assert " " not in sample.text.partition('"age"')[2], "not compact"
        check_walk(words, AS_JSON, sample)


@pytest.mark.parametrize(
    ("wanted", "example"),
    [
        (StructuredOutputsParams(json_object=True), '{"a":[1,{"b":null}]}'),
        (StructuredOutputsParams(json=json.dumps(PERSON)), '{"name":"x","age":7,"city":"Pisa"}'),
        (StructuredOutputsParams(regex=r"^[a-c]{3}/\d\d$"), "abc/42"),
        (StructuredOutputsParams(choice=["yes", 'no "way"', "maybe\n"]), 'no "way"'),
        (StructuredOutputsParams(grammar='start: "x" (NUMBER ",")* "!"\nNUMBER: /[0-9]+/'), "x1,22,!"),
        (StructuredOutputsParams(grammar='root ::= ("a" | "b") [0-9]'), "b7"),
        (StructuredOutputsParams(json=PERSON, whitespace_pattern=" {0,2}"), '{"name": "x", "age":  7,"city": "Pisa"}'),
        (
            StructuredOutputsParams(
                structural_tag={
                    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
                    "triggers": ["<f"],
                }
            ),
            "free words <f>12</f> and more",
        ),
    ],
    ids=["object", "text", "regex", "choice", "lark", "gbnf", "white space", "tags"],
)
def test_all_forms(llm: LLM, words: GrammarTokenizer, wanted: StructuredOutputsParams, example: str) -> None:
    for sample in ask(llm, PROMPTS[:4], wanted, max_tokens=30):
        check_walk(words, wanted, sample)
    matcher = llguidance.LLMatcher(words.tokens, grammar_of(wanted))
    tokens = words.tokens.tokenize_str(example)
    assert matcher.validate_tokens(tokens) == len(tokens)


def test_forced_tokens_are_those_that_would_be_chosen_one_by_one(llm: LLM) -> None:
    forced = ask(llm, PROMPTS)
    # With log-probabilities every token is chosen.
    chosen = ask(llm, PROMPTS, logprobs=1)
    assert [sample.token_ids for sample in forced] == [sample.token_ids for sample in chosen]
    assert all(len(sample.logprobs or ()) == len(sample.token_ids) for sample in chosen)


@pytest.mark.usefixtures("patient")
def test_forced_tokens_save_steps(llm: LLM) -> None:
    steps = []
    for logprobs in (None, 0):
        before = llm.engine.scheduler.num_steps
        [sample] = ask(llm, "Hello", temperature=0.0, logprobs=logprobs)
        steps.append(llm.engine.scheduler.num_steps - before)
    assert steps[1] == len(sample.token_ids)
    assert steps[0] < steps[1] - 5


def test_a_sequence_is_the_same_in_any_company_and_under_any_strategy(llm: LLM) -> None:
    together = ask(llm, PROMPTS)
    assert [ask(llm, prompt)[0].token_ids for prompt in PROMPTS] == [sample.token_ids for sample in together]
    plain = ask(llm, PROMPTS, None)
    mixed = llm.generate(
        PROMPTS,
        [
            SamplingParams(max_tokens=60, temperature=1.0, seed=3, structured_outputs=AS_JSON if odd else None)
            for odd in (False, True) * 4
        ],
        use_tqdm=False,
    )
    wanted = [(together if odd else plain)[index].token_ids for index, odd in enumerate((False, True) * 4)]
    assert [output.outputs[0].token_ids for output in mixed] == wanted
    for strategy in ("none", "static", "dynamic"):
        other = LLM(
            demo_path(), strategy=strategy, kv_cache_gb=0.02, **({} if strategy == "none" else {"batch_size": 3})
        )
        assert [sample.token_ids for sample in ask(other, PROMPTS)] == [sample.token_ids for sample in together]
        other.close()


def test_preempted_sequences_go_on_where_they_were(llm: LLM) -> None:
    wanted = StructuredOutputsParams(regex="([a-z]{1,9} ){60}")
    calm = ask(llm, PROMPTS, wanted, max_tokens=150)
    # One sequence of 256 tokens fits.
    tight = LLM(demo_path(), max_num_seqs=8, max_model_len=256, kv_cache_gb=1e-9 + _gb_for(llm, 272))
    assert [s.token_ids for s in ask(tight, PROMPTS, wanted, max_tokens=150)] == [s.token_ids for s in calm]
    assert tight.engine.scheduler.num_preemptions > 0
    tight.close()


def _gb_for(llm: LLM, num_tokens: int) -> float:
    info = llm.engine.info
    return info.kv_bytes / (info.num_blocks * info.block_size) * num_tokens / 1e9


def test_sampling_parameters_hold_beside_a_grammar(llm: LLM, words: GrammarTokenizer) -> None:
    three = ask(llm, "Hello", n=3)
    assert [sample.token_ids for sample in three] == [ask(llm, "Hello", seed=3 + i)[0].token_ids for i in range(3)]
    letters = StructuredOutputsParams(regex="[ab]*")
    banned = words.tokens.tokenize_str("c")[0]
    [sample] = ask(llm, "Hello", letters, logit_bias={banned: 100.0}, max_tokens=8)
    assert set(sample.text) <= set("ab")
    # The end is allowed from the first token on, and likeliest.
    ends = {"logit_bias": dict.fromkeys(llm.tokenizer.eos_ids, 100.0), "max_tokens": 8}
    assert len(ask(llm, "Hello", letters, **ends)[0].token_ids) == 1
    assert len(ask(llm, "Hello", letters, min_tokens=5, **ends)[0].token_ids) == 6
    [stopped] = ask(llm, "Hello", stop='","age', temperature=0.0)
    assert stopped.stop_reason == '","age'
    assert stopped.text.startswith('{"name":"')
    forty = StructuredOutputsParams(regex="[ab]{40}")
    repeated = ask(llm, "Hello", forty, temperature=0.0)
    penalized = ask(llm, "Hello", forty, temperature=0.0, frequency_penalty=2.0)
    assert repeated[0].token_ids != penalized[0].token_ids


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8])
def test_max_tokens_may_fall_amid_forced_ones(llm: LLM, max_tokens: int) -> None:
    [sample] = ask(llm, "Hello", max_tokens=max_tokens)
    assert len(sample.token_ids) == max_tokens
    assert sample.finish_reason == "length"
    assert ask(llm, "Hello")[0].token_ids[:max_tokens] == sample.token_ids
    assert llm.engine.scheduler.pool.num_used == 0


def test_a_grammar_that_is_done_ends_the_sequence_at_once(llm: LLM) -> None:
    before = llm.engine.scheduler.num_steps
    [sample] = ask(llm, "Hello", StructuredOutputsParams(choice=["Paris"]), ignore_eos=True, min_tokens=30)
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("Paris", "stop", None)
    assert llm.engine.scheduler.num_steps - before == 1


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (StructuredOutputsParams(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (StructuredOutputsParams(json={"if": {}, "then": {}}), "if"),
        (StructuredOutputsParams(json={"type": "string", "format": "nonsense"}), "nonsense"),
        (StructuredOutputsParams(json={"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (StructuredOutputsParams(regex="a(?=b)"), "look-around"),
        (StructuredOutputsParams(grammar="start: nonsense"), "nonsense"),
        (
            StructuredOutputsParams(json={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
            "nothing satisfies",
        ),
    ],
)
def test_what_can_not_be_enforced_is_refused_by_name(llm: LLM, wanted: StructuredOutputsParams, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        ask(llm, "Hello", wanted)
    assert llm.engine.num_unfinished == 0


def test_a_grammar_that_gets_too_complex_ends_its_own_sequence_alone(llm: LLM) -> None:
    # What is allowed first is known, and the rest is more than the library will work out.
    hard = StructuredOutputsParams(regex="[xy](a?){1000}a{1000}")
    params = [SamplingParams(max_tokens=20, temperature=0.0, structured_outputs=each) for each in (hard, AS_JSON)]
    first, second = (output.outputs[0] for output in llm.generate(["Hello", "Hello"], params, use_tqdm=False))
    assert first.finish_reason == "invalid"
    assert "too" in str(first.stop_reason)
    assert second.token_ids == ask(llm, "Hello", temperature=0.0, max_tokens=20)[0].token_ids
    assert llm.engine.scheduler.pool.num_used == 0


def test_what_breaks_before_anything_is_chosen_is_refused_when_it_is_compiled(words: GrammarTokenizer) -> None:
    with pytest.raises(GrammarError, match="too many"):
        words.compile("start: /x(a?){1000}a{1000}/")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Follower]:
    """The followers of the test's sequences, in the order of these. Earlier ones may still be advanced."""
    found: list[Follower] = []
    follow = CompiledGrammar.follow

    def noted(*args: Any, **fields: Any) -> Follower:
        follower = follow(*args, **fields)
        if not fields:  # no trial of a grammar that is compiled
            found.append(follower)
        return follower

    monkeypatch.setattr(CompiledGrammar, "follow", noted)
    return found


class Gate:
    """Holds up one follower of those made, in whatever thread advances it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, made: list[Follower], which: int) -> None:
        self.open = threading.Event()
        self.held: Follower | None = None
        advance = Follower.advance

        def slowly(follower: Follower) -> None:
            if follower in made[which : which + 1]:
                self.held = follower
                assert self.open.wait(60)
            advance(follower)

        monkeypatch.setattr(Follower, "advance", slowly)


def apart(schema: dict[str, Any]) -> list[StructuredOutputsParams]:
    """A schema for three sequences, each of which has a grammar of its own: those of one share a lexer and its lock."""
    return [StructuredOutputsParams(json={**schema, "$comment": str(number)}) for number in range(3)]


SENTENCES = apart({"type": "string", "minLength": 200})
OBJECTS = apart({"type": "object"})


def test_one_that_takes_long_holds_up_nobody(llm: LLM, made: list[Follower], monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough for it to be late again and again.
    expected = ask(llm, PROMPTS[:3], SENTENCES)
    made.clear()
    # However busy the machine is, those that go on are waited for.
    monkeypatch.setattr("chairlift.runners.grammars.grammar_rows._MOST_WAIT", 1.0)
    gate = Gate(monkeypatch, made, 1)
    late: list[str] = []
    execute = llm.engine.runner.execute

    def observed(step: Step) -> StepResult:
        result = execute(step)
        late.extend(result.late)
        # Nobody else is left, and it was late again and again: now it may go on.
        if len(step.num_tokens) == 1 and max(Counter(late).values(), default=0) > 5:
            gate.open.set()
        return result

    monkeypatch.setattr(llm.engine.runner, "execute", observed)
    assert [sample.token_ids for sample in ask(llm, PROMPTS[:3], SENTENCES)] == [
        sample.token_ids for sample in expected
    ]
    assert gate.held is not None
    # Those behind it in the queue wait for the moment in which it is noticed. It rests between the steps that it is in,
    # and where it is alone they wait for it.
    (_, most), *others = Counter(late).most_common()
    assert most > 5
    assert all(count <= 2 for _, count in others)


def test_one_that_never_ends_fails_alone(llm: LLM, made: list[Follower], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ask(llm, PROMPTS[:3], OBJECTS)
    made.clear()
    gate = Gate(monkeypatch, made, 0)
    with monkeypatch.context() as patch:
        patch.setattr("chairlift.runners.grammars.look_ahead._TOO_LONG", 0.05)
        samples = ask(llm, PROMPTS[:3], OBJECTS)
    gate.open.set()
    while gate.held is None or gate.held.busy:
        time.sleep(0.001)
    assert samples[0].finish_reason == "invalid"
    assert "needs more than" in str(samples[0].stop_reason)
    assert [sample.token_ids for sample in samples[1:]] == [sample.token_ids for sample in expected[1:]]
    assert ask(llm, PROMPTS[:1], OBJECTS[:1])[0].token_ids == expected[0].token_ids


class Panic(BaseException):
    """As pyo3 raises it."""


@pytest.mark.usefixtures("patient")
def test_a_panic_of_the_library_ends_one_sequence(
    llm: LLM, made: list[Follower], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(follower: Follower, began: float, finds_allowed: bool) -> None:
        raise Panic("index out of bounds")

    follow = Follower._follow

    def sometimes(follower: Follower, began: float, finds_allowed: bool) -> None:
        (broken if follower in made[1:2] else follow)(follower, began, finds_allowed)

    monkeypatch.setattr(Follower, "_follow", sometimes)
    samples = ask(llm, PROMPTS[:3])
    assert [sample.finish_reason for sample in samples] == ["stop", "invalid", "stop"]
    assert "index out of bounds" in str(samples[1].stop_reason)


class Matcher:
    """A matcher that breaks at what is `broken`."""

    def __init__(self, real: llguidance.LLMatcher, broken: str) -> None:
        self._real, self._broken = real, broken

    def __getattr__(self, name: str) -> Any:
        if name == self._broken:
            raise Panic("index out of bounds")
        return getattr(self._real, name)


@needs_native
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", ["try_consume_tokens", "validate_tokens"])
def test_a_panic_while_a_token_is_tried_ends_one_sequence(
    quantized: LLM, monkeypatch: pytest.MonkeyPatch, broken: str, temperature: float
) -> None:
    begin = CompiledGrammar.begin
    made: list[Follower] = []

    def noted(*args: Any) -> Follower:
        follower = begin(*args)
        made.append(follower)
        if len(made) == 2:
            follower._matcher = Matcher(follower._matcher, broken)  # type: ignore[assignment]
        return follower

    monkeypatch.setattr(CompiledGrammar, "begin", noted)
    monkeypatch.setattr("chairlift.runners.grammars.grammar_rows._FEW", 0)
    # Tokens are tried where what is allowed is left to a pass, however long one of them took.
    for name, value in (("_LONG_HERE", 60.0), ("_HERE", 1e6), ("_IN_PASS", 1e6)):
        monkeypatch.setattr(f"chairlift.runners.grammars.grammar_rows.{name}", value)
    monkeypatch.setattr("chairlift.runners.grammars.grammar._LIGHT", 60.0)
    samples = ask(quantized, PROMPTS[:3], temperature=temperature)
    assert [sample.finish_reason for sample in samples] == ["stop", "invalid", "stop"]
    assert "index out of bounds" in str(samples[1].stop_reason)


# Nearly anything, and near its end nearly nothing.
STORY = StructuredOutputsParams(json={"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 4})
# What most tokens are too long for, at any time.
WORDS = StructuredOutputsParams(json={"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 8})


# Where nothing is native tokens are not tried.
@needs_native
@pytest.mark.parametrize("wanted", [STORY, WORDS], ids=["story", "words"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 3.0])
def test_what_is_chosen_does_not_depend_on_whether_what_is_allowed_is_known(
    quantized: LLM,
    words: GrammarTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    wanted: StructuredOutputsParams,
    temperature: float,
) -> None:
    """Nor on greedy requests being tried at all, nor on the company."""
    fields: dict[str, Any] = {"temperature": temperature, "max_tokens": 40}
    accepted: list[bool] = []
    accept = Follower.accept

    def noted(follower: Follower, token: int) -> bool:
        accepted.append(accept(follower, token))
        return accepted[-1]

    monkeypatch.setattr(Follower, "accept", noted)
    monkeypatch.setattr("chairlift.runners.grammars.grammar_rows._FEW", 0)
    alone = [ask(quantized, prompt, wanted, seed=index, **fields)[0] for index, prompt in enumerate(PROMPTS)]
    assert True in accepted
    assert temperature < 3 or False in accepted
    for sample in alone:
        check_walk(words, wanted, sample)
    expected = [sample.token_ids for sample in alone]
    params = [SamplingParams(**fields, seed=index, structured_outputs=wanted) for index in range(len(PROMPTS))]
    assert [output.outputs[0].token_ids for output in quantized.generate(PROMPTS, params, use_tqdm=False)] == expected
    # Never quick enough, so that what is allowed is always found beforehand.
    monkeypatch.setattr("chairlift.runners.grammars.grammar._QUICK", -1)
    assert [output.outputs[0].token_ids for output in quantized.generate(PROMPTS, params, use_tqdm=False)] == expected


def test_bits_of_tokens_that_are_padding_are_never_set(words: GrammarTokenizer) -> None:
    padded = GrammarTokenizer(Path(demo_path()), LLM_VOCAB + 50)
    follower = padded.compile("start: /(.|\\n)*/").follow([], True)
    follower.advance()
    bits = np.unpackbits(follower.allowed.view(np.uint8), bitorder="little")
    assert bits[: words.tokens.vocab_size].sum() > 100
    assert not bits[words.tokens.vocab_size :].any()


@pytest.mark.processes
def test_a_small_pattern_takes_little_memory_whatever_it_stands_for() -> None:
    """In a process of its own, whose memory nothing else has used."""
    script = f"""
from pathlib import Path
from chairlift import StructuredOutputsParams
from chairlift.demo import demo_path
from chairlift.runners.grammars.grammar import GrammarTokenizer
from chairlift.text.structured import grammar_of

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

words = GrammarTokenizer(Path(demo_path()), {LLM_VOCAB})
nested = grammar_of(StructuredOutputsParams(regex="[xy]((((((a{{50}}){{50}}){{50}}){{50}}){{50}}){{50}})"))
before = resident()
held = words.compile(nested)
print((resident() - before) // 2**20)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64


def test_what_nobody_waits_for_is_not_compiled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.runners.grammars.grammar_compiler._MOST_SLOW", 0)
    for name in "ab":
        request = Request(id=name, prompt_ids=[5], params=SamplingParams(), max_tokens=4, arrival=0.0)
        llm.engine.add(msgspec.structs.replace(request, grammar=UNWANTED))
    llm.engine.abort(["a"])
    assert (llm.engine.num_unprepared, list(llm.sequences._runner.grammars._waiting)) == (1, [UNWANTED])
    assert llm.engine.explain({"a", "b"}) == [Standing("b", SequenceState.PREPARING)]
    later = msgspec.structs.replace(request, id="c", grammar=UNWANTED, background=True)
    llm.engine.add(later)
    stats = llm.engine.stats()
    assert (stats.waiting, stats.background_waiting) == (1, 1), "background requests are no live ones"
    llm.engine.abort(["b", "c"])
    assert (llm.engine.num_unprepared, list(llm.sequences._runner.grammars._waiting)) == (0, [])


@pytest.mark.processes
@pytest.mark.parametrize(("links", "levels"), [(900, 18), (150, 55), (999, 1)])
def test_no_nesting_within_the_limits_overflows_the_stack(links: int, levels: int) -> None:
    """In a process of its own, which an overflow would end."""
    script = f"""
from pathlib import Path
from chairlift import StructuredOutputsParams
from chairlift.demo import demo_path
from chairlift.runners.grammars.grammar import GrammarError
from chairlift.runners.grammars.grammar_compiler import GrammarCompiler
from chairlift.text.structured import grammar_of

def wrap(schema):
    for _ in range({levels}):
        schema = {{"anyOf": [schema]}} if {levels} < 20 else {{"items": schema}}
    return schema

links = {{f"a{{i}}": wrap({{"$ref": f"#/$defs/a{{i + 1}}"}}) for i in range({links})}}
schema = {{"$ref": "#/$defs/a0", "$defs": {{**links, "a{links}": {{"type": "string"}}}}}}
compiler = GrammarCompiler(Path(demo_path()), {LLM_VOCAB})
try:
    follower = compiler.compile(grammar_of(StructuredOutputsParams(json=schema))).follow([], True)
    follower.advance()
    print("followed", follower.error)
except GrammarError as error:
    print("refused", error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("followed None", "refused schema too large")
