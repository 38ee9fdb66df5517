"""Replies in every dialect: chat templates that write turns as each family's published template does, and random
conversations for them.

The templates here say no more than the tests need: the system prompts and checks of the published ones are left out.
"""

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from chairlift.demo import demo_path
from chairlift.text.chat_template import ChatTemplate, normalize_messages
from chairlift.text.dialect import Dialect
from chairlift.text.dialects import find_dialect
from chairlift.text.written_calls import form_to_write

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "exact": {"type": "boolean"},
            "units": {"enum": ["metric", "imperial"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "book": {
        "type": "object",
        "properties": {
            "guests": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
            "room": {
                "type": "object",
                "properties": {"beds": {"type": "integer"}, "wish": {"type": "string"}},
                "required": ["beds"],
                "additionalProperties": False,
            },
            "price": {"type": "number"},
        },
        "required": ["guests", "room"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
_SAID = [
    "I will look",
    "fünf 漢字 😀",
    "a < b",
    "{ }",
    "[1, 2]",
    "it's",
    "(see)",
    "tool_call",
    'he said "no"',
    "\n",
    "<b>",
]
_TEXTS = [
    "Paris",
    "São Paulo",
    'a "b"',
    "it's",
    "{x}",
    "[y]",
    "a, b",
    "back\\slash",
    "😀",
    "f(x)",
    "<tool",
    "1",
    "true",
]
_TURN = """{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<user>' + m.content }}{%- else %}{{ '<bot>' }}REPLY{{ '<end>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<bot>' }}{%- endif %}
{%- if tools %}{{ '<tools>' + (tools | map(attribute='function.name') | join(',')) }}{%- endif %}"""
_THOUGHT = """{%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"""
_SAYS = "{{- m.content or '' }}"
_EACH = "{%- for c in m.tool_calls or [] %}{%- set f = c.function %}"
_REPLIES = {
    "hermes": _THOUGHT
    + _SAYS
    + _EACH
    + """{%- if m.content or not loop.first %}{{ '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}""",
    "llama": """{#- <|start_header_id|> #}
{%- if m.tool_calls %}{%- set f = m.tool_calls[0].function %}
{{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}
{%- else %}{{ m.content }}{%- endif %}""",
    "mistral": _SAYS
    + """{%- if m.tool_calls %}{{ '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}
{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' }}{%- if not loop.last %}{{ ', ' }}{%- endif %}
{%- endfor %}{{ ']' }}{%- endif %}""",
    "mistral_nemo": _SAYS
    + """{%- if m.tool_calls %}{{ '[TOOL_CALLS][' }}{%- for c in m.tool_calls %}
{{- c.function | tojson }}{%- if not loop.last %}{{ ', ' }}{%- endif %}{%- endfor %}{{ ']' }}{%- endif %}""",
    "mistral_args": """{%- if m.reasoning_content %}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{%- endif %}"""
    + _SAYS
    + _EACH
    + "{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson }}{%- endfor %}",
    "pythonic": """{#- [func_name1(param=value)] #}
{%- if m.tool_calls %}{{ '[' }}{%- for c in m.tool_calls %}{{ c.function.name + '(' }}
{%- for k, v in c.function.arguments.items() %}
{{- k + '=' }}{{ v | string if v is boolean else v | tojson }}{%- if not loop.last %}{{ ', ' }}{%- endif %}
{%- endfor %}{{ ')' }}{%- if not loop.last %}{{ ', ' }}{%- endif %}
{%- endfor %}{{ ']' }}{%- else %}{{ m.content }}{%- endif %}""",
    "deepseek": _THOUGHT
    + _SAYS
    + """{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{%- for c in m.tool_calls %}
{%- if not loop.first %}{{ '\\n' }}{%- endif %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments }}
{{- '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}{{ '<｜tool▁calls▁end｜>' }}{%- endif %}""",
    "deepseek_v31": _THOUGHT
    + _SAYS
    + """{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{%- for c in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor %}{{ '<｜tool▁calls▁end｜>' }}{%- endif %}""",
    "glm": """{{- '\\n<think>' + (m.reasoning_content or '') + '</think>' }}
{%- if m.content %}{{ '\\n' + m.content }}{%- endif %}"""
    + _EACH
    + """{{- '\\n<tool_call>' + f.name + '\\n' }}{%- for k, v in f.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}{{ v if v is string else v | tojson }}{{ '</arg_value>\\n' }}
{%- endfor %}{{ '</tool_call>' }}{%- endfor %}""",
    "qwen_xml": _THOUGHT
    + _SAYS
    + _EACH
    + """{%- if m.content or not loop.first %}{{ '\\n' }}{%- endif %}
{{- '<tool_call>\\n<function=' + f.name + '>\\n' }}{%- for k, v in f.arguments.items() %}
{{- '<parameter=' + k + '>\\n' }}{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}
{{- '\\n</parameter>\\n' }}{%- endfor %}{{ '</function>\\n</tool_call>' }}{%- endfor %}""",
    "seed": """{%- if m.reasoning_content %}{{ '\\n<seed:think>' + m.reasoning_content + '</seed:think>' }}{%- endif %}
{%- if m.content %}{{ '\\n' + m.content }}{%- endif %}"""
    + _EACH
    + """{{- '\\n<seed:tool_call>\\n<function=' + f.name + '>\\n' }}{%- for k, v in f.arguments.items() %}
{{- '<parameter=' + k + '>' }}{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}
{{- '</parameter>\\n' }}{%- endfor %}{{ '</function>\\n</seed:tool_call>' }}{%- endfor %}""",
    "gemma": """{%- macro value(v) %}{%- if v is string %}{{ '<|"|>' + v + '<|"|>' }}
{%- elif v is boolean %}{{ 'true' if v else 'false' }}
{%- elif v is mapping %}{{ '{' }}{%- for k, x in v | dictsort %}{{ k + ':' + value(x) }}
{%- if not loop.last %}{{ ',' }}{%- endif %}{%- endfor %}{{ '}' }}
{%- elif v is sequence %}{{ '[' }}{%- for x in v %}{{ value(x) }}{%- if not loop.last %}{{ ',' }}{%- endif %}
{%- endfor %}{{ ']' }}
{%- else %}{{ v }}{%- endif %}{%- endmacro %}
{%- if m.reasoning_content %}{{ '<|channel>thought\\n' + m.reasoning_content + '\\n<channel|>' }}{%- endif %}"""
    + _SAYS
    + _EACH
    + "{{- '<|tool_call>call:' + f.name + value(f.arguments) + '<tool_call|>' }}{%- endfor %}",
    "harmony": """{%- if m.thinking %}
{{- '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{%- endif %}
{%- if m.tool_calls %}{%- set f = m.tool_calls[0].function %}
{{- ' to=functions.' + f.name + '<|channel|>commentary json<|message|>' + f.arguments | tojson + '<|call|>' }}
{%- else %}{{ '<|channel|>final<|message|>' + m.content }}{%- endif %}""",
}
_REPLIES["lfm2"] = (
    _REPLIES["pythonic"]
    .replace("{#- [func_name1(param=value)] #}\n", _SAYS)
    .replace("{{ '[' }}", "{{ '<|tool_call_start|>[' }}")
    .replace("{{ ']' }}{%- else %}{{ m.content }}", "{{ ']<|tool_call_end|>' }}")
)
# These two have no place for calls: they are part of what is said.
_REPLIES["granite"] = "{#- <|tool_call|> <|start_of_role|> #}" + _SAYS
_REPLIES["phi"] = "{#- <|tool|><|/tool|> #}" + _SAYS
_REPLIES["command"] = """{%- if m.reasoning_content %}
{{- '<|START_THINKING|>' + m.reasoning_content + '<|END_THINKING|>' }}{%- endif %}
{%- if m.tool_calls %}{{ '<|START_ACTION|>[\\n' }}{%- for c in m.tool_calls %}{%- set f = c.function %}
{{- '    {"tool_call_id": "' + loop.index0 | string + '", "tool_name": "' + f.name + '", "parameters": ' }}
{{- f.arguments | tojson + '}' }}{%- if not loop.last %}{{ ',\\n' }}{%- endif %}{%- endfor %}
{{- '\\n]<|END_ACTION|>' }}
{%- else %}{{ '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{%- endif %}"""
_REPLIES["function_gemma"] = (
    _REPLIES["gemma"]
    .replace('<|"|>', "<escape>")
    .replace("<|tool_call>", "<start_function_call>")
    .replace("<tool_call|>", "<end_function_call>")
    .replace(
        "{%- if m.reasoning_content %}{{ '<|channel>thought\\n' + m.reasoning_content + '\\n<channel|>' }}{%- endif %}",
        "",
    )
)
_REPLIES["glm_47"] = _REPLIES["glm"].replace("\\n", "")
_CHAT = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
_DEEPSEEK = [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")]
# The tokens that families have for their markers, those of the second list left out of texts.
_TOKENS: dict[str, tuple[list[str], list[str]]] = {
    "hermes": (_CHAT, []),
    "llama": ([], ["<|python_tag|>"]),
    "mistral": ([], ["[TOOL_CALLS]"]),
    "mistral_nemo": ([], ["[TOOL_CALLS]"]),
    "mistral_args": ([], ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]),
    "pythonic": ([], ["<|python_start|>", "<|python_end|>"]),
    "deepseek": (["<think>", "</think>", *_DEEPSEEK], []),
    "deepseek_v31": (["<think>", "</think>", *_DEEPSEEK], []),
    "glm": ([*_CHAT, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"], []),
    "qwen_xml": (_CHAT, []),
    "seed": ([f"<{end}seed:{name}>" for name in ("think", "tool_call") for end in ("", "/")], []),
    "glm_47": ([*_CHAT, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"], []),
    "gemma": ([], ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"]),
    "function_gemma": ([], ["<start_function_call>", "<end_function_call>", "<escape>"]),
    "harmony": ([], [f"<|{name}|>" for name in ("channel", "message", "end", "start", "call", "constrain")]),
    "lfm2": ([], ["<|tool_call_start|>", "<|tool_call_end|>"]),
    "granite": ([], ["<|tool_call|>"]),
    "phi": (["<|tool_call|>", "<|/tool_call|>"], []),
    "command": ([], [f"<|{end}_{name}|>" for name in ("THINKING", "ACTION", "RESPONSE") for end in ("START", "END")]),
}
NAMES = list(_REPLIES)
# Those whose templates write at most one call a turn, and those that write text or calls.
SINGLE = {"llama", "harmony"}
EITHER = {"llama", "harmony", "pythonic", "command"}


class Sample(NamedTuple):
    """An assistant's message, and the text that it is."""

    message: dict[str, Any]
    text: str

    @property
    def calls(self) -> list[tuple[str, Any]]:
        made = self.message.get("tool_calls", [])
        return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in made]


def template(name: str) -> str:
    """A chat template of a dialect."""
    return _TURN.replace("REPLY", _REPLIES[name])


def dialect(name: str) -> Dialect:
    """The dialect of its template."""
    found = find_dialect(template(name), name)
    assert found is not None
    return found


@cache
def demo_backend() -> str:
    """The demo model's tokenizer."""
    return (demo_path() / "tokenizer.json").read_text()


@cache
def tokens(name: str) -> tuple[Tokenizer, LLTokenizer, dict[str, int]]:
    """The demo model's tokenizer with a family's tokens: for texts, for grammars, and the names of the tokens."""
    backend = Tokenizer.from_str(demo_backend())
    plain, special = _TOKENS[name]
    backend.add_tokens([AddedToken(token, normalized=False) for token in plain])
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    named = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
    ends = [2] + [named[token] for token in ("<|call|>",) if token in named]
    return backend, LLTokenizer(backend.to_str(), None, ends), named


def samples(name: str, count: int, seed: int = 0) -> Iterator[Sample]:
    """Random messages of an assistant, as the dialect's template writes them."""
    dice = random.Random(f"{name}{seed}")
    chat = ChatTemplate({"default": template(name)}, {})
    calls = form_to_write(dialect(name), template(name))
    for _ in range(count):
        message = assistant_message(dialect(name), dice)
        turns = [{"role": "user", "content": "hi"}, _normal(message, chat)]
        whole = chat.render(turns, False, {}, 10_000, False, calls=calls)
        yield Sample(message, whole.split("<bot>", 1)[1].removesuffix("<end>"))


def _normal(message: dict[str, Any], chat: ChatTemplate) -> dict[str, Any]:
    made = normalize_messages([message], chat.joins_arguments, chat.knows_no_content)[0]
    return {**made, "thinking": made.get("reasoning_content")}


def assistant_message(found: Dialect, dice: random.Random) -> dict[str, Any]:
    """A random message of an assistant: what it says, its reasoning, its calls."""
    message: dict[str, Any] = {"role": "assistant", "content": " ".join(dice.sample(_SAID, 3)).strip()}
    if found.reasoning_content is not None and dice.random() < 0.6:
        message["reasoning_content"] = " ".join(dice.sample(_SAID, 3)).strip()
    count = 0 if dice.random() < 0.2 else 1 if found.name in SINGLE else dice.randrange(1, 4)
    if count:
        message["tool_calls"] = [_call(dice) for _ in range(count)]
        if found.name in EITHER or dice.random() < 0.5:
            message["content"] = None
    return message


def _call(dice: random.Random) -> dict[str, Any]:
    name = dice.choice(list(TOOLS))
    arguments: dict[str, Any] = {}
    if name == "get_weather":
        arguments = {"city": _text(dice), "days": dice.randrange(1, 15), "exact": dice.random() < 0.5}
        arguments["units"] = dice.choice(["metric", "imperial"])
        arguments = {key: value for key, value in arguments.items() if key == "city" or dice.random() < 0.6}
    elif name == "book":
        room = {"beds": dice.randrange(4), "wish": _text(dice)}
        arguments = {"guests": [_text(dice) for _ in range(dice.randrange(1, 4))], "room": room, "price": -1.5e3}
    call_id = "".join(dice.choices("abcdefghij0123456789", k=9))
    function = {"arguments": json.dumps(arguments, ensure_ascii=False), "name": name}
    return {"id": call_id, "type": "function", "function": function}


def _text(dice: random.Random) -> str:
    return " ".join(dice.sample(_TEXTS, dice.randrange(1, 4)))
