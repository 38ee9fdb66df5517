"""The models of a server as running things: started, waited for, drained and stopped."""

from typing import TYPE_CHECKING, Protocol

from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.config.settings import ServedModel
from chairlift.engine.machine import Machine
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

    @property
    def about(self) -> str:
        """What was loaded, in a few words."""
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

    Raises ConfigError or UnsupportedModel if its folder's config.json asks for what there is not.
    """
    try:
        check_model(served.config)
    except (ConfigError, UnsupportedModel) as error:
        raise type(error)(f"{served.name}: {error}") from None
    if served.share.weight == 0:
        machine = None
    if isinstance(served.config, SequenceConfig):
        return SequenceHost(served, served.config, server, machine)
    return ItemHost(served, served.config, machine)
