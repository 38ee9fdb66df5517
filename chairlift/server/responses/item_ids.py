"""The ids of an answer's items, which say what response they are of: then nobody has to search for one."""

import re

_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{24})_\d{1,9}")
_RESPONSE = "resp_"


def make_item_id(kind: str, response: str, index: int) -> str:
    """The id of an item of this kind, `msg`, `rs` or `fc`, at its place in a response's output."""
    return f"{kind}_{response.removeprefix(_RESPONSE)}_{index}"


def response_of(item: str) -> str | None:
    """The id of the response that an item is of; None if no response has named it."""
    found = _ID.fullmatch(item)
    return None if found is None else _RESPONSE + found[1]
