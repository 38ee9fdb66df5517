"""Counter-based random numbers: the number at a position depends on the seed and the position, on nothing else."""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def request_seed(seed: int | None, engine_seed: int, request_id: str) -> int:
    """Return the request's own seed as 64 bits; without one, a seed derived from the engine's and the request's id."""
    if seed is not None:
        return seed % 2**64
    digest = blake2b(f"{engine_seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position).

    The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), applied to the seed and again after stepping by the
    position: one number costs the same wherever a sequence begins, so a preempted request goes on as if nothing was.
    """
    mixed = _mix(_mix(seeds) + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
