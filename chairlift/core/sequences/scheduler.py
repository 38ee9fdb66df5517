"""One loop for every batching strategy: who runs in the next step, and with how many tokens.

There is no prefill phase and no decode phase. Every sequence has some tokens (its prompt and what was generated) and
some of them computed; each step gives it tokens until the two meet, whereupon the model samples one more. Chunked
prefill, prefix hits and recomputation after preemption all follow from that rule. The idea is Orca's iteration-level
scheduling (OSDI 2022) with vLLM's paged memory (SOSP 2023) and Sarathi-Serve's chunks (OSDI 2024).
"""

from bisect import insort
from math import inf
from operator import attrgetter

from chairlift.core.cost import Coefficients
from chairlift.core.decision import Decision, Reason
from chairlift.core.finished import Finished
from chairlift.core.queue import QueueOrder, WaitingQueue
from chairlift.core.scheduler import Scheduler
from chairlift.core.sequences.background import BackgroundSequences
from chairlift.core.sequences.blocks import BlockPool
from chairlift.core.sequences.budget import LEAST_STEPS, LatencyBudget, StepBudget
from chairlift.core.sequences.prefixes import PrefixCache
from chairlift.core.sequences.request import Request, check_fits
from chairlift.core.sequences.sequence import Sequence, at_rest, end_rest
from chairlift.core.sequences.snapshots import SnapshotPool
from chairlift.core.sequences.step import Start, Step, StepResult
from chairlift.core.sequences.strategy import Admission, Strategy

_rank = attrgetter("rank")
_SAMPLED = 8  # Of steps that no budget is for, one in so many is metered.


class SequenceScheduler(Scheduler[Request, Step, StepResult]):
    """Decides, and remembers just what it needs to decide. Pure: `now` comes in, a `Step` comes out.

    `running` sequences hold blocks, most urgent first. `admitted` ones hold a slot but no blocks: members of a closed
    batch that have not started, or that were preempted. All others are in `waiting`. A `budget` may hold a step below
    `max_num_batched_tokens`. All of these are live; requests that can wait are in `background`, and get what is left,
    within a budget of their own. Budgets learn from every step, a `meter` from a few of those that none is for.
    """

    def __init__(
        self,
        strategy: Strategy,
        pool: BlockPool,
        *,
        block_size: int = 16,
        max_num_batched_tokens: int = 512,
        max_model_len: int = 2048,
        enable_prefix_caching: bool = True,
        snapshots: SnapshotPool | None = None,
        budget: StepBudget | None = None,
        background_budget: StepBudget | None = None,
        meter: LatencyBudget | None = None,
        order: QueueOrder | None = None,
    ) -> None:
        self.strategy = strategy
        self.pool = pool
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.prefixes = PrefixCache(pool, block_size, enable_prefix_caching, snapshots)
        self.budget = budget
        self.meter = meter or LatencyBudget(inf, max_num_batched_tokens)
        self.order = order or QueueOrder()
        self.waiting: WaitingQueue[Sequence] = WaitingQueue()
        self.admitted: list[Sequence] = []
        self.running: list[Sequence] = []
        self.background = BackgroundSequences(background_budget)
        self.ask_again: float | None = None
        self.waiting_decision: Decision | None = None
        self.num_steps = self.num_preemptions = self._serial = self._rests_until = 0
        self._sequences: dict[str, Sequence] = {}
        self._released: list[str] = []
        # The step's budget, once it was begun, and who learns from it.
        self._limit: StepBudget | None = None
        self._learner: StepBudget | None = None

    # What the engine calls

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, saying why, if it could never be served."""
        if request.id in self._sequences:
            raise ValueError(f"request id {request.id!r} is already in use")
        prompt = len(request.prompt_ids)
        size, most, num_blocks = self.block_size, self.max_model_len, self.pool.num_blocks
        check_fits(prompt, request.max_tokens, max_model_len=most, num_blocks=num_blocks, block_size=size)
        self._serial += 1
        moment = self.order.moment(request.arrival, request.priority, prompt + request.max_tokens)
        sequence = Sequence(request, (moment, self._serial))
        self._sequences[request.id] = sequence
        (self.background.waiting if request.background else self.waiting).push(sequence)

    def abort(self, request_id: str) -> bool:
        """Forget a request, wherever it is; its slot and blocks are free at once. False if it is not here."""
        if (sequence := self._sequences.get(request_id)) is not None:
            self._remove(sequence)
        return sequence is not None

    def close(self) -> None:
        """Hear that nobody else will come: a static batch may leave with empty slots."""
        self.waiting.closed = True

    def schedule(self, now: float, yields: bool = False) -> Step | None:
        """Choose the next step; None if nothing can run before `ask_again`, an `add` or an `abort`.

        `yields` leaves background requests out of it: somebody else wants the machine for live ones. Why the others
        wait is in the step's decisions, and in any case in `waiting_decision` and `background.decision`.
        """
        step = Step(self.num_steps, {}, [], {}, [], [])
        self.ask_again = None
        self._continue_running(step)
        self.waiting_decision = None
        last = step.decisions[-1] if step.decisions else None
        if last is not None and not self._sequences[last.request_id].request.background:
            # Admitting somebody after a preemption would take the very blocks that were just found missing.
            if (head := self._head()) is not None:
                detail = f"{last.request_id} was just preempted: {last.detail}"
                self.waiting_decision = Decision(Reason.BLOCKS, head.id, detail, self.num_waiting)
        elif self.num_waiting:
            self._admit_waiting(step, now)
        if self.waiting_decision is not None:
            step.decisions.append(self.waiting_decision)
        self._learner = self._limit
        self.background.decision = None
        if self.has_background:
            self._fill_with_background(step, yields, now)
            self._learner = self._learner or self.background.budget
        elif self._learner is None and self._is_telling():
            self._learner = self.meter
        if not step.num_tokens:
            return None
        if self._learner is not None:
            members = self.running + self.background.running
            if len(step.num_tokens) < len(members):
                members = [sequence for sequence in members if sequence.id in step.num_tokens]
            self._learner.end(members, step)
        self.num_steps += 1
        step.released, self._released = self._released, []
        step.kept = self.prefixes.take_kept()
        return step

    def update(self, step: Step, result: StepResult, now: float) -> list[Finished]:
        """Take in what a step computed; return who ended and why. Their slots and blocks are free from here on.

        Whoever shares a block that a failed request should have filled in this step starts anew, and loses its token.
        """
        if self._learner is not None:
            self._learner.observe(result.seconds)
        finished: list[Finished] = []
        spoilt = self.prefixes.end_step(step, result.errors, self._sequences)
        sequences, tokens, smooth = self._sequences, result.tokens, not (result.errors or result.late or result.ended)
        for request_id, num_tokens in step.num_tokens.items():
            sequence = sequences.get(request_id)
            if sequence is None or not sequence.block_table:
                continue  # aborted while the step ran, and perhaps sent again under the same id
            if smooth:
                sequence.num_computed_tokens += num_tokens
                end = sequence.take(tokens.get(request_id))
            elif request_id not in result.errors and not spoilt.isdisjoint(sequence.block_table):
                tokens.pop(request_id, None)
                self._put_back(sequence)
                continue
            else:
                end = sequence.take_unevenly(step, result)
                self._rests_until = max(self._rests_until, sequence.resumes_at)
            if end is not None:
                if request_id not in result.errors:
                    self.prefixes.keep(sequence)
                self._remove(sequence)
                finished.append(end)
        end_rest(sequences, result.ready, self.num_steps)
        return finished

    # What a person asks

    @property
    def num_waiting(self) -> int:
        """Live requests that hold no blocks: not admitted, not started yet, or preempted."""
        return len(self.waiting) + len(self.admitted)

    @property
    def num_running(self) -> int:
        """Live requests that hold blocks."""
        return len(self.running)

    @property
    def num_background_waiting(self) -> int:
        """Background requests that hold no blocks."""
        return len(self.background.waiting)

    @property
    def num_background_running(self) -> int:
        """Background requests that hold blocks, though a step may leave them out."""
        return len(self.background.running)

    @property
    def has_background(self) -> bool:
        """Whether background requests are here."""
        return bool(self.background.running or self.background.waiting)

    @property
    def coefficients(self) -> Coefficients | None:
        """What steps cost, once the meter's model has seen enough of them."""
        model = self.meter.model
        return model.coefficients if model.num_observed >= LEAST_STEPS else None

    @property
    def num_unfinished(self) -> int:
        """All requests that are here."""
        return len(self._sequences)

    def explain(self, request_id: str) -> Decision | None:
        """Say why a request runs or still waits; None if it is not here."""
        if (sequence := self._sequences.get(request_id)) is None:
            return None
        if sequence.request.background:
            return self.background.explain(sequence)
        if sequence.block_table:
            return Decision(Reason.ADMITTED, request_id, f"runs since {sequence.started:.3f} s")
        head = self.waiting_decision
        if head is None or head.request_id not in self._sequences:
            return Decision(Reason.TOKENS, request_id, "no step was scheduled since the queue moved")
        if head.request_id == request_id:
            return head
        return Decision(head.reason, request_id, f"waits behind {head.request_id}: {head.detail}")

    def _is_telling(self) -> bool:
        """Whether to meter a step without a budget: the first few, if others have one, or under load one in so many."""
        if self.num_steps % _SAMPLED:
            return self.budget is not None and self.meter.model.num_observed < LEAST_STEPS
        return self.num_waiting > 0 or 2 * self.num_running >= self.strategy.slots

    # Running sequences

    def _continue_running(self, step: Step) -> None:
        """Give tokens to all that run, most urgent first, but for those that rest since they were late.

        Everyone behind is sure of one token, so a long prompt fills what decodes leave and never stops them. When
        blocks run out the least urgent gives way, so the most urgent always moves and there is no livelock.
        """
        running, num_tokens, block_size = self.running, step.num_tokens, self.block_size
        self._limit = None
        if self.budget is not None and not self.budget.lazy:
            self._begin_budget()
        resting = at_rest(running, self.num_steps) if self._rests_until > self.num_steps else ()
        budget = self.max_num_batched_tokens + len(resting)  # one token for each that runs is taken off it below
        for sequence in running:  # whoever gives way while this goes on stands at the end
            if sequence.id in resting:
                continue
            computed = sequence.num_computed_tokens
            given = len(sequence.token_ids) - computed
            if given > 1:
                given = min(given, 1 + budget - len(running))
                limit = self._limit or self._begin_budget()
                if limit is not None:
                    given = 1 + limit.grant(computed, given - 1, starts=False)
                budget -= given - 1
            computed += given
            if computed > len(sequence.block_table) * block_size and not self._grow(step, sequence, given):
                break  # it gave way itself, and was the last
            num_tokens[sequence.id] = given
            if computed >= sequence.news_at:
                self.prefixes.publish(step, sequence, computed)

    def _begin_budget(self) -> StepBudget | None:
        """The step's budget, at the moment at which the first asks for it; None if there is none for this step."""
        budget = self.budget
        if budget is not None and (self.running or not budget.lazy):
            budget.begin(self.running)
            self._limit = budget
        return self._limit

    def _grow(self, step: Step, sequence: Sequence, num_tokens: int) -> bool:
        """Take blocks for more tokens, preempting others if need be; False if there is none, or it was one of them."""
        target = self._blocks_for(sequence.num_computed_tokens + num_tokens)
        missing = target - len(sequence.block_table)
        while self.pool.num_free < missing:
            victim = self._victim(step, sequence)
            if victim is None:
                return False
            count = len(self.running) + len(self.background.running)
            detail = f"no free block for {sequence.id}, and this one is the least urgent of {count}"
            self._preempt(step, victim, detail)
            if victim is sequence:
                return False
        blocks = [self.pool.take() for _ in range(missing)]
        sequence.block_table += blocks
        step.new_blocks[sequence.id] = blocks
        return True

    def _victim(self, step: Step, needy: Sequence) -> Sequence | None:
        """Return who gives up its blocks: for a background one, a younger one that has nothing of this step yet."""
        if needy.request.background:
            return self.background.youngest(behind=needy, without=step.num_tokens)
        return self.background.youngest() or self.running[-1]

    def _preempt(self, step: Step, victim: Sequence, detail: str) -> None:
        """Take back a sequence's slot and blocks for a more urgent one."""
        self.prefixes.keep(victim)
        self._put_back(victim)
        self.num_preemptions += 1
        step.decisions.append(Decision(Reason.PREEMPTED, victim.id, detail))

    def _put_back(self, sequence: Sequence) -> None:
        """Stop a sequence; it keeps its place by arrival and is computed anew when there is capacity."""
        self._fellows(sequence).remove(sequence)
        self._release_blocks(sequence)
        if sequence.request.background:
            self.background.waiting.push(sequence)
        elif self.strategy.closes_batch:
            insort(self.admitted, sequence, key=_rank)
        else:
            self.waiting.push(sequence)

    # Admission

    def _head(self) -> Sequence | None:
        """Return who is next to start, or None if nobody waits."""
        return self.admitted[0] if self.admitted else self.waiting.head()

    def _admit_waiting(self, step: Step, now: float) -> None:
        """Start whoever the strategy, the token budget and the free blocks admit, strictly in order of urgency."""
        admission = self.strategy.admit(self.waiting, len(self.running) + len(self.admitted), now)
        if self.strategy.closes_batch and admission.slots > 0:
            while self.waiting and len(self.admitted) < admission.slots:
                self.admitted.append(self.waiting.pop())
                self._free_slot(step, self.admitted[-1])
        slots = 0 if self.strategy.closes_batch else admission.slots
        budget = self.max_num_batched_tokens - step.total_tokens
        while True:
            if (sequence := self._head()) is None:
                return
            if (refusal := self._refusal(step, sequence, admission, slots, budget)) is not None:
                self.ask_again = admission.ask_again
                self.waiting_decision = refusal
                return
            if self.admitted:
                self.admitted.pop(0)
            else:
                self.waiting.pop()
                slots -= 1
                self._free_slot(step, sequence, 1)
            budget -= self._start(step, sequence, budget, now)

    def _free_slot(self, step: Step, needy: Sequence, taken: int = 0) -> None:
        """Have background ones leave until all live sequences, and so many that are about to start, have slots."""
        taken += len(self.running) + len(self.admitted)
        while taken + len(self.background.running) > self.strategy.slots:
            victim = self.background.youngest()
            assert victim is not None, "the strategy gave more slots than there are"
            self._preempt(step, victim, f"its slot is needed for {needy.id}")

    def _refusal(
        self, step: Step, sequence: Sequence, admission: Admission, slots: int, budget: int
    ) -> Decision | None:
        """Say why the head of the queue can't start now, or None if it can. Blocks of background ones are its own."""
        count = self.num_waiting
        if not self.admitted and slots < 1:
            detail = admission.detail if admission.slots < 1 else "every slot was given in this step"
            return Decision(admission.reason, sequence.id, detail, count)
        if budget < 1:
            detail = f"the step's {self.max_num_batched_tokens} tokens are given out"
            return Decision(Reason.TOKENS, sequence.id, detail, count)
        hit = self.prefixes.match(sequence)
        limit = self._limit or self._begin_budget()
        if limit is not None and limit.capacity(hit.num_tokens) < 1:
            return Decision(Reason.ITL, sequence.id, limit.explain(), count)
        self.prefixes.hold(hit)
        while lack := self.pool.lack(self._blocks_for(len(sequence.token_ids)), hit.blocks, kept=len(self.running)):
            victim = self.background.youngest()
            if victim is None:
                return Decision(Reason.BLOCKS, sequence.id, lack, count)
            self._preempt(step, victim, f"its blocks are needed for {sequence.id}")
        return None

    def _start(self, step: Step, sequence: Sequence, budget: int, now: float) -> int:
        """Give a sequence its first blocks and tokens; return how many tokens."""
        hit = self.prefixes.match(sequence)
        self.prefixes.begin(sequence, hit)
        computed = hit.num_tokens
        given = min(len(sequence.token_ids) - computed, budget)
        limit = self.background.budget if sequence.request.background else self._limit
        if limit is not None:
            given = limit.grant(computed, given, starts=True)
        missing = self._blocks_for(computed + given) - len(hit.blocks)
        sequence.block_table = hit.blocks + [self.pool.take() for _ in range(missing)]
        sequence.num_computed_tokens = computed
        sequence.known_at_start = len(sequence.token_ids)
        resumed = sequence.started is not None
        if not resumed:
            sequence.started = now
            sequence.num_cached_tokens = computed
            self.prefixes.count(sequence, computed)
        if sequence.request.background:
            self.background.running.append(sequence)
        else:
            insort(self.running, sequence, key=_rank)
        step.num_tokens[sequence.id] = given
        token_ids, table = list(sequence.token_ids), list(sequence.block_table)
        step.started.append(Start(sequence.request, token_ids, computed, table, hit.snapshot))
        reason = Reason.RESUMED if resumed else Reason.ADMITTED
        detail = f"{given} of {len(sequence.token_ids)} tokens, {computed} found in the prefix cache"
        step.decisions.append(Decision(reason, sequence.id, detail))
        self.prefixes.publish(step, sequence, computed + given)
        return given

    # BackgroundSequences

    def _fill_with_background(self, step: Step, yields: bool, now: float) -> None:
        """Give background sequences what this step has left, unless a live one would wait for it to end."""
        background = self.background
        waiting = self.waiting_decision
        urgent = "another model has live requests" if yields else background.urgent(step, self.running, waiting)
        refusal: tuple[Reason, str] | None = (Reason.LIVE, urgent)
        if not urgent:
            if background.budget is not None:
                background.budget.begin(self.running)
            refusal = self._continue_background(step) or self._admit_background(step, now)
        if refusal is not None:
            background.decision = background.leave_out(step, *refusal)
            step.decisions.append(background.decision)

    def _continue_background(self, step: Step) -> tuple[Reason, str] | None:
        """Give tokens to those that run, in turn; return why some got none, or None if nobody was left out."""
        background, limit = self.background, self.background.budget
        budget, block_size = self.max_num_batched_tokens - step.total_tokens, self.block_size
        served, refusal = [], None
        for sequence in background.in_turn():
            computed, held = sequence.num_computed_tokens, len(sequence.block_table)
            if not held:
                continue  # it gave way to another
            given = wanted = len(sequence.token_ids) - computed
            if wanted > 1:
                most = budget if limit is None else min(budget, limit.capacity(computed))
                given = min(wanted, most)
            elif limit is not None and not limit.takes_decode(computed):
                given = 0
            if given < 1 or budget < 1:
                refusal = Reason.TOKENS, background.spent(budget, self.max_num_batched_tokens)
                break
            if computed + given > held * block_size and not self._grow(step, sequence, given):
                if limit is not None and wanted == 1:
                    limit.returns_decode(computed)
                refusal = Reason.BLOCKS, f"no free block for {sequence.id}, and nobody runs that is less urgent"
                continue
            if limit is not None and wanted > 1:
                limit.grant(computed, min(wanted, budget), starts=True)
            step.num_tokens[sequence.id] = given
            budget -= given
            served.append(sequence)
            if computed + given >= sequence.news_at:
                self.prefixes.publish(step, sequence, computed + given)
        background.take_turns(served)
        return refusal

    def _admit_background(self, step: Step, now: float) -> tuple[Reason, str] | None:
        """Start whoever finds a slot, tokens and blocks; return why the others don't, or None if nobody waits."""
        background, limit = self.background, self.background.budget
        budget = self.max_num_batched_tokens - step.total_tokens
        while (sequence := background.waiting.head()) is not None:
            others = len(self.running) + len(background.running)
            if others + len(self.admitted) >= self.strategy.slots:
                return Reason.SLOTS, f"all {self.strategy.slots} slots are taken"
            hit = self.prefixes.match(sequence)
            if budget < 1 or (limit is not None and limit.capacity(hit.num_tokens) < 1):
                return Reason.TOKENS, background.spent(budget, self.max_num_batched_tokens)
            lost = next((decision for decision in step.decisions if decision.reason is Reason.PREEMPTED), None)
            if lost is not None:
                return Reason.BLOCKS, f"{lost.request_id} was just preempted: {lost.detail}"
            if lack := self.pool.lack(self._blocks_for(len(sequence.token_ids)), hit.blocks, kept=others):
                return Reason.BLOCKS, lack
            background.waiting.pop()
            budget -= self._start(step, sequence, budget, now)
        return None

    # Ends

    def _remove(self, sequence: Sequence) -> None:
        """Take a sequence out of wherever it is and let go of all it holds."""
        del self._sequences[sequence.id]
        if sequence.block_table:
            self._fellows(sequence).remove(sequence)
            self._release_blocks(sequence)
        elif sequence in self.admitted:
            self.admitted.remove(sequence)
        else:
            (self.background.waiting if sequence.request.background else self.waiting).remove(sequence)

    def _fellows(self, sequence: Sequence) -> list[Sequence]:
        """The list that holds a sequence with blocks."""
        return self.background.running if sequence.request.background else self.running

    def _release_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.start_anew()
        self._released.append(sequence.id)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
