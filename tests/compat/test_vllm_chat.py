"""What vLLM's suite asks of its chat and completion routes, asked of a real server here."""

import json
import re
from typing import Any

import jsonschema
import openai
import pytest
from support.covers import covers
from support.serve_process import Server

CHAT = "vllm chat_completion/test_chat.py"
COMPLETION = "vllm completion/test_completion.py"
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is batching?"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bo"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def chat(server: Server, **body: Any) -> Any:
    wanted = {"model": "demo", "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0}
    return server.openai.chat.completions.create(**wanted | body)  # type: ignore[call-overload]


def complete(server: Server, **body: Any) -> Any:
    wanted = {"model": "demo", "prompt": "Hello, my name is", "max_tokens": 5, "temperature": 0}
    return server.openai.completions.create(**wanted | body)  # type: ignore[call-overload]


@covers(CHAT, "test_no_logprobs_chat", "test_zero_logprobs_chat", "test_some_logprobs_chat")
def test_logprobs_of_chats(demo_server: Server) -> None:
    assert chat(demo_server, logprobs=False).choices[0].logprobs is None
    for top in (0, 5):
        entries = chat(demo_server, logprobs=True, top_logprobs=top).choices[0].logprobs.content
        assert entries
        assert {len(entry.top_logprobs) for entry in entries} == {top}


@covers(CHAT, "test_too_many_chat_logprobs")
@covers(COMPLETION, "test_too_many_completion_logprobs")
def test_too_many_logprobs_are_refused_and_the_server_goes_on(demo_server: Server) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError):
            chat(demo_server, logprobs=True, top_logprobs=21, stream=stream)
        with pytest.raises(openai.BadRequestError):
            complete(demo_server, logprobs=30, stream=stream)
    assert chat(demo_server).choices[0].message.content
    assert complete(demo_server).choices[0].text


@covers(CHAT, "test_prompt_logprobs_chat", "test_more_than_one_prompt_logprobs_chat")
@covers(COMPLETION, "test_prompt_logprobs_completion")
def test_logprobs_of_prompts(demo_server: Server) -> None:
    for count in (0, 1, 2):
        found = chat(demo_server, extra_body={"prompt_logprobs": count}).prompt_logprobs
        assert found[0] is None
        assert all(max(count, 1) <= len(entry) <= count + 1 for entry in found[1:])
        several = complete(demo_server, prompt=["A robot may not", "My name"], extra_body={"prompt_logprobs": count})
        assert all(choice.prompt_logprobs for choice in several.choices)
    assert getattr(chat(demo_server), "prompt_logprobs", None) is None
    assert getattr(complete(demo_server).choices[0], "prompt_logprobs", None) is None
    for ask in (chat, complete):
        with pytest.raises(openai.BadRequestError):
            ask(demo_server, extra_body={"prompt_logprobs": -1})


@covers(CHAT, "test_single_chat_session", "test_chat_completion_n_equals_1")
def test_a_chat_of_two_turns(demo_server: Server) -> None:
    first = chat(demo_server, max_completion_tokens=5, logprobs=True, top_logprobs=5)
    assert (len(first.choices), first.choices[0].index, first.choices[0].finish_reason) == (1, 0, "length")
    assert first.usage.completion_tokens == 5
    assert first.usage.total_tokens == first.usage.prompt_tokens + 5
    message = first.choices[0].message
    assert (message.role, bool(message.content)) == ("assistant", True)
    turns = [*MESSAGES, {"role": "assistant", "content": message.content}, {"role": "user", "content": "In JSON."}]
    assert chat(demo_server, messages=turns).choices[0].message.content


@covers(CHAT, "test_chat_streaming")
@covers(COMPLETION, "test_completion_streaming")
def test_streams_add_up_to_the_whole(demo_server: Server) -> None:
    whole = chat(demo_server).choices[0]
    chunks = list(chat(demo_server, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    ends = [chunk.choices[0].finish_reason for chunk in chunks]
    assert [end for end in ends if end] == [whole.finish_reason] == ends[-1:]
    text = complete(demo_server).choices[0]
    chunks = list(complete(demo_server, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text.text
    ends = [chunk.choices[0].finish_reason for chunk in chunks]
    assert [end for end in ends if end] == ["length"] == ends[-1:]


@covers(COMPLETION, "test_completion_stream_options")
def test_stream_options(demo_server: Server) -> None:
    for ask in (chat, complete):
        for options in ({}, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}):
            assert all(chunk.usage is None for chunk in ask(demo_server, stream=True, stream_options=options))
        *chunks, last = ask(demo_server, stream=True, stream_options={"include_usage": True})
        assert all(chunk.usage is None for chunk in chunks)
        assert last.choices == []
        assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens > 0
        both = {"include_usage": True, "continuous_usage_stats": True}
        counts = [chunk.usage.completion_tokens for chunk in ask(demo_server, stream=True, stream_options=both)]
        assert counts == sorted(counts)
        for options in ({"include_usage": None}, {"include_usage": True}, {"continuous_usage_stats": True}):
            with pytest.raises(openai.BadRequestError):
                ask(demo_server, stream=False, stream_options=options)


@covers(
    CHAT,
    "test_structured_outputs_choice_chat",
    "test_structured_outputs_json_chat",
    "test_structured_outputs_regex_chat",
    "test_structured_outputs_choice_chat_logprobs",
)
def test_structured_outputs(demo_server: Server) -> None:
    choices, regex = ["Python", "Rust", "Haskell"], r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)"
    for seed in (1, 2):
        asked = {"temperature": 1, "seed": seed, "max_completion_tokens": 60}
        found = chat(
            demo_server,
            **asked,
            logprobs=True,
            top_logprobs=5,
            extra_body={"structured_outputs": {"choice": choices}},
        )
        assert found.choices[0].message.content in choices
        assert all(item.logprob >= -9999 for item in found.choices[0].logprobs.content[0].top_logprobs)
        address = chat(demo_server, **asked, extra_body={"structured_outputs": {"regex": regex}})
        assert re.fullmatch(regex, address.choices[0].message.content)
        person = chat(demo_server, **asked, extra_body={"structured_outputs": {"json": PERSON}})
        jsonschema.validate(json.loads(person.choices[0].message.content), PERSON)


@covers(CHAT, "test_structured_outputs_type_error")
@covers(COMPLETION, "test_invalid_json_schema", "test_invalid_regex", "test_invalid_grammar")
def test_structured_outputs_that_are_wrong(demo_server: Server) -> None:
    schema = {"type": "object", "properties": {"brand": {"type": "string"}, "foo": "bar"}}
    grammar = 'root ::= select_statementinvalidsyntax\n\ntable ::= "table_1 " | "table_2 "'
    for wrong in ({"regex": {"1": "Python"}}, {"json": schema}, {"regex": "[.*"}, {"grammar": grammar}):
        for ask in (chat, complete):
            with pytest.raises(openai.BadRequestError):
                ask(demo_server, extra_body={"structured_outputs": wrong})


@covers(CHAT, "test_response_format_json_object", "test_response_format_json_schema", "test_response_format_text")
def test_response_formats(demo_server: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    found = chat(demo_server, response_format=schema, max_completion_tokens=60)
    jsonschema.validate(json.loads(found.choices[0].message.content), PERSON)
    assert chat(demo_server, response_format={"type": "text"}).choices[0].message.content
    # An object is held to being one, whether the model comes to its end or not.
    braces = [demo_server.http.post("/tokenize", json={"prompt": each}).json()["tokens"] for each in ("{", "}")]
    bias = {str(token): 100 for tokens in braces for token in tokens[:1]}
    made = chat(
        demo_server, response_format={"type": "json_object"}, max_completion_tokens=60, logit_bias=bias
    ).choices[0]
    assert made.finish_reason == "stop"
    assert isinstance(json.loads(made.message.content), dict)


@covers(CHAT, "test_extra_fields_allowed", "test_complex_message_content", "test_custom_role")
def test_messages_of_other_shapes(demo_server: Server, models_server: Server) -> None:
    text = "what is 1+1?"
    plain = chat(demo_server, messages=[{"role": "user", "content": text}]).choices[0].message.content
    extra = [{"role": "user", "content": text, "extra_field": "0"}]
    assert chat(demo_server, messages=extra).choices[0].message.content == plain
    parts = [{"type": "text", "text": text}]
    assert chat(demo_server, messages=[{"role": "user", "content": parts}]).choices[0].message.content == plain
    custom = [
        chat(models_server, model="chat", messages=[{"role": "my-custom-role", "content": content}])
        for content in (text, parts)
    ]
    # Where the template takes such a role; this one does not.
    assert custom[0].choices[0].message.content == custom[1].choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="my-custom-role"):
        chat(demo_server, messages=[{"role": "my-custom-role", "content": text}])


@covers(
    CHAT,
    "test_chat_completion_n_parameter_non_streaming",
    "test_chat_completion_n_parameter_streaming",
    "test_chat_completion_n_with_seed",
)
@covers(COMPLETION, "test_parallel_no_streaming", "test_parallel_streaming")
def test_several_samples(demo_server: Server) -> None:
    many = {"n": 3, "temperature": 2, "seed": 42}
    whole = chat(demo_server, **many).choices
    assert [choice.index for choice in whole] == [0, 1, 2]
    assert len({choice.message.content for choice in whole}) > 1
    texts = [""] * 3
    for chunk in chat(demo_server, **many, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole]
    drawn = complete(demo_server, **many, max_tokens=50, logprobs=0).choices
    assert len({choice.text for choice in drawn}) == 3
    assert all(len(choice.logprobs.tokens) <= 50 and choice.finish_reason for choice in drawn)
    texts = [""] * 3
    for chunk in complete(demo_server, **many, max_tokens=50, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in drawn]


@covers(COMPLETION, "test_single_completion", "test_no_logprobs", "test_zero_logprobs", "test_some_logprobs")
def test_a_completion_of_text_or_tokens(demo_server: Server) -> None:
    found = complete(demo_server)
    assert (found.choices[0].finish_reason, found.usage.completion_tokens) == ("length", 5)
    assert found.usage.prompt_tokens_details.cached_tokens >= 0
    tokens = [10, 20, 30, 40, 50]
    assert complete(demo_server, prompt=tokens).usage.prompt_tokens == 5
    assert complete(demo_server, prompt=tokens, logprobs=None).choices[0].logprobs is None
    for count in (0, 5):
        logprobs = complete(demo_server, prompt=tokens, logprobs=count).choices[0].logprobs
        assert len(logprobs.token_logprobs) == 5
        assert max(count, 1) <= len(logprobs.top_logprobs[0]) <= count + 1


@covers(COMPLETION, "test_echo_logprob_completion")
def test_an_echoed_prompt_has_logprobs_too(demo_server: Server) -> None:
    text = "Hello, my name is"
    tokens = demo_server.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    for prompt in (text, tokens):
        for count in (0, 1):
            choice = complete(demo_server, prompt=prompt, echo=True, logprobs=count).choices[0]
            assert choice.text.startswith(text)
            logprobs = choice.logprobs
            assert len(logprobs.tokens) == len(logprobs.text_offset) == len(tokens) + 5
            assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
            assert all(max(count, 1) <= len(top) <= count + 1 for top in logprobs.top_logprobs[1:])
