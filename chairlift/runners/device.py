"""Where a model computes."""

import torch

from chairlift.errors import ConfigError


def find_device(name: str) -> torch.device:
    """The device of a setting; "auto" is CUDA where there is some. Raises ConfigError for CUDA where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but PyTorch finds no CUDA device; use 'cpu' or 'auto'")
    return torch.device(name)
