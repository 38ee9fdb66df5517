"""Which dialect a template is of, and the conversations of templates that have no place for calls.

The templates say what the published ones say of tools, calls and reasoning, and nothing else.
"""

import json
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher
from support.dialect_samples import TOOLS, tokens
from support.replies import read_reply

from chairlift.errors import InvalidRequest
from chairlift.text.call_grammar import ReplyShape, reply_grammar
from chairlift.text.chat_template import ChatTemplate
from chairlift.text.dialects import find_dialect
from chairlift.text.model_dialect import ModelDialect, model_dialect_of
from chairlift.text.tokenizer import Tokenizer

LFM2 = """{%- if tools -%}
{{- "List of tools: <|tool_list_start|>" + (tools | tojson) + "<|tool_list_end|>" -}}
{%- endif -%}
{%- for message in messages -%}
{%- set content = message["content"] -%}
{%- if message["role"] == "tool" -%}
{%- set content = "<|tool_response_start|>" + content + "<|tool_response_end|>" -%}
{%- endif -%}
{{- "<|im_start|>" + message["role"] + "\\n" + content + "<|im_end|>\\n" -}}
{%- endfor -%}"""
LFM25_FIRST = """{%- set keep_past_thinking = keep_past_thinking | default(false) -%}
{%- if tools -%}{{ "List of tools: [" + tools[0] | tojson + "]" }}{%- endif -%}
{%- if "</think>" in content -%}{%- endif -%}"""
LFM25 = """{%- macro format_arg_value(arg_value) -%}
{%- if arg_value is string -%}{{- '"' + arg_value + '"' -}}
{%- elif arg_value is mapping -%}{{- arg_value | tojson -}}
{%- else -%}{{- arg_value | string -}}{%- endif -%}
{%- endmacro -%}
{%- macro render_tool_calls(tool_calls) -%}
{%- set ns = namespace(tool_calls=[]) -%}
{%- for call in tool_calls -%}
{%- set args_ns = namespace(strings=[]) -%}
{%- for name, value in call.function.arguments.items() -%}
{%- set args_ns.strings = args_ns.strings + [name + "=" + format_arg_value(value)] -%}
{%- endfor -%}
{%- set ns.tool_calls = ns.tool_calls + [call.function.name + "(" + (args_ns.strings | join(", ")) + ")"] -%}
{%- endfor -%}
{{- "<|tool_call_start|>[" + (ns.tool_calls | join(", ")) + "]<|tool_call_end|>" -}}
{%- endmacro -%}
{%- for message in messages -%}
{{- "<|im_start|>" + message.role + "\\n" -}}
{%- if message.role == "assistant" -%}{%- generation -%}
{%- if message.thinking is defined -%}{{- "<think>" + message.thinking + "</think>" -}}{%- endif -%}
{%- if message.tool_calls is defined -%}{{- render_tool_calls(message.tool_calls) -}}{%- endif -%}
{{- message.content + "<|im_end|>\\n" -}}{%- endgeneration -%}
{%- else -%}{{- message.content + "<|im_end|>\\n" -}}{%- endif -%}
{%- endfor -%}"""
GRANITE_30 = """{%- if tools %}{{- '<|start_of_role|>available_tools<|end_of_role|>\\n' }}{%- endif %}
{%- if message['role'] == 'assistant_tool_call' %}
{{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' + message['content'] + '<|end_of_text|>\\n' }}
{%- endif %}"""
GRANITE_33 = """{%- if tools and not available_tools -%}{%- set available_tools = tools -%}{%- endif -%}
{%- if available_tools %}
{%- set system = "When a tool is required, respond only with <|tool_call|> followed by a JSON list of tools used." %}
{%- elif thinking %}
{%- set system = "Write your thoughts between <think></think> and your response between <response></response>." %}
{%- endif %}
{%- for message in messages %}
{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
{%- endfor %}"""
GRANITE_4 = """{%- set suffix = '<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <args>}\\n</tool_call>' %}
{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' }}
{{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}"""
PHI = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}"
    "{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)
COMMAND = """0. Start by writing <|START_THINKING|> followed by a plan. Close it out with <|END_THINKING|>.
1. Action: write <|START_ACTION|> followed by a list, and close it out with <|END_ACTION|>.
2. Response: write <|START_RESPONSE|>, and close it out with <|END_RESPONSE|>.
{%- set tool_idx = namespace(value=0) %}
{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
    {%- if message.role|lower == 'assistant' %}
<|CHATBOT_TOKEN|>{% if message.tool_calls %}<|START_THINKING|>{{message.tool_plan}}<|END_THINKING|><|START_ACTION|>[
    {% for tc in message.tool_calls %}
    {"tool_call_id": "{{ tool_idx.value }}", "tool_name": "{{ tc['function']['name'] }}", "parameters": """
COMMAND += """{{ tc['function']['arguments']|tojson }}}{% if not loop.last %},{% endif %}

    {% set tool_idx.value = tool_idx.value + 1 %}
    {% endfor %}
]<|END_ACTION|><|END_OF_TURN_TOKEN|>{% else %}<|START_RESPONSE|>{{message.content}}<|END_RESPONSE|>{% endif %}
    {%- endif %}
{%- endfor %}"""
NORTH = "<|START_THINKING|><|END_THINKING|><|START_ACTION|><|END_ACTION|><|START_TEXT|><|END_TEXT|>"


@pytest.mark.parametrize(
    ("source", "name", "reasons", "wraps"),
    [
        (LFM2, "lfm2", False, False),
        (LFM25_FIRST, "lfm2", True, False),
        (LFM25, "lfm2", True, False),
        (GRANITE_30, "granite", False, False),
        (GRANITE_33, "granite", True, True),
        (GRANITE_4, "hermes", False, False),
        (PHI, "phi", False, False),
        (COMMAND, "command", True, True),
        (NORTH, "command", True, True),
        ("<|START_ACTION|>", "command", False, False),
    ],
)
def test_a_template_shows_its_dialect(source: str, name: str, reasons: bool, wraps: bool) -> None:
    found = find_dialect(source, "auto")
    assert found is not None
    assert found.name == name
    assert (found.reasoning_content is not None, found.wrapper is not None) == (reasons, wraps)


def model(source: str, name: str) -> tuple[Tokenizer, ModelDialect]:
    backend = tokenizers.Tokenizer.from_str(tokens(name)[0].to_str())
    tokenizer = Tokenizer(backend, eos_ids=(2,), chat_template=ChatTemplate({"default": source}, {}))
    return tokenizer, model_dialect_of(tokenizer)


@pytest.mark.parametrize(
    ("source", "name", "always"),
    [
        (LFM2, "lfm2", ()),
        (GRANITE_33, "granite", ()),
        (COMMAND, "command", ("THINKING", "RESPONSE")),
    ],
)
def test_markers_that_texts_leave_out_are_shown_to_readers(source: str, name: str, always: tuple[str, ...]) -> None:
    tokenizer, found = model(source, name)
    special = {token_id for text, token_id in tokens(name)[2].items() if token_id in tokenizer.vocabulary.special}
    assert found.shown(True) == special - set(tokenizer.eos_ids) - {0, 1}
    names = [f"<|{end}_{word}|>" for word in always for end in ("START", "END")]
    assert found.shown(False) == {tokens(name)[2][each] for each in names}
    assert found.spells == bool(always or name == "granite")
    assert found.takes_tools


def call(name: str, arguments: str, index: int = 0) -> dict[str, Any]:
    return {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


CHAT = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [call("f", '{"a": "é", "b": [true], "c": null}'), call("g", "")],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "sunny"},
]
AS_JSON = '{"name": "f", "arguments": {"a": "é", "b": [true], "c": null}}, {"name": "g", "arguments": {}}'


@pytest.mark.parametrize(
    ("source", "name", "start", "end", "thought"),
    [
        (COMMAND, "command", "<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "hm"),
        (LFM25, "lfm2", "<|im_start|>assistant\n", "<|im_end|>", "hm"),
        (LFM25, "lfm2", "</think>", "<|im_end|>", ""),
    ],
)
def test_what_a_template_writes_of_calls_is_read(source: str, name: str, start: str, end: str, thought: str) -> None:
    tokenizer, found = model(source, name)
    assert found.dialect is not None
    told = {"thinking": "hm", "tool_plan": "hm"}
    prompt = tokenizer.render_chat([CHAT[0], CHAT[1] | told, CHAT[2]], calls=found.calls).text
    text = prompt.partition(start)[2].partition(end)[0]
    parameters = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}, "c": {}}}
    for cut in range(len(text)):
        content, reasoning, calls = read_reply(found.dialect, text, [cut], tools={"f": parameters, "g": {}})
        made = [(each, json.loads(arguments)) for each, arguments in calls]
        assert (content, reasoning) == ("", thought)
        assert made == [("f", {"a": "é", "b": [True], "c": None}), ("g", {})]
    if name == "command":
        made_of = ReplyShape(tools={"f": parameters, "g": {}})
        grammar = reply_grammar(found.dialect, found.tokens, made_of)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert LLMatcher(tokens(name)[1], grammar, log_level=0).try_consume_tokens(ids) == len(ids)


@pytest.mark.parametrize(
    ("source", "name", "written", "result"),
    [
        (
            LFM2,
            "lfm2",
            '<|tool_call_start|>[f(a="é", b=[true], c=None), g()]<|tool_call_end|>',
            "<|tool_response_start|>",
        ),
        (GRANITE_33, "granite", f"<|tool_call|>[{AS_JSON}]", "<|start_of_role|>tool<|end_of_role|>"),
        (PHI, "phi", f"<|tool_call|>[{AS_JSON}]<|/tool_call|>", "<|tool_response|>"),
    ],
)
def test_calls_are_written_where_a_template_has_no_place_for_them(
    source: str, name: str, written: str, result: str
) -> None:
    tokenizer, found = model(source, name)
    for said, before in ((None, ""), ("I will look.", "I will look.\n")):
        chat = [CHAT[0], CHAT[1] | {"content": said}, CHAT[2]]
        prompt = tokenizer.render_chat(chat, calls=found.calls)
        assert f"{before}{written}<|" in prompt.text
        assert f"{result}sunny" in prompt.text
        assert tokenizer.encode_chat(prompt).count(tokens(name)[2][written.partition("[")[0]]) == 1


@pytest.mark.parametrize(("source", "name"), [(LFM2, "lfm2"), (GRANITE_33, "granite")])
def test_only_what_begins_a_call_is_its_token(source: str, name: str) -> None:
    tokenizer, found = model(source, name)
    marker = "<|tool_call_start|>" if name == "lfm2" else "<|tool_call|>"
    calls = [call("f", f'{{"a": "{marker}"}}')]
    prompt = tokenizer.render_chat([{"role": "assistant", "content": marker, "tool_calls": calls}], calls=found.calls)
    assert prompt.text.count(marker) == 3
    assert tokenizer.encode_chat(prompt).count(tokens(name)[2][marker]) == 1


def test_calls_are_left_to_templates_that_have_a_place_for_them() -> None:
    for source in (LFM25, COMMAND, "{{ message.tool_calls }} <|tool_call|> <|start_of_role|>"):
        assert model(source, "lfm2")[1].calls is None
    _, found = model('<tool_call>{"name": "arguments": {{ messages[0].content }}', "hermes")
    assert found.calls is not None
    assert found.calls.open.startswith("<tool_call>")


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ({"a": 1}, "messages[0].tool_calls"),
        ([3], "messages[0].tool_calls[0].function"),
        ([{"function": {"arguments": "{}"}}], "messages[0].tool_calls[0].function"),
        ([call("f", "[1]")], "messages[0].tool_calls[0].function.arguments"),
        ([call("f", "no json")], "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_what_is_no_call_is_refused_by_its_place(calls: Any, param: str) -> None:
    tokenizer, found = model(GRANITE_33, "granite")
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.render_chat([{"role": "assistant", "tool_calls": calls}], calls=found.calls)
    assert caught.value.param == param


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_phi_4_mini_has_its_tools_in_the_system_message(role: str) -> None:
    tokenizer, found = model(PHI, "phi")
    described = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in ("now",)]
    text = tokenizer.render_chat([{"role": role, "content": "Hi."}], template_kwargs={"tools": described}).text
    said = "You are a helpful assistant with some tools." if role == "user" else "Hi."
    assert text.startswith(f'<|system|>{said}<|tool|>[{{"name": "now", "parameters": {{"type": "object"')
    assert text.count("<|system|>") == 1
    assert text.endswith("<|user|>Hi.<|end|>" if role == "user" else "<|/tool|><|end|>")
    assert found.takes_tools
    assert tokenizer.render_chat([{"role": "user", "content": "Hi."}]).text == "<|user|>Hi.<|end|>"
    # Where a template has tools of its own, they are in the place that it has for them.
    both = ChatTemplate({"default": PHI + "{% if tools %}{{ tools }}{% endif %}"}, {})
    assert not both.has_tools_in_message
