"""A language model's worker, as its service sees it."""

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Protocol

from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.overload import Foreseen, LoadShedder
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.standing import Standing
from chairlift.engine.sequences.client import Stream
from chairlift.engine.sequences.messages import EngineStats
from chairlift.runners.sequences import SequenceInfo


class SequenceClientView(Protocol):
    """The part of SequenceClient that the routes use."""

    # With which it was loaded, and what holds now.
    configured: SequenceConfig
    config: SequenceConfig
    info: SequenceInfo | None
    stats: EngineStats
    shedder: LoadShedder
    on_step: Callable[[EngineStats], None] | None

    @property
    def restarts(self) -> int:
        """How many workers have died and been replaced."""

    @property
    def failure(self) -> str | None:
        """Why the model can't be loaded, if it can't."""

    @property
    def state(self) -> str:
        """One of loading, ready, restarting, draining, failed."""

    @property
    def ready(self) -> bool:
        """Whether a request would be taken in now."""

    def check_load(self, priority: int) -> None:
        """Raise QueueFull if a live request would be too late, however short it is."""

    def submit(self, *requests: Request, group: Hashable = None, timeout: float | None = None) -> list[Stream]:
        """Queue requests, all or none."""

    async def explain(self, request_ids: Collection[str]) -> Mapping[str, Standing]:
        """Say where those of these requests are of which that is known."""

    def foresee(self, request_ids: Collection[str]) -> dict[str, Foreseen]:
        """Say when they are expected to begin and end, as far as anything is known."""

    def retune(self, config: SequenceConfig) -> None:
        """Go by the settings of another configuration, as far as they may change while the model runs."""
