"""The steps to come: what is known exactly, what cannot be, and that more in line never means sooner."""

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from chairlift.core.cost import Coefficients
from chairlift.core.sequences.budget import FLOOR
from chairlift.core.sequences.forecast import Forecast, StepLimits
from chairlift.core.sequences.outlook import Outlook

STEP = Coefficients(1.0, 0.0, 0.0, 0.0)  # a second a step, whatever is in it
LIMITS = StepLimits(slots=2, tokens=100, num_blocks=1000, block_size=16)

prompts = st.integers(1, 300)
outputs = st.integers(1, 200)
jobs = st.lists(st.tuples(prompts, outputs), max_size=12)
costs = st.builds(Coefficients, st.floats(1e-4, 0.1), st.floats(0, 1e-2), st.floats(0, 1e-4), st.floats(0, 1e-5))


def firsts(forecast: Forecast, *waiting: tuple[int, int]) -> list[float]:
    return [forecast.admit(prompt, 0, output).first for prompt, output in waiting]


def test_nobody_runs_and_the_prompt_is_all_there_is() -> None:
    forecast = Forecast(LIMITS, Coefficients(1.0, 0.1, 0.01, 0.001), now=50.0)
    # 10 tokens, which read 10 and make 55 pairs.
    assert forecast.admit(10, 0, 5).first == pytest.approx(50 + 1 + 1 + 0.1 + 0.055)


def test_slots_come_free_when_those_who_run_have_their_tokens() -> None:
    running = [(20, 3), (20, 7)]
    assert firsts(Forecast(LIMITS, STEP, 0.0, running), (5, 1)) == [4.0]
    # Of the three, the last follows the first, which has its two tokens in steps 4 and 5.
    assert firsts(Forecast(LIMITS, STEP, 0.0, running), (5, 2), (5, 9), (5, 9)) == [4.0, 6.0, 8.0]


def test_long_prompts_take_several_steps_and_share_them() -> None:
    limits = LIMITS._replace(slots=10)
    assert firsts(Forecast(limits, STEP, 0.0), (50, 9), (50, 9), (50, 9)) == [1.0, 1.0, 2.0]
    assert firsts(Forecast(limits, STEP, 0.0), (250, 9), (10, 9)) == [3.0, 3.0]
    assert Forecast(limits, STEP, 0.0).admit(250, 200, 9).first == 1.0, "most of it was cached"


def test_a_target_for_steps_cuts_prompts_to_time() -> None:
    cost = Coefficients(0.0, 1e-3, 0.0, 0.0)
    limits = LIMITS._replace(seconds=0.05)
    assert Forecast(limits, cost, 0.0).admit(100, 0, 9).first == pytest.approx(0.1)
    starved = LIMITS._replace(seconds=1e-6)
    assert Forecast(starved, STEP._replace(token=1e-9), 0.0).admit(3 * FLOOR, 0, 9).first == pytest.approx(3.0)


@pytest.mark.parametrize("seconds", [1e300, 1e-300])
def test_a_token_that_costs_next_to_nothing_cuts_no_prompt(seconds: float) -> None:
    """So many would fill a step that no number stands for them; if the decodes alone take longer, the least goes in."""
    limits = LIMITS._replace(seconds=seconds)
    first = Forecast(limits, STEP._replace(token=1e-310), 0.0, [(10, 50)]).admit(99, 0, 9).first
    assert first == pytest.approx(1.0 if seconds > 1 else -(-99 // FLOOR))


def test_a_step_time_cuts_prompts_while_somebody_decodes() -> None:
    cost = Coefficients(1e-3, 1e-3, 0.0, 0.0)
    limits = LIMITS._replace(step_time=0.05)
    assert Forecast(limits, cost, 0.0).admit(100, 0, 9).first == pytest.approx(0.101), "alone it has all tokens"
    beside = Forecast(limits, cost, 0.0, [(10, 50)]).admit(96, 0, 9)
    assert beside.first == pytest.approx(2 * 0.05), "two steps of 48"


class StepByStep(Forecast):
    """A forecast that looks at each step of a prompt by itself."""

    def _compute(self, computed: int, prompt: int) -> None:
        while computed < prompt:
            if self._room < 1:
                self._pass(1)
            given = min(prompt - computed, self._room)
            self._room -= given
            pairs = given * computed + given * (given + 1) / 2
            computed += given
            seconds = self.cost.token * given + self.cost.kv_token * computed + self.cost.pair * pairs
            self._added += seconds
            self._prompts += seconds


long_prompts = st.lists(st.tuples(st.integers(1, 6000), st.floats(0, 0.9), outputs), min_size=1, max_size=8)
# With the last no step takes longer for what its decodes attend to, so chunks are of one size under a limit in seconds.
even = st.one_of(
    st.tuples(costs, st.just({})),
    st.tuples(
        st.builds(Coefficients, st.floats(1e-3, 0.1), st.floats(1e-4, 1e-2), st.just(0.0), st.just(0.0)),
        st.fixed_dictionaries({}, optional={"seconds": st.floats(1e-3, 1.0), "step_time": st.floats(1e-3, 1.0)}),
    ),
)


@settings(max_examples=100, deadline=None)
@given(even, jobs, long_prompts, st.integers(1, 8), st.integers(16, 512))
def test_chunks_of_one_size_are_summed_up_as_if_each_were_looked_at(
    case: tuple[Coefficients, dict[str, float]],
    running: list[tuple[int, int]],
    waiting: list[tuple[int, float, int]],
    slots: int,
    tokens: int,
) -> None:
    cost, seconds = case
    limits = StepLimits(slots, tokens, 600, 16, **seconds)
    at_once, plain = (kind(limits, cost, 5.0, running[:slots]) for kind in (Forecast, StepByStep))
    for prompt, cached, output in waiting:
        job = prompt, int(cached * prompt), output
        assert tuple(at_once.admit(*job)) == pytest.approx(tuple(plain.admit(*job)), rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    st.builds(Coefficients, st.floats(1e-3, 0.1), st.floats(1e-4, 1e-2), st.floats(0, 1e-5), st.floats(0, 1e-6)),
    st.sampled_from(["seconds", "step_time"]),
    st.floats(1e-3, 2.0),
    st.lists(st.integers(1, 4000), min_size=1, max_size=64),
    st.integers(1, 20_000),
)
def test_chunks_that_grow_and_shrink_are_summed_up_nearly_so(
    cost: Coefficients, limit: str, seconds: float, contexts: list[int], prompt: int
) -> None:
    limits = StepLimits(100, 2048, 100_000, 16, **{limit: seconds})
    running = [(context, 100_000) for context in contexts]
    at_once, plain = (kind(limits, cost, 0.0, running) for kind in (Forecast, StepByStep))
    found, wanted = at_once.admit(prompt, 0, 9), plain.admit(prompt, 0, 9)
    step = plain.pace
    assert found.first == pytest.approx(wanted.first, rel=1 / 16, abs=step)
    assert at_once.passes <= 32


@pytest.mark.parametrize("limit", [{}, {"seconds": 0.05}, {"step_time": 0.3}])
def test_however_long_a_prompt_is_its_steps_are_not_looked_at_one_by_one(limit: dict[str, float]) -> None:
    limits = StepLimits(64, 256, 1_000_000, 16, **limit)
    running = [(1000, 10 * number + 5) for number in range(32)]
    forecast = Forecast(limits, Coefficients(0.02, 1e-3, 1e-7, 1e-7), 0.0, running)
    forecast.admit(1_000_000, 0, 9)
    assert forecast.passes <= 32 + 2 * len(running)


def test_blocks_are_waited_for_too() -> None:
    limits = StepLimits(slots=10, tokens=100, num_blocks=10, block_size=16)
    assert firsts(Forecast(limits, STEP, 0.0, [(100, 6)]), (60, 1)) == [7.0]
    assert firsts(Forecast(limits, STEP, 0.0), (160, 1)) == [2.0], "alone it has whatever there is"


def test_the_pace_counts_the_prompts_of_others() -> None:
    forecast = Forecast(LIMITS, Coefficients(1.0, 0.1, 0.0, 0.0), 0.0)
    alone = forecast.admit(10, 0, 50).pace
    busy = [forecast.admit(50, 0, 10).pace for _ in range(6)][-1]
    assert alone == pytest.approx(1 + 0.1 + 1.0)
    assert busy > 1 + 0.2 + 0.3


def test_a_copy_goes_its_own_way() -> None:
    forecast = Forecast(LIMITS, STEP, 0.0, [(20, 3), (20, 7)])
    firsts(forecast.copy(), (5, 100), (5, 100))
    assert firsts(forecast, (5, 1)) == [4.0]


@settings(max_examples=100, deadline=None)
@given(costs, jobs, jobs, st.integers(1, 6), prompts)
def test_nobody_is_sooner_for_one_more_ahead(
    cost: Coefficients, running: list[tuple[int, int]], waiting: list[tuple[int, int]], slots: int, newcomer: int
) -> None:
    limits = StepLimits(slots, 64, 200, 16)
    running = running[:slots]
    last = 0.0
    forecast = Forecast(limits, cost, 0.0, running)
    for job in waiting:
        before = forecast.copy().admit(newcomer, 0, 5).first
        first = forecast.admit(job[0], 0, job[1]).first
        assert first >= last - 1e-9, "first come, first served"
        assert forecast.copy().admit(newcomer, 0, 5).first >= before - 1e-9
        last = first


class Noted:
    """A forecast that notes who was let in, in which order; and how many there were of all copies."""

    def __init__(self, names: tuple[int, ...] = (), count: list[int] | None = None) -> None:
        self.names = names
        self.count = [0] if count is None else count

    def copy(self) -> "Noted":
        return Noted(self.names, self.count)

    def admit(self, each: SimpleNamespace) -> None:
        self.names += (each.rank[1],)
        self.count[0] += 1


def place(moment: float, serial: int) -> Any:
    return SimpleNamespace(rank=(moment, serial))


def outlook_of(line: list[Any]) -> tuple[Outlook[Any], Noted]:
    base: Any = Noted()
    outlook: Outlook[Any] = Outlook(base, lambda forecast, each: forecast.admit(each))
    for each in line:
        join(outlook, each)
    return outlook, base


def join(outlook: Outlook[Any], *coming: Any) -> Any:
    forecast: Any = outlook.before(coming[0].rank)
    before = forecast.names
    for each in coming:
        forecast.admit(each)
    outlook.add(coming, forecast)
    return before


@given(
    st.integers(0, 150),
    st.lists(st.tuples(st.floats(0, 150), st.integers(1, 40), st.floats(-60, 60)), max_size=12),
)
def test_an_outlook_has_all_who_go_before_a_place(count: int, coming: list[tuple[float, int, float]]) -> None:
    line = [place(float(number), number) for number in range(count)]
    outlook, _ = outlook_of(line)
    assert outlook.end().names == tuple(range(count))  # type: ignore[attr-defined]
    serial = count
    for moment, size, apart in coming:
        # Of those that come together the others may go before or after the first.
        party = [place(moment + apart * (index > 0), serial + index) for index in range(size)]
        serial += size
        ahead = {each.rank[1] for each in line if each.rank < party[0].rank}
        found = join(outlook, *party)
        assert len(found) == len(set(found))
        assert set(found) == ahead
        line += party
    assert len(outlook.end().names) == len(line)  # type: ignore[attr-defined]


def test_a_place_in_the_middle_of_a_long_queue_costs_little() -> None:
    outlook, base = outlook_of([place(float(number), number) for number in range(2000)])
    assert base.count[0] == 2000
    for number in range(100):
        # Now here, now there, and each time the end is asked for as well.
        assert len(join(outlook, place(number * 777 % 2000 + 0.5, 2000 + number))) >= number * 777 % 2000
        assert len(outlook.end().names) == 2001 + number  # type: ignore[attr-defined]
    assert base.count[0] < 2000 + 100 * (32 + 1 + 64 + 1)
