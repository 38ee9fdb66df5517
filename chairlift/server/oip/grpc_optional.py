"""The gRPC server beside the HTTP server, if one is asked for."""

import contextlib
from collections.abc import AsyncIterator

from chairlift.config.server import ServerConfig
from chairlift.errors import ConfigError
from chairlift.server.http.buffered import Buffered
from chairlift.server.http.tenants import Keys
from chairlift.server.http.tls import Tls
from chairlift.server.models.registry import Models


@contextlib.asynccontextmanager
async def grpc_beside(
    models: Models, config: ServerConfig, keys: Keys, tls: Tls | None, buffered: Buffered
) -> AsyncIterator[int | None]:
    """Serve gRPC on `grpc_port` for as long as the block runs; gives the port. Raises ConfigError."""
    if config.grpc_port is None:
        yield None
        return
    try:
        from chairlift.server.oip.grpc_server import make_grpc_server
    except ImportError as error:
        needed = "grpc_port needs the packages of an extra: pip install 'chairlift[grpc]'"
        raise ConfigError(f"{needed} ({error})") from None
    server, port = make_grpc_server(models, config, config.grpc_port, keys, tls, buffered)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)
