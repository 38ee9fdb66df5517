"""Forecasts of a server: who may ask, what is answered, what is refused by name, and what a simulation may cost."""

import argparse
import asyncio
import shlex
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.items_harness import embedder
from support.key_files import bearer, write_keys
from support.model_factory import model_folder
from support.past import seen_steps, served, traffic
from support.server_harness import INFO, Answer, FakeClient, Front, run, until
from support.simulated import COST, exact_profile

from chairlift.commands import why
from chairlift.config.flags import add_flags
from chairlift.config.sequences import SequenceConfig
from chairlift.config.settings import load
from chairlift.core.cost import ExpertReads
from chairlift.engine.sequences.messages import EngineStats
from chairlift.errors import QueueFull, Unavailable
from chairlift.plan.as_copied import as_flags
from chairlift.plan.case import changed
from chairlift.plan.what_if import ItemQuestion, SequenceQuestion, WhatIfAnswer, answer
from chairlift.server.http.api_errors import ApiError
from chairlift.server.metrics.items import RecentCall
from chairlift.server.metrics.sequences import RecentStep
from chairlift.server.models.request_log import EndedRequest, RefusedRequest, RequestLog, Viewer
from chairlift.server.twin import past_traffic
from chairlift.server.twin.twin import MOST_ASKED, Twin
from chairlift.server.twin.what_if_view import _of_sequence

HERE = {"host": "127.0.0.1:8000"}
PEOPLE: dict[str, dict[str, Any]] = {
    "alice": {"rights": ["infer"]},
    "bob": {"rights": ["infer"]},
    "root": {"rights": ["infer", "admin"]},
}
FEW = SequenceConfig(model="tiny", max_num_seqs=2)
PATH = "/v1/models/tiny/forecast"


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return str(write_keys(tmp_path / "keys.toml", **PEOPLE))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[SequenceQuestion | ItemQuestion]:
    """The simulation, as its process would make it, in this one; and what was asked."""
    questions: list[SequenceQuestion | ItemQuestion] = []

    async def told(self: Twin, question: bytes) -> WhatIfAnswer:
        questions.append(msgspec.msgpack.decode(question, type=SequenceQuestion | ItemQuestion))
        return answer(questions[-1], lambda: False)

    monkeypatch.setattr(Twin, "_answer", told)
    return questions


def past(
    count: int = 60, owner: str | None = None, config: SequenceConfig = FEW, rate: float = 8.0, **settings: Any
) -> Front:
    """A server whose last minute is known: so many requests, of this owner."""
    front = Front(FakeClient(manual=True), **settings)
    front.client.config = config
    front.client.info = msgspec.structs.replace(INFO, max_model_len=4096, num_blocks=10_000)
    front.client.stats = EngineStats(coefficients=COST)
    trace = traffic(count, rate=rate)
    outcome = served(config, trace, exact_profile())
    began = time.monotonic() - max(life.end or 0.0 for life in outcome.requests)
    front.service.metrics.steps.extend(
        RecentStep(step.ended, step.seconds, step.requests, step.tokens, 0, 0, step.kv_blocks, step.running)
        for step in seen_steps(outcome, began)
    )
    kept = []
    for number, life in enumerate(outcome.requests):
        # The front hears of a step somewhat after its end.
        arrival, first, end = life.request.arrival, (life.first or 0.0) + 1e-4, (life.end or 0.0) + 1e-4
        scheduled = life.scheduled or 0.0
        kept.append(
            EndedRequest(
                id=f"cmpl-{number:024x}",
                ended=began + end,
                finish_reason="length",
                total_s=end - arrival,
                queued_s=scheduled - arrival,
                prefill_s=first - scheduled,
                decode_s=end - first,
                prompt_tokens=life.request.input_length,
                cached_tokens=0,
                tokens=life.num_tokens,
                steps=life.num_tokens,
                mean_batch=2.0,
                preemptions=0,
            )
        )
    keep(front, [(owner, each) for each in kept])
    return front


def keep(front: Front, ended: list[tuple[str | None, EndedRequest]]) -> None:
    """Have a server know of these requests, each of an owner, and of no other."""
    front.service.log = RequestLog()
    for owner, each in sorted(ended, key=lambda pair: pair[1].ended):
        front.service.log.keep(owner, each)


async def ask(front: Front, body: Any = None, path: str = PATH, client: str = "127.0.0.1", **more: Any) -> Answer:
    return await front.call("POST", path, {} if body is None else body, headers=HERE | more, client=client)


async def why_not_faster(front: Front, request_id: str, name: str | None = None, query: str = "what_if=true") -> Answer:
    headers = bearer(name) if name else None
    return await front.call("GET", f"/v1/requests/{request_id}", headers=headers, query=query)


def slowest(front: Front, owner: str | None = None) -> EndedRequest:
    return max(front.service.log.ended[owner], key=lambda each: each.total_s or 0.0)


# Forecasts


@pytest.mark.usefixtures("here")
def test_what_is_known_of_many_requests_is_gone_through_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def noted(make: Any) -> Any:
        def made(*args: Any) -> Any:
            threads.append(threading.current_thread())
            return make(*args)

        return made

    monkeypatch.setattr("chairlift.server.forecast_routes.lately", noted(past_traffic.lately))
    monkeypatch.setattr("chairlift.server.twin.what_if_view.around", noted(past_traffic.around))

    async def go() -> None:
        front = past()
        assert (await ask(front)).status == 200
        assert (await why_not_faster(front, slowest(front).id)).status == 200

    run(go)
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_a_forecast_has_what_was_measured_and_what_the_twin_makes_of_it(here: list[Any]) -> None:
    async def go() -> None:
        front = past()
        as_it_is = (await ask(front)).json()
        assert (as_it_is["tried"], as_it_is["settings"]["tried"], as_it_is["toml"]) == (None, None, "")
        assert as_it_is["settings"]["now"] == {
            "strategy": "continuous",
            "max_num_seqs": 2,
            "max_num_batched_tokens": 512,
            "target_itl_ms": None,
        }
        told = (await ask(front, {"max_num_seqs": 32, "target_itl_ms": 50})).json()
        assert (told["object"], told["model"]) == ("forecast", "tiny")
        measured, now, tried = told["measured"], told["now"], told["tried"]
        assert measured["requests"] == now["requests"] == tried["requests"] == 60
        for name in ("ttft", "itl", "latency"):
            assert now[name] == pytest.approx(measured[name], rel=0.05)
        assert now["outputs_per_s"] == pytest.approx(measured["outputs_per_s"], rel=0.05)
        assert tried["ttft"][0] < measured["ttft"][0] / 2
        assert told["seen"]["most_requests"] == 2
        assert told["flags"] == "--max-num-seqs 32 --target-itl-ms 50"
        assert told["toml"] == "max_num_seqs = 32\ntarget_itl_ms = 50"
        assert all(None not in each for each in (measured["ttft"], measured["itl"]))

    run(go)


def test_another_strategy_is_tried_with_what_it_reads(here: list[Any]) -> None:
    async def go() -> None:
        front = past()
        told = (await ask(front, {"strategy": "dynamic", "batch_size": 4, "max_wait_ms": 0})).json()
        assert told["settings"]["tried"] == {
            "strategy": "dynamic",
            "batch_size": 4,
            "max_num_batched_tokens": 512,
            "max_wait_ms": 0.0,
        }
        assert told["toml"] == 'strategy = "dynamic"\nbatch_size = 4\nmax_wait_ms = 0'
        assert told["tried"]["requests"] == 60
        front = past(config=SequenceConfig(model="tiny", max_num_seqs=2, target_itl_ms=20))
        told = (await ask(front, {"target_itl_ms": None})).json()
        assert (told["settings"]["tried"]["target_itl_ms"], told["flags"]) == (None, "--target-itl-ms null")
        assert told["toml"] == "# without target_itl_ms"

    run(go)


def test_what_another_strategy_does_not_read_must_go(here: list[Any], tmp_path: Path) -> None:
    async def go() -> None:
        model = str(model_folder())
        started = SequenceConfig(model=model, max_num_seqs=3, target_itl_ms=20, target_ttft_ms=60_000, step_time_ms=90)
        front = past()
        # A tuner may have turned some of them back to the default.
        front.client.config, front.client.configured = msgspec.structs.replace(started, max_num_seqs=64), started
        told = (await ask(front, {"strategy": "dynamic", "batch_size": 3})).json()
        gone = ["max_num_seqs", "step_time_ms", "target_itl_ms", "target_ttft_ms"]
        assert [line for line in told["toml"].splitlines() if "#" in line] == [f"# without {name}" for name in gone]
        parser = argparse.ArgumentParser()
        add_flags(parser)
        flags = parser.parse_args([model, *as_flags(changed(started)), *shlex.split(told["flags"])])
        served = load(vars(flags), {}, tmp_path, "").models[0].config
        assert served == SequenceConfig(model=model, strategy="dynamic", batch_size=3)
        front.client.config = front.client.configured = SequenceConfig(model=model, strategy="dynamic")
        told = (await ask(front, {"strategy": "continuous", "max_num_seqs": 2})).json()
        assert told["toml"] == 'strategy = "continuous"\nmax_num_seqs = 2', "there was no target, so none must go"

    run(go)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs", ">= 1"),
        ({"max_num_seqs": 1025}, "max_num_seqs", "<= 1024"),
        ({"max_num_seqs": 2.5}, "max_num_seqs", "expected"),
        ({"max_num_seqs": "8"}, "max_num_seqs", "expected"),
        ({"max_num_seqs": 10**30}, "max_num_seqs", "max_num_seqs"),
        ({"max_num_seqs": 600}, "max_num_seqs", "at least the number of slots"),
        ({"max_num_batched_tokens": 1}, "max_num_batched_tokens", "at least the number of slots"),
        ({"max_num_batched_tokens": 10**7}, "max_num_batched_tokens", "<="),
        ({"target_itl_ms": 0}, "target_itl_ms", "> 0"),
        ({"target_itl_ms": 1e9}, "target_itl_ms", "<="),
        ({"strategy": "x" * 500}, "strategy", "must be one of none, static"),
        ({"strategy": ["none"]}, "strategy", "expected"),
        ({"batch_size": 4}, "batch_size", "belongs to static and dynamic"),
        ({"strategy": "static", "max_num_seqs": 4}, "max_num_seqs", "belongs to continuous"),
        ({"strategy": "none", "target_itl_ms": 5}, "target_itl_ms", "belongs to continuous"),
        ({"max_wait_ms": 5}, "max_wait_ms", "belongs to dynamic"),
        ({"max_batch_size": 4}, "max_batch_size", "answers in tokens"),
        ({"target_latency_ms": None}, "target_latency_ms", "answers in tokens"),
        ({"slots": 4}, "slots", "unknown field"),
        ({"model": "/etc/passwd"}, "model", "unknown field"),
        ([], None, "the body: expected object"),
    ],
)
def test_what_can_not_be_tried_is_refused_by_name(body: Any, param: str | None, words: str, here: list[Any]) -> None:
    async def go() -> None:
        refused = await ask(past(), body)
        assert refused.status == 400, refused.body
        assert refused.error["param"] == param
        assert words in refused.error["message"]
        assert len(refused.body) < 1000
        assert here == [], "nothing is simulated for it"

    run(go)


def test_too_little_traffic_says_so_and_costs_nothing(here: list[Any]) -> None:
    async def go() -> None:
        for front in (Front(), past(19)):
            refused = await ask(front, {"max_num_seqs": 4})
            assert (refused.status, refused.error["code"]) == (409, "too_little_traffic")
            assert "takes 20" in refused.error["message"]
        front = past()
        front.service.metrics.steps.clear()
        refused = await ask(front)
        assert (refused.status, refused.error["code"]) == (409, "too_little_traffic")
        assert "0 steps" in refused.error["message"]
        assert here == []
        assert (await ask(front, path="/v1/models/nobody/forecast")).status == 404

    run(go)


def test_a_forecast_is_for_whoever_may_see_the_load_of_all(keys: str, here: list[Any]) -> None:
    async def go() -> None:
        front = past(owner="alice", api_keys=keys)
        assert (await ask(front)).status == 401
        refused = await ask(front, **bearer("alice"))
        assert (refused.status, refused.error["code"]) == (403, "missing_right")
        assert (await ask(front, client="10.0.0.7", **bearer("root"))).status == 200
        open_to_all = past(host="0.0.0.0")
        refused = await ask(open_to_all, client="10.0.0.7")
        assert (refused.status, refused.error["code"]) == (403, "not_local")
        for page in ({"origin": "https://elsewhere.example"}, {"sec-fetch-site": "cross-site"}):
            refused = await ask(past(allowed_origins=("*",)), **page)
            assert (refused.status, refused.error["code"]) == (403, "cross_origin")

    run(go)


def test_the_window_holds_the_last_ones_where_there_were_too_many(here: list[Any]) -> None:
    async def go() -> None:
        front = past()
        kept = list(front.service.log.ended[None])
        for tenant in range(30):
            front.service.log.ended[f"t{tenant}"].extend(
                msgspec.structs.replace(each, id=f"{each.id}-{tenant}") for each in kept
            )
        assert (await ask(front)).status == 200
        (question,) = here
        assert len(question.requests) <= 1000
        newest = max(each.ended - (each.total_s or 0.0) for each in kept)
        assert question.requests[-1].arrival == pytest.approx(newest)
        assert question.since > question.requests[0].arrival, "the first of them are in the way of the others"
        assert len({each.tenant for each in question.requests}) == 31

    run(go)


def test_a_question_has_what_a_model_was_loaded_with_and_its_experts(here: list[Any]) -> None:
    async def go() -> None:
        front = past()
        front.client.configured = SequenceConfig(model="tiny", max_num_seqs=64)
        assert (await ask(front)).status == 200
        (question,) = here
        assert (question.config.slots, question.loaded_slots) == (2, 64)
        assert (question.cost, question.profile.experts) == (COST, None)
        experts, all_weights = ExpertReads(0.9, 0.125), COST._replace(step=4 * COST.step)
        front.client.info = msgspec.structs.replace(front.client.info or INFO, experts=experts)
        front.client.stats = EngineStats(coefficients=COST, all_weights=all_weights)
        assert (await ask(front)).status == 200
        assert (here[-1].cost, here[-1].profile.experts) == (all_weights, experts)

    run(go)


def test_what_a_full_log_has_forgotten_is_not_told_of(here: list[Any]) -> None:
    async def go() -> None:
        front = past()
        log = front.service.log.ended[None]
        while len(log) < (log.maxlen or 0):
            log.append(msgspec.structs.replace(log[-1], finish_reason="abort", prefill_s=None))
        log.append(log[-1])  # the oldest is gone
        oldest = log[0].ended
        told = (await ask(front)).json()
        assert here[0].since == pytest.approx(oldest)
        assert told["measured"]["requests"] < 60

    run(go)


def test_those_who_have_not_ended_are_in_the_way_too(here: list[Any]) -> None:
    async def go() -> None:
        front = past()
        asking = asyncio.create_task(front.complete(max_tokens=50))
        await until(lambda: front.client.streams)
        assert (await ask(front)).status == 200
        last = here[0].requests[-1]
        assert (last.ended, last.most, last.answered, last.size) == (None, 50, False, 1)
        front.gone.set()
        await asking

    run(go)


def test_models_that_answer_in_one_call_have_forecasts_of_their_own(here: list[Any]) -> None:
    async def go() -> None:
        front = Front()
        service, _ = embedder()
        front.models.add(service)
        path = "/v1/models/embedder/forecast"
        assert (await ask(front, path=path)).status == 409
        for _ in range(25):
            assert (
                await front.post("/v1/embeddings", {"input": ["hello", "world"], "model": "embedder"})
            ).status == 200
        assert [each.size for each in service.log.ended[None]][:2] == [service.log.ended[None][0].size] * 2
        assert (service.log.ended[None][0].size or 0) > 2, "tokens"
        told = (await ask(front, {"max_batch_size": 1}, path=path)).json()
        assert told["measured"]["requests"] == 25
        assert (told["now"]["ttft"] is None, told["tried"]["latency"][1] > 0) == (False, True)
        assert told["settings"]["tried"] == {"max_batch_size": 1, "max_wait_ms": 0.0, "target_latency_ms": None}
        assert told["flags"] == "--max-batch-size 1"
        told = (await ask(front, {"target_latency_ms": 12345.67}, path=path)).json()
        assert told["settings"]["tried"]["target_latency_ms"] == 12345.67
        assert told["flags"] == "--target-latency-ms 12345.67"
        assert told["toml"] == "target_latency_ms = 12345.67"
        for body, param in (
            ({"max_num_seqs": 2}, "max_num_seqs"),
            ({"strategy": "none"}, "strategy"),
            ({"max_wait_ms": 5, "target_latency_ms": 20}, "max_wait_ms"),
            ({"max_wait_ms": -1}, "max_wait_ms"),
        ):
            refused = await ask(front, body, path=path)
            assert (refused.status, refused.error["param"]) == (400, param)
        (part,) = (await why_not_faster(front, service.log.ended[None][-1].id)).json()["parts"]
        assert part["what_if"]["predicted_s"] > 0
        service.metrics.calls.clear()
        assert (await ask(front, path=path)).status == 409
        service.metrics.calls.extend([RecentCall(1.0, 0.0, 0, 1, 1.0, 0, None)] * 20)
        assert (await ask(front, path=path)).status == 409, "calls that were not timed say nothing"

    run(go)


def test_of_each_call_it_is_known_how_long_its_way_was() -> None:
    async def go() -> None:
        front = Front()
        service, _ = embedder()
        front.models.add(service)
        for _ in range(25):
            await front.post("/v1/embeddings", {"input": ["hello", "world"], "model": "embedder"})
        kept = [call for call in service.metrics.calls if call.seconds > 0]
        last = kept[-1]
        heard = last.ended
        # Sent ahead: heard of 3 s after the one before, of which it took 1 s and the gap was as the worker says.
        for gap in (0.5, 1.75, None):
            heard += 3.0
            about = {"started": heard - 3.0, "ended": heard, "seconds": 1.0, "ahead": True, "gap": gap}
            about |= {} if gap is None else {"idle": 0.125}
            service.metrics.calls.append(last._replace(**about))
        question = past_traffic.lately(past_traffic.past_of(service), [])
        assert isinstance(question, ItemQuestion)
        *alone, first, second, third = question.calls
        assert [(each.lag, each.gap) for each in alone] == [
            (pytest.approx((each.ended - each.started - each.seconds) / 2), None) for each in kept
        ]
        assert [each.hold for each in alone] == [pytest.approx(each.waited) for each in kept], "nobody was before them"
        assert {each.hold for each in (first, second, third)} == {None}
        windowed = msgspec.structs.replace(service.dispatcher.limits, max_wait=0.01)
        told = past_traffic._calls(list(service.metrics.calls), [], windowed)
        assert {each.hold for each in told} == {None}, "they may have waited for company"
        way = alone[-1].lag
        assert way is not None
        assert (first.lag, first.gap) == (pytest.approx(way + 1.375), 0.5)
        assert (second.lag, second.gap) == (pytest.approx(way + 1.5), 1.75)
        assert (third.lag, third.gap) == (pytest.approx(way + 1.5), 2.0), "the worker did not say"

    run(go)


def test_who_was_refused_counts() -> None:
    async def go() -> None:
        front = past()
        now, log = time.monotonic(), front.service.log
        log.refused.append(RefusedRequest(None, now - 3.0, 0, False, 30, 12))
        log.refused.append(RefusedRequest("bob", now - 2.0, 0, True))
        given_up = msgspec.structs.replace(
            slowest(front), id="x", ended=now, finish_reason="shed", total_s=1.0, prefill_s=None, tokens=0
        )
        log.keep(None, given_up)
        question = past_traffic.lately(past_traffic.past_of(front.service), [])
        assert isinstance(question, SequenceQuestion)
        refused = [each for each in question.requests if each.refused]
        assert [(each.size > 0, each.most, each.background) for each in refused] == [
            (True, 12, False),
            (False, None, True),
            (True, None, False),
        ]
        assert len({each.tenant for each in question.requests}) == 2
        told = answer(question, lambda: False)
        assert told.measured.refused == 2, "background requests count among nobody"
        assert told.now.figures.requests >= 60

    run(go)


def test_who_was_given_up_at_its_deadline_is_simulated_with_it() -> None:
    async def go() -> None:
        front = past()
        now, log = time.monotonic(), front.service.log
        waited = msgspec.structs.replace(
            slowest(front), id="x", ended=now, finish_reason="late", total_s=1.5, prefill_s=None, tokens=0, timeout=1.5
        )
        ran = msgspec.structs.replace(
            waited, id="y", total_s=1.75, queued_s=0.25, prefill_s=0.5, tokens=3, timeout=1.75
        )
        for each in (waited, ran):
            log.keep(None, each)
        question = past_traffic.lately(past_traffic.past_of(front.service), [])
        assert isinstance(question, SequenceQuestion)
        late = [each for each in question.requests if each.late]
        assert [(each.timeout, each.outputs, each.refused, each.answered) for each in late] == [
            (1.75, 3, False, False),
            (1.5, 0, True, False),
        ]
        assert answer(question, lambda: False).measured.refused == 2

    run(go)


def test_a_flood_of_refused_requests_hides_nobody_else() -> None:
    async def go() -> None:
        front = past()
        now, log = time.monotonic(), front.service.log
        answered = sum(map(len, log.ended.values()))
        for index in range(40_000):
            log.refuse(RefusedRequest(None, now - 80.0 + index / 500, 0, False, 4000, 12))
        # Some 16 a second: they go back as far as they came.
        assert 1200 < len(log.refused) < 1400
        assert log.refused[0].arrival == now - 80.0
        question = past_traffic.lately(past_traffic.past_of(front.service), [])
        assert isinstance(question, SequenceQuestion)
        refused = [each.arrival for each in question.requests if each.refused]
        assert len(question.requests) - len(refused) == answered
        assert len(question.requests) <= 1000
        assert len(refused) >= 500
        assert max(refused) - min(refused) > 70

    run(go)


def test_it_is_noted_what_was_refused() -> None:
    async def go() -> None:
        front = Front(FakeClient(manual=True), max_waiting=1)
        front.client.refusal = QueueFull("no room", 1.0)
        for _ in range(2):
            assert (await front.complete(max_tokens=7)).status == 429
        noted = front.service.log.refused
        assert [(each.size > 0, each.max_tokens, each.hold_updates) for each in noted] == [(True, 7, True)] * 2

    run(go)


# One request


def test_what_would_have_made_it_faster_is_told_on_request(here: list[Any]) -> None:
    async def go() -> None:
        front = past()
        request = slowest(front)
        (part,) = (await why_not_faster(front, request.id, query="")).json()["parts"]
        assert part["what_if"] is None
        assert here == []
        (part,) = (await why_not_faster(front, request.id)).json()["parts"]
        told = part["what_if"]
        assert told["measured_s"] == pytest.approx(request.total_s, abs=1e-3)
        assert told["predicted_s"] == pytest.approx(told["measured_s"], rel=0.1)
        assert told["untried"] == []
        changes = {each["change"]: each for each in told["changes"]}
        assert {"max_num_seqs = 8", "a priority before all others"} <= changes.keys()
        assert "another machine like this one beside it" in changes
        more = changes["max_num_seqs = 8"]
        assert (more["setting"], more["value"]) == ("max_num_seqs", 8)
        assert more["total_s"] <= 0.9 * told["predicted_s"]
        assert more["saves"] == pytest.approx(1 - more["total_s"] / told["predicted_s"], abs=0.01)
        assert [each["total_s"] for each in told["changes"]] == sorted(each["total_s"] for each in told["changes"])
        assert f"with max_num_seqs = 8 {more['total_s']:.2f} s" in told["text"]
        assert "simulated" in "\n".join(why.words(part))
        assert told["text"] in "\n".join(why.words(part))

    run(go)


def test_a_request_is_told_of_by_the_settings_that_it_had(here: list[Any]) -> None:
    async def go() -> None:
        front = past()
        request = slowest(front)
        request.waits = {"waiting_for_slots": request.queued_s or 0.0}
        front.service.retune(msgspec.structs.replace(FEW, max_num_seqs=32))
        (part,) = (await why_not_faster(front, request.id)).json()["parts"]
        assert here[-1].config.max_num_seqs == 2
        assert part["what_if"]["predicted_s"] == pytest.approx(part["what_if"]["measured_s"], rel=0.1)
        assert "for one of 2 places" in part["hints"][0]["text"]
        assert (await ask(front)).json()["settings"]["now"]["max_num_seqs"] == 32
        front.service.former.note(front.client.config, request.ended - 1e-3)
        refused = await why_not_faster(front, request.id)
        assert (refused.status, refused.error["code"]) == (409, "settings_changed")
        assert "the settings of `tiny` changed while it was there" in refused.error["message"]

    run(go)


def test_where_nothing_would_have_helped_that_is_said(here: list[Any]) -> None:
    async def go() -> None:
        front = past(rate=0.3, config=SequenceConfig(model="tiny", max_num_seqs=64))
        kept = front.service.log.ended[None]

        def has_company(one: EndedRequest) -> bool:
            begins = one.ended - (one.total_s or 0.0)
            return any(
                begins < each.ended and each.ended - (each.total_s or 0.0) < one.ended
                for each in kept
                if each is not one
            )

        # A long answer to a short prompt, by itself: only a faster machine would help.
        alone = min(
            (each for each in kept if not has_company(each)),
            key=lambda each: (each.prompt_tokens or 0) / (each.tokens or 1),
        )
        (part,) = (await why_not_faster(front, alone.id)).json()["parts"]
        told = part["what_if"]
        assert told["changes"] == []
        assert "none of what was tried would have made it 10% faster" in told["text"]

    run(go)


@pytest.mark.parametrize(
    ("config", "tried"),
    [
        (SequenceConfig(model="tiny", strategy="none"), {'strategy = "continuous"'}),
        (
            SequenceConfig(model="tiny", strategy="dynamic", batch_size=2),
            {"max_wait_ms = 0", 'strategy = "continuous"'},
        ),
        (SequenceConfig(model="tiny", max_num_seqs=2, target_itl_ms=10), {"no target_itl_ms", "target_itl_ms = 20"}),
    ],
)
def test_what_is_tried_follows_from_the_strategy(config: SequenceConfig, tried: set[str], here: list[Any]) -> None:
    async def go() -> None:
        front = past(config=config)
        (part,) = (await why_not_faster(front, slowest(front).id)).json()["parts"]
        assert part["what_if"] is not None
        configs = [change.config for change in here[0].changes if change.config is not None]
        assert config not in configs
        seen = {
            **{f'strategy = "{each.strategy}"': 1 for each in configs if each.strategy != config.strategy},
            **{f"max_wait_ms = {each.max_wait_ms:g}": 1 for each in configs if each.max_wait_ms != config.max_wait_ms},
            **({"no target_itl_ms": 1} if any(each.target_itl_ms is None for each in configs) else {}),
            **{f"target_itl_ms = {each.target_itl_ms:g}": 1 for each in configs if each.target_itl_ms},
        }
        assert tried <= seen.keys()

    run(go)


def test_tokens_that_more_slots_need_are_told_with_them() -> None:
    ended = EndedRequest(id="cmpl-0", ended=1.0, finish_reason="length")

    def tried(**settings: Any) -> list[str]:
        return [each.words for each in _of_sequence(SequenceConfig(model="tiny", **settings), ended)]

    assert tried(max_num_seqs=200)[:2] == [
        "max_num_seqs = 400",
        "max_num_seqs = 800 and max_num_batched_tokens = 800",
    ]
    assert tried(strategy="none", max_num_batched_tokens=4)[0] == (
        'strategy = "continuous" and max_num_seqs = 8 and max_num_batched_tokens = 8'
    )


def test_of_what_was_not_answered_nothing_is_simulated(here: list[Any]) -> None:
    async def go() -> None:
        front = past()
        front.service.log.ended[None][-1].finish_reason = "abort"
        (part,) = (await why_not_faster(front, front.service.log.ended[None][-1].id)).json()["parts"]
        assert (part["what_if"], here) == (None, [])
        asking = asyncio.create_task(front.complete(max_tokens=50))
        await until(lambda: front.client.streams)
        (part,) = (await why_not_faster(front, front.client.streams[0].request.id)).json()["parts"]
        assert (part["what_if"], here) == (None, [])
        front.gone.set()
        await asking
        assert (await why_not_faster(front, slowest(front).id, query="what_if=maybe")).status == 400
        assert (await why_not_faster(front, slowest(front).id, query="faster=true")).status == 400

    run(go)


def test_of_several_parts_the_one_that_took_longest_is_told_of(here: list[Any]) -> None:
    async def go() -> None:
        front = past()
        one, other = sorted(front.service.log.ended[None], key=lambda each: each.total_s or 0.0)[-2:]
        whole = f"cmpl-{'f' * 24}"
        one.id, other.id = f"{whole}-0", f"{whole}-1"
        keep(front, [(None, each) for each in front.service.log.ended[None]])
        parts = (await why_not_faster(front, whole)).json()["parts"]
        assert {part["id"]: part["what_if"] is not None for part in parts} == {one.id: False, other.id: True}

    run(go)


def test_another_tenants_requests_are_in_the_way_and_are_not_told_of(keys: str, here: list[Any]) -> None:
    async def go() -> None:
        front = past(owner="bob", api_keys=keys)
        mine = slowest(front, "bob")
        keep(front, [("alice" if each is mine else "bob", each) for each in front.service.log.ended["bob"]])
        log = front.service.log.ended
        answered = await why_not_faster(front, mine.id, "alice")
        assert answered.status == 200
        assert len(here[0].requests) == 60, "all who were there"
        said = answered.body.decode()
        assert not any(each.id in said for each in log["bob"])
        assert set(answered.json()["parts"][0]["what_if"]) == {
            "measured_s",
            "predicted_s",
            "changes",
            "untried",
            "text",
        }
        for each in (log["bob"][0].id, log["bob"][-1].id):
            assert (await why_not_faster(front, each, "alice")).status == 404
        assert len(here) == 1

    run(go)


def test_a_twin_that_is_far_off_says_so(here: list[Any]) -> None:
    async def go() -> None:
        front = past()
        request = slowest(front)
        request.total_s = (request.total_s or 0.0) * 3
        request.queued_s = request.total_s - (request.prefill_s or 0.0) - (request.decode_s or 0.0)
        (part,) = (await why_not_faster(front, request.id)).json()["parts"]
        assert "far off" in part["what_if"]["text"]

    run(go)


def test_what_there_was_no_time_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(self: Twin, question: bytes) -> WhatIfAnswer:
        asked = msgspec.msgpack.decode(question, type=SequenceQuestion | ItemQuestion)
        looks = iter([False])
        return answer(asked, lambda: next(looks, True))

    monkeypatch.setattr(Twin, "_answer", late)

    async def go() -> None:
        front = past()
        (part,) = (await why_not_faster(front, slowest(front).id)).json()["parts"]
        told = part["what_if"]
        assert "a priority before all others" in told["untried"]
        assert "for want of time: max_num_seqs = 8" in "\n".join(why.words(part))
        assert [each["change"] for each in told["changes"]] == ["max_num_seqs = 4"]

    run(go)


# What it costs


def test_one_is_simulated_at_a_time_and_few_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, leave = 0, 0, asyncio.Event()

    async def slow(self: Twin, question: bytes) -> WhatIfAnswer:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        try:
            await leave.wait()
        finally:
            running -= 1
        return answer(msgspec.msgpack.decode(question, type=SequenceQuestion | ItemQuestion), lambda: True)

    monkeypatch.setattr(Twin, "_answer", slow)

    async def go() -> None:
        front = past()
        asking = [asyncio.create_task(ask(front)) for _ in range(MOST_ASKED)]
        await until(lambda: running)
        await asyncio.sleep(0.01)
        refused = await ask(front)
        assert (refused.status, refused.error["code"]) == (429, "too_many_simulations")
        assert refused.headers["retry-after"] == "5"
        leave.set()
        assert [(await each).status for each in asking] == [200] * MOST_ASKED
        assert most == 1
        leave.clear()
        gone = asyncio.create_task(ask(front))
        await until(lambda: running)
        front.gone.set()
        assert (await gone).status == 499
        assert running == 0, "who hangs up needs no answer"

    run(go)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, list[Twin]]:
    """Simulations end when this is set; and the twins that make them."""
    leave, twins = asyncio.Event(), []

    async def slow(self: Twin, question: bytes) -> WhatIfAnswer:
        twins.append(self)
        await leave.wait()
        return answer(msgspec.msgpack.decode(question, type=SequenceQuestion | ItemQuestion), lambda: True)

    monkeypatch.setattr(Twin, "_answer", slow)
    return leave, twins


def test_nobody_has_all_places_for_simulations(keys: str, held: tuple[asyncio.Event, list[Twin]]) -> None:
    leave, twins = held

    async def go() -> None:
        front = past(owner="alice", api_keys=keys)
        every = list(front.service.log.ended["alice"])
        keep(front, [("alice", each) for each in every[:-2]] + [("bob", every[-1]), ("root", every[-2])])
        log = front.service.log.ended
        asking: list[asyncio.Task[Answer]] = []
        for owner in PEOPLE:
            asking.append(asyncio.create_task(why_not_faster(front, log[owner][-1].id, owner)))
            await until(lambda: twins and twins[0]._asked == len(asking))
            again = await why_not_faster(front, log[owner][-1].id, owner)
            assert (again.status, again.error["code"]) == (429, "too_many_simulations")
            assert "a request of yours" in again.error["message"]
        assert len(asking) == MOST_ASKED - 1
        with pytest.raises(ApiError, match="3 simulations are asked for already"):
            await twins[0].ask(lambda: pytest.fail("there is no place"), Viewer("carol", False))
        asking.append(asyncio.create_task(ask(front, **bearer("root"))))
        await until(lambda: twins[0]._asked == MOST_ASKED)
        assert (await ask(front, **bearer("root"))).status == 429
        leave.set()
        assert [(await each).status for each in asking] == [200] * MOST_ASKED
        assert (await why_not_faster(front, log["alice"][-1].id, "alice")).status == 200, "it has been answered"

    run(go)


def test_all_who_have_no_key_share_one_place(held: tuple[asyncio.Event, list[Twin]]) -> None:
    leave, twins = held

    async def go() -> None:
        front = past()
        first = asyncio.create_task(why_not_faster(front, slowest(front).id))
        await until(lambda: twins)
        assert (await why_not_faster(front, slowest(front).id)).status == 429
        leave.set()
        assert [(await ask(front)).status, (await first).status] == [200, 200]

    run(go)


class _Child:
    """A stand-in for the process: a module that does what a test wants."""

    def __init__(self, folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "stand_in.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        self.twin = Twin("stand_in")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise RuntimeError('what')", "log says more"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", "more processor time"),
        ("import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass", "more processor time"),
    ],
)
def test_a_process_that_fails_is_no_500(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: list[Any]
) -> None:
    async def go() -> None:
        front = past()
        assert (await ask(front)).status == 200
        monkeypatch.undo()
        twin = _Child(tmp_path, code, monkeypatch).twin
        with pytest.raises(Unavailable, match=words):
            await twin.ask(lambda: here[0])

    run(go)


@pytest.mark.processes
def test_a_process_that_takes_too_long_or_is_wanted_no_more_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: list[Any]
) -> None:
    mark = tmp_path / "pid"
    code = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"

    def is_gone() -> bool:
        return not Path(f"/proc/{mark.read_text()}").exists()

    async def go() -> None:
        assert (await ask(past())).status == 200
        monkeypatch.undo()
        twin = _Child(tmp_path, code, monkeypatch).twin
        asked = asyncio.create_task(twin.ask(lambda: here[0]))
        await until(lambda: mark.exists() and mark.read_text())
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert is_gone()
        monkeypatch.setattr("chairlift.server.twin.twin._PATIENCE_S", 0.5)
        with pytest.raises(Unavailable, match="no time"):
            await twin.ask(lambda: here[0])
        assert is_gone()

    run(go)


@pytest.mark.processes
def test_the_real_process_answers_over_http() -> None:
    async def go() -> None:
        front = past()
        told = await ask(front, {"max_num_seqs": 32})
        assert told.status == 200, told.body
        assert told.json()["tried"]["ttft"][0] < told.json()["measured"]["ttft"][0]
        (part,) = (await why_not_faster(front, slowest(front).id)).json()["parts"]
        assert part["what_if"]["changes"]

    run(go)
