"""Chat templates render as transformers renders them, and the sandbox holds."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.text_tokenizers import build

from chairlift.errors import ConfigError, InvalidRequest, UnsupportedModel
from chairlift.text import Tokenizer

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- set loop_messages = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{{- system_message }}<|eot_id|>
{%- for message in loop_messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "system" %}
        {%- continue %}
    {%- endif %}
    {%- if not ns.found and message.role == "user" %}
        {%- set ns.found = true %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {% generation %}{{- content.split('</think>')[-1].lstrip('\\n') }}{% endgeneration %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
CHAT = [
    {"role": "system", "content": "  Be <brief> & kind.  "},
    {"role": "user", "content": "Héllo 漢字?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi!"},
    {"role": "user", "content": "And 'now'?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}]


def folder(path: Path, template: Any = None, file: str | None = None, **config: Any) -> Path:
    build("bytelevel").save(str(path / "tokenizer.json"))
    if template is not None:
        config["chat_template"] = template
    special = {"bos_token": "<s>", "eos_token": {"content": "<|end|>", "__type": "AddedToken"}}
    (path / "tokenizer_config.json").write_text(json.dumps(special | config))
    if file is not None:
        (path / "chat_template.jinja").write_text(file)
    return path


def test_templates_in_files_of_their_own(tmp_path: Path) -> None:
    """As transformers saves a tokenizer with several templates, and as it reads them."""
    transformers = pytest.importorskip("transformers")
    plain, named = "{{ messages[0].content }}", "{{ tools[0].function.name }}"
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=build("bytelevel"))
    reference.chat_template = {"default": plain, "tool_use": named}
    reference.save_pretrained(tmp_path)
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").is_file()
    chat, read = [{"role": "user", "content": "hi"}], transformers.AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, TOOLS):
        wanted = read.apply_chat_template(chat, tools=tools, tokenize=False)
        assert Tokenizer.from_folder(tmp_path).render_chat(chat, template_kwargs={"tools": tools}).text == wanted
    for number in range(32):
        (tmp_path / "additional_chat_templates" / f"{number}.jinja").write_text("x")
    with pytest.raises(UnsupportedModel, match="33 templates, more than 32"):
        Tokenizer.from_folder(tmp_path)


def load(path: Path, template: Any = None, file: str | None = None, **config: Any) -> Tokenizer:
    return Tokenizer.from_folder(folder(path, template, file, **config))


@pytest.mark.parametrize("template", [CHATML, LLAMA3, QWEN], ids=["chatml", "llama3", "qwen"])
@pytest.mark.parametrize("arguments", [{}, {"tools": TOOLS}, {"enable_thinking": False}])
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(template: str, arguments: dict[str, Any], prompt: bool, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = load(tmp_path, template)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="<|end|>", chat_template=template
    )
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt, **arguments)
    assert ours.render_chat(CHAT, prompt, arguments).text == expected


def test_the_jinja_file_comes_first_and_named_templates_work(tmp_path: Path) -> None:
    assert (
        load(tmp_path, "config", file="file {{ bos_token }}{{ eos_token }}").render_chat([]).text == "file <s><|end|>"
    )
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = load(tmp_path, named)
    assert tokenizer.render_chat([]).text == "plain"
    assert tokenizer.render_chat([], True, {"tools": TOOLS}).text == "tools"


def test_a_template_that_only_a_processor_has_comes_third(tmp_path: Path) -> None:
    def write(template: Any) -> None:
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))

    write("third {{ eos_token }}")
    assert load(tmp_path).render_chat([]).text == "third <|end|>"
    write([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    assert load(tmp_path).render_chat([], True, {"tools": TOOLS}).text == "tools"
    assert load(tmp_path, "second").render_chat([]).text == "second"
    assert load(tmp_path, "second", file="first").render_chat([]).text == "first"
    (tmp_path / "chat_template.jinja").unlink()
    write("x" * 2**19)
    with pytest.raises(UnsupportedModel, match=r"chat_template\.json has \d+ bytes, too many"):
        load(tmp_path)
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        load(tmp_path)


def test_text_parts_are_joined_and_other_parts_refused_by_name(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, CHATML)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\nab<|im_end|>" in tokenizer.render_chat([{"role": "user", "content": parts}]).text
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\].*image_url"):
        tokenizer.render_chat([{"role": "user", "content": image}])
    with pytest.raises(InvalidRequest, match="string 'text'"):
        tokenizer.render_chat([{"role": "user", "content": [{"type": "text"}]}])
    with pytest.raises(InvalidRequest, match="must be an object"):
        tokenizer.render_chat(["hello"])
    with pytest.raises(InvalidRequest, match="plain data"):
        tokenizer.render_chat([{"role": "user", "content": object()}])


def test_tool_call_arguments_reach_the_template_as_objects(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "<é>"}'}}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert '"arguments": {"x": "<é>"}}' in load(tmp_path, QWEN).render_chat(chat).text
    assert call["function"]["arguments"] == '{"x": "<é>"}'


@pytest.mark.parametrize("calls", [None, [], ""])
def test_no_calls_are_not_there_at_all(calls: Any, tmp_path: Path) -> None:
    """To some templates it makes a call that the key is there, and they leave the text out."""
    source = "{% for m in messages %}{{ '-' if 'tool_calls' in m else m.content }}{% endfor %}"
    chat = [{"role": "assistant", "content": "Hi!", "tool_calls": calls}]
    assert load(tmp_path, source).render_chat(chat).text == "Hi!"


@pytest.mark.parametrize("arguments", [None, ""])
def test_a_call_without_arguments_has_none(arguments: str | None, tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert '"arguments": {}}' in load(tmp_path, QWEN).render_chat(chat).text
    text = "{{ 'f' + messages[1].tool_calls[0].function.arguments }}"
    assert load(tmp_path, text).render_chat(chat).text == "f{}"


def test_an_assistants_refusal_is_text(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, CHATML)
    parts = [{"type": "text", "text": "No. "}, {"type": "refusal", "refusal": "I can't."}]
    assert "assistant\nNo. I can't.<|im_end|>" in tokenizer.render_chat([{"role": "assistant", "content": parts}]).text
    with pytest.raises(InvalidRequest, match="'refusal' are not supported, only 'text'"):
        tokenizer.render_chat([{"role": "user", "content": parts}])
    with pytest.raises(InvalidRequest, match="a refusal part needs a string 'refusal'"):
        tokenizer.render_chat([{"role": "assistant", "content": [{"type": "refusal", "text": "No."}]}])


def test_a_template_error_is_the_clients_to_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="Unknown role: robot"):
        load(tmp_path, LLAMA3).render_chat([{"role": "robot", "content": ""}])
    with pytest.raises(InvalidRequest, match="refused the messages"):
        load(tmp_path, "{{ messages[0].content + 5 }}").render_chat([{"role": "user", "content": "a"}])
    for content in (5, {"a": 1}, True):
        with pytest.raises(InvalidRequest, match=r"messages\[0\].content must be text or a list of parts"):
            load(tmp_path, "{{ messages[0].content }}").render_chat([{"role": "user", "content": content}])


def test_an_assistant_may_have_said_nothing(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, CHATML)
    for said in ({"content": None}, {}, {"content": ""}):
        text = tokenizer.render_chat([{"role": "assistant"} | said]).text
        assert text == "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    for role in ("user", "system", "developer"):
        with pytest.raises(InvalidRequest, match=r"messages\[0\].content must be text"):
            tokenizer.render_chat([{"role": role, "content": None}])


def test_a_developer_is_the_system_where_a_template_knows_no_other(tmp_path: Path) -> None:
    chat = [{"role": "developer", "content": "Be kind."}]
    assert load(tmp_path, CHATML).render_chat(chat).text.startswith("<|im_start|>system\nBe kind.")
    assert "Be kind." in load(tmp_path, LLAMA3).render_chat([*chat, CHAT[1]]).text
    knows = CHATML + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert load(tmp_path, knows).render_chat(chat).text.startswith("<|im_start|>developer")


@pytest.mark.parametrize("said", ["So it", "So it ", "", "So <|end|> it"])
def test_the_last_message_can_be_left_open(said: str, tmp_path: Path) -> None:
    chat = [CHAT[1], {"role": "assistant", "content": said}]
    prompt = load(tmp_path, CHATML).render_chat(chat, add_generation_prompt=False, continue_final=True)
    assert prompt.text == f"<|im_start|>user\nHéllo 漢字?<|im_end|>\n<|im_start|>assistant\n{said}"
    assert (prompt.marked is None) is ("<|end|>" not in said)


def test_a_last_message_that_is_left_out_can_not_be_left_open(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match="leaves out the last message"):
        tokenizer.render_chat(CHAT[1:3], continue_final=True)


def test_no_template_and_a_broken_template(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        tokenizer.render_chat([])
    with pytest.raises(InvalidRequest, match="line 1"):
        load(tmp_path, "{% if %}").render_chat([])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ ('{0.__class__}' | format(1)).format(messages) }}{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_the_sandbox_refuses_escapes(attack: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        load(tmp_path, attack).render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", ["messages", "chat_template", "add_generation_prompt", "raise_exception"])
def test_reserved_template_arguments(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        load(tmp_path, CHATML).render_chat([], True, {name: 1})
    assert caught.value.param == "chat_template_kwargs"


def test_strftime_now(tmp_path: Path) -> None:
    assert len(load(tmp_path, "{{ strftime_now('%Y-%m-%d') }}").render_chat([]).text) == 10


def test_special_ids_come_from_every_file(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    end = tokenizer.encode("<|end|>")[0]
    assert tokenizer.eos_ids == (end,)
    assert tokenizer.bos_id == tokenizer.encode("<s>")[0]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert Tokenizer.from_folder(tmp_path).eos_ids == (7, 9, end)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 5}}))
    assert Tokenizer.from_folder(tmp_path).eos_ids == (7, 9, 5, end)
    assert Tokenizer.from_folder(str(tmp_path)).vocab_size == end + 1


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json can't be read"):
        Tokenizer.from_folder(tmp_path)
    folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        Tokenizer.from_folder(tmp_path)


def test_text_that_is_not_unicode(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        load(tmp_path).encode("a\ud800")


def test_a_bare_tokenizer_has_no_template() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(build("bytelevel")).render_chat([])
