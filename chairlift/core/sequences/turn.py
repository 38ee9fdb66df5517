"""When a worker whose machine is shared may run a step: once it has the turn, which it gives back after a step."""

from collections.abc import Callable


class Turn:
    """Whether a worker may run a step now. It asks when it has work, and gives way after a step if others wait.

    `ask` wants the next turn, for background requests only or not. `release` ends one: whether another is wanted, how
    many seconds were used, and whether that other is for background requests only. A worker whose machine is not
    `shared` has the turn for ever.
    """

    def __init__(
        self, ask: Callable[[bool], None], release: Callable[[bool, float, bool], None], shared: bool = True
    ) -> None:
        self.holds = not shared
        # Somebody waits with live requests, to whom background ones give way at once.
        self.live_waits = False
        self._ask = ask
        self._release = release
        self._shared = shared
        self._asked: bool | None = None  # for background requests only, or not
        self._others_wait = False
        self._seconds = 0.0

    def want(self, background: bool) -> bool:
        """Return whether a step may run, maybe for `background` requests only; if not, ask for a turn.

        Those give way at once to whoever waits with live ones.
        """
        if self.holds and background and self.live_waits:
            self._over(background)
        if not self.holds and (self._asked is None or (self._asked and not background)):
            self._asked = background
            self._ask(background)
        return self.holds

    def given(self) -> None:
        """Hear that the turn is this worker's."""
        self.holds, self._asked, self._others_wait, self.live_waits = True, None, False, False
        self._seconds = 0.0

    def others_wait(self, live: bool) -> None:
        """Hear that somebody else asked for it."""
        self._others_wait, self.live_waits = True, live

    def after_step(self, seconds: float, background: bool) -> None:
        """Give way if others wait, after a step that took so long; what is left may be for the `background` only."""
        self._seconds += seconds
        if self._others_wait:
            self._over(background)

    def nothing_to_do(self, background: bool) -> None:
        """Give the turn back; with `background` requests left, which had to yield, ask for another."""
        if self.holds and self._shared:
            self._over(True if background else None)

    def _over(self, again: bool | None) -> None:
        self.holds, self._asked, self._others_wait, self.live_waits = False, again, False, False
        self._release(again is not None, self._seconds, bool(again))
