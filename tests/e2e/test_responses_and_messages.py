"""A real server, asked by OpenAI's client for responses and by Anthropic's for messages."""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict
from support.dialect_samples import TOOLS, template
from support.serve_process import Server
from support.stub_runner import without_torch

from chairlift.demo import demo_path

ASK = "What is batching?"


@pytest.fixture
def claude(demo_server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo_server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_responses_go_on_from_each_other(demo_server: Server) -> None:
    api = demo_server.openai.responses
    first = api.create(model="demo", input=ASK, temperature=0, max_output_tokens=20)
    assert first.output_text
    assert first.status in ("completed", "incomplete")
    with api.stream(model="demo", input=ASK, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        whole = stream.get_final_response()
    assert whole.output_text == text
    assert text.startswith(first.output_text)
    more = api.create(model="demo", input="More!", previous_response_id=whole.id, max_output_tokens=5)
    tokens = demo_server.http.post("/tokenize", json={"messages": [{"role": "user", "content": ASK}]}).json()["count"]
    assert whole.usage is not None
    assert more.usage is not None
    assert whole.usage.input_tokens == tokens
    # All of it was computed for the first answer, but for the last block.
    assert more.usage.input_tokens > whole.usage.total_tokens
    assert more.usage.input_tokens_details.cached_tokens >= whole.usage.input_tokens // 16 * 16
    api.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        api.retrieve(first.id)


def test_a_response_in_the_background(demo_server: Server) -> None:
    api = demo_server.openai.responses
    live = api.create(model="demo", input=ASK, temperature=0, max_output_tokens=30)
    made = api.create(model="demo", input=ASK, temperature=0, max_output_tokens=30, background=True)
    assert made.status == "queued"
    deadline = time.monotonic() + 60
    while made.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
        made = api.retrieve(made.id)
    assert (made.status, made.output_text) == (live.status, live.output_text)
    long = api.create(model="demo", input=ASK, background=True, extra_body={"ignore_eos": True})
    # It may have come to its length by then.
    ended = api.cancel(long.id).status
    assert ended in ("cancelled", "incomplete")
    while demo_server.metric("requests_running") or demo_server.metric("requests_waiting"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert api.retrieve(long.id).status == ended


def test_messages(demo_server: Server, claude: anthropic.Anthropic) -> None:
    turns = [{"role": "user", "content": ASK}]
    made = claude.messages.create(model="demo", max_tokens=30, messages=turns, extra_body={"temperature": 0})
    chat = demo_server.openai.chat.completions.create(model="demo", messages=turns, temperature=0, max_tokens=30)
    (block,) = made.content
    assert block.type == "text"
    assert block.text == chat.choices[0].message.content
    assert made.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[chat.choices[0].finish_reason]
    count = claude.messages.count_tokens(model="demo", messages=turns).input_tokens
    assert made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0) == count
    with claude.messages.stream(
        model="demo", max_tokens=30, messages=turns, stop_sequences=["zzz"], extra_body={"temperature": 0}
    ) as stream:
        assert stream.get_final_text() == block.text


def test_clients_that_do_not_block(demo_server: Server) -> None:
    async def go() -> None:
        async with (
            anthropic.AsyncAnthropic(base_url=demo_server.url, api_key="none", max_retries=0) as claude,
            openai.AsyncOpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0) as api,
        ):
            turns = [{"role": "user", "content": ASK}]
            answers = await asyncio.gather(
                *(claude.messages.create(model="demo", max_tokens=9, messages=turns) for _ in range(4)),
                *(api.responses.create(model="demo", input=ASK, max_output_tokens=9) for _ in range(4)),
            )
            assert all(answer.id.startswith(("msg_", "resp_")) for answer in answers)

    asyncio.run(go())


def test_answers_follow_a_schema(demo_server: Server, claude: anthropic.Anthropic) -> None:
    class Sum(BaseModel):
        model_config = ConfigDict(extra="forbid")
        total: bool

    parsed = demo_server.openai.responses.parse(model="demo", input=ASK, text_format=Sum, max_output_tokens=40)
    assert isinstance(parsed.output_parsed, Sum)
    form: Any = {"type": "json_schema", "schema": Sum.model_json_schema()}
    turns: Any = [{"role": "user", "content": ASK}]
    made = claude.messages.create(model="demo", max_tokens=40, messages=turns, output_config={"format": form})
    (block,) = made.content
    assert block.type == "text"
    Sum.model_validate_json(block.text)
    # What the compiler can't enforce is the client's error, whether it streams or not.
    wrong: Any = {"type": "json_schema", "name": "x", "schema": {"type": "string", "not": {"const": "a"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="not"):
            demo_server.openai.responses.create(model="demo", input=ASK, text={"format": wrong}, stream=stream)
    made_later = demo_server.openai.responses.create(model="demo", input=ASK, text={"format": wrong}, background=True)
    deadline = time.monotonic() + 60
    while made_later.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
        made_later = demo_server.openai.responses.retrieve(made_later.id)
    assert made_later.error is not None
    assert (made_later.status, made_later.error.code) == ("failed", "invalid_prompt")


@pytest.mark.processes
def test_a_server_that_leaves_cancels_what_is_in_the_background() -> None:
    with Server("--drain-timeout-s", "600", "--heartbeat-timeout-s", "100", environ=without_torch()) as server:
        server.wait_ready()
        long: Any = {"n": 4, "max_tokens": 400, "ignore_eos": True}
        live = server.openai.completions.create(model="demo", prompt="a", stream=True, extra_body=long)
        next(live)
        worker = server.worker()
        os.kill(worker, signal.SIGSTOP)
        try:
            made = server.openai.responses.create(model="demo", input=ASK, background=True)
            server.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 60
            while server.openai.responses.retrieve(made.id).status != "cancelled":
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            os.kill(worker, signal.SIGCONT)
        assert "".join(chunk.choices[0].text for chunk in live)
        assert server.process.wait(60) == 0


@pytest.fixture(scope="module")
def tools_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model with a chat template that has tools. What it calls is the grammar's doing."""
    folder = tmp_path_factory.mktemp("tools") / "demo"
    shutil.copytree(demo_path(), folder)
    (folder / "chat_template.jinja").write_text(template("hermes"))
    with Server(str(folder), "--kv-cache-gb", "0.05", "--num-threads", "1") as server:
        server.wait_ready(120)
        yield server


@pytest.mark.processes
def test_calls_by_either_protocol_and_what_came_of_them(tools_server: Server) -> None:
    api = tools_server.openai.responses
    tool: Any = {"type": "function", "name": "now", "parameters": TOOLS["now"], "strict": True}
    common: Any = {"model": "demo", "tools": [tool], "reasoning": {"effort": "none"}, "max_output_tokens": 100}
    with api.stream(input=ASK, tool_choice="required", parallel_tool_calls=False, **common) as stream:
        made = stream.get_final_response()
    call = made.output[-1]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("now", {})
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "noon"}]
    after = api.create(input=output, previous_response_id=made.id, tool_choice="none", **common)
    assert after.output_text
    with anthropic.Anthropic(base_url=tools_server.url, api_key="none", max_retries=0, timeout=60) as claude:
        turns: list[Any] = [{"role": "user", "content": ASK}]
        given: Any = {"model": "demo", "max_tokens": 100, "tools": [{"name": "now", "input_schema": TOOLS["now"]}]}
        choice: Any = {"type": "tool", "name": "now"}
        whole = claude.messages.create(messages=turns, tool_choice=choice, thinking={"type": "disabled"}, **given)
        with claude.messages.stream(
            messages=turns, tool_choice=choice, thinking={"type": "disabled"}, **given
        ) as streamed:
            for message in (whole, streamed.get_final_message()):
                use = message.content[-1]
                assert use.type == "tool_use"
                assert (use.name, use.input, message.stop_reason) == ("now", {}, "tool_use")
        result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "noon"}
        turns += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        assert claude.messages.create(messages=turns, **given).content
        assert claude.messages.count_tokens(model="demo", messages=turns, tools=given["tools"]).input_tokens > 50
