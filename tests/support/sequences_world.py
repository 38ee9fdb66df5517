"""A fake runner that knows what lies in every KV slot, and a checker of all that the scheduler promises.

`World` makes every call on a scheduler, checks it, and records it, so that a history can be replayed.
"""

import copy
import random
import re
from collections import Counter
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import msgspec
from support.sequences_budget import RandomBudget

from chairlift.core.cost import CostModel
from chairlift.core.decision import Decision, Reason
from chairlift.core.finished import Finished, FinishReason
from chairlift.core.queue import QueueOrder, Rank
from chairlift.core.sequences.blocks import BlockPool
from chairlift.core.sequences.budget import FLOOR, LEAST_STEPS, LatencyBudget, StepTimeBudget, seconds_beside
from chairlift.core.sequences.live_settings import LiveSettings, apply_settings
from chairlift.core.sequences.prefixes import Hit
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.scheduler import SequenceScheduler
from chairlift.core.sequences.sequence import Sequence, block_hash, root_hash
from chairlift.core.sequences.snapshots import SnapshotPool
from chairlift.core.sequences.step import Step, StepResult
from chairlift.core.sequences.strategy import make_strategy

STRATEGIES = ("none", "static", "dynamic", "continuous")
PLACED = {Reason.ADMITTED, Reason.RESUMED, Reason.PREEMPTED}
GARBAGE = -1


class Setup(NamedTuple):
    """A scheduler's configuration.

    `budget`, and that of background requests, is None, the seed of a random one, or a step's seconds; without one live
    requests may have a `step_time` in seconds, whose cost model may know from the start what tokens cost here. With a
    `size_ageing` the shortest are first. Where there are `snapshots` layers have states.
    """

    strategy: str = "continuous"
    slots: int = 4
    max_wait: float = 1.0
    block_size: int = 4
    num_blocks: int = 64
    max_num_batched_tokens: int = 64
    max_model_len: int = 128
    prefix_caching: bool = True
    snapshots: int | None = None
    budget: int | float | None = None
    step_time: float | None = None
    knows_cost: bool = False
    background: int | float | None = None
    priority_ageing: float = 1.0
    size_ageing: float | None = None

    def step_budget(self, budget: int | float | None) -> RandomBudget | LatencyBudget | None:
        if isinstance(budget, float):
            return LatencyBudget(budget, self.max_num_batched_tokens)
        return None if budget is None else RandomBudget(budget)

    def scheduler(self) -> SequenceScheduler:
        # By itself a step costs next to nothing here.
        model = CostModel((0.01, 1.0, 1e-6, 1e-6)) if self.knows_cost else CostModel()
        meter = LatencyBudget(inf, self.max_num_batched_tokens, model)
        budget = self.step_budget(self.budget)
        for tokens in (1, 2, 4, 8, 16, 32) * 4 * self.knows_cost:
            model.observe(tokens * 1e-3, tokens, tokens)
        if budget is None and self.step_time is not None:
            budget = StepTimeBudget(self.step_time, self.max_num_batched_tokens, meter.model)
        return SequenceScheduler(
            make_strategy(self.strategy, self.slots, self.max_wait),
            BlockPool(self.num_blocks),
            block_size=self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.prefix_caching,
            snapshots=None if self.snapshots is None else SnapshotPool(self.snapshots, self.block_size),
            budget=budget,
            background_budget=self.step_budget(self.background),
            meter=meter,
            order=QueueOrder("arrival", self.priority_ageing)
            if self.size_ageing is None
            else QueueOrder("shortest", self.priority_ageing, self.size_ageing),
        )

    def moment(self, request: Request) -> float:
        """From when on nobody who comes overtakes this one."""
        moment = request.arrival + request.priority * self.priority_ageing
        if self.size_ageing is not None:
            moment += (len(request.prompt_ids) + request.max_tokens) * self.size_ageing
        return moment

    @property
    def closes_batch(self) -> bool:
        return self.strategy in ("static", "dynamic")

    @property
    def num_slots(self) -> int:
        return 1 if self.strategy == "none" else self.slots

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


class Copied(NamedTuple):
    """A snapshot: the number of all tokens that a state has seen, and what lies in the slots behind full blocks."""

    state: int
    tail: list[int]


class FakeRunner:
    """Rebuilds every block table from the steps alone, as a real runner must, and knows what lies in each slot.

    A slot holds a number that stands for (salt, all tokens up to and including its own), or `GARBAGE`. So does the
    state of a sequence, whose last number it is.
    """

    def __init__(self, setup: Setup) -> None:
        self.block_size = setup.block_size
        self.slots: list[int | None] = [None] * (setup.num_blocks * setup.block_size)
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.prefixes: dict[str, list[int]] = {}
        # Who computes its last token again, which lies in the cache already: failing changes nothing of it.
        self.again: set[str] = set()
        self.has_states = setup.snapshots is not None
        self.states: dict[str, int | None] = {}
        self.snapshots: dict[int, Copied] = {}
        self.num_restored = 0
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
        assert step.kept.keys() <= {*step.released}, "kept, though it did not leave"
        for name, slot in step.kept.items():
            self.copy(name, self.computed[name], slot)
        for name in step.released:
            assert name in self.tables, f"{name} was released without being here"
            del self.tables[name], self.tokens[name], self.computed[name], self.prefixes[name]
            self.again.discard(name)
        for start in step.started:
            name = start.request.id
            assert name not in self.tables, f"{name} was started while it still is here"
            self.tables[name] = list(start.block_table)
            self.tokens[name] = list(start.token_ids)
            self.computed[name] = start.num_computed_tokens
            self.prefixes[name] = self._number(start.request.cache_salt, start.token_ids)
            self.restore(name, start.snapshot)
        fresh = {start.request.id for start in step.started}
        for name, blocks in step.new_blocks.items():
            assert blocks
            assert name not in fresh, "a table given whole was also extended"
            self.tables[name] += blocks
        assert step.num_tokens.keys() <= self.tables.keys(), "whoever has tokens was started"

    def copy(self, name: str, num_tokens: int, slot: int) -> None:
        """Copy the state after so many tokens, which may be behind those computed, as of a pass that goes by."""
        assert self.has_states
        full = num_tokens - num_tokens % self.block_size
        tail = [self._slot(name, position) for position in range(full, num_tokens)]
        seen = self.states[name] if num_tokens == self.computed[name] else self.prefixes[name][num_tokens - 1]
        assert seen is not None
        self.snapshots[slot] = Copied(seen, [GARBAGE if each is None else each for each in tail])

    def restore(self, name: str, snapshot: int | None) -> None:
        """Give a sequence the state that it starts with, and what its first block that is not full begins with."""
        computed = self.computed[name]
        assert (snapshot is not None) == (self.has_states and computed > 0), "begins with tokens, but without a state"
        self.states[name] = None
        if snapshot is not None:
            self.num_restored += 1
            found = self.snapshots[snapshot]
            self.states[name] = found.state
            assert found.state == self.prefixes[name][computed - 1], f"{name} begins with a state of another text"
            full = computed - computed % self.block_size
            for position, number in zip(range(full, computed), found.tail, strict=True):
                self.slots[self._place(name, position)] = number

    def _place(self, name: str, position: int) -> int:
        return self.tables[name][position // self.block_size] * self.block_size + position % self.block_size

    def _slot(self, name: str, position: int) -> int | None:
        return self.slots[self._place(name, position)]

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
                if name in failed and not (name in self.again and position == start):
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
            self._move_state(step, name, context, name in failed or name in tainted)
            self.computed[name] = context
        self.again -= step.num_tokens.keys()
        return tainted

    def _move_state(self, step: Step, name: str, context: int, spoilt: bool) -> None:
        """Have a state see the tokens of this step, and copy it where it is saved."""
        before, prefixes = self.computed[name], self.prefixes[name]
        assert step.saves.keys() <= step.num_tokens.keys()
        if spoilt:
            self.states[name] = GARBAGE
        elif self.has_states:
            known = prefixes[before - 1] if before else None
            assert self.states[name] == known, f"{name} goes on with a state that is not its own"
            self.states[name] = prefixes[context - 1]
        for position, slot in step.saves.get(name, ()):
            assert before < position <= context, f"{name} does not come by {position}"
            self.copy(name, position, slot)
            if spoilt:
                self.snapshots[slot] = self.snapshots[slot]._replace(state=GARBAGE)

    def take_back(self, name: str) -> None:
        """Have a sequence's last token computed again."""
        self.again.add(name)
        self.computed[name] -= 1
        if self.has_states:
            self.states[name] = self.prefixes[name][self.computed[name] - 1] if self.computed[name] else None

    def due(self, name: str) -> bool:
        """Whether all tokens of a sequence are computed, so that it samples the next."""
        return self.computed[name] == len(self.tokens[name])

    def append(self, name: str, tokens: list[int]) -> None:
        self.tokens[name] += tokens
        self.prefixes[name] += self._number(self.prefixes[name][-1], tokens)


class Record(msgspec.Struct):
    """What the checker knows of a request that has not ended."""

    request: Request
    rank: Rank
    tokens: list[int]


class World:
    """Calls a scheduler, checks everything it answers, and records the calls."""

    def __init__(self, setup: Setup) -> None:
        self.setup = self.first_setup = setup
        self.scheduler = setup.scheduler()
        self.runner = FakeRunner(setup)
        self.now = 0.0
        self.records: dict[str, Record] = {}
        self.members: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.added: Counter[str] = Counter()
        self.late: set[str] = set()
        # The first step that those who were late are in again.
        self.rests: dict[str, int] = {}
        self.num_steps = self.num_rested = 0
        self.in_flight: Step | None = None
        self.begun: dict[str, Record] = {}
        self.served: dict[str, int] = {}
        self.background_percent = 0
        self.num_cut = self.num_retuned = 0
        # Who held a slot when there came to be fewer: as they leave, nobody takes their place.
        self.held_over = 0
        # How many tokens of each that may start were found when that was asked first in a step.
        self.found: dict[str, int] = {}
        self._match, self.scheduler.prefixes.match = self.scheduler.prefixes.match, self._note_found
        self.calls: list[tuple[Any, ...]] = []
        self.answers: list[Any] = []
        self._serial = 0

    # Calls

    def add(self, request: Request) -> bool:
        """Add a request; False if it was refused, which must be so exactly if it could never be served."""
        self._record("add", request)
        welcome = self.setup.fits(request) and request.id not in self.records
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
        rank = (self.setup.moment(request), self._serial)
        self.records[request.id] = Record(request, rank, list(request.prompt_ids))
        self.added[request.id] += 1
        self.check()
        return True

    def abort(self, name: str) -> None:
        self._record("abort", name)
        known = name in self.records
        assert self.scheduler.abort(name) is known
        self.answers.append(known)
        if known:
            self._end(name)
        assert self.scheduler.explain(name) is None
        self.check()

    def close(self) -> None:
        self._record("close")
        self.scheduler.close()
        self.answers.append(None)

    def retune(self, settings: LiveSettings) -> None:
        """Change settings between two steps."""
        self._record("retune", settings)
        assert self.in_flight is None
        scheduler = self.scheduler
        apply_settings(settings, scheduler)
        self.answers.append(None)
        self.held_over = scheduler.num_running + scheduler.num_background_running + len(scheduler.admitted)
        most = scheduler.max_num_batched_tokens
        assert most >= max(settings.slots, self.held_over), "somebody would have no token"
        changed = {"slots": settings.slots, "max_wait": settings.max_wait, "max_num_batched_tokens": most}
        self.setup = self.setup._replace(**changed)
        self.num_retuned += 1
        self.check()

    def schedule(self, yields: bool = False) -> Step | None:
        self._record("schedule", self.now, yields)
        assert self.in_flight is None
        before = Before(self)
        self.found = {}
        step = self.scheduler.schedule(self.now, yields)
        self.answers.append(step)
        if step is not None:
            assert step.num_tokens, "a step that computes nothing"
            self.in_flight = step
            self.begun = {name: self.records[name] for name in step.num_tokens}
            self.runner.prepare(step)
        self.check()
        said = step or self._nothing()
        check_step(self, said, before)
        self.num_steps += step is not None
        check_places(self, said, before)
        check_admission(self, said, before)
        check_waiting(self, said, before)
        check_background(self, said, before, yields)
        self.served.update(dict.fromkeys(said.num_tokens, len(self.calls)))
        return step

    def _note_found(self, sequence: Sequence) -> Hit:
        hit = self._match(sequence)
        self.found.setdefault(sequence.id, hit.num_tokens)
        return hit

    def resting(self, running: list[str]) -> set[str]:
        """Who of these, most urgent first, is left out of the next step, as it was late: never the first."""
        return {name for name in running[1:] if self.rests.get(name, -1) > self.num_steps}

    def _nothing(self) -> Step:
        """What the scheduler says of a moment at which nothing runs, as an empty step."""
        decisions = (self.scheduler.waiting_decision, self.scheduler.background.decision)
        return Step(-1, {}, [], {}, [], [decision for decision in decisions if decision is not None])

    def update(
        self,
        tokens: dict[str, list[int]],
        errors: dict[str, str],
        aborts: list[str] = (),
        seconds: float = 0.0,
        ended: set[str] = frozenset(),
        late: set[str] = frozenset(),
        ready: set[str] = frozenset(),
    ) -> list[Finished]:
        """Compute the step in flight, abort some while it runs, and hand in what it gave.

        Of those `ended` nothing can follow by their grammar; what that allows the `late` ones is not known yet,
        and of the `ready` ones it is.
        """
        step, self.in_flight = self.in_flight, None
        assert step is not None
        tainted = self.runner.compute(step, set(errors))
        due = {n for n in step.num_tokens if n not in errors and self.runner.due(n)}
        ended, late = due & ended, due & late - ended
        sampled = {n: tokens[n] for n in step.num_tokens if n in due - late and n in tokens}
        for name in sampled:
            self.runner.append(name, sampled[name])
        for name in late:
            self.runner.take_back(name)
        self.late = self.late - set(step.num_tokens) | late
        for name in aborts:
            self.abort(name)
        for name in late - tainted:
            if self.records.get(name) is self.begun[name]:
                self.rests[name] = step.id + (64 if self.rests.get(name) == step.id else 1)
        for name in ready & self.rests.keys():
            self.rests[name] = self.num_steps
        kinds = {"ended": ended, "late": late, "ready": ready}
        result = StepResult(copy.deepcopy(sampled), errors=dict(errors), seconds=seconds, **kinds)
        self._record("update", copy.deepcopy(result), self.now)
        ends = self.scheduler.update(step, result, self.now)
        self.answers.append(ends)
        expected = []
        for name, record in self.begun.items():
            if self.records.get(name) is not record:
                continue  # aborted while the step ran
            end = self._expected_end(name, record, result, tainted)
            expected += [end] if end else []
        assert ends == expected
        for end in ends:
            self._end(end.id)
            assert self.scheduler.explain(end.id) is None
        self.check()
        return ends

    def drain(self, rng: random.Random) -> None:
        """Close the queue and run to the end: everyone arrives in bounded time, and nothing is left behind."""
        self.close()
        work = sum(len(r.request.prompt_ids) + r.request.max_tokens for r in self.records.values())
        # Background requests take turns, and may be computed anew more often.
        rounds = 10 if any(r.request.background for r in self.records.values()) else 2
        for _ in range(rounds * work + 1):
            if not self.records:
                break
            assert self.schedule() is not None, "someone waits, the queue is closed, and nobody moves"
            self.update(self.sample(rng), {})
        assert not self.records, "not everyone arrived"
        assert self.scheduler.pool.num_used == 0
        assert self.schedule() is None
        assert self.ended == self.added, "each request ends exactly once"

    def sample(self, rng: random.Random, most: int = 1, vocab: int = 3) -> dict[str, list[int]]:
        """Make up tokens for everyone in the step in flight; `update` drops those that are not due."""
        return {n: [rng.randrange(vocab) for _ in range(rng.randint(1, most))] for n in self.in_flight.num_tokens}

    def _record(self, *call: Any) -> None:
        self.calls.append(call)

    def _end(self, name: str) -> None:
        del self.records[name]
        self.rests.pop(name, None)
        self.ended[name] += 1
        self.members.discard(name)

    def _expected_end(self, name: str, record: Record, result: StepResult, tainted: set[str]) -> Finished | None:
        if name in result.errors:
            return Finished(name, FinishReason.ERROR, result.errors[name])
        if name in tainted:
            assert name not in result.tokens, f"{name} computed on garbage, so its token must not reach its client"
            assert all(s.id != name for s in [*self.scheduler.running, *self.scheduler.background.running])
            return None
        request = record.request
        for token in result.tokens.get(name, []):
            record.tokens.append(token)
            made = len(record.tokens) - len(request.prompt_ids)
            if token in request.stop_ids and made >= request.params.min_tokens:
                return Finished(name, FinishReason.STOP, token)
            if made == request.max_tokens:
                return Finished(name, FinishReason.LENGTH)
        return Finished(name, FinishReason.STOP) if name in result.ended else None

    # What holds at any moment

    def check(self) -> None:
        """Check what holds after every call: the pool, the reference counts, who is where, and who shares what."""
        scheduler, setup = self.scheduler, self.setup
        running, admitted, behind = scheduler.running, scheduler.admitted, scheduler.background.running
        pool = scheduler.pool
        pool.check()
        if scheduler.prefixes.snapshots is not None:
            scheduler.prefixes.snapshots.check()
        held: Counter[int] = Counter()
        for sequence in running + behind:
            held.update(sequence.block_table)
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            assert sequence.token_ids == self.records[sequence.id].tokens
        assert {b: n for b, n in enumerate(pool.ref_count) if n} == held, "reference counts are not the holders"
        assert pool.num_used == len(held)
        live = [s.id for s in running] + [s.id for s in admitted]
        names = live + [s.id for s in behind]
        assert len(set(names)) == len(names)
        assert self.records.keys() >= set(names)
        assert [self.records[name].request.background for name in names] == [False] * len(live) + [True] * len(behind)
        num_background = sum(record.request.background for record in self.records.values())
        assert len(scheduler.background.waiting) == num_background - len(behind), "someone is lost, or in two places"
        num_live = len(self.records) - num_background
        assert len(scheduler.waiting) == num_live - len(live), "someone is lost, or in two places"
        assert scheduler.num_waiting == num_live - len(running)
        assert scheduler.num_running == len(running)
        assert scheduler.num_background_waiting == num_background - len(behind)
        assert scheduler.num_background_running == len(behind)
        assert scheduler.num_unfinished == len(self.records)
        assert len(names) <= max(setup.num_slots, self.held_over), "more start than there are slots for"
        self.held_over = min(self.held_over, len(names))
        assert setup.closes_batch or not admitted
        for order in (running, admitted):
            assert all(a.rank < b.rank for a, b in pairwise(order)), "not in order of urgency"
        self._check_sharing({block for block, count in held.items() if count > 1})

    def _check_sharing(self, shared: set[int]) -> None:
        size = self.setup.block_size
        content: dict[int, Any] = {}
        for sequence in [*self.scheduler.running, *self.scheduler.background.running] if shared else ():
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
        scheduler, behind = world.scheduler, world.scheduler.background.running
        self.running = [s.id for s in scheduler.running]
        self.admitted = [s.id for s in scheduler.admitted]
        self.background = [s.id for s in behind]
        self.computed = {s.id: s.num_computed_tokens for s in scheduler.running + behind}
        self.decodes = any(not s.reads_prompt and not s.request.hold_updates for s in scheduler.running)
        read = sum(s.num_computed_tokens + 1 for s in scheduler.running)
        self.holds = len(self.running), read, read
        self.tables = {s.id: list(s.block_table) for s in behind}
        self.prompts = {s.id for s in behind if len(s.token_ids) - s.num_computed_tokens > 1}
        placed = {*self.running, *self.admitted, *self.background}
        waiting = sorted((r.rank, name) for name, r in world.records.items() if name not in placed)
        self.waiting = [(rank, name) for rank, name in waiting if not world.records[name].request.background]
        self.background_waiting = [name for _, name in waiting if world.records[name].request.background]
        self.oldest = min((world.records[name].request.arrival for _, name in self.waiting), default=None)
        self.preemptions = scheduler.num_preemptions


def of_live(world: World, step: Step) -> dict[str, int]:
    """The tokens of live requests."""
    return {name: count for name, count in step.num_tokens.items() if not world.records[name].request.background}


def victims_of(world: World, step: Step) -> tuple[list[str], list[Decision]]:
    """Who lost a place: the live ones, and the decisions about background ones."""
    victims = [d for d in step.decisions if d.reason is Reason.PREEMPTED]
    live = [d.request_id for d in victims if not world.records[d.request_id].request.background]
    return live, [d for d in victims if world.records[d.request_id].request.background]


def started_in(world: World, step: Step, background: bool) -> list[str]:
    names = [start.request.id for start in step.started]
    return [name for name in names if world.records[name].request.background is background]


def check_step(world: World, step: Step, before: Before) -> None:
    """Check a step as its runner sees it, and that it passes no limit."""
    setup, scheduler = world.setup, world.scheduler
    total, live = sum(step.num_tokens.values()), of_live(world, step)
    assert step.total_tokens == total <= setup.max_num_batched_tokens
    resting = world.resting(before.running)
    world.num_rested += len(resting)
    moving = [s.id for s in scheduler.running if s.id not in resting]
    assert moving == sorted(live, key=lambda n: world.records[n].rank)
    started = started_in(world, step, background=False)
    stayed = [name for name in before.running if name in step.num_tokens]
    assert list(step.num_tokens)[: len(live)] == stayed + started
    full = True
    for sequence in [*scheduler.running, *scheduler.background.running]:
        name = sequence.id
        end = sequence.num_computed_tokens + step.num_tokens.get(name, 0)
        assert end <= len(sequence.token_ids) < setup.max_model_len
        assert world.runner.tables[name] == sequence.block_table, "the runner sees another table"
        # Whoever is late has had a block for the token that is computed again.
        end += name in world.late and name not in step.num_tokens
        assert len(sequence.block_table) == setup.blocks_for(end), "blocks beyond what the tokens need"
        full &= end == len(sequence.token_ids) or name not in live
        if name in before.computed:
            assert sequence.num_computed_tokens == before.computed[name]
    preempted = bool(victims_of(world, step)[0])
    spent = check_budget(world, step, before)
    assert full or preempted or spent or total == setup.max_num_batched_tokens, "tokens were held back without need"
    for start in step.started:
        record = world.records[start.request.id]
        assert start.request is record.request
        assert start.token_ids == record.tokens, "what is started is not what its client has seen"
        assert start.num_computed_tokens % setup.block_size == 0 or setup.snapshots is not None
        assert start.num_computed_tokens < len(start.token_ids), "nothing is left to compute"
        assert start.num_computed_tokens >= world.found[start.request.id], "what it was admitted for was lost meanwhile"
        reads = (
            setup.prefix_caching and record.request.use_prefix_cache and record.request.params.prompt_logprobs is None
        )
        assert reads or start.num_computed_tokens == 0


def check_budget(world: World, step: Step, before: Before) -> bool:
    """Check that a budget is kept, but for one token each and what a prompt needs to go on; return if it is spent."""
    budget = world.scheduler.budget
    if budget is None or not step.num_tokens:
        return False
    prompts = sum(count - (name in before.computed) for name, count in of_live(world, step).items())
    if isinstance(budget, RandomBudget):
        assert prompts <= budget.drawn
    elif isinstance(budget, StepTimeBudget):
        return check_step_time(world, step, before, prompts)
    else:
        assert budget.predicted <= budget.target * (1 + 1e-9) or prompts <= FLOOR, "longer than the target"
    return budget.capacity(0) < 1


def check_step_time(world: World, step: Step, before: Before, prompts: int) -> bool:
    """Check that prompts are cut exactly where somebody decodes, and that they go on; return if their time is spent."""
    budget = world.scheduler.budget
    assert isinstance(budget, StepTimeBudget)
    if world.scheduler._limit is None:
        assert not prompts or not before.running, "a prompt that nobody asked the budget for"
        return False
    if not before.decodes or budget.model.num_observed < LEAST_STEPS:
        assert budget.target == inf, "held back though nobody waits, or by a guess"
        return False
    most = seconds_beside(budget.model.predict(*before.holds), budget.model.coefficients, budget.step_time)
    assert budget.step_time <= budget.target <= most * (1 + 1e-9), "longer than those who decode must wait"
    inside = budget.predicted <= budget.target * (1 + 1e-9) or set(step.num_tokens) - set(of_live(world, step))
    assert inside or prompts <= FLOOR, "longer than a step may take"
    spent = budget.capacity(0) < 1
    world.num_cut += spent
    assert not spent or prompts >= FLOOR or victims_of(world, step)[0], "prompts have no part in a step"
    return spent


def check_places(world: World, step: Step, before: Before) -> None:
    """Check who lost a place and who won one, and that a decision says so."""
    placed = [(d.reason, d.request_id) for d in step.decisions if d.reason in PLACED]
    victims, others = victims_of(world, step)
    assert victims == before.running[::-1][: len(victims)], "not the least urgent was preempted"
    assert not before.running or before.running[0] not in victims, "the most urgent was preempted"
    check_background_victims(world, step, before, others)
    lost = {*victims, *(d.request_id for d in others)}
    assert lost <= set(step.released)
    assert world.scheduler.num_preemptions - before.preemptions == len(lost)
    started = [s.request.id for s in step.started]
    assert [name for why, name in placed if why is not Reason.PREEMPTED] == started
    assert not (victims and started), "admitted in the step in which blocks ran out"
    for start in step.started:
        fresh = len(start.token_ids) == len(start.request.prompt_ids)
        assert fresh or (Reason.RESUMED, start.request.id) in placed
    if not step.num_tokens:
        assert not step.released
        assert not started
        assert not lost


def check_background_victims(world: World, step: Step, before: Before, victims: list[Decision]) -> None:
    """Check that background requests yield youngest first, and to their like only when older and not served yet."""
    behind = sorted(before.background, key=lambda name: world.records[name].rank)
    for decision in victims:
        found = re.search(r"for (\w+)", decision.detail)
        assert found is not None
        needy, victim = world.records[found[1]], decision.request_id
        if needy.request.background:
            assert world.records[victim].rank > needy.rank, "an older background request yields to a younger one"
        else:
            assert victim == behind[-1], "not the youngest background request yields"
        behind.remove(victim)
    if victims_of(world, step)[0]:
        assert not behind, "a live request was preempted while background ones held blocks"
    if victims:
        assert not started_in(world, step, background=True), "admitted in the step in which blocks ran out"


def check_background(world: World, step: Step, before: Before, yields: bool) -> None:
    """Check that background requests delay no live one, take turns, and get all that there is when they may."""
    scheduler, live = world.scheduler, of_live(world, step)
    background = scheduler.background
    served = [name for name in step.num_tokens if name not in live]
    waiting = scheduler.waiting_decision
    reading = any(s.reads_prompt for s in scheduler.running) or bool(started_in(world, step, background=False))
    urgent = yields or reading or (waiting is not None and waiting.reason not in (Reason.WINDOW, Reason.BATCH))
    assert not (urgent and served), "a live request waits for background ones"
    records, known = world.records, {s.id: s.known_at_start for s in scheduler.running}
    forced = {name for name in live if len(records[name].tokens) > known[name]}
    assert urgent or all(count == 1 for name, count in live.items() if name not in forced)
    admitted = started_in(world, step, background=True)
    assert admitted == before.background_waiting[: len(admitted)], "admitted out of turn"
    assert served == [name for name in served if name not in admitted] + admitted
    left_out = [s.id for s in background.running if s.id not in step.num_tokens]
    for name in left_out:
        assert world.runner.tables[name] == before.tables[name], "who pauses keeps its blocks, and gets no others"
    missing = len(left_out) + len(background.waiting)
    mine = [d for d in step.decisions if d.reason not in PLACED and world.records[d.request_id].request.background]
    if not (missing or served):
        assert not mine
        return
    assert [background.decision] * bool(missing) == mine
    if missing:
        behind = {s.id for s in background.running}
        waiting_names = sorted(
            (r.rank, name) for name, r in world.records.items() if r.request.background and name not in behind
        )
        assert (mine[0].request_id, mine[0].count) == ([*left_out, *(name for _, name in waiting_names)][0], missing)
        assert (mine[0].reason is Reason.LIVE) == urgent
    for sequence in background.running:
        assert scheduler.explain(sequence.id).reason is (Reason.LIVE if urgent else Reason.ADMITTED)
    if not urgent:
        check_turns(world, step, before, left_out)
        assert served or live, "nothing live is in the way, and nobody moves"
        check_background_budget(world, step, sum(step.num_tokens[name] for name in served))


def check_turns(world: World, step: Step, before: Before, left_out: list[str]) -> None:
    """Check that of those who decode nobody was passed over by one who had tokens later."""
    setup = world.setup
    for name in left_out:
        computed = before.computed[name]
        if name in before.prompts or setup.blocks_for(computed + 1) > len(before.tables[name]):
            continue
        for other in step.num_tokens:
            if other in before.background and other not in before.prompts:
                assert world.served[other] <= world.served[name], "passed over by one who had tokens later"
        assert not started_in(world, step, background=True), "somebody was admitted while one that runs was left out"


def check_background_budget(world: World, step: Step, num_tokens: int) -> None:
    budget = world.scheduler.background.budget
    if isinstance(budget, RandomBudget):
        assert num_tokens <= budget.drawn
    elif budget is not None and world.scheduler.budget is None and step.num_tokens:
        assert budget.predicted <= budget.target * (1 + 1e-9) or num_tokens <= FLOOR, "longer than the target"


def check_admission(world: World, step: Step, before: Before) -> None:
    """Check that admission follows the strategy's rule, strictly in order of urgency, bound no sooner than now."""
    setup, scheduler = world.setup, world.scheduler
    started = started_in(world, step, background=False)
    waiting_names = [name for _, name in before.waiting]
    if started and len(scheduler.running) > 1:
        spare = scheduler.pool.num_free - _owed(world, step, scheduler.running)
        assert spare >= len(scheduler.running) - 1, "admitted although those who run need the blocks"
    if started_in(world, step, background=True):
        others = [*scheduler.running, *scheduler.background.running]
        spare = scheduler.pool.num_free - _owed(world, step, others)
        assert spare >= len(others) - 1, "admitted although those that run need the blocks"
    if not setup.closes_batch:
        assert started == waiting_names[: len(started)], "admitted out of turn"
        return
    placed = {*(s.id for s in scheduler.running), *(s.id for s in scheduler.admitted)}
    if before.running or before.admitted:
        assert placed == world.members, "a closed batch changed while it ran"
        assert started == before.admitted[: len(started)]
        return
    assert not world.members
    leaves = len(waiting_names) >= setup.slots or scheduler.waiting.closed
    if setup.strategy == "dynamic" and before.oldest is not None:
        leaves |= world.now >= before.oldest + setup.max_wait
    members = waiting_names[: setup.slots] if leaves else []
    assert placed == set(members), "not the most urgent of those who wait now, or not at its time"
    assert started == members[: len(started)]
    assert bool(started) == bool(members)
    world.members = set(members)


def _owed(world: World, step: Step, running: list[Sequence]) -> int:
    """Blocks that sequences lack for the tokens they know; whoever rests, no more than the one that is kept for it."""
    moving = [s for s in running if s.id in step.num_tokens or s.request.background]
    return sum(world.setup.blocks_for(len(s.token_ids)) - len(s.block_table) for s in moving)


def check_waiting(world: World, step: Step, before: Before) -> None:
    """Check that whoever still waits is told the truth about why."""
    scheduler = world.scheduler
    said = [d for d in step.decisions if not world.records[d.request_id].request.background]
    waiting = [d for d in said if d.reason not in PLACED]
    placed = {*(s.id for s in scheduler.running), *(s.id for s in scheduler.admitted)}
    live = {name: r for name, r in world.records.items() if not r.request.background}
    waiting_names = sorted((r.rank, name) for name, r in live.items() if name not in placed)
    names = [s.id for s in scheduler.admitted] + [name for _, name in waiting_names]
    assert scheduler.waiting_decision == (waiting[0] if waiting else None)
    assert len(waiting) == bool(names)
    for sequence in scheduler.running:
        assert scheduler.explain(sequence.id).reason is Reason.ADMITTED
    if not names:
        assert scheduler.ask_again is None
        return
    decision = waiting[0]
    assert said[-1] is decision
    assert (decision.request_id, decision.count) == (names[0], len(names))
    assert scheduler.explain(names[0]) == decision
    assert all(scheduler.explain(name).reason is decision.reason for name in names)
    _check_reason(world, step, before, decision)


def _check_reason(world: World, step: Step, before: Before, decision: Decision) -> None:
    setup, scheduler = world.setup, world.scheduler
    placed = len(scheduler.running) + len(scheduler.admitted)
    was_empty = not before.running and not before.admitted
    assert (scheduler.ask_again is not None) == (decision.reason is Reason.WINDOW)
    match decision.reason:
        case Reason.SLOTS:
            assert not scheduler.admitted, "who has a slot does not wait for one"
            assert placed >= setup.num_slots or (setup.closes_batch and not was_empty)
        case Reason.TOKENS:
            assert step.total_tokens == setup.max_num_batched_tokens
        case Reason.ITL:
            assert scheduler.budget is not None
            assert scheduler._limit is scheduler.budget
            assert scheduler.budget.capacity(_hit(world, decision.request_id).num_tokens) < 1
        case Reason.BLOCKS:
            assert victims_of(world, step)[0] or _lacks_blocks(world, decision.request_id)
            assert not scheduler.background.running, "a live request waits for blocks that background ones hold"
        case Reason.WINDOW:
            assert setup.strategy == "dynamic"
            assert was_empty
            assert scheduler.ask_again == before.oldest + setup.max_wait > world.now
            assert len(before.waiting) < setup.slots
            assert not scheduler.waiting.closed
        case Reason.BATCH:
            assert setup.strategy == "static"
            assert was_empty
            assert len(before.waiting) < setup.slots
            assert not scheduler.waiting.closed
        case _:
            raise AssertionError(f"no reason to wait: {decision}")


def _hit(world: World, name: str) -> Hit:
    """What a waiting request would start with."""
    setup, record = world.setup, world.records[name]
    request = record.request
    if not setup.prefix_caching or not request.use_prefix_cache or request.params.prompt_logprobs is not None:
        return Hit([], 0)
    if setup.snapshots is not None:
        # That they are of this text is checked as one begins with them.
        return world.scheduler.prefixes.match(world.scheduler._sequences[name])
    hashes, parent = [], root_hash(request.cache_salt)
    for end in range(setup.block_size, len(record.tokens), setup.block_size):
        parent = block_hash(parent, record.tokens[end - setup.block_size : end])
        hashes.append(parent)
    blocks = world.scheduler.pool.match(hashes)
    return Hit(blocks, len(blocks) * setup.block_size)


def _lacks_blocks(world: World, name: str) -> bool:
    """Whether a request's known tokens don't fit beside those running, each left one block to grow by."""
    setup, scheduler, record = world.setup, world.scheduler, world.records[name]
    kept = sum(setup.blocks_for(len(s.token_ids)) - len(s.block_table) + 1 for s in scheduler.running)
    hits = _hit(world, name).blocks
    free = scheduler.pool.num_free - sum(scheduler.pool.ref_count[block] == 0 for block in hits)
    return setup.blocks_for(len(record.tokens)) - len(hits) > free - kept
