"""Background sequences: work without haste, in slots that no live one needs, and that yields at once."""

from collections.abc import Container, Iterable

from chairlift.core.decision import Decision, Reason
from chairlift.core.queue import WaitingQueue
from chairlift.core.sequences.budget import StepBudget
from chairlift.core.sequences.sequence import Sequence
from chairlift.core.sequences.step import Step


class BackgroundSequences:
    """The background sequences of a scheduler, who of them is next, and why some get nothing.

    Those `running` hold a slot and blocks, whoever is next to get tokens first; a step may leave out any of them, who
    then keep both. The others are in `waiting`. `budget`, if there is one, says what they may have of a step.
    """

    def __init__(self, budget: StepBudget | None) -> None:
        self.budget = budget
        self.waiting: WaitingQueue[Sequence] = WaitingQueue()
        self.running: list[Sequence] = []
        self.decision: Decision | None = None

    def youngest(self, behind: Sequence | None = None, without: Container[str] = ()) -> Sequence | None:
        """Return the one that yields first: of all, or of those less urgent than `behind` whose id is not listed."""
        running = self.running
        if behind is not None:
            running = [sequence for sequence in running if sequence.rank > behind.rank and sequence.id not in without]
        return max(running, key=lambda sequence: sequence.rank, default=None)

    def in_turn(self) -> list[Sequence]:
        """Return all that run, those who decode before those with a prompt, and whoever was left out last first."""
        # As `reads_prompt` has it, but for a prompt of which one token is left, which costs what a decode does.
        prompts = [each for each in self.running if len(each.token_ids) - each.num_computed_tokens > 1]
        if not prompts:
            return self.running.copy()
        return [each for each in self.running if len(each.token_ids) - each.num_computed_tokens <= 1] + prompts

    def take_turns(self, served: list[Sequence]) -> None:
        """Put those who got tokens behind those who did not."""
        if len(served) == len(self.running):
            self.running = served
            return
        ids = {sequence.id for sequence in served}
        self.running = [sequence for sequence in self.running if sequence.id not in ids] + served

    def urgent(self, step: Step, live: Iterable[Sequence], waiting: Decision | None) -> str:
        """Say which live sequence waits for its first token, if one does that would not just be waiting for company."""
        if step.started:
            return f"{step.started[0].request.id} has just been admitted"
        if waiting is not None and waiting.reason not in (Reason.WINDOW, Reason.BATCH):
            return f"{waiting.request_id} is {waiting.reason.replace('_', ' ')}"
        reader = next((sequence for sequence in live if sequence.reads_prompt), None)
        return f"the prompt of {reader.id} is being computed" if reader is not None else ""

    def spent(self, left: int, most: int) -> str:
        """Say why a step has no tokens for any more of them, `left` of the `most` that it may have."""
        if left < 1 or self.budget is None:
            return f"the step's {most} tokens are given out"
        return self.budget.explain()

    def leave_out(self, step: Step, reason: Reason, detail: str) -> Decision:
        """Say why those that run and are not in the step, and those who wait, get nothing of it; there must be one."""
        left_out = [sequence for sequence in self.running if sequence.id not in step.num_tokens]
        first = left_out[0] if left_out else self.waiting.head()
        assert first is not None
        return Decision(reason, first.id, detail, len(left_out) + len(self.waiting))

    def explain(self, sequence: Sequence) -> Decision:
        """Say why one of them runs or waits, as of the last step."""
        last = self.decision
        if sequence.block_table and (last is None or last.reason is not Reason.LIVE):
            return Decision(Reason.ADMITTED, sequence.id, f"runs in the background since {sequence.started:.3f} s")
        if last is None:
            return Decision(Reason.TOKENS, sequence.id, "no step was scheduled since it came")
        return Decision(last.reason, sequence.id, last.detail)
