"""What prompts may have of a step that decodes wait for: so much time, where nobody set a target."""

import sys
from math import inf
from types import FrameType
from typing import Any

from support.sequences_world import Setup, World, make_request

from chairlift.core.cost import Coefficients, CostModel
from chairlift.core.decision import Reason
from chairlift.core.sequences.blocks import BlockPool
from chairlift.core.sequences.budget import FLOOR, LEAST_STEPS, LatencyBudget, StepTimeBudget, seconds_beside
from chairlift.core.sequences.scheduler import SequenceScheduler
from chairlift.core.sequences.step import Step, StepResult
from chairlift.core.sequences.strategy import make_strategy

TOKEN = 1e-3
# A step costs 2 ms by itself, and 1 ms a token.
STEP = 2e-3


def scheduler_of(step_time: float | None, known: bool = True, most: int = 512) -> SequenceScheduler:
    """One with 8 slots, whose cost model has seen 60 steps, or none."""
    model = CostModel((STEP, TOKEN, 1e-9, 1e-9))
    for tokens in (1, 2, 4, 8, 64, 256) * 10 * known:
        model.observe(seconds_of(tokens), tokens, tokens)
    return SequenceScheduler(
        make_strategy("continuous", 8, 0.0),
        BlockPool(2000),
        max_num_batched_tokens=most,
        max_model_len=4096,
        budget=None if step_time is None else StepTimeBudget(step_time, most, model),
        meter=LatencyBudget(inf, most, model),
    )


def seconds_of(tokens: int) -> float:
    return STEP + TOKEN * tokens


def run(scheduler: SequenceScheduler) -> Step:
    step = scheduler.schedule(0.0)
    assert step is not None
    running = scheduler.running
    due = {s.id: [1] for s in running if s.num_computed_tokens + step.num_tokens[s.id] == len(s.token_ids)}
    scheduler.update(step, StepResult(due, seconds=seconds_of(step.total_tokens)), 0.0)
    return step


def run_to_end(scheduler: SequenceScheduler, name: str) -> None:
    for _ in range(500):
        if scheduler.explain(name) is None:
            return
        run(scheduler)
    raise AssertionError(f"{name} did not end")


def test_a_prompt_is_cut_to_the_time_that_decodes_leave_and_goes_on() -> None:
    scheduler = scheduler_of(0.1)
    scheduler.add(make_request("d", 4, 200))
    run(scheduler)
    scheduler.add(make_request("r", 1000))
    chunks = [run(scheduler).num_tokens["r"] for _ in range(5)]
    assert all(80 <= chunk <= 99 for chunk in chunks), chunks
    run_to_end(scheduler, "r")


def test_where_nobody_decodes_prompts_have_all_tokens() -> None:
    scheduler = scheduler_of(0.1)
    scheduler.add(make_request("a", 1000))
    scheduler.add(make_request("b", 700))
    assert [run(scheduler).num_tokens for _ in range(3)] == [{"a": 512}, {"a": 488, "b": 24}, {"a": 1, "b": 97}]


def test_where_nobody_reads_along_prompts_have_all_tokens() -> None:
    scheduler = scheduler_of(0.1)
    scheduler.add(make_request("d", 4, 200, hold_updates=True))
    run(scheduler)
    scheduler.add(make_request("r", 1000))
    assert run(scheduler).num_tokens == {"d": 1, "r": 511}


def test_before_anything_was_learned_prompts_have_all_tokens() -> None:
    scheduler = scheduler_of(0.1, known=False)
    scheduler.add(make_request("d", 4, 200))
    run(scheduler)
    scheduler.add(make_request("r", 3000))
    chunks = [run(scheduler).num_tokens["r"] for _ in range(8)]
    assert chunks[: LEAST_STEPS - 1] == [511] * (LEAST_STEPS - 1)
    assert chunks[-1] < 120, "it learns from these steps"


def test_the_head_of_the_queue_says_that_the_time_is_given_out() -> None:
    scheduler = scheduler_of(0.1)
    scheduler.add(make_request("d", 4, 200))
    run(scheduler)
    scheduler.add(make_request("r", 1000))
    scheduler.add(make_request("w", 10))
    run(scheduler)
    decision = scheduler.explain("w")
    assert decision is not None
    assert decision.reason is Reason.ITL
    assert decision.detail.startswith("the step's 100 ms are given out: ")


def test_decodes_that_fill_the_time_by_themselves_leave_prompts_as_much_again() -> None:
    scheduler = scheduler_of(1e-4)
    for number in range(6):
        scheduler.add(make_request(f"d{number}", 4, 200))
    run(scheduler)
    scheduler.add(make_request("r", 1000))
    # What a step costs by itself counts here: 12 times 2 ms, which is more than 6 decodes take.
    assert run(scheduler).num_tokens["r"] in range(20, 25)
    assert seconds_beside(3.0, Coefficients(0.1, 1.0, 0.0, 0.0), 5.0) == 6.0
    assert seconds_beside(3.0, Coefficients(1.0, 1.0, 0.0, 0.0), 5.0) == 15.0
    assert seconds_beside(3.0, Coefficients(0.1, 1.0, 0.0, 0.0), 9.0) == 9.0


def test_so_many_prompt_tokens_go_into_every_step_whatever_they_cost() -> None:
    budget = StepTimeBudget(1e-9, 512, CostModel((1e-9, TOKEN, 1e-9, 1.0)))
    for tokens in (1, 2, 4, 8) * 9:
        budget.model.observe(tokens * TOKEN + tokens * tokens, tokens, tokens, tokens * tokens)
    world = World(Setup(slots=4))
    world.add(make_request("d", 4, 20))
    step = world.schedule()
    assert step is not None
    world.update({"d": [1]}, {})
    budget.begin(world.scheduler.running)
    assert budget.grant(0, 100, starts=True) == FLOOR


def test_a_step_without_prompts_asks_nobody_and_learns_nothing() -> None:
    def calls(step_time: float | None) -> int:
        scheduler = scheduler_of(step_time)
        for number in range(3):
            scheduler.add(make_request(f"r{number}", 4, 200))
        run(scheduler)
        observed = scheduler.meter.model.num_observed
        seen = 0

        def count(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal seen
            seen += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            for _ in range(8):
                run(scheduler)
        finally:
            sys.setprofile(before)
        assert scheduler.meter.model.num_observed == observed
        return seen

    assert calls(0.1) - calls(None) <= 8, "more than one function a step"
