"""Who may come in, and what each may do: the key that a request brings leads to a tenant, who has rights and limits."""

import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from starlette.types import Scope

from chairlift.config.keys import RIGHTS, KeyEntry, Right, hash_of, read_keys
from chairlift.config.server import ServerConfig
from chairlift.core.quota import Allowance, Exceeded, Quota
from chairlift.server.http.api_errors import ApiError, try_later
from chairlift.server.http.reload import Reloaded

# A key of an ASGI scope: who sent the request. HTTP servers make scopes of their own, so no client can set it.
TENANT = "chairlift.tenant"
# Paths that begin like these need no key: probes, scrapers and browsers bring none.
OPEN_PATHS = ("/health", "/ping", "/version", "/metrics", "/v2/health/", "/docs", "/openapi.json", "/live/")
# But for this one, where keys have rights.
_METRICS = "/metrics"
_SALT_BYTES = 16
# What a key may ask for that says nothing of priorities. Those below 0 go before everybody who asks for nothing
# special: as each is worth some waiting, the lowest for decades.
_USUAL_PRIORITIES = 0, 2**31 - 1
# Of looks a key may have as many as its limits say, beside what these count, and where that is less, so many: a request
# that is open on the live page is asked for 86 times a minute, and `chairlift top` asks 60 times.
_LOOKS_PER_MINUTE, _LOOKS_AT_ONCE = 600, 16


class Tenant:
    """Whoever has a key: files, batches and cached prefixes belong to a name. All methods belong to the event loop.

    Without a `name` it is whoever runs the server, who may do all; others may do what `change` says. What checks raises
    ApiError.
    """

    def __init__(self, name: str | None, secret: bytes = b"") -> None:
        self.name = name
        self._rights: frozenset[str] = frozenset(RIGHTS if name is None else ())
        self._priorities = None if name is None else _USUAL_PRIORITIES
        self._quota = Quota(Allowance(), time.monotonic())
        self._looks = Quota(Allowance(), time.monotonic())
        self._secret = secret

    def change(self, entry: KeyEntry) -> None:
        """Rights and limits from now on; what was spent stays spent."""
        self._rights = frozenset(entry.rights)
        self._priorities = entry.priorities or _USUAL_PRIORITIES
        self._quota.change(entry.allowance, time.monotonic())
        self._looks.change(_looks_of(entry.allowance), time.monotonic())

    @property
    def sees_all(self) -> bool:
        """Whether what belongs to anybody is there for the tenant."""
        return "admin" in self._rights

    def check_right(self, right: Right | None) -> None:
        """A 403 without the right; None asks for none."""
        if right is not None and right not in self._rights:
            message = f"this key does not have the right {right!r}; whoever runs this server can add it"
            raise ApiError(403, message, code="missing_right", kind="permission_error")

    def enter(self, right: Right | None) -> None:
        """Count a request in, until `leave`; a 403 without the right, a 429 at a limit, and then nothing is counted."""
        self.check_right(right)
        _refuse(self._quota.begin(time.monotonic()))

    def add_sequence(self) -> None:
        """Count one more sequence of a request that entered, until `leave`. `check_size` said that there is room."""
        self._quota.add()

    def leave(self) -> None:
        """A request that entered, or one more of its sequences, is over."""
        self._quota.end()

    @contextlib.contextmanager
    def visit(self, right: Right | None) -> Iterator[None]:
        """Enter, and leave at the end."""
        self.enter(right)
        try:
            yield
        finally:
            self.leave()

    @contextlib.contextmanager
    def look(self, right: Right | None) -> Iterator[None]:
        """As `visit`, for what is not counted: it has limits of its own."""
        self.check_right(right)
        _refuse(self._looks.begin(time.monotonic()), "looks at requests and models have limits of their own: ")
        try:
            yield
        finally:
            self._looks.end()

    def check_size(self, tokens: int, sequences: int) -> None:
        """A 429 if a request may not read so many tokens now, or be so many sequences; a 400 if it never may.

        It has entered, and counts as the first of its sequences.
        """
        if sequences > 1 and (exceeded := self._quota.check_at_once(sequences - 1)) is not None:
            counted = f"this is {sequences} sequences, and each sample (n, best_of) of each prompt counts as a request"
            if sequences > exceeded.allowed:
                most = f"more than the {exceeded.allowed} that this key may have at once (requests_at_once)"
                change = "ask for fewer samples, or send several requests, one after another"
                raise ApiError(400, f"{counted}: {most}; {change}", code=exceeded.limit)
            _refuse(exceeded, f"{counted}: ")
        _refuse(self._quota.check_tokens(tokens, time.monotonic()))

    def spend(self, tokens: int) -> None:
        """Charge tokens that were read or generated."""
        self._quota.spend(tokens, time.monotonic())

    def left(self) -> dict[str, tuple[float, int]]:
        """What the limits leave now, each by its name with the limit."""
        return self._quota.left(time.monotonic())

    def check_priority(self, priority: int) -> int:
        """The priority, or a 403. The default of 0 stands for the number nearest to it that is allowed."""
        if self._priorities is None:
            return priority
        lowest, highest = self._priorities
        if priority == 0:
            return min(max(0, lowest), highest)
        if not lowest <= priority <= highest:
            message = f"this key may ask for priorities from {lowest} to {highest}, not {priority} (priorities)"
            raise ApiError(403, message, "priority", "priority_not_allowed", "permission_error")
        return priority

    def salted(self, salt: str) -> str:
        """The salt of cached prefixes: a client's own, with what no client can guess, so that none meets another's."""
        if self.name is None:
            return salt
        both = f"{self.name}\0{salt}".encode(errors="surrogatepass")
        return hmac.digest(self._secret, both, "sha256")[:_SALT_BYTES].hex()


# Whoever runs the server: requests from within this process, and those that bring its one `api_key`.
OWNER = Tenant(None)


class Keys:
    """All keys of a server: its `api_key`, and those of the file `api_keys`. Raises ConfigError if that is wrong."""

    def __init__(self, config: ServerConfig) -> None:
        self.open_paths = tuple(path for path in OPEN_PATHS if path != _METRICS or config.api_keys is None)
        self.needed = config.api_key is not None or config.api_keys is not None
        self._secret = secrets.token_bytes(32)
        self._owners: dict[str, Tenant] = {} if config.api_key is None else {hash_of(config.api_key): OWNER}
        self._by_hash = self._owners
        self._by_name: dict[str, Tenant] = {}
        self._file: Reloaded[dict[str, KeyEntry]] | None = None
        if config.api_keys is not None:
            path = Path(config.api_keys)
            self._file = Reloaded([path], lambda: read_keys(path))
            self._take(self._file.value)

    async def watch(self) -> None:
        """Follow the file until this is cancelled."""
        if self._file is not None:
            await self._file.watch(self._take)

    async def look_again(self) -> None:
        """Read the file, if it has changed."""
        if self._file is not None and await self._file.look_again():
            self._take(self._file.value)

    def find(self, authorization: bytes) -> Tenant | None:
        """Whose key an Authorization header has, or None.

        Keys are looked up by their hashes: how long that takes says nothing of the keys that there are.
        """
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        return self._by_hash.get(hashlib.sha256(key.strip()).hexdigest())

    def find_in(self, scope: Scope) -> Tenant | None:
        """Who sent a request, or None. Anthropic's clients send their key as `x-api-key`."""
        found: Tenant | None = scope.get(TENANT)
        headers = () if found else scope["headers"]
        for name, value in headers:
            if found is None and name == b"authorization":
                found = self.find(value)
            elif found is None and name == b"x-api-key":
                found = self._by_hash.get(hashlib.sha256(value.strip()).hexdigest())
        return found

    def is_open(self, path: str) -> bool:
        """Whether nobody is asked for a key there."""
        return path.startswith(self.open_paths)

    def all(self) -> list[Tenant]:
        """Those of the file, by name."""
        return list(self._by_name.values())

    def named(self, name: str | None) -> Tenant:
        """A tenant by name; one whose key has gone meanwhile has its name left, for what it had begun."""
        return OWNER if name is None else self._by_name.get(name) or Tenant(name, self._secret)

    def _take(self, entries: Mapping[str, KeyEntry]) -> None:
        """What a file says goes from now on. Tenants that stay keep what they spent."""
        by_name, by_hash = {}, dict(self._owners)
        for name, entry in entries.items():
            by_name[name] = tenant = self._by_name.get(name) or Tenant(name, self._secret)
            tenant.change(entry)
            by_hash |= dict.fromkeys(entry.sha256, tenant)
        self._by_name, self._by_hash = by_name, by_hash


def client_in(scope: Scope) -> str:
    """Whose request it is: a key's, or that of all who come from one address."""
    tenant: Tenant | None = scope.get(TENANT)
    name = tenant.name if tenant is not None else None
    return name or str((scope.get("client") or [""])[0])


def no_key(how: str) -> ApiError:
    """What to say to whoever brings no key, or a wrong one."""
    return ApiError(401, f"send a key of this server as {how}", code="invalid_api_key", headers=_CHALLENGE)


_CHALLENGE = {"WWW-Authenticate": "Bearer"}


def admitted(
    tenant: Tenant | None, right: Right | None, model_control: bool, counted: bool = True
) -> contextlib.AbstractContextManager[None]:
    """A request's visit, or a look where it is not `counted`. Entering it raises what `Tenant.enter` does.

    Where nobody is asked for a key everybody may do all that needs no admin, and what does with `model_control`.
    """
    if tenant is not None:
        return tenant.visit(right) if counted else tenant.look(right)
    if right == "admin" and not model_control:
        message = (
            "clients load and unload no models here: whoever runs this server can allow it to all of them with "
            "model_control, or to some with keys that have the right 'admin'"
        )
        raise ApiError(403, message, code="model_control_off", kind="permission_error")
    return contextlib.nullcontext()


def _looks_of(allowance: Allowance) -> Allowance:
    """The limits of looks for a key with these, one for each that it has; looks read no tokens."""
    rate, at_once = allowance.requests_per_minute, allowance.requests_at_once
    return Allowance(
        requests_per_minute=None if rate is None else max(rate, _LOOKS_PER_MINUTE),
        requests_at_once=None if at_once is None else max(at_once, _LOOKS_AT_ONCE),
    )


def _refuse(exceeded: Exceeded | None, counted: str = "") -> None:
    if exceeded is not None:
        limit, allowed, wait = exceeded
        message = f"{counted}this key has reached its limit of {allowed} {limit.replace('_', ' ')} ({limit})"
        raise try_later(message, limit, wait)
