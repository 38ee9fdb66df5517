"""Which scenarios of other servers' own test suites a test goes through, in its own words."""

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., None])


def covers(suite: str, *scenarios: str) -> Callable[[F], F]:
    """Say so of a test: the suite's file, and the names of its tests. docs/compat.md counts them."""
    assert suite
    assert scenarios

    def same(test: F) -> F:
        return test

    return same
