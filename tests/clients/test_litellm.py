"""LiteLLM, which speaks to the server as to one of OpenAI's, of vLLM's, and of Anthropic's."""

import asyncio
import json
from typing import Any, Literal

import pytest

litellm = pytest.importorskip("litellm")
pydantic = pytest.importorskip("pydantic")

pytestmark = [pytest.mark.clients, pytest.mark.processes]
ASK: Any = [{"role": "user", "content": "What is batching?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How the weather is.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["city"],
        },
    },
}


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """How the weather is."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo"]
    days: Literal[1, 2, 3]


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def asked(url: str, v1: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    base = url if request.param == "anthropic" else v1
    return {
        "model": f"{request.param}/demo",
        "api_base": base,
        "api_key": "none",
        "messages": ASK,
        "max_tokens": 400,
        "temperature": 0,
        "num_retries": 0,
    }


def test_a_chat_and_its_stream_are_the_same(asked: dict[str, Any]) -> None:
    made = litellm.completion(**asked)
    pieces = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(pieces, messages=ASK)
    assert whole.choices[0].message.content == made.choices[0].message.content
    assert whole.choices[0].finish_reason == made.choices[0].finish_reason
    assert whole.usage.completion_tokens == made.usage.completion_tokens


def test_an_answer_of_a_form(asked: dict[str, Any]) -> None:
    made = litellm.completion(**asked, response_format=Weather)
    Weather.model_validate_json(made.choices[0].message.content)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tools_in_two_turns(asked: dict[str, Any], choice: Any) -> None:
    asked |= {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    made = litellm.completion(**asked).choices[0]
    [call] = made.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")
    assert made.finish_reason in ("tool_calls", "stop")
    whole = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    [streamed] = whole.choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)
    turns = [*ASK, made.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}]
    more = litellm.completion(**asked | {"messages": turns, "tool_choice": "auto", "max_tokens": 5})
    assert more.choices[0].finish_reason


def test_reasoning(asked: dict[str, Any]) -> None:
    if asked["model"].startswith("anthropic/"):
        asked |= {"thinking": {"type": "adaptive"}, "allowed_openai_params": ["thinking"]}
        asked["messages"] = [{"role": "system", "content": "Think first."}, *ASK]
        del asked["temperature"]
    else:
        asked["extra_body"] = {"enable_thinking": True}
    asked["max_tokens"] = 20
    assert litellm.completion(**asked).choices[0].message.reasoning_content
    whole = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    assert whole.choices[0].message.reasoning_content


def test_without_blocking(asked: dict[str, Any]) -> None:
    async def go() -> None:
        made = await asyncio.gather(*(litellm.acompletion(**asked) for _ in range(3)))
        stream = await litellm.acompletion(**asked, stream=True)
        text = "".join([piece.choices[0].delta.content or "" async for piece in stream])
        assert [each.choices[0].message.content for each in made] == [text] * 3

    asyncio.run(go())


def test_errors_are_those_of_the_client(asked: dict[str, Any]) -> None:
    provider = asked["model"].partition("/")[0]
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**asked | {"model": f"{provider}/nobody"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked | {"messages": [{"role": "user", "content": "a " * 5000}]})


def test_responses(v1: str) -> None:
    made = litellm.responses(
        model="openai/demo", api_base=v1, api_key="none", input="What?", temperature=0, max_output_tokens=9
    )
    assert made.output[0].content[0].text
    events = list(
        litellm.responses(
            model="openai/demo",
            api_base=v1,
            api_key="none",
            input="What?",
            temperature=0,
            max_output_tokens=9,
            stream=True,
        )
    )
    assert events[-1].type in ("response.completed", "response.incomplete")
