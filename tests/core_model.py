"""A fake runner that knows what lies in every KV slot, and a checker of all that the scheduler promises.

`World` makes every call on a scheduler, checks it, and records it, so that a history can be replayed.
"""

import copy
import random
from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from core_budget import RandomBudget

from chairlift.core.blocks import BlockPool, block_hash, root_hash
from chairlift.core.budget import FLOOR, LatencyBudget
from chairlift.core.policy import make_policy
from chairlift.core.request import Decision, Finished, FinishReason, Request, Step, StepResult, Why
from chairlift.core.sampling import SamplingParams
from chairlift.core.scheduler import Scheduler

STRATEGIES = ("none", "static", "dynamic", "continuous")
PLACED = {Why.BOARDED, Why.RESUMED, Why.PREEMPTED}
GARBAGE = -1


class Setup(NamedTuple):
    """A scheduler's configuration. `budget` is None, the seed of a random one, or a latency target in seconds."""

    strategy: str = "continuous"
    seats: int = 4
    max_wait: float = 1.0
    block_size: int = 4
    num_blocks: int = 64
    max_num_batched_tokens: int = 64
    max_model_len: int = 128
    prefix_caching: bool = True
    budget: int | float | None = None

    def step_budget(self) -> RandomBudget | LatencyBudget | None:
        if isinstance(self.budget, float):
            return LatencyBudget(self.budget, self.max_num_batched_tokens)
        return None if self.budget is None else RandomBudget(self.budget)

    def scheduler(self) -> Scheduler:
        return Scheduler(
            make_policy(self.strategy, self.seats, self.max_wait),
            BlockPool(self.num_blocks),
            block_size=self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.prefix_caching,
            budget=self.step_budget(),
        )

    @property
    def closes_batch(self) -> bool:
        return self.strategy in ("static", "dynamic")

    @property
    def num_seats(self) -> int:
        return 1 if self.strategy == "none" else self.seats

    def blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def fits(self, request: Request) -> bool:
        prompt, output = len(request.prompt_ids), request.max_tokens
        slots = prompt + output - 1
        return (
            min(prompt, output) >= 1
            and prompt + output <= self.max_model_len
            and slots <= self.num_blocks * self.block_size
        )


def make_request(id: str, prompt: list[int] | int, max_tokens: int = 8, **fields: Any) -> Request:
    """Make a request by hand; a number stands for a prompt of that length which begins like no other."""
    if isinstance(prompt, int):
        seed = int.from_bytes(id.encode())
        prompt = [seed * 1000 + i for i in range(prompt)]
    fields = {"params": SamplingParams(max_tokens=None), "arrival": 0.0} | fields
    return Request(id=id, prompt_ids=prompt, max_tokens=max_tokens, **fields)


class FakeRunner:
    """Rebuilds every block table from the steps alone, as a real runner must, and knows what lies in each slot.

    A slot holds a number that stands for (salt, all tokens up to and including its own), or `GARBAGE`.
    """

    def __init__(self, setup: Setup) -> None:
        self.block_size = setup.block_size
        self.slots: list[int | None] = [None] * (setup.num_blocks * setup.block_size)
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.prefixes: dict[str, list[int]] = {}
        self._numbers: dict[Any, int] = {}

    def _number(self, before: Any, tokens: list[int]) -> list[int]:
        """Number each prefix that these tokens make after what is before; equal numbers, equal prefixes and salts."""
        numbers, number, found = self._numbers, before, []
        for token in tokens:
            number = numbers.setdefault((number, token), len(numbers))
            found.append(number)
        return found

    def prepare(self, step: Step) -> None:
        """Take in who left, who starts and who got blocks, in the order that a runner does."""
        for name in step.released:
            assert name in self.tables, f"{name} was released without being here"
            del self.tables[name], self.tokens[name], self.computed[name], self.prefixes[name]
        for start in step.started:
            name = start.request.id
            assert name not in self.tables, f"{name} was started while it still is here"
            self.tables[name] = list(start.block_table)
            self.tokens[name] = list(start.token_ids)
            self.computed[name] = start.num_computed_tokens
            self.prefixes[name] = self._number(start.request.cache_salt, start.token_ids)
        fresh = {start.request.id for start in step.started}
        for name, blocks in step.new_blocks.items():
            assert blocks
            assert name not in fresh, "a table given whole was also extended"
            self.tables[name] += blocks
        assert step.num_tokens.keys() == self.tables.keys(), "everyone who runs gets tokens in each step"

    def compute(self, step: Step, failed: set[str]) -> set[str]:
        """Write all KV, then read all of it as attention does; return who read what a failed request wrote."""
        size, slots = self.block_size, self.slots
        spoilt = set()
        for name, count in step.num_tokens.items():
            table, prefixes, start = self.tables[name], self.prefixes[name], self.computed[name]
            assert count >= 1
            assert start + count <= len(prefixes), f"{name} was given tokens that it does not have"
            assert start + count <= len(table) * size, f"{name} has no slots for its tokens"
            for position in range(start, start + count):
                slot = table[position // size] * size + position % size
                slots[slot] = prefixes[position]
                if name in failed:
                    slots[slot] = GARBAGE
                    spoilt.add(slot)
        tainted = set()
        for name, count in step.num_tokens.items():
            table, prefixes = self.tables[name], self.prefixes[name]
            context = self.computed[name] + count
            if name not in failed:
                for position in range(context):
                    slot = table[position // size] * size + position % size
                    if slots[slot] != prefixes[position]:
                        assert slot in spoilt, f"{name} reads KV at {position} that is not its own prefix's"
                        tainted.add(name)
            if name in tainted:
                # What it wrote was computed from what it read.
                for position in range(self.computed[name], context):
                    slot = table[position // size] * size + position % size
                    slots[slot] = GARBAGE
                    spoilt.add(slot)
            self.computed[name] = context
        return tainted

    def due(self, name: str) -> bool:
        """Whether all tokens of a sequence are computed, so that it samples the next."""
        return self.computed[name] == len(self.tokens[name])

    def append(self, name: str, tokens: list[int]) -> None:
        self.tokens[name] += tokens
        self.prefixes[name] += self._number(self.prefixes[name][-1], tokens)


class Ride(msgspec.Struct):
    """What the checker knows of a request that has not ended."""

    request: Request
    key: tuple[int, float, int]
    tokens: list[int]


class World:
    """Calls a scheduler, checks everything it answers, and records the calls."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.scheduler = setup.scheduler()
        self.runner = FakeRunner(setup)
        self.now = 0.0
        self.rides: dict[str, Ride] = {}
        self.members: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.added: Counter[str] = Counter()
        self.in_flight: Step | None = None
        self.begun: dict[str, Ride] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.answers: list[Any] = []
        self._serial = 0

    # Calls

    def add(self, request: Request) -> bool:
        """Add a request; False if it was refused, which must be so exactly if it could never be served."""
        self._record("add", request)
        welcome = self.setup.fits(request) and request.id not in self.rides
        before = self.scheduler.num_waiting
        refusal = None
        try:
            self.scheduler.add(request)
        except ValueError as error:
            refusal = str(error)
        self.answers.append(refusal)
        assert (refusal is None) == welcome, f"taken in or refused wrongly: {refusal}"
        if not welcome:
            assert self.scheduler.num_waiting == before
            return False
        self._serial += 1
        key = (request.priority, request.arrival, self._serial)
        self.rides[request.id] = Ride(request, key, list(request.prompt_ids))
        self.added[request.id] += 1
        self.check()
        return True

    def abort(self, name: str) -> None:
        self._record("abort", name)
        known = name in self.rides
        assert self.scheduler.abort(name) is known
        self.answers.append(known)
        if known:
            self._end(name)
        assert self.scheduler.explain(name) is None
        self.check()

    def close_line(self) -> None:
        self._record("close_line")
        self.scheduler.close_line()
        self.answers.append(None)

    def schedule(self) -> Step:
        self._record("schedule", self.now)
        assert self.in_flight is None
        before = Before(self)
        step = self.scheduler.schedule(self.now)
        self.answers.append(step)
        if step.num_tokens:
            self.in_flight = step
            self.begun = {name: self.rides[name] for name in step.num_tokens}
            self.runner.prepare(step)
        self.check()
        check_step(self, step, before)
        check_places(self, step, before)
        check_boarding(self, step, before)
        check_waiting(self, step, before)
        return step

    def update(
        self, tokens: dict[str, list[int]], errors: dict[str, str], aborts: list[str] = (), seconds: float = 0.0
    ) -> list[Finished]:
        """Compute the step in flight, abort some while it runs, and hand in what it gave."""
        step, self.in_flight = self.in_flight, None
        assert step is not None
        tainted = self.runner.compute(step, set(errors))
        sampled = {n: tokens[n] for n in step.num_tokens if n not in errors and self.runner.due(n)}
        for name in sampled:
            self.runner.append(name, sampled[name])
        for name in aborts:
            self.abort(name)
        result = StepResult(copy.deepcopy(sampled), errors=dict(errors), seconds=seconds)
        self._record("update", copy.deepcopy(result), self.now)
        ends = self.scheduler.update(step, result, self.now)
        self.answers.append(ends)
        expected = []
        for name, ride in self.begun.items():
            if self.rides.get(name) is not ride:
                continue  # aborted while the step ran
            end = self._expected_end(name, ride, result, tainted)
            expected += [end] if end else []
        assert ends == expected
        for end in ends:
            self._end(end.request_id)
            assert self.scheduler.explain(end.request_id) is None
        self.check()
        return ends

    def drain(self, rng: random.Random) -> None:
        """Close the line and run to the end: everyone arrives in bounded time, and nothing is left behind."""
        self.close_line()
        work = sum(len(r.request.prompt_ids) + r.request.max_tokens for r in self.rides.values())
        for _ in range(2 * work + 1):
            if not self.rides:
                break
            assert self.schedule().num_tokens, "someone waits, the line is closed, and nobody moves"
            self.update(self.sample(rng), {})
        assert not self.rides, "not everyone arrived"
        assert self.scheduler.pool.num_used == 0
        assert not self.schedule().num_tokens
        assert self.ended == self.added, "each request ends exactly once"

    def sample(self, rng: random.Random, most: int = 1, vocab: int = 3) -> dict[str, list[int]]:
        """Make up tokens for everyone in the step in flight; `update` drops those that are not due."""
        return {n: [rng.randrange(vocab) for _ in range(rng.randint(1, most))] for n in self.in_flight.num_tokens}

    def _record(self, *call: Any) -> None:
        self.calls.append(call)

    def _end(self, name: str) -> None:
        del self.rides[name]
        self.ended[name] += 1
        self.members.discard(name)

    def _expected_end(self, name: str, ride: Ride, result: StepResult, tainted: set[str]) -> Finished | None:
        if name in result.errors:
            return Finished(name, FinishReason.ERROR, result.errors[name])
        if name in tainted:
            assert name not in result.tokens, f"{name} computed on garbage, so its token must not reach its client"
            assert all(s.id != name for s in self.scheduler.running)
            return None
        request = ride.request
        for token in result.tokens.get(name, []):
            ride.tokens.append(token)
            made = len(ride.tokens) - len(request.prompt_ids)
            if token in request.stop_ids and made >= request.params.min_tokens:
                return Finished(name, FinishReason.STOP, token)
            if made == request.max_tokens:
                return Finished(name, FinishReason.LENGTH)
        return None

    # What holds at any moment

    def check(self) -> None:
        """Check what holds after every call: the pool, the reference counts, who is where, and who shares what."""
        scheduler, setup = self.scheduler, self.setup
        running, seated = scheduler.running, scheduler.seated
        pool = scheduler.pool
        pool.check()
        held: Counter[int] = Counter()
        for sequence in running:
            held.update(sequence.block_table)
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            assert sequence.token_ids == self.rides[sequence.id].tokens
        assert {b: n for b, n in enumerate(pool.ref_count) if n} == held, "reference counts are not the holders"
        assert pool.num_used == len(held)
        names = [s.id for s in running] + [s.id for s in seated]
        assert len(set(names)) == len(names)
        assert self.rides.keys() >= set(names)
        assert len(scheduler.line) == len(self.rides) - len(names), "someone is lost, or in two places"
        assert scheduler.num_waiting == len(self.rides) - len(running)
        assert len(names) <= setup.num_seats
        assert setup.closes_batch or not seated
        for order in (running, seated):
            assert all(a.key < b.key for a, b in pairwise(order)), "not in order of urgency"
        self._check_sharing({block for block, count in held.items() if count > 1})

    def _check_sharing(self, shared: set[int]) -> None:
        size = self.setup.block_size
        content: dict[int, Any] = {}
        for sequence in self.scheduler.running if shared else ():
            for index, block in enumerate(sequence.block_table):
                if block in shared:
                    request, end = sequence.request, (index + 1) * size
                    assert request.use_prefix_cache, "shares a block in spite of opting out"
                    assert self.setup.prefix_caching
                    assert end <= len(sequence.token_ids), "a block that is not full is shared"
                    mine = (request.cache_salt, sequence.token_ids[:end])
                    assert content.setdefault(block, mine) == mine, "shares a block of another prefix"


class Before:
    """What the checks of a step need to know of the moment before it."""

    def __init__(self, world: World) -> None:
        scheduler = world.scheduler
        self.running = [s.id for s in scheduler.running]
        self.seated = [s.id for s in scheduler.seated]
        self.computed = {s.id: s.num_computed_tokens for s in scheduler.running}
        aboard = {*self.running, *self.seated}
        self.line = sorted((r.key, name) for name, r in world.rides.items() if name not in aboard)
        self.oldest = min((key[1] for key, _ in self.line), default=None)
        self.preemptions = scheduler.num_preemptions


def check_step(world: World, step: Step, before: Before) -> None:
    """Check a step as its runner sees it, and that it passes no limit."""
    setup, scheduler = world.setup, world.scheduler
    total = sum(step.num_tokens.values())
    assert step.total_tokens == total <= setup.max_num_batched_tokens
    assert [s.id for s in scheduler.running] == sorted(step.num_tokens, key=lambda n: world.rides[n].key)
    started = [s.request.id for s in step.started]
    stayed = [name for name in before.running if name in step.num_tokens]
    assert list(step.num_tokens) == stayed + started
    full = True
    for sequence in scheduler.running:
        name = sequence.id
        end = sequence.num_computed_tokens + step.num_tokens[name]
        assert end <= len(sequence.token_ids) < setup.max_model_len
        assert world.runner.tables[name] == sequence.block_table, "the runner sees another table"
        assert len(sequence.block_table) == setup.blocks_for(end), "blocks beyond what the tokens need"
        full &= end == len(sequence.token_ids)
        if name in before.computed:
            assert sequence.num_computed_tokens == before.computed[name]
    preempted = scheduler.num_preemptions > before.preemptions
    spent = check_budget(world, step, before)
    assert full or preempted or spent or total == setup.max_num_batched_tokens, "tokens were held back without need"
    for start in step.started:
        ride = world.rides[start.request.id]
        assert start.request is ride.request
        assert start.token_ids == ride.tokens, "what is started is not what its client has seen"
        assert start.num_computed_tokens % setup.block_size == 0
        assert start.num_computed_tokens < len(start.token_ids), "nothing is left to compute"
        reads = setup.prefix_caching and ride.request.use_prefix_cache and ride.request.params.prompt_logprobs is None
        assert reads or start.num_computed_tokens == 0


def check_budget(world: World, step: Step, before: Before) -> bool:
    """Check that a budget is kept, but for one token each and what a prompt needs to go on; return if it is spent."""
    budget = world.scheduler.budget
    if budget is None or not step.num_tokens:
        return False
    prompts = sum(count - (name in before.computed) for name, count in step.num_tokens.items())
    if isinstance(budget, RandomBudget):
        assert prompts <= budget.drawn
    else:
        assert budget.predicted <= budget.target * (1 + 1e-9) or prompts <= FLOOR, "longer than the target"
    return budget.room(0) < 1


def check_places(world: World, step: Step, before: Before) -> None:
    """Check who lost a place and who won one, and that a decision says so."""
    placed = [(d.why, d.request_id) for d in step.decisions if d.why in PLACED]
    victims = [name for why, name in placed if why is Why.PREEMPTED]
    assert victims == before.running[::-1][: len(victims)], "not the least urgent was preempted"
    assert not before.running or before.running[0] not in victims, "the most urgent was preempted"
    assert set(victims) <= set(step.released)
    assert world.scheduler.num_preemptions - before.preemptions == len(victims)
    started = [s.request.id for s in step.started]
    assert [name for why, name in placed if why is not Why.PREEMPTED] == started
    assert not (victims and started), "boarded in the step in which blocks ran out"
    for start, (why, _) in zip(step.started, placed if not victims else (), strict=False):
        fresh = len(start.token_ids) == len(start.request.prompt_ids)
        assert fresh or why is Why.RESUMED
    if not step.num_tokens:
        assert not step.released
        assert not started
        assert not victims


def check_boarding(world: World, step: Step, before: Before) -> None:
    """Check that boarding follows the strategy's rule, strictly in order of urgency, bound no sooner than now."""
    setup, scheduler = world.setup, world.scheduler
    started = [s.request.id for s in step.started]
    line = [name for _, name in before.line]
    if started and len(scheduler.running) > 1:
        owed = sum(setup.blocks_for(len(s.token_ids)) - len(s.block_table) for s in scheduler.running)
        spare = scheduler.pool.num_free - owed
        assert spare >= len(scheduler.running) - 1, "boarded although those who run need the blocks"
    if not setup.closes_batch:
        assert started == line[: len(started)], "boarded out of turn"
        return
    aboard = {*(s.id for s in scheduler.running), *(s.id for s in scheduler.seated)}
    if before.running or before.seated:
        assert aboard == world.members, "a closed batch changed while it rode"
        assert started == before.seated[: len(started)]
        return
    assert not world.members
    leaves = len(line) >= setup.seats or scheduler.line.closed
    if setup.strategy == "dynamic" and before.oldest is not None:
        leaves |= world.now >= before.oldest + setup.max_wait
    members = line[: setup.seats] if leaves else []
    assert aboard == set(members), "not the most urgent of those who wait now, or not at its time"
    assert started == members[: len(started)]
    assert bool(started) == bool(members)
    world.members = set(members)


def check_waiting(world: World, step: Step, before: Before) -> None:
    """Check that whoever still waits is told the truth about why."""
    scheduler = world.scheduler
    waiting = [d for d in step.decisions if d.why not in PLACED]
    aboard = {*(s.id for s in scheduler.running), *(s.id for s in scheduler.seated)}
    line = sorted((r.key, name) for name, r in world.rides.items() if name not in aboard)
    names = [s.id for s in scheduler.seated] + [name for _, name in line]
    assert scheduler.waiting_decision == (waiting[0] if waiting else None)
    assert len(waiting) == bool(names)
    for sequence in scheduler.running:
        assert scheduler.explain(sequence.id).why is Why.BOARDED
    if not names:
        assert scheduler.ask_again is None
        return
    decision = waiting[0]
    assert step.decisions[-1] is decision
    assert (decision.request_id, decision.count) == (names[0], len(names))
    assert scheduler.explain(names[0]) == decision
    assert all(scheduler.explain(name).why is decision.why for name in names)
    _check_reason(world, step, before, decision)


def _check_reason(world: World, step: Step, before: Before, decision: Decision) -> None:
    setup, scheduler = world.setup, world.scheduler
    aboard = len(scheduler.running) + len(scheduler.seated)
    car_was_empty = not before.running and not before.seated
    assert (scheduler.ask_again is not None) == (decision.why is Why.WINDOW)
    match decision.why:
        case Why.SEATS:
            assert not scheduler.seated, "who has a seat does not wait for one"
            assert aboard == setup.num_seats or (setup.closes_batch and not car_was_empty)
        case Why.TOKENS:
            assert step.total_tokens == setup.max_num_batched_tokens
        case Why.ITL:
            assert scheduler.budget is not None
            hits = _hits(world, decision.request_id)
            assert scheduler.budget.room(len(hits) * setup.block_size) < 1
        case Why.BLOCKS:
            assert scheduler.num_preemptions > before.preemptions or _lacks_blocks(world, decision.request_id)
        case Why.WINDOW:
            assert setup.strategy == "dynamic"
            assert car_was_empty
            assert scheduler.ask_again == before.oldest + setup.max_wait > world.now
            assert len(before.line) < setup.seats
            assert not scheduler.line.closed
        case Why.BATCH:
            assert setup.strategy == "static"
            assert car_was_empty
            assert len(before.line) < setup.seats
            assert not scheduler.line.closed


def _hits(world: World, name: str) -> list[int]:
    """The cached blocks that a waiting request would start with."""
    setup, ride = world.setup, world.rides[name]
    request = ride.request
    if not setup.prefix_caching or not request.use_prefix_cache or request.params.prompt_logprobs is not None:
        return []
    hashes, parent = [], root_hash(request.cache_salt)
    for end in range(setup.block_size, len(ride.tokens), setup.block_size):
        parent = block_hash(parent, ride.tokens[end - setup.block_size : end])
        hashes.append(parent)
    return world.scheduler.pool.match(hashes)


def _lacks_blocks(world: World, name: str) -> bool:
    """Whether a request's known tokens don't fit beside those running, each left one block to grow by."""
    setup, scheduler, ride = world.setup, world.scheduler, world.rides[name]
    kept = sum(setup.blocks_for(len(s.token_ids)) - len(s.block_table) + 1 for s in scheduler.running)
    hits = _hits(world, name)
    free = scheduler.pool.num_free - sum(scheduler.pool.ref_count[block] == 0 for block in hits)
    return setup.blocks_for(len(ride.tokens)) - len(hits) > free - kept
