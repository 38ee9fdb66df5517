"""A worker is asked little, whoever asks how often."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from chairlift.core.sequences.standing import SequenceState, Standing
from chairlift.engine.sequences import inquiry
from chairlift.engine.sequences.inquiry import Inquiry
from chairlift.engine.sequences.messages import Explain


def standing(name: str) -> Standing:
    return Standing(name, SequenceState.WAITING)


def with_inquiry(test: Callable[[Inquiry, list[list[str]]], Awaitable[None]]) -> None:
    async def go() -> None:
        sent: list[list[str]] = []

        def send(message: Explain) -> None:
            sent.append(message.request_ids)

        await asyncio.wait_for(test(Inquiry(send), sent), 30)

    asyncio.run(go())


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def test_those_who_ask_while_one_is_asked_go_together() -> None:
    async def test(inquiry: Inquiry, sent: list[list[str]]) -> None:
        first = asyncio.ensure_future(inquiry.ask(["a"]))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(inquiry.ask([name, "a"])) for name in "bc"]
        await asyncio.sleep(0)
        assert sent == [["a"]]
        inquiry.answered([standing("a")])
        assert await first == {"a": standing("a")}
        assert sent == [["a"]], "the worker has its peace"
        await until(lambda: len(sent) == 2)
        assert sorted(sent[1]) == ["a", "b", "c"]
        inquiry.answered([standing("b")])
        assert await asyncio.gather(*others) == [{"b": standing("b")}] * 2

    with_inquiry(test)


def test_a_worker_that_is_gone_or_busy_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(asked: Inquiry, sent: list[list[str]]) -> None:
        lost = [asyncio.ensure_future(asked.ask(["a"]))]
        await asyncio.sleep(0)
        lost.append(asyncio.ensure_future(asked.ask(["b"])))
        await asyncio.sleep(0)
        asked.lost()
        assert await asyncio.gather(*lost) == [{}, {}]
        monkeypatch.setattr(inquiry, "_PATIENCE_S", 0.01)
        assert await asked.ask(["c"]) == {}
        assert sent == [["a"], ["c"]]
        # What comes late is heard, and the next is asked.
        asked.answered([standing("c")])
        last = asyncio.ensure_future(asked.ask(["d"]))
        monkeypatch.setattr(inquiry, "_PATIENCE_S", 30)
        await until(lambda: len(sent) == 3)
        asked.answered([])
        assert await last == {}

    with_inquiry(test)


def test_a_question_has_so_many_ids_at_most() -> None:
    async def test(inquiry: Inquiry, sent: list[list[str]]) -> None:
        asked = asyncio.ensure_future(inquiry.ask(map(str, range(10_000))))
        await asyncio.sleep(0)
        assert len(sent[0]) == 512
        inquiry.answered([])
        assert await asked == {}

    with_inquiry(test)
