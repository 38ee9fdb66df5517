"""The server's key, if it has one."""

import hmac

from starlette.types import Scope

_OPEN = ("/health", "/metrics", "/v2/health/")


class Key:
    """Tells who may come in. Health and metrics stay open, as probes and scrapers expect."""

    def __init__(self, key: str | None) -> None:
        self._expected = None if key is None else f"Bearer {key}".encode()

    def opens(self, scope: Scope) -> bool:
        """Compare the Authorization header of a request."""
        if self._expected is None or scope["path"].startswith(_OPEN):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)
