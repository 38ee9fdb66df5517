"""/v1/responses, by OpenAI's client and by hand."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel
from support.items_harness import Listening, listening, threads_of
from support.key_files import bearer, write_keys
from support.reply_reader import HERMES_REPLY, Marked, events_of, speaking
from support.server_harness import Answer, FakeClient, Front, full, tokenizer

from chairlift.config.server import ServerConfig
from chairlift.core.finished import FinishReason
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.errors import RequestFailed
from chairlift.jobs.result_lines import usage_of
from chairlift.server.http import exchange, part_sender
from chairlift.server.http.local_client import AppClient
from chairlift.server.models.sequence_service import SequenceService
from chairlift.server.responses import response_routes
from chairlift.server.responses.output_items import OutputItems
from chairlift.text.model_dialect import ModelDialect
from chairlift.text.reply import ArgumentsPart, CallPart
from chairlift.text.structured import schema_grammar

TOOL: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
OTHER: dict[str, Any] = {"type": "function", "name": "sub"}


def replying(text: str) -> FakeClient:
    """An engine that says this, and ends."""
    words = tokenizer()
    return FakeClient([*words.encode(text), *words.encode("<|end|>")])


def run(test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(test(), 60))


async def post(front: Front, headers: dict[str, str] | None = None, **body: Any) -> Answer:
    return await front.post("/v1/responses", {"input": "hi", "max_output_tokens": 30} | body, headers=headers)


async def get(front: Front, name: str, more: str = "", method: str = "GET", **headers: str) -> Answer:
    return await front.call(method, f"/v1/responses/{name}{more}", headers=headers)


def ask(front: Front | None = None, **body: Any) -> Answer:
    async def go() -> Answer:
        return await post(front or Front(replying("hello world")), **body)

    return run(go)


async def until(front: Front, name: str, status: str) -> Any:
    """Poll a response until it has this status."""
    while (found := (await get(front, name)).json())["status"] != status:
        await asyncio.sleep(0)
    return found


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Marked:
    return Marked(monkeypatch)


def serving(text: str, **settings: Any) -> Any:
    return listening(SequenceService(replying(text), tokenizer(), "tiny", ServerConfig(**settings)), **settings)


@pytest.fixture
def served() -> Iterator[Listening]:
    with serving("hello world! ") as it:
        yield it


def client(served: Listening) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)


# OpenAI's client


def test_client_creates_streams_keeps_and_deletes(served: Listening) -> None:
    with client(served) as api:
        made = api.responses.create(model="tiny", input="hi", metadata={"a": "b"})
        count = api.responses.input_tokens.count(model="tiny", input="hi")
        assert made.usage is not None
        assert (count.object, count.input_tokens) == ("response.input_tokens", made.usage.input_tokens)
        assert (made.output_text, made.status, made.model) == ("hello world! ", "completed", "tiny")
        assert made.usage is not None
        assert (made.usage.output_tokens, made.usage.input_tokens_details.cached_tokens) == (5, 3)
        kept = api.responses.retrieve(made.id)
        assert kept.to_dict() == made.to_dict()
        assert kept.metadata == {"a": "b"}
        (item,) = api.responses.input_items.list(made.id).data
        assert item.type == "message"
        assert item.content[0].text == "hi"
        with api.responses.stream(model="tiny", input="hi", previous_response_id=made.id) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            streamed = stream.get_final_response()
        assert text == streamed.output_text == "hello world! "
        assert api.responses.retrieve(streamed.id).output_text == text
        api.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError, match=made.id):
            api.responses.retrieve(made.id)


def test_async_client_runs_in_the_background(served: Listening) -> None:
    async def go() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as api:
            made = await api.responses.create(model="tiny", input="hi", background=True)
            assert made.status == "queued"
            while made.status != "completed":
                made = await api.responses.retrieve(made.id)
            assert made.output_text == "hello world! "
            # It is over, so there is nothing to cancel.
            assert (await api.responses.cancel(made.id)).status == "completed"
            async with api.responses.stream(model="tiny", input="hi") as stream:
                assert (await stream.get_final_response()).output_text == "hello world! "

    run(go)


def test_client_sees_thoughts_and_calls_and_goes_on(marked: Marked) -> None:
    with serving('~so~ok@add|{"a": 1}@@sub|{}@') as it, client(it) as api:
        with api.responses.stream(model="tiny", input="hi", tools=[TOOL, OTHER]) as stream:
            streamed = stream.get_final_response()
        made = api.responses.create(model="tiny", input="hi", tools=[TOOL, OTHER])
        for response in (streamed, made):
            assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
            thought, _, add, sub = response.output
            assert thought.content[0].text == "so"
            assert (add.name, add.arguments, sub.name, sub.arguments) == ("add", '{"a": 1}', "sub", "{}")
            assert len({add.call_id, sub.call_id}) == 2
            assert response.usage.output_tokens_details.reasoning_tokens == 2
        outputs = [{"type": "function_call_output", "call_id": each.call_id, "output": "2"} for each in (add, sub)]
        api.responses.create(model="tiny", input=outputs, previous_response_id=made.id)
        by_hand = [{"role": "user", "content": "hi"}, *(each.to_dict() for each in made.output), *outputs]
        api.responses.create(model="tiny", input=by_hand, store=False)
        # As the client has it: with all that it knows of and is not there.
        by_hand[1:5] = [each.model_dump() | {"yet_unknown": None} for each in made.output]
        api.responses.create(model="tiny", input=by_hand, store=False)
        by_hand[1:5] = [{"type": "item_reference", "id": each.id} for each in made.output]
        api.responses.create(model="tiny", input=by_hand, store=False)
    assert all(opened.messages == marked.opened[-1].messages for opened in marked.opened[-4:])
    assert marked.opened[-1].messages == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "ok",
            "reasoning_content": "so",
            "tool_calls": [
                {"id": add.call_id, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": sub.call_id, "type": "function", "function": {"name": "sub", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": add.call_id, "name": "add", "content": "2"},
        {"role": "tool", "tool_call_id": sub.call_id, "name": "sub", "content": "2"},
    ]


# Streams


def test_stream_has_all_events_in_order(marked: Marked) -> None:
    events = events_of(ask(Front(replying("~so~ok@add|{}@")), stream=True, tools=[TOOL]).body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta", "output_text.done"),
        *("function_call_arguments.delta", "function_call_arguments.done", "completed"),
    ]
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 3
    assert kinds.count("content_part.added") == kinds.count("content_part.done") == 2
    for event in (events[0], events[-1]):
        Response.model_validate(event["response"])
    assert events[-1]["response"]["output"] == [
        event["item"] for event in events if event["type"] == "response.output_item.done"
    ]


def test_what_is_cut_off_is_incomplete(marked: Marked) -> None:
    cases = (("hello world", "message", 2), ("~thinking~ok", "reasoning", 3), ("@add|{}@", "function_call", 6))
    for text, kind, most in cases:
        made = ask(Front(replying(text)), max_output_tokens=most, tools=[TOOL]).json()
        assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (made["output"][-1]["type"], made["output"][-1]["status"]) == (kind, "incomplete")
        streamed = events_of(ask(Front(replying(text)), max_output_tokens=2, stream=True).body)[-1]
        assert streamed["type"] == "response.incomplete"
    nothing = ask(Front(replying(""))).json()
    assert (nothing["status"], nothing["output"][0]["content"][0]["text"]) == ("completed", "")


def test_a_call_without_arguments_has_none_as_json(marked: Marked) -> None:
    answer = ask(Front(replying("@add|@@sub|@")), tools=[TOOL, OTHER])
    assert [item["arguments"] for item in answer.json()["output"]] == ["{}", "{}"]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ('{"a":' + "[" * 1100, "incomplete"),
        ('{"a":' + "[" * 900 + "]" * 900 + "}", "incomplete"),
        ('{"a":' + "[" * 60 + "]" * 60 + "}", "completed"),
    ],
    ids=["without an end", "deep", "as deep as may be"],
)
def test_arguments_that_are_nested_too_deeply_are_no_json(arguments: str, status: str) -> None:
    items = OutputItems("resp_1")
    items.push(CallPart(0, "f"))
    items.push(ArgumentsPart(0, arguments))
    items.finish(True)
    (call,) = items.done
    assert (call["status"], call["arguments"]) == (status, arguments)


def test_an_error_in_a_stream_fails_the_response() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        asked = asyncio.create_task(post(front, stream=True))
        while not front.client.streams:
            await asyncio.sleep(0)
        (stream,) = front.client.streams
        stream.push(SequenceUpdate(stream.request.id, front.tokenizer.encode("hello"), None, None, None, None, 0, 0.0))
        await asyncio.sleep(0.01)
        stream.give_up(RequestFailed("it broke"))
        events = events_of((await asked).body)
        last = events[-1]
        assert (last["type"], last["sequence_number"]) == ("response.failed", len(events) - 1)
        assert last["response"]["error"] == {"code": "server_error", "message": "it broke"}
        assert last["response"]["output"][0]["content"][0]["text"] == "hello"
        assert (await get(front, last["response"]["id"])).json()["status"] == "failed"
        after = await post(front, previous_response_id=last["response"]["id"])
        assert (after.status, after.error["param"]) == (400, "previous_response_id")

    run(go)


def test_an_error_of_one_that_was_told_to_wait_follows_its_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_sender, "WAITING_S", 0.001)

    async def go() -> None:
        front, answer = Front(FakeClient(manual=True)), Answer()
        body = {"input": "hi", "stream": True}
        asked = asyncio.create_task(front.post("/v1/responses", body, answer=answer))
        while not answer.writes:
            await asyncio.sleep(0)
        front.client.streams[0].give_up(RequestFailed("it broke"))
        await asked
        events = events_of(answer.body.replace(b": waiting\n", b""))
        assert [event["type"] for event in events] == ["response.created", "response.failed"]
        assert [event["sequence_number"] for event in events] == [0, 1]
        assert events[0]["response"]["id"] == events[1]["response"]["id"]
        assert (await get(front, events[1]["response"]["id"])).json()["status"] == "failed"

    run(go)


def test_an_error_before_a_stream_is_an_ordinary_one() -> None:
    front = Front(FakeClient([1]))
    front.client.refusal = full(2.0)
    answer = ask(front, stream=True)
    assert (answer.status, answer.error["code"]) == (429, "queue_full")


@pytest.mark.parametrize("streams", [False, True])
def test_who_hangs_up_cancels_and_nothing_is_kept(streams: bool) -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        asked = asyncio.create_task(post(front, stream=streams))
        while not front.client.streams:
            await asyncio.sleep(0)
        front.gone.set()
        await asked
        (request,) = front.client.requests
        assert front.client.cancelled == [request.id]
        assert (await get(front, request.id)).status == 404

    run(go)


# What a conversation gets


def test_instructions_and_what_the_system_says_first_are_one() -> None:
    async def go() -> None:
        front = Front(replying("ok"))
        items = [
            {"role": "developer", "content": "b"},
            {"role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
            {"role": "system", "content": "e"},
        ]
        made = (await post(front, input=items, instructions="a")).json()
        again = await post(front, input="f", previous_response_id=made["id"])
        assert again.json()["instructions"] is None
        prompts = [front.tokenizer.decode(request.prompt_ids) for request in front.client.requests]
        assert prompts[0] == "system: a\n\nb\nuser: cd\nsystem: e\na: "
        # Instructions are for one response.
        assert prompts[1] == "system: b\nuser: cd\nsystem: e\nassistant: ok\nuser: f\na: "

    run(go)


def test_what_the_assistant_did_in_a_row_is_one_message(marked: Marked) -> None:
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}], "content": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "b"}]},
        CALL,
        {"type": "reasoning", "summary": []},
        OUTPUT | {"output": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "e"}]},
        {"type": "message", "role": "assistant", "content": "f", "id": "msg_1", "status": "completed", "phase": None},
        {"role": "assistant", "content": "g"},
        {"role": "user", "content": "h"},
    ]
    assert ask(Front(replying("ok")), input=items).status == 200
    function = {"name": "add", "arguments": "{}"}
    assert marked.opened[0].messages == [
        {
            "role": "assistant",
            "content": "b",
            "reasoning_content": "a",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "name": "add", "content": "cd"},
        {"role": "assistant", "content": "f", "reasoning_content": "e"},
        {"role": "assistant", "content": "g"},
        {"role": "user", "content": "h"},
    ]


def test_thoughts_and_calls_as_a_model_writes_them() -> None:
    for stream in (False, True):
        front = speaking(Front(replying(HERMES_REPLY)))
        answer = ask(front, max_output_tokens=150, tools=[TOOL], tool_choice="required", stream=stream)
        assert answer.status == 200, answer.body
        made = events_of(answer.body)[-1]["response"] if stream else answer.json()
        thought, call = made["output"]
        assert thought["content"][0]["text"].strip() == "so"
        assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 1})
        assert made["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        assert front.client.requests[0].grammar


def test_an_effort_is_for_models_that_know_degrees_of_it(marked: Marked) -> None:
    for model_dialect, given, got in (
        (ModelDialect(), "low", None),
        (ModelDialect(), "none", "none"),
        (ModelDialect(takes_effort=True), "low", "low"),
    ):
        front = Front(replying("ok"))
        front.service.model_dialect = model_dialect
        assert ask(front, reasoning={"effort": given}).json()["reasoning"]["effort"] == given
        assert marked.opened[-1].reasoning_effort == got


def test_fields_reach_the_core_and_come_back(marked: Marked) -> None:
    front = Front(replying("ok"))
    front.service.model_dialect = ModelDialect(takes_effort=True)
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "user": "me",
        "prompt_cache_key": "k",
        "max_output_tokens": 7,
        "truncation": "disabled",
    }
    extras = {"seed": 3, "top_k": 4, "min_p": 0.1, "stop": ["x"], "priority": 2, "cache_salt": "s"}
    extras["cache_prompt"] = False
    made = ask(front, tools=[TOOL], reasoning={"effort": "low", "summary": "auto"}, **given, **extras).json()
    assert {name: made[name] for name in given} == given
    assert made["tools"] == [TOOL | {"description": None}]
    assert made["reasoning"]["effort"] == "low"
    (request,) = front.client.requests
    assert (request.params.temperature, request.params.top_p, request.params.max_tokens) == (0.5, 0.9, 7)
    assert (request.params.seed, request.params.top_k, request.params.min_p, request.params.stop) == (3, 4, 0.1, ["x"])
    assert (request.priority, request.cache_salt, request.use_prefix_cache) == (2, "s", False)
    (opened,) = marked.opened
    assert (opened.parallel_tool_calls, opened.reasoning_effort, opened.thinking) == (False, "low", None)
    assert [tool.name for tool in opened.tools] == ["add"]


@pytest.mark.parametrize(
    ("choice", "names", "mode", "name"),
    [
        (None, ["add", "sub"], "auto", None),
        ("none", ["add", "sub"], "none", None),
        ("required", ["add", "sub"], "required", None),
        ({"type": "function", "name": "sub"}, ["add", "sub"], "required", "sub"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [OTHER]}, ["sub"], "auto", None),
        ({"type": "allowed_tools", "mode": "required", "tools": [OTHER]}, ["sub"], "required", None),
    ],
)
def test_tool_choices(choice: Any, names: list[str], mode: str, name: str | None, marked: Marked) -> None:
    assert ask(Front(replying("ok")), tools=[TOOL, OTHER], tool_choice=choice).status == 200
    (opened,) = marked.opened
    assert [tool.name for tool in opened.tools] == names
    assert (opened.tool_choice.mode, opened.tool_choice.name) == (mode, name)


def test_an_answers_form_is_a_grammar() -> None:
    class Sum(BaseModel):
        total: int

    with serving('{"total": 3}') as it, client(it) as api:
        parsed = api.responses.parse(model="tiny", input="hi", text_format=Sum)
        assert parsed.output_parsed == Sum(total=3)
        with api.responses.stream(model="tiny", input="hi", text_format=Sum) as stream:
            assert stream.get_final_response().output_parsed == Sum(total=3)
        engine = it.models.language_model(None, "").client
        form = parsed.text.format
        assert form is not None
        assert form.type == "json_schema"
        assert [request.grammar for request in engine.requests] == [schema_grammar(form.schema_, "x")] * 2

    async def go() -> None:
        front = Front(replying("{}"))
        made = (await post(front, text={"format": {"type": "json_object"}})).json()
        assert made["text"]["format"] == {"type": "json_object"}
        assert front.client.requests[0].grammar == schema_grammar({"type": "object"}, "x")

    run(go)


def test_hints_are_taken() -> None:
    hints = {
        "include": ["reasoning.encrypted_content", "web_search_call.results"],
        "service_tier": "flex",
        "safety_identifier": "x",
        "prompt_cache_retention": "24h",
        "client_metadata": {"x-codex-installation-id": "x"},
        "access_programs": ["x"],
        "max_tool_calls": 3,
        "top_logprobs": 0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
    }
    options = {"include_obfuscation": False, "include_usage": True}
    answer = ask(stream=True, stream_options=options, **hints)
    assert answer.status == 200, answer.body
    assert events_of(answer.body)[-1]["response"]["usage"]["output_tokens"] > 0


IMAGE = {"type": "input_image", "image_url": "x"}
CALL = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "x"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "x", "name": "me"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "output_text", "text": ""}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "x", "name": 1, "odd": None}]}, "input[0].name"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": 1}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": "x"}, {"id": "x"}]}, "input[1].id"),
        ({"input": [{"type": "computer_call_output"}]}, "input[0].type"),
        ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments"),
        ({"input": [OUTPUT]}, "input"),
        ({"input": [CALL, OUTPUT | {"output": [IMAGE]}]}, "input[1].output[0].type"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"role": "user", "content": ""}] * 16_385}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [TOOL] * 257}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "some", "tools": []}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{}]}}, "tool_choice.tools[0].type"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"truncation": "some"}, "truncation"),
        ({"include": ["message.output_text.logits"]}, "include"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"x-guidance": {}}}}}, "text.format"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": False}}, "stream_options.include_usage"),
        ({"background": True, "store": False}, "store"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 101}, "temperature"),
        ({"stop": ""}, "stop"),
        ({"n": 2}, "n"),
        ({"input": "hello " * 500}, "prompt"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_values_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    front = Front(replying("ok"))
    answer = ask(front, **body)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert not front.client.requests


# What is kept


def test_store_false_and_a_server_that_keeps_none() -> None:
    async def go() -> None:
        front = Front(replying("ok"))
        made = (await post(front, store=False)).json()
        assert made["store"] is False
        assert (await get(front, made["id"])).error["code"] == "response_not_found"
        refused = await post(front, previous_response_id=made["id"])
        assert (refused.status, refused.error["code"]) == (404, "previous_response_not_found")
        none = Front(replying("ok"), max_stored_responses=0)
        made = (await post(none)).json()
        assert made["store"] is False
        assert (await get(none, made["id"])).status == 404
        assert (await post(none, background=True)).error["param"] == "background"

    run(go)


def test_items_of_kept_answers_can_be_referred_to() -> None:
    async def go() -> None:
        front = Front(replying("ok"), max_stored_responses=2)
        first = (await post(front)).json()
        (item,) = first["output"]
        said = [{"role": "user", "content": "hi", "type": None}, {"type": "item_reference", "id": item["id"]}]
        asked = [*said, {"role": "user", "content": "you"}]
        second = (await post(front, input=asked)).json()
        assert front.tokenizer.decode(front.client.requests[-1].prompt_ids) == "user: hi\nassistant: ok\nuser: you\na: "
        counted = await front.post("/v1/responses/input_tokens", {"input": [said[0], {"id": item["id"]}, asked[2]]})
        assert counted.json()["input_tokens"] == len(front.client.requests[-1].prompt_ids)
        # It is kept as if it had been sent.
        listed = (await get(front, second["id"], "/input_items")).json()["data"]
        assert listed[1] == item
        refused = await post(front, input=[{"id": item["id"], "text": "x"}])
        assert (refused.status, refused.error["param"]) == (400, "input[0].text")
        # No other item has such an id, whatever it looks like.
        others = [f"{item['id']}0", f"rs{item['id'][3:]}", listed[0]["id"], "", "x", first["id"]]
        for name in others:
            refused = await post(front, input=[{"type": "item_reference", "id": name}])
            assert (refused.status, refused.error["code"]) == (404, "item_not_found")
            assert (refused.error["param"], "Send the item itself" in refused.error["message"]) == ("input[0].id", True)
        # Who refers to one uses it, so others go first.
        for _ in range(3):
            assert (await post(front, input=asked)).status == 200
        await get(front, first["id"], method="DELETE")
        assert (await post(front, input=asked)).error["code"] == "item_not_found"
        assert (await post(front, store=False, input=asked)).error["code"] == "item_not_found"

    run(go)


def test_items_of_an_answer_that_is_not_whole_can_not_be_referred_to() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        made = (await post(front, background=True)).json()
        item = f"msg_{made['id'].removeprefix('resp_')}_0"
        await get(front, made["id"], "/cancel", "POST")
        refused = await post(front, input=[{"type": "item_reference", "id": item}])
        assert (refused.status, refused.error["param"]) == (400, "input")
        assert "is cancelled: nothing can follow it" in refused.error["message"]

    run(go)


def test_counting_takes_what_makes_the_prompt(marked: Marked) -> None:
    async def go() -> None:
        front = Front(replying("ok"))
        made = (await post(front)).json()
        body: dict[str, Any] = {"input": "you", "instructions": "be", "previous_response_id": made["id"]}
        counted = await front.post("/v1/responses/input_tokens", body | {"tools": [TOOL], "tool_choice": "required"})
        text = "system: be\nuser: hi\nassistant: ok\nuser: you\na: "
        assert counted.json()["input_tokens"] == len(front.tokenizer.encode(text, add_special_tokens=False))
        assert len(front.client.requests) == 1
        for more, param in (
            ({"personality": "friendly"}, "personality"),
            ({"max_output_tokens": 5}, "max_output_tokens"),
            ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
            ({"previous_response_id": "x"}, "previous_response_id"),
        ):
            assert (await front.post("/v1/responses/input_tokens", body | more)).error["param"] == param

    run(go)


def test_lists_of_input_items() -> None:
    async def go() -> None:
        front = Front(replying("ok"))
        items = [{"role": "user", "content": text} for text in "abc"]
        name = (await post(front, input=[*items, CALL])).json()["id"]

        async def page(query: str) -> Any:
            return (await front.call("GET", f"/v1/responses/{name}/input_items", query=query)).json()

        whole = await page("order=asc")
        assert [item["type"] for item in whole["data"]] == ["message"] * 3 + ["function_call"]
        assert whole["data"][0]["content"] == [{"type": "input_text", "text": "a"}]
        assert (await page(""))["data"] == whole["data"][::-1]
        first = await page("limit=3&order=asc")
        assert (first["data"], first["has_more"]) == (whole["data"][:3], True)
        rest = await page(f"after={first['last_id']}&order=asc&include[]=x")
        assert (rest["data"], rest["has_more"]) == (whole["data"][3:], False)
        for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after"), ("x=1", "x")):
            assert (await page(query))["error"]["param"] == param
        assert (await front.call("GET", f"/v1/responses/{name}", query="stream=true")).error["param"] == "stream"
        assert (await front.call("GET", f"/v1/responses/{name}", query="stream=false")).status == 200

    run(go)


def test_input_items_are_shown_as_they_are_kept_and_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threads_of(monkeypatch, (response_routes, "_page"))

    async def go() -> None:
        front = Front(replying("ok"))
        name = (await post(front)).json()["id"]
        front.responses.get(None, name).input = b'[{"id":"a","x":"\\u0061"},{"id":"b","x":1}]'
        monkeypatch.setattr(exchange, "INLINE_SIZE", 2)
        page = await front.call("GET", f"/v1/responses/{name}/input_items", query="after=b")
        assert b'"data":[{"id":"a","x":"\\u0061"}]' in page.body
        assert (page.json()["first_id"], page.json()["last_id"], page.json()["has_more"]) == ("a", "a", False)

    run(go)
    assert [each.startswith("asyncio_") for each in threads] == [True]


def test_what_is_anothers_is_not_there(tmp_path: Path) -> None:
    async def go() -> None:
        keys = write_keys(tmp_path / "keys.toml", alice={}, bob={}, carol={"rights": ["infer"]})
        front = Front(replying("ok"), api_keys=str(keys))
        alice, bob = bearer("alice"), bearer("bob")
        name = (await post(front, alice)).json()["id"]
        assert (await get(front, name, **alice)).status == 200
        for method, more in (("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel")):
            refused = await get(front, name, more, method, **bob)
            assert (refused.status, refused.error["code"]) == (404, "response_not_found")
        assert (await post(front, bob, previous_response_id=name)).status == 404
        (item,) = (await get(front, name, **alice)).json()["output"]
        said = [{"type": "item_reference", "id": item["id"]}, {"role": "user", "content": "x"}]
        assert (await post(front, bob, input=said)).error["code"] == "item_not_found"
        assert (await post(front, alice, input=said)).status == 200
        assert (await post(front, alice, previous_response_id=name)).status == 200
        # What counts against no limit of tokens takes the right that batches take.
        refused = await post(front, bearer("carol"), background=True)
        assert (refused.status, refused.error["code"]) == (403, "missing_right")
        assert (await post(front, bob, background=True)).status == 200

    run(go)


def test_a_batchs_lines_are_not_kept_and_not_put_in_the_background() -> None:
    async def go() -> None:
        front = Front(replying("ok"))
        line = AppClient(front.app, background=True)
        reply = await line.post("/v1/responses", b'{"input": "hi", "store": true}')
        made = json.loads(reply.body)
        assert (reply.status, made["store"]) == (200, False)
        assert front.client.requests[0].background
        assert (await get(front, made["id"])).status == 404
        usage = usage_of(reply.body)
        assert (usage.prompt_tokens, usage.completion_tokens) == (made["usage"]["input_tokens"], 3)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 3
        assert (await line.post("/v1/responses", b'{"input": "hi", "background": true}')).status == 400
        # Nor are those of `chairlift run`, of which nobody can ask later.
        line = AppClient(front.app)
        made = json.loads((await line.post("/v1/responses", b'{"input": "hi"}')).body)
        assert (made["store"], (await get(front, made["id"])).status) == (False, 404)
        assert (await line.post("/v1/responses", b'{"input": "hi", "background": true}')).status == 400

    run(go)


# In the background


def test_background_is_queued_runs_and_ends() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        queued = (await post(front, background=True)).json()
        assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
        (stream,) = front.client.streams
        assert stream.request.background
        word, end = front.tokenizer.encode("hello"), front.tokenizer.encode("<|end|>")
        waiting = await post(front, previous_response_id=queued["id"])
        assert "queued" in waiting.error["message"]
        stream.push(SequenceUpdate(stream.request.id, word, None, None, None, None, 0, 0.0))
        await until(front, queued["id"], "in_progress")
        stream.push(SequenceUpdate(stream.request.id, end, FinishReason.STOP, end[0], None, None, 0, 0.0))
        done = await until(front, queued["id"], "completed")
        assert done["output"][0]["content"][0]["text"] == "hello"
        Response.model_validate(done)

    run(go)


def test_background_can_be_cancelled_and_deleted() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True), max_background_responses=2)
        first, second = [(await post(front, background=True)).json()["id"] for _ in range(2)]
        refused = await post(front, background=True)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert (await get(front, first, "/cancel", "POST")).json()["status"] == "cancelled"
        assert (await get(front, first, "/cancel", "POST")).json()["status"] == "cancelled"
        assert (await get(front, second, method="DELETE")).json()["deleted"]
        assert (await get(front, second)).status == 404
        await asyncio.sleep(0.01)
        assert sorted(front.client.cancelled) == sorted([first, second])
        assert (await get(front, first)).json()["status"] == "cancelled"
        assert (await post(front, background=True)).status == 200

    run(go)


def test_background_that_fails_says_why() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        name = (await post(front, background=True)).json()["id"]
        front.client.streams[0].give_up(RequestFailed("it broke"))
        assert (await until(front, name, "failed"))["error"]["message"] == "it broke"
        front.client.refusal = full(2.0)
        assert (await post(front, background=True)).error["code"] == "queue_full"

    run(go)


def test_only_background_can_be_cancelled() -> None:
    async def go() -> None:
        front = Front(replying("ok"))
        name = (await post(front)).json()["id"]
        assert (await get(front, name, "/cancel", "POST")).status == 400

    run(go)


def test_what_can_not_be_kept_does_not_run_in_the_background() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True), max_stored_bytes=100)
        assert (await post(front, background=True)).error["code"] == "response_too_large"
        assert front.client.cancelled

    run(go)


def test_an_id_may_look_like_the_name_of_the_routes_parameter() -> None:
    async def go() -> None:
        answer = await get(Front(), "{response}")
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")

    run(go)
