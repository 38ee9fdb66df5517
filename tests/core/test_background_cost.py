"""What a background decode costs the scheduler beside a live one, counted in functions entered."""

import sys
from types import FrameType
from typing import Any

import pytest

from chairlift.core.cost import CostModel
from chairlift.core.sequences.blocks import BlockPool
from chairlift.core.sequences.budget import FLOOR, LatencyBudget
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.scheduler import SequenceScheduler
from chairlift.core.sequences.sequence import Sequence
from chairlift.core.sequences.step import Step, StepResult
from chairlift.core.sequences.strategy import make_strategy

COUNT = 64


def scheduler_of(background: bool) -> SequenceScheduler:
    """A scheduler in which all sequences decode."""
    made = SequenceScheduler(
        make_strategy("continuous", COUNT, 0.0), BlockPool(COUNT * 8), background_budget=LatencyBudget(10.0, 512)
    )
    params = SamplingParams(max_tokens=None)
    for number in range(COUNT):
        made.add(
            Request(
                id=f"r{number}",
                prompt_ids=[number],
                params=params,
                max_tokens=100,
                arrival=0.0,
                background=background,
            )
        )
    while made.num_running + made.num_background_running < COUNT:
        run(made)
    return made


def run(scheduler: SequenceScheduler) -> Step:
    step = scheduler.schedule(0.0)
    assert step is not None
    scheduler.update(step, StepResult({name: [1] for name in step.num_tokens}, seconds=0.01), 0.0)
    return step


def calls(scheduler: SequenceScheduler) -> int:
    """Python functions that a step of all sequences enters."""
    seen = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal seen
        seen += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step = run(scheduler)
    finally:
        sys.setprofile(before)
    assert len(step.num_tokens) == COUNT
    return seen


def test_a_background_decode_enters_two_functions_more_than_a_live_one() -> None:
    live, background = calls(scheduler_of(False)), calls(scheduler_of(True))
    # Besides, a step learns how long it took.
    assert background - live < 2 * COUNT + 60


@pytest.mark.parametrize("seconds", [0.02, 0.021, 0.03, 0.08, 10.0])
@pytest.mark.parametrize("observed", [0, 30])
def test_decodes_that_join_are_as_many_as_grants_of_one(seconds: float, observed: int) -> None:
    model = CostModel()
    for number in range(observed):
        tokens = 1 + number % 7
        model.observe(0.01 + 1e-3 * tokens + 1e-5 * tokens * number, tokens, tokens * number)
    live = Sequence(Request(id="live", prompt_ids=[1] * 9, params=SamplingParams(), max_tokens=4, arrival=0.0), (0, 0))
    one_by_one, joining = (LatencyBudget(seconds, 512, model) for _ in range(2))
    for budget in (one_by_one, joining):
        budget.begin([live])
    granted = joined = 0
    for computed in range(0, 3000, 60):
        granted += one_by_one.capacity(computed) > 0 and one_by_one.grant(computed, 1, starts=True)
        joined += joining.takes_decode(computed)
        if joining.takes_decode(7):  # one that finds no block
            joining.returns_decode(7)
    assert joined == granted
    assert joined == 50 if seconds == 10 and observed else joined >= FLOOR
    assert joining.capacity(5) == one_by_one.capacity(5)
