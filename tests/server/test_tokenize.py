"""/tokenize and /detokenize."""

import asyncio
from typing import Any

import pytest
from support.server_harness import Answer, Front

from chairlift.text.chat_template import ChatTemplate
from chairlift.text.model_dialect import ModelDialect

FRONT = Front()
TOOL = {"type": "function", "function": {"name": "add"}}
WORDS = FRONT.tokenizer


def post(path: str, **body: Any) -> Answer:
    return asyncio.run(FRONT.post(path, body))


def test_a_prompt_is_read_as_completions_read_it() -> None:
    made = post("/tokenize", prompt="hello world<|end|>", model="tiny").json()
    plain = WORDS.encode("hello world<|end|>", parse_special=False)
    assert made == {"count": len(plain), "max_model_len": 200, "tokens": plain, "token_strs": None}
    asyncio.run(FRONT.complete(prompt="hello world<|end|>", max_tokens=1))
    assert FRONT.client.requests[-1].prompt_ids == plain
    special = post("/tokenize", prompt="hello<|end|>", parse_special=True, return_token_strs=True).json()
    assert special["tokens"] == WORDS.encode("hello<|end|>")
    assert special["token_strs"] == ["hello", "<|end|>"]
    assert post("/tokenize", prompt=" world", return_token_strs=True).json()["token_strs"] == ["Ġworld"]
    assert post("/tokenize", prompt="").json()["tokens"] == []


def test_special_tokens_around_a_prompt_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    encode = WORDS.encode_batch

    def noting(texts: Any, add_special_tokens: bool = True, parse_special: bool = True) -> Any:
        seen.append(add_special_tokens)
        return encode(texts, add_special_tokens, parse_special)

    monkeypatch.setattr(WORDS, "encode_batch", noting)
    for given in (None, True, False):
        post("/tokenize", prompt="hello", add_special_tokens=given)
    assert seen == [True, True, False]


def test_messages_are_read_as_chats_read_them() -> None:
    messages = [{"role": "user", "content": "hello"}]
    made = post("/tokenize", messages=messages).json()
    asyncio.run(FRONT.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}))
    assert made["tokens"] == FRONT.client.requests[-1].prompt_ids
    shorter = post("/tokenize", messages=messages, add_generation_prompt=False, chat_template_kwargs={"a": 1}).json()
    assert shorter["tokens"] == WORDS.encode("user: hello\n")
    begun = [*messages, {"role": "assistant", "content": "hello"}]
    longer = post("/tokenize", messages=begun, continue_final_message=True).json()
    assert longer["tokens"] == WORDS.encode("user: hello\nassistant: hello")


def test_tools_are_part_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
    monkeypatch.setattr(FRONT.service, "model_dialect", ModelDialect(takes_tools=True))
    monkeypatch.setattr(WORDS, "_chat_template", ChatTemplate({"default": template}, {}))
    made = post("/tokenize", messages=[{"role": "user", "content": " world"}], tools=[TOOL]).json()
    assert made["tokens"] == WORDS.encode("add world")


def test_a_body_with_inputs_is_teis() -> None:
    answer = post("/tokenize", inputs="hello")
    assert answer.status >= 400
    assert answer.json().keys() == {"error", "error_type"}


def test_there_and_back() -> None:
    for text in ("hello world", "漢字 😀", "a<|end|>b", "hello " * 100):
        tokens = post("/tokenize", prompt=text, parse_special=True).json()["tokens"]
        assert post("/detokenize", tokens=tokens).json() == {"prompt": text}
    assert post("/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", None),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt", None),
        ("/tokenize", {"prompt": ["a"]}, "prompt", None),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", None),
        ("/tokenize", {"prompt": "a", "wrong": 1}, "wrong", "unknown_field"),
        ("/tokenize", {"prompt": "hello" * 5000}, "prompt", "context_length_exceeded"),
        ("/tokenize", {"messages": []}, "messages", None),
        ("/tokenize", {"messages": [{"role": "a\n", "content": ""}]}, "messages[0].role", None),
        ("/tokenize", {"messages": [], "parse_special": True}, "parse_special", None),
        ("/tokenize", {"messages": [], "add_special_tokens": True}, "add_special_tokens", None),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools", None),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}], "tools": [TOOL]}, "tools", None),
        ("/tokenize", {"messages": [], "chat_template": "x"}, "chat_template", None),
        (
            "/tokenize",
            {"messages": [], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            None,
        ),
        ("/detokenize", {}, "tokens", "missing_field"),
        ("/detokenize", {"tokens": "a"}, "tokens", None),
        ("/detokenize", {"tokens": [-1]}, "tokens", None),
        ("/detokenize", {"tokens": [10**6]}, "tokens", None),
        ("/detokenize", {"tokens": [2**40]}, "tokens[0]", None),
        ("/detokenize", {"tokens": [1] * 201}, "tokens", "context_length_exceeded"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_values_are_refused_by_name(path: str, body: Any, param: str, code: str | None) -> None:
    answer = post(path, **body)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, code), answer.body
