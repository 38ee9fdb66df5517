"""/v1/messages, by Anthropic's client and by hand."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic.types import Message
from support.items_harness import Listening, listening
from support.key_files import key_of, write_keys
from support.reply_reader import HERMES_REPLY, Marked, events_of, speaking
from support.server_harness import Answer, FakeClient, Front, tokenizer

from chairlift.config.server import ServerConfig
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.errors import RequestFailed
from chairlift.server.anthropic.message_answer import MessageBlocks
from chairlift.server.models.sequence_service import SequenceService
from chairlift.text.model_dialect import ModelDialect
from chairlift.text.reply import ArgumentsPart, CallPart
from chairlift.text.structured import schema_grammar

ASK: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def replying(text: str) -> FakeClient:
    """An engine that says this, and ends."""
    words = tokenizer()
    return FakeClient([*words.encode(text), *words.encode("<|end|>")])


def run(test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(test(), 60))


def ask(front: Front, **body: Any) -> Answer:
    async def go() -> Answer:
        return await front.post("/v1/messages", {"messages": ASK, "max_tokens": 20} | body)

    return run(go)


def error(answer: Answer) -> Any:
    made = answer.json()
    assert made.keys() == {"type", "error", "request_id"}
    assert (made["type"], made["error"].keys() - {"details"}) == ("error", {"type", "message"})
    return made["error"]


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Marked:
    return Marked(monkeypatch)


def serving(text: str, **settings: Any) -> Any:
    words = tokenizer()
    return listening(SequenceService(replying(text), words, "tiny", ServerConfig(**settings)), **settings)


@pytest.fixture
def served() -> Iterator[Listening]:
    with serving("hello world! ") as it:
        yield it


def client(served: Listening, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0, timeout=60)


def shown(message: Message) -> dict[str, Any]:
    """All that a message says, but for its id."""
    return message.model_dump(mode="json", exclude_none=True, exclude={"id"})


# Anthropic's client


def test_client_creates_streams_and_counts(served: Listening) -> None:
    with client(served) as api:
        made = api.messages.create(model="tiny", max_tokens=20, messages=ASK)
        assert [block.text for block in made.content if block.type == "text"] == ["hello world! "]
        assert (made.role, made.model, made.stop_reason, made.stop_sequence) == ("assistant", "tiny", "end_turn", None)
        count = api.messages.count_tokens(model="tiny", messages=ASK).input_tokens
        assert made.usage.cache_read_input_tokens == 3
        assert made.usage.input_tokens + made.usage.cache_read_input_tokens == count
        assert made.usage.output_tokens == 5
        with api.messages.stream(model="tiny", max_tokens=20, messages=ASK) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
        assert text == "hello world! "
        assert shown(streamed) == shown(made)


def test_async_client(served: Listening) -> None:
    async def go() -> None:
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as api:
            made = await api.messages.create(model="tiny", max_tokens=2, messages=ASK)
            assert made.stop_reason == "max_tokens"
            async with api.messages.stream(model="tiny", max_tokens=2, messages=ASK) as stream:
                assert shown(await stream.get_final_message()) == shown(made)
            assert (await api.messages.count_tokens(model="tiny", messages=ASK)).input_tokens > 0

    run(go)


def test_client_gets_errors_of_its_own_kinds(served: Listening) -> None:
    with client(served) as api:
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            api.messages.create(model="nobody", max_tokens=2, messages=ASK)
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            api.messages.create(model="tiny", max_tokens=0, messages=ASK)


def test_a_key_comes_in_either_header(tmp_path: Path) -> None:
    keys = str(write_keys(tmp_path / "keys.toml", alice={}, bob={"rights": []}))
    with serving("hello", api_keys=keys) as it:
        with client(it, key_of("alice")) as api:
            assert api.messages.create(model="tiny", max_tokens=2, messages=ASK).content
        with client(it, "wrong") as api, pytest.raises(anthropic.AuthenticationError):
            api.messages.create(model="tiny", max_tokens=2, messages=ASK)
        with client(it, key_of("bob")) as api, pytest.raises(anthropic.PermissionDeniedError, match="infer"):
            api.messages.create(model="tiny", max_tokens=2, messages=ASK)

    async def go() -> None:
        front = Front(replying("hello"), api_keys=keys)
        body = {"messages": ASK, "max_tokens": 2}
        for headers, status in (
            ({"x-api-key": key_of("alice")}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": key_of("alice"), "authorization": "Bearer none"}, 200),
            ({}, 401),
        ):
            answer = await front.post("/v1/messages", body, headers=headers)
            assert answer.status == status
            assert status == 200 or error(answer)["type"] == "authentication_error"
        headers = {"x-api-key": key_of("alice")}
        assert (await front.post("/v1/completions", {"prompt": "a"}, headers=headers)).status == 200

    run(go)


def test_client_sees_thoughts_and_calls(marked: Marked) -> None:
    with serving('~so~ok@add|{"a": 1}@@sub|{}@') as it, client(it) as api:
        with api.messages.stream(model="tiny", max_tokens=90, messages=ASK, tools=[TOOL]) as stream:
            streamed = stream.get_final_message()
        made = api.messages.create(model="tiny", max_tokens=90, messages=ASK, tools=[TOOL])
        for message in (streamed, made):
            kinds = [block.type for block in message.content]
            assert kinds == ["thinking", "text", "tool_use", "tool_use"]
            thought, text, add, sub = message.content
            assert (thought.thinking, text.text, message.stop_reason) == ("so", "ok", "tool_use")
            assert (add.name, add.input, sub.name, sub.input) == ("add", {"a": 1}, "sub", {})
            assert add.id != sub.id
            assert thought.signature
        # What came can be sent back as it is.
        turns = [*ASK, {"role": "assistant", "content": made.content}]
        results = [{"type": "tool_result", "tool_use_id": each.id, "content": "2"} for each in (add, sub)]
        api.messages.create(model="tiny", max_tokens=2, messages=[*turns, {"role": "user", "content": results}])
        # So can what a client has made of it, with all that it knows of and is not there.
        turns[-1]["content"] = [block.model_dump() | {"yet_unknown": None} for block in made.content]
        api.messages.create(model="tiny", max_tokens=2, messages=[*turns, {"role": "user", "content": results}])
    assert marked.opened[-1].messages == marked.opened[-2].messages
    assert marked.opened[-1].messages[1:] == [
        {
            "role": "assistant",
            "content": "ok",
            "reasoning_content": "so",
            "tool_calls": [
                {"id": add.id, "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
                {"id": sub.id, "type": "function", "function": {"name": "sub", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": add.id, "name": "add", "content": "2"},
        {"role": "tool", "tool_call_id": sub.id, "name": "sub", "content": "2"},
    ]


# By hand


def test_stream_has_all_events_in_order() -> None:
    events = events_of(ask(Front(replying("hello world")), stream=True).body)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 3
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    Message.model_validate(events[0]["message"])


def test_why_it_ended(marked: Marked) -> None:
    made = ask(Front(replying("hello world")), stop_sequences=["wor", "x"]).json()
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", "wor")
    assert made["content"] == [{"type": "text", "text": "hello "}]
    assert ask(Front(), max_tokens=3).json()["stop_reason"] == "max_tokens"
    # More than the model has room for is no error: it says itself why it ended.
    assert ask(Front(), max_tokens=100_000).json()["stop_reason"] == "model_context_window_exceeded"
    cut = ask(Front(replying('@add|{"a": 1}@')), max_tokens=6).json()
    assert (cut["stop_reason"], cut["content"][0]["input"]) == ("max_tokens", {})
    assert ask(Front(replying(""))).json()["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize("arguments", ['{"a":' + "[" * 1100, '{"a":' + "[" * 900 + "]" * 900 + "}", "[1]"])
def test_arguments_that_can_not_be_read_are_none(arguments: str) -> None:
    blocks = MessageBlocks(omit_thinking=False)
    blocks.push(CallPart(0, "f"))
    blocks.push(ArgumentsPart(0, arguments))
    blocks.finish()
    (call,) = blocks.content()
    assert (call["name"], call["input"]) == ("f", {})


def test_a_model_thinks_if_it_is_asked_to(marked: Marked) -> None:
    switched = ModelDialect(switch="enable_thinking")
    cases: tuple[tuple[ModelDialect, Any, bool | None], ...] = (
        (switched, None, False),
        (ModelDialect(), None, None),
        (ModelDialect(), {"type": "disabled"}, False),
        (switched, {"type": "adaptive"}, None),
        (switched, {"type": "enabled", "budget_tokens": 5}, True),
        # Nor is there anything to bound where it is not known how the model reasons.
        (ModelDialect(), {"type": "enabled", "budget_tokens": 5}, None),
    )
    for model_dialect, given, thinks in cases:
        front = Front(replying("ok"))
        front.service.model_dialect = model_dialect
        # An effort is for models that know degrees of it.
        assert ask(front, thinking=given, output_config={"effort": "high"}).status == 200
        opened = marked.opened[-1]
        assert (opened.thinking, opened.thinking_tokens, opened.reasoning_effort) == (thinks, None, None)


def test_thoughts_and_calls_as_a_model_writes_them() -> None:
    for stream in (False, True):
        front = speaking(Front(replying(HERMES_REPLY)))
        answer = ask(front, max_tokens=150, tools=[TOOL], tool_choice={"type": "any"}, stream=stream)
        assert answer.status == 200, answer.body
        if stream:
            events = [each for each in events_of(answer.body) if each["type"] == "content_block_start"]
            blocks = [event["content_block"] for event in events]
        else:
            blocks = answer.json()["content"]
            assert (blocks[0]["thinking"].strip(), blocks[-1]["input"]) == ("so", {"a": 1})
            assert answer.json()["stop_reason"] == "tool_use"
        assert [block["type"] for block in blocks] == ["thinking", "tool_use"]
        assert blocks[-1]["name"] == "add"
        assert front.client.requests[0].grammar


def test_thoughts_can_be_left_out(marked: Marked) -> None:
    thinking = {"type": "enabled", "budget_tokens": 7, "display": "omitted"}
    front = speaking(Front(replying("~so~ok")))
    front.service.model_dialect = msgspec.structs.replace(front.service.model_dialect, tokens={"</think>": 9})
    made = ask(front, thinking=thinking).json()
    assert made["content"][0]["thinking"] == ""
    assert made["content"][1] == {"type": "text", "text": "ok"}
    streamed = ask(Front(replying("~so~ok")), thinking=thinking, stream=True)
    assert b"thinking_delta" not in streamed.body
    assert b"signature_delta" in streamed.body
    assert (marked.opened[0].thinking, marked.opened[0].thinking_tokens) == (True, 7)


def test_a_budget_is_a_hint_where_the_reasoning_can_not_be_bounded() -> None:
    for more in ({}, {"tools": [TOOL]}):
        front = speaking(Front(replying("ok")))
        answer = ask(front, thinking={"type": "enabled", "budget_tokens": 7}, **more)
        assert answer.status == 200, answer.body


def test_a_field_that_was_sent_is_named_where_reasoning_can_not_be_turned_off() -> None:
    front = speaking(Front(replying("ok")))
    turns = [*ASK, {"role": "assistant", "content": "<think>"}]
    refused = ask(front, messages=turns, thinking={"type": "disabled"})
    assert refused.status == 400, refused.body
    assert error(refused)["message"].startswith("thinking: the reasoning can't be bounded: its end")


def test_what_a_conversation_gets(marked: Marked) -> None:
    front = Front(replying("ok"))
    front.service.model_dialect = ModelDialect(takes_effort=True)
    answer = ask(
        front,
        system=[{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "ok"}],
        messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "d", "cache_control": {"type": "x"}}]},
            {"role": "user", "content": "e"},
        ],
        tools=[TOOL | {"strict": True, "cache_control": None}],
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        output_config={"effort": "low"},
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "me"},
        service_tier="auto",
    )
    assert answer.status == 200, answer.body
    (made,) = marked.opened
    assert made.messages == [
        {"role": "system", "content": "be\nok"},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "", "reasoning_content": "d"},
        {"role": "user", "content": "e"},
    ]
    (tool,) = made.tools
    assert (tool.name, tool.description, tool.parameters, tool.strict) == ("add", "Adds.", {"type": "object"}, True)
    assert (made.tool_choice.mode, made.tool_choice.name, made.parallel_tool_calls) == ("required", "add", False)
    assert (made.thinking, made.reasoning_effort) == (False, "low")
    params = front.client.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 20)


def test_an_answers_form_is_a_grammar() -> None:
    front = Front(replying("ok"))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    assert ask(front, output_config={"format": form}).status == 200
    assert ask(front, output_format=form, output_config={"effort": "low"}).status == 200
    assert ask(front).status == 200
    grammar = schema_grammar(schema, "x")
    assert [request.grammar for request in front.client.requests] == [grammar, grammar, None]


@pytest.mark.parametrize(("given", "mode"), [("auto", "auto"), ("any", "required"), ("none", "none")])
def test_tool_choices(given: str, mode: str, marked: Marked) -> None:
    assert ask(Front(replying("ok")), tools=[TOOL], tool_choice={"type": given}).status == 200
    assert (marked.opened[0].tool_choice.mode, marked.opened[0].tool_choice.name) == (mode, None)


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
USE = {"type": "tool_use", "id": "1", "name": "add", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "2"}
FORM = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [*ASK, {"role": "assistant", "content": [USE]}]}, "the last of messages must not call a tool"),
        ({"messages": [{"role": "user", "content": []}]}, "messages must say something"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "redacted_thinking", "data": ""}]}]}, "redacted_thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}]}, "content[0].x"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type 'tool_use'"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [USE]},
                    {"role": "user", "content": [RESULT | {"content": [IMAGE]}]},
                ]
            },
            "messages[1].content[0].content[0].type 'image'",
        ),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type 'web_search_20250305'"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [TOOL | {"allowed_callers": ["code"]}]}, "tools[0].allowed_callers"),
        ({"tools": [TOOL] * 257}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "sub"}, "tools": [TOOL]}, "tool_choice names 'sub'"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"name": "a" * 129}]}, "tools[0].name must be 1 to 128"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name 'add' is there twice"),
        ({"tool_choice": {"type": "auto", "name": "add"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_object", "schema": {}}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_object", "schema": {}}}, "output_format.type"),
        ({"output_format": FORM, "output_config": {"format": FORM}}, "output_format and output_config.format"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": 2**40}, "top_k"),
        ({"container": "x"}, "container"),
        ({"context_management": {"edits": [1]}}, "context_management"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"messages": ASK * 16_385}, "messages"),
        ({"n": 2}, "'n'"),
        ({"messages": [{"role": "user", "content": "hello " * 500}]}, "prompt is too long: "),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_values_are_refused_by_name(body: dict[str, Any], named: str) -> None:
    front = Front(replying("ok"))
    answer = ask(front, **body)
    assert (answer.status, error(answer)["type"]) == (400, "invalid_request_error")
    assert named in error(answer)["message"]
    assert not front.client.requests


def test_counting_takes_what_makes_the_prompt(marked: Marked) -> None:
    async def go() -> None:
        front = Front()
        body = {"messages": ASK, "system": "be", "tools": [TOOL], "thinking": {"type": "adaptive"}}
        counted = await front.post("/v1/messages/count_tokens", body)
        text = "system: be\nuser: hi\na: "
        assert counted.json() == {"input_tokens": len(front.tokenizer.encode(text, add_special_tokens=False))}
        assert not front.client.requests
        refused = await front.post("/v1/messages/count_tokens", body | {"max_tokens": 5})
        assert "max_tokens" in error(refused)["message"]

    run(go)


def test_a_last_message_of_the_assistant_begins_the_answer() -> None:
    front = Front(replying(" world"))
    made = ask(front, messages=[*ASK, {"role": "assistant", "content": "hello"}]).json()
    assert made["content"] == [{"type": "text", "text": " world"}]
    (request,) = front.client.requests
    assert request.prompt_ids == front.tokenizer.encode("user: hi\nassistant: hello")


def test_errors_have_anthropics_shape() -> None:
    async def go() -> None:
        front = Front()
        front.client.state = "loading"
        answer = await front.post("/v1/messages", {"messages": ASK, "max_tokens": 1})
        assert (answer.status, error(answer)["type"]) == (503, "overloaded_error")
        for method, path, kind in (
            ("GET", "/v1/messages", "invalid_request_error"),
            ("POST", "/v1/messages/batches", "not_found_error"),
        ):
            assert error(await front.call(method, path))["type"] == kind

    run(go)


def test_a_conversation_that_the_server_is_to_keep_is_refused_in_a_way_that_clients_know() -> None:
    refused = ask(Front(), thread={"type": "create"})
    assert error(refused)["details"] == {"error_code": "thread_unsupported_request"}
    assert "details" not in error(ask(Front(), container="x"))


def test_an_error_in_a_stream_is_its_last_event() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        body = {"messages": ASK, "max_tokens": 5, "stream": True}
        asked = asyncio.create_task(front.post("/v1/messages", body))
        while not front.client.streams:
            await asyncio.sleep(0)
        (stream,) = front.client.streams
        word = front.tokenizer.encode("hello")
        stream.push(SequenceUpdate(stream.request.id, word, None, None, None, None, 0, 0.0))
        await asyncio.sleep(0.01)
        stream.give_up(RequestFailed("it broke"))
        answer = await asked
        last = events_of(answer.body)[-1]
        details = {"error_code": "request_failed"}
        assert last["error"] == {"type": "api_error", "message": "it broke", "details": details}
        assert last["request_id"] == answer.headers["request-id"]

    run(go)


@pytest.mark.parametrize("streams", [False, True])
def test_who_hangs_up_cancels(streams: bool) -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        body = {"messages": ASK, "max_tokens": 5, "stream": streams}
        asked = asyncio.create_task(front.post("/v1/messages", body))
        while not front.client.streams:
            await asyncio.sleep(0)
        front.gone.set()
        await asked
        assert front.client.cancelled == [front.client.requests[0].id]

    run(go)


def test_fields_that_are_null_and_not_known_count_as_left_out(marked: Marked) -> None:
    block = {"type": "text", "text": "hi", "odd": None}
    odd: dict[str, Any] = {
        "odd": None,
        "messages": [{"role": "user", "content": [block], "odd": None}],
        "tools": [TOOL | {"odd": None, "input_schema": {"type": "object", "default": None}}],
        "tool_choice": {"type": "auto", "odd": None},
    }
    front = Front(replying("ok"))
    answer = ask(front, **odd)
    assert answer.status == 200, answer.body
    (opened,) = marked.opened
    assert opened.messages == [{"role": "user", "content": "hi"}]
    # A tool's schema is the client's own.
    assert opened.tools[0].parameters == {"type": "object", "default": None}
    for field in ("messages", "tools"):
        assert "odd" in error(ask(front, **odd | {field: [odd[field][0] | {"odd": 1}]}))["message"]
    assert "odd" in error(ask(front, **odd | {"tool_choice": {"type": "auto", "odd": 1}}))["message"]


def test_of_what_is_large_unknown_fields_are_refused_as_they_are() -> None:
    """To look for those that are null would take too long."""
    turns = [{"role": "user", "content": "", "odd": None}]
    for more in ([{"role": "user", "content": "x" * 2**18}], [{"role": "user", "content": ""}] * 4096):
        assert "messages[0].odd" in error(ask(Front(), messages=[*turns, *more]))["message"]


def test_a_prompt_that_is_too_long_is_told_in_numbers() -> None:
    async def go() -> None:
        front = Front(replying("ok"))
        for letters in range(150, 240):
            turns = [{"role": "user", "content": "z" * letters}]
            body = {"messages": turns, "max_tokens": 5}
            counted = (await front.post("/v1/messages/count_tokens", {"messages": turns})).json()["input_tokens"]
            answer = await front.post("/v1/messages", body)
            if counted < 200:
                assert answer.status == 200
                continue
            told = error(answer)
            assert (answer.status, told["type"]) == (400, "invalid_request_error")
            assert told["message"] == f"prompt is too long: {counted} tokens > 199 maximum. Shorten it."
            assert told["details"] == {"error_code": "context_length_exceeded"}
        assert counted > 205
        assert max(len(request.prompt_ids) for request in front.client.requests) == 199
        # One that need not be tokenized to know that.
        refused = await front.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "z" * 9000}]})
        assert error(refused)["message"].startswith("prompt is too long: ")

    run(go)


def test_it_ends_with_the_models_own_length() -> None:
    front = Front(replying("ok"))
    ask(front, max_tokens=10**6)
    (request,) = front.client.requests
    assert request.max_tokens == 200 - len(request.prompt_ids)
