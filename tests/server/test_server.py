"""The OpenAI routes over a scripted engine: shapes, limits, errors, streaming, hanging up."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from support.server_harness import INFO, Answer, FakeClient, Front, full
from tokenizers import processors

from chairlift.core.finished import FinishReason
from chairlift.core.sequences.step import TokenLogprob
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.errors import RequestFailed, Unavailable
from chairlift.server.openai.body_types import NO_OPS


def run(test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(test(), 20))


def complete(**body: Any) -> Answer:
    async def go() -> Answer:
        return await Front().complete(**body)

    return run(go)


def chat(**body: Any) -> Answer:
    async def go() -> Answer:
        return await Front().chat(**body)

    return run(go)


# Completions


def test_completion_has_openai_shape() -> None:
    answer = complete(model="tiny", max_tokens=4)
    assert answer.status == 200
    made = answer.json()
    assert made["object"] == "text_completion"
    assert made["id"].startswith("cmpl-")
    assert made["model"] == "tiny"
    assert made["choices"] == [
        {"index": 0, "text": "hello world! ", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert made["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 4,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize(
    ("prompt", "count"), [("hi", 1), (["hi"], 1), (["hi", "you"], 2), ([1, 2], 1), ([[1, 2], [3], [4]], 3)]
)
def test_all_forms_of_prompt(prompt: Any, count: int) -> None:
    made = complete(prompt=prompt, n=2, max_tokens=1).json()
    assert [choice["index"] for choice in made["choices"]] == list(range(2 * count))


def test_samples_of_a_seed_differ_by_index_and_ids_by_place() -> None:
    async def go() -> None:
        front = Front()
        made = (await front.complete(prompt=["a", "b"], n=2, seed=5, max_tokens=1)).json()
        assert [r.params.seed for r in front.client.requests] == [5, 6, 5, 6]
        assert [r.id for r in front.client.requests] == [f"{made['id']}-{s}" for s in ("0-0", "0-1", "1-0", "1-1")]

    run(go)


def test_default_lengths() -> None:
    async def go() -> None:
        front = Front()
        await front.complete()
        await front.chat()
        first, second = front.client.requests
        assert first.max_tokens == 16
        assert second.max_tokens == 200 - len(second.prompt_ids)

    run(go)


def test_extras_reach_the_core() -> None:
    async def go() -> None:
        front = Front()
        extras = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}
        own = {
            "priority": -3,
            "cache_salt": "mine",
            "cache_prompt": False,
            "stop_token_ids": [7],
            "logit_bias": {"9": -100},
        }
        answer = await front.complete(max_tokens=2, skip_special_tokens=False, **extras, **own)
        assert answer.status == 200
        request = front.client.requests[0]
        for name, value in extras.items():
            assert getattr(request.params, name) == value
        assert (request.priority, request.cache_salt, request.stop_ids) == (-3, "mine", {7})
        assert not request.use_prefix_cache
        assert request.params.logit_bias == {9: -100}
        assert request.params.skip_special_tokens is False

    run(go)


def test_echo_puts_the_prompt_first() -> None:
    assert complete(echo=True, max_tokens=1).json()["choices"][0]["text"] == "hellohello"
    assert complete(echo=True, max_tokens=1, prompt=[1]).json()["choices"][0]["text"].endswith("hello")


def test_echo_alone_scores_the_prompt() -> None:
    made = complete(prompt="hello world", echo=True, max_tokens=0, logprobs=1).json()
    choice = made["choices"][0]
    assert choice["text"] == "hello world"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["hello", " world"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 5]
    assert made["usage"]["completion_tokens"] == 0


def test_the_newer_name_of_max_tokens_wins() -> None:
    for ask in (complete, chat):
        assert ask(max_tokens=5, max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2
        refused = ask(max_completion_tokens=-1).error
        assert refused["message"] == "max_completion_tokens must be at least 1, got -1"
    assert complete(echo=True, max_tokens=5, max_completion_tokens=0).json()["usage"]["completion_tokens"] == 0
    assert complete(max_completion_tokens=0).error["param"] == "max_completion_tokens"


@pytest.mark.parametrize(("skip", "text"), [(False, "<s>hello<|end|>"), (True, "hello"), (None, "hello")])
def test_echo_of_ids_shows_special_tokens_where_answers_do(skip: bool | None, text: str) -> None:
    ids = Front().tokenizer.encode("<s>hello<|end|>")
    made = complete(prompt=ids, echo=True, max_tokens=0, logprobs=0, skip_special_tokens=skip).json()["choices"][0]
    assert made["text"] == text
    offsets = made["logprobs"]["text_offset"]
    assert offsets == ([0, 3, 8] if skip is False else [0, 0, 5])


def test_offsets_are_those_of_the_text_that_was_sent() -> None:
    sent = "hello<|end|> world"
    made = complete(prompt=sent, parse_special=True, echo=True, max_tokens=1, logprobs=0).json()["choices"][0]
    assert made["text"] == sent + "hello"
    assert made["logprobs"]["text_offset"] == [0, 5, 12, 18]


def test_legacy_logprobs() -> None:
    logprobs = complete(echo=True, max_tokens=3, logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["hello", "hello", " world", "!"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 5, 10, 16]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])


def test_streamed_logprobs_join_to_the_whole() -> None:
    for echo in (False, True):
        body = {"prompt": ["hello", "hello world"], "n": 2, "max_tokens": 5, "logprobs": 1, "echo": echo}
        whole = complete(**body).json()["choices"]
        parts: list[dict[str, Any]] = [{"text": "", "logprobs": None, "finish_reason": None} for _ in whole]
        for event in complete(**body, stream=True).events():
            (choice,) = event["choices"]
            part = parts[choice["index"]]
            part["text"] += choice["text"]
            part["finish_reason"] = choice["finish_reason"]
            if part["logprobs"] is None:
                part["logprobs"] = choice["logprobs"]
            else:
                for name, values in choice["logprobs"].items():
                    part["logprobs"][name] += values
        for part, choice in zip(parts, whole, strict=True):
            assert part == {name: choice[name] for name in part}


def test_stop_string_ends_and_cancels() -> None:
    async def go() -> None:
        front = Front()
        made = (await front.complete(stop="wor", max_tokens=10)).json()
        assert made["choices"][0]["text"] == "hello "
        assert made["choices"][0]["finish_reason"] == "stop"
        assert made["choices"][0]["stop_reason"] == "wor"
        assert made["usage"]["completion_tokens"] == 2
        assert front.client.cancelled == [made["id"]]

    run(go)


# Chat


def test_chat_has_openai_shape() -> None:
    made = chat(max_completion_tokens=3).json()
    assert made["object"] == "chat.completion"
    assert made["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello world!", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]


def test_chat_logprobs_have_bytes() -> None:
    content = chat(max_tokens=1, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "hello"
    assert content[0]["bytes"] == list(b"hello")
    assert len(content[0]["top_logprobs"]) == 2
    assert chat(max_tokens=1, logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_chat_stream_has_role_text_finish_usage() -> None:
    events = chat(max_tokens=2, stream=True, stream_options={"include_usage": True}).events()
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "hello"}, {"content": " world"}, {}]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, None, "length"]
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 2
    assert len({event["id"] for event in events}) == 1


def test_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = complete(max_tokens=3, stream=True, stream_options=options).events()
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]
    assert all("usage" not in event for event in _stream(continuous_usage_stats=True))


def _stream(**options: Any) -> list[Any]:
    return complete(max_tokens=2, stream=True, stream_options=options).events()


@pytest.mark.parametrize("body", [{}, {"logprobs": True}, {"stop": "wor"}])
def test_continuous_usage_of_a_chat_grows_with_every_event(body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chat(max_tokens=3, stream=True, stream_options=options, **body).events()
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[0] == 0
    assert counts[:-1] == sorted(set(counts[:-1]))
    assert counts[-1] == counts[-2]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1] if event["choices"][0]["finish_reason"]]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]).startswith("hello")


@pytest.mark.parametrize("most", [11, 12])
def test_a_document_has_so_many_logprobs_at_most(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Of two samples of two tokens each, three of a token: twelve."""
    monkeypatch.setattr("chairlift.server.openai.answers._MOST_LOGPROBS", most)
    wanted: dict[str, Any] = {"max_tokens": 2, "n": 2}
    for answer in (complete(logprobs=2, **wanted), chat(logprobs=True, top_logprobs=2, **wanted)):
        assert answer.status == (200 if most == 12 else 400)
        assert ("stream it" in answer.body.decode()) == (most == 11)
    assert len(complete(logprobs=2, stream=True, **wanted).events()) == 4


def test_usage_in_a_stream_is_that_of_its_choice() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["hello", "hello world"], "n": 2, "max_tokens": 2, "stream": True, "stream_options": options}
    *events, last = complete(**body).events()
    for event in events:
        (choice,) = event["choices"]
        assert event["usage"]["prompt_tokens"] == 1 + choice["index"] // 2
        assert event["usage"]["completion_tokens"] in (1, 2)
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 8)


def test_streams_of_one_step_leave_in_one_write() -> None:
    answer = complete(prompt=["a", "b"], n=4, max_tokens=3, stream=True)
    assert len(answer.writes) == 3
    assert len(answer.events()) == 8 * 3


def test_events_are_one_line_for_every_splitter() -> None:
    async def go() -> None:
        front = Front()
        ids = front.tokenizer.encode("a\u2028b\u2029c\x85d\ne")
        front = Front(FakeClient(ids))
        for ask in (front.chat, front.complete):
            answer = await ask(max_tokens=len(ids), stream=True)
            assert len(answer.body.decode().splitlines()) == answer.body.count(b"\n")
            assert json.loads(json.dumps(answer.events()))

    run(go)


def test_chat_lengths_and_alternatives_are_checked() -> None:
    assert chat(max_completion_tokens=0).error["param"] == "max_completion_tokens"
    refused = chat(max_tokens=0).error
    assert refused["param"] == "max_tokens"
    assert refused["message"] == "max_tokens must be at least 1, got 0"
    assert chat(top_logprobs=2).error["param"] == "top_logprobs"
    assert chat(logprobs=True, top_logprobs=21).error["param"] == "top_logprobs"
    assert chat(max_tokens=1000).error["code"] == "context_length_exceeded"
    for name in ("self", "messages", "add_generation_prompt", "chat_template"):
        assert chat(chat_template_kwargs={name: []}).error["param"] == "chat_template_kwargs"
    assert (
        chat(chat_template_kwargs={"enable_thinking": False}, add_generation_prompt=False, max_tokens=1).status == 200
    )


def test_chat_needs_messages_with_roles() -> None:
    assert chat(messages=[]).error["param"] == "messages"
    assert chat(messages=[{"content": "x"}]).error["param"] == "messages[0].role"
    part = {"type": "image_url", "image_url": {"url": "x"}}
    assert "image_url" in chat(messages=[{"role": "user", "content": [part]}]).error["message"]
    assert chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}], max_tokens=1).status == 200


def test_answers_have_a_fingerprint() -> None:
    prints = {ask(max_tokens=1).json()["system_fingerprint"] for ask in (complete, chat)}
    prints |= {event["system_fingerprint"] for event in chat(max_tokens=1, stream=True).events()}
    (found,) = prints
    assert found.startswith("fp_")


def test_prompt_logprobs_as_vllm_has_them() -> None:
    made = complete(prompt=["hello world", "hello"], n=2, max_tokens=1, prompt_logprobs=2).json()
    first = made["choices"][1]["prompt_logprobs"]
    assert first[0] is None
    (world,) = Front().tokenizer.encode(" world")
    assert first[1][str(world)] == {"logprob": -0.5, "rank": 1, "decoded_token": " world"}
    assert first[1][str(world + 1)]["rank"] == 2
    assert len(first) == len(first[1]) == 2
    assert made["choices"][2]["prompt_logprobs"] == [None]
    asked = chat(max_tokens=1, prompt_logprobs=0).json()
    assert asked["prompt_logprobs"][0] is None
    assert all(len(entry) == 1 for entry in asked["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in chat(max_tokens=1).json()
    assert [*asked][-1] == "usage", "where batches look for it"


def test_two_counts_of_prompt_logprobs_go_together() -> None:
    choice = complete(prompt="hello world", echo=True, max_tokens=1, logprobs=3, prompt_logprobs=1).json()["choices"][0]
    assert len(choice["prompt_logprobs"][1]) == 1
    assert len(choice["logprobs"]["top_logprobs"][1]) == 3


def test_tokens_may_be_named_by_their_ids() -> None:
    body = {"max_tokens": 2, "return_tokens_as_token_ids": True}
    hello, world = Front().tokenizer.encode("hello world")
    legacy = complete(logprobs=1, echo=True, **body).json()["choices"][0]["logprobs"]
    assert legacy["tokens"] == [f"token_id:{each}" for each in (hello, hello, world)]
    assert f"token_id:{world}" in legacy["top_logprobs"][-1]
    content = chat(logprobs=True, top_logprobs=1, **body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{each}" for each in (hello, world)]
    assert content[0]["top_logprobs"][0]["token"] == f"token_id:{hello}"


@pytest.mark.parametrize(
    ("tokens", "form"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "0a1b2"),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), "0a1b2"),
        (("[PREFIX]", "[SUFFIX]"), "1b0a"),
    ],
)
def test_what_is_between_is_filled_in(tokens: tuple[str, ...], form: str) -> None:
    async def go() -> None:
        front = Front()
        backend = front.tokenizer.backend
        backend.add_special_tokens(list(tokens))
        front.client.info = msgspec.structs.replace(INFO, vocab_size=400)
        known = {str(index): [backend.token_to_id(token)] for index, token in enumerate(tokens)}
        known |= {"a": front.tokenizer.encode("hello <s>", parse_special=False), "b": front.tokenizer.encode(" world")}
        made = await front.complete(prompt=["hello <s>", "x"], suffix=" world", max_tokens=1)
        assert made.status == 200, made.body
        assert front.client.requests[0].prompt_ids == [each for letter in form for each in known[letter]]
        assert (await front.complete(suffix="", prompt=[1], max_tokens=1)).status == 200

    run(go)


def test_what_is_excluded_reaches_the_core() -> None:
    async def go() -> None:
        front = Front()
        assert (await front.chat(max_tokens=1, allowed_token_ids=[3, 4], bad_words=["hello"], n=2)).status == 200
        hello, spaced = (front.tokenizer.encode(text) for text in ("hello", " hello"))
        assert len(hello) == len(spaced)
        for request in front.client.requests:
            assert request.params.allowed_token_ids == [3, 4]
            assert request.params.bad_words is None
            assert request.bad_word_ids == [hello, spaced]
        await front.complete(max_tokens=1, allowed_token_ids=[], bad_words=[])
        assert front.client.requests[-1].bad_word_ids == []

    run(go)


def test_words_with_tokens_that_the_model_has_not_are_no_harm() -> None:
    async def go() -> None:
        front = Front()
        most = max(front.tokenizer.encode("hello"))
        front.client.info = msgspec.structs.replace(INFO, vocab_size=most)
        words = front.tokenizer.word_ids(["hello", "a"])
        assert (await front.complete(prompt=[1], max_tokens=1, bad_words=["hello", "a"])).status == 200
        within = [ids for ids in words if max(ids) < most]
        assert 0 < len(within) < len(words)
        assert front.client.requests[-1].bad_word_ids == within

    run(go)


def test_best_of_returns_the_likeliest() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        body = {"prompt": ["a", "b"], "n": 2, "best_of": 3, "logprobs": 0}
        task = asyncio.create_task(front.complete(**body))
        await _until(lambda: front.client.streams)
        assert [stream.request.params.logprobs for stream in front.client.streams] == [0] * 6
        # By the mean: the first is as likely a token as the others', and has more of them.
        tokens = [[70, 70], [71], [72], [73], [74], [75]]
        for stream, ids, each in zip(front.client.streams, tokens, [-1.0, -2.0, -0.5, -3.0, -2.0, -1.0], strict=True):
            logprobs = [TokenLogprob(token, each, 1, []) for token in ids]
            stream.push(SequenceUpdate(stream.request.id, ids, FinishReason.LENGTH, None, logprobs))
        made = (await task).json()
        assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
        names = [choice["logprobs"]["tokens"] for choice in made["choices"]]
        assert names == [[front.tokenizer.token_text(each) for each in tokens[best]] for best in (2, 0, 5, 4)]
        assert made["usage"]["completion_tokens"] == 7
        assert made["usage"]["prompt_tokens"] == 2

    run(go)


def test_best_of_of_n_is_all_of_them() -> None:
    made = complete(n=2, best_of=2, max_tokens=1).json()
    assert [choice["logprobs"] for choice in made["choices"]] == [None, None]


def test_what_the_tokenizer_puts_around_a_prompt_may_be_left_out() -> None:
    async def go() -> None:
        front = Front()
        special = [("<s>", front.tokenizer.backend.token_to_id("<s>"))]
        front.tokenizer.backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=special)
        for add, ids in ((None, 2), (True, 2), (False, 1)):
            await front.complete(max_tokens=1, add_special_tokens=add)
            assert len(front.client.requests[-1].prompt_ids) == ids

    run(go)


def test_a_final_message_is_continued_and_echoed() -> None:
    async def go() -> None:
        front = Front()
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
        body = {"messages": messages, "max_tokens": 1, "continue_final_message": True}
        made = (await front.chat(**body, echo=True)).json()
        assert front.tokenizer.decode(front.client.requests[0].prompt_ids) == "user: hi\nassistant: hello"
        assert made["choices"][0]["message"]["content"] == "hellohello"
        assert (await front.chat(**body)).json()["choices"][0]["message"]["content"] == "hello"
        deltas = [event["choices"][0]["delta"] for event in (await front.chat(**body, echo=True, stream=True)).events()]
        assert deltas == [{"role": "assistant", "content": "hello"}, {"content": "hello"}, {}]
        both = await front.chat(**body, add_generation_prompt=True)
        assert (both.status, both.error["param"]) == (400, "continue_final_message")
        parts = {"role": "assistant", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]}
        made = (await front.chat(**(body | {"messages": [parts]}), echo=True)).json()
        assert made["choices"][0]["message"]["content"] == "hellohello"
        for content in (5, {"a": 1}):
            odd = {"messages": [{"role": "assistant", "content": content}], "max_tokens": 1, "echo": True}
            refused = await front.chat(**odd)
            assert (refused.status, refused.error["param"]) == (400, "messages[0].content")
        assert (await front.chat(echo=True, max_tokens=1)).json()["choices"][0]["message"]["content"] == "hello"

    run(go)


def test_an_assistant_may_have_no_content_and_a_developer_speak() -> None:
    said = [{"role": "developer", "content": "x"}, {"role": "assistant"}, {"role": "assistant", "content": None}]
    assert chat(messages=said, max_tokens=1).status == 200
    refused = chat(messages=[{"role": "user", "content": None}])
    assert (refused.status, refused.error["param"]) == (400, "messages[0].content")


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_unknown_fields_that_ask_for_nothing_are_taken(value: Any) -> None:
    assert complete(max_tokens=1, unheard_of=value, another=value).status == 200
    assert chat(max_tokens=1, unheard_of=value).status == 200


def test_whole_numbers_may_be_written_as_floats() -> None:
    made = complete(max_tokens=3.0, n=2.0, top_k=5.0, temperature=1.0, min_tokens=0.0, seed=-0.0, unheard_of=None)
    assert made.status == 200, made.body
    assert made.json()["usage"]["completion_tokens"] == 6
    assert chat(max_completion_tokens=2.0, priority=-1.0).json()["usage"]["completion_tokens"] == 2

    async def go() -> None:
        answer = await Front().post("/v1/completions", b'{"prompt": "hello", "max_tokens": 1e1, "echo": null}')
        assert answer.json()["usage"]["completion_tokens"] == 10

    run(go)


@pytest.mark.parametrize(("value", "kind"), [(2.5, "float"), (1e30, "float"), (True, "bool"), ("2.0", "str")])
def test_other_numbers_than_whole_ones_are_refused_as_before(value: Any, kind: str) -> None:
    for body in ({"max_tokens": value}, {"max_tokens": value, "n": 1.0}):
        answer = complete(**body)
        assert (answer.status, answer.error["param"]) == (400, "max_tokens")
        assert answer.error["message"] == f"max_tokens: expected int | null, got {kind}"


def test_a_model_may_have_several_names() -> None:
    async def go() -> None:
        front = Front(model_aliases={"gpt-4o": "tiny", "other": "gone"})
        assert (await front.complete(model="gpt-4o", max_tokens=1)).json()["model"] == "tiny"
        listed = (await front.call("GET", "/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["tiny", "gpt-4o"]
        assert (await front.call("GET", "/v1/models/gpt-4o")).json()["id"] == "gpt-4o"
        assert "`gpt-4o`" in (await front.complete(model="other")).error["message"]

    run(go)


def test_an_empty_model_is_the_only_one() -> None:
    assert complete(model="", max_tokens=1).json()["model"] == "tiny"


# Refusals


@pytest.mark.parametrize("name", sorted(NO_OPS))
def test_unimplemented_fields_are_refused_by_name(name: str) -> None:
    answer = chat(**{name: "something"})
    assert answer.status == 400
    assert answer.error["param"] == name
    assert answer.error["message"].startswith(name)
    for value in (None, False, "", [], {}, *NO_OPS[name]):
        assert chat(max_tokens=1, **{name: value}).status == 200


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"wrong": 1}, "wrong", "unknown_field"),
        ({"prompt": [1, True]}, "prompt[1]", None),
        ({"temperature": "hot"}, "temperature", None),
        ({"temperature": -1}, "temperature", None),
        ({"top_p": 0}, "top_p", None),
        ({"n": 0}, "n", None),
        ({"n": 65}, "n", None),
        ({"n": 2**40}, "n", None),
        ({"top_k": 2**80}, "top_k", None),
        ({"seed": 2**64}, "seed", None),
        ({"seed": 2**64 - 1, "n": 2}, "seed", None),
        ({"suffix": "x"}, "suffix", None),
        ({"suffix": "x", "echo": True}, "suffix", None),
        ({"suffix": "x", "prompt": [1]}, "suffix", None),
        ({"suffix": 5}, "suffix", None),
        ({"suffix": "x" * 2000}, "prompt", "context_length_exceeded"),
        ({"allowed_token_ids": [330]}, "allowed_token_ids", None),
        ({"allowed_token_ids": [1] * 8193}, "allowed_token_ids", None),
        ({"allowed_token_ids": "1"}, "allowed_token_ids", None),
        ({"bad_words": ["x"] * 65}, "bad_words", None),
        ({"bad_words": ["x" * 257]}, "bad_words", None),
        ({"bad_words": [" "]}, "bad_words", None),
        ({"best_of": 65}, "best_of", None),
        ({"best_of": 1, "n": 2}, "best_of", None),
        ({"best_of": -1}, "best_of", None),
        ({"best_of": 3, "stream": True}, "best_of", None),
        ({"prompt_logprobs": 21}, "prompt_logprobs", None),
        ({"prompt_logprobs": -1}, "prompt_logprobs", None),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", None),
        ({"wrong": 0}, "wrong", "unknown_field"),
        ({"wrong": True, "neutral": None}, "wrong", "unknown_field"),
        ({"wrong": [None]}, "wrong", "unknown_field"),
        ({"neutral": None, "stream": True, "stream_options": {"what": 1}}, "stream_options.what", "unknown_field"),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"max_tokens": -1}, "max_tokens", None),
        ({"max_tokens": 500}, "prompt", "context_length_exceeded"),
        ({"prompt": [1] * 201}, "prompt", "context_length_exceeded"),
        ({"prompt": []}, "prompt", None),
        ({"prompt": ""}, "prompt", None),
        ({"prompt": [[]]}, "prompt", None),
        ({"prompt": ["a", 1]}, "prompt", None),
        ({"prompt": ["a"] * 257}, "prompt", None),
        ({"prompt": ["a"] * 200, "n": 60}, "n", None),
        ({"prompt": [330]}, "prompt", None),
        ({"prompt": [-1]}, "prompt", None),
        ({"prompt": [1.5]}, "prompt[0]", None),
        ({"prompt": "\ud800"}, None, "invalid_json"),
        ({"logit_bias": {"400": 1}}, "logit_bias", None),
        ({"logit_bias": {"1": 101}}, "logit_bias", None),
        ({"stop_token_ids": [330]}, "stop_token_ids", None),
        ({"stop_token_ids": [1] * 257}, "stop_token_ids", None),
        ({"stop": ""}, "stop", None),
        ({"stop": ["a"] * 17}, "stop", None),
        ({"stop": "a" * 257}, "stop", None),
        ({"stop": ["a" * 205] * 5}, "stop", None),
        ({"logprobs": 21}, "logprobs", None),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what", "unknown_field"),
        ({"stream": True, "stream_options": {"what": 1, "why": None}}, "stream_options.what", "unknown_field"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", None),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_values_are_refused_by_name(body: dict[str, Any], param: str | None, code: str | None) -> None:
    answer = complete(**body)
    assert answer.status == 400, answer.body
    assert (answer.error["param"], answer.error["code"]) == (param, code), answer.body
    assert answer.error["type"] == "invalid_request_error"


def test_metadata_is_ignored() -> None:
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"}
    assert complete(max_tokens=1, **ignored).status == 200
    assert chat(max_tokens=1, parallel_tool_calls=False, safety_identifier="x", **ignored).status == 200


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt":' + b"[" * 100_000]
)
def test_rubbish_bodies_are_400(raw: bytes) -> None:
    async def go() -> None:
        for path in ("/v1/completions", "/v1/chat/completions"):
            answer = await Front().post(path, raw)
            assert answer.status == 400, answer.body
            assert answer.error["message"]

    run(go)


def test_deep_messages_are_400() -> None:
    raw = b'{"messages":[{"role":"user","content":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"

    async def go() -> None:
        assert (await Front().post("/v1/chat/completions", raw)).error["code"] == "invalid_json"

    run(go)


def test_unknown_model_and_path_and_method() -> None:
    answer = complete(model="gpt-4")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert "tiny" in answer.error["message"]

    async def go() -> None:
        front = Front()
        assert (await front.call("GET", "/v1/models/other")).error["code"] == "model_not_found"
        assert (await front.call("GET", "/v1/models/tiny")).json()["max_model_len"] == 200
        for path in ("/v1/models", "/v1/models/"):
            assert [m["id"] for m in (await front.call("GET", path)).json()["data"]] == ["tiny"]
        for path, meant in (
            ("/chat/completions", "; did you mean /v1/chat/completions? A client's base URL ends in /v1"),
            ("/models/tiny", "; did you mean /v1/models/tiny? A client's base URL ends in /v1"),
            ("/v1/v1/messages", "; did you mean /v1/messages? Leave one /v1 out of the client's base URL"),
            ("/v1/uploads", "; a file comes in one piece: POST it to /v1/files"),
            ("/v1/uploads/upload_1/parts", "; a file comes in one piece: POST it to /v1/files"),
            ("/v1/v1/nothing", ""),
            ("/nothing", ""),
        ):
            told = (await front.post(path, {})).error
            assert (told["message"], told["code"]) == (f"there is no {path} here{meant}", "not_found")
        nowhere = await front.call("GET", "/nowhere")
        assert (nowhere.status, nowhere.error["code"]) == (404, "not_found")
        wrong = await front.call("GET", "/v1/completions")
        assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
        assert wrong.error["code"] == "method_not_allowed"

    run(go)


def test_large_body_is_refused_as_it_streams() -> None:
    async def go() -> None:
        front = Front(max_body_bytes=1000)
        chunks = [b" " * 400] * 6
        answer = await front.post("/v1/completions", None, chunks=chunks)
        assert answer.status == 413
        assert "1000 bytes (max_body_bytes)" in answer.error["message"]
        assert answer.headers["connection"] == "close"

    run(go)


def test_slow_body_and_wrong_type_are_refused() -> None:
    async def go() -> None:
        front = Front(body_timeout_s=0.05)
        answer = Answer()
        app_waits = [b"{", b"}"]

        async def receive() -> dict[str, Any]:
            if len(app_waits) == 2:
                return {"type": "http.request", "body": app_waits.pop(), "more_body": True}
            await asyncio.sleep(10)
            raise AssertionError

        async def send(message: Any) -> None:
            answer.status = message.get("status", answer.status)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await front.app(scope, receive, send)  # type: ignore[arg-type]
        assert answer.status == 408
        assert (await front.post("/v1/completions", {}, headers={"content-type": "text/plain"})).status == 415
        assert (await front.post("/v1/completions", {}, headers={"content-encoding": "br"})).status == 415

    run(go)


@pytest.mark.parametrize("how", ["gzip", "deflate", " GZIP"])
def test_bodies_may_come_compressed(how: str) -> None:
    pack = zlib.compress if how == "deflate" else gzip.compress

    async def go() -> None:
        front = Front(max_body_bytes=2_500_000)
        headers = {"content-encoding": how}

        async def send(raw: bytes) -> Answer:
            return await front.post("/v1/completions", raw, headers=headers)

        raw = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
        assert (await send(pack(raw))).status == 200
        # More than is unpacked at a time.
        assert (await send(pack(raw[:-1] + b" " * 2_400_000 + b"}"))).status == 200
        large = await send(pack(raw + b" " * 10_000_000))
        assert (large.status, large.error["code"]) == (413, "body_too_large")
        for rubbish in (raw, b"", pack(raw)[:-9], pack(raw) + b"x", pack(raw) * 2):
            wrong = await send(rubbish)
            assert (wrong.status, wrong.error["code"]) == (400, "invalid_encoding"), rubbish

    run(go)


def test_key_is_asked_for_where_it_matters() -> None:
    async def go() -> None:
        front = Front(api_key="secret")
        refused = await front.complete()
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
        wrong = await front.call("GET", "/v1/models", headers={"authorization": "Bearer sécret"})
        assert wrong.status == 401
        assert (await front.call("GET", "/v1/models", headers={"authorization": "Bearer secret"})).status == 200
        assert (await front.call("GET", "/health/ready")).status == 200
        assert (await front.call("GET", "/metrics")).status == 200

    run(go)


# When the engine says no


@pytest.mark.parametrize("stream", [False, True])
def test_full_queue_and_unavailable_have_retry_after(stream: bool) -> None:
    async def go() -> None:
        front = Front()
        front.client.refusal = full(2.2)
        answer = await front.complete(stream=stream)
        assert (answer.status, answer.headers["retry-after"], answer.error["code"]) == (429, "3", "queue_full")
        front.client.refusal = None
        front.client.state = "restarting"
        answer = await front.complete(stream=stream)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "restarting" in answer.error["message"]
        front.client.info, front.client.state = None, "loading"
        assert (await front.complete(stream=stream)).status == 503

    run(go)


def test_readiness_tells_the_state() -> None:
    async def go() -> None:
        front = Front()
        assert (await front.call("GET", "/health/ready")).status == 200
        front.client.state, front.client.failure = "failed", "no memory"
        answer = await front.call("GET", "/health/ready")
        assert (answer.status, answer.json()["status"], answer.json()["failure"]) == (503, "failed", "no memory")
        assert (await front.call("GET", "/health/live")).status == 200

    run(go)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_the_request(stream: bool) -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        body, headers = {"prompt": "hello", "stream": stream, "n": 2}, {"X-Request-Timeout-Ms": "20"}
        answer = await front.post("/v1/completions", body, headers=headers)
        assert answer.status == 504
        assert "20 ms" in answer.error["message"]
        assert len(front.client.cancelled) == 2

    run(go)


def test_a_deadline_amid_a_stream_is_its_last_event() -> None:
    async def go() -> None:
        front, answer = Front(FakeClient(manual=True)), Answer()
        body, headers = {"prompt": "hello", "stream": True}, {"X-Request-Timeout-Ms": "200"}
        task = asyncio.create_task(front.post("/v1/completions", body, headers=headers, answer=answer))
        await _until(lambda: front.client.streams)
        stream = front.client.streams[0]
        stream.push(SequenceUpdate(stream.request.id, [70]))
        await task
        assert answer.status == 200
        assert "200 ms" in answer.body.decode().strip().split("\n\n")[-1]
        assert front.client.cancelled == [stream.request.id]

    run(go)


def test_priority_may_come_in_a_header() -> None:
    async def go() -> None:
        front = Front()
        headers = {"X-Request-Priority": "3"}
        await front.post("/v1/completions", {"prompt": "hello"}, headers=headers)
        await front.post("/v1/completions", {"prompt": "hello", "priority": -1}, headers=headers)
        assert [request.priority for request in front.client.requests] == [3, -1]
        assert (
            await front.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Timeout-Ms": "-1"})
        ).status == 400

    run(go)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status"), [(Unavailable("it died"), 503), (RequestFailed("boom"), 500)])
def test_failure_before_the_first_token_is_a_status(stream: bool, error: Exception, status: int) -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        task = asyncio.create_task(front.complete(stream=stream, n=2))
        await _until(lambda: front.client.streams)
        front.client.streams[0].close(error)
        answer = await task
        assert answer.status == status
        assert answer.error["message"] == str(error)
        assert front.client.cancelled == [front.client.requests[1].id]
        assert front.service.metrics.finished["error"] == 2
        assert front.service.metrics.finished.total() == 2

    run(go)


def test_failure_amid_a_stream_is_its_last_event() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        answer = Answer()
        body = {"prompt": "hello", "stream": True}
        task = asyncio.create_task(front.post("/v1/completions", body, answer=answer))
        await _until(lambda: front.client.streams)
        stream = front.client.streams[0]
        stream.push(SequenceUpdate(stream.request.id, [70]))
        await _until(lambda: answer.writes)
        stream.close(Unavailable("the worker died"))
        await task
        assert answer.status == 200
        assert answer.complete
        last = answer.body.decode().strip().split("\n\n")[-1]
        error = msgspec.json.decode(last.removeprefix("data: "))
        assert error["error"]["message"] == "the worker died"

    run(go)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_hanging_up_cancels_at_once(stream: bool, begun: bool, n: int) -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        task = asyncio.create_task(front.complete(stream=stream, n=n))
        await _until(lambda: front.client.streams)
        if begun:
            for each in front.client.streams:
                each.push(SequenceUpdate(each.request.id, [70]))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not front.client.cancelled
        front.gone.set()
        await asyncio.wait_for(task, 1)
        assert sorted(front.client.cancelled) == [request.id for request in front.client.requests]
        assert front.service.metrics.finished["abort"] == n
        assert len(asyncio.all_tasks()) == 2  # this one and its timeout

    run(go)


def test_unexpected_error_is_a_plain_500() -> None:
    async def go() -> None:
        front = Front()
        front.client.refusal = RuntimeError("secret detail")
        answer = await front.complete()
        assert answer.status == 500
        assert b"secret" not in answer.body
        assert answer.error["type"] == "server_error"
        counted = 'chairlift_http_requests_total{code="500",method="POST",route="/v1/completions"} 1.0'
        assert counted in (await front.call("GET", "/metrics")).body.decode()

    run(go)


def test_finish_by_eos_is_stop() -> None:
    async def go() -> None:
        front = Front()
        end = front.tokenizer.eos_ids[0]
        client = FakeClient([*front.tokenizer.encode("hello"), end])
        made = (await Front(client).complete()).json()
        assert made["choices"][0]["text"] == "hello"
        assert made["choices"][0]["finish_reason"] == FinishReason.STOP.value
        assert made["choices"][0]["stop_reason"] is None

    run(go)


async def _until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)
