"""Models whose settings follow their traffic: what is asked, what is turned, what is told of it and what it costs."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support.past import traffic
from support.server_harness import FakeClient, Front, run
from support.tuned import question_of

from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.errors import Unavailable
from chairlift.plan.what_if import Change, SequenceQuestion, WhatIfAnswer, answer
from chairlift.plan.what_if_process import MOST_S
from chairlift.server.http.api_errors import ApiError
from chairlift.server.models.request_log import Viewer
from chairlift.server.twin import tuning
from chairlift.server.twin.past_traffic import Past
from chairlift.server.twin.tuning import Tuning
from chairlift.server.twin.twin import Question, Twin

CPU_S = 0.25
# It waits for company that does not come.
PATIENT = SequenceConfig(model="tiny", strategy="dynamic", max_wait_ms=800.0, auto=True)


class HereTwin(Twin):
    """Answers in this process, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[SequenceQuestion] = []
        self.error: Exception | None = None

    async def ask(self, make: Callable[[], Question], viewer: Viewer | None = None) -> tuple[Question, WhatIfAnswer]:
        assert viewer is None, "it asks for nobody"
        question = make()
        assert isinstance(question, SequenceQuestion)
        self.questions.append(question)
        if self.error is not None:
            raise self.error
        found = answer(question, lambda: False)
        found.cpu_s = CPU_S
        return question, found


class Tuned:
    """A server with one model, whose traffic is simulated under whatever settings it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: SequenceConfig = PATIENT, **settings: Any) -> None:
        self.front = Front(FakeClient(manual=True))
        self.service, self.client = self.front.service, self.front.client
        self.client.config = config
        self.twin = HereTwin()
        window = settings.pop("window_s", 0.0)
        self.tuning = Tuning(self.front.models, self.twin, ServerConfig(**settings), window)
        monkeypatch.setattr(tuning, "lately", self._lately)

    def _lately(self, past: Past, changes: list[Change]) -> SequenceQuestion:
        assert isinstance(past.of, SequenceQuestion)
        return question_of(past.of.config, traffic(rate=1.5), changes)

    async def look(self) -> float:
        return await self.tuning.look_at(self.service)


def test_its_share_is_of_the_processors_that_there_are_on_any_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert Tuned(monkeypatch, tune_cpu_share=0.25).tuning._share == 0.25


def test_what_the_tuner_decides_holds_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        tuned = Tuned(monkeypatch)
        assert "tuning" not in (await tuned.front.call("GET", "/v1/models/tiny")).json()
        with caplog.at_level(logging.INFO):
            assert await tuned.look() == CPU_S
        assert tuned.client.config.max_wait_ms == 400.0
        assert "tiny: max_wait_ms goes from 800 to 400: of the last minutes' traffic answers would take" in caplog.text
        told = (await tuned.front.call("GET", "/v1/models/tiny")).json()
        assert told["settings"]["max_wait_ms"] == 400.0
        about = told["tuning"]
        assert about["configured"] == {"batch_size": 8, "max_wait_ms": 800.0, "background_step_ms": 40.0}
        assert about["settings"]["max_wait_ms"] == 400.0
        assert (about["on_trial"], about["rounds"], about["cpu_s"]) == (True, 1, CPU_S)
        (decision,) = about["decisions"]
        assert (decision["setting"], decision["before"], decision["after"]) == ("max_wait_ms", 800.0, 400.0)
        await tuned.look()
        about = (await tuned.front.call("GET", "/v1/models/tiny")).json()["tuning"]
        assert (about["on_trial"], len(about["decisions"])) == (False, 2)
        assert "stays at 400" in about["decisions"][0]["reason"], "the last first"
        metrics = (await tuned.front.call("GET", "/metrics")).body.decode()
        for line in (
            'chairlift_tuner_rounds_total{model="tiny"} 2.0',
            'chairlift_tuner_changes_total{model="tiny",setting="max_wait_ms"} 1.0',
            'chairlift_tuned_setting{model="tiny",setting="max_wait_ms"} 400.0',
            f'chairlift_tuner_cpu_seconds_total{{model="tiny"}} {2 * CPU_S}',
        ):
            assert line in metrics

    run(go)


def test_a_change_is_judged_by_the_traffic_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        tuned = Tuned(monkeypatch, window_s=3600.0)
        await tuned.look()
        assert await tuned.look() == 0.0
        assert len(tuned.twin.questions) == 1, "an hour is to pass"

    run(go)


def test_what_came_under_other_settings_says_nothing_of_those_set_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        tuned = Tuned(monkeypatch, window_s=3600.0)
        tuned.service.retune(msgspec.structs.replace(PATIENT, batch_size=4))
        assert await tuned.look() == 0.0
        assert not tuned.twin.questions

    run(go)


def test_while_it_rests_no_change_stays_on_trial_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """On few processors, or with many models, an answer may be followed by a rest of many minutes."""

    async def go() -> None:
        tuned = Tuned(monkeypatch, tune_every_s=1e-3, tune_cpu_share=1e-6)
        task = asyncio.create_task(tuned.tuning.run())
        while tuned.service.metrics.tuner is None or not tuned.service.metrics.tuner.num_taken_back:
            await asyncio.sleep(1e-3)
        task.cancel()
        assert len(tuned.twin.questions) == 1, "it rests for hours"
        tuner = tuned.service.metrics.tuner
        assert tuned.client.config is PATIENT
        assert "nothing could judge it: there was no time to ask the twin" in tuner.decisions[-1].reason

    run(go)


def test_an_answer_that_settings_by_hand_have_overtaken_turns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was simulated were neighbours of settings that hold no more."""

    async def go() -> None:
        tuned = Tuned(monkeypatch)
        by_hand = msgspec.structs.replace(PATIENT, batch_size=4)
        ask = tuned.twin.ask

        async def overtaken(make: Callable[[], Question]) -> tuple[Question, WhatIfAnswer]:
            found = await ask(make)
            tuned.client.retune(by_hand)
            assert tuned.service.metrics.tuner is not None
            tuned.service.metrics.tuner.begin_anew(by_hand)
            return found

        monkeypatch.setattr(tuned.twin, "ask", overtaken)
        assert await tuned.look() == CPU_S
        tuner = tuned.service.metrics.tuner
        assert tuner is not None
        assert tuned.client.config is tuner.config is by_hand
        assert (tuner.on_trial, tuner.rounds) == (False, 0)

    run(go)


def test_the_kv_memory_is_taken_to_stay_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        tuned = Tuned(monkeypatch)
        await tuned.look()
        (question,) = tuned.twin.questions
        assert question.config.kv_cache_gb is not None

    run(go)


def test_where_too_little_came_nothing_is_asked() -> None:
    async def go() -> None:
        front, twin = Front(FakeClient(manual=True)), HereTwin()
        assert await Tuning(front.models, twin, ServerConfig()).look_at(front.service) == 0.0
        assert not twin.questions

    run(go)


def test_a_twin_that_fails_costs_the_most_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        tuned = Tuned(monkeypatch)
        tuned.twin.error = Unavailable("the machine had no time", 1)
        assert await tuned.look() == MOST_S
        assert tuned.client.config is PATIENT
        assert tuned.service.metrics.tuner_cpu_s == MOST_S

    run(go)


@pytest.mark.parametrize(
    "error",
    [
        ApiError(409, "too little came"),
        ApiError(429, "others ask"),
        Unavailable("the machine had no time", 1),
        RuntimeError("a bug"),
    ],
    ids=["nobody", "others", "no time", "a bug"],
)
def test_a_change_that_can_not_be_judged_in_time_is_taken_back(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("chairlift.server.twin.tuning.time.monotonic", lambda: clock[0])

    async def go() -> None:
        tuned = Tuned(monkeypatch, window_s=120.0)
        await tuned.look()
        tuner = tuned.service.metrics.tuner
        assert tuner is not None
        tuned.twin.error = error
        for seconds, left in ((121.0, True), (359.0, True), (361.0, False)):
            clock[0] = 1000.0 + seconds
            with contextlib.suppress(RuntimeError):
                await tuned.look()
            if isinstance(error, RuntimeError):
                tuned.tuning._take_back_in_time(tuned.service, "the tuner failed")
            assert tuner.on_trial is left
        assert tuned.client.config is PATIENT
        assert "max_wait_ms goes back to 800: for 360 s nothing could judge it: " in tuner.decisions[-1].reason

    with caplog.at_level(logging.INFO):
        run(go)
    said = [line for line in caplog.messages if "nothing was turned" in line]
    assert len(said) == (0 if str(error) in ("too little came", "a bug") else 3)


@pytest.mark.parametrize(
    ("settings", "tunes"),
    [
        ({}, False),
        ({"auto": True}, True),
        ({"target_itl_ms": 50.0}, True),
        ({"target_ttft_ms": 500.0}, True),
        ({"target_itl_ms": 50.0, "auto": False}, False),
    ],
    ids=str,
)
def test_who_is_tuned(settings: dict[str, Any], tunes: bool) -> None:
    assert SequenceConfig(model="m", **settings).tunes is tunes


def test_it_goes_on_after_an_error_and_leaves_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        tuned = Tuned(monkeypatch, tune_every_s=1e-3, tune_cpu_share=1.0)
        tuned.twin.error = RuntimeError("a bug")
        monkeypatch.setattr(tuning, "MOST_S", 0.0)
        task = asyncio.create_task(tuned.tuning.run())
        while not tuned.twin.questions:
            await asyncio.sleep(1e-3)
        tuned.twin.error = None
        while tuned.client.config is PATIENT:
            await asyncio.sleep(1e-3)
        tuned.client.config = SequenceConfig(model="tiny")
        await asyncio.sleep(0.3)
        asked = len(tuned.twin.questions)
        await asyncio.sleep(0.05)
        assert not task.done(), "it ended, and so asked nothing"
        task.cancel()
        assert len(tuned.twin.questions) == asked, "nobody wants it tuned any more"

    run(go)
