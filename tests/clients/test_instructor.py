"""Instructor: models of pydantic by tools, JSON and schemas, whole, in parts and in lists."""

import asyncio
from typing import Any, Literal

import pytest

instructor = pytest.importorskip("instructor")
errors = pytest.importorskip("instructor.core")
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pydantic = pytest.importorskip("pydantic")

pytestmark = [pytest.mark.clients, pytest.mark.processes]
ASK: Any = [{"role": "user", "content": "What is batching?"}]
ASKED: Any = {"model": "demo", "messages": ASK, "max_tokens": 600, "max_retries": 0}
MODES = ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"]


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """How the weather is."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo"]
    days: Literal[1, 2, 3]


@pytest.mark.parametrize("mode", MODES)
def test_a_model_whole_and_in_parts(v1: str, mode: str) -> None:
    with openai.OpenAI(base_url=v1, api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        made, raw = client.create_with_completion(response_model=Weather, **ASKED)
        assert isinstance(made, Weather)
        assert raw.usage is not None
        if mode != "RESPONSES_TOOLS":
            *_, last = client.create_partial(response_model=Weather, **ASKED)
            Weather.model_validate(last.model_dump())


def test_without_blocking(v1: str) -> None:
    async def go() -> None:
        async with openai.AsyncOpenAI(base_url=v1, api_key="none", max_retries=0) as plain:
            client = instructor.from_openai(plain)
            made = await asyncio.gather(*(client.create(response_model=Weather, **ASKED) for _ in range(3)))
            assert all(isinstance(each, Weather) for each in made)

    asyncio.run(go())


def test_by_anthropics_client(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as plain:
        client = instructor.from_anthropic(plain)
        assert isinstance(client.create(response_model=Weather, **ASKED), Weather)


def test_errors_are_those_of_the_client(v1: str) -> None:
    with openai.OpenAI(base_url=v1, api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain)
        with pytest.raises(errors.InstructorRetryException, match="nobody") as missing:
            client.create(response_model=Weather, **ASKED | {"model": "nobody"})
        assert isinstance(missing.value.__cause__, openai.NotFoundError)
