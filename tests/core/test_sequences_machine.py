"""Everything the scheduler promises, under random histories: some that shrink, and many that are fast."""

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support import histories
from support.dice import SHARES, HypothesisDice, pick
from support.histories import digest, draw_request, draw_settings, draw_setup, replay, run_history, take_step
from support.parallel import in_two_processes, some_and_all
from support.sequences_world import STRATEGIES, Setup, World, make_request

from chairlift.core.sequences.step import Step

ROOT = Path(__file__).parents[2]
NUM_SHRINKABLE = 150
CALLS_PER_HISTORY = 16


class SequencesMachine(RuleBasedStateMachine):
    """The same calls and checks as in `histories.run_history`, for a failure to be shrunk to its essence."""

    world: World | None = None

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        dice = HypothesisDice(data)
        self.world = World(draw_setup(dice))
        self.world.background_percent = pick(dice, SHARES)
        self.prompts: list[list[int]] = []
        self.vocab = dice.integer(1, 3)

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        self.world.add(draw_request(HypothesisDice(data), self.world, self.prompts, self.vocab))

    @rule(data=st.data())
    @precondition(lambda self: self.world.records)
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(pick(HypothesisDice(data), list(self.world.records)))

    @rule()
    def abort_unknown(self) -> None:
        self.world.abort("nobody")

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        take_step(HypothesisDice(data), self.world)

    @rule(data=st.data())
    def retune(self, data: st.DataObject) -> None:
        self.world.retune(draw_settings(HypothesisDice(data), self.world))

    @rule(seconds=st.sampled_from([0.25, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule()
    @precondition(lambda self: not self.world.scheduler.waiting.closed)
    def close(self) -> None:
        self.world.close()

    def teardown(self) -> None:
        if self.world is not None and self.world.in_flight is None:
            self.world.drain(random.Random(0))
            assert replay(self.world) == self.world.answers


TestSequencesMachine = SequencesMachine.TestCase
TestSequencesMachine.settings = settings(
    max_examples=NUM_SHRINKABLE,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def count_events(world: World, seen: Counter[str]) -> None:
    seen["histories"] += 1
    seen[world.setup.strategy] += 1
    seen["prompts cut to a step's time"] += world.num_cut
    seen["settings changed"] += world.num_retuned
    seen["left out as late"] += world.num_rested
    seen["states restored"] += world.runner.num_restored
    for answer in world.answers:
        if isinstance(answer, Step):
            seen["steps"] += 1
            seen["states saved"] += sum(map(len, answer.saves.values()))
            seen["states kept"] += len(answer.kept)
            seen["prefix hits"] += sum(start.num_computed_tokens > 0 for start in answer.started)
            seen.update(decision.reason.value for decision in answer.decisions)
            seen["background slots lost"] += sum("its slot" in decision.detail for decision in answer.decisions)
            seen["background blocks lost"] += sum("its blocks" in decision.detail for decision in answer.decisions)
        elif isinstance(answer, list):
            seen.update(end.reason.value for end in answer)
        else:
            seen["refused"] += isinstance(answer, str)


def check_histories(seeds: range) -> Counter[str]:
    """Drive a history for each seed to its end, checked after every call; gives what happened in them."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            world = run_history(random.Random(seed), CALLS_PER_HISTORY)
            if seed % 10 == 0:
                assert replay(world) == world.answers, "same calls, other decisions"
        except Exception as error:
            error.add_note(f"run_history(random.Random({seed}), {CALLS_PER_HISTORY})")
            raise
        count_events(world, seen)
    return seen


@pytest.mark.processes
@pytest.mark.parametrize("seeds", some_and_all(2500, 10_000))
def test_random_histories(seeds: range, capsys: Any) -> None:
    seen = in_two_processes(check_histories, seeds)
    with capsys.disabled():
        print("\nscheduler histories:", ", ".join(f"{count} {name}" for name, count in seen.most_common()))
    assert seen["histories"] == len(seeds)
    if len(seeds) >= 1000:
        kinds = ("preempted", "resumed", "prefix hits", "refused", "error", "stop", "length")
        kinds += ("waiting_for_itl", "waiting_for_live", "background slots lost", "background blocks lost")
        kinds += ("prompts cut to a step's time", "settings changed", "states restored", "states saved", "states kept")
        kinds += ("left out as late",)
        rare = {name: seen[name] for name in (*kinds, *STRATEGIES)}
        assert min(rare.values()) >= len(seeds) / 100, f"too rare to be tested: {rare}"


@pytest.mark.processes
def test_one_long_history_repeats_itself() -> None:
    world = run_history(random.Random(7), histories.LONG)
    assert replay(world) == world.answers
    for hash_seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, histories.__file__],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == digest(world.answers), f"PYTHONHASHSEED={hash_seed} changes decisions"


def test_the_checker_itself_sees_a_stale_table() -> None:
    world = World(Setup(block_size=2))
    world.add(make_request("a", [1, 2, 3]))
    world.add(make_request("b", [4, 5, 6]))
    step = world.schedule()
    world.runner.tables["a"] = world.runner.tables["b"]
    with pytest.raises(AssertionError, match="not its own prefix"):
        world.runner.compute(step, set())
