"""Everything the scheduler of items promises, under random histories: some that shrink, and many that are fast."""

import random
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support.dice import SHARES, Dice, HypothesisDice, RandomDice, pick
from support.items_world import Setup, World, replay
from support.parallel import in_two_processes, some_and_all

from chairlift.core.items.item import Failure, Item
from chairlift.core.items.limits import BatchLimits

CALLS_PER_HISTORY = 60


def draw_setup(dice: Dice) -> Setup:
    deadly = dice.integer(0, 1) == 0
    crowd = not deadly and dice.integer(0, 7) == 0
    target = pick(dice, (None, None, None, 0.05))
    limits = BatchLimits(
        max_batch_size=draw_batch_size(dice, deadly, crowd),
        max_wait=0.0 if target else pick(dice, (0.0, 0.0, 0.02)),
        max_batch_tokens=None if crowd else pick(dice, (None, None, 6, 20)),
        max_waiting=1000 if crowd else pick(dice, (3, 30, 30, 1000)),
        max_queue_seconds=pick(dice, (None, None, None, 0.05)),
        target_latency=target,
        default_timeout=pick(dice, (None, None, 0.03, 0.1, 1.0)),
        order=pick(dice, ("arrival", "arrival", "shortest")),
        order_ageing=pick(dice, (0.0, 0.001, 0.1)),
        priority_ageing=pick(dice, (0.0, 0.01, 1.0)),
        background_step=pick(dice, (0.001, 0.01, 0.06)),
        sort_window=pick(dice, (0, 0, 1, 4)),
        max_passed_over=dice.integer(0, 3),
        retries=dice.integer(0, 2),
        bisect=dice.integer(0, 3) > 0,
    )
    culprits = None
    if dice.integer(0, 0 if crowd else 2) == 0:
        culprits = frozenset(f"i{dice.integer(0, 39)}" for _ in range(dice.integer(0, 3)))
        culprits |= {"r0"} if crowd or (deadly and dice.integer(0, 1)) else frozenset()
    return Setup(limits, dice.integer(1, 3), culprits, dice.integer(0, 1) == 0, deadly, crowd)


def draw_batch_size(dice: Dice, deadly: bool, crowd: bool) -> int:
    """Those who are at fault need company to be told from the model: a request with many items needs the most."""
    return dice.integer(32, 64) if crowd else dice.integer(8, 16) if deadly else dice.integer(1, 8)


def draw_change(dice: Dice, world: World) -> BatchLimits:
    """What may change while there are items."""
    target = pick(dice, (None, None, 0.05))
    return msgspec.structs.replace(
        world.limits,
        max_batch_size=draw_batch_size(dice, world.setup.deadly, world.setup.crowd),
        target_latency=target,
        max_wait=0.0 if target else pick(dice, (0.0, 0.0, 0.02)),
    )


def draw_item(dice: Dice, world: World) -> Item:
    return Item(
        # Ids come back after their item has ended, now and then while it has not.
        id=f"i{dice.integer(0, 63 if world.setup.crowd else 39)}",
        arrival=max(0.0, world.now - pick(dice, (0, 0, 0, 0.01))),
        size=pick(dice, (1.0, 1.0, 2.0, 0.5, 3.0, 5.0, 7.0, 0.0 if dice.integer(0, 9) == 0 else 1.0)),
        shape_key=pick(dice, (None, None, None, "wide", ("a", 2))),
        priority=pick(dice, (0, 0, 0, 1, -1)),
        deadline=pick(dice, (None, None, world.now + 0.02, world.now + 0.1, world.now - 0.01)),
        background=dice.integer(0, 99) < world.background_percent,
        request=pick(dice, (None, None, "r0", "r0", "r1")),
    )


def take_turn(dice: Dice, world: World) -> None:
    """Make one call, drawn by chance."""
    choice = dice.integer(0, 15)
    if choice <= 5:
        for _ in range(dice.integer(1, 80 if world.setup.crowd else 12 if world.setup.deadly else 6)):
            world.add(draw_item(dice, world))
    elif choice == 6 and world.guests:
        world.abort(pick(dice, list(world.guests)))
    elif choice == 7:
        world.now += pick(dice, (0.001, 0.01, 0.05))
    elif choice == 8:
        world.abort("nobody")
        number = dice.integer(0, world.setup.num_instances - 1)
        (world.bring_back if number in world.lost else world.lose)(number)
    elif choice == 9:
        if dice.integer(0, 7) == 0:
            world.close()
        elif dice.integer(0, 3) == 0:
            world.change_limits(draw_change(dice, world))
    elif choice <= 12 or not world.running:
        world.schedule()
    else:
        end_a_batch(dice, world)


def end_a_batch(dice: Dice, world: World) -> None:
    number = pick(dice, sorted(world.running))
    if number in world.following and dice.integer(0, 3) == 0:
        lose_both(dice, world, number)
        return
    batch = world.running[number]
    failure, errors = None, {}
    luck = dice.integer(0, 9)
    if luck <= 3:
        failure = list(Failure)[luck]
    elif luck == 4:
        errors = {pick(dice, batch.items).id: "this one"}
    seconds = (0.004 + 0.001 * batch.computed) * pick(dice, (1, 1, 1, 1, 1.2, 0.8, 10, 0))
    world.now += seconds + pick(dice, (0, 0.0005))
    world.finish(batch, failure, errors, seconds, idle=pick(dice, (0.0, 0.0001, 0.001, 0.01, None)))
    if failure is Failure.DIED and world.setup.deadly:
        die_on(dice, world)


def die_on(dice: Dice, world: World) -> None:
    """A model that is itself at fault ends its process with whatever it is given."""
    for _ in range(dice.integer(0, 20)):
        batch = world.schedule()
        if batch is None or batch.ahead:
            return
        world.finish(batch, Failure.DIED, {}, 0.0)


def lose_both(dice: Dice, world: World, number: int) -> None:
    """A process dies, and with it what was sent ahead; which of the two is heard of first does not matter."""
    ends = [(world.running[number], Failure.DIED), (world.following[number], Failure.UNTRIED)]
    for batch, failure in ends if dice.integer(0, 1) else ends[::-1]:
        world.finish(batch, failure, {}, 0.0)


class ItemsMachine(RuleBasedStateMachine):
    """The same calls and checks as in `test_random_histories`, for a failure to be shrunk to its essence."""

    world: World | None = None

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        dice = HypothesisDice(data)
        self.world = World(draw_setup(dice))
        self.world.background_percent = pick(dice, SHARES)

    @rule(data=st.data())
    def turn(self, data: st.DataObject) -> None:
        take_turn(HypothesisDice(data), self.world)

    def teardown(self) -> None:
        if self.world is not None:
            self.world.drain(random.Random(0))
            assert replay(self.world) == self.world.answers


TestItemsMachine = ItemsMachine.TestCase
TestItemsMachine.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def check_histories(seeds: range) -> Counter[str]:
    """Drive a history for each seed to its end, checked after every call; gives what happened in them."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        try:
            dice = RandomDice(rng)
            world = World(draw_setup(dice))
            world.background_percent = pick(dice, SHARES)
            for _ in range(CALLS_PER_HISTORY):
                take_turn(dice, world)
            world.drain(rng)
            if seed % 10 == 0:
                assert replay(world) == world.answers, "same calls, other decisions"
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        seen += world.seen
    return seen


@pytest.mark.processes
@pytest.mark.parametrize("seeds", some_and_all(500, 3000))
def test_random_histories(seeds: range, capsys: Any) -> None:
    seen = in_two_processes(check_histories, seeds)
    with capsys.disabled():
        print(f"\nitem histories: {len(seeds)}:", ", ".join(f"{count} {name}" for name, count in seen.most_common()))
    if len(seeds) >= 500:
        kinds = (
            *Failure,
            "sent ahead",
            "kept for new work",
            "given up",
            "dropped",
            "passed over",
            "queue_full",
            "queue_seconds",
            "deadline",
            "error",
            "done",
            "background",
            "other limits",
        )
        rare = {name: seen[name] for name in kinds}
        assert min(rare.values()) >= len(seeds) / 50, f"too rare to be tested: {rare}"
