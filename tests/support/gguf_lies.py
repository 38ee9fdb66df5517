"""What a GGUF file may say that is not so."""

import math
import random
import struct

FEW, MANY = 300, 2000
# What a key may say, of any kind.
SAID = (*(-1, 0, 1, 3, 2**31, 2**63), *(True, 0.5, -1e300, math.nan, math.inf), "", "many", [], [4, 4, 4], ["a"])
SAID += ([2**63] * 1000,)


def mangled(rng: random.Random, whole: bytes) -> bytes:
    """A file that ends too soon, or of which some bytes are others or missing."""
    data = bytearray(whole)
    kind = rng.randrange(4)
    if kind == 0:
        return bytes(data[: rng.randrange(len(data))])
    # Most of a file is numbers, which may be any.
    head = min(len(data), 12_000)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(head - 8)
        if kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", rng.choice([2**63, 2**64 - 1, 2**40, 2**31, 0, len(data)]))
        else:
            del data[at : at + rng.randint(1, 40)]
    return bytes(data)
