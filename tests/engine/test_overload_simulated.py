"""What shedding achieves, in virtual time with the production scheduler: who is in time at, and far above, capacity."""

import sys
from collections.abc import Callable
from functools import cache
from itertools import islice
from math import ceil
from pathlib import Path
from statistics import mean

import pytest
from support.sequences_virtual import Arrival, Machine, Outcome, VirtualModel, poisson, serve

from chairlift.config.sequences import SequenceConfig
from chairlift.core.finished import ShedReason
from chairlift.core.sequences import overload

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from rate_search import highest_rate

TARGET = 2.0
SECONDS = 60.0


def shedding(rate: float | Callable[[float], float], seconds: float = SECONDS, **more: object) -> Outcome:
    knows = bool(more.pop("knows_length", True))
    return serve(poisson(rate, seconds, knows_length=knows), target_ttft_ms=TARGET * 1000, **more)  # type: ignore[arg-type]


@cache
def best_rate() -> float:
    """The highest at which, with nobody refused, 19 of 20 are in time."""
    found = highest_rate(lambda rate: serve(poisson(rate, SECONDS)).inside(TARGET) >= 0.95, 8.0, 1.03)
    assert found is not None
    return found


@pytest.mark.parametrize("load", [1.3, 5.0])
@pytest.mark.parametrize("knows_length", [True, False])
def test_overload_costs_no_goodput_and_who_is_let_in_is_in_time(load: float, knows_length: bool) -> None:
    outcome = shedding(load * best_rate(), knows_length=knows_length)
    assert outcome.goodput(TARGET) >= 0.9 * best_rate()
    assert outcome.ttft(0.95) <= TARGET
    given_up = [life for life in outcome.lives if life.shed is not None and life.shed_at != life.arrival.moment]
    assert len(given_up) <= 0.02 * len(outcome.lives)


def test_without_shedding_nobody_is_in_time_in_the_end() -> None:
    outcome = serve(poisson(1.3 * best_rate(), SECONDS))
    assert outcome.goodput(TARGET) < 0.5 * best_rate()
    assert outcome.ttft(0.95) > 3 * TARGET


def test_nearly_nobody_is_refused_below_capacity() -> None:
    outcome = shedding(0.8 * best_rate())
    assert outcome.inside(TARGET) >= 0.97


@pytest.mark.parametrize("knows_length", [True, False])
def test_predictions_are_close(knows_length: bool) -> None:
    # A queue that builds up and empties again: nobody is refused, but everybody's wait is predicted.
    arrivals = list(islice(poisson(3 * best_rate(), SECONDS, 3, knows_length=knows_length), 300))
    outcome = serve(iter(arrivals), target_ttft_ms=1e6)
    predicted = [(life.expected, life.ttft) for life in outcome.lives if life.expected is not None]
    assert len(predicted) > 250
    errors = [abs(expected - ttft) / (ttft + 0.1) for expected, ttft in predicted[100:]]
    assert mean(errors) < (0.05 if knows_length else 0.15)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_machine_that_slows_down_is_followed(noise: float) -> None:
    machine = Machine(noise=noise, slowness=lambda now: 2.0 if 30 < now < 80 else 1.0)
    outcome = shedding(3 * best_rate(), 120.0, machine=machine)
    settled = [life.ttft for life in outcome.lives if life.ttft is not None and not 28 < life.arrival.moment < 40]
    assert sum(ttft <= TARGET for ttft in settled) >= 0.95 * len(settled)
    slow = [life for life in outcome.lives if 40 < life.arrival.moment < 78 and life.ttft is not None]
    assert len(slow) / 38 >= 0.8 * best_rate() / 2


def test_no_more_certainty_is_asked_for_than_the_load_calls_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # Bursts, long prompts, and a machine whose speed moves: what is predicted is often off.
    machine = Machine(noise=0.05, slowness=lambda now: (0.9, 1.15, 1.0, 0.8)[int(now / 25) % 4])

    def inside(rate: float) -> float:
        def at(now: float) -> float:
            return rate * (0.4 if int(now / 4) % 3 else 2.2)

        loads = [poisson(at, 100.0, seed, prompts=(16, 900)) for seed in range(2)]
        return mean(serve(load, machine, max_num_seqs=64, target_ttft_ms=1000).inside(1.0) for load in loads)

    by_load = inside(4.5), inside(20.0)
    monkeypatch.setattr(overload, "_SATURATED", 1e-9)
    promised = inside(4.5), inside(20.0)
    assert by_load[0] > 1.01 * promised[0]
    assert by_load[1] > 0.98 * promised[1]


def test_little_kv_memory_is_counted_in() -> None:
    machine = Machine(num_blocks=200)
    plain = highest_rate(lambda rate: serve(poisson(rate, SECONDS), machine).inside(TARGET) >= 0.95, 4.0, 1.05)
    assert plain is not None
    assert plain < 0.95 * best_rate(), "blocks are what is scarce"
    outcome = shedding(3 * plain, machine=machine)
    assert outcome.goodput(TARGET) >= 0.9 * plain
    assert outcome.ttft(0.95) <= TARGET


def test_prompts_cut_by_a_target_for_steps_are_counted_in() -> None:
    outcome = shedding(3 * best_rate(), target_itl_ms=30.0)
    assert outcome.ttft(0.95) <= TARGET
    assert outcome.goodput(TARGET) >= 0.6 * best_rate()


def test_background_requests_are_neither_shed_nor_in_the_way() -> None:
    live = list(poisson(2 * best_rate(), 30.0))
    background = [Arrival(0.0, 100, 200, background=True) for _ in range(40)]
    outcome = serve(iter(background + live), target_ttft_ms=TARGET * 1000)
    served = [life for life in outcome.lives if life.arrival.background]
    assert all(life.done is not None and life.shed is None for life in served)
    waits = sorted(life.ttft for life in outcome.lives if life.ttft is not None and not life.arrival.background)
    assert waits[int(0.95 * len(waits))] <= TARGET
    in_time = sum(wait <= TARGET for wait in waits) / 30
    assert in_time >= 0.85 * best_rate()


def test_a_deadline_is_refused_at_once_if_it_cannot_be_met() -> None:
    hurried = list(poisson(2 * best_rate(), 30.0))
    arrivals = [
        Arrival(each.moment, each.prompt, each.length, timeout=5.0 if index % 2 else None)
        for index, each in enumerate(hurried)
    ]
    outcome = serve(iter(arrivals))
    refused = outcome.shed(ShedReason.DEADLINE)
    assert refused
    assert all(life.arrival.timeout for life in refused)
    kept = [life for life in outcome.lives if life.arrival.timeout and life.done is not None]
    in_time = [life for life in kept if life.done <= life.arrival.moment + 5.0]
    assert len(in_time) >= 0.8 * len(kept)


def test_who_comes_back_when_told_is_let_in_and_in_time() -> None:
    model = VirtualModel(SequenceConfig(model="virtual", max_num_seqs=4, target_ttft_ms=1000), Machine())
    lives = [model.send(Arrival(0.0, 100, 300), number) for number in range(20)]
    refused = next(life.shed for life in lives if life.shed is not None)
    back = ceil(refused.retry_after)  # as HTTP has it
    while model.now < back and model.step():
        pass
    model.runner.now = max(model.now, back)
    again = model.send(Arrival(model.now, 100, 100), 20)
    while model.step():
        pass
    assert again.shed is None
    assert again.ttft is not None
    assert again.ttft <= 1.1
