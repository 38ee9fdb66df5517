"""Every setting of the HTTP front, with its default, in one place."""

import re
from ipaddress import ip_address
from typing import Literal

import msgspec

from chairlift.core.sequences.sampling_params import MAX_STOP_CHARS, MAX_STOP_CHARS_TOTAL, MAX_STOP_STRINGS
from chairlift.errors import ConfigError

_AT_LEAST_ONE = (
    "max_waiting",
    "max_body_bytes",
    "max_tensor_bytes",
    "max_tensor_json_bytes",
    "max_n",
    "max_prompts_per_request",
    "keep_alive_s",
    "max_file_bytes",
    "max_files_bytes",
    "max_batch_lines",
    "max_batches",
    "max_running_batches",
    "max_buffered_bytes",
    "max_connections",
    "max_uploads",
    "max_stored_bytes",
    "max_background_responses",
    "max_record_bytes",
)
_POSITIVE = ("body_timeout_s", "write_timeout_s", "request_timeout_s", "background_timeout_s", "tune_every_s")
_NOT_NEGATIVE = ("min_body_rate", "drain_timeout_s", "max_stored_responses")
# An empty one, of a variable that is not set, say, would open what was to be closed: all addresses, to all clients.
CLOSING = ("api_key", "api_keys", "tls_cert", "tls_key", "tls_ca")
_NOT_EMPTY = ("host", "record", *CLOSING)
# What stop strings cost is bounded for every request, so a server can only take fewer.
_STOP_LIMITS = {
    "max_stop_strings": MAX_STOP_STRINGS,
    "max_stop_chars": MAX_STOP_CHARS,
    "max_stop_chars_total": MAX_STOP_CHARS_TOTAL,
}
# A scheme and a host, perhaps a port, and no path: as browsers send it.
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]+")
# A scheme and a host, perhaps a port and a path.
_COLLECTOR = re.compile(r"https?://[^/?#\s@]+(/[^?#\s]*)?")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class ServerConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP front. Each is also a CLI flag, a CHAIRLIFT_ variable and a key of chairlift.toml.

    The default host is the machine itself, since by default nobody is asked for a key; open it with `host="0.0.0.0"`.
    Raises ConfigError naming the setting.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    api_key: str | None = None
    api_keys: str | None = None
    model_control: bool = False
    model_aliases: dict[str, str] = {}
    shared_memory: bool = False
    show_cached_tokens: bool = True
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_waiting: int = 1024
    max_body_bytes: int = 4 * 2**20
    max_tensor_bytes: int = 64 * 2**20
    max_tensor_json_bytes: int = 16 * 2**20
    max_n: int = 64
    max_prompts_per_request: int = 256
    max_stop_strings: int = MAX_STOP_STRINGS
    max_stop_chars: int = MAX_STOP_CHARS
    max_stop_chars_total: int = MAX_STOP_CHARS_TOTAL
    max_buffered_bytes: int = 256 * 2**20
    max_connections: int = 2048
    max_uploads: int = 8
    body_timeout_s: float = 30.0
    min_body_rate: int = 1024
    write_timeout_s: float = 60.0
    request_timeout_s: float = 3600.0
    keep_alive_s: int = 75
    drain_timeout_s: float = 30.0
    data_dir: str = "chairlift-data"
    record: str | None = None
    max_record_bytes: int = 2**30
    otlp_endpoint: str | None = None
    tune_every_s: float = 60.0
    tune_cpu_share: float = 0.005
    max_file_bytes: int = 200 * 2**20
    max_files_bytes: int = 10 * 2**30
    max_batch_lines: int = 50_000
    max_batches: int = 100
    max_running_batches: int = 4
    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 * 2**20
    max_background_responses: int = 64
    background_timeout_s: float = 86_400.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        """Refuse values that no server could work with, by name."""
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, most in _STOP_LIMITS.items():
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be between 1 and {most}, got {getattr(self, name)}")
        for name in ("port", "grpc_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise ConfigError(f"{name} must be between 0 (any free one) and 65535, got {value}")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 < self.tune_cpu_share <= 1:
            raise ConfigError(f"tune_cpu_share must be more than 0 and at most 1, got {self.tune_cpu_share}")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in _NOT_EMPTY:
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty; leave it out for the default")
        if self.api_key is not None and self.api_key != self.api_key.strip():
            raise ConfigError("api_key has white space around it, perhaps a line's end, which no client can send")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together: a certificate's file, and that of its key")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_ca asks clients for certificates, and needs a tls_cert and tls_key of the server")
        if self.otlp_endpoint is not None and not _COLLECTOR.fullmatch(self.otlp_endpoint):
            raise ConfigError(
                "otlp_endpoint must be like 'http://collector:4318'; credentials go to OTEL_EXPORTER_OTLP_HEADERS"
            )
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"allowed_origins must be like 'https://app.example.com', or '*', got {origin!r}")
        for host in self.allowed_hosts:
            if host != "*" and not _is_host(host):
                raise ConfigError(f"allowed_hosts must be names or addresses without a port, or '*', got {host!r}")


def _is_host(text: str) -> bool:
    try:
        return bool(_NAME.fullmatch(text) or ip_address(text))
    except ValueError:
        return False
