"""BackgroundSequences sequences: work without haste that rides in seats which nobody live needs, and yields at once."""

from collections.abc import Container

from chairlift.core.decision import Decision, Reason
from chairlift.core.sequences.budget import StepBudget
from chairlift.core.sequences.request import Step
from chairlift.core.sequences.sequence import Sequence
from chairlift.core.sequences.waiting import WaitingQueue


class BackgroundSequences:
    """The background sequences of a scheduler, who of them is next, and why some get nothing.

    Those `riding` hold a seat and blocks, whoever is next to get tokens first; a step may leave out any of them, who
    then keep both. The others are in `line`. `budget`, if there is one, says what they may have of a step.
    """

    def __init__(self, budget: StepBudget | None) -> None:
        self.budget = budget
        self.line: WaitingQueue[Sequence] = WaitingQueue()
        self.riding: list[Sequence] = []
        self.decision: Decision | None = None

    def __bool__(self) -> bool:
        return bool(self.riding or self.line)

    def youngest(self, behind: Sequence | None = None, without: Container[str] = ()) -> Sequence | None:
        """Return the rider who yields first: of all, or of those less urgent than `behind` whose id is not listed."""
        riders = self.riding
        if behind is not None:
            riders = [rider for rider in riders if rider.rank > behind.rank and rider.id not in without]
        return max(riders, key=lambda rider: rider.rank, default=None)

    def in_turn(self) -> list[Sequence]:
        """Return all riders, those who decode before those with a prompt, and whoever was left out last first."""
        return sorted(self.riding, key=lambda rider: rider.reads_prompt)

    def take_turns(self, served: list[Sequence]) -> None:
        """Put those who got tokens behind those who did not."""
        ids = {rider.id for rider in served}
        self.riding = [rider for rider in self.riding if rider.id not in ids] + served

    def leave_out(self, step: Step, why: Reason, detail: str) -> Decision:
        """Say why riders who are not in the step, and those who wait, get nothing of it; there must be one."""
        left_out = [rider for rider in self.riding if rider.id not in step.num_tokens]
        first = left_out[0] if left_out else self.line.head()
        assert first is not None
        return Decision(why, first.id, detail, len(left_out) + len(self.line))

    def explain(self, sequence: Sequence) -> Decision:
        """Say why one of them runs or waits, as of the last step."""
        reason = self.decision
        if sequence.block_table and (reason is None or reason.why is not Reason.LIVE):
            return Decision(Reason.BOARDED, sequence.id, f"rides in the background since {sequence.started:.3f} s")
        if reason is None:
            return Decision(Reason.TOKENS, sequence.id, "no step was scheduled since it came")
        return Decision(reason.why, sequence.id, reason.detail)
