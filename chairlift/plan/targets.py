"""What is promised of a server's latency, or follows from what it has where nothing else runs."""

from math import inf
from typing import NamedTuple

import msgspec

from chairlift.errors import ConfigError
from chairlift.plan.figures import Latencies


class LatencyTargets(msgspec.Struct, kw_only=True, frozen=True):
    """In seconds, what so many percent keep: to the first token, between any two tokens, and to the end.

    Raises ConfigError naming the one that can't be.
    """

    ttft: float = inf
    itl: float = inf
    e2e: float = inf
    percentile: float = 95.0

    def __post_init__(self) -> None:
        """Refuse what nobody can promise."""
        for name in ("ttft", "itl", "e2e"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"the target of {name} must be more than 0, got {getattr(self, name):g}")
        if not 0 < self.percentile < 100:
            raise ConfigError(f"the percentile must be between 0 and 100, got {self.percentile:g}")

    @property
    def any(self) -> bool:
        """Whether there is anything to keep."""
        return min(self.ttft, self.itl, self.e2e) < inf

    def missed(self, found: Latencies) -> tuple[str, ...]:
        """The names of those that are not kept; of "e2e" alone where the others are, but too many are not answered."""
        late = tuple(name for name in ("ttft", "itl", "e2e") if getattr(found, name) > getattr(self, name))
        return late or (("e2e",) if self.any and found.e2e == inf else ())


class _Mode(NamedTuple):
    """How many times as long as without company the first token, and each further one, may take."""

    ttft: float
    itl: float


# For those who give no target.
MODES = {
    "low-latency": _Mode(ttft=2.0, itl=2.0),
    "balanced": _Mode(ttft=5.0, itl=4.0),
    "high-throughput": _Mode(ttft=inf, itl=inf),
}


def has_targets(mode: str) -> bool:
    """Whether a mode promises anything of latency."""
    return min(MODES[mode]) < inf


def targets_of(mode: str, alone: Latencies, percentile: float) -> LatencyTargets:
    """Return the targets of a mode, where requests that have no company see `alone`."""
    if not has_targets(mode):
        return LatencyTargets(percentile=percentile)
    ttft, itl = MODES[mode]
    # Without a second token there is no time between two.
    between = itl * alone.itl if alone.itl else inf
    return LatencyTargets(ttft=ttft * alone.ttft, itl=between, percentile=percentile)
