"""/v1/responses: log-probabilities, conversations that are cut, and events of what runs in the background."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import Response
from support.items_harness import listening
from support.reply_reader import HERMES_REPLY, events_of, speaking
from support.server_harness import Answer, FakeClient, Front, tokenizer

from chairlift.config.server import ServerConfig
from chairlift.core.finished import FinishReason
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.errors import ConfigError, RequestFailed
from chairlift.server.http.exchange import INLINE_SIZE
from chairlift.server.models.sequence_service import SequenceService
from chairlift.server.openai import answers
from chairlift.server.openai.answers import named_logprobs
from chairlift.server.responses import event_log, output_items
from chairlift.server.responses.event_log import EventLog

LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
TOOL: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}}


def replying(text: str) -> FakeClient:
    words = tokenizer()
    return FakeClient([*words.encode(text), *words.encode("<|end|>")])


def run(test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(test(), 60))


async def post(front: Front, **body: Any) -> Answer:
    return await front.post("/v1/responses", {"input": "hi", "max_output_tokens": 30} | body)


async def show(front: Front, name: str, query: str = "", answer: Answer | None = None) -> Answer:
    return await front.call("GET", f"/v1/responses/{name}", query=query, answer=answer)


def push(front: Front, text: str, last: bool = False) -> None:
    """What a step gives the latest request: a text, or its end."""
    stream = front.client.streams[-1]
    ids = front.tokenizer.encode("<|end|>" if last else text, add_special_tokens=False)
    reason, detail = (FinishReason.STOP, ids[0]) if last else (None, None)
    stream.push(SequenceUpdate(stream.request.id, ids, reason, detail, None, None, 0, 0.0))


# Log-probabilities


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_texts_tokens(stream: bool) -> None:
    front = Front(replying("hello world"))
    answer = run(lambda: post(front, stream=stream, **LOGPROBS))
    events = events_of(answer.body) if stream else []
    made = events[-1]["response"] if stream else answer.json()
    assert made["top_logprobs"] == 2
    found = made["output"][0]["content"][0]["logprobs"]
    ids = front.tokenizer.encode("hello world", add_special_tokens=False)
    assert [each["token"] for each in found] == [front.tokenizer.token_text(token) for token in ids]
    assert b"".join(bytes(each["bytes"]) for each in found) == b"hello world"
    assert all(len(each["top_logprobs"]) == 2 and each["logprob"] == -0.5 for each in found)
    if stream:
        deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
        assert [each for delta in deltas for each in delta] == found
        (done,) = [event for event in events if event["type"] == "response.output_text.done"]
        assert done["logprobs"] == found
    Response.model_validate(made)
    # Without a number of others there are the tokens' own.
    plain = run(lambda: post(Front(replying("hello")), include=LOGPROBS["include"])).json()
    assert [each["top_logprobs"] for each in plain["output"][0]["content"][0]["logprobs"]] == [[]]
    assert run(lambda: post(Front(replying("hello")))).json()["output"][0]["content"][0]["logprobs"] == []


def test_logprobs_leave_out_thoughts_marks_and_calls() -> None:
    """However much the reader holds back, each text has the tokens that it is made of."""
    reply = "<think>\nso it is\n</think>\n\n" + "Ok, a < b." + HERMES_REPLY.partition("</think>")[2]
    front = speaking(Front(replying(reply)))
    made = run(lambda: post(front, max_output_tokens=150, tools=[TOOL], **LOGPROBS)).json()
    thought, message, call = made["output"]
    assert (thought["type"], call["type"]) == ("reasoning", "function_call")
    (part,) = message["content"]
    assert part["text"] == "Ok, a < b."
    assert b"".join(bytes(each["bytes"]) for each in part["logprobs"]) == b"Ok, a < b."
    assert "logprobs" not in thought["content"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_written_once_and_large_answers_beside_the_loop(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several events of the end have all of them."""
    named: list[int] = []
    on_loop: list[int] = []
    encode = msgspec.json.encode

    def watch_names(words: Any, entries: Any) -> Any:
        named.append(len(entries))
        return named_logprobs(words, entries)

    def watched(given: Any) -> bytes:
        made = encode(given)
        if threading.current_thread() is threading.main_thread():
            on_loop.append(len(made))
        return made

    monkeypatch.setattr(output_items, "named_logprobs", watch_names)
    monkeypatch.setattr(msgspec.json, "encode", watched)
    front = Front(replying("hello world " * 8))
    answer = run(lambda: post(front, stream=stream, max_output_tokens=100, **LOGPROBS | {"top_logprobs": 20}))
    events = events_of(answer.body) if stream else []
    made = events[-1]["response"] if stream else answer.json()
    assert len(json.dumps(made)) > INLINE_SIZE
    assert len(made["output"][0]["content"][0]["logprobs"]) == sum(named) > 15
    assert 0 < max(on_loop) < INLINE_SIZE
    kept = run(lambda: show(front, made["id"]))
    assert kept.json() == made


def test_an_answer_has_only_so_many_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream too, which ends with all of them."""
    monkeypatch.setattr(answers, "_MOST_LOGPROBS", 40)
    front = Front(replying("hello world " * 8))
    refused = run(lambda: post(front, max_output_tokens=100, **LOGPROBS))
    assert (refused.status, refused.error["param"]) == (400, "logprobs")
    assert "over 40 log-probabilities, too many for one document; ask for fewer" in refused.error["message"]
    last = events_of(run(lambda: post(front, max_output_tokens=100, stream=True, **LOGPROBS)).body)[-1]
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "invalid_prompt")
    assert "ask for fewer" in last["response"]["error"]["message"]
    assert 0 < 3 * len(last["response"]["output"][0]["content"][0]["logprobs"]) <= 40


def test_a_call_that_a_stop_cut_in_two_is_incomplete() -> None:
    front = speaking(Front(replying(HERMES_REPLY)))
    whole = run(lambda: post(front, max_output_tokens=150, tools=[TOOL])).json()["output"][-1]
    assert (whole["type"], whole["status"]) == ("function_call", "completed")
    cut = run(lambda: post(front, max_output_tokens=150, tools=[TOOL], stop=[whole["arguments"][-4:]])).json()
    assert (cut["output"][-1]["type"], cut["output"][-1]["status"]) == ("function_call", "incomplete")


# Conversations that are cut


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


def test_a_conversation_that_is_too_long_loses_its_beginning() -> None:
    front = Front(replying("ok"))
    long = "word " * 20
    items = said(*[f"{index} {long}" for index in range(9)])
    wanted = {"input": items, "instructions": "be", "truncation": "auto"}

    async def go() -> None:
        assert (await post(front, **wanted | {"truncation": "disabled"})).error["code"] == "context_length_exceeded"
        made = (await post(front, **wanted)).json()
        assert (made["status"], made["truncation"]) == ("completed", "auto")
        (request,) = front.client.requests
        text = front.tokenizer.decode(request.prompt_ids)
        kept = [index for index in range(9) if f"{index} {long}" in text]
        assert text.startswith(f"system: be\nuser: {kept[0]} word")
        assert kept == list(range(kept[0], 9))
        assert kept[0] % 2 == 0
        # It is the longest that leaves room for the answer: one turn more would not.
        more = front.tokenizer.encode("".join(f"{index} {long}" for index in (kept[0] - 2, kept[0] - 1)))
        assert len(request.prompt_ids) + 30 <= 200 < len(request.prompt_ids) + len(more) + 30
        # All of it is kept, and is cut again when it goes on.
        listed = await front.call("GET", f"/v1/responses/{made['id']}/input_items", query="limit=100")
        assert len(listed.json()["data"]) == 9
        again = await post(front, input="and", previous_response_id=made["id"], truncation="auto")
        assert again.json()["status"] == "completed"
        counted = await front.post("/v1/responses/input_tokens", wanted)
        assert counted.json()["input_tokens"] <= 150

    run(go)


def test_what_fits_is_left_whole_and_one_item_that_does_not_is_refused() -> None:
    async def go() -> None:
        for wanted in ({"input": said("a", "b", "c")}, {"input": "word " * 30, "max_output_tokens": None}):
            prompts = []
            for truncation in ("auto", "disabled"):
                front = Front(replying("ok"))
                assert (await post(front, **wanted, truncation=truncation)).status == 200
                prompts.append(front.client.requests[0].prompt_ids)
            assert prompts[0] == prompts[1]
        front = Front(replying("ok"))
        refused = await post(front, input=said("a", "b", "word " * 300), truncation="auto")
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        assert not front.client.requests

    run(go)


def test_no_output_is_left_without_its_call() -> None:
    """Where one turn is too long, its own items go, and outputs with their calls."""
    calls = []
    for index in range(8):
        call = {"type": "function_call", "call_id": f"{index}", "name": "add", "arguments": "{}"}
        calls += [call, {"type": "function_call_output", "call_id": f"{index}", "output": f"{index} " + "word " * 20}]

    async def go() -> None:
        front = Front(replying("ok"))
        made = await post(front, input=[*said("sum"), *calls], truncation="auto")
        assert made.status == 200, made.body
        text = front.tokenizer.decode(front.client.requests[0].prompt_ids)
        kept = [index for index in range(8) if f"tool: {index} word" in text]
        assert 0 < len(kept) < 8
        assert kept == list(range(kept[0], 8))
        assert text.count("assistant:") == len(kept)

    run(go)


@pytest.mark.parametrize("ids", ["ab", "aa"])
def test_an_output_that_does_not_fit_takes_its_call_along_and_not_the_rest(ids: str) -> None:
    """Neither a prompt of nothing, nor an output before its call, is what is left."""
    calls = []
    for name, words in zip(ids, (3, 300), strict=True):
        call = {"type": "function_call", "call_id": name, "name": "add", "arguments": "{}"}
        calls += [call, {"type": "function_call_output", "call_id": name, "output": "word " * words}]

    async def go() -> None:
        front = Front(replying("ok"))
        refused = await post(front, input=[*said("sum"), *calls], instructions="be", truncation="auto")
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        short = await post(front, input=[*said("word " * 300), *calls[:2], *calls[:2]], truncation="auto")
        assert short.status == 200, short.body

    run(go)


# Events of what runs in the background


def test_events_of_the_background_can_be_followed_from_anywhere() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        name = (await post(front, background=True)).json()["id"]
        early = asyncio.create_task(show(front, name, "stream=true"))
        push(front, "hello")
        while (await show(front, name)).json()["status"] != "in_progress":
            await asyncio.sleep(0)
        middle = asyncio.create_task(show(front, name, "stream=true&starting_after=2&include_obfuscation=false"))
        push(front, " world")
        await asyncio.sleep(0)
        push(front, "", last=True)
        whole = events_of((await early).body)
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert "".join(e["delta"] for e in whole if e["type"] == "response.output_text.delta") == "hello world"
        assert whole[-1]["type"] == "response.completed"
        assert events_of((await middle).body) == whole[3:]
        # So it can when it is over and packed.
        while front.responses.get(None, name).log._packed is None:
            await asyncio.sleep(0)
        for after in (-1, 0, 4, len(whole) - 1, 10**8):
            query = "stream=true" if after < 0 else f"stream=true&starting_after={after}"
            assert events_of((await show(front, name, query)).body) == whole[after + 1 :]
        assert (await show(front, name)).json() == whole[-1]["response"]

    run(go)


def test_background_can_be_streamed_from_the_beginning_and_outlives_its_reader() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        first = Answer()
        asked = asyncio.create_task(
            front.call("POST", "/v1/responses", {"input": "hi", "background": True, "stream": True}, answer=first)
        )
        while not front.client.streams:
            await asyncio.sleep(0)
        push(front, "hello")
        while not first.writes:
            await asyncio.sleep(0)
        front.gone.set()
        await asked
        front.gone.clear()
        begun = events_of(first.body)
        assert begun[0]["type"] == "response.created"
        assert begun[0]["response"]["background"]
        assert front.client.cancelled == []
        push(front, "", last=True)
        name, place = begun[0]["response"]["id"], len(begun) - 1
        rest = events_of((await show(front, name, f"stream=true&starting_after={place}")).body)
        assert rest[0]["sequence_number"] == len(begun)
        assert rest[-1]["response"]["output"][0]["content"][0]["text"] == "hello"

    run(go)


def test_followers_see_how_it_fails_and_that_it_is_cancelled() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        name = (await post(front, background=True)).json()["id"]
        followed = asyncio.create_task(show(front, name, "stream=true"))
        push(front, "hello")
        await asyncio.sleep(0.01)
        front.client.streams[0].give_up(RequestFailed("it broke"))
        last = events_of((await followed).body)[-1]
        assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "it broke")
        for end in ("cancel", "delete"):
            name = (await post(front, background=True)).json()["id"]
            followed = asyncio.create_task(show(front, name, "stream=true"))
            await asyncio.sleep(0)
            if end == "cancel":
                await front.call("POST", f"/v1/responses/{name}/cancel")
            else:
                await front.call("DELETE", f"/v1/responses/{name}")
            kinds = [event["type"] for event in events_of((await followed).body)]
            assert kinds == ["response.created", "response.queued"]

    run(go)


def test_who_follows_knows_the_response_before_its_turn_comes() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        name = (await post(front, background=True)).json()["id"]
        log = front.responses.get(None, name).log
        assert log is not None
        kinds = [event["type"] for event in events_of(await anext(log.after(-1)))]
        assert kinds == ["response.created", "response.queued"]

    run(go)


def test_packed_events_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.server.responses.event_log._PIECE", 100)
    events = [b"data: %d\n\n" % number for number in range(1000)]

    async def go() -> None:
        log = EventLog()
        log.add(events)
        waiting = asyncio.create_task(anext(log.after(998)))
        log.replace(await log.packed())
        log.end()
        assert await waiting == events[999]
        for after in (-1, 0, 500, 998, 999, 10**6):
            pieces = [piece async for piece in log.after(after)]
            assert b"".join(pieces) == b"".join(events[after + 1 :])
            assert max(map(len, pieces), default=0) < 200

    asyncio.run(go())


def test_packed_events_of_many_pieces_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is joined with no more than half an end of what came before it."""
    looked: list[int] = []

    class Piece(bytes):
        def __radd__(self, before: bytes) -> bytes:
            looked.append(len(before) + len(self))
            return before + bytes(self)

    async def in_pieces(size: int, work: Callable[[], bytes]) -> bytes:
        return Piece(work())

    events = [b"event: a\ndata: %b\n\n" % (b"x" * size) for size in (*range(90), 5000, 3)]

    async def go() -> None:
        log = EventLog()
        log.add(events)
        log.replace(await log.packed())
        log.end()
        monkeypatch.setattr(event_log, "_PIECE", 100)
        monkeypatch.setattr(event_log, "off_loop", in_pieces)
        assert b"".join([piece async for piece in log.after(-1)]) == b"".join(events)
        assert b"".join([piece async for piece in log.after(89)]) == b"".join(events[90:])
        assert 100 <= max(looked) <= 102

    asyncio.run(go())


def test_background_takes_only_so_long() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True), background_timeout_s=0.01)
        name = (await post(front, background=True)).json()["id"]
        while (made := (await show(front, name)).json())["status"] != "failed":
            await asyncio.sleep(0.001)
        assert "background_timeout_s" in made["error"]["message"]
        assert front.client.cancelled == [name]

    run(go)
    with pytest.raises(ConfigError, match="background_timeout_s"):
        ServerConfig(background_timeout_s=0)


def test_events_count_as_kept_bytes_and_less_when_it_is_over() -> None:
    async def go() -> None:
        front = Front(FakeClient([*tokenizer().encode("word " * 20), *tokenizer().encode("<|end|>")]))
        store = front.responses
        name = (await post(front, background=True, max_output_tokens=150)).json()["id"]
        kept, most = store.get(None, name), 0
        while kept.log._packed is None:
            most = max(most, store._size)
            assert store._size == kept.size
            await asyncio.sleep(0)
        assert store._size == kept.size < most
        await front.call("DELETE", f"/v1/responses/{name}")
        assert store._size == 0

    run(go)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=yes", "stream"),
        ("starting_after=3", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true&starting_after=-2", "starting_after"),
        ("stream=true&starting_after=" + "9" * 5000, "starting_after"),
        ("stream=true&starting_after=%C2%B2", "starting_after"),
        ("stream=true", "stream"),
    ],
    ids=lambda value: value[:40],
)
def test_what_can_not_be_followed_is_refused_by_name(query: str, param: str) -> None:
    async def go() -> None:
        front = Front(replying("ok"))
        background = query != "stream=true"
        name = (await post(front, background=background)).json()["id"]
        refused = await show(front, name, query)
        assert (refused.status, refused.error["param"]) == (400, param)
        assert (await show(front, "resp_no", "stream=true")).status == 404

    run(go)


def test_openais_client_resumes_a_stream() -> None:
    service = SequenceService(replying("hello world! "), tokenizer(), "tiny", ServerConfig())
    with listening(service) as it, openai.OpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0) as api:
        with api.responses.create(model="tiny", input="hi", background=True, stream=True) as stream:
            events = list(stream)
        assert events[-1].type == "response.completed"
        with api.responses.retrieve(events[-1].response.id, stream=True, starting_after=3) as stream:
            again = list(stream)
        assert [event.to_dict() for event in again] == [event.to_dict() for event in events[4:]]


# How much of it was reasoning


@pytest.mark.parametrize("stream", [False, True])
def test_usage_says_how_much_was_reasoning(stream: bool) -> None:
    async def go() -> None:
        front = speaking(Front(replying(HERMES_REPLY)))
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await front.chat(
            max_tokens=150, tools=[{"type": "function", "function": {"name": "add"}}], n=2, **more
        )
        usage = answer.events()[-1]["usage"] if stream else answer.json()["usage"]
        thought = len(front.tokenizer.encode("so", add_special_tokens=False))
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * thought}
        front = speaking(Front(replying("hello")))
        answer = await front.chat(max_tokens=150, **more)
        usage = answer.events()[-1]["usage"] if stream else answer.json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
        # A model that is not known to reason does not say.
        plain = await Front(replying("hello")).chat(**more)
        usage = plain.events()[-1]["usage"] if stream else plain.json()["usage"]
        assert "completion_tokens_details" not in usage
        response = await post(speaking(Front(replying(HERMES_REPLY))), max_output_tokens=150, stream=stream)
        made = events_of(response.body)[-1]["response"] if stream else response.json()
        assert made["usage"]["output_tokens_details"] == {"reasoning_tokens": thought}

    run(go)


def test_bodies_that_mean_harm_are_refused() -> None:
    """New fields with what nobody would send get an answer that says so."""
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    bodies: list[dict[str, Any]] = [
        {"top_logprobs": 10**30},
        {"top_logprobs": "2"},
        {"include": ["x" * 10_000]},
        {"include": ["message.output_text.logprobs"] * 5000 + ["y"]},
        {"truncation": {"type": deep}},
        {"truncation": "auto", "input": said(*["x"] * 16_385)},
        {"truncation": "auto", "input": [{"type": "function_call_output", "call_id": "1", "output": ""}] * 500},
        {"truncation": "auto", "input": "word " * 100_000},
        {"background": True, "stream": "yes"},
    ]

    async def go() -> None:
        for body in bodies:
            answer = await Front(replying("ok")).post("/v1/responses", json.dumps({"input": "hi"} | body).encode())
            assert answer.status == 400, (str(body)[:60], answer.body[:200])
        # A long conversation of short turns is cut in few tries.
        made = await post(Front(replying("ok")), input=said(*["x"] * 16_383), truncation="auto")
        assert made.json()["status"] == "completed"

    run(go)
