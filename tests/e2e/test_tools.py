"""Tools through the `openai` client, a real server and the demo model, which knows nothing of them: all calls that it
makes are made by the grammar."""

import json
import shutil
from collections.abc import Iterator

import jsonschema
import pytest
from support.dialect_samples import TOOLS, template
from support.serve_process import Server

from chairlift.demo import demo_path

pytestmark = pytest.mark.processes
SENT = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model with a chat template that has tools."""
    folder = tmp_path_factory.mktemp("tools") / "demo"
    shutil.copytree(demo_path(), folder)
    (folder / "chat_template.jinja").write_text(template("hermes"))
    with Server(str(folder), "--kv-cache-gb", "0.05", "--num-threads", "1") as running:
        running.wait_ready(120)
        yield running


@pytest.mark.parametrize("choice", ["required", "now", "get_weather"])
def test_calls_are_valid_streamed_or_not(server: Server, choice: str) -> None:
    named = {"type": "function", "function": {"name": choice}}
    asked = {
        "model": "demo",
        "messages": MESSAGES,
        "tools": SENT,
        "tool_choice": choice if choice == "required" else named,
        "parallel_tool_calls": False,
        "seed": 3,
        "max_tokens": 400,
        "reasoning_effort": "none",
    }
    whole = server.openai.chat.completions.create(**asked).choices[0]  # type: ignore[call-overload]
    pieces = list(server.openai.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    function = whole.message.tool_calls[0].function
    if choice != "required":
        assert function.name == choice
    if whole.finish_reason == "tool_calls":
        assert whole.message.content is None
        jsonschema.validate(json.loads(function.arguments), TOOLS[function.name])
    deltas = [each.choices[0].delta.tool_calls[0].function for each in pieces if each.choices[0].delta.tool_calls]
    assert deltas[0].name == function.name
    assert "".join(delta.arguments for delta in deltas) == function.arguments
    assert pieces[-1].choices[0].finish_reason == whole.finish_reason


def test_a_call_without_arguments_comes_to_its_end(server: Server) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    answer = server.openai.chat.completions.create(  # type: ignore[call-overload]
        model="demo", messages=MESSAGES, tools=SENT, tool_choice=named, max_tokens=400, reasoning_effort="none"
    )
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})
    assert answer.choices[0].finish_reason == "tool_calls"
    follow_up = [
        *MESSAGES,
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "noon"},
    ]
    assert server.openai.chat.completions.create(model="demo", messages=follow_up, tools=SENT, max_tokens=3).choices  # type: ignore[call-overload]


def test_a_schema_that_no_grammar_can_hold_is_refused(server: Server) -> None:
    body = {"model": "demo", "messages": MESSAGES, "tool_choice": "required"}
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    answer = server.http.post("/v1/chat/completions", json=body | {"tools": [tool("f", schema)]})
    assert answer.status_code == 400
    assert "uniqueItems" in answer.json()["error"]["message"]


def tool(name: str, schema: object) -> object:
    return {"type": "function", "function": {"name": name, "parameters": schema}}
