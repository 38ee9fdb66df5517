"""/metrics of models that answer in one call: what really went through a dispatcher."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.items_harness import embedder, function, ids_of, listening
from support.server_harness import Front

from chairlift.core.decision import Decision, Reason
from chairlift.core.items.item import Batch, BatchResult, Failure, Item
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.registry import Models
from chairlift.server.status import Exposition


def seen(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and labels, all but the model's."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model"]
            found[(sample.name.removeprefix("chairlift_"), *labels)] = sample.value
    return found


def scrape(url: str) -> dict[tuple[str, ...], float]:
    return seen(httpx.get(f"{url}/metrics").text)


def test_requests_items_and_batches() -> None:
    with listening(embedder()[0]) as server:
        httpx.post(f"{server.url}/embed", json={"inputs": ["hello world", "fox"]})
        httpx.post(f"{server.url}/embed", json={"inputs": "fox"})
        numbers = scrape(server.url)
    tokens = len(ids_of("hello world")) + 2 * len(ids_of("fox"))
    assert numbers["ready",] == 1
    assert (numbers["requests_finished_total", "done"], numbers["items_answered_total",]) == (2, 3)
    assert (numbers["batch_items_count",], numbers["batch_items_sum",]) == (2, 3)
    assert numbers["batch_tokens_sum",] == tokens
    assert numbers["queue_time_seconds_count",] == 3
    assert (numbers["batch_padding_ratio_bucket", "0.0"], numbers["batch_padding_ratio_sum",]) == (2, 0)
    assert numbers["batch_timed_seconds_total",] == pytest.approx(0.004)
    assert numbers["batch_duration_seconds_count",] == 2
    assert numbers["batch_prediction_error_ratio_count",] == 2
    assert (numbers["items_waiting",], numbers["items_running",], numbers["queued_work_seconds",]) == (0, 0, 0)


def test_a_poison_item_is_found_and_counted() -> None:
    service, dispatcher = function()

    def compute(payloads: list[Any]) -> list[Any]:
        if "poison" in payloads:
            raise RuntimeError("boom")
        return payloads

    dispatcher.compute = compute
    with listening(service) as server:
        url = f"{server.url}/v1/models/function:predict"
        answer = httpx.post(url, json={"instances": [*range(7), "poison"]})
        assert (answer.status_code, "boom" in answer.json()["error"]) == (500, True)
        numbers = scrape(server.url)
    assert numbers["bisections_total",] >= 1
    assert numbers["batch_failures_total", "raised"] >= 1
    assert numbers["requests_finished_total", "error"] == 1


def test_what_comes_too_late_is_counted_and_504() -> None:
    service, dispatcher = function()
    dispatcher.held = True
    with listening(service) as server:
        path, body = f"{server.url}/v1/models/function:predict", {"instances": [1]}
        for _ in range(2):  # one that runs, one that waits behind it
            answer = httpx.post(path, json=body, headers={"X-Request-Timeout-Ms": "100"})
            assert (answer.status_code, "deadline" in answer.json()["error"]) == (504, True)
        dispatcher.held = False
        numbers = scrape(server.url)
    assert numbers["requests_finished_total", "late"] == 2
    assert numbers["items_answered_total",] == 0


def test_shedding_is_counted_by_reason() -> None:
    service, dispatcher = embedder(max_waiting=2)
    dispatcher.held = True
    with listening(service) as server, ThreadPoolExecutor() as pool:
        url = f"{server.url}/embed"
        running = pool.submit(httpx.post, url, json={"inputs": "fox"})
        while not dispatcher.scheduler.num_running:
            pass
        waiting = pool.submit(httpx.post, url, json={"inputs": ["fox", "fox"]})
        while dispatcher.scheduler.num_waiting < 2:
            pass
        refused = httpx.post(url, json={"inputs": "fox"})
        assert (refused.status_code, refused.json()["error_type"]) == (429, "Overloaded")
        assert refused.headers["retry-after"] == "1"
        dispatcher.held = False
        assert (running.result().status_code, waiting.result().status_code) == (200, 200)
        numbers = scrape(server.url)
    assert numbers["items_shed_total", "queue_full"] == 1
    assert numbers["requests_finished_total", "shed"] == 1


def test_padding_and_failures() -> None:
    service, _ = function()
    items = [Item(id="1", arrival=0, size=1), Item(id="2", arrival=0, size=3)]
    reason = Decision(Reason.ADMITTED, None, "")
    batch = Batch(id=1, instance=0, items=items, size=4, computed=6, predicted=0.3, started=0, reason=reason)
    service.metrics.on_batch(batch, BatchResult(seconds=0.2))
    service.metrics.on_batch(batch, BatchResult(seconds=0, failure=Failure.DIED))
    numbers = numbers_of(service)
    assert numbers["batch_padding_ratio_sum",] == pytest.approx(2 / 3)
    assert numbers["batch_prediction_error_ratio_sum",] == pytest.approx(0.5)
    assert numbers["batch_predicted_seconds_total",] == pytest.approx(0.3)
    assert numbers["batch_failures_total", "died"] == 1


def numbers_of(service: ItemService) -> dict[tuple[str, ...], float]:
    from prometheus_client.exposition import generate_latest

    return seen(generate_latest(Exposition(Models([service]), tuple).registry).decode())


def test_both_kinds_of_models_share_a_page() -> None:
    from prometheus_client.exposition import generate_latest

    async def make() -> Front:
        return Front()

    models = Models([asyncio.run(make()).service, embedder()[0]])
    text = generate_latest(Exposition(models, tuple).registry).decode()
    assert text.count("# TYPE chairlift_requests_finished_total counter") == 1
    assert "# HELP chairlift_requests_finished_total Requests that ended, by how; of a language model each seq" in text
    assert "# HELP chairlift_requests_running Sequences that run (4 of a request with n=4)." in text
    assert 'chairlift_requests_finished_total{model="tiny",reason="stop"} 0.0' in text
    assert 'chairlift_requests_finished_total{model="embedder",reason="done"} 0.0' in text
