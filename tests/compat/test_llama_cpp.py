"""What llama.cpp's suite asks of the routes that both have, asked of real servers here."""

import base64
import json
import struct
from typing import Any

import openai
import pytest
from support.covers import covers
from support.serve_process import Server

CHAT = "llama.cpp test_chat_completion.py"
RESPONSES = "llama.cpp test_compat_oai_responses.py"
MESSAGES_SUITE = "llama.cpp test_compat_anthropic.py"
EMBEDDING = "llama.cpp test_embedding.py"
MESSAGES: list[Any] = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book?"}]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="


def chat(server: Server, **body: Any) -> Any:
    return server.http.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 8, "temperature": 0} | body
    )


def message(server: Server, **body: Any) -> Any:
    wanted = {"max_tokens": 20, "messages": [{"role": "user", "content": "Say hello"}]}
    return server.http.post("/v1/messages", json=wanted | body)


def events(server: Server, path: str, body: Any) -> list[Any]:
    answer = server.http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    return [json.loads(line) for line in lines]


@covers(
    CHAT,
    "test_chat_completion",
    "test_chat_completion_stream",
    "test_chat_completion_with_openai_library",
    "test_chat_completions_multiple_choices",
)
def test_chats(demo_server: Server) -> None:
    parts = [
        MESSAGES[0],
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "it?"}]},
    ]
    for messages in (MESSAGES, parts):
        whole = chat(demo_server, messages=messages).json()
        assert "cmpl" in whole["id"]
        assert (whole["usage"]["completion_tokens"], whole["choices"][0]["finish_reason"]) == (8, "length")
        assert whole["choices"][0]["message"]["role"] == "assistant"
        found = events(demo_server, "/v1/chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0})
        assert found[0]["choices"][0]["delta"]["role"] == "assistant"
        assert all("role" not in event["choices"][0]["delta"] for event in found[1:])
        assert {event["id"] for event in found} == {found[0]["id"]}
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in found)
        assert text == whole["choices"][0]["message"]["content"]
        assert found[-1]["choices"][0]["finish_reason"] == "length"
    several = chat(demo_server, n=2).json()["choices"]
    assert [each["finish_reason"] for each in several] == ["length"] * 2


@pytest.mark.parametrize(
    ("form", "content"),
    [
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "42"}}}, '"42"'),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "foooooo"}}}, '"foooooo"'),
        ({"type": "sound"}, None),
        ({"type": "json_object", "schema": 123}, None),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 123}}}, None),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "hiccup"}}}, None),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_forms_of_answers(demo_server: Server, form: Any, content: str | None) -> None:
    answer = chat(demo_server, response_format=form, max_tokens=20)
    if content is None:
        assert (answer.status_code, "error" in answer.json()) == (400, True)
    else:
        assert answer.json()["choices"][0]["message"]["content"] == content


@covers(CHAT, "test_logprobs", "test_logprobs_stream")
def test_logprobs_spell_the_text(demo_server: Server) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": MESSAGES,
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 10,
    }
    whole = demo_server.openai.chat.completions.create(**asked, temperature=0).choices[0]
    assert whole.logprobs is not None
    for streams in (False, True):
        entries = whole.logprobs.content or []
        text = whole.message.content
        if streams:
            chunks = list(demo_server.openai.chat.completions.create(**asked, temperature=0, stream=True))
            deltas = [chunk.choices[0] for chunk in chunks]
            entries = [entry for delta in deltas if delta.logprobs for entry in delta.logprobs.content or ()]
            text = "".join(delta.delta.content or "" for delta in deltas)
        assert "".join(entry.token for entry in entries) == text
        assert all(entry.logprob <= 0 and entry.bytes and len(entry.top_logprobs) == 10 for entry in entries)


@covers(CHAT, "test_logit_bias")
def test_a_bias_keeps_words_away(demo_server: Server) -> None:
    def drawn(**more: Any) -> set[str]:
        answer = chat(demo_server, max_tokens=30, logprobs=True, return_tokens_as_token_ids=True, **more).json()
        return {entry["token"].removeprefix("token_id:") for entry in answer["choices"][0]["logprobs"]["content"]}

    plain = drawn()
    biased = drawn(logit_bias=dict.fromkeys(plain, -100))
    assert plain
    assert biased
    assert not plain & biased


def test_what_is_too_long(demo_server: Server) -> None:
    for stream in (False, True):
        answer = chat(demo_server, messages=MESSAGES * 400, stream=stream)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    "messages", [None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}], [MESSAGES[0], {}]]
)
def test_messages_that_are_none(demo_server: Server, messages: Any) -> None:
    answer = chat(demo_server, messages=messages)
    assert (answer.status_code, "error" in answer.json()) == (400, True), answer.text


@covers(RESPONSES, "test_responses_with_text_format", "test_responses_with_openai_library")
def test_responses_have_forms(demo_server: Server) -> None:
    form = {"type": "json_schema", "name": "test", "schema": {"const": "foooooo"}}
    for text_format, status in (
        (form, 200),
        ({"type": "json_object"}, 200),
        ({"type": "text"}, 200),
        ({"type": "json_schema", "name": "test"}, 400),
    ):
        body = {"input": "Write an example", "max_output_tokens": 10, "text": {"format": text_format}}
        answer = demo_server.http.post("/v1/responses", json=body)
        assert answer.status_code == status, answer.text
        if text_format is form:
            assert answer.json()["output"][0]["content"][0]["text"] == '"foooooo"'
    made = demo_server.openai.responses.create(model="demo", input=MESSAGES, max_output_tokens=8)
    assert made.id.startswith("resp_")
    assert made.output[0].id.startswith("msg_")


@covers(RESPONSES, "test_responses_stream_with_openai_library")
def test_events_of_a_response_have_one_id(demo_server: Server) -> None:
    found = list(demo_server.openai.responses.create(model="demo", input=MESSAGES, max_output_tokens=8, stream=True))
    responses = {event.response.id for event in found if hasattr(event, "response")}
    items = {event.item_id for event in found if hasattr(event, "item_id")} | {
        e.item.id for e in found if hasattr(e, "item")
    }
    assert (len(responses), len(items)) == (1, 1)
    assert items.pop().startswith("msg_")


@covers(
    MESSAGES_SUITE,
    "test_anthropic_messages_basic",
    "test_anthropic_messages_with_system",
    "test_anthropic_messages_multipart_content",
    "test_anthropic_messages_conversation",
    "test_anthropic_stop_sequences",
    "test_anthropic_temperature",
    "test_anthropic_top_p",
    "test_anthropic_top_k",
    "test_anthropic_metadata",
    "test_anthropic_vs_openai_different_response_format",
)
def test_messages(demo_server: Server) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " the answer?"}]
    turns = [{"role": role, "content": "Hello"} for role in ("user", "assistant", "user")]
    for more in (
        {},
        {"system": "You are helpful."},
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": turns},
        {"stop_sequences": ["\n", "END"]},
        {"temperature": 0.5},
        {"top_p": 0.9},
        {"top_k": 40},
        {"metadata": {"user_id": "me"}},
    ):
        answer = message(demo_server, **more)
        assert answer.status_code == 200, answer.text
        made = answer.json()
        assert (made["type"], made["role"], made["content"][0]["type"]) == ("message", "assistant", "text")
        assert made["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence")
        names = ("input_tokens", "cache_read_input_tokens", "output_tokens")
        assert all(isinstance(made["usage"][name], int) for name in names)
        assert not {"timings", "choices", "object"} & made.keys()


@covers(MESSAGES_SUITE, "test_anthropic_messages_streaming")
def test_events_of_messages(demo_server: Server) -> None:
    found = events(demo_server, "/v1/messages", {"max_tokens": 20, "messages": MESSAGES[1:]})
    kinds = list(dict.fromkeys(event["type"] for event in found if event["type"] != "ping"))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *block, "message_delta", "message_stop"]
    assert (found[0]["message"]["content"], found[0]["message"]["usage"]["input_tokens"] >= 0) == ([], True)
    assert found[-2]["delta"]["stop_reason"] in ("end_turn", "max_tokens")
    assert found[-2]["usage"]["output_tokens"] > 0


@covers(
    MESSAGES_SUITE,
    "test_anthropic_count_tokens",
    "test_anthropic_count_tokens_with_system",
    "test_anthropic_count_tokens_no_max_tokens",
)
def test_messages_are_counted(demo_server: Server) -> None:
    counts = []
    for more in ({}, {"system": "You are helpful."}):
        answer = demo_server.http.post("/v1/messages/count_tokens", json={"messages": MESSAGES[1:]} | more).json()
        assert set(answer) == {"input_tokens"}
        counts.append(answer["input_tokens"])
    assert 0 < counts[0] < counts[1]


@covers(MESSAGES_SUITE, "test_anthropic_vision_format_accepted", "test_anthropic_missing_messages")
def test_messages_that_are_refused(demo_server: Server) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    refused = message(demo_server, messages=[{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}])
    assert (refused.status_code, "image" in refused.json()["error"]["message"]) == (400, True)
    assert demo_server.http.post("/v1/messages", json={"max_tokens": 5}).status_code == 400


@covers(
    EMBEDDING,
    "test_embedding_single",
    "test_embedding_multiple",
    "test_embedding_openai_library_single",
    "test_embedding_openai_library_multiple",
    "test_same_prompt_give_same_result",
    "test_embedding_usage_single",
    "test_embedding_usage_multiple",
    "test_embedding_openai_library_base64",
    "test_embedding_error_prompt_too_long",
    "test_embedding_invalid_input",
)
@covers(
    "vllm embedding_tests/test_embedding.py",
    "test_single_embedding",
    "test_batch_embedding",
    "test_batch_base64_embedding",
    "test_single_embedding_truncation",
    "test_single_embedding_truncation_invalid",
)
def test_embeddings(models_server: Server) -> None:
    def embed(given: Any, **more: Any) -> Any:
        return models_server.http.post("/v1/embeddings", json={"model": "bert", "input": given} | more).json()

    one, many = embed("hello world"), embed(["hello world"] * 3 + ["the fox"])
    assert one["usage"]["prompt_tokens"] == one["usage"]["total_tokens"] > 0
    assert len(many["data"]) == 4
    for found in many["data"][:3]:
        assert found["embedding"] == pytest.approx(one["data"][0]["embedding"], abs=1e-3)
    assert embed(["hello world"] * 2)["usage"]["prompt_tokens"] == 2 * one["usage"]["prompt_tokens"]
    assert embed([[5, 6, 7], [8, 9]])["usage"]["prompt_tokens"] >= 5
    raw = base64.b64decode(embed("hello world", encoding_format="base64")["data"][0]["embedding"])
    assert struct.unpack(f"{len(raw) // 4}f", raw) == pytest.approx(one["data"][0]["embedding"], abs=1e-3)
    cut = embed("hello world " * 20, truncate_prompt_tokens=10)
    assert cut["usage"]["prompt_tokens"] == 10
    assert "error" in embed("hello", truncate_prompt_tokens=10**6)
    content = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for wrong in ([], {"content": "string"}, {"content": [{"type": "input_audio"}]}, {"content": [content]}):
        assert models_server.http.post("/v1/embeddings", json={"model": "bert", "input": wrong}).status_code == 400
    too_long = embed("hello world " * 5000)
    assert "error" in too_long
    assert len(models_server.openai.embeddings.create(model="bert", input=["hello", "the fox"]).data) == 2
    with pytest.raises(openai.BadRequestError):
        models_server.openai.embeddings.create(model="bert", input=[])
