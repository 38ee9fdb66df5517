"""Whatever a model says: its events, put together as clients do, are the answer that comes without a stream."""

import asyncio
import json
import re
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.reply_reader import Marked, events_of
from support.server_harness import FakeClient, Front, tokenizer

from chairlift.server.anthropic.message_body import CountBody, MessageBody
from chairlift.server.openai.body_types import ChatBody, CompletionBody
from chairlift.server.openai.token_routes import DetokenizeBody, TokenizeBody
from chairlift.server.responses.response_body import InputBody, ResponseBody

WORDS = tokenizer()
TEXT = st.text(st.characters(blacklist_characters="~@|", blacklist_categories=["Cs"]), max_size=12)
NAME = st.text("abc_", min_size=1, max_size=4)
SAID = st.one_of(
    TEXT,
    TEXT.map(lambda text: f"~{text}~"),
    NAME.map(lambda name: f"@{name}|@"),
    st.builds(lambda name, x: f"@{name}|{json.dumps({'x': x})}@", NAME, st.integers(0, 9)),
)
REPLIES = st.lists(SAID, max_size=5).map("".join)
LENGTHS = st.integers(1, 150)
# Ids are new with each request.
IDS = re.compile(r"\b(resp|msg|fc|call|rs|toolu)_[0-9a-f]{24}(_\d+)?\b")
MESSAGE_EVENT: Any = TypeAdapter(RawMessageStreamEvent)
RESPONSE_EVENT: Any = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(autouse=True)
def _marked(monkeypatch: pytest.MonkeyPatch) -> Marked:
    return Marked(monkeypatch)


def both(path: str, text: str, body: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """The answer to a request without a stream, and the events of one with it."""

    async def go() -> tuple[Any, list[dict[str, Any]]]:
        ids = [*WORDS.encode(text, parse_special=False), *WORDS.encode("<|end|>")]
        whole, streamed = [await Front(FakeClient(ids)).post(path, body | {"stream": value}) for value in (False, True)]
        assert (whole.status, streamed.status) == (200, 200)
        return whole.json(), events_of(streamed.body)

    return asyncio.run(go())


def alike(value: Any) -> Any:
    """Without ids and times, and what may be there as null or not at all."""
    if isinstance(value, dict):
        times = {"created_at", "completed_at"}
        return {name: alike(each) for name, each in value.items() if each is not None and name not in times}
    if isinstance(value, list):
        return [alike(each) for each in value]
    return IDS.sub("ID", value) if isinstance(value, str) else value


@given(text=REPLIES, most=LENGTHS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_messages(text: str, most: int) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": most}
    whole, events = both("/v1/messages", text, body)
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        if event["type"] != "ping":
            parsed = MESSAGE_EVENT.validate_python(event)
            snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    made = alike(snapshot.to_dict())
    if whole["stop_reason"] == "max_tokens":
        # A call that was cut off has no input as a whole; in a stream there is what came of it.
        for block in (whole["content"][-1], made["content"][-1]):
            block.pop("input", None)
    assert made == alike(whole)


@given(text=REPLIES, most=LENGTHS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_responses(text: str, most: int) -> None:
    whole, events = both("/v1/responses", text, {"input": "hi", "max_output_tokens": most})
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    items: dict[int, Any] = {}
    for event in events:
        state.handle_event(RESPONSE_EVENT.validate_python(event))
        put_together(items, event)
    last = events[-1]["response"]
    Response.model_validate(last)
    assert alike(last) == alike(whole)
    # The deltas alone say the same, and so does the last event of each item.
    made = [{**items[index], "status": last["output"][index]["status"]} for index in sorted(items)]
    assert made == last["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == last["output"]


def put_together(items: dict[int, Any], event: dict[str, Any]) -> None:
    """Items by the events that add to them alone."""
    match event["type"]:
        case "response.output_item.added":
            items[event["output_index"]] = event["item"]
        case "response.content_part.added":
            items[event["output_index"]]["content"].append(event["part"])
        case "response.output_text.delta" | "response.reasoning_text.delta":
            items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
        case "response.function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]


# Bodies of all kinds

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=6))
STRANGE = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
KINDS = st.sampled_from(
    [
        *("text", "input_text", "output_text", "refusal", "thinking", "tool_use", "tool_result", "image", "message"),
        *("function_call", "function_call_output", "reasoning", "item_reference", "function", "custom", "web_search"),
        *("auto", "any", "tool", "none", "allowed_tools", "enabled", "disabled", "json_schema", "summary_text"),
    ]
)
FIELDS = st.sampled_from(
    [
        *("text", "content", "role", "id", "call_id", "name", "arguments", "output", "input", "summary", "thinking"),
        *("tool_use_id", "signature", "parameters", "input_schema", "mode", "tools", "budget_tokens", "format"),
    ]
)
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool"])


def part(inner: Any) -> Any:
    """Something like a block, an item or a tool."""
    known = st.fixed_dictionaries({"type": KINDS}, optional={"role": ROLES, "text": st.text(max_size=5)})
    more = st.dictionaries(FIELDS, inner, max_size=4)
    return st.builds(lambda first, second: second | first, known, more)


VALUES = st.recursive(
    st.one_of(SCALARS, KINDS, ROLES), lambda inner: st.one_of(st.lists(inner, max_size=3), part(inner)), max_leaves=10
)
ROUTES = (
    ("/v1/chat/completions", ChatBody, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ("/v1/completions", CompletionBody, {"prompt": "hi", "max_tokens": 2}),
    ("/v1/responses", ResponseBody, {"input": "hi", "max_output_tokens": 2}),
    ("/v1/responses/input_tokens", InputBody, {"input": "hi"}),
    ("/v1/messages", MessageBody, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ("/v1/messages/count_tokens", CountBody, {"messages": [{"role": "user", "content": "hi"}]}),
    ("/tokenize", TokenizeBody, {"prompt": "hi"}),
    ("/detokenize", DetokenizeBody, {"tokens": [1]}),
)


@pytest.mark.parametrize(("path", "kind", "body"), ROUTES, ids=lambda value: value if isinstance(value, str) else "")
@given(data=st.data())
@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_gives_a_500(path: str, kind: Any, body: dict[str, Any], data: st.DataObject) -> None:
    names = st.sampled_from([*kind.__struct_fields__, *body])
    changed = body | data.draw(st.dictionaries(names, VALUES | STRANGE, max_size=4))

    async def go() -> None:
        front = Front(FakeClient([*WORDS.encode("ok"), *WORDS.encode("<|end|>")]))
        answer = await front.post(path, json.dumps(changed).encode("utf-8", "surrogatepass"))
        assert answer.status in (200, 400, 404, 413), (changed, answer.body)

    asyncio.run(go())
