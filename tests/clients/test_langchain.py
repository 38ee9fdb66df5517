"""LangChain's ChatOpenAI: answers of a form, tools, agents, streams, and the responses API."""

import asyncio
import json
import urllib.request
from typing import Any, Literal

import pytest

langchain_openai = pytest.importorskip("langchain_openai")
agents = pytest.importorskip("langchain.agents")
messages = pytest.importorskip("langchain_core.messages")
tools = pytest.importorskip("langchain_core.tools")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

pytestmark = [pytest.mark.clients, pytest.mark.processes]
ASK = "What is batching?"


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """How the weather is."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo"]
    days: Literal[1, 2, 3]


@tools.tool  # type: ignore[untyped-decorator]
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """Say how the weather is in a city."""
    return f"Sunny in {city}"


def chat_of(v1: str, responses: bool, **more: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        model="demo",
        base_url=v1,
        api_key="none",
        max_retries=0,
        max_tokens=400,
        temperature=0,
        stream_usage=True,
        use_responses_api=responses,
        **more,
    )


@pytest.fixture(params=[False, True], ids=["chats", "responses"])
def chat(v1: str, request: pytest.FixtureRequest) -> Any:
    return chat_of(v1, request.param)


def test_an_answer_and_its_stream_are_the_same(chat: Any) -> None:
    answer = chat.invoke(ASK)
    pieces = list(chat.stream(ASK))
    assert "".join(piece.text for piece in pieces) == answer.text
    assert answer.usage_metadata["output_tokens"] > 0
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]
    assert [each.text for each in chat.batch([ASK, ASK])] == [answer.text] * 2


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_answers_of_a_form(chat: Any, method: str) -> None:
    form = chat.with_structured_output(Weather, method=method, strict=True)
    assert isinstance(form.invoke(ASK), Weather)
    assert isinstance(list(form.stream(ASK))[-1], Weather)
    raw = chat.with_structured_output(Weather, method=method, strict=True, include_raw=True).invoke(ASK)
    assert isinstance(raw["parsed"], Weather)


def test_answers_in_json(url: str, v1: str) -> None:
    # Whatever it would say, let the object begin and end at once.
    bias = {}
    for brace in "{}":
        text = json.dumps({"prompt": brace, "add_special_tokens": False}).encode()
        asked = urllib.request.Request(f"{url}/tokenize", text, {"Content-Type": "application/json"})
        [token] = json.load(urllib.request.urlopen(asked))["tokens"]
        bias[token] = 100
    chat = chat_of(v1, False, logit_bias=bias)
    assert chat.with_structured_output(None, method="json_mode").invoke(ASK) == {}


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_tools_in_two_turns(chat: Any, choice: str) -> None:
    bound = chat.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
    answer = bound.invoke(ASK)
    [call] = answer.tool_calls
    assert call["name"] == "weather"
    pieces = list(bound.stream(ASK))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert [each["args"] for each in whole.tool_calls] == [call["args"]]
    turns = [messages.HumanMessage(ASK), answer, weather.invoke(call)]
    assert isinstance(chat.bind_tools([weather]).invoke(turns), messages.AIMessage)


def test_an_agent(chat: Any) -> None:
    middleware = pytest.importorskip("langchain.agents.middleware")

    @middleware.wrap_model_call  # type: ignore[untyped-decorator]
    def pick(request: Any, handler: Any) -> Any:
        """Make the first turn a call, and no other."""
        called = any(isinstance(message, messages.ToolMessage) for message in request.messages)
        settings = {"parallel_tool_calls": False}
        return handler(request.override(tool_choice="none" if called else "required", model_settings=settings))

    agent = agents.create_agent(chat, [weather], middleware=[pick], system_prompt="Be short.")
    state = agent.invoke({"messages": [messages.HumanMessage(ASK)]})
    assert [message.type for message in state["messages"]] == ["human", "ai", "tool", "ai"]
    assert state["messages"][2].content.startswith("Sunny in ")


@pytest.mark.parametrize("strategy", ["ToolStrategy", "ProviderStrategy"])
def test_an_agent_with_an_answer_of_a_form(chat: Any, strategy: str) -> None:
    forms = pytest.importorskip("langchain.agents.structured_output")
    agent = agents.create_agent(chat, [], response_format=getattr(forms, strategy)(Weather))
    assert isinstance(agent.invoke({"messages": [messages.HumanMessage(ASK)]})["structured_response"], Weather)


def test_without_blocking(v1: str) -> None:
    async def go() -> None:
        for responses in (False, True):
            await same(chat_of(v1, responses))

    async def same(chat: Any) -> None:
        answers = await asyncio.gather(*(chat.ainvoke(ASK) for _ in range(3)))
        text = "".join([piece.text async for piece in chat.astream(ASK)])
        assert [each.text for each in answers] == [text] * 3

    asyncio.run(go())


def test_errors_are_those_of_the_client(chat: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        chat.invoke("a " * 5000)
    with pytest.raises(openai.BadRequestError):
        list(chat.stream("a " * 5000))
