"""What the parameters of OIP requests, inputs and outputs may be.

Those that mean something to the protocol and are not implemented are refused by name. All others are the client's own,
for models that read them, which none here does: they change nothing.
"""

from collections.abc import Mapping
from typing import Any

from chairlift.bodies import is_neutral
from chairlift.errors import InvalidRequest
from chairlift.server.http.exchange import Terms, check_priority

# Asked for by streaming clients; a last answer that says so is what they get in any case.
EMPTY_FINAL = "triton_enable_empty_final_response"
# How the names begin that mean something to the protocol.
_RESERVED = ("sequence_", "shared_memory_", "triton_", "binary_data", "classification", "headers")
_MAX_OWN, _MAX_OWN_CHARS = 64, 4096


def read_terms(given: Mapping[str, Any] | None, terms: Terms, also: tuple[str, ...] = ()) -> Terms:
    """Deadline and priority of a request; `also` are parameters that the caller reads itself.

    As in Triton, `timeout` is in microseconds, and priority 1 is the highest, 2 the next; 0 is the default, here 1.
    """
    for name, value in (given or {}).items():
        if name == "priority":
            priority = check_priority(_integer(name, value), name)
            if priority < 0:
                raise InvalidRequest(f"priority must not be negative, got {priority}", name)
            terms = terms._replace(priority=max(priority - 1, 0))
        elif name == "timeout":
            microseconds = _integer(name, value)
            if microseconds < 0:
                raise InvalidRequest(f"timeout must not be negative, got {microseconds}", name)
            if microseconds:  # 0 asks for the default
                terms = terms._replace(timeout=sooner(terms.timeout, microseconds / 1e6))
    check_own(given, "priority", "timeout", *also)
    return terms


def sooner(first: float | None, second: float | None) -> float | None:
    """The earlier of two time limits, where None is no limit."""
    return second if first is None else first if second is None else min(first, second)


def read_flag(given: Mapping[str, Any] | None, name: str, default: bool) -> bool:
    """A parameter that is true or false."""
    value = (given or {}).get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequest(f"the parameter {name!r} must be true or false", name)
    return value


def read_size(given: Mapping[str, Any] | None, name: str) -> int | None:
    """A parameter that counts bytes, or None if it is not there."""
    value = (given or {}).get(name)
    if value is None:
        return None
    size = _integer(name, value)
    if size < 0:
        raise InvalidRequest(f"the parameter {name!r} must not be negative", name)
    return size


def check_own(given: Mapping[str, Any] | None, *known: str) -> None:
    """Raise for a parameter that nobody here reads and that is not the client's own, or for too many or large ones."""
    own = {name: value for name, value in (given or {}).items() if name not in known and not is_neutral(value)}
    for name, value in own.items():
        if name.startswith(_RESERVED):
            raise InvalidRequest(f"the parameter {name!r} is not supported", name)
        if not isinstance(value, str | int | float) or len(name) + len(str(value)) > _MAX_OWN_CHARS:
            problem = f"must be a text, number or flag of at most {_MAX_OWN_CHARS} characters, its name included"
            raise InvalidRequest(f"the parameter {name!r} {problem}", name)
    if len(own) > _MAX_OWN:
        raise InvalidRequest(f"there are {len(own)} parameters, more than {_MAX_OWN}", "parameters")


def refuse_others(given: Mapping[str, Any] | None, *known: str) -> None:
    """Raise for a parameter that nobody here reads."""
    for name in given or {}:
        if name not in known:
            raise InvalidRequest(f"the parameter {name!r} is not supported", name)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"the parameter {name!r} must be an integer", name)
    if not -(2**63) <= value < 2**63:
        raise InvalidRequest(f"the parameter {name!r} must be an integer of 64 bits", name)
    return value
