"""What vLLM's suite asks of responses, tools and tokens, asked of a real server of a model that reasons."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from support.covers import covers
from support.serve_process import Server
from support.thinking_model import thinking_folder

pytestmark = pytest.mark.processes
BASIC = "vllm responses/test_basic.py"
STATEFUL = "vllm responses/test_stateful.py"
SIMPLE = "vllm responses/test_simple.py"
TOOLS = "vllm chat_completion/test_completion_with_function_calling.py"
TOKENS = "vllm test_tokenization.py"
CLAUDE = "llama.cpp test_compat_anthropic.py"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Vienna", "Berlin"]},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "options": {"$ref": "#/$defs/Options"},
    },
    "required": ["city", "unit"],
    "$defs": {"Options": {"type": "object", "properties": {"forecast": {"type": "boolean"}}}},
}
SENT: list[Any] = [
    {"type": "function", "function": {"name": "get_current_weather", "description": "Now", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_current_time", "parameters": {"type": "object", "properties": {}}}},
]
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Berlin?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = thinking_folder(tmp_path_factory.mktemp("compat") / "demo")
    with Server(str(folder), "--served-model-name", "demo", "--kv-cache-gb", "0.05", "--num-threads", "1") as running:
        running.wait_ready(120)
        yield running


def respond(server: Server, **body: Any) -> Any:
    # Drawn at random an answer may end by itself at once, if seldom.
    quiet = {"model": "demo", "input": "Hello!", "max_output_tokens": 12, "temperature": 0}
    quiet["reasoning"] = {"effort": "none"}
    return server.openai.responses.create(**quiet | body)  # type: ignore[call-overload]


def text_of(response: Any) -> str:
    assert response.status in ("completed", "incomplete")
    return response.output_text


@covers(BASIC, "test_instructions", "test_chat", "test_chat_with_input_type")
@covers(SIMPLE, "test_basic", "test_max_tokens", "test_extra_sampling_params")
def test_inputs_of_every_shape(server: Server) -> None:
    said = [{"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}]
    turns = [
        {"role": "system", "content": "End with QED."},
        {"role": "user", "content": "What is 5 * 3?"},
        {"role": "assistant", "content": "15. QED."},
        {"role": "user", "content": "Twice that."},
    ]
    for given in ("Hello!", said, turns):
        assert text_of(respond(server, input=given, instructions="Be brief."))
    cut = respond(server, input="Tell me of Moby Dick.", max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    whole = respond(server, max_output_tokens=400)
    assert (whole.status, whole.incomplete_details) == ("completed", None)
    extra = {"top_k": 40, "repetition_penalty": 1.2, "seed": 42}
    assert text_of(respond(server, temperature=0.7, top_p=0.9, extra_body=extra))


@covers(BASIC, "test_logprobs")
@covers(SIMPLE, "test_streaming_logprobs")
def test_logprobs_of_texts(server: Server) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 3, "temperature": 0}
    found = respond(server, **asked).output[-1].content[-1].logprobs
    assert {len(each.top_logprobs) for each in found} == {3}
    deltas = [e for e in respond(server, **asked, stream=True) if e.type == "response.output_text.delta"]
    assert all(each.logprob <= 0 and len(each.top_logprobs) == 3 for delta in deltas for each in delta.logprobs)
    assert sum(len(delta.logprobs) for delta in deltas) == len(found)


@covers(BASIC, "test_streaming")
@covers(SIMPLE, "test_streaming_output_consistency", "test_streaming_types")
def test_streams_of_responses(server: Server) -> None:
    events = list(respond(server, stream=True, background=False, tools=[], temperature=0, max_output_tokens=400))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text != ""
    # What begins ends, the last begun first.
    pairs = {
        "response.created": "response.completed",
        "response.output_item.added": "response.output_item.done",
        "response.content_part.added": "response.content_part.done",
    }
    stack: list[str] = []
    for event in events:
        if event.type in pairs:
            stack.append(pairs[event.type])
        elif event.type in pairs.values():
            assert stack.pop() == event.type
    assert stack == []


@covers(STATEFUL, "test_store", "test_background_error", "test_cancel_completed")
def test_what_is_kept(server: Server) -> None:
    api = server.openai.responses
    made = respond(server)
    assert api.retrieve(made.id).status == made.status
    with pytest.raises(openai.BadRequestError):
        api.cancel(made.id)
    with pytest.raises(openai.NotFoundError):
        api.retrieve(respond(server, store=False).id)
    with pytest.raises(openai.BadRequestError):
        respond(server, background=True, store=False)


@covers(STATEFUL, "test_background", "test_background_cancel")
def test_the_background(server: Server) -> None:
    api = server.openai.responses
    made = respond(server, background=True)
    assert made.status == "queued"
    while made.status in ("queued", "in_progress"):
        made = api.retrieve(made.id)
    assert text_of(made)
    long = respond(server, background=True, max_output_tokens=1500, extra_body={"ignore_eos": True})
    while long.status == "queued":
        long = api.retrieve(long.id)
    assert api.cancel(long.id).status == "cancelled"
    assert api.retrieve(long.id).status == "cancelled"


@covers(STATEFUL, "test_previous_response_id", "test_two_responses_with_same_prev_id")
def test_responses_that_follow_others(server: Server) -> None:
    first = respond(server, input="My name is John.", instructions="Remember.")
    second, other = (respond(server, input=text, previous_response_id=first.id) for text in ("It is Mark.", "Who?"))
    third = respond(server, input="Who am I?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens
    assert other.previous_response_id == second.previous_response_id == first.id


@covers(SIMPLE, "test_streaming_reasoning_tokens_e2e", "test_non_streaming_reasoning_tokens_e2e")
def test_reasoning_and_its_tokens(server: Server) -> None:
    """The model never ends its reasoning by itself, so what a chat's budget makes of it goes back in as an item."""
    thought = {"type": "reasoning", "id": "lol", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []}
    given = [{"type": "message", "content": "Hello.", "role": "user"}, thought]
    for stream in (False, True):
        found = respond(server, input=given, reasoning=None, stream=stream)
        made = list(found)[-1].response if stream else found
        assert made.output[0].type == "reasoning"
        assert made.output[0].content[0].text
        assert made.usage.output_tokens_details.reasoning_tokens > 0
    bounded = {"model": "demo", "messages": MESSAGES, "max_tokens": 20, "thinking_token_budget": 4, "temperature": 0}
    message = server.http.post("/v1/chat/completions", json=bounded).json()["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"]


@covers(
    SIMPLE,
    "test_input_history_openai_shape_e2e",
    "test_input_history_openresponses_shape_e2e",
    "test_multiturn_history_replay_without_ids_e2e",
)
def test_histories_with_and_without_ids(server: Server) -> None:
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Be concise."}]}
    assistant = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
    thought: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": None}
    ids = {"status": "completed"}
    for history in (
        [user, assistant | ids | {"id": "msg_1"}, thought | ids | {"id": "rs_1"}, user],
        [user, assistant, thought, user],
    ):
        assert text_of(respond(server, input=history))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_current_weather"}}])
@covers(TOOLS, "test_function_tool_use", "test_named_tool_use")
def test_tools_are_called(server: Server, choice: Any) -> None:
    asked = {"model": "demo", "messages": MESSAGES, "tools": SENT, "tool_choice": choice, "max_tokens": 300}
    # Whatever it writes, one call ends in time.
    asked["parallel_tool_calls"] = False
    for extra in (QUIET, {"thinking_token_budget": 5}):
        whole = server.openai.chat.completions.create(**asked, extra_body=extra, seed=1).choices[0]  # type: ignore[call-overload]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.tool_calls
        for call in whole.message.tool_calls:
            schema = WEATHER if call.function.name == "get_current_weather" else {"type": "object"}
            jsonschema.validate(json.loads(call.function.arguments), schema)
        chunks = server.openai.chat.completions.create(**asked, extra_body=extra, seed=1, stream=True)  # type: ignore[call-overload]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert calls[0].function.name == whole.message.tool_calls[0].function.name
        assert bool([d for d in deltas if getattr(d, "reasoning_content", None)]) is ("thinking_token_budget" in extra)


@covers(TOOLS, "test_no_args_tool_call")
def test_calls_without_arguments_and_without_room(server: Server) -> None:
    create = server.openai.chat.completions.create
    named: Any = {"type": "function", "function": {"name": "get_current_time"}}
    call = create(model="demo", messages=MESSAGES, tools=SENT, tool_choice=named, extra_body=QUIET)
    (made,) = call.choices[0].message.tool_calls or ()
    assert json.loads(made.function.arguments) == {}
    prompts = set()
    for arguments in ("{}", ""):
        made.function.arguments = arguments
        result = {"role": "tool", "tool_call_id": made.id, "content": "noon"}
        turns: Any = [*MESSAGES, call.choices[0].message, result]
        turns[1] = turns[1].to_dict() | {"content": ""}
        prompts.add(create(model="demo", messages=turns, max_tokens=8, extra_body=QUIET).usage.prompt_tokens)
    assert len(prompts) == 1, "no arguments and empty ones are not the same to the template"
    for choice in ("required", {"type": "function", "function": {"name": "get_current_weather"}}):
        cut = create(model="demo", messages=MESSAGES, tools=SENT, tool_choice=choice, max_tokens=1, extra_body=QUIET)  # type: ignore[call-overload]
        assert cut.choices[0].finish_reason == "length"
        # What can't be read as a call is text, never lost; here it is how one begins.
        assert "<tool_call>".startswith(cut.choices[0].message.content or "")


@covers(TOOLS, "test_inconsistent_tool_choice_and_tools")
def test_choices_that_contradict_tools(server: Server) -> None:
    other = {"type": "function", "function": {"name": "nondefined"}}
    for body in ({"tool_choice": SENT[0]}, {"tools": SENT, "tool_choice": other}, {"tools": SENT, "tool_choice": {}}):
        answer = server.http.post("/v1/chat/completions", json={"model": "demo", "messages": MESSAGES} | body)
        assert answer.status_code == 400, answer.text


@covers(TOKENS, "test_tokenize_completions", "test_tokenize_with_return_token_strs", "test_detokenize")
def test_tokens_of_texts(server: Server) -> None:
    text = "This is a test prompt."
    for special in (False, True):
        body = {"prompt": text, "add_special_tokens": special, "model": "demo", "return_token_strs": special}
        found = server.http.post("/tokenize", json=body).json()
        assert found["count"] == len(found["tokens"]) > 0
        assert found["max_model_len"] == 2048
        assert (found["token_strs"] is not None) is special
        assert len(found["token_strs"] or found["tokens"]) == found["count"]
        assert server.http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}


def test_tokens_of_chats_with_tools(server: Server) -> None:
    counts = []
    for tools in ([], SENT):
        for generation, last in ((True, "user"), (False, "assistant")):
            turns = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Sure,"}][
                : 1 + (last == "assistant")
            ]
            body = {"messages": turns, "tools": tools, "add_generation_prompt": generation}
            found = server.http.post("/tokenize", json=body | {"continue_final_message": last == "assistant"}).json()
            assert found["count"] == len(found["tokens"])
            counts.append(found["count"])
    assert counts[2] > counts[0]


USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "get_current_time", "input": {}}]}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "Sunny, 25°C"}
ANTHROPIC_TOOL = {"name": "get_current_weather", "description": "Now", "input_schema": WEATHER}


def message(server: Server, **body: Any) -> Any:
    answer = server.http.post("/v1/messages", json={"max_tokens": 300, "messages": MESSAGES} | body)
    assert answer.status_code == 200, answer.text
    return answer


@covers(
    CLAUDE, "test_anthropic_tool_result", "test_anthropic_tool_result_with_text", "test_anthropic_tool_result_error"
)
def test_results_of_tools_in_messages(server: Server) -> None:
    text = {"type": "text", "text": "Here are the results:"}
    for parts in ([RESULT], [text, RESULT], [RESULT | {"is_error": True, "content": "City not found"}]):
        turns = [*MESSAGES, USE, {"role": "user", "content": parts}]
        made = message(server, messages=turns, max_tokens=10).json()
        assert (made["type"], made["content"][0]["type"]) == ("message", "text")


@covers(
    CLAUDE,
    "test_anthropic_tool_use_basic",
    "test_anthropic_tool_streaming",
    "test_anthropic_streaming_content_block_indices",
)
def test_tools_in_messages(server: Server) -> None:
    asked = {
        "tools": [ANTHROPIC_TOOL],
        "tool_choice": {"type": "tool", "name": "get_current_weather"},
        "temperature": 0,
    }
    made = message(server, **asked).json()
    (block,) = made["content"]
    assert (made["stop_reason"], block["type"], block["name"]) == ("tool_use", "tool_use", "get_current_weather")
    jsonschema.validate(block["input"], WEATHER)
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 5}}
    for more, kinds in (({}, ["tool_use"]), (thinking, ["thinking", "tool_use"])):
        lines = message(server, **asked, **more, stream=True).text.splitlines()
        found = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        begun = [event for event in found if event["type"] == "content_block_start"]
        assert [event["content_block"]["type"] for event in begun] == kinds
        ends = [event["index"] for event in found if event["type"] == "content_block_stop"]
        assert [event["index"] for event in begun] == ends == list(range(len(kinds)))


@covers(CLAUDE, "test_anthropic_thinking", "test_anthropic_thinking_with_reasoning_model")
def test_thinking_in_messages(server: Server) -> None:
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 5}, "max_tokens": 30, "temperature": 0}
    thought, said = message(server, **thinking).json()["content"]
    assert (bool(thought["thinking"]), bool(thought["signature"]), bool(said["text"])) == (True, True, True)
    lines = message(server, **thinking, stream=True).text.splitlines()
    found = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    begun = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
    deltas = list(dict.fromkeys(e["delta"]["type"] for e in found if e["type"] == "content_block_delta"))
    assert (begun, deltas) == (["thinking", "text"], ["thinking_delta", "signature_delta", "text_delta"])
