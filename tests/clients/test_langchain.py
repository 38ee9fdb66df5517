"""LangChain's ChatOpenAI: answers of a form, tools, agents, streams, and the responses API."""

import asyncio
from typing import Any, Literal

import pytest

langchain_openai = pytest.importorskip("langchain_openai")
langgraph = pytest.importorskip("langgraph.prebuilt")
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


class Place(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """Where."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo"]


@tools.tool(args_schema=Place)  # type: ignore[untyped-decorator]
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """Say how the weather is in a city."""
    return f"Sunny in {city}"


@pytest.fixture(params=[False, True], ids=["chats", "responses"])
def chat(v1: str, request: pytest.FixtureRequest) -> Any:
    return langchain_openai.ChatOpenAI(
        model="demo",
        base_url=v1,
        api_key="none",
        max_retries=0,
        max_tokens=400,
        temperature=0,
        stream_usage=True,
        use_responses_api=request.param,
    )


def test_an_answer_and_its_stream_are_the_same(chat: Any) -> None:
    made = chat.invoke(ASK)
    pieces = list(chat.stream(ASK))
    assert "".join(piece.text for piece in pieces) == made.text
    assert made.usage_metadata["output_tokens"] > 0
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.usage_metadata == made.usage_metadata or whole.usage_metadata["output_tokens"] > 0
    assert [each.text for each in chat.batch([ASK, ASK])] == [made.text] * 2


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_answers_of_a_form(chat: Any, method: str) -> None:
    form = {"strict": True} if method != "json_mode" else {}
    if method == "json_mode":
        answer = chat.with_structured_output(None, method=method).invoke(ASK)
        assert answer is None or isinstance(answer, dict)
        return
    answer = chat.with_structured_output(Weather, method=method, **form).invoke(ASK)
    assert isinstance(answer, Weather)
    raw = chat.with_structured_output(Weather, method=method, include_raw=True).invoke(ASK)
    assert isinstance(raw["parsed"], Weather)
    last = list(chat.with_structured_output(Weather, method=method).stream(ASK))[-1]
    assert isinstance(last, Weather)


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_tools_in_two_turns(chat: Any, choice: str) -> None:
    bound = chat.bind_tools([weather], tool_choice=choice, strict=True, parallel_tool_calls=False)
    made = bound.invoke(ASK)
    [call] = made.tool_calls
    assert call["name"] == "weather"
    pieces = list(bound.stream(ASK))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert [each["args"] for each in whole.tool_calls] == [call["args"]]
    turns = [messages.HumanMessage(ASK), made, weather.invoke(call)]
    assert isinstance(chat.bind_tools([weather]).invoke(turns), messages.AIMessage)


def test_an_agent(chat: Any) -> None:
    def pick(state: Any, _: Any) -> Any:
        """Make the first turn a call."""
        called = any(isinstance(message, messages.ToolMessage) for message in state["messages"])
        choice = "none" if called else "required"
        return chat.bind_tools([weather], tool_choice=choice, strict=True, parallel_tool_calls=False)

    agent = langgraph.create_react_agent(pick, [weather])
    state = agent.invoke({"messages": [messages.HumanMessage(ASK)]})
    kinds = [message.type for message in state["messages"]]
    assert kinds == ["human", "ai", "tool", "ai"]
    assert state["messages"][2].content.startswith("Sunny in ")


def test_without_blocking(v1: str) -> None:
    async def go() -> None:
        for responses in (False, True):
            await same(langchain_openai.ChatOpenAI(model="demo", base_url=v1, api_key="none", max_retries=0, max_tokens=9, temperature=0, use_responses_api=responses))

    async def same(chat: Any) -> None:
        made = await asyncio.gather(*(chat.ainvoke(ASK) for _ in range(3)))
        text = "".join([piece.text async for piece in chat.astream(ASK)])
        assert [each.text for each in made] == [text] * 3

    asyncio.run(go())


def test_errors_are_those_of_the_client(chat: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        chat.invoke("a " * 5000)
    with pytest.raises(openai.BadRequestError):
        list(chat.stream("a " * 5000))
