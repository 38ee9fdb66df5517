"""The tokens that are put around each text, or around the two of a pair."""

from collections.abc import Sequence
from typing import Any


def text_ends(tokens: Sequence[str], first: int, last: int, *, between: int = 1, second: int = 0) -> dict[str, Any]:
    """A post-processor that puts a token before a text and one behind it.

    Of a pair the last one is so many times `between` the texts, and the type of what follows there is `second`.
    """
    begin, text = _special(tokens[first], 0), {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, text, _special(tokens[last], 0)],
        "pair": [
            *(begin, text, *[_special(tokens[last], 0)] * between),
            {"Sequence": {"id": "B", "type_id": second}},
            _special(tokens[last], second),
        ],
        "special_tokens": {
            tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]}
            for number in {first, last}
        },
    }


def _special(token: str, kind: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": kind}}
