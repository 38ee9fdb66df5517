"""Dialects that a folder's own response template says: read as transformers reads them."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher
from support.dialect_samples import TOOLS, samples, template, tokens

from chairlift.text.call_grammar import ReplyShape, reply_grammar
from chairlift.text.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate
from chairlift.text.model_dialect import ModelDialect, model_dialect_of
from chairlift.text.reply import ArgumentsPart, CallPart, ContentPart, ReasoningPart
from chairlift.text.reply_reader import DialectMarkers, DialectReader
from chairlift.text.response_template import read_template
from chairlift.text.tokenizer import Tokenizer

THINK = {"open": "<think>", "close": "</think>"}
FUNCTION = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
TEMPLATES: dict[str, dict[str, Any]] = {
    "hermes": {
        "reasoning_content": THINK,
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": FUNCTION,
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
    },
    "qwen_xml": {
        "reasoning_content": THINK,
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": NAMED,
        },
        "content": {"close": "<|im_end|>"},
    },
    "gemma": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": NAMED,
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
    "mistral_args": {
        "thinking": {"open": "[THINK]", "close": "[/THINK]"},
        "tool_calls": {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\]",
            "close_pattern": "",
            "repeats": True,
            "content": "json",
            "transform": NAMED,
        },
        "content": {"close": "</s>"},
    },
    "mistral_nemo": {
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "close_pattern": "",
            "content": "json",
            "transform_each": True,
            "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {"close": "</s>"},
    },
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_replies_are_read_and_held_to_as_it_says(name: str) -> None:
    dialect = read_template({"start_anchor": "<bot>", "fields": TEMPLATES[name]})
    assert dialect is not None
    backend, ll, named = tokens(name)
    grammar = reply_grammar(dialect, named, ReplyShape(tools=TOOLS))
    assert grammar is not None
    for sample in samples(name, 10, seed=5):
        for size in (1, 7, len(sample.text)):
            reader = DialectReader(DialectMarkers(dialect, TOOLS), False)
            pieces = [sample.text[at : at + size] for at in range(0, len(sample.text), size)]
            parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
            content = "".join(part.text for part in parts if isinstance(part, ContentPart))
            reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
            calls = [(part.name, "") for part in parts if isinstance(part, CallPart)]
            for part in parts:
                if isinstance(part, ArgumentsPart):
                    calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.text)
            assert [(called, json.loads(arguments)) for called, arguments in calls] == sample.calls, sample.text
            assert content.strip() == (sample.message["content"] or "")
            assert reasoning == sample.message.get("reasoning_content", "")
        follows = LLMatcher(ll, grammar, log_level=0)
        ids = backend.encode(sample.text, add_special_tokens=False).ids
        assert follows.try_consume_tokens(ids) == len(ids), (sample.text, follows.get_error()[:200])


@pytest.mark.parametrize(
    "spec",
    [
        None,
        {},
        {"fields": 3},
        {"fields": {"tool_calls": {"open_pattern": "a(?=b)", "close": "c", "transform": FUNCTION}}},
        {"fields": {"tool_calls": {"open_pattern": r"\d", "close": "c", "content": "json", "transform": FUNCTION}}},
        {"fields": {"tool_calls": {"open": "a", "close": "b", "content": "kv-lines", "transform": NAMED}}},
        {"fields": {"tool_calls": {"open": "a", "close": "b", "content": "json"}}},
        {"fields": {"content": {"open_pattern": "(?:a|b)" * 35, "close": "x"}}},
        {"fields": {"content": {"open_pattern": f"(?:{'|'.join('abcdefgh' * 9)})", "close": "x"}}},
        {"fields": {"content": {"open_pattern": "a" * 513, "close": "x"}}},
        {"fields": {"content": {"open": "a" * 513, "close": "x"}}},
        {"fields": {"content": {"open": "a", "close": ["x"] * 65}}},
        {"fields": {"content": {"open": "a", "close": [1]}}},
    ],
)
def test_what_is_more_than_a_dialect_is_none(spec: Any) -> None:
    assert read_template(spec) is None


def test_a_pattern_may_stand_for_some_markers() -> None:
    dialect = read_template({"fields": {"content": {"open_pattern": "(?:a|b)" * 6, "close": ["x"] * 64}}})
    assert dialect is not None
    assert dialect.content is not None
    assert len(set(dialect.content.open)) == len(dialect.content.close) == 64


def test_a_folder_s_own_goes_before_its_chat_template() -> None:
    chat = ChatTemplate({"default": template("hermes")}, {})
    spec = {"fields": TEMPLATES["mistral_args"]}
    both = Tokenizer(tokens("hermes")[0], chat_template=chat, response_template=spec)
    assert model_dialect_of(both).dialect == read_template(spec)
    named = model_dialect_of(both, "llama").dialect
    assert named is not None
    assert named.name == "llama"
    assert model_dialect_of(both, "none").dialect is None


@pytest.mark.parametrize("name", ["hermes", "gemma", "qwen_xml"])
def test_transformers_reads_the_same(name: str) -> None:
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    spec = {"start_anchor": "<bot>", "fields": TEMPLATES[name]}
    described = [{"type": "function", "function": {"name": each, "parameters": TOOLS[each]}} for each in TOOLS]
    for sample in samples(name, 20, seed=6):
        found = parsing.parse_response(sample.text, spec, prefix="", tools=described)
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in found.get("tool_calls", [])]
        assert calls == sample.calls
        assert found.get("content", "").strip() == (sample.message["content"] or "")


def dialect_of(source: str) -> ModelDialect:
    return model_dialect_of(Tokenizer(tokens("hermes")[0], chat_template=ChatTemplate({"default": source}, {})))


def test_what_a_template_takes_is_what_its_code_asks_for() -> None:
    told = dialect_of("The tools of thinking {# tools #}{{ 'tools' + m.thinking + x['enable_thinking'] }}")
    assert (told.takes_tools, told.takes_effort, told.switch) == (False, False, None)
    asked = dialect_of(
        "{% if tools %}{% endif %}{{ reasoning_effort | default('low') }}{{ \"it's\" }}{{ enable_thinking }}"
    )
    assert (asked.takes_tools, asked.takes_effort, asked.switch) == (True, True, "enable_thinking")
    assert dialect_of("{% set thinking = m.thinking %}{{ thinking }}").switch is None
    assert dialect_of("{% if not thinking is defined %}{% set thinking = false %}{% endif %}").switch == "thinking"


@pytest.mark.parametrize(
    "unclosed",
    ["{#" * 60000, "{{" * 60000, "{{ '" + "\\'" * 60000 + " }}", '{{ "' + "\\\"\\'" * 30000 + " }}", "{% '" * 30000],
    ids=["comment", "code", "string", "strings", "both"],
)
def test_what_has_no_end_in_a_template_hides_nothing_before(unclosed: str) -> None:
    told = dialect_of("{{ tools }}{{ \"it's\" ~ 'tools' }}" + unclosed)
    assert (told.takes_tools, told.switch) == (True, None)
    assert not dialect_of(unclosed).takes_tools


def test_a_string_without_an_end_hides_no_code() -> None:
    assert dialect_of("{{ ' }}{{ tools }}").takes_tools
    assert dialect_of('{{ \' ~ tools ~ "thinking" }}').takes_tools
    assert dialect_of('{{ \' ~ tools ~ "thinking" }}').switch is None
    assert dialect_of("{# {{ tools }}").takes_tools


def test_a_template_that_is_too_long_to_be_rendered_says_nothing() -> None:
    told = dialect_of("{{ tools }}<think></think>" + "x" * MAX_TEMPLATE_CHARS)
    assert (told.dialect, told.takes_tools) == (None, False)
