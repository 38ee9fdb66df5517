"""A worker's side of sharing the machine with other models' workers."""

from collections.abc import Callable

from chairlift.engine.messages import TurnOver, TurnWanted


class Turn:
    """Whether this worker may run a step now. It asks when it has work, and gives way after a step if others wait.

    A worker that does not share the machine has the turn for ever.
    """

    def __init__(self, send: Callable[[TurnWanted | TurnOver], None], shared: bool) -> None:
        self.holds = not shared
        self._send = send
        self._shared = shared
        self._asked = False
        self._others_wait = False
        self._seconds = 0.0

    def want(self) -> bool:
        """Return whether a step may run; if not, ask for a turn."""
        if not self.holds and not self._asked:
            self._asked = True
            self._send(TurnWanted())
        return self.holds

    def given(self) -> None:
        """The front gave the turn."""
        self.holds, self._asked, self._others_wait = True, False, False
        self._seconds = 0.0

    def others_wait(self) -> None:
        """Somebody else asked for it."""
        self._others_wait = True

    def after_step(self, seconds: float) -> None:
        """Give way if others wait, after a step that took so long."""
        self._seconds += seconds
        if self._others_wait:
            self._over(again=True)

    def nothing_to_do(self) -> None:
        """Give the turn back."""
        if self.holds and self._shared:
            self._over(again=False)

    def _over(self, again: bool) -> None:
        self.holds, self._asked, self._others_wait = False, again, False
        self._send(TurnOver(again, self._seconds))
