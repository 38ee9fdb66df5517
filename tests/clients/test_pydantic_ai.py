"""Pydantic AI: agents with tools and typed outputs, over chats, responses and messages."""

import asyncio
from typing import Any, Literal

import pytest

anthropic = pytest.importorskip("anthropic")
pydantic = pytest.importorskip("pydantic")
pydantic_ai = pytest.importorskip("pydantic_ai")
openai_models = pytest.importorskip("pydantic_ai.models.openai")
anthropic_models = pytest.importorskip("pydantic_ai.models.anthropic")
openai_provider = pytest.importorskip("pydantic_ai.providers.openai")
anthropic_provider = pytest.importorskip("pydantic_ai.providers.anthropic")

pytestmark = [pytest.mark.clients, pytest.mark.processes]
# Of Anthropic's models it knows by name which ones follow a schema.
PROFILE: Any = {"supports_json_schema_output": True}
ASK = "What is batching?"


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """How the weather is."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo"]
    days: Literal[1, 2, 3]


@pytest.fixture(params=["chat", "responses", "messages"])
def model(url: str, v1: str, request: pytest.FixtureRequest) -> Any:
    settings: Any = {"max_tokens": 600, "temperature": 0, "parallel_tool_calls": False}
    if request.param == "messages":
        if not anthropic.__version__.startswith("0."):
            pytest.skip("pydantic-ai does not know how to call this version of anthropic")
        client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        provider = anthropic_provider.AnthropicProvider(anthropic_client=client)
        return anthropic_models.AnthropicModel("demo", provider=provider, settings=settings, profile=PROFILE)
    provider = openai_provider.OpenAIProvider(base_url=v1, api_key="none")
    kind = openai_models.OpenAIChatModel if request.param == "chat" else openai_models.OpenAIResponsesModel
    return kind("demo", provider=provider, settings=settings)


def test_an_answer_and_its_stream_are_the_same(model: Any) -> None:
    async def go() -> None:
        agent = pydantic_ai.Agent(model, instructions="Be short.")
        made = await agent.run(ASK)
        assert made.usage.output_tokens > 0
        async with agent.run_stream(ASK) as stream:
            text = "".join([piece async for piece in stream.stream_text(delta=True)])
        assert made.output == text
        more = await agent.run("More", message_history=made.all_messages())
        assert isinstance(more.output, str)

    asyncio.run(go())


@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
def test_a_typed_output(model: Any, output: str) -> None:
    async def go() -> None:
        agent = pydantic_ai.Agent(model, output_type=getattr(pydantic_ai, output)(Weather))
        assert isinstance((await agent.run(ASK)).output, Weather)
        async with agent.run_stream(ASK) as stream:
            assert isinstance(await stream.get_output(), Weather)

    asyncio.run(go())


def test_an_agent_with_a_tool(model: Any) -> None:
    async def go() -> None:
        cities = []
        agent = pydantic_ai.Agent(model, model_settings=lambda _: {"tool_choice": "none" if cities else "required"})

        @agent.tool_plain
        def weather(city: Literal["Paris", "Oslo"]) -> str:
            """Say how the weather is in a city."""
            cities.append(city)
            return "Sunny"

        made = await agent.run(ASK)
        assert isinstance(made.output, str)
        assert len(cities) == 1

    asyncio.run(go())


def test_errors_are_those_of_the_client(model: Any) -> None:
    async def go() -> None:
        agent = pydantic_ai.Agent(model)
        with pytest.raises(pydantic_ai.ModelHTTPError) as error:
            await agent.run("a " * 5000)
        assert error.value.status_code == 400

    asyncio.run(go())
