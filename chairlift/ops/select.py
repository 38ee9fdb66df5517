"""Chooses the implementation of the operations for a device."""

import torch

from chairlift.errors import ConfigError
from chairlift.ops.base import Ops
from chairlift.ops.reference import ReferenceOps


def select_ops(name: str, device: torch.device, dtype: torch.dtype) -> Ops:
    """The operations that `name` ("auto", "native" or "reference") stands for."""
    if name == "native":
        raise ConfigError("ops = 'native': not built yet; set ops = 'reference'")
    return ReferenceOps()
