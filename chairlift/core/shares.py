"""Who has the machine: models that share it take turns, each getting time in proportion to its weight."""

from collections.abc import Mapping
from itertools import count


class _Claim:
    """One model's account, in seconds of machine time divided by its weight."""

    __slots__ = ("background", "since", "used", "wants", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.used = 0.0
        self.wants: int | None = None  # the serial number of its wish
        self.background = False  # what the wish is for
        self.since = 0.0


class Shares:
    """Hands the machine to one model at a time, for one step or batch; the others wait for it to come back.

    Start-time fair queueing (Goyal, Vin and Cheng 1996): the turn goes to whoever has used the least, in seconds by
    weight. While all are busy, two models' times differ from the weights' proportion by one turn of each at most,
    however long it lasts and whatever turns cost. Time is never saved up: who comes back from a pause starts where
    the others are. Alone, a model has the whole machine, and keeps its turn until somebody else asks.

    Whoever has nothing but background work gets a turn only while nobody wants one for live work.

    Times are in seconds on the caller's clock. All methods raise KeyError for a model that is not here.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.holder: str | None = None
        self._claims: dict[str, _Claim] = {}
        self._serial = count()
        self._floor = 0.0
        for name, weight in (weights or {}).items():
            self.join(name, weight)

    def join(self, name: str, weight: float) -> None:
        """Let a model take part, or change its weight. Raises ValueError unless the weight is positive and finite."""
        if not 0 < weight < float("inf"):
            raise ValueError(f"the weight of {name} must be positive, got {weight}")
        if name in self._claims:
            self._claims[name].weight = weight
        else:
            self._claims[name] = _Claim(weight)

    def leave(self, name: str, now: float) -> None:
        """Forget a model; if it had the turn, the turn is free."""
        if self.holder == name:
            self.release(name, now)
        del self._claims[name]

    @property
    def contended(self) -> bool:
        """Whether somebody waits for the turn."""
        return any(claim.wants is not None for claim in self._claims.values())

    @property
    def contended_by_live(self) -> bool:
        """Whether somebody waits for the turn with live work."""
        return any(claim.wants is not None and not claim.background for claim in self._claims.values())

    def ask(self, name: str, now: float, background: bool = False) -> None:
        """Want the next turn. Asking again, but for live work instead, or while holding it, does nothing."""
        claim = self._claims[name]
        if claim.wants is None and self.holder != name:
            claim.used = max(claim.used, self._virtual_time(now))
            claim.wants = next(self._serial)
            claim.background = background
        claim.background &= background

    def grant(self, now: float) -> str | None:
        """Give the turn to whoever is owed the most; None if it is taken, or if nobody wants it."""
        if self.holder is not None:
            return None
        waiting = [
            (claim.background, claim.used, claim.wants, name)
            for name, claim in self._claims.items()
            if claim.wants is not None
        ]
        if not waiting:
            return None
        *_, self.holder = min(waiting)
        claim = self._claims[self.holder]
        claim.wants, claim.since = None, now
        return self.holder

    def release(self, name: str, now: float, seconds: float | None = None) -> None:
        """Give the turn back. What is charged is its length, or the `seconds` that were really used.

        Raises ValueError if the model does not have it.
        """
        if self.holder != name:
            raise ValueError(f"{name} does not have the turn")
        claim = self._claims[name]
        charged = self._charged(name, now)
        claim.used = charged if seconds is None else min(charged, claim.used + seconds / claim.weight)
        self._floor = claim.used
        self.holder = None

    def _virtual_time(self, now: float) -> float:
        """Where those stand who were never idle: the least served, the holder's turn so far included."""
        active = [claim.used for claim in self._claims.values() if claim.wants is not None]
        # Between two turns, whoever had the last one may be about to ask again.
        active.append(self._floor if self.holder is None else self._charged(self.holder, now))
        return min(active)

    def _charged(self, name: str, now: float) -> float:
        claim = self._claims[name]
        return claim.used + max(now - claim.since, 0.0) / claim.weight
