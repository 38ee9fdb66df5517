"""OpenAI's client: chats, parsing, tools, responses, helpers for streams, and all of it without blocking."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

pytestmark = [pytest.mark.clients, pytest.mark.processes]
ASK: Any = [{"role": "user", "content": "What is batching?"}]
MODEL = "demo"
# The client raises an error for whatever `max_tokens` cut off, so what is to be whole comes to its end by itself.
SHORT: Any = {"structured_outputs": {"regex": "[A-Za-z ]{8,24}"}}


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """Say how the weather is."""

    city: Literal["Paris", "Oslo"]
    days: Literal[1, 2, 3]


TOOL: Any = openai.pydantic_function_tool(Weather)
NAMED: Any = {"type": "function", "function": {"name": "Weather"}}
RESPONSE_TOOL: Any = {"type": "function", "strict": True} | TOOL["function"]


@pytest.fixture(scope="module")
def client(v1: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=v1, api_key="none", max_retries=0) as made:
        yield made


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


def test_a_chat_and_its_stream_are_the_same(client: Any) -> None:
    asked = {
        "model": MODEL,
        "messages": ASK,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": SHORT,
    }
    whole = client.chat.completions.create(**asked)
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert [each.token for each in final.choices[0].logprobs.content] == [
        each.token for each in whole.choices[0].logprobs.content
    ]
    assert "".join(event.delta for event in events if event.type == "content.delta") == text
    assert client.chat.completions.with_raw_response.create(**asked).parse().choices == whole.choices


def test_parse(client: Any) -> None:
    made = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Weather, seed=1)
    assert isinstance(made.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(model=MODEL, messages=ASK, response_format=Weather, seed=1) as stream:
        done = [event for event in stream if event.type == "content.done"]
        final = stream.get_final_completion()
    assert done[0].parsed == final.choices[0].message.parsed == made.choices[0].message.parsed


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_tools_in_two_turns(client: Any, choice: Any) -> None:
    asked = {
        "model": MODEL,
        "messages": ASK,
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "seed": 1,
    }
    made = client.chat.completions.parse(**asked).choices[0]
    [call] = made.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert made.finish_reason in ("tool_calls", "stop")
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    [streamed] = final.message.tool_calls
    assert streamed.function == call.function
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in deltas) == call.function.arguments
    turns = [*ASK, made.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}]
    more = client.chat.completions.create(model=MODEL, messages=turns, tools=[TOOL], max_tokens=10)
    assert more.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert more.usage.prompt_tokens > 0


def test_responses_go_on_from_each_other(client: Any) -> None:
    asked: Any = {"model": MODEL, "input": "What is batching?", "temperature": 0, "max_output_tokens": 30}
    first = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == first.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == first.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert client.responses.input_items.list(first.id).data[0].content[0].text == "What is batching?"
    more = client.responses.create(model=MODEL, input="More", previous_response_id=first.id, max_output_tokens=5)
    assert more.previous_response_id == first.id


def test_parsed_responses(client: Any) -> None:
    made = client.responses.parse(model=MODEL, input="Where?", text_format=Weather)
    assert isinstance(made.output_parsed, Weather)
    with client.responses.stream(model=MODEL, input="Where?", text_format=Weather) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_response().output_parsed, Weather)


def test_tools_of_responses(client: Any) -> None:
    asked: Any = {
        "model": MODEL,
        "tools": [RESPONSE_TOOL],
        "tool_choice": {"type": "function", "name": "Weather"},
        "input": "What?",
        "extra_body": {"seed": 1},
    }
    made = client.responses.create(**asked)
    [call] = [item for item in made.output if item.type == "function_call"]
    Weather.model_validate_json(call.arguments)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    [streamed] = [item for item in final.output if item.type == "function_call"]
    assert streamed.arguments == call.arguments
    outcome = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
    by_id = client.responses.create(
        model=MODEL, input=[outcome], previous_response_id=made.id, tools=[RESPONSE_TOOL], max_output_tokens=10
    )
    assert by_id.status in ("completed", "incomplete")
    again = client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": "What?"}, *made.output, outcome],
        tools=[RESPONSE_TOOL],
        store=False,
        include=["reasoning.encrypted_content"],
        max_output_tokens=10,
    )
    assert again.usage.input_tokens == by_id.usage.input_tokens


def test_reasoning_in_the_field_that_clients_look_for(client: Any) -> None:
    asked: Any = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 20}
    asked["extra_body"] = {"enable_thinking": True}
    made = client.chat.completions.create(**asked).choices[0].message
    assert made.reasoning_content
    with client.chat.completions.stream(**asked) as stream:
        chunks = [event.chunk.choices[0].delta for event in stream if event.type == "chunk"]
        final = stream.current_completion_snapshot.choices[0].message
    text = "".join(getattr(delta, "reasoning_content", None) or "" for delta in chunks)
    assert text == made.reasoning_content == final.reasoning_content
    turns = [*ASK, made, {"role": "user", "content": "Go on"}]
    assert client.chat.completions.create(**asked | {"messages": turns}).usage.prompt_tokens > 0


def test_without_blocking(v1: str) -> None:
    async def go() -> None:
        async with openai.AsyncOpenAI(base_url=v1, api_key="none", max_retries=0) as api:
            made = await asyncio.gather(
                *(api.chat.completions.create(model=MODEL, messages=ASK, max_tokens=9) for _ in range(3)),
                *(api.chat.completions.parse(model=MODEL, messages=ASK, response_format=Weather) for _ in range(3)),
            )
            assert all(isinstance(each.choices[0].message.parsed, Weather) for each in made[3:])
            async with api.chat.completions.stream(model=MODEL, messages=ASK, extra_body=SHORT) as stream:
                text = "".join([event.delta async for event in stream if event.type == "content.delta"])
                final = await stream.get_final_completion()
                assert final.choices[0].message.content == text
            async with api.responses.stream(model=MODEL, input="Where?", text_format=Weather) as stream:
                response = await stream.get_final_response()
                assert isinstance(response.output_parsed, Weather)

    asyncio.run(go())


def test_errors_are_those_of_the_client(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a " * 5000}])
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Weather, max_tokens=2)
    with pytest.raises(openai.BadRequestError):
        list(client.responses.create(model=MODEL, input="a " * 5000, stream=True))


def test_plain_completions(client: Any) -> None:
    made = client.completions.create(model=MODEL, prompt=["Batching is", "A"], max_tokens=5, seed=1, logprobs=1)
    assert len(made.choices) == 2
    pieces = list(client.completions.create(model=MODEL, prompt="Batching is", max_tokens=5, seed=1, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == made.choices[0].text
