"""W3C Trace Context: the caller's span that a request belongs to, as its headers `traceparent` and `tracestate` say.

What is malformed is as if it were not there, as the specification has it: no request is refused for its trace.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_KEY = r"[a-z][_0-9a-z\-*/]{0,255}|[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13}"
_VALUE = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_MEMBER = re.compile(rf"({_KEY})=({_VALUE})")
_MOST_MEMBERS = 32
# Of a state so many characters are passed on. If it has more, members longer than this go first, then the last ones.
_MOST_STATE, _LONG_MEMBER = 512, 128
# A header of more characters is not looked at.
_MOST_HEADER = 8192


class TraceParent(NamedTuple):
    """A caller's span: its trace, its id, whether it is sampled and other flags, and what tracers keep in its state."""

    trace_id: int
    span_id: int
    flags: int
    state: tuple[tuple[str, str], ...]


def trace_parent(headers: Iterable[tuple[bytes, bytes]]) -> TraceParent | None:
    """The span that a request's headers name, or None. Names of headers are in lower case."""
    parents, states = [], []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value.decode("latin-1"))
        elif name == b"tracestate":
            states.append(value.decode("latin-1"))
    if len(parents) != 1 or len(parents[0]) > _MOST_HEADER:
        return None
    found = _PARENT.fullmatch(parents[0].strip(" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    # Version 00 ends here; a later one may have more, and ff is none.
    if version == "ff" or (version == "00" and more is not None) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceParent(int(trace_id, 16), int(span_id, 16), int(flags, 16), _state(",".join(states)))


def _state(text: str) -> tuple[tuple[str, str], ...]:
    """The members of a state, as many as are passed on; none where one of them is malformed or there twice."""
    if len(text) > _MOST_HEADER:
        return ()
    members: dict[str, str] = {}
    for part in filter(None, (part.strip(" \t") for part in text.split(","))):
        found = _MEMBER.fullmatch(part)
        if found is None or found[1] in members:
            return ()
        members[found[1]] = found[2]
    if len(members) > _MOST_MEMBERS:
        return ()
    if _length(members) > _MOST_STATE:
        members = {key: value for key, value in members.items() if len(key) + len(value) < _LONG_MEMBER}
    while _length(members) > _MOST_STATE:
        members.popitem()
    return tuple(members.items())


def _length(members: dict[str, str]) -> int:
    """Characters of a state as a header: with a `=` in each member, and a comma between them."""
    return sum(len(key) + len(value) + 2 for key, value in members.items()) - 1
