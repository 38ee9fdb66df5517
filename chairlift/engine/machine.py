"""The models that share this machine, taking turns on the front's event loop."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from chairlift.core.shares import Shares


class _Model(NamedTuple):
    on_turn: Callable[[], None]
    on_asked: Callable[[], None]


class Machine:
    """Carries out what `Shares` decides. A model calls back when a turn is given, and when others wait for it.

    One step of a model uses all cores, so two at a time would only stand in each other's way. All methods belong to
    one event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.shares = Shares()
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._granting = False

    def join(self, name: str, weight: float, on_turn: Callable[[], None], on_asked: Callable[[], None]) -> None:
        """Let a model take part.

        `on_turn` says that the machine is its own until `release`; `on_asked` that somebody waits for it, so that it
        should be released after the present step. Raises ValueError for a weight that is not positive.
        """
        self.shares.join(name, weight)
        self._models[name] = _Model(on_turn, on_asked)

    def leave(self, name: str) -> None:
        """Forget a model, whether it has the turn or not: its worker is gone."""
        if name in self._models:
            del self._models[name]
            self.shares.leave(name, self._clock())
            self._grant_soon()

    def ask(self, name: str) -> None:
        """Want the next turn."""
        self.shares.ask(name, self._clock())
        holder = self.shares.holder
        if holder is None:
            self._grant_soon()
        elif holder != name:
            self._models[holder].on_asked()

    def withdraw(self, name: str) -> None:
        """Want no turn any more."""
        self.shares.withdraw(name)

    def release(self, name: str, again: bool) -> None:
        """End the turn; `again` asks for another in the same breath."""
        now = self._clock()
        self.shares.release(name, now)
        if again:
            self.shares.ask(name, now)
        self._grant_soon()

    def _grant_soon(self) -> None:
        """Give the next turn once all that is being said now has been heard."""
        if not self._granting:
            self._granting = True
            asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        self._granting = False
        name = self.shares.grant(self._clock())
        if name is None:
            return
        self._models[name].on_turn()
        if self.shares.contended and self.shares.holder == name:
            self._models[name].on_asked()
