"""How much of what came over a connection the parser is given at once."""

import re

# The most, but for bodies whose length is known.
PIECE_BYTES = 4096
# How a head ends.
_BLANK_LINE = re.compile(rb"\n\r?\n")


def end_of_piece(data: bytes, start: int, most: int) -> int:
    """Where a piece that begins at `start` ends, of at most so many bytes: one in which only one head ends.

    Whether there is room for another request is seen to between pieces.
    """
    end = min(start + min(most, PIECE_BYTES), len(data))
    first = _BLANK_LINE.search(data, start, end)
    if first is None or _BLANK_LINE.search(data, first.end(), end) is None:
        return end
    return first.end()
