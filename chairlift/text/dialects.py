"""The dialects that models speak, and which one a chat template is of."""

import msgspec

from chairlift.text.dialect import CallForm, Dialect, Region, TagForm

_JSON = '{"name": "'
_ARGUMENTS = '", "arguments": '
_PARAMETERS = '", "parameters": '
_THINK = Region(("<think>",), ("</think>",))
# What Granite 3.3 writes its answer between, if it thinks.
_RESPONSE = Region(("<response>",), ("</response>",))

_HERMES = CallForm(open=f"<tool_call>\n{_JSON}", named=_ARGUMENTS, close=("}\n</tool_call>",), separator="\n")
_TYPED_JSON = '{"type": "function", "name": "'
_LLAMA = tuple(
    CallForm(open=f"{tag}{opened}", named=_PARAMETERS, close=("}",), anywhere=tag != "")
    for tag in ("", "<|python_tag|>")
    for opened in (_JSON, _TYPED_JSON)
)
_MISTRAL = CallForm(
    begin="[TOOL_CALLS] [",
    open=_JSON,
    named=_ARGUMENTS,
    close=("}", ', "id": "…"}'),
    separator=", ",
    end="]",
)
_PYTHONIC = CallForm(
    begin="[", open="", named="(", close=(")",), separator=", ", end="]", notation="python", anywhere=False
)
_DEEPSEEK = CallForm(
    begin="<｜tool▁calls▁begin｜>",
    open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    named="\n```json\n",
    close=("\n```<｜tool▁call▁end｜>",),
    separator="\n",
    end="<｜tool▁calls▁end｜>",
)
_GLM = CallForm(
    open="<tool_call>",
    named="",
    close=("\n</tool_call>",),
    separator="\n",
    notation="tags",
    tags=TagForm("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
)
_QWEN = CallForm(
    open="<tool_call>\n<function=",
    named=">",
    close=("\n</function>\n</tool_call>",),
    separator="\n",
    notation="tags",
    tags=TagForm("\n<parameter=", ">\n", "\n</parameter>", words=True),
)
# Qwen3-Coder often leaves out the first tag, above all behind text.
_QWEN_BARE = msgspec.structs.replace(
    _QWEN, open="<function=", close=("\n</function>\n</tool_call>", "\n</function>"), only_read=True
)
_SEED = msgspec.structs.replace(
    _QWEN,
    open="<seed:tool_call>\n<function=",
    close=("\n</function>\n</seed:tool_call>",),
    tags=TagForm("\n<parameter=", ">", "</parameter>", words=True),
)
_GEMMA = CallForm(
    open="<|tool_call>call:",
    named="{",
    close=("}<tool_call|>",),
    separator="",
    notation="bare",
    quote='<|"|>',
)
_GRANITE = CallForm(begin="<|tool_call|>[", open=_JSON, named=_ARGUMENTS, close=("}",), separator=", ", end="]")
_COMMAND = CallForm(
    begin="<|START_ACTION|>[\n    ",
    open='{"tool_call_id": "…", "tool_name": "',
    named=_PARAMETERS,
    close=("}",),
    separator=",\n    ",
    end="\n]<|END_ACTION|>",
)
_TO = " to=functions."
_NEXT = ("<|end|><|start|>assistant", "<|end|>")

DIALECTS = {
    each.name: each
    for each in (
        Dialect(name="hermes", tool_calls=(_HERMES,)),
        Dialect(name="llama", tool_calls=_LLAMA),
        Dialect(name="mistral", tool_calls=(_MISTRAL,), short_ids=True),
        Dialect(
            name="mistral_nemo",
            tool_calls=(msgspec.structs.replace(_MISTRAL, begin="[TOOL_CALLS]["),),
            short_ids=True,
        ),
        Dialect(
            name="mistral_args",
            reasoning_content=Region(("[THINK]",), ("[/THINK]",)),
            tool_calls=(
                CallForm(open="[TOOL_CALLS]", named="[ARGS]", close=("",), separator=""),
                CallForm(open="[TOOL_CALLS]", named="[CALL_ID]…[ARGS]", close=("",), separator=""),
            ),
            short_ids=True,
        ),
        Dialect(
            name="pythonic",
            tool_calls=(
                _PYTHONIC,
                msgspec.structs.replace(_PYTHONIC, begin="<|python_start|>[", end="]<|python_end|>", anywhere=True),
            ),
        ),
        Dialect(name="deepseek", tool_calls=(_DEEPSEEK,)),
        Dialect(
            name="deepseek_v31",
            tool_calls=(
                msgspec.structs.replace(
                    _DEEPSEEK,
                    open="<｜tool▁call▁begin｜>",
                    named="<｜tool▁sep｜>",
                    close=("<｜tool▁call▁end｜>",),
                    separator="",
                ),
            ),
        ),
        Dialect(name="glm", tool_calls=(_GLM,)),
        Dialect(
            name="glm_47",
            tool_calls=(
                msgspec.structs.replace(
                    _GLM,
                    close=("</tool_call>",),
                    separator="",
                    tags=TagForm("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
                ),
            ),
        ),
        Dialect(name="qwen_xml", tool_calls=(_QWEN, _QWEN_BARE)),
        Dialect(
            name="seed",
            reasoning_content=Region(("<seed:think>",), ("</seed:think>",)),
            tool_calls=(_SEED,),
        ),
        Dialect(
            name="gemma",
            reasoning_content=Region(("<|channel>thought\n",), ("<channel|>",)),
            tool_calls=(_GEMMA,),
        ),
        Dialect(
            name="function_gemma",
            tool_calls=(
                msgspec.structs.replace(
                    _GEMMA,
                    open="<start_function_call>call:",
                    close=("}<end_function_call>",),
                    quote="<escape>",
                ),
            ),
        ),
        Dialect(
            name="harmony",
            reasoning_content=Region(("<|channel|>analysis<|message|>",), _NEXT),
            tool_calls=(
                CallForm(
                    open=f"<|channel|>commentary{_TO}", named=" <|constrain|>json<|message|>", close=("<|call|>", "")
                ),
                CallForm(open=_TO, named="<|channel|>commentary json<|message|>", close=("<|call|>", "")),
                CallForm(open=_TO, named="<|channel|>commentary <|constrain|>json<|message|>", close=("<|call|>", "")),
            ),
            content=Region(("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"), (*_NEXT, "<|return|>")),
        ),
        Dialect(
            name="lfm2",
            tool_calls=(
                msgspec.structs.replace(
                    _PYTHONIC, begin="<|tool_call_start|>[", end="]<|tool_call_end|>", anywhere=True
                ),
            ),
        ),
        Dialect(
            name="granite",
            # The small ones of 3.1 and 3.2 spell the marker without its bars.
            tool_calls=(_GRANITE, msgspec.structs.replace(_GRANITE, begin="<tool_call>[", only_read=True)),
        ),
        Dialect(name="phi", tool_calls=(msgspec.structs.replace(_GRANITE, end="]<|/tool_call|>"),)),
        Dialect(
            name="command",
            reasoning_content=Region(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
            tool_calls=(_COMMAND,),
            # Those of the second pair are of the models since Command A Vision.
            wrapper=Region(("<|START_RESPONSE|>", "<|START_TEXT|>"), ("<|END_RESPONSE|>", "<|END_TEXT|>")),
        ),
    )
}

# What tells a template's dialect: the first row all of whose texts are in it.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("deepseek", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("gemma", ("<|tool_call>",)),
    ("function_gemma", ("<start_function_call>",)),
    ("glm_47", ("</arg_key><arg_value>", "<tool_call>")),
    ("glm", ("<arg_key>", "<tool_call>")),
    ("qwen_xml", ("<function=", "<parameter=", "<tool_call>")),
    ("seed", ("<function=", "<parameter=", "<seed:tool_call>")),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_nemo", ("[TOOL_CALLS][",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("command", ("<|START_ACTION|>",)),
    # Only later templates of LFM2.5 write calls; LFM2's names the tools' tokens, and LFM2.5's first one none.
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ("List of tools: [", "keep_past_thinking")),
    ("phi", ("<|tool|>", "<|/tool|>")),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("hermes", ("<tool_call>", '"name": ', '"arguments": ')),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("func_name1(",)),
    ("llama", ('{"name": ', '"parameters": ', "<|start_header_id|>")),
)


def find_dialect(template: str, name: str) -> Dialect | None:
    """The dialect of that `name`, or for "auto" the one that a chat template shows; None if it shows none, and for
    "none". Reasoning between think tags is part of it if the template knows such tags."""
    if name == "none":
        return None
    found = _shown(template) if name == "auto" else DIALECTS[name]
    if "</think>" not in template or (found is not None and found.reasoning_content is not None):
        return found
    thinking = msgspec.structs.replace(found or Dialect(name="think"), reasoning_content=_THINK)
    if all(tag in template for tag in (*_RESPONSE.open, *_RESPONSE.close)):
        return msgspec.structs.replace(thinking, wrapper=_RESPONSE)
    return thinking


def _shown(template: str) -> Dialect | None:
    """The dialect that a template shows, with those of its regions that the template knows."""
    plain = template.replace('\\"', '"')
    shown = next((row for row, texts in _SIGNS if all(text in plain for text in texts)), None)
    if shown is None:
        return None
    found = DIALECTS[shown]
    if (region := found.reasoning_content) and region.open[0].strip() not in template:
        found = msgspec.structs.replace(found, reasoning_content=None)
    if (region := found.wrapper) and not any(marker in template for marker in region.open):
        found = msgspec.structs.replace(found, wrapper=None)
    return found
