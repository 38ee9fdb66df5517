"""What a scheduler is. Read this first: everything else is one of the two, or drives one, or computes for it.

    while (step := scheduler.schedule(now)) is not None:
        result = runner.execute(step)
        finished = scheduler.update(step, result, now)

Requests come in with `add`, and each leaves once: in what `update` returns, or by `abort`. In between the scheduler
decides, at the moment when something can run and not before, what runs next. There are two of them:

- `core/sequences/scheduler.py` for models that generate token by token. Its work is a `Request`, its step a forward
  pass over some tokens of many sequences, which come and go between two steps.
- `core/items/scheduler.py` for models that answer in one call. Its work is an `Item`, its step a `Batch`: one call of
  one of several instances, so that several steps may run at once.

A scheduler is pure. It has no clock, no threads, no chance, no input and no output: moments come in as arguments, in
seconds on whatever clock its caller keeps, and the same calls give the same decisions. That is what lets tests drive
it through thousands of random histories. It belongs to one thread.
"""

from typing import Protocol, TypeVar

from chairlift.core.decision import Decision
from chairlift.core.finished import Finished

WorkT = TypeVar("WorkT", contravariant=True)
StepT = TypeVar("StepT")
ResultT = TypeVar("ResultT", contravariant=True)


class Scheduler(Protocol[WorkT, StepT, ResultT]):
    """Decides which work runs next, and gives a reason for each decision.

    Work is live, or it is background work: that waits, runs and is counted apart, and no live work waits for it longer
    than for a step.

    `ask_again` is when `schedule` may answer otherwise although nothing was added, aborted or updated since it returned
    None; it is None if time alone changes nothing. So whoever drives a scheduler sleeps in between, and never polls.
    """

    ask_again: float | None

    def add(self, work: WorkT) -> None:
        """Take work in; it waits. Its `arrival` is the present moment.

        Raises ValueError, saying why, if it could never run or its id is in use, and Shed if it could, but too much is
        here already.
        """
        ...

    def abort(self, work_id: str) -> bool:
        """Forget work, wherever it is: nothing more is heard of it, and what it holds is free. False if it is unknown.

        A step that runs goes on; what it gives for this work is passed over by `update`.
        """
        ...

    def close(self) -> None:
        """Hear that nobody else will come: whoever waits for company leaves without."""
        ...

    def schedule(self, now: float) -> StepT | None:
        """Choose what runs next; None if nothing can before `ask_again`, an `add`, an `abort` or an `update`."""
        ...

    def update(self, step: StepT, result: ResultT, now: float) -> list[Finished]:
        """Take in what a step came to; return whose work is over. What they held is free from here on."""
        ...

    def explain(self, work_id: str) -> Decision | None:
        """Say where work is and why, as of the last `schedule`; None if it is not here."""
        ...

    @property
    def num_waiting(self) -> int:
        """Live work that is here and has no place in what runs."""
        ...

    @property
    def num_running(self) -> int:
        """Live work that runs."""
        ...

    @property
    def num_background_waiting(self) -> int:
        """Background work that is here and has no place in what runs."""
        ...

    @property
    def num_background_running(self) -> int:
        """Background work that runs, or keeps its place until it may go on."""
        ...
