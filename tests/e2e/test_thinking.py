"""Budgets of reasoning, kept by a real worker: a model that never ends its reasoning by itself has to."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.serve_process import Server
from support.thinking_model import CLOSES, thinking_folder

pytestmark = pytest.mark.processes
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = thinking_folder(tmp_path_factory.mktemp("thinking") / "demo")
    with Server(str(folder), "--served-model-name", "demo", "--kv-cache-gb", "0.05", "--num-threads", "1") as running:
        running.wait_ready(120)
        yield running


def ask(server: Server, **body: Any) -> Any:
    wanted = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 40, "logprobs": True}
    answer = server.http.post("/v1/chat/completions", json=wanted | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens_of(found: Any) -> list[str]:
    return [each["token"] for each in found["choices"][0]["logprobs"]["content"]]


@pytest.mark.parametrize("budget", [1, 2, 5, 8])
def test_reasoning_ends_at_its_budget_and_an_answer_follows(server: Server, budget: int) -> None:
    free = ask(server)
    assert CLOSES not in tokens_of(free)
    assert free["choices"][0]["message"]["content"] in (None, "")
    found = ask(server, thinking_token_budget=budget)
    tokens, message = tokens_of(found), found["choices"][0]["message"]
    # What it thinks is what it would have thought, but for what ends it: so many tokens, and then the end.
    assert tokens.index(CLOSES) == budget
    assert tokens[:budget] == tokens_of(free)[:budget]
    assert tokens.count(CLOSES) == 1
    assert message["content"]
    assert message["reasoning_content"].strip() == "".join(tokens[:budget]).strip()
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] <= budget


def test_a_budget_is_for_each_sample_and_beside_others(server: Server) -> None:
    found = ask(server, thinking_token_budget=4, n=3, temperature=1, seed=3)
    for choice in found["choices"]:
        tokens = [each["token"] for each in choice["logprobs"]["content"]]
        assert tokens.index(CLOSES) == 4
        assert choice["message"]["content"]


def test_a_stream_has_the_same_parts(server: Server) -> None:
    whole = ask(server, thinking_token_budget=6)
    wanted = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 40, "thinking_token_budget": 6}
    stream = wanted | {"stream": True, "stream_options": {"include_usage": True}}
    parts = {"content": "", "reasoning_content": ""}
    usage = None
    with server.http.stream("POST", "/v1/chat/completions", json=stream) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                usage = event["usage"] or usage
                for choice in event["choices"]:
                    for name in parts:
                        parts[name] += choice["delta"].get(name) or ""
    message = whole["choices"][0]["message"]
    assert parts == {name: message[name] for name in parts}
    assert usage == whole["usage"] | {"prompt_tokens_details": usage["prompt_tokens_details"]}


def test_messages_and_responses_keep_to_it_too(server: Server) -> None:
    message = ask(server, thinking_token_budget=6)["choices"][0]["message"]
    wanted = {
        "model": "demo",
        "messages": MESSAGES,
        "max_tokens": 40,
        "temperature": 0,
        "thinking": {"type": "enabled", "budget_tokens": 6},
    }
    answer = server.http.post("/v1/messages", json=wanted)
    assert answer.status_code == 200, answer.text
    thinking, text = answer.json()["content"]
    assert (thinking["thinking"], text["text"]) == (message["reasoning_content"], message["content"])
    off = server.http.post("/v1/messages", json=wanted | {"thinking": {"type": "disabled"}}).json()
    assert [block["type"] for block in off["content"]] == ["text"]
    none = server.http.post(
        "/v1/responses", json={"input": "hi", "max_output_tokens": 8, "reasoning": {"effort": "none"}}
    )
    assert [item["type"] for item in none.json()["output"]] == ["message"]


def test_calls_and_forms_follow_a_budget(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    found = ask(server, thinking_token_budget=5, response_format=form)
    assert tokens_of(found).index(CLOSES) == 5
    assert isinstance(json.loads(found["choices"][0]["message"]["content"]), bool)
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    found = ask(server, thinking_token_budget=5, tools=[tool], tool_choice="required", max_tokens=100)
    assert tokens_of(found).index(CLOSES) == 5
    (call,) = found["choices"][0]["message"]["tool_calls"][:1]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("now", {})


@pytest.mark.parametrize("budget", [-1, 2**31, "x", 1.5, 10**30])
def test_budgets_that_are_none_are_refused_by_name(server: Server, budget: Any) -> None:
    body = {"model": "demo", "messages": MESSAGES, "thinking_token_budget": budget}
    answer = server.http.post(
        "/v1/chat/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    assert "thinking_token_budget" in answer.text
    large = {"model": "demo", "messages": MESSAGES, "thinking_token_budget": 2**31 - 1, "max_tokens": 4}
    assert server.http.post("/v1/chat/completions", json=large).status_code == 200
