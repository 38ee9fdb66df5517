"""When a model whose batches leave from the front may send one off, where models share the machine."""

from collections.abc import Callable


class Turns:
    """Whether a batch may leave now; all instances of a model share its turn.

    `ask` wants the next turn, for background items only or not. `release` ends one: whether another is wanted, and
    whether that is for background items only.
    """

    def __init__(self, ask: Callable[[bool], None], release: Callable[[bool, bool], None]) -> None:
        self._ask = ask
        self._release = release
        self._holds = self._others_wait = False

    def allow(self, num_running: int, num_waiting: int, num_background: int) -> bool:
        """Return whether a batch may leave now, with so many running and items waiting; if not, ask for a turn."""
        waits, background = num_waiting + num_background > 0, not num_waiting
        if self._holds:
            if not self._others_wait:
                return True
            if not num_running:
                self._over(waits, background)
        elif waits:
            self._ask(background)
        return False

    def rest(self, num_running: int) -> None:
        """No batch leaves now: if none runs either, give the turn back."""
        if not num_running and self._holds:
            self._over(False, False)

    def given(self) -> None:
        """Hear that the turn is this model's."""
        self._holds, self._others_wait = True, False

    def others_wait(self, live: bool) -> None:
        """Hear that somebody else asked for it."""
        self._others_wait = True

    def left(self) -> None:
        """Hear that the model takes part no more, so that it has no turn."""
        self._holds = False

    def _over(self, again: bool, background: bool) -> None:
        self._holds = False
        self._release(again, background)
