"""Models that come and go while the server runs."""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from chairlift.config.items import ItemConfig
from chairlift.config.settings import ServedModel, Settings
from chairlift.errors import ConfigError, InvalidRequest, RequestFailed, Unavailable, UnsupportedModel
from chairlift.server.models.host import Host

if TYPE_CHECKING:
    from chairlift.server.models.registry import ModelService as Service
    from chairlift.server.models.request_spans import RequestSpans
    from chairlift.server.models.trace_recorder import TraceRecorder

# Who looked a model up a moment before it went may still be tokenizing for it.
_GRACE_SECONDS = 1.0


class HostLoader:
    """Loads and unloads the models that the settings name. `host` makes one that has not been started.

    What comes to them is recorded by the `recorder`, and what ends has its span among `spans`, if there are any.
    """

    def __init__(
        self,
        settings: Settings,
        host: Callable[[ServedModel], Host],
        recorder: "TraceRecorder | None" = None,
        spans: "RequestSpans | None" = None,
    ) -> None:
        self.hosts: list[Host] = []
        self._models, self._config = settings.models, settings.server
        self._host = host
        self._recorder, self._spans = recorder, spans
        self._by_service: dict[Service, Host] = {}

    def begin(self) -> list[Host]:
        """Make a host for each model in the settings; none is started."""
        return [self._make(served) for served in self._models]

    def prepare(self, host: Host) -> "Service":
        """Make the service of a host that has been started, and remember whose it is."""
        return self._adopt(host, host.prepare())

    def _adopt(self, host: Host, service: "Service") -> "Service":
        service.spans = self._spans
        if self._recorder is not None:
            service.recorders.append(self._recorder)
        self._by_service[service] = host
        return service

    def available(self) -> list[str]:
        """The names in the settings, each once."""
        return list(dict.fromkeys(served.name for served in self._models))

    def problem(self) -> str | None:
        """What keeps this process from minding or hearing a model's worker, and which model; None: nothing."""
        return next((f"{host.served.name}: {host.problem}" for host in self.hosts if host.problem), None)

    async def load(self, name: str, changes: Mapping[str, Any]) -> "list[Service]":
        """Start all versions of a model anew and wait for them. Raises RequestFailed if one can't be loaded.

        The `changes` go before its settings. Raises InvalidRequest for what can't be changed so.
        """
        wanted = [_changed(served, changes) for served in self._models if served.name == name]
        hosts: list[Host] = []
        try:
            for served in wanted:
                hosts.append(self._make(served))
            for host in hosts:
                await host.start()
            # Remembered here, not in the thread, which goes on where the load is cancelled.
            services = [self._adopt(host, await asyncio.to_thread(host.prepare)) for host in hosts]
            await asyncio.gather(*(host.wait_ready() for host in hosts))
        except BaseException as error:
            for host in hosts:
                self._forget(host)
            await asyncio.gather(*(host.stop() for host in hosts))
            if isinstance(error, Unavailable | ConfigError | UnsupportedModel):
                raise RequestFailed(f"`{name}` can't be loaded: {error}") from None
            raise
        return services

    async def unload(self, service: "Service") -> None:
        """Let the model finish what it has, then end its workers."""
        host = self._by_service[service]
        await asyncio.sleep(_GRACE_SECONDS)
        await host.drain(self._config.drain_timeout_s)
        await host.stop()
        self._forget(host)

    def _make(self, served: ServedModel) -> Host:
        host = self._host(served)
        self.hosts.append(host)
        return host

    def _forget(self, host: Host) -> None:
        self.hosts.remove(host)
        self._by_service = {service: each for service, each in self._by_service.items() if each is not host}


def _changed(served: ServedModel, changes: Mapping[str, Any]) -> ServedModel:
    """A model with some of its settings changed. Raises InvalidRequest."""
    if not changes:
        return served
    if not isinstance(served.config, ItemConfig):
        raise InvalidRequest(f"`{served.name}` is a language model: {', '.join(changes)} can't be changed as it loads")
    try:
        return served._replace(config=msgspec.structs.replace(served.config, **changes))
    except ConfigError as error:
        raise InvalidRequest(f"`{served.name}` can't be loaded so: {error}") from None
