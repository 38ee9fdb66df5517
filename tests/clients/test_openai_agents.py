"""OpenAI's Agents SDK: a run with a tool, an output of a type, handing over, and streams, over chats and responses."""

import asyncio
from typing import Any, Literal

import pytest

agents = pytest.importorskip("agents")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

pytestmark = [pytest.mark.clients, pytest.mark.processes]
ASK = "What is batching?"


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """How the weather is."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo"]
    days: Literal[1, 2, 3]


@agents.function_tool  # type: ignore[untyped-decorator]
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """Say how the weather is in a city."""
    return f"Sunny in {city}"


@pytest.fixture(params=["chats", "responses"])
def model(v1: str, request: pytest.FixtureRequest) -> Any:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=v1, api_key="none", max_retries=0)
    kind = agents.OpenAIChatCompletionsModel if request.param == "chats" else agents.OpenAIResponsesModel
    return kind(model="demo", openai_client=client)


def settings(**more: Any) -> Any:
    return agents.ModelSettings(max_tokens=400, temperature=0, **more)


def test_a_run_with_a_tool(model: Any) -> None:
    agent = agents.Agent(
        name="A",
        instructions="Be short.",
        model=model,
        tools=[weather],
        model_settings=settings(tool_choice="required", parallel_tool_calls=False),
    )
    # The choice is reset after the first call, so that the run ends.
    made = asyncio.run(agents.Runner.run(agent, ASK, max_turns=4))
    kinds = [item.type for item in made.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    assert isinstance(made.final_output, str)


def test_a_streamed_run_with_a_tool(model: Any) -> None:
    async def go() -> None:
        agent = agents.Agent(
            name="A",
            model=model,
            tools=[weather],
            model_settings=settings(tool_choice="required", parallel_tool_calls=False),
        )
        made = agents.Runner.run_streamed(agent, ASK, max_turns=4)
        events = [event async for event in made.stream_events()]
        assert isinstance(made.final_output, str)
        assert any(event.type == "raw_response_event" for event in events)
        assert "tool_call_output_item" in [item.type for item in made.new_items]

    asyncio.run(go())


def test_an_output_of_a_type(model: Any) -> None:
    agent = agents.Agent(name="A", model=model, output_type=Weather, model_settings=settings())
    made = asyncio.run(agents.Runner.run(agent, ASK))
    assert isinstance(made.final_output, Weather)


def test_handing_over(model: Any) -> None:
    second = agents.Agent(name="Second", model=model, model_settings=settings())
    first = agents.Agent(name="First", model=model, handoffs=[second], model_settings=settings(tool_choice="required"))
    made = asyncio.run(agents.Runner.run(first, ASK, max_turns=4))
    assert made.last_agent.name == "Second"


def test_errors_are_those_of_the_client(model: Any) -> None:
    agent = agents.Agent(name="A", model=model)
    with pytest.raises(openai.BadRequestError):
        asyncio.run(agents.Runner.run(agent, "a " * 5000))
