"""The fields that ask for a form of the answer: which grammar reaches the engine, and what is refused by name."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.server_harness import Answer, FakeClient, Front

from chairlift.core.finished import FinishReason
from chairlift.core.sequences.sampling_params import StructuredOutputsParams
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.text.structured import grammar_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WANTED = grammar_of(StructuredOutputsParams(json=SCHEMA))


def run(test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(test(), 20))


def asked(route: str, **body: Any) -> tuple[Answer, list[str | None]]:
    """The answer of a route, and the grammars that reached the engine."""
    client = FakeClient([5])

    async def go() -> Answer:
        front = Front(client)
        return await getattr(front, route)(max_tokens=2, **body)

    answer = run(go)
    return answer, [request.grammar for request in client.requests]


@pytest.mark.parametrize("route", ["chat", "complete"])
@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, WANTED),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}}, WANTED),
        ({"structured_outputs": {"json": SCHEMA}}, WANTED),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, WANTED),
        ({"guided_json": SCHEMA}, WANTED),
        ({"response_format": {"type": "json_object"}}, grammar_of(StructuredOutputsParams(json_object=True))),
        ({"guided_regex": "[ab]"}, "start: /[ab]/"),
        ({"guided_choice": ["a", "b"]}, 'start: "a" | "b"'),
        ({"guided_grammar": 'start: "a"'}, 'start: "a"'),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": {}}, None),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, ...),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
                    "triggers": ["<a"],
                }
            },
            ...,
        ),
    ],
)
def test_what_reaches_the_engine(route: str, body: dict[str, Any], grammar: Any) -> None:
    answer, grammars = asked(route, **body)
    assert answer.status == 200, answer.body
    assert grammars == [grammar] or (grammar is ... and grammars[0])


@pytest.mark.parametrize("route", ["chat", "complete"])
@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "must be of type"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "response_format.schema",
            "send 'json_schema' with json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "odd": 1}}, "response_format", "must be of type"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be of type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "odd": 1}}},
            "response_format.json_schema.odd",
            "unknown field",
        ),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "send one of them"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "goes with guided_json"),
        ({"structured_outputs": {"nonsense": 1}}, "structured_outputs.nonsense", "unknown field"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "takes one of"),
        ({"guided_regex": "\n"}, "guided_regex", "one line"),
    ],
)
def test_what_is_refused_by_name(route: str, body: dict[str, Any], param: str, says: str) -> None:
    answer, grammars = asked(route, **body)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert says in answer.error["message"]
    assert not grammars


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_the_worker_refuses_is_the_clients_error(stream: bool) -> None:
    client = FakeClient(manual=True)

    async def go() -> Answer:
        front = Front(client)
        task = asyncio.create_task(front.complete(guided_regex="a(?=b)", stream=stream))
        while not client.streams:
            await asyncio.sleep(0)
        request = client.streams[0].request
        client.streams[0].push(SequenceUpdate(request.id, [], FinishReason.INVALID, "the grammar: look-around"))
        return await task

    answer = run(go)
    assert answer.status == 400
    assert answer.error["message"] == "the grammar: look-around"
    assert answer.error["type"] == "invalid_request_error"
