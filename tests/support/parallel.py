"""Random histories by the thousand: who runs how many, on two cores."""

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest


def some_and_all(some: int, in_all: int) -> list[Any]:
    """Seeds for a test's parameter: the first few by default (or CHAIRLIFT_HISTORIES of them), the rest if slow."""
    some = int(os.environ.get("CHAIRLIFT_HISTORIES", some))
    return [
        pytest.param(range(some), id="some"),
        pytest.param(range(some, max(some, in_all)), id="rest", marks=pytest.mark.slow),
    ]


def in_two_processes(check: Callable[[range], Counter[str]], seeds: range) -> Counter[str]:
    """Let two processes have half of the seeds each; gives what both count, or raises what either raises."""
    middle = len(seeds) // 2
    # Forked processes would have locks of threads that they do not have.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        first, second = pool.map(check, (seeds[:middle], seeds[middle:]))
    return first + second
