"""Convolutions of bfloat16 by float32's, for modules of transformers that are run as they are."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WideConvolutions(TorchFunctionMode):
    """While it is entered, convolutions of bfloat16 on the CPU are computed in float32, and rounded.

    Where the processor has no products of bfloat16, those of single channels take more than a hundred times as long
    (6144 of them, 11 rows, two cores of Zen 3: 70 ms, and 0.3 ms in float32).
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """What a function gives."""
        named = kwargs or {}
        x: Any = args[0] if args else named.get("input")
        if func is not torch.conv1d or x.dtype != torch.bfloat16 or x.device.type != "cpu":
            return func(*args, **named)
        wide = func(*map(_widened, args), **{name: _widened(each) for name, each in named.items()})
        return wide.to(x.dtype)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value
