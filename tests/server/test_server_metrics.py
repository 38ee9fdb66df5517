"""/metrics: what is there, and that the numbers are right."""

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.server_harness import FakeClient, Front

from chairlift.config.server import ServerConfig
from chairlift.core.cost import Coefficients
from chairlift.engine.sequences.messages import CostStats, EngineStats
from chairlift.server.metrics.families import Histogram, histograms
from chairlift.server.models.sequence_service import SequenceService


def scrape(front: Front) -> dict[tuple[str, ...], float]:
    async def go() -> str:
        answer = await front.call("GET", "/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        return answer.body.decode()

    found = {}
    for family in text_string_to_metric_families(asyncio.run(go())):
        for sample in family.samples:
            assert sample.name.startswith("chairlift_")
            assert sample.labels.pop("model", "tiny") == "tiny"
            found[(sample.name, *sample.labels.values())] = sample.value
    return found


def front() -> Front:
    async def make() -> Front:
        return Front()

    return asyncio.run(make())


def test_engine_numbers() -> None:
    it = front()
    assert it.client.on_step is not None
    common: dict[str, Any] = {"running": 3, "waiting": 2, "waiting_reason": "waiting_for_blocks"}
    it.client.stats = EngineStats(4, 40, 0.02, **common, kv_blocks_used=25, kv_blocks_total=100, steps=7, preemptions=2)
    it.client.on_step(it.client.stats)
    it.client.on_step(EngineStats(steps=1, preemptions=1))  # another worker
    seen = scrape(it)
    assert seen["chairlift_requests_running",] == 3
    assert seen["chairlift_requests_waiting",] == 2
    reasons = {key[1]: value for key, value in seen.items() if key[0] == "chairlift_requests_waiting_by_reason"}
    assert reasons == {"slots": 0, "tokens": 0, "itl": 0, "blocks": 2, "window": 0, "batch": 0}
    assert seen["chairlift_kv_usage_ratio",] == 0.25
    assert seen["chairlift_preemptions_total",] == 3
    assert seen["chairlift_step_requests_sum",] == 4
    assert seen["chairlift_step_requests_bucket", "4.0"] == 1
    assert seen["chairlift_step_requests_bucket", "2.0"] == 0
    assert seen["chairlift_step_tokens_sum",] == 40
    assert seen["chairlift_step_duration_seconds_sum",] == 0.02


def test_versions_of_a_model_have_series_of_their_own() -> None:
    it = front()
    it.models.add(SequenceService(FakeClient(), it.tokenizer, "tiny", ServerConfig(), version="2"))

    async def go() -> str:
        return (await it.call("GET", "/metrics")).body.decode()

    samples = [line.split()[0] for line in asyncio.run(go()).splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples))
    assert {'chairlift_ready{model="tiny"}', 'chairlift_ready{model="tiny:2"}'} <= set(samples)


def test_predictions_beside_what_steps_took() -> None:
    it = front()
    assert it.client.on_step is not None
    assert not any("step_cost" in name or "token_budget" in name for name, *_ in scrape(it)), "nobody set a target"
    terms = Coefficients(0.01, 0.001, 2e-6, 5e-7)
    steps = [CostStats(0.033, 0.03, 40, terms), CostStats(0.02, 0.04, 50, terms), CostStats(0.02, 0.0, 60, terms)]
    for number, cost in enumerate(steps):
        it.client.on_step(EngineStats(1, 1, 0.05, steps=number, cost=cost))
    it.client.stats = EngineStats(steps=3, cost=steps[-1])
    it.client.on_step(it.client.stats)  # no step: the engine only says that it sleeps
    seen = scrape(it)
    assert seen["chairlift_step_prediction_error_ratio_count",] == 2, "a failed step was not timed"
    assert seen["chairlift_step_prediction_error_ratio_sum",] == pytest.approx(0.1 + 0.5)
    assert seen["chairlift_step_predicted_seconds_total",] == pytest.approx(0.053)
    assert seen["chairlift_step_timed_seconds_total",] == pytest.approx(0.07)
    assert seen["chairlift_step_token_budget",] == 60
    found = {key[1]: value for key, value in seen.items() if key[0] == "chairlift_step_cost_seconds"}
    assert found == terms._asdict()


def test_request_numbers() -> None:
    it = front()

    async def go() -> None:
        await it.complete(n=2, max_tokens=5)
        await it.complete(nonsense=1)
        await it.call("BREW", "/pot")

    asyncio.run(go())
    seen = scrape(it)
    assert seen["chairlift_generation_tokens_total",] == 10
    assert seen["chairlift_prompt_tokens_total",] == 2
    assert seen["chairlift_requests_finished_total", "length"] == 2
    assert seen["chairlift_requests_finished_total", "abort"] == 0
    assert seen["chairlift_time_to_first_token_seconds_count",] == 2
    assert seen["chairlift_inter_token_latency_seconds_count",] == 8
    assert seen["chairlift_request_duration_seconds_count",] == 2
    assert seen["chairlift_queue_time_seconds_count",] == 2
    codes = {key[1:]: value for key, value in seen.items() if key[0] == "chairlift_http_requests_total"}
    assert sorted(codes.values()) == [1, 1, 1]
    assert {frozenset(key) for key in codes} == {
        frozenset({"200", "POST", "/v1/completions"}),
        frozenset({"400", "POST", "/v1/completions"}),
        frozenset({"404", "other", "unknown"}),
    }


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.observe(value)
    (family,) = histograms("m", [("x", "x", histogram)])
    samples = {s.labels.get("le", s.name): s.value for s in family.samples}
    assert samples == {"1.0": 2, "2.0": 4, "+Inf": 5, "chairlift_x_count": 5, "chairlift_x_sum": 8}
