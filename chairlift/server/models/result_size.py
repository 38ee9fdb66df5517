"""About how large a result is that a model gave, whatever it is made of."""

from collections.abc import Mapping
from typing import Any

import numpy as np

# The characters that a number is counted as.
_NUMBER = 8
_NUMBERS = frozenset({int, float, bool})


def size_of(value: Any, most: int) -> int:
    """About the characters of a value of JSON and arrays, written out; beyond `most` it looks no further.

    Lists of numbers are not gone through one by one.
    """
    size, rest = 0, [value]
    while rest and size <= most:
        each = rest.pop()
        if isinstance(each, str | bytes):
            size += len(each)
        elif isinstance(each, Mapping):
            size += len(each) if len(each) > most else sum(map(len, map(str, each)))
            rest += each.values() if size <= most else ()
        elif isinstance(each, list | tuple | np.ndarray):
            size += (each.size if isinstance(each, np.ndarray) else len(each)) * _NUMBER
            if size > most or (isinstance(each, np.ndarray) and each.dtype != object):
                continue
            values = each.ravel().tolist() if isinstance(each, np.ndarray) else each
            if not _NUMBERS.issuperset(map(type, values)):
                rest += values
        else:
            size += _NUMBER
    return size
