"""The scheduler of sequences as a model is served with it: budgets, and a cost model that learns from its steps."""

from math import inf

from chairlift.core.cost import Coefficients
from chairlift.core.finished import Finished
from chairlift.core.order import QueueOrder
from chairlift.core.sequences.blocks import BlockPool
from chairlift.core.sequences.budget import LatencyBudget
from chairlift.core.sequences.policy import Policy
from chairlift.core.sequences.request import Step, StepResult
from chairlift.core.sequences.scheduler import SequenceScheduler

# While there is no target for a step's time, the cost model learns from one step in so many, and is told from so many.
_SAMPLED = 4
_LEAST_SAMPLES = 4


class MeteredScheduler:
    """A scheduler and what it learns from: every step that a budget is for, else a few of those under load.

    `target_itl` and `background_step` are the seconds that a step may take, with background requests in it or not;
    without a target there is no `budget`. Pure, as the scheduler is.
    """

    def __init__(
        self,
        policy: Policy,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool,
        order: QueueOrder,
        target_itl: float | None,
        background_step: float,
    ) -> None:
        most = max_num_batched_tokens
        self.budget = None if target_itl is None else LatencyBudget(target_itl, most)
        model = None if self.budget is None else self.budget.model
        background = LatencyBudget(min(background_step, target_itl or inf), most, model)
        self.model = background.model
        self._meter = LatencyBudget(inf, most, self.model)
        self._metered = False
        self.pool = pool
        self.scheduler = SequenceScheduler(
            policy,
            pool,
            block_size=block_size,
            max_num_batched_tokens=most,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            budget=self.budget,
            background_budget=background,
            order=order,
        )

    def schedule(self, now: float, yields: bool = False) -> Step | None:
        """Choose the next step, as `SequenceScheduler.schedule` does."""
        step = self.scheduler.schedule(now, yields)
        self._metered = step is not None and self._is_metered(step)
        if step is not None and self._metered:
            self._meter.end(self.scheduler.running, step)
        return step

    def update(self, step: Step, result: StepResult, now: float) -> list[Finished]:
        """Take in what the last step came to, as `SequenceScheduler.update` does."""
        if self._metered:
            self._meter.observe(result.seconds)
        return self.scheduler.update(step, result, now)

    @property
    def coefficients(self) -> Coefficients | None:
        """What steps cost, once enough of them were timed."""
        return self.model.coefficients if self.model.num_observed >= _LEAST_SAMPLES else None

    @property
    def has_background(self) -> bool:
        """Whether background requests are here."""
        return self.scheduler.num_background_running + self.scheduler.num_background_waiting > 0

    def _is_metered(self, step: Step) -> bool:
        """Whether to learn from a step that nobody learns from: of those under a load at which requests may wait."""
        scheduler = self.scheduler
        if step.id % _SAMPLED or self.budget is not None or self.has_background:
            return False
        return scheduler.num_waiting > 0 or 2 * scheduler.num_running >= scheduler.policy.slots
