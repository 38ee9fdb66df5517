"""Replies as published chat templates write them. They are not part of the project: CHAIRLIFT_CHAT_TEMPLATES names a
folder that has them as `*.jinja`, as llama.cpp has in models/templates."""

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from support.dialect_samples import TOOLS, assistant_message, tokens
from support.replies import read_reply

from chairlift.errors import InvalidRequest
from chairlift.text.call_grammar import ReplyShape, reply_grammar
from chairlift.text.chat_template import ChatTemplate, normalize_messages
from chairlift.text.dialect import Dialect
from chairlift.text.dialects import find_dialect

FOLDER = os.environ.get("CHAIRLIFT_CHAT_TEMPLATES")
# A template's name, and the dialect that it is of.
PUBLISHED = {
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen_xml",
    "Qwen3.5-4B": "qwen_xml",
    "ByteDance-Seed-OSS": "seed",
    "meta-llama-Llama-3.1-8B-Instruct": "llama",
    "meta-llama-Llama-3.2-3B-Instruct": "llama",
    "meta-llama-Llama-3.3-70B-Instruct": "llama",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral_nemo",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral_args",
    "unsloth-mistral-Devstral-Small-2507": "mistral_args",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral_args",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "GLM-4.6": "glm",
    "GLM-4.7-Flash": "glm_47",
    "google-gemma-4-31B-it": "gemma",
    "openai-gpt-oss-120b": "harmony",
}
# Writes objects and lists as Python does, and is held to JSON.
AS_PYTHON = {"ByteDance-Seed-OSS"}
# Writes a call without what ends all calls.
UNFINISHED = {"deepseek-ai-DeepSeek-R1-Distill-Llama-8B"}
ENDS = re.compile(
    r"\s*(?:<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|</s>|<｜end▁of▁sentence｜>|<turn\|>|<\|return\|>|<\|end\|>|<\|observation\|>|<\|tool_response>|<seed:eos>)\s*$"
)


def template(name: str) -> ChatTemplate:
    assert FOLDER is not None
    source = (Path(FOLDER) / f"{name}.jinja").read_text()
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})


def replies(name: str, dialect: Dialect, count: int) -> Iterator[tuple[dict[str, Any], str, bool]]:
    """Messages, the texts that they are, and whether the prompt has opened the reasoning."""
    chat, dice = template(name), random.Random(name)
    described = [
        {"type": "function", "function": {"name": each, "description": "", "parameters": TOOLS[each]}} for each in TOOLS
    ]
    found = 0
    while found < count:
        message = assistant_message(dialect, dice)
        if chat.knows_no_content and message.get("tool_calls"):
            # These forget either what is said or the calls, and one of them ends after the second.
            message |= {"content": None, "tool_calls": message["tool_calls"][:2]}
        if name in AS_PYTHON and any(call["function"]["name"] == "book" for call in message.get("tool_calls", [])):
            continue
        turns = normalize_messages(
            [{"role": "user", "content": "hi"}, message], chat.joins_arguments, chat.knows_no_content
        )
        if message.get("reasoning_content"):
            turns[1]["thinking"] = message["reasoning_content"]
        try:
            before = chat.render(turns[:1], True, {"tools": described}, 100_000, False)
            whole = chat.render(turns, False, {"tools": described}, 100_000, False)
        except InvalidRequest as error:
            if "single tool" in str(error):
                continue
            raise
        found += 1
        same = next(at for at, (one, other) in enumerate(zip(before + "\0", whole, strict=False)) if one != other)
        # Not from within a marker.
        start = whole.rfind("<", 0, same) if whole.rfind("<", 0, same) > whole.rfind(">", 0, same) else same
        region = dialect.reasoning_content
        opened = region is not None and any(whole[:start].rstrip().endswith(each.rstrip()) for each in region.open)
        text = ENDS.sub("", whole[start:])
        # Some close at once what the prompt would have opened.
        opened = opened or (region is not None and text.startswith(region.close[0]))
        yield message, text, opened


@pytest.mark.skipif(FOLDER is None, reason="CHAIRLIFT_CHAT_TEMPLATES names no folder")
@pytest.mark.parametrize("name", PUBLISHED)
def test_grammars_take_what_published_templates_write(name: str) -> None:
    dialect = find_dialect(template(name).source, "auto")
    assert dialect is not None
    backend, ll, named = tokens(dialect.name)
    for message, text, opened in replies(name, dialect, 20):
        if message.get("tool_calls") and ((message["content"] and dialect.name == "gemma") or name in UNFINISHED):
            continue
        grammar = reply_grammar(dialect, named, ReplyShape(tools=TOOLS, reasoning="open" if opened else "maybe"))
        assert grammar is not None
        follows = LLMatcher(ll, grammar, log_level=0)
        ids = backend.encode(text, add_special_tokens=False).ids
        taken = follows.try_consume_tokens(ids)
        assert taken == len(ids), (backend.decode(ids[:taken], skip_special_tokens=False), message)
        assert follows.is_accepting()


@pytest.mark.skipif(FOLDER is None, reason="CHAIRLIFT_CHAT_TEMPLATES names no folder")
@pytest.mark.parametrize("name", PUBLISHED)
def test_replies_of_published_templates(name: str) -> None:
    source = template(name).source
    dialect = find_dialect(source, "auto")
    assert dialect is not None
    assert dialect.name == PUBLISHED[name]
    dice = random.Random(7)
    for message, text, opened in replies(name, dialect, 100):
        whole = content, _, calls = read_reply(dialect, text, tools=TOOLS, opened=opened)
        made = [call["function"] for call in message.get("tool_calls", [])]
        wanted = [(function["name"], json.loads(function["arguments"])) for function in made]
        assert [(called, json.loads(arguments)) for called, arguments in calls] == wanted, text
        if not wanted:
            assert content.strip() == message["content"].strip(), text
        for cut in range(1, len(text), 1 if len(text) < 400 else 7):
            assert read_reply(dialect, text, [cut], tools=TOOLS, opened=opened) == whole, (text, cut)
        for _ in range(20):
            cuts = [dice.randrange(len(text) + 1), dice.randrange(len(text) + 1)]
            assert read_reply(dialect, text, cuts, tools=TOOLS, opened=opened) == whole, (text, cuts)
