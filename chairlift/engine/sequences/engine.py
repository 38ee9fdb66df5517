"""The loop around the core: the scheduler decides, the runner computes, and somebody asks for the next step."""

import logging
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from queue import SimpleQueue

from chairlift.config.sequences import SequenceConfig
from chairlift.core.cost import Coefficients, CostModel
from chairlift.core.decision import Reason
from chairlift.core.finished import Finished, FinishReason
from chairlift.core.sequences.budget import LatencyBudget
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.standing import SequenceState, Standing, standings
from chairlift.core.sequences.step import Step, StepResult, TokenLogprob
from chairlift.engine.device_lost import is_device_lost
from chairlift.engine.sequences.calibrate import calibrate, is_on_gpu
from chairlift.engine.sequences.messages import CostStats, EngineStats, SequenceUpdate, StepOutput
from chairlift.runners.error_text import one_line
from chairlift.runners.low_priority import rest
from chairlift.runners.out_of_memory import is_out_of_memory
from chairlift.runners.sequences import SequenceInfo, SequenceRunner

log = logging.getLogger(__name__)


class _Progress:
    """What the engine must remember of a request between its first step and its last."""

    __slots__ = (
        "answered",
        "first_scheduled",
        "held",
        "held_logprobs",
        "holds",
        "num_cached_tokens",
        "prompt_logprobs",
    )

    def __init__(self, first_scheduled: float, num_cached_tokens: int, request: Request) -> None:
        self.first_scheduled = first_scheduled
        self.num_cached_tokens = num_cached_tokens
        # Empty, and not None, for a prompt of one token.
        self.prompt_logprobs: list[TokenLogprob] | None = None if request.params.prompt_logprobs is None else []
        self.answered = False
        self.holds = request.hold_updates
        self.held: list[int] = []
        self.held_logprobs: list[TokenLogprob] = []


class Engine:
    """One model, one scheduler, one runner, in the calling thread. Worker processes and `LLM` both drive this class."""

    def __init__(
        self, config: SequenceConfig, runner: SequenceRunner, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.runner = runner
        self.clock = clock
        self.info: SequenceInfo = runner.load()
        info, most = self.info, config.max_num_batched_tokens
        sizes = info.num_blocks, info.block_size, info.max_model_len, info.num_snapshots, info.experts
        self.scheduler = config.make_scheduler(*sizes)
        self._progress: dict[str, _Progress] = {}
        self._num_added = 0
        # Who waits for a grammar, by its text; what was compiled in another thread; and what those hold who are here.
        self._unprepared: dict[str, list[Request]] = {}
        self._compiled: SimpleQueue[tuple[str, object]] = SimpleQueue()
        self._grammars: dict[str, object] = {}
        self.on_prepared: Callable[[], None] = _nothing
        # How fast the largest step is, whether there is a latency target or not.
        self._pace = CostModel()
        self._most = min(most, self.info.max_model_len)
        if is_on_gpu(info):
            # The first shows what libraries set up, and the second what is recorded.
            for _ in range(2):
                runner.warm_up()
        began = clock()
        runner.warm_up()
        self._pace.observe(clock() - began, self._most, self._most, self._most * (self._most + 1) / 2)
        self._has_target = config.target_itl_ms is not None
        if self._has_target or config.target_ttft_ms is not None:
            calibrate(self.scheduler.meter.model, runner, self.info, config.slots, most)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, saying why, if it can never be served.

        One whose grammar must be compiled first waits aside: then `on_prepared` is called, in another thread, for
        `take_prepared` to queue it.
        """
        self._num_added += 1
        grammar = request.grammar
        if grammar is not None:
            held = self.runner.find_grammar(grammar)
            if held is None:
                waiting = self._unprepared.setdefault(grammar, [])
                waiting.append(request)
                if len(waiting) == 1:
                    self.runner.compile_grammar(grammar, partial(self._prepared, grammar))
                return
            self._grammars[request.id] = held
        self.scheduler.add(request)

    def _prepared(self, grammar: str, result: object) -> None:
        self._compiled.put((grammar, result))
        self.on_prepared()

    def take_prepared(self) -> list[SequenceUpdate]:
        """Queue those whose grammars are compiled by now; return the ends of those that can't be served."""
        ends: list[SequenceUpdate] = []
        while not self._compiled.empty():
            grammar, result = self._compiled.get()
            for request in self._unprepared.pop(grammar, []):
                if isinstance(result, ValueError):
                    ends.append(SequenceUpdate(request.id, [], FinishReason.INVALID, f"the grammar: {result}"))
                    continue
                try:
                    self._grammars[request.id] = result
                    self.scheduler.add(request)
                except ValueError as error:
                    ends.append(SequenceUpdate(request.id, [], FinishReason.ERROR, str(error)))
                    del self._grammars[request.id]
        return ends

    @property
    def num_unprepared(self) -> int:
        """Requests that wait for their grammar to be compiled."""
        return sum(map(len, self._unprepared.values()))

    def explain(self, request_ids: Collection[str]) -> list[Standing]:
        """Say where those of these requests are that are here, and why."""
        found = standings(self.scheduler, request_ids)
        unprepared = (request.id for waiting in self._unprepared.values() for request in waiting)
        return found + [Standing(each, SequenceState.PREPARING) for each in unprepared if each in request_ids]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests; ids that are not here (any more) are passed over."""
        gone = set(request_ids)
        for request_id in gone:
            self.scheduler.abort(request_id)
            self._progress.pop(request_id, None)
            self._grammars.pop(request_id, None)
        for grammar, waiting in list(self._unprepared.items()):
            waiting[:] = [request for request in waiting if request.id not in gone]
            # A grammar that is being compiled keeps its list, even an empty one.
            if not waiting and self.runner.cancel_grammar(grammar):
                del self._unprepared[grammar]

    def close_queue(self) -> None:
        """Nobody else will come, so closed batches need not wait to be full."""
        self.scheduler.close()

    @property
    def ask_again(self) -> float | None:
        """When a step may become possible that is not now, on the engine's clock; None if only a message can help."""
        return self.scheduler.ask_again

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return self.scheduler.num_unfinished

    @property
    def only_background(self) -> bool:
        """Whether all that is here are background requests."""
        return not (self.scheduler.num_running or self.scheduler.num_waiting)

    @property
    def has_background(self) -> bool:
        """Whether background requests are here."""
        return self.scheduler.has_background

    @property
    def longest_step(self) -> float:
        """Seconds that a step as full as can be would take with those who run; may be asked in another thread."""
        running = [*self.scheduler.running, *self.scheduler.background.running]
        contexts = [sequence.num_computed_tokens for sequence in running]
        tokens, read = len(contexts) + self._most, sum(contexts) + self._most
        return self._pace.predict(tokens, read, read + self._most * (max(contexts, default=0) + self._most))

    def step(self, yields: bool = False) -> StepOutput | None:
        """Run one step and return what it gave, or None if nothing can run now.

        `yields` leaves background requests out of it: another model has live work.
        """
        started = self.clock()
        step = self.scheduler.schedule(started, yields)
        if step is None:
            if not self.num_unfinished:
                rest()
            return None
        result = self._execute(step)
        finished = self.scheduler.update(step, result, self.clock())
        return self._output(step, result, finished, started)

    def close(self) -> None:
        """Release the model."""
        self.runner.close()

    def _execute(self, step: Step) -> StepResult:
        """Run the step; if it fails as a whole its requests get the error and the engine carries on.

        Raises what interrupted it, and whatever says that no other step can be run in this process either.
        """
        try:
            return self.runner.execute(step)
        except BaseException as error:
            if not isinstance(error, Exception) or is_device_lost(error):
                # Nobody may find the blocks that this step was to fill.
                self.scheduler.update(step, _failure(step, "interrupted"), self.clock())
                raise
            if is_out_of_memory(error):
                count = len(step.num_tokens)
                log.error("step %d with %d requests ran out of memory: %s", step.id, count, one_line(error))
            else:
                log.exception("step %d with %d requests failed", step.id, len(step.num_tokens))
            return _failure(step, f"{type(error).__name__}: {error}")

    def _output(self, step: Step, result: StepResult, finished: list[Finished], started: float) -> StepOutput:
        progress = self._progress
        for start in step.started:
            known = progress.get(start.request.id)
            if known is None:
                progress[start.request.id] = _Progress(started, start.num_computed_tokens, start.request)
            elif known.prompt_logprobs is not None:
                known.prompt_logprobs = []  # preempted amid its prompt, which is computed anew from the start
        for request_id, entries in result.prompt_logprobs.items():
            gathered = progress[request_id].prompt_logprobs
            if gathered is not None:
                gathered += entries
        ends = {end.id: end for end in finished}
        updates = []
        for request_id in step.num_tokens:
            tokens, end = result.tokens.get(request_id), ends.get(request_id)
            if end is None and tokens:
                known = progress[request_id]
                if known.holds and known.answered:
                    known.held += tokens
                    known.held_logprobs += result.logprobs.get(request_id, ())
                    continue
            if tokens or end:
                updates.append(self._update(request_id, tokens or [], end, result))
        stats = self.stats()
        stats.step_requests = len(step.num_tokens)
        stats.step_tokens = step.total_tokens
        stats.step_ended = self.clock()
        stats.step_seconds = stats.step_ended - started
        preempted = [each.request_id for each in step.decisions if each.reason is Reason.PREEMPTED]
        return StepOutput(updates, stats, preempted, [start.request.id for start in step.started])

    def _update(self, request_id: str, tokens: list[int], end: Finished | None, result: StepResult) -> SequenceUpdate:
        progress = self._progress[request_id]
        update = SequenceUpdate(
            request_id,
            tokens,
            end.reason if end else None,
            end.detail if end else None,
            result.logprobs.get(request_id),
            None,
            progress.num_cached_tokens,
            progress.first_scheduled,
        )
        if not progress.answered:
            update.prompt_logprobs = progress.prompt_logprobs if tokens else None
            progress.prompt_logprobs = None
            progress.answered = True
        if progress.held:
            update.token_ids = progress.held + tokens
            if progress.held_logprobs:
                update.logprobs = progress.held_logprobs + (update.logprobs or [])
        if end:
            del self._progress[request_id]
            self._grammars.pop(request_id, None)
        return update

    def stats(self) -> EngineStats:
        """Describe the present moment, between steps."""
        scheduler, waiting, budget = self.scheduler, self.scheduler.waiting_decision, self.scheduler.budget
        background = sum(request.background for held in self._unprepared.values() for request in held)
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + self.num_unprepared - background,
            waiting_reason=waiting.reason.value if waiting else None,
            kv_blocks_used=scheduler.pool.num_used,
            kv_blocks_total=scheduler.pool.num_blocks,
            prefix_queried_tokens=scheduler.prefixes.queried_tokens,
            prefix_hit_tokens=scheduler.prefixes.hit_tokens,
            preemptions=scheduler.num_preemptions,
            steps=scheduler.num_steps,
            cost=CostStats.of(budget) if self._has_target and isinstance(budget, LatencyBudget) else None,
            background_running=scheduler.num_background_running,
            background_waiting=scheduler.num_background_waiting + background,
            coefficients=scheduler.coefficients,
            kv_blocks_cached=scheduler.pool.num_cached,
            all_weights=self._all_weights(),
            added=self._num_added,
        )

    def _all_weights(self) -> Coefficients | None:
        """What steps cost that read all experts, where there are any, once it is known."""
        known = self.info.experts is not None and self.scheduler.coefficients is not None
        return self.scheduler.meter.model.of_all_weights() if known else None


def _nothing() -> None:
    pass


def _failure(step: Step, message: str) -> StepResult:
    """The result of a step that failed as a whole."""
    return StepResult({}, errors=dict.fromkeys(step.num_tokens, message))
