"""The models of a server as running things: started, waited for, drained and stopped."""

from typing import TYPE_CHECKING, Protocol

from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.config.settings import ServedModel
from chairlift.engine.machine import Machine
from chairlift.engine.supervisor import LOAD_ATTEMPTS
from chairlift.errors import ConfigError, UnsupportedModel
from chairlift.runners.check_model import check_model
from chairlift.server.models.item_host import ItemHost
from chairlift.server.models.sequence_host import SequenceHost

if TYPE_CHECKING:
    from chairlift.server.models.item_service import ItemService
    from chairlift.server.models.sequence_service import SequenceService


class Host(Protocol):
    """One model with its workers, behind a service."""

    served: ServedModel

    async def start(self) -> None:
        """Start loading, and return at once."""
        ...

    def prepare(self) -> "SequenceService | ItemService":
        """Make the service; slow the first time, since it imports and reads files, and so best done in a thread."""
        ...

    async def wait_ready(self) -> None:
        """Return once requests are taken in. Raises Unavailable if the model can't be loaded."""
        ...

    def give_up(self, reason: str) -> None:
        """End the workers and start no others: the model can't be served."""
        ...

    @property
    def about(self) -> str:
        """What was loaded, in a few words."""
        ...

    @property
    def problem(self) -> str | None:
        """What keeps this process from minding or hearing a worker, which only a new one could mend; None: nothing."""
        ...

    @property
    def restarts(self) -> int:
        """How many workers have died and been replaced."""
        ...

    def close_queue(self) -> None:
        """Say that nobody else will come, so that no batch waits to be full."""
        ...

    async def drain(self, timeout: float) -> None:
        """Take no more requests; give those that are here up to `timeout` seconds to end."""
        ...

    async def stop(self) -> None:
        """End the workers; whatever still runs gets Unavailable."""
        ...


def host(served: ServedModel, server: ServerConfig, machine: Machine | None) -> Host:
    """Make a model's host. With a `machine` it takes turns with the others that have one, unless its weight is 0.

    Beside others a model is tried several times, as they go on without it; a server of one is better started anew.
    Raises ConfigError or UnsupportedModel if its folder's config.json asks for what there is not.
    """
    try:
        check_model(served.config)
    except (ConfigError, UnsupportedModel) as error:
        raise type(error)(f"{served.name}: {error}") from None
    load_attempts = 1 if machine is None else LOAD_ATTEMPTS
    if served.share.weight == 0:
        machine = None
    if isinstance(served.config, SequenceConfig):
        return SequenceHost(served, served.config, server, machine, load_attempts)
    return ItemHost(served, served.config, machine, load_attempts)
