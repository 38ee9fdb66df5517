"""A runner that writes down what every step held, for the table and the picture."""

import time
from dataclasses import dataclass, field

from chairlift.core.sequences.request import Step, StepResult
from chairlift.core.sequences.scheduler import SequenceScheduler
from chairlift.runners.sequences import SequenceInfo, SequenceRunner


@dataclass(slots=True)
class Ride:
    """One request's time in a seat. Times in seconds of the monotonic clock; `steps` counts forward passes."""

    seat: int
    began: float
    ended: float = 0.0
    prefill_ended: float = 0.0
    steps: int = 0


@dataclass(slots=True)
class StepRecord:
    """One forward pass: when, how many sequences, tokens and computed rows, and the KV slots left unused."""

    began: float
    ended: float
    num_seqs: int
    num_tokens: int
    num_rows: int
    unused_slots: int


@dataclass(slots=True)
class Recorder:
    """Passes steps on to `runner` and keeps a record. `scheduler` must be set before the first step."""

    runner: SequenceRunner
    scheduler: SequenceScheduler | None = None
    steps: list[StepRecord] = field(default_factory=list)
    rides: dict[str, Ride] = field(default_factory=dict)
    _aboard: dict[str, int] = field(default_factory=dict)

    def load(self) -> SequenceInfo:
        """Load the runner."""
        return self.runner.load()

    def warm_up(self) -> None:
        """Warm up the runner."""
        self.runner.warm_up()

    def close(self) -> None:
        """Close the runner."""
        self.runner.close()

    def execute(self, step: Step) -> StepResult:
        """Run the step and record it."""
        began = time.monotonic()
        result = self.runner.execute(step)
        ended = time.monotonic()
        self._aboard = {name: seat for name, seat in self._aboard.items() if name in step.num_tokens}
        for name in step.num_tokens:
            ride = self.rides.get(name)
            if ride is None:
                ride = self.rides[name] = Ride(self._free_seat(), began)
            self._aboard[name] = ride.seat
            ride.ended = ended
            ride.steps += 1
            if not ride.prefill_ended and name in result.tokens:
                ride.prefill_ended = ended
        sizes = len(step.num_tokens), step.total_tokens, result.num_rows
        self.steps.append(StepRecord(began, ended, *sizes, self._unused_slots(step)))
        return result

    def _free_seat(self) -> int:
        taken = set(self._aboard.values())
        return next(seat for seat in range(len(taken) + 1) if seat not in taken)

    def _unused_slots(self, step: Step) -> int:
        assert self.scheduler is not None
        size = self.scheduler.block_size
        return sum(
            len(sequence.block_table) * size - sequence.num_computed_tokens - step.num_tokens.get(sequence.id, 0)
            for sequence in self.scheduler.running
        )
