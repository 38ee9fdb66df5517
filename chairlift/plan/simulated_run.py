"""What became of every request of a simulation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil

from chairlift.core.finished import ShedReason
from chairlift.plan.trace import TraceRequest


@dataclass(slots=True)
class SimulatedRequest:
    """A request's moments, in seconds of the virtual clock, as its client sees them; None for what did not happen.

    `scheduled` is when it first ran. It has tokens `first` to `end`: in `spans` are the first and the last of the steps
    that gave it one each, several pairs if it had to pause. One that was `shed` ended without an answer at `shed_at`,
    at its `deadline` in spite of the tokens that it had; `refusal` says why one could never be served. A model of items
    has `read` it, and heard at `computed` of its last item, which is before the answer is written: this is what a
    server itself notes of it.
    """

    request: TraceRequest
    model: str
    replica: int = 0
    read: float | None = None
    deadline: float | None = None
    scheduled: float | None = None
    computed: float | None = None
    first: float | None = None
    end: float | None = None
    shed: ShedReason | None = None
    shed_at: float | None = None
    refusal: str | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    batch_size: int = 0
    num_tokens: int = 0
    spans: list[list[int]] = field(default_factory=list)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token, or to the answer."""
        return None if self.first is None else self.first - self.request.arrival

    @property
    def e2e(self) -> float | None:
        """Seconds to the end."""
        return None if self.end is None else self.end - self.request.arrival

    @property
    def tpot(self) -> float | None:
        """Mean seconds of a token after the first; None if there were fewer than two."""
        if self.end is None or self.first is None or self.num_tokens < 2:
            return None
        return (self.end - self.first) / (self.num_tokens - 1)


@dataclass(slots=True)
class SimulatedSteps:
    """The steps of one replica of a language model, or the calls of one of a model of items: an entry for each.

    `delivered` is when what it gave had reached clients, `seconds` its length. The counts are those that ran and that
    waited, the tokens (or computed size) in it, and the KV blocks held.
    """

    began: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    delivered: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    kv_blocks: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.seconds)

    def note(self, began: float, seconds: float, running: int, waiting: int, tokens: float, kv_blocks: int) -> None:
        """Add a step or a call, all but when it was delivered."""
        self.began.append(began)
        self.seconds.append(seconds)
        self.running.append(running)
        self.waiting.append(waiting)
        self.tokens.append(tokens)
        self.kv_blocks.append(kv_blocks)


@dataclass
class SimulatedRun:
    """All requests, in order of arrival, and the steps or calls of each model by its name and replica."""

    requests: list[SimulatedRequest]
    steps: dict[tuple[str, int], SimulatedSteps]
    front_seconds: float = 0.0

    def token_times(self, request: SimulatedRequest) -> list[float]:
        """Return when each token of a request had reached its client."""
        if not request.spans:
            return []
        delivered = self.steps[request.model, request.replica].delivered
        return [delivered[step] for first, last in request.spans for step in range(first, last + 1)]

    def token_gaps(self, request: SimulatedRequest) -> list[float]:
        """Return the seconds between each two tokens of a request."""
        return [later - sooner for sooner, later in pairwise(self.token_times(request))]

    def felt_itl(self, request: SimulatedRequest, percentile: float) -> float:
        """Return the seconds that so many percent of a request's own gaps are within; 0 if it has none."""
        return within(self.token_gaps(request), percentile)


def within(samples: Sequence[float], percentile: float) -> float:
    """Return the least sample that so many percent are not above; 0 of none."""
    if not samples:
        return 0.0
    return sorted(samples)[max(ceil(len(samples) * percentile / 100), 1) - 1]
