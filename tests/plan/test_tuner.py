"""The tuner: small changes, believed only as far as the twin is, and taken back where reality disagrees."""

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings
from support.past import traffic
from support.tuned import question_of

from chairlift.config.sequences import SequenceConfig
from chairlift.plan.tuner import Tuner, disbelieved, rungs
from chairlift.plan.what_if import Change, Foretold, Spread, TrafficFigures, WhatIfAnswer, answer


def figures(ttft: float = 1.0, itl: float = 0.05, latency: float = 4.0, refused: int = 0) -> TrafficFigures:
    """Of a hundred requests; the 95th percentiles are twice the medians."""
    spreads = {"ttft": ttft, "itl": itl, "latency": latency}
    return TrafficFigures(
        requests=100,
        refused=refused,
        requests_per_s=1.0,
        outputs_per_s=50.0,
        **{name: Spread(each, 2 * each) for name, each in spreads.items()},
    )


def config_of(**own: Any) -> SequenceConfig:
    return SequenceConfig(model="m", auto=True, **own)


def answer_to(tuner: Tuner, better: dict[str, float], now: TrafficFigures | None = None) -> WhatIfAnswer:
    """The twin's answer, by which answers take 4 s, or as long as `better` says of a setting that differs."""
    now = now or figures()
    found: list[Foretold | None] = []
    for config in tuner.alternatives():
        changed = [each for each in better if getattr(config, each) != getattr(tuner.config, each)]
        found.append(Foretold(figures(latency=better[changed[0]]) if changed else now))
    return WhatIfAnswer(now, Foretold(now), found)


def test_the_best_of_the_neighbours_is_taken_one_step() -> None:
    tuner = Tuner(config_of(max_num_seqs=64))
    decision = tuner.hear(answer_to(tuner, {"max_num_seqs": 3.0, "step_time_ms": 3.5}))
    assert (decision.setting, decision.before, decision.after) == ("max_num_seqs", 64, 48)
    assert decision.reason == (
        "max_num_seqs goes from 64 to 48: of the last minutes' traffic answers would take 25% less"
    )
    assert tuner.config.max_num_seqs == 48
    assert tuner.configured.max_num_seqs == 64
    assert tuner.on_trial
    assert tuner.num_changes == {"max_num_seqs": 1}


def test_a_change_that_promises_little_is_none() -> None:
    tuner = Tuner(config_of())
    decision = tuner.hear(answer_to(tuner, {"max_num_seqs": 3.9}))
    assert decision.setting is None
    assert tuner.config is tuner.configured


def test_what_is_late_goes_before_what_answers_take() -> None:
    tuner = Tuner(config_of(target_itl_ms=80.0))
    late = [Foretold(figures(itl=0.03, latency=9.0)) for _ in tuner.alternatives()]
    decision = tuner.hear(WhatIfAnswer(figures(), Foretold(figures()), list(late)))
    assert "less would be late or refused" in decision.reason
    tuner = Tuner(config_of(target_itl_ms=100.0))
    refusing = [Foretold(figures(latency=1.0, refused=30)) for _ in tuner.alternatives()]
    assert tuner.hear(WhatIfAnswer(figures(), Foretold(figures()), list(refusing))).setting is None


@pytest.mark.parametrize("off", [{"ttft": 1.2}, {"itl": 0.06}, {"latency": 3.0}])
def test_a_twin_that_does_not_predict_what_was_turns_nothing(off: dict[str, float]) -> None:
    tuner = Tuner(config_of())
    promised = answer_to(tuner, {"max_num_seqs": 0.5})
    wrong = WhatIfAnswer(promised.measured, Foretold(figures(**off)), promised.changed)
    decision = tuner.hear(wrong)
    assert decision.setting is None
    assert decision.reason.startswith("nothing was turned: the twin has ")
    assert disbelieved(promised) is None
    near = WhatIfAnswer(figures(ttft=1e-3), Foretold(figures(ttft=2.5e-3)), [])
    assert disbelieved(near) is None, "too short to matter"
    assert disbelieved(WhatIfAnswer(figures(), Foretold(figures(ttft=1.14)), [])) is None


def on_trial() -> Tuner:
    tuner = Tuner(config_of(max_num_seqs=64))
    tuner.hear(answer_to(tuner, {"max_num_seqs": 3.0}))
    assert [each.max_num_seqs for each in tuner.alternatives()] == [64], "the one before it is asked about"
    return tuner


def test_a_change_stays_if_what_was_measured_is_no_worse_than_without_it() -> None:
    tuner = on_trial()
    decision = tuner.hear(WhatIfAnswer(figures(), Foretold(figures()), [Foretold(figures(latency=4.1))]))
    assert (decision.setting, tuner.config.max_num_seqs, tuner.on_trial) == (None, 48, False)
    assert "stays at 48" in decision.reason


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (WhatIfAnswer(figures(), Foretold(figures()), [Foretold(figures(latency=3.0))]), "take 25% less"),
        (
            WhatIfAnswer(figures(), Foretold(figures(ttft=2.0)), [Foretold(figures())]),
            "the twin has first tokens at 2 s",
        ),
        (WhatIfAnswer(figures(), Foretold(figures()), [None]), "no time"),
    ],
    ids=["worse", "disbelieved", "unknown"],
)
def test_a_change_is_taken_back_where_reality_disagrees_and_rests(answer: WhatIfAnswer, why: str) -> None:
    tuner = on_trial()
    decision = tuner.hear(answer)
    assert decision.taken_back
    assert (decision.setting, decision.before, decision.after) == ("max_num_seqs", 48, 64)
    assert decision.reason.startswith("max_num_seqs goes back to 64: ")
    assert why in decision.reason
    assert tuner.config is tuner.configured
    assert tuner.num_taken_back == {"max_num_seqs": 1}
    rested = 0
    while tuner.hear(answer_to(tuner, {"max_num_seqs": 3.0})).setting is None:
        rested += 1
    assert rested == 4
    tuner.hear(answer)
    again = 0
    while tuner.hear(answer_to(tuner, {"max_num_seqs": 3.0})).setting is None:
        again += 1
    assert again == 2 * rested


WORSE = WhatIfAnswer(figures(), Foretold(figures()), [Foretold(figures(latency=3.0))])


def test_a_forecast_is_that_of_the_setting_that_was_asked_about() -> None:
    """Also in the round at whose end a value has rested for long enough."""
    tuner = on_trial()
    tuner.hear(WORSE)
    for _ in range(3):
        assert tuner.hear(answer_to(tuner, {})).setting is None
    assert {each.max_num_seqs for each in tuner.alternatives()} == {64}, "it rests"
    decision = tuner.hear(answer_to(tuner, {"step_time_ms": 3.0}))
    assert (decision.setting, decision.before, decision.after) == ("step_time_ms", 300.0, 225.0)


def test_a_change_that_nothing_can_judge_is_taken_back_and_rests() -> None:
    tuner = on_trial()
    decision = tuner.give_up("nobody comes")
    assert decision is tuner.decisions[-1]
    assert (decision.taken_back, decision.reason) == (True, "max_num_seqs goes back to 64: nobody comes")
    assert (tuner.config, tuner.on_trial) == (tuner.configured, False)
    assert tuner.num_taken_back == {"max_num_seqs": 1}
    assert {each.max_num_seqs for each in tuner.alternatives()} == {64}


@pytest.mark.parametrize(
    ("own", "names"),
    [
        ({}, ["max_num_seqs", "max_num_batched_tokens", "step_time_ms", "background_step_ms"]),
        ({"step_time_ms": 0.0}, ["max_num_seqs", "max_num_batched_tokens", "background_step_ms"]),
        ({"target_itl_ms": 50.0}, ["max_num_seqs", "max_num_batched_tokens", "target_itl_ms", "background_step_ms"]),
        ({"max_num_seqs": 1, "max_num_batched_tokens": 1}, ["step_time_ms", "background_step_ms"]),
        ({"strategy": "dynamic"}, ["batch_size", "max_wait_ms", "background_step_ms"]),
        ({"strategy": "static"}, ["batch_size", "background_step_ms"]),
        ({"strategy": "none"}, ["background_step_ms"]),
    ],
    ids=str,
)
def test_only_what_the_strategy_reads_is_turned(own: dict[str, Any], names: list[str]) -> None:
    tuner = Tuner(config_of(**own))
    assert list(tuner.settings) == names
    for config in tuner.alternatives():
        changed = [name for name in names if getattr(config, name) != getattr(tuner.config, name)]
        assert len(changed) == 1


spread = st.builds(lambda p50, more: Spread(p50, p50 * (1 + more)), st.floats(1e-4, 50), st.floats(0, 3))
any_figures = st.builds(
    TrafficFigures,
    requests=st.integers(1, 500),
    refused=st.integers(0, 50),
    ttft=st.none() | spread,
    itl=st.none() | spread,
    latency=st.none() | spread,
    requests_per_s=st.floats(0, 100),
    outputs_per_s=st.floats(0, 1000),
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_comes_no_setting_leaves_its_ladder_and_none_moves_but_a_step(data: st.DataObject) -> None:
    own = data.draw(
        st.sampled_from(
            [
                {},
                {"target_itl_ms": 37.0, "target_ttft_ms": 900.0},
                {"max_num_seqs": 3, "max_num_batched_tokens": 5},
                {"strategy": "dynamic", "batch_size": 5, "max_wait_ms": 7.0},
                {"strategy": "static"},
            ]
        )
    )
    tuner = Tuner(config_of(**own))
    for _ in range(data.draw(st.integers(1, 12))):
        before, was_on_trial = tuner.config, tuner.on_trial
        measured = data.draw(any_figures)
        now = measured if data.draw(st.booleans()) else data.draw(any_figures)
        count = len(tuner.alternatives())
        changed = data.draw(st.lists(st.none() | st.builds(Foretold, any_figures), min_size=count, max_size=count))
        decision = tuner.hear(WhatIfAnswer(measured, Foretold(now), changed))
        assert decision is tuner.decisions[-1]
        moved = [name for name in tuner.settings if getattr(before, name) != getattr(tuner.config, name)]
        assert moved == ([] if decision.setting is None else [decision.setting])
        assert decision.taken_back <= was_on_trial
        assert tuner.on_trial == (bool(moved) and not decision.taken_back)
        if moved and not decision.taken_back:
            assert disbelieved(WhatIfAnswer(measured, Foretold(now), [])) is None
        for name in moved:
            ladder = rungs(tuner.configured, name)
            places = [ladder.index(getattr(each, name)) for each in (before, tuner.config)]
            assert abs(places[0] - places[1]) == 1
            assert name == "step_time_ms" or getattr(tuner.config, name) <= getattr(tuner.configured, name)
        assert tuner.config.slots <= tuner.config.max_num_batched_tokens


def test_settings_by_hand_leave_the_others_where_they_were_turned() -> None:
    tuner = on_trial()
    configured = msgspec.structs.replace(tuner.configured, max_num_batched_tokens=96)
    config = msgspec.structs.replace(tuner.config, max_num_batched_tokens=96)
    tuner.begin_anew(configured, config)
    assert (tuner.config, tuner.configured, tuner.on_trial) == (config, configured, False)
    assert {each.max_num_seqs for each in tuner.alternatives()} == {32, 48, 64}
    # On no rung of what is configured now: its neighbours are the nearest above and below.
    tuner.begin_anew(config_of(max_num_seqs=30), config_of(max_num_seqs=20))
    assert {each.max_num_seqs for each in tuner.alternatives()} == {15, 20, 22}
    tuner.begin_anew(configured)
    assert tuner.config is tuner.configured is configured


def test_turn_by_turn_a_window_that_is_too_long_for_the_traffic_is_closed() -> None:
    tuner = Tuner(config_of(strategy="dynamic", max_wait_ms=800.0))
    trace, seen = traffic(rate=1.5), []
    for _ in range(8):
        changes = [Change(config=each) for each in tuner.alternatives()]
        told = answer(question_of(tuner.config, trace, changes), lambda: False)
        tuner.hear(told)
        assert told.measured.latency is not None
        seen.append(told.measured.latency.p50)
    windows = [each.after for each in tuner.decisions if each.setting is not None]
    assert windows == [400.0, 200.0, 0.0]
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < seen[0] / 2
    assert [each.taken_back for each in tuner.decisions if each.taken_back] == []


def test_a_step_may_take_longer_only_where_first_tokens_matter_alone() -> None:
    assert max(rungs(config_of(), "step_time_ms")) == 300.0
    assert max(rungs(config_of(target_ttft_ms=500.0), "step_time_ms")) == 1200.0
