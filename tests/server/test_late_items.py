"""What the twin knows of requests for items that had no time, were given up at their deadline, or found no room."""

import asyncio

from support.items_harness import embedder
from support.server_harness import Front, run, until

from chairlift.plan.seen_traffic import item_trace
from chairlift.plan.what_if import ItemQuestion, answer
from chairlift.server.twin import past_traffic

PATH, TWO = "/v1/embeddings", {"input": ["hello", "world"], "model": "embedder"}


async def asked(front: Front, timeout_ms: int | None = None) -> int:
    headers = {} if timeout_ms is None else {"X-Request-Timeout-Ms": str(timeout_ms)}
    return (await front.post(PATH, TWO, headers=headers)).status


def test_what_a_deadline_ended_is_simulated_with_it() -> None:
    async def go() -> None:
        front, (service, dispatcher) = Front(), embedder(max_waiting=4)
        front.models.add(service)
        for number in range(25):
            assert await asked(front, 60_000 if number else None) == 200
        dispatcher.held = True
        assert await asked(front, 50) == 504, "its time is over while it runs"
        assert await asked(front, 40) == 429, "its time is over while it waits"
        waiting = [asyncio.create_task(asked(front, 50_000)) for _ in range(2)]
        await until(lambda: dispatcher.scheduler.num_waiting == 4)
        assert await asked(front, 30_000) == 429, "there is no room"
        question = past_traffic.lately(past_traffic.past_of(service), [])
        assert isinstance(question, ItemQuestion)
        dispatcher.held = False
        assert [await task for task in waiting] == [200] * 2

        late = [each for each in question.requests if each.late]
        assert [(each.timeout, each.outputs, each.answered) for each in late] == [(0.05, 2, False)]
        refused = [each for each in question.requests if each.refused and not each.late]
        assert [(each.timeout, each.outputs, each.answered) for each in refused] == [(0.04, 2, False), (30.0, 2, False)]
        answered = [each for each in question.requests if each.answered]
        assert [each.timeout for each in answered] == [None] + [60.0] * 24
        assert {each.size for each in (*answered, *late, *refused)} == {answered[0].size}
        trace = item_trace(question.requests, question.sized)
        assert [each.timeout for each in trace] == [each.timeout for each in question.requests]
        assert {each.items for each in trace} == {1, 2}, "those that wait are told of one by one"
        assert answer(question, lambda: False).measured.refused == 3

    run(go)
