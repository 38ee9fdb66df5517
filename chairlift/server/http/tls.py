"""TLS for both servers, from files that may be replaced while they run: new connections get what is new."""

import ssl
from pathlib import Path
from typing import NamedTuple

from chairlift.config.server import ServerConfig
from chairlift.errors import ConfigError
from chairlift.server.http.reload import Reloaded


class Certificates(NamedTuple):
    """What the files hold: for HTTP as a context, for gRPC as PEM. `authority` signs the certificates of clients."""

    context: ssl.SSLContext
    certificate: bytes
    key: bytes
    authority: bytes | None


class Tls:
    """The server's side of TLS, 1.2 or newer. Raises ConfigError, naming the setting, if the files are no good."""

    def __init__(self, certificate: Path, key: Path, authority: Path | None) -> None:
        paths = [path for path in (certificate, key, authority) if path is not None]
        self._files = Reloaded(paths, lambda: read_certificates(certificate, key, authority))
        # A listening socket keeps its context; each handshake then turns to that of the moment.
        self.context = self._files.value.context
        self.context.sni_callback = self._turn

    @property
    def certificates(self) -> Certificates:
        """Those of the moment."""
        return self._files.value

    async def watch(self) -> None:
        """Follow the files until this is cancelled."""
        await self._files.watch(lambda made: None)

    async def look_again(self) -> None:
        """Read the files, if they have changed."""
        await self._files.look_again()

    def _turn(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self.certificates.context


def make_tls(config: ServerConfig) -> Tls | None:
    """TLS as the settings have it, or None."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Tls(Path(config.tls_cert), Path(config.tls_key), None if config.tls_ca is None else Path(config.tls_ca))


def read_certificates(certificate: Path, key: Path, authority: Path | None) -> Certificates:
    """What the files hold, if it fits together. Raises ConfigError."""
    pems = _read("tls_cert", certificate), _read("tls_key", key)
    trusted = None if authority is None else _read("tls_ca", authority)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=lambda: _refuse_passphrase(key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"tls_key {key} is not the key of tls_cert {certificate}") from None
        raise ConfigError(f"tls_cert {certificate} and tls_key {key} can't be used: {_why(error)}") from None
    if authority is not None:
        try:
            context.load_verify_locations(authority)
        except ssl.SSLError as error:
            raise ConfigError(f"tls_ca {authority} can't be used: {_why(error)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
        # Whoever takes up an earlier session is not asked for a certificate again, however the authority has changed.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return Certificates(context, *pems, trusted)


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting} {path} can't be read: {error.strerror}") from error


def _refuse_passphrase(key: Path) -> str:
    raise ConfigError(f"tls_key {key} has a passphrase, which nobody is here to type: store it without one")


def _why(error: ssl.SSLError) -> str:
    return (error.reason or "it is not PEM").replace("_", " ").lower()
