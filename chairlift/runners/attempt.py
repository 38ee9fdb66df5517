"""Exceptions as values: what goes wrong with one item must not stop the others of its batch."""

from collections.abc import Callable
from typing import Any


def attempt(function: Callable[..., Any], value: Any, *more: Any) -> Any:
    """Call a function, or return the exception that it raised; a value that is an exception already stays."""
    if isinstance(value, BaseException):
        return value
    try:
        return function(value, *more)
    except Exception as error:
        return error
