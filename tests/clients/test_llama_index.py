"""LlamaIndex's OpenAILike: chats, completions, tools, outputs of a type, agents."""

import asyncio
from typing import Any, Literal

import pytest

like = pytest.importorskip("llama_index.llms.openai_like")
llms = pytest.importorskip("llama_index.core.llms")
tools = pytest.importorskip("llama_index.core.tools")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

pytestmark = [pytest.mark.clients, pytest.mark.processes]
ASK = "What is batching?"


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """How the weather is."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo"]
    days: Literal[1, 2, 3]


def weather(city: Literal["Paris", "Oslo"]) -> str:
    """Say how the weather is in a city."""
    return f"Sunny in {city}"


@pytest.fixture
def llm(v1: str) -> Any:
    return like.OpenAILike(
        model="demo",
        api_base=v1,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        max_retries=0,
        max_tokens=400,
        temperature=0,
    )


def test_an_answer_and_its_stream_are_the_same(llm: Any) -> None:
    said = [llms.ChatMessage(role="system", content="Be short."), llms.ChatMessage(role="user", content=ASK)]
    made = llm.chat(said)
    *_, last = llm.stream_chat(said)
    assert last.message.content == made.message.content
    assert llm.complete(ASK).text


def test_a_completion(v1: str) -> None:
    llm = like.OpenAILike(model="demo", api_base=v1, api_key="none", is_chat_model=False, max_tokens=9, temperature=0)
    *_, last = llm.stream_complete(ASK)
    assert last.text == llm.complete(ASK).text


def test_an_output_of_a_type(llm: Any) -> None:
    said = [llms.ChatMessage(role="user", content=ASK)]
    assert isinstance(llm.as_structured_llm(Weather).chat(said).raw, Weather)
    llm.should_use_structured_outputs = False
    assert isinstance(llm.structured_predict(Weather, _prompt()), Weather)


def _prompt() -> Any:
    from llama_index.core import PromptTemplate

    return PromptTemplate(ASK)


def test_tools_in_two_turns(llm: Any) -> None:
    tool = tools.FunctionTool.from_defaults(weather)
    asked: Any = {"user_msg": ASK, "tool_required": True, "allow_parallel_tool_calls": False}
    made = llm.chat_with_tools([tool], **asked)
    [call] = llm.get_tool_calls_from_response(made)
    assert call.tool_kwargs["city"] in ("Paris", "Oslo")
    *_, last = llm.stream_chat_with_tools([tool], **asked)
    [streamed] = llm.get_tool_calls_from_response(last)
    assert streamed.tool_kwargs == call.tool_kwargs
    result = llms.ChatMessage(role="tool", content="Sunny", additional_kwargs={"tool_call_id": call.tool_id})
    more = llm.chat([llms.ChatMessage(role="user", content=ASK), made.message, result])
    assert more.message.role == "assistant"


def test_without_blocking(llm: Any) -> None:
    async def go() -> None:
        said = [llms.ChatMessage(role="user", content=ASK)]
        made = await asyncio.gather(*(llm.achat(said) for _ in range(3)))
        last = [piece async for piece in await llm.astream_chat(said)][-1]
        assert [each.message.content for each in made] == [last.message.content] * 3

    asyncio.run(go())


def test_errors_are_those_of_the_client(llm: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        llm.complete("a " * 5000)


def test_an_agent(llm: Any) -> None:
    workflow = pytest.importorskip("llama_index.core.agent.workflow")
    cities = []

    def weather(city: Literal["Paris", "Oslo"]) -> str:
        """Say how the weather is in a city."""
        cities.append(city)
        return "Sunny"

    async def go() -> Any:
        agent = workflow.FunctionAgent(
            tools=[weather], llm=llm, initial_tool_choice="weather", allow_parallel_tool_calls=False
        )
        return await agent.run(ASK)

    assert asyncio.run(go()).response.role == "assistant"
    assert len(cities) == 1
