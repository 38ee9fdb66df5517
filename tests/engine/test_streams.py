"""What comes for requests, as the front reads it."""

import asyncio
import time

import pytest

from chairlift.core.finished import FinishReason
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.step import TokenLogprob
from chairlift.engine.sequences.client import Stream
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.engine.sequences.updates import MOST_AT_ONCE, Updates
from chairlift.errors import ChairliftError, InvalidRequest, QueueFull, RequestFailed, Unavailable


def make_stream(name: str = "a") -> Stream:
    request = Request(
        id=name, prompt_ids=[1], params=SamplingParams(), max_tokens=16, arrival=time.monotonic(), stop_ids=frozenset()
    )
    return Stream(request, Stream.close)


def update(*tokens: int, end: FinishReason | None = None, detail: str | None = None) -> SequenceUpdate:
    return SequenceUpdate("a", list(tokens), end, detail)


def tokens_of(group: list[tuple[int, SequenceUpdate]]) -> list[tuple[int, list[int]]]:
    return [(index, each.token_ids) for index, each in group]


def test_all_that_has_come_is_read_at_once() -> None:
    async def go() -> None:
        first, second = make_stream("a"), make_stream("b")
        first.push(update(1))
        updates = Updates([first, second])
        first.push(update(2))
        assert tokens_of(await anext(updates)) == [(0, [1]), (0, [2])]
        waiting = asyncio.ensure_future(anext(updates))
        await asyncio.sleep(0)
        assert not waiting.done()
        second.push(update(3, end=FinishReason.LENGTH))
        first.push(update(4))
        assert tokens_of(await waiting) == [(0, [4]), (1, [3])]
        first.push(update(end=FinishReason.STOP))
        assert tokens_of(await anext(updates)) == [(0, [])]
        with pytest.raises(StopAsyncIteration):
            await anext(updates)

    asyncio.run(go())


@pytest.mark.parametrize(
    ("reason", "error"), [(FinishReason.ERROR, RequestFailed), (FinishReason.INVALID, InvalidRequest), (None, None)]
)
def test_an_error_comes_after_what_came_before(reason: FinishReason | None, error: type[ChairliftError] | None) -> None:
    async def go() -> None:
        streams = [make_stream(name) for name in "abc"]
        updates = Updates(streams)
        streams[1].push(update(1))
        if reason is None:
            streams[1].close(Unavailable("it broke"))
        else:
            streams[1].push(update(end=reason, detail="it broke"))
        assert tokens_of(await anext(updates)) == [(1, [1])]
        with pytest.raises(error or Unavailable, match="it broke"):
            await anext(updates)

    asyncio.run(go())


def test_an_error_does_not_wait_for_what_comes_for_others() -> None:
    async def go() -> None:
        streams = [make_stream(name) for name in "ab"]
        updates = Updates(streams)
        streams[0].push(update(1))
        streams[1].close(Unavailable("it broke"))
        assert tokens_of(await anext(updates)) == [(0, [1])]
        streams[0].push(update(2))
        with pytest.raises(Unavailable, match="it broke"):
            await anext(updates)

    asyncio.run(go())


def test_those_who_are_cancelled_end() -> None:
    async def go() -> None:
        stream = make_stream()
        updates = Updates([stream])
        waiting = asyncio.ensure_future(anext(updates))
        await asyncio.sleep(0)
        stream.cancel()
        with pytest.raises(StopAsyncIteration):
            await waiting

    asyncio.run(go())


def test_who_waits_for_one_stream_is_offered_what_comes_before_its_end() -> None:
    async def go() -> None:
        stream, offered = make_stream(), []
        takes = True

        def at_once(update: SequenceUpdate) -> bool:
            offered.append(update.token_ids)
            return takes

        updates = Updates([stream], at_once)
        stream.push(update(1))
        assert tokens_of(await anext(updates)) == [(0, [1])]
        waiting = asyncio.ensure_future(anext(updates))
        await asyncio.sleep(0)
        stream.push(update(2))
        stream.push(update(3))
        await asyncio.sleep(0)
        assert not waiting.done()
        takes = False
        stream.push(update(4))
        takes = True
        stream.push(update(5))
        assert offered == [[2], [3], [4]]
        assert tokens_of(await waiting) == [(0, [4]), (0, [5])]
        waiting = asyncio.ensure_future(anext(updates))
        await asyncio.sleep(0)
        stream.push(update(6, end=FinishReason.LENGTH))
        assert tokens_of(await waiting) == [(0, [6])]
        assert len(offered) == 3

    asyncio.run(go())


def test_what_goes_wrong_at_once_is_raised_where_the_stream_is_read() -> None:
    async def go() -> None:
        stream = make_stream()

        def at_once(update: SequenceUpdate) -> bool:
            raise RuntimeError("a mistake")

        waiting = asyncio.ensure_future(anext(Updates([stream], at_once)))
        await asyncio.sleep(0)
        stream.push(update(1))
        with pytest.raises(RuntimeError, match="a mistake"):
            await waiting

    asyncio.run(go())


def test_of_much_that_has_come_some_is_read_at_a_time_and_of_each_stream() -> None:
    async def go() -> None:
        first, second = make_stream("a"), make_stream("b")
        updates = Updates([first, second])
        for number in range(MOST_AT_ONCE + 10):
            first.push(update(number))
        second.push(update(1))
        first.close(Unavailable("it broke"))
        assert tokens_of(await anext(updates)) == [(0, [number]) for number in range(MOST_AT_ONCE)]
        others: list[str] = []
        asyncio.get_running_loop().call_soon(others.append, "ran")
        left = [(0, [MOST_AT_ONCE + number]) for number in range(10)]
        assert tokens_of(await anext(updates)) == [(1, [1]), *left]
        assert others == ["ran"], "who has much to read leaves room for others"
        with pytest.raises(Unavailable, match="it broke"):
            await anext(updates)

    asyncio.run(go())


def test_who_leaves_too_much_unread_gets_no_more() -> None:
    async def go() -> None:
        streams = [make_stream(name) for name in "ab"]
        updates = Updates(streams, most_unread=10_000)
        waiting = asyncio.ensure_future(anext(updates))
        await asyncio.sleep(0)
        for _ in range(1000):
            streams[0].push(update(1))
        assert len(await waiting) == MOST_AT_ONCE, "whoever waits takes all that comes"
        while streams[0].updates:
            await anext(updates)
        large = update(2)
        large.logprobs = [TokenLogprob(2, -0.5, 1, [(2, -0.5)] * 20)] * 100
        streams[1].push(large)
        assert tokens_of(await anext(updates)) == [(1, [2])], "one may be as large as it is"
        streams[0].push(update(3))
        for _ in range(3):
            streams[1].push(update(4, end=FinishReason.LENGTH))
        assert [stream.done for stream in streams] == [False, True]
        streams[0].push(large)
        assert [(stream.done, stream.updates) for stream in streams] == [(True, []), (True, [])]
        with pytest.raises(QueueFull, match="more than 10000 bytes of its stream unread"):
            await anext(updates)

    asyncio.run(go())


def test_several_streams_are_read_together() -> None:
    async def go() -> None:
        streams = [make_stream(name) for name in "ab"]
        updates = Updates(streams, lambda offered: pytest.fail("they are not offered one by one"))
        waiting = asyncio.ensure_future(anext(updates))
        await asyncio.sleep(0)
        streams[0].push(update(1))
        streams[1].push(update(2))
        assert tokens_of(await waiting) == [(0, [1]), (1, [2])]

    asyncio.run(go())
