"""Whether a simulation that still goes on can keep its targets."""

from collections.abc import Sequence
from math import ceil, inf

from chairlift.plan.simulated_run import SimulatedRequest, SimulatedRun
from chairlift.plan.targets import LatencyTargets
from chairlift.plan.trace import TraceRequest


class Judge:
    """Counts who has missed a target, until that are more than the percentile lets miss it whatever else comes.

    It never says so of a run that would keep its targets to the end.
    """

    def __init__(self, targets: LatencyTargets, trace: Sequence[TraceRequest]) -> None:
        self.missed = False
        self._targets = targets
        live = [request for request in trace if not request.background]
        streamed = sum(request.output_length > 1 for request in live)
        self._may_miss = {"ttft": self._spare(len(live)), "itl": self._spare(streamed), "e2e": self._spare(len(live))}
        # Requests that have not ended, as far as the run had come when it was looked at last.
        self._open: list[SimulatedRequest] = []
        self._seen = 0
        self._late = dict.fromkeys(self._may_miss, 0)

    def _spare(self, samples: int) -> int:
        return samples - ceil(samples * self._targets.percentile / 100)

    def has_missed(self, run: SimulatedRun, now: float) -> bool:
        """Look at what is new in a run, at its time `now`; return whether it has missed a target for certain."""
        lives = [*self._open, *run.requests[self._seen :]]
        self._seen = len(run.requests)
        self._open = []
        late = dict(self._late)
        for life in lives:
            if life.request.background:
                continue
            ended = life.end is not None or life.shed_at is not None or life.refusal is not None
            slow = {"ttft": self._waited(life, life.first, now), "e2e": self._waited(life, life.end, now)}
            if life.end is not None and self._targets.itl < inf:
                slow["itl"] = run.felt_itl(life, self._targets.percentile)
            for name, waited in slow.items():
                late[name] += self._is_late(name, waited)
            if not ended:
                self._open.append(life)
                continue
            for name, waited in slow.items():
                self._late[name] += self._is_late(name, waited)
        self.missed = any(late[name] > spare for name, spare in self._may_miss.items())
        return self.missed

    def _is_late(self, name: str, waited: float) -> bool:
        """Whoever gets no answer misses whatever there is to keep."""
        return waited > getattr(self._targets, name) or (waited == inf and self._targets.any)

    @staticmethod
    def _waited(life: SimulatedRequest, since: float | None, now: float) -> float:
        if since is not None:
            return since - life.request.arrival
        # Whoever gets no answer waits for ever.
        return inf if life.shed_at is not None or life.refusal is not None else now - life.request.arrival
