"""Bodies that are nested, wide, long or of the wrong kind everywhere: a short 400, and nothing long in the log."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.items_harness import Listening, adder, classifier, embedder, function, listening, reranker
from support.server_harness import FakeClient, tokenizer

from chairlift.config.server import ServerConfig
from chairlift.logs import ShortFormatter
from chairlift.server.models.sequence_service import SequenceService

LONG = "x" * 10_240
WIDE = int("9" * 30)
HUGE = int("9" * 400)
MAX_BYTES = 2048


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.fixture(scope="module")
def server() -> Iterator[Listening]:
    text = tokenizer()
    chat = SequenceService(FakeClient(text.encode("hello ")), text, "tiny", ServerConfig())
    with listening(adder()[0], embedder()[0], reranker()[0], classifier()[0], function()[0], chat) as it:
        yield it


@pytest.fixture(autouse=True)
def _nothing_long_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    formatter = ShortFormatter("%(levelname)s %(message)s")
    for record in caplog.records:
        assert record.levelno < logging.ERROR, record.getMessage()[:500]
        assert len(formatter.format(record).encode()) <= MAX_BYTES


MESSAGES = [{"role": "user", "content": "hi"}]
TENSOR = {"name": "a", "shape": [1, 1], "datatype": "FP32", "data": [1]}
WORD = {"name": "word", "shape": [1], "datatype": "BYTES", "data": ["x"]}


def infer(**fields: Any) -> dict[str, Any]:
    return {"inputs": [TENSOR | fields, TENSOR | {"name": "b"}, WORD]}


def infer_many(number: int) -> dict[str, Any]:
    return {"inputs": [{"name": "input", "shape": [number], "datatype": "BYTES", "data": ["1"] * number}]}


STRUCTURES = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}] * 1001,
    "triggers": ["<a"],
}
BODIES: list[tuple[str, Any]] = [
    # Nested too deeply, wherever anything goes.
    ("/v1/chat/completions", {"messages": [MESSAGES[0] | {"x": nested(900)}]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "metadata": nested(900)}),
    ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"x": nested(900)}}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": nested(100)}),
    (
        "/v1/chat/completions",
        {"messages": [MESSAGES[0] | {"tool_calls": [{"function": {"arguments": "[" * 5000 + "]" * 5000}}]}]},
    ),
    (
        "/v1/chat/completions",
        {"messages": [MESSAGES[0] | {"tool_calls": [{"function": {"arguments": json.dumps(nested(500))}}]}]},
    ),
    ("/v1/responses", {"input": [{"role": "user", "content": "hi", "x": nested(900)}]}),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": "a", "parameters": {"x": nested(62)}}]}),
    (
        "/v1/responses",
        {"input": [{"type": "function_call", "call_id": "1", "name": "a", "arguments": json.dumps(nested(500))}]},
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {"x": nested(58)}}],
                },
                *MESSAGES,
            ],
            "max_tokens": 1,
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": nested(100)}]}),
    ("/tokenize", {"messages": [MESSAGES[0] | {"x": nested(900)}]}),
    ("/v1/models/function:predict", {"instances": [nested(100)]}),
    ("/v1/models/function:predict", {"instances": [nested(850)]}),
    ("/v1/models/adder:predict", {"instances": [{"a": nested(50), "b": [1], "word": "x"}]}),
    ("/v1/models/embedder:predict", {"instances": [nested(50)]}),
    ("/v2/models/adder/infer", infer(data=nested(50))),
    ("/v2/models/adder/infer", infer(data=nested(850))),
    ("/v2/models/adder/infer", infer(parameters={"binary_data_size": nested(10)})),
    ("/v2/models/embedder/infer", {"inputs": [WORD | {"name": "text", "data": nested(63)}]}),
    (
        "/v2/models/function/infer",
        {"inputs": [{"name": "input", "shape": [1], "datatype": "BYTES", "data": [json.dumps(nested(100))]}]},
    ),
    # Numbers that are too wide, and shapes that can't be.
    ("/v1/completions", {"prompt": [WIDE]}),
    ("/v1/responses", {"input": "x", "max_output_tokens": WIDE}),
    ("/v1/responses", {"input": "x", "seed": WIDE}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": WIDE}),
    ("/detokenize", {"tokens": [WIDE]}),
    ("/detokenize", {"tokens": [1] * 300}),
    ("/v1/completions", {"prompt": [[WIDE]]}),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [WIDE]}),
    ("/v1/completions", {"prompt": "x", "logit_bias": {str(WIDE): 1}}),
    ("/v1/completions", {"prompt": "x", "seed": WIDE}),
    ("/v1/completions", {"prompt": "x", "seed": -WIDE}),
    ("/v1/embeddings", {"model": "embedder", "input": [WIDE]}),
    ("/v1/models/function:predict", {"instances": [WIDE]}),
    ("/v1/models/function:predict", {"instances": [{"x": [-WIDE]}]}),
    (
        "/v2/models/function/infer",
        {"inputs": [{"name": "input", "shape": [1], "datatype": "BYTES", "data": [str(WIDE)]}]},
    ),
    ("/v2/models/adder/infer", infer(shape=[WIDE])),
    ("/v2/models/adder/infer", infer(shape=[0, WIDE], data=[])),
    ("/v2/models/adder/infer", infer(shape=[0, 2**62, 2**62], data=[])),
    ("/v2/models/adder/infer", infer(shape=[1] * 70)),
    ("/v2/models/adder/infer", infer(data=[WIDE])),
    ("/v2/models/adder/infer", infer(data=[HUGE])),
    ("/v2/models/adder/infer", infer() | {"parameters": {"timeout": HUGE}}),
    ("/v2/models/adder/infer", infer() | {"parameters": {"priority": HUGE}}),
    # Texts among which NumPy would make all as wide as the longest: here 40 GB.
    ("/v2/models/adder/infer", infer(shape=[1, 20_000], data=["x" * 500_000] + [""] * 19_999)),
    ("/v1/models/adder:predict", {"instances": [{"a": ["x" * 500_000] + [""] * 19_999, "b": [1], "word": "x"}]}),
    # More than the queue holds, or than anybody can want.
    ("/v1/models/adder:predict", {"instances": [{"a": [1], "b": [2], "word": "x"}] * 5000}),
    ("/v1/models/embedder:predict", {"instances": ["a"] * 5000}),
    ("/v1/models/function:predict", {"instances": [1] * 5000}),
    ("/v1/embeddings", {"model": "embedder", "input": ["a"] * 5000}),
    ("/v1/rerank", {"model": "reranker", "query": "x", "documents": ["a"] * 5000}),
    ("/v2/models/function/infer", infer_many(5000)),
    ("/v2/models/adder/infer", infer() | {"outputs": [{"name": "sum"}] * 1000}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 64, "guided_choice": ["x" * 2**18]}),
    ("/v1/completions", {"prompt": ["a"] * 70, "guided_choice": ["x" * 250_000]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "response_format": STRUCTURES}),
    # Long names and values.
    ("/v1/chat/completions", {"messages": MESSAGES, LONG: 1}),
    ("/v1/chat/completions", {"messages": MESSAGES, " - at `$" * 100_000 + "\nx": 1}),
    ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "hi"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "model": LONG}),
    ("/v1/chat/completions", {"messages": MESSAGES, "temperature": LONG}),
    ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"messages": LONG}}),
    ("/v1/responses", {"input": "hi", LONG: 1}),
    ("/v1/responses", {"input": [{"type": LONG}]}),
    ("/v1/responses", {"input": [{"role": LONG, "content": ""}]}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": LONG}]}),
    ("/v1/responses", {"input": [{"id": LONG}] * 2}),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": LONG, "output": ""}]}),
    ("/v1/responses", {"input": "hi", "previous_response_id": LONG}),
    ("/v1/responses", {"input": "hi", "include": [LONG]}),
    ("/v1/responses", {"input": "hi", "tools": [{"type": LONG}]}),
    ("/v1/messages", {"messages": [{"role": LONG, "content": ""}], "max_tokens": 1}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": LONG}]}], "max_tokens": 1}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, LONG: 1}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "thinking": {"type": LONG}}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "tools": [{"type": LONG}]}),
    (f"/v1/responses/{LONG}/cancel", {}),
    ("/tokenize", {"prompt": "x", "model": LONG}),
    ("/v1/completions", {"prompt": "x", "model": LONG}),
    ("/v1/completions", {"prompt": "x", "stop": LONG}),
    ("/v1/embeddings", {"model": LONG, "input": "x"}),
    ("/v1/embeddings", {"model": "embedder", "input": "x", "encoding_format": LONG}),
    ("/v1/rerank", {"model": "reranker", "query": "x", "documents": [{"y": "z"}], "rank_fields": [LONG]}),
    ("/embed", {"model": "embedder", "inputs": "x", "prompt_name": LONG}),
    ("/predict", {"model": LONG, "inputs": "x"}),
    ("/v1/models/adder:predict", {"instances": [{LONG: 1}]}),
    (f"/v1/models/{LONG}:predict", {"instances": [1]}),
    (f"/v2/models/{LONG}/infer", infer()),
    ("/v2/models/adder/infer", infer(name=LONG)),
    ("/v2/models/adder/infer", infer(datatype=LONG)),
    ("/v2/models/adder/infer", infer(parameters={LONG: 1})),
    ("/v2/models/adder/infer", infer() | {"parameters": {LONG: 1}}),
    ("/v2/models/adder/infer", infer() | {"outputs": [{"name": LONG}]}),
    ("/v2/models/adder/infer", infer() | {"model_name": LONG}),
    ("/v2/models/adder/infer", infer() | {LONG: 1}),
    ("/v2/models/function/infer", {"inputs": [{"name": "input", "shape": [1], "datatype": "BYTES", "data": [LONG]}]}),
    (f"/v2/repository/models/{LONG}/load", {}),
]


@pytest.mark.parametrize("number", range(len(BODIES)), ids=[f"{n}-{path[:40]}" for n, (path, _) in enumerate(BODIES)])
def test_a_hostile_body_gets_a_short_error_of_the_clients(server: Listening, number: int) -> None:
    path, body = BODIES[number]
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert 400 <= answer.status_code < 500, answer.text
    assert len(answer.content) <= MAX_BYTES


@pytest.mark.parametrize(
    ("field", "meant"), [("max_tokns", "; did you mean 'max_tokens'?"), ("xyz", ""), ("max_tokens" + LONG, "")]
)
def test_a_misspelt_field_is_told_what_may_have_been_meant(server: Listening, field: str, meant: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], field: 3}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["error"]
    assert error["message"].startswith(f"unknown field '{field[:64]}")
    assert error["message"].endswith(meant)
    assert ("did you mean" in error["message"]) == bool(meant)


@pytest.mark.parametrize("field", ["a\nb", "a - at `$.b", "`", "x`y"])
def test_a_field_is_named_whatever_its_name_looks_like(server: Listening, field: str) -> None:
    body = {"model": "tiny", "messages": MESSAGES, field: 3}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["error"]
    assert (error["message"], error["param"], error["code"]) == (f"unknown field {field!r}", field, "unknown_field")


def test_what_is_too_much_is_refused_before_anything_is_made_of_it(server: Listening) -> None:
    """By a message about the queue, although each input is wrong as well."""
    for path, body in (
        ("/v1/models/adder:predict", {"instances": [5] * 5000}),
        ("/v1/models/embedder:predict", {"instances": [5] * 5000}),
        ("/v2/models/function/infer", {"inputs": [infer_many(5000)["inputs"][0] | {"data": ["{"] * 5000}]}),
        ("/v2/models/embedder/infer", {"inputs": [infer_many(5000)["inputs"][0] | {"name": "text"}]}),
    ):
        answer = httpx.post(server.url + path, json=body, timeout=60)
        assert (answer.status_code, "max_waiting" in answer.json()["error"]) == (400, True), answer.text


def test_honest_bodies_of_the_same_shapes_go_through(server: Listening) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES, "metadata": nested(60)}),
        ("/v1/chat/completions", {"messages": MESSAGES * 300, "max_tokens": 1, "user": "[" * 200}),
        ("/v1/models/function:predict", {"instances": [[nested(40), 2**64 - 1, -(2**63), 0.1234567890123456789]]}),
        (
            "/v2/models/adder/infer",
            infer(shape=[1, 3], data=[[1, 2.5, True]])
            | {
                "inputs": [
                    TENSOR | {"shape": [1, 2], "data": [[1, 2.5]]},
                    TENSOR | {"name": "b", "shape": [1, 2], "data": [3, 4]},
                    WORD,
                ]
            },
        ),
    ):
        answer = httpx.post(server.url + path, json=body, timeout=60)
        expected = 400 if len(body.get("messages", [])) > 1 else 200
        assert answer.status_code == expected, answer.text
        if expected == 400:
            assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_header_of_many_digits(server: Listening) -> None:
    headers = {"Inference-Header-Content-Length": "9" * 5000}
    answer = httpx.post(f"{server.url}/v2/models/adder/infer", json=infer(), headers=headers)
    assert answer.status_code == 400
    assert len(answer.content) <= MAX_BYTES


def test_a_result_that_can_not_be_json_is_named() -> None:
    service, dispatcher = function()
    with listening(service) as server:
        dispatcher.compute = lambda payloads: [{("a", "tuple"): 1} if each == 2 else each for each in payloads]
        answer = httpx.post(f"{server.url}/v1/models/function:predict", json={"instances": [1, 2, 3]})
    assert answer.status_code == 500
    assert "instances[1]: the model's result can't be written as JSON" in answer.json()["error"]


def test_a_logged_traceback_has_all_frames_and_little_of_what_a_client_sent() -> None:
    formatter = ShortFormatter("%(levelname)s %(message)s")
    try:
        raise ValueError(LONG)
    except ValueError as error:
        raised = (ValueError, error, error.__traceback__)
        record = logging.LogRecord("a", logging.ERROR, "a.py", 1, "a %s", (LONG,), raised)
    made = formatter.format(record)
    assert len(made) <= MAX_BYTES
    assert "test_hostile_bodies.py" in made
    assert "ValueError: xxx" in made
