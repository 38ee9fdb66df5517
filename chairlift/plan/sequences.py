"""A language model in virtual time: the production scheduler and admission, a worker's loop, and recorded times."""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil

from chairlift.config.sequences import SequenceConfig
from chairlift.core.finished import FinishReason, Shed, ShedReason
from chairlift.core.queue import QueueLimit
from chairlift.core.sequences.calibration import Probe, ProbeStep, fitted, learn, steps_of
from chairlift.core.sequences.request import Request, Unservable, check_fits
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.sequence import Sequence
from chairlift.core.sequences.step import Step, StepResult
from chairlift.core.sequences.turn import Turn
from chairlift.plan.machine_profile import SequenceProfile
from chairlift.plan.resampler import StepTimes, expected_seconds
from chairlift.plan.simulated_run import SimulatedRequest, SimulatedSteps
from chairlift.plan.trace import prompt_ids
from chairlift.plan.virtual_machine import VirtualMachine

# The token that ends a sequence, and any other. Prompts hold neither: they are made of other numbers.
_STOP, _WORD = 2, 3
_TOKEN, _LAST = [_WORD], [_STOP]
_STOPS = frozenset({_STOP})
_PARAMS = SamplingParams(temperature=0, max_tokens=None)
_WAKES_LATE = 1e-3


@dataclass(frozen=True)
class SequenceModel:
    """A language model to simulate: its settings, what was measured of it, and its weight among others.

    `max_waiting` is that of the server's settings. `times` are those of the profile, where they have been made of it.
    """

    config: SequenceConfig
    profile: SequenceProfile
    name: str = ""
    weight: float = 1.0
    max_waiting: int = 1024
    times: StepTimes | None = None


class VirtualSequences:
    """One replica of a language model. Its worker sleeps until a message comes or the scheduler's moment, as ever."""

    def __init__(self, model: SequenceModel, machine: VirtualMachine, seed: str, shares_machine: bool) -> None:
        config, profile = model.config, model.profile
        self.steps = SimulatedSteps()
        self.num_unfinished = 0
        self._machine = machine
        self._agenda = machine.agenda
        self._front = machine.front
        self._hop = machine.front.cost.hop
        rng = random.Random(seed)
        self._times = StepTimes(profile, rng) if model.times is None else model.times.fresh(rng)
        longest = min(config.max_model_len or profile.max_model_len, profile.max_model_len)
        sizes = profile.num_blocks, profile.block_size, longest, profile.num_snapshots, profile.experts
        self.scheduler = config.make_scheduler(*sizes)
        self.shedder = config.make_shedder()
        self._sheds = config.target_ttft_ms is not None
        self._limits = {False: QueueLimit(model.max_waiting), True: QueueLimit(model.max_waiting)}
        self._num_waiting = {False: 0, True: 0}
        if config.target_itl_ms is not None or self._sheds:
            self._calibrate(config, profile, longest)
        self.shedder.limits = config.step_limits(profile.num_blocks, profile.block_size)
        self.shedder.stepped(0, 0, self.scheduler.coefficients, 0.0)
        self._lives: dict[str, SimulatedRequest] = {}
        # Who ends by a stop token, by the step that gives it.
        self._stops: dict[int, list[str]] = {}
        # Messages on their way to the worker, with the moments at which they arrive: requests, or ids to forget.
        self._inbox: deque[tuple[float, Request | str]] = deque()
        self._busy = False
        self._wake_at: float | None = None
        # Who had no token in the last step, and who of these has one in this; who reads what is known of it already;
        # and what all others have in the KV cache together.
        self._silent: set[str] = set()
        self._opened: list[str] = []
        self._reading: list[Sequence] = []
        self._kv_tokens = 0
        self._recount = False
        self._turn = self._join(machine, model) if shares_machine else None

        self._fits = partial(
            check_fits, max_model_len=longest, num_blocks=profile.num_blocks, block_size=profile.block_size
        )

    def _calibrate(self, config: SequenceConfig, profile: SequenceProfile, max_model_len: int) -> None:
        """Have the cost model learn from the steps that a worker times before it is ready."""

        def timed(wanted: Probe) -> Iterator[tuple[ProbeStep, float]]:
            probe = fitted(
                wanted,
                slots=config.slots,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=max_model_len,
                num_blocks=profile.num_blocks,
                block_size=profile.block_size,
            )
            for step in () if probe is None else steps_of(probe):
                yield step, expected_seconds(profile, step.tokens, step.kv_tokens, step.pairs)

        learn(self.scheduler.meter.model, timed)

    def _join(self, machine: VirtualMachine, model: SequenceModel) -> Turn:
        """Take turns with the other models."""

        def given() -> None:
            turn.given()
            self.listen()

        member = machine.join(model.name, model.weight, self._hop, given, lambda live: turn.others_wait(live))
        turn = Turn(member.ask, member.release)
        return turn

    # The front

    def arrive(self, life: SimulatedRequest, number: int) -> None:
        """A request reaches the front, which reads it and tokenizes its prompt before anything is decided."""
        cost, trace = self._front.cost, life.request
        done = self._front.work(self._agenda.now, cost.request + cost.prompt_token * trace.input_length)
        self.num_unfinished += 1
        self._agenda.at(done, lambda: self._submit(life, number))

    def _submit(self, life: SimulatedRequest, number: int) -> None:
        now, trace = self._agenda.now, life.request
        length = max(trace.output_length, 1)
        most = max(trace.max_tokens or length, length)
        try:
            self._fits(trace.input_length, most)
        except Unservable as error:
            life.refusal = str(error)
            self.num_unfinished -= 1
            return
        request = Request(
            id=str(number),
            prompt_ids=prompt_ids(trace, number),
            params=_PARAMS,
            max_tokens=most,
            arrival=now,
            priority=trace.priority,
            # Where nobody knows how many tokens it might have, these are all: that is how traces are replayed.
            stop_ids=frozenset() if trace.max_tokens is None else _STOPS,
            hold_updates=trace.hold_updates,
            cache_salt=trace.tenant,
            background=trace.background,
        )
        limit, waiting = self._limits[trace.background], self._num_waiting[trace.background]
        if limit.retry_after(waiting, 1, now) is not None:
            self._shed(life, ShedReason.QUEUE_FULL, now)
            return
        if trace.timeout is not None and not self._sheds:
            self._begin_shedding(now)
        life.deadline = deadline = None if trace.timeout is None else now + trace.timeout
        if self._sheds and not trace.background:
            try:
                self.shedder.arrive([request], now, (trace.tenant, most.bit_length()), deadline)
            except Shed as shed:
                self._shed(life, shed.reason, now)
                return
        self._num_waiting[trace.background] += 1
        self._lives[request.id] = life
        self._silent.add(request.id)
        self._send(now, request)
        if deadline is not None:
            self._agenda.at_deadline(deadline, lambda: self._expire(request.id))

    def _begin_shedding(self, now: float) -> None:
        """Tell the shedder, from the first deadline on, of all who are here; those that run had their tokens now."""
        self._sheds = True
        num_steps = self.scheduler.num_steps
        self.shedder.stepped(num_steps, self.scheduler.num_waiting, self.scheduler.coefficients, now)
        scheduler = self.scheduler
        here = [each.request for each in (*scheduler.running, *scheduler.admitted, *scheduler.waiting)]
        here.sort(key=lambda request: int(request.id))  # as they came
        known = {request.id for request in here}
        here += [message for _, message in self._inbox if isinstance(message, Request)]
        for request in here:
            if not request.background:
                self.shedder.arrive([request], now)
                if request.id in known and self._lives[request.id].first is not None:
                    self.shedder.started(request.id, num_steps, 0, now)
        running = [sequence.id for sequence in scheduler.running]
        self.shedder.moved(running, known.difference(running))

    def _shed(self, life: SimulatedRequest, reason: ShedReason, now: float) -> None:
        life.shed, life.shed_at = reason, now
        self.num_unfinished -= 1

    def _send(self, now: float, message: Request | str) -> None:
        moment = now + self._hop
        self._inbox.append((moment, message))
        if not self._busy:
            self.wake(moment)

    # The worker

    def close(self) -> None:
        """Nobody else comes: a static batch leaves with empty slots."""
        self.scheduler.close()
        if not self._busy:
            self.wake(self._agenda.now)

    def wake(self, moment: float) -> None:
        """Have the worker look around at a moment, unless it will before."""
        if self._wake_at is None or moment < self._wake_at:
            self._wake_at = moment
            self._agenda.at(moment, lambda: self._woken(moment), last=True)

    def _woken(self, moment: float) -> None:
        if self._wake_at == moment and not self._busy:
            self._front.slowdown(moment, 0.0)  # it slowed down nobody
            self.listen()

    def listen(self) -> None:
        """Take in what has come, and run a step if there is one to run."""
        now, scheduler, turn = self._agenda.now, self.scheduler, self._turn
        self._wake_at = None
        inbox = self._inbox
        while inbox and inbox[0][0] <= now:
            message = inbox.popleft()[1]
            if isinstance(message, Request):
                scheduler.add(message)
            else:
                scheduler.abort(message)
                self._recount = True
        only_background = not (scheduler.num_running or scheduler.num_waiting)
        if turn is not None and scheduler.num_unfinished and not turn.want(only_background):
            if inbox:
                self.wake(inbox[0][0])
            return
        step = self.scheduler.schedule(now, yields=turn is not None and turn.live_waits)
        if step is None:
            if turn is not None:
                turn.nothing_to_do(self.scheduler.has_background)
            if inbox:
                self.wake(inbox[0][0])
            if scheduler.ask_again is not None:
                # Its timer counts whole milliseconds, and never too few of them.
                wait = ceil(max(scheduler.ask_again - now, 0.0) / _WAKES_LATE - 1e-6) * _WAKES_LATE
                self.wake(now + max(wait, _WAKES_LATE))
            return
        self._run(step, now)

    def _run(self, step: Step, now: float) -> None:
        for request_id in step.released:
            preempted = self._lives.get(request_id)
            if preempted is not None:
                preempted.preemptions += 1
                self._pause(request_id)
        for start in step.started:
            life = self._lives.get(start.request.id)
            if life is not None and life.scheduled is None:
                life.scheduled, life.cached_tokens = now, start.num_computed_tokens
        tokens, kv_tokens, pairs, result = self._computed(step)
        count = len(step.num_tokens)
        seconds = self._times.seconds(tokens, kv_tokens, pairs, now)
        seconds += self._front.slowdown(now, seconds)
        result.seconds = seconds
        scheduler = self.scheduler
        self.steps.note(now, seconds, count, scheduler.num_waiting, tokens, scheduler.pool.num_used)
        self._busy = True
        gap = self._times.gap(count, now + seconds)
        self._agenda.at(now + seconds + gap, lambda: self._finish(step, result), last=True)

    def _computed(self, step: Step) -> tuple[int, int, int, StepResult]:
        """What a step holds, as the cost model counts it, and what it gives: a token for each that knows all before.

        Whoever had a token in the last step is one further, so only those that read are looked at one by one; and all
        where background requests run, since a step may leave some of them out, or after somebody was given up.
        """
        given, tokens, scheduler = step.num_tokens, step.total_tokens, self.scheduler
        others = scheduler.background.running
        if others or self._recount:
            for sequence in others:
                if sequence.id not in given:
                    self._pause(sequence.id)
            self._reading = [*scheduler.running, *others]
            self._kv_tokens = 0
            self._recount = False
        elif step.started:
            new = {start.request.id for start in step.started}
            self._reading += [sequence for sequence in scheduler.running if sequence.id in new]
        reading = [sequence for sequence in self._reading if sequence.id in given]
        self._kv_tokens += len(given) - len(reading)
        read = pairs = self._kv_tokens
        made = dict.fromkeys(given, _TOKEN)
        self._reading = []
        for sequence in reading:
            name, computed = sequence.id, sequence.num_computed_tokens
            num = given[name]
            read += computed + num
            pairs += num * computed + num * (num + 1) // 2
            if computed + num < len(sequence.token_ids):
                self._reading.append(sequence)
                del made[name]
                continue
            self._kv_tokens += computed + num
            if name in self._silent:
                self._open_span(name)
        for name in self._stops.pop(len(self.steps.delivered), ()):
            life = self._lives.get(name) if name in made else None
            if life is not None and self._num_tokens(life) == max(life.request.output_length, 1):
                made[name] = _LAST
        return tokens, read, pairs, StepResult(made)

    def _finish(self, step: Step, result: StepResult) -> None:
        """A step is over, and what follows it: its tokens leave, and the worker goes on."""
        now = self._agenda.now
        self._busy = False
        finished = self.scheduler.update(step, result, now)
        cost = self._front.cost.output_token * len(result.tokens)
        delivered = self._front.work(now + self._hop, cost, slows_down=False)
        self.steps.delivered.append(delivered)
        self._begin_answers(delivered)
        for end in finished:
            self._end(end.id, end.reason, delivered)
        scheduler = self.scheduler
        if self._sheds:
            self.shedder.moved([start.request.id for start in step.started], step.released)
            stats = scheduler.num_steps, scheduler.num_waiting, self.scheduler.coefficients
            for request_id, shed in self.shedder.stepped(*stats, delivered):
                self._give_up(request_id, shed.reason, delivered)
        if self._turn is not None:
            self._turn.after_step(result.seconds, not (scheduler.num_running or scheduler.num_waiting))
        self.listen()

    # The way back

    def _open_span(self, request_id: str) -> None:
        """A request has a token in the step that begins, and in each that follows until it pauses or ends."""
        life = self._lives.get(request_id)
        if life is None:
            return  # given up, which the worker has not heard yet
        number, made = len(self.steps.delivered), life.num_tokens
        self._silent.discard(request_id)
        self._opened.append(request_id)
        life.spans.append([number, number])
        if (life.request.max_tokens or 0) > max(life.request.output_length, 1):
            self._stops.setdefault(number + max(life.request.output_length, 1) - made - 1, []).append(request_id)

    def _num_tokens(self, life: SimulatedRequest) -> int:
        """How many tokens a request that has one in the step that begins, or that just ended, then has."""
        return life.num_tokens + len(self.steps.delivered) - life.spans[-1][0] + 1

    def _begin_answers(self, now: float) -> None:
        """Tell those whose first token the last step gave, but for those who are given up before it is there."""
        for request_id in self._opened:
            life = self._lives.get(request_id)
            if life is None or life.first is not None or (life.deadline is not None and now > life.deadline):
                continue
            life.first = now
            self._num_waiting[life.request.background] -= 1
            if self._sheds and not life.request.background:
                self.shedder.started(request_id, self.scheduler.num_steps, life.cached_tokens, now)
        self._opened = []

    def _pause(self, request_id: str) -> None:
        """A request has no token in the step that begins, or in any more."""
        life = self._lives.get(request_id)
        if life is None or request_id in self._silent:
            return
        self._silent.add(request_id)
        self._close_span(life)
        self._kv_tokens -= life.request.input_length + life.num_tokens - 1

    def _close_span(self, life: SimulatedRequest) -> None:
        """Count the tokens that the steps so far have given since a request began to have them."""
        first, _ = life.spans[-1]
        life.spans[-1][1] = last = len(self.steps.delivered) - 1
        life.num_tokens += last - first + 1

    def _end(self, request_id: str, reason: FinishReason, now: float) -> None:
        life = self._lives.get(request_id)
        if life is None:
            return  # given up while the step ran
        self._pause(request_id)
        if life.deadline is not None and now > life.deadline:
            self._give_up(request_id, ShedReason.DEADLINE, life.deadline)
            return
        life.end = now
        self._forget(request_id, life, now, life.num_tokens if reason is FinishReason.LENGTH else None)

    def _expire(self, request_id: str) -> None:
        """Give up a request whose time is over, if it has not ended."""
        if request_id in self._lives:
            self._give_up(request_id, ShedReason.DEADLINE, self._agenda.now)

    def _give_up(self, request_id: str, reason: ShedReason, now: float) -> None:
        """Refuse a request that has waited in vain, for its first token or for its last."""
        life = self._lives[request_id]
        life.shed, life.shed_at = reason, now
        if life.first is None:
            self._num_waiting[life.request.background] -= 1
        if life.spans:
            self._cut_off(request_id, life, now)
        self._forget(request_id, life, now, None)
        self._send(now, request_id)

    def _cut_off(self, request_id: str, life: SimulatedRequest, now: float) -> None:
        """Leave a request that is given up the tokens that its client has by now."""
        if request_id not in self._silent:
            self._close_span(life)
        delivered, spans = self.steps.delivered, life.spans
        while spans:
            first, last = spans[-1]
            if last < first:
                spans.pop()
            elif delivered[last] > now:
                spans[-1][1] -= 1
                life.num_tokens -= 1
            else:
                break
        # The worker, which has yet to hear of it, may end it meanwhile.
        self._recount = True

    def _forget(self, request_id: str, life: SimulatedRequest, now: float, cut_off: int | None) -> None:
        del self._lives[request_id]
        self._silent.discard(request_id)
        if self._sheds:
            self.shedder.ended(request_id, cut_off)
        self._limits[life.request.background].ended(now)
        self.num_unfinished -= 1
