"""Random histories of calls on a scheduler, drawn from `Dice`: a seeded generator, or Hypothesis, which can shrink.

Run as a program it prints the digest of one long history, so that two interpreters can be compared.
"""

import copy
import hashlib
import random
from typing import Any

import msgspec
from support.dice import SHARES, Dice, RandomDice, pick
from support.sequences_world import Setup, World

from chairlift.core.sequences.live_settings import LiveSettings, apply_settings
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams

LONG = 600


def draw_setup(dice: Dice) -> Setup:
    block_size = pick(dice, (1, 1, 2, 2, 3, 4, 5, 8, 16))
    max_model_len = dice.integer(4, 40)
    longest = -(-(max_model_len - 1) // block_size)
    slots = dice.integer(1, 8)
    setup = Setup(
        strategy=pick(dice, ("continuous",) * 4 + ("dynamic", "static") * 2 + ("none",)),
        slots=slots,
        max_wait=pick(dice, (0.0, 1.0, 3.0)),
        block_size=block_size,
        num_blocks=max(1, longest * pick(dice, (2, 3, 3, 4, 6, 12)) // 3),
        max_num_batched_tokens=slots + pick(dice, (0, 1, 4, 16, 64)),
        max_model_len=max_model_len,
        prefix_caching=dice.integer(0, 3) > 0,
        snapshots=pick(dice, (None, None, None, 0, 1, 2, 5, 20)),
        budget=pick(dice, (None, None, dice.integer(0, 2**16), 0.02)),
        step_time=pick(dice, (None, 0.001, 0.005, 0.02)),
        knows_cost=dice.integer(0, 3) > 0,
        background=pick(dice, (None, dice.integer(0, 2**16), 0.02)),
        priority_ageing=pick(dice, (0.0, 0.5, 1.0, 1e6)),
        size_ageing=pick(dice, (None, None, None, 0.01, 1.0)),
    )
    kind = dice.integer(0, 7)
    if kind == 1:
        # Few slots and snapshots, for which who starts competes with who gives way.
        few = {"slots": 2, "snapshots": dice.integer(1, 2), "prefix_caching": True, "budget": None, "background": None}
        return setup._replace(strategy="continuous", **few)
    if kind:
        return setup
    # Prompts longer than what a step has time for.
    long = setup._replace(max_model_len=120, num_blocks=max(setup.num_blocks, setup.blocks_for(240)))
    return long._replace(strategy="continuous", budget=None, step_time=0.005, knows_cost=True)


def draw_request(dice: Dice, world: World, prompts: list[list[int]], vocab: int) -> Request:
    setup = world.setup
    prompt: list[int] = []
    if prompts and dice.integer(0, 2):
        known = pick(dice, prompts)
        # Half go on where another ended, as conversations do, and where states are kept.
        prompt = known[: pick(dice, (len(known), dice.integer(1, len(known))))]
    most = max(setup.max_model_len // pick(dice, (2, 4, 8)) - len(prompt), 1)
    prompt = prompt + [dice.integer(0, vocab - 1) for _ in range(dice.integer(0 if prompt else 1, most))]
    prompts.append(prompt)
    max_tokens = dice.integer(1, pick(dice, (4, 10, 30)))
    if dice.integer(0, 9):
        max_tokens = max(1, min(max_tokens, setup.max_model_len - len(prompt)))
    elif dice.integer(0, 2) == 0:
        prompt, max_tokens = pick(dice, (([], 1), (prompt, 0), (prompt, setup.max_model_len)))
    odd = dice.integer(0, 7)
    params = SamplingParams(
        max_tokens=None,
        prompt_logprobs=0 if odd == 0 else None,
        min_tokens=dice.integer(1, 3) if odd == 1 else 0,
    )
    return Request(
        # Ids come back after their request has ended, now and then while it has not.
        id=f"r{dice.integer(0, 19)}",
        prompt_ids=list(prompt),
        params=params,
        max_tokens=max_tokens,
        arrival=max(0.0, world.now - pick(dice, (0, 0, 0, 1))),
        priority=pick(dice, (0, 0, 0, 0, 1, -1)),
        stop_ids=frozenset(pick(dice, ((), (), (), (7,), (0,)))),
        cache_salt=pick(dice, ("", "", "", "tenant")),
        use_prefix_cache=odd != 2,
        background=dice.integer(0, 99) < world.background_percent,
        hold_updates=odd > 5,
    )


def take_step(dice: Dice, world: World) -> None:
    """Schedule, compute, and hand in the result; now and then something fails, or someone aborts meanwhile."""
    step = world.schedule(yields=dice.integer(0, 9) == 0)
    if step is None:
        return
    world.now += dice.integer(0, 4) / 4
    rng = random.Random(dice.integer(0, 2**16))
    vocab = 8 if dice.integer(0, 7) == 0 else 3
    luck = dice.integer(0, 39)
    errors, aborts = {}, []
    if luck == 0:
        errors = dict.fromkeys(step.num_tokens, "the step failed")
    elif luck <= 3:
        errors = {pick(dice, list(step.num_tokens)): "this request failed"}
    if dice.integer(0, 11) == 0:
        aborts.append(pick(dice, list(world.records)))
    returning = aborts and dice.integer(0, 2) == 0 and world.records[aborts[0]].request
    # Grammars give several tokens at once, end a text without any, or are not ready.
    ruled = luck >= 36
    tokens = world.sample(rng, 5 if ruled else 1, vocab)
    ended = {name for name in tokens if ruled and rng.random() < 0.1}
    late = {name for name in tokens if rng.random() < (0.9 if name in world.late else 0.4 * ruled)}
    for name in [name for name in tokens if name in ended and rng.random() < 0.5]:
        del tokens[name]
    if returning:
        # Aborted and sent anew under the same id, all while the step ran.
        world.abort(aborts.pop())
        world.add(returning)
    # About a millisecond a token, so that a target of 20 ms is hard to meet; now and then a hiccup, or no time at all.
    seconds = step.total_tokens * 1e-3 * pick(dice, (0.5, 1, 1, 1, 2, 20, 0))
    ready = {name for name in sorted(world.rests) if name not in late and rng.random() < 0.2}
    world.update(tokens, errors, aborts, seconds, ended, late, ready)


def draw_settings(dice: Dice, world: World) -> LiveSettings:
    """Other settings for a world; what it has no bound for stays without."""
    setup = world.setup
    return LiveSettings(
        slots=1 if setup.strategy == "none" else dice.integer(1, 8),
        max_num_batched_tokens=dice.integer(1, 80),
        max_wait=pick(dice, (0.0, 1.0, 3.0)),
        background_step=pick(dice, (0.005, 0.02)),
        step_time=None if setup.step_time is None else pick(dice, (0.001, 0.005, 0.02)),
        target_itl=setup.budget if isinstance(setup.budget, float) else None,
    )


def run_history(rng: random.Random, num_calls: int) -> World:
    """One random history, checked after every call and driven to its end."""
    dice = RandomDice(rng)
    world = World(draw_setup(dice))
    world.background_percent = pick(dice, SHARES)
    prompts: list[list[int]] = []
    vocab = dice.integer(1, 3)
    for _ in range(num_calls):
        choice = dice.integer(-1, 15)
        if choice <= 4:
            world.add(draw_request(dice, world, prompts, vocab))
        elif choice == 5:
            world.abort(f"r{dice.integer(0, 19)}" if not world.records else pick(dice, list(world.records)))
        elif choice == 6:
            world.now += pick(dice, (0.25, 1.0, 5.0))
        elif choice == 8 and dice.integer(0, 1) == 0:
            world.retune(draw_settings(dice, world))
        elif choice == 7 and dice.integer(0, 5) == 0:
            world.close()
        else:
            take_step(dice, world)
    world.drain(rng)
    return world


def replay(world: World) -> list[Any]:
    """Make the same calls on a fresh scheduler and return its answers."""
    scheduler = world.first_setup.scheduler()
    answers: list[Any] = []
    step = None
    for name, *given in copy.deepcopy(world.calls):
        try:
            if name == "update":
                answers.append(scheduler.update(step, *given))
            elif name == "retune":
                answers.append(apply_settings(*given, scheduler))
            else:
                answers.append(getattr(scheduler, name)(*given))
        except ValueError as error:
            answers.append(str(error))
        if name == "schedule":
            step = answers[-1]
    return answers


def digest(answers: list[Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(answers)).hexdigest()


if __name__ == "__main__":
    print(digest(run_history(random.Random(7), LONG).answers))
