"""What one request may ask for is bounded, so that no request holds up the others."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest
from support.server_harness import Front, until

from chairlift.engine.sequences.messages import Add, SequencesToWorker
from chairlift.server.http.exchange import INLINE_SIZE, LARGE_SIZE, off_loop
from chairlift.server.openai import answers
from chairlift.text.stop import StopAutomaton


def run(go: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(go(), 20))


@pytest.mark.parametrize(
    ("limits", "stop", "name"),
    [
        ({"max_stop_strings": 1}, ["a", "b"], "max_stop_strings"),
        ({"max_stop_chars": 3}, "abcd", "max_stop_chars"),
        ({"max_stop_chars_total": 5}, ["abc", "def"], "max_stop_chars_total"),
    ],
)
def test_a_server_may_take_fewer_and_shorter_stop_strings(limits: dict[str, int], stop: Any, name: str) -> None:
    async def go() -> None:
        front = Front(**limits)
        for answer in (await front.complete(stop=stop), await front.chat(stop=stop)):
            assert (answer.status, answer.error["param"]) == (400, "stop")
            assert f"({name})" in answer.error["message"]
        assert (await front.complete(stop="abc", max_tokens=1)).status == 200

    run(go)


def test_samples_of_a_request_share_one_automaton(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[list[str]] = []

    class Counted(StopAutomaton):
        def __init__(self, stops: Any) -> None:
            built.append(list(stops))
            super().__init__(stops)

    monkeypatch.setattr("chairlift.text.detokenize.StopAutomaton", Counted)

    async def go() -> None:
        made = (await Front().complete(prompt=["a"] * 4, n=8, stop=["wor", "x" * 256], max_tokens=10)).json()
        assert [choice["stop_reason"] for choice in made["choices"]] == ["wor"] * 32

    run(go)
    assert built == [["wor", "x" * 256]]


def test_stop_ids_are_one_set_for_all_samples_and_reach_the_worker_as_a_set() -> None:
    async def go() -> None:
        front = Front()
        wanted = [*range(250), 3, 3]
        assert (await front.complete(n=3, stop_token_ids=wanted, max_tokens=1)).status == 200
        first, *others = front.client.requests
        assert first.stop_ids == {*wanted, *front.tokenizer.eos_ids}
        assert all(other.stop_ids is first.stop_ids for other in others)
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(Add(first)), type=SequencesToWorker)
        assert isinstance(sent, Add)
        assert isinstance(sent.request.stop_ids, frozenset)
        assert sent.request == first

    run(go)


def test_bad_words_are_tokenized_once_and_many_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        front = Front()
        threads: list[threading.Thread] = []
        word_ids = front.tokenizer.word_ids

        def note(words: Sequence[str]) -> list[list[int]]:
            threads.append(threading.current_thread())
            return word_ids(words)

        monkeypatch.setattr(front.tokenizer, "word_ids", note)
        loop = threading.current_thread()
        assert (await front.complete(prompt=["a"] * 4, n=2, max_tokens=1, bad_words=["hello"])).status == 200
        assert threads == [loop]
        for ask in (front.complete, front.chat):
            threads.clear()
            assert (await ask(max_tokens=1, n=2, bad_words=["x" * 200] * 64)).status == 200
            assert len(threads) == 1
            assert threads[0] is not loop
        assert (await front.complete(max_tokens=1)).status == 200
        assert len(threads) == 1

    run(go)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a"] * 256, "n": 4, "bad_words": ["xyz" * 80] * 64}, "bad_words"),
        ({"prompt": ["a"] * 129, "allowed_token_ids": [1] * 8192}, "allowed_token_ids"),
        ({"prompt": ["a"] * 256, "n": 5, "logit_bias": {str(token): 1 for token in range(1024)}}, "logit_bias"),
    ],
    ids=["bad_words", "allowed_token_ids", "logit_bias"],
)
def test_ids_that_each_sequence_takes_along_are_counted(body: dict[str, Any], param: str) -> None:
    async def go() -> None:
        front = Front(max_waiting=2000)
        refused = await front.complete(max_tokens=1, **body)
        assert (refused.status, refused.error["param"]) == (400, param)
        assert "more than 1048576 in all" in refused.error["message"]
        assert not front.client.requests
        # One sequence may bring as many as there can be.
        alone = await front.complete(max_tokens=1, **body | {"prompt": "a", "n": 1, "logit_bias": {"1": 1}})
        assert alone.status == 200, alone.body

    run(go)


def test_small_texts_do_not_wait_for_large_ones() -> None:
    async def go() -> None:
        opened = threading.Event()
        large = [asyncio.ensure_future(off_loop(LARGE_SIZE + 1, opened.wait)) for _ in range(64)]
        try:
            await asyncio.sleep(0)
            assert await off_loop(INLINE_SIZE + 1, lambda: "small") == "small"
            assert not any(task.done() for task in large)
        finally:
            opened.set()
        assert all(await asyncio.gather(*large))

    run(go)


def test_prompts_that_are_too_long_in_any_case_are_refused_untokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        front = Front()
        tokenized: list[str] = []
        encode = front.tokenizer.encode_batch

        def note(texts: Sequence[str], add_special_tokens: bool = True, parse_special: bool = True) -> list[list[int]]:
            tokenized.extend(texts)
            return encode(texts, add_special_tokens, parse_special)

        monkeypatch.setattr(front.tokenizer, "encode_batch", note)
        long = "hello world " * 50_000
        for answer in (
            await front.complete(prompt=long),
            await front.complete(prompt=["short", long]),
            await front.chat(messages=[{"role": "user", "content": long}]),
        ):
            assert (answer.status, answer.error["param"]) == (400, "prompt")
            assert answer.error["code"] == "context_length_exceeded"
        assert tokenized == []
        assert (await front.complete(prompt="short", max_tokens=1)).status == 200
        assert tokenized == ["short"]

    run(go)


# Routes that tokenize a conversation or a prompt, each with a body of a large one.
_HELLO = "hello " * (LARGE_SIZE // 6 + 1)
LARGE: dict[str, dict[str, Any]] = {
    "/v1/responses/input_tokens": {"input": _HELLO},
    "/v1/responses": {"input": _HELLO},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": _HELLO}]},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": _HELLO}], "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": _HELLO}]},
    "/tokenize": {"messages": [{"role": "user", "content": _HELLO}]},
    "/v1/completions": {"prompt": _HELLO},
}


class Slow:
    """Prompts whose tokens nobody gets before the `gate` is open; it is noted which are looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *fronts: Front) -> None:
        self.gate = threading.Event()
        self.seen: list[Front] = []
        for front in fronts:
            monkeypatch.setattr(front.service, "check_length", lambda texts, front=front: self._wait(front))

    def __enter__(self) -> "Slow":
        return self

    def __exit__(self, *error: object) -> None:
        self.gate.set()

    def _wait(self, front: Front) -> None:
        self.seen.append(front)
        assert self.gate.wait(10)


@pytest.mark.parametrize("path", LARGE)
def test_of_a_clients_large_prompts_one_is_read_at_a_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no client has all the threads that there are for such."""

    async def go() -> None:
        mine, other = Front(), Front()
        with Slow(monkeypatch, mine, other) as slow:
            calls = [asyncio.ensure_future(mine.post(path, LARGE[path], client="mine")) for _ in range(3)]
            await until(lambda: slow.seen)
            calls.append(asyncio.ensure_future(other.post(path, LARGE[path], client="other")))
            await until(lambda: len(slow.seen) > 1)
            assert slow.seen == [mine, other]
        await asyncio.gather(*calls)
        assert slow.seen.count(mine) == 3

    run(go)


@pytest.mark.parametrize("path", LARGE)
def test_who_hangs_up_has_no_more_read_and_takes_nobody_s_turn(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        gone, later = Front(), Front()
        with Slow(monkeypatch, gone, later) as slow:
            first = asyncio.ensure_future(gone.post(path, LARGE[path]))
            await until(lambda: slow.seen)
            second = asyncio.ensure_future(gone.post(path, LARGE[path]))
            gone.gone.set()
            assert (await second).status == 499
            last = asyncio.ensure_future(later.post(path, LARGE[path]))
            await asyncio.sleep(0.02)
            # What has begun is not over yet.
            assert (first.done(), slow.seen) == (False, [gone])
        assert (await first).status == 499
        await last
        assert slow.seen == [gone, later]

    run(go)


def test_who_hangs_up_ends_the_search_for_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of which reads all of a conversation."""

    async def go() -> None:
        front = Front()
        with Slow(monkeypatch, front) as slow:
            items = [{"role": "user", "content": "hello " * 100} for _ in range(64)]
            body = {"input": items, "truncation": "auto"}
            call = asyncio.ensure_future(front.post("/v1/responses/input_tokens", body))
            await until(lambda: slow.seen)
            front.gone.set()
            answer = await asyncio.wait_for(call, 5)
        assert answer.status == 499
        await asyncio.sleep(0.02)
        assert slow.seen == [front]

    run(go)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_prompts_that_are_echoed_count_where_they_are_made_text(
    stream: bool, chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be much longer than what follows."""
    sizes: list[int] = []

    async def watched(size: int, work: Callable[[], Any]) -> Any:
        sizes.append(size)
        return await off_loop(size, work)

    monkeypatch.setattr(answers, "off_loop", watched)
    said = "hello " * 20
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}]
    final = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}

    async def go() -> None:
        for size, more in ((0, {}), (len(said), {"echo": True}), (8 * len(said), {"echo": True, "n": 8})):
            sizes.clear()
            body = {"max_tokens": 1, "stream": stream, **more}
            front = Front()
            answer = await (front.chat(**final | body) if chat else front.complete(prompt=said, **body))
            assert answer.status == 200, answer.body
            # With the first pieces, and where the whole answer is written.
            assert min(sizes[0], sizes[-1]) >= size or stream
            assert max(sizes) >= size
            assert max(sizes) < 200 or size

    run(go)


@pytest.mark.parametrize(("prompts", "inline"), [(1, True), (4, False)])
def test_the_events_of_many_samples_are_made_off_the_loop(
    prompts: int, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    async def watched(size: int, work: Callable[[], Any]) -> Any:
        sizes.append(size)
        return await off_loop(size, work)

    monkeypatch.setattr(answers, "off_loop", watched)

    async def go() -> None:
        answer = await Front().complete(prompt=["hello"] * prompts, n=64, stream=True, max_tokens=1)
        assert len(answer.events()) == 64 * prompts
        assert (max(sizes) <= INLINE_SIZE) == inline

    run(go)
