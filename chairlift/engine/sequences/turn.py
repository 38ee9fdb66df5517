"""A worker's side of sharing the machine with other models' workers."""

from collections.abc import Callable

from chairlift.engine.sequences.messages import TurnOver, TurnWanted


class Turn:
    """Whether this worker may run a step now. It asks when it has work, and gives way after a step if others wait.

    A worker that does not share the machine has the turn for ever.
    """

    def __init__(self, send: Callable[[TurnWanted | TurnOver], None], shared: bool) -> None:
        self.holds = not shared
        self._send = send
        self._shared = shared
        self._asked: TurnWanted | None = None
        self._others_wait = False
        self.live_waits = False
        self._seconds = 0.0

    def want(self, background: bool) -> bool:
        """Return whether a step may run, maybe for `background` requests only; if not, ask for a turn.

        Those give way at once to whoever waits with live ones.
        """
        if self.holds and background and self.live_waits:
            self._over(TurnWanted(background))
        if not self.holds and (self._asked is None or (self._asked.background and not background)):
            self._asked = TurnWanted(background)
            self._send(self._asked)
        return self.holds

    def given(self) -> None:
        """The front gave the turn."""
        self.holds, self._asked, self._others_wait, self.live_waits = True, None, False, False
        self._seconds = 0.0

    def others_wait(self, live: bool) -> None:
        """Somebody else asked for it."""
        self._others_wait, self.live_waits = True, live

    def after_step(self, seconds: float, background: bool) -> None:
        """Give way if others wait, after a step that took so long; what is left may be for the `background` only."""
        self._seconds += seconds
        if self._others_wait:
            self._over(TurnWanted(background))

    def nothing_to_do(self, background: bool) -> None:
        """Give the turn back; with `background` requests left, which had to yield, ask for another."""
        if self.holds and self._shared:
            self._over(TurnWanted(background) if background else None)

    def _over(self, again: TurnWanted | None) -> None:
        self.holds, self._asked, self._others_wait, self.live_waits = False, again, False, False
        self._send(TurnOver(again is not None, self._seconds, again is not None and again.background))
