"""A module's own `forward`, run with other functions in place of some that it calls by name."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


def called_by(module: nn.Module) -> set[str]:
    """The names of functions, and of all else, that a module's forward asks for; none if it is not Python's."""
    own = inspect.unwrap(type(module).forward)
    return {*own.__code__.co_names} if isinstance(own, types.FunctionType) else set()


def rebound(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The module's forward with these functions. Nothing changes for other modules of its kind."""
    own = inspect.unwrap(type(module).forward)
    names = {**own.__globals__, **functions}
    copied = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    copied.__kwdefaults__ = own.__kwdefaults__
    return functools.partial(copied, module)
