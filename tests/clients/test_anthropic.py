"""Anthropic's client: messages, parsing, tools, its runner of tools, streams, and all of it without blocking."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest

anthropic = pytest.importorskip("anthropic")
pydantic = pytest.importorskip("pydantic")

pytestmark = [pytest.mark.clients, pytest.mark.processes]
MODEL = "demo"
ASK: Any = [{"role": "user", "content": "What is batching?"}]
TOOL: Any = {
    "name": "weather",
    "description": "How the weather is.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """How the weather is."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo"]
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_message_and_its_stream_are_the_same(client: Any) -> None:
    asked: Any = {"model": MODEL, "messages": ASK, "max_tokens": 40, "extra_body": {"temperature": 0}}
    made = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == made.content[0].text == text
    assert (final.stop_reason, final.usage.output_tokens) == (made.stop_reason, made.usage.output_tokens)
    raw = list(client.messages.create(**asked, stream=True))
    assert raw[0].type == "message_start"
    assert raw[-1].type == "message_stop"
    assert client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens > 0


def test_parse(client: Any) -> None:
    made = client.messages.parse(model=MODEL, messages=ASK, max_tokens=100, output_format=Weather)
    assert isinstance(made.parsed_output, Weather)
    with client.messages.stream(model=MODEL, messages=ASK, max_tokens=100, output_format=Weather) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Weather)
    beta = client.beta.messages.parse(model=MODEL, messages=ASK, max_tokens=100, output_format=Weather)
    assert isinstance(beta.parsed_output, Weather)


def test_tools_in_two_turns(client: Any) -> None:
    asked: Any = {"model": MODEL, "messages": ASK, "max_tokens": 100, "tools": [TOOL], "tool_choice": CALL}
    made = client.messages.create(**asked)
    assert made.stop_reason == "tool_use"
    [used] = [block for block in made.content if block.type == "tool_use"]
    assert used.input["city"] in ("Paris", "Oslo")
    with client.messages.stream(**asked) as stream:
        partial = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    [streamed] = [block for block in final.content if block.type == "tool_use"]
    assert pydantic.TypeAdapter(dict[str, str]).validate_json("".join(partial)) == streamed.input
    result = {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "Sunny"}]}
    turns = [*ASK, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    more = client.messages.create(model=MODEL, messages=turns, max_tokens=10, tools=[TOOL], system="Be short.")
    assert more.stop_reason in ("end_turn", "max_tokens", "tool_use")


def test_thinking(client: Any) -> None:
    asked: Any = {"model": MODEL, "messages": ASK, "max_tokens": 20, "thinking": {"type": "adaptive"}}
    # Whether to think is up to the template, which looks for this word.
    asked |= {"system": "Think first.", "extra_body": {"temperature": 0}}
    made = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(event.thinking for event in stream if event.type == "thinking")
        final = stream.get_final_message()
    assert text == made.content[0].thinking == final.content[0].thinking
    assert final.content[0].signature == made.content[0].signature
    turns = [*ASK, {"role": "assistant", "content": made.content}, {"role": "user", "content": "Go on"}]
    assert client.messages.create(**asked | {"messages": turns}).stop_reason


# Newer ones would have the server keep the conversation, and are told that it does not.
@pytest.mark.parametrize("stream", [False, True])
def test_its_runner_of_tools(client: Any, stream: bool) -> None:
    cities = []

    @anthropic.beta_tool
    def weather(city: Literal["Paris", "Oslo"]) -> str:
        """How the weather is.

        Args:
            city: where
        """
        cities.append(city)
        return "Sunny"

    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=400, messages=ASK, tools=[weather], tool_choice=CALL, max_iterations=2, stream=stream
    )
    seen = [each.get_final_message() if stream else each for each in runner]
    assert [each.stop_reason for each in seen] == ["tool_use"] * 2
    assert set(cities) <= {"Paris", "Oslo"}
    assert cities


def test_without_blocking(url: str) -> None:
    async def go() -> None:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as api:
            asked: Any = {"model": MODEL, "max_tokens": 100, "messages": ASK}
            made = await asyncio.gather(
                *(api.messages.create(**asked) for _ in range(3)),
                *(api.messages.create(**asked, tools=[TOOL], tool_choice=CALL) for _ in range(3)),
            )
            assert [each.stop_reason for each in made[3:]] == ["tool_use"] * 3
            async with api.messages.stream(**asked) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                assert await stream.get_final_text() == text

    asyncio.run(go())


def test_errors_are_those_of_the_client(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", messages=ASK, max_tokens=5)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model=MODEL, messages=ASK, max_tokens=0)
    long: Any = {"model": MODEL, "messages": [{"role": "user", "content": "a " * 5000}], "max_tokens": 5}
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**long)
    with pytest.raises(anthropic.BadRequestError), client.messages.stream(**long) as stream:
        stream.until_done()
