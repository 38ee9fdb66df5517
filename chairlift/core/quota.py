"""How much one client may ask for: requests and tokens a minute, and requests at once."""

from typing import NamedTuple

import msgspec

# What a client that has too many requests under way is told: when one of them ends is anybody's guess.
_ONE_ENDS_S = 1.0
# Rounding must not send whoever waited exactly long enough away again.
_ROUNDING = 1e-6


class Allowance(msgspec.Struct, kw_only=True, frozen=True):
    """Limits by name; None is no limit. `requests_at_once` counts those that run and those that wait.

    A request of several sequences counts once for each of them.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    requests_at_once: int | None = None


class Exceeded(NamedTuple):
    """The limit that a request would exceed, and in how many seconds it is worth another try."""

    limit: str
    allowed: int
    retry_after: float


class TokenBucket:
    """What may be spent: refilled evenly, up to a minute's worth. It can be overdrawn by what is only known later."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def wait(self, amount: float, now: float) -> float:
        """Seconds until the bucket holds this amount, or is full if the amount is larger; 0 if it does now."""
        self._refill(now)
        missing = min(amount, self._per_minute) - self._level
        return 0.0 if missing <= _ROUNDING else missing * 60 / self._per_minute

    def take(self, amount: float, now: float) -> None:
        """Spend it, whether it is there or not."""
        self._refill(now)
        self._level -= amount

    def level(self, now: float) -> float:
        """What it holds; below zero where it is overdrawn."""
        self._refill(now)
        return self._level

    def resize(self, per_minute: int, now: float) -> None:
        """Refill it faster or slower from now on. What was spent stays spent."""
        self._refill(now)
        self._level += per_minute - self._per_minute
        self._per_minute = per_minute

    def _refill(self, now: float) -> None:
        elapsed = max(now - self._at, 0.0)
        self._level = min(self._level + elapsed * self._per_minute / 60, self._per_minute)
        self._at = max(now, self._at)


class Quota:
    """One client's account. Times are in seconds on the caller's clock."""

    def __init__(self, allowance: Allowance, now: float) -> None:
        self.at_once = 0
        self._allowance = Allowance()
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.change(allowance, now)

    def change(self, allowance: Allowance, now: float) -> None:
        """Other limits from now on."""
        self._requests = _resized(self._requests, allowance.requests_per_minute, now)
        self._tokens = _resized(self._tokens, allowance.tokens_per_minute, now)
        self._allowance = allowance

    def begin(self, now: float) -> Exceeded | None:
        """Count a request in, until `end`; or say which limit is in its way, and count nothing."""
        if (exceeded := self.check_at_once(1)) is not None:
            return exceeded
        if self._requests is not None and (wait := self._requests.wait(1, now)):
            return Exceeded("requests_per_minute", self._allowance.requests_per_minute or 0, wait)
        # Whoever has overdrawn need not send a whole prompt to hear of it.
        if (exceeded := self.check_tokens(1, now)) is not None:
            return exceeded
        self.at_once += 1
        if self._requests is not None:
            self._requests.take(1, now)
        return None

    def check_at_once(self, number: int) -> Exceeded | None:
        """Whether so many more may be under way. Nothing is counted."""
        at_once = self._allowance.requests_at_once
        if at_once is None or self.at_once + number <= at_once:
            return None
        return Exceeded("requests_at_once", at_once, _ONE_ENDS_S)

    def add(self) -> None:
        """Count one more that is under way, until `end`, whether there is room or not."""
        self.at_once += 1

    def end(self) -> None:
        """One that began, or was added, is over."""
        self.at_once -= 1

    def check_tokens(self, number: int, now: float) -> Exceeded | None:
        """Whether so many tokens may be spent now. Nothing is spent.

        A request for more than a minute's worth has to wait for a full minute's worth, and overdraws.
        """
        if self._tokens is None or not (wait := self._tokens.wait(number, now)):
            return None
        return Exceeded("tokens_per_minute", self._allowance.tokens_per_minute or 0, wait)

    def left(self, now: float) -> dict[str, tuple[float, int]]:
        """What there is left of each limit, and the limit; rates below zero are overdrawn."""
        limits, found = self._allowance, {}
        if limits.requests_per_minute is not None and self._requests is not None:
            found["requests_per_minute"] = round(self._requests.level(now), 1), limits.requests_per_minute
        if limits.tokens_per_minute is not None and self._tokens is not None:
            found["tokens_per_minute"] = round(self._tokens.level(now), 1), limits.tokens_per_minute
        if limits.requests_at_once is not None:
            found["requests_at_once"] = float(limits.requests_at_once - self.at_once), limits.requests_at_once
        return found

    def spend(self, number: int, now: float) -> None:
        """Charge tokens, whether they are there or not."""
        if self._tokens is not None:
            self._tokens.take(number, now)


def _resized(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket
