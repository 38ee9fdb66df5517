"""Overload as a client of a language model meets it: refused before its prompt is read, or given up while it waits."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.server_harness import FakeClient, Front, full

from chairlift.core.cost import Coefficients
from chairlift.core.finished import ShedReason
from chairlift.core.sequences.forecast import StepLimits
from chairlift.core.sequences.overload import LoadShedder
from chairlift.core.sequences.standing import SequenceState, Standing
from chairlift.server.http.exchange import Terms


def run(go: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(go(), 20))


def test_likes_are_told_apart_and_deadlines_passed_on() -> None:
    async def go() -> None:
        front = Front()
        await front.complete(max_tokens=5)
        await front.complete(max_tokens=7, cache_salt="s" * 1000)
        await front.chat(max_tokens=5)
        await front.post("/v1/completions", {"prompt": "hello"}, headers={"x-request-timeout-ms": "5000"})
        groups, timeouts = zip(*front.client.submitted, strict=True)
        salt = front.client.requests[1].cache_salt
        assert groups[:3] == (("", "completion", 3), (salt, "completion", 3), ("", "chat", 3))
        assert groups[3] == ("", "completion", 5)
        assert timeouts == (None, None, None, 5.0)

    run(go)


def test_who_would_be_late_is_refused_before_its_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        front = Front()
        asked: list[int] = []

        def refuse(priority: int) -> None:
            asked.append(priority)
            raise full(2.2)

        monkeypatch.setattr(front.client, "check_load", refuse)
        monkeypatch.setattr(front.service, "encode", None)
        for answer in (await front.complete(priority=3), await front.chat()):
            assert (answer.status, answer.headers["retry-after"]) == (429, "3")
            assert answer.error["code"] == "queue_full"
        assert asked == [3, 0]
        front.service.check_load(Terms(background=True))
        assert asked == [3, 0], "background requests are not asked about"

    run(go)


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_given_up_while_it_waits_gets_the_same_status(stream: bool) -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        answer = asyncio.create_task(front.complete(stream=stream))
        while not front.client.streams:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        front.client.streams[0].give_up(full(1.5))
        done = await answer
        assert (done.status, done.headers["retry-after"]) == (429, "2")
        assert front.service.metrics.finished["shed"] == 1
        assert front.service.metrics.finished["error"] == 0

    run(go)


def test_a_preempted_request_is_told_when_it_goes_on_and_not_that_it_is_nearly_done() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True))
        answer = asyncio.create_task(front.complete(max_tokens=100, ignore_eos=True))
        while not front.client.streams:
            await asyncio.sleep(0)
        (stream,) = front.client.streams
        name, now, cost = stream.request.id, time.monotonic(), Coefficients(0.1, 0.0, 0.0, 0.0)
        shedder = front.client.shedder
        shedder.limits = StepLimits(1, 100, 100, 16)
        shedder.arrive([stream.request], now)
        shedder.moved([name], [])
        shedder.started(name, 1, 0, now)
        shedder.stepped(10, 0, cost, now)
        shedder.moved([], [name])
        shedder.stepped(98, 1, cost, now)
        front.client.standings = {name: Standing(name, SequenceState.PREEMPTED, 0)}
        front.client.foreseen = shedder.foresee([name], now)
        (view,) = (await front.call("GET", "/v1/requests", client="127.0.0.1")).json()["data"]
        assert (view["state"], view["position"]) == ("preempted", 1)
        assert view["predicted"]["start"] is not None
        assert view["predicted"]["first_token"] is None, "it had that"
        assert 8 < view["predicted"]["end"]["in_s"] <= 9, "90 tokens of a tenth of a second each"
        stream.give_up(full(1.5))
        await answer

    run(go)


def test_metrics_of_a_target() -> None:
    async def go() -> None:
        front = Front()
        front.client.shedder.num_shed[ShedReason.QUEUE_FULL] += 2
        text = (await front.call("GET", "/metrics")).body.decode()
        assert 'chairlift_requests_shed_total{model="tiny",reason="queue_full"} 2.0' in text
        assert 'chairlift_requests_shed_total{model="tiny",reason="ttft"} 0.0' in text
        assert "ttft_promised_seconds" not in text, "no target is set"
        front.client.shedder = shedder = LoadShedder(target=1.0)
        shedder.limits, shedder.cost = StepLimits(1, 100, 100, 16), Coefficients(0.1, 0.0, 0.0, 0.0)
        shedder.promised.value = 1.5
        text = (await front.call("GET", "/metrics")).body.decode()
        assert 'chairlift_ttft_promised_seconds{model="tiny"} 0.0' in text
        assert 'chairlift_ttft_prediction_ratio{model="tiny",quantile="0.98"} 1.5' in text

    run(go)
