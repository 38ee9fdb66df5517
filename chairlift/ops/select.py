"""Chooses the implementation of the operations for a device."""

import logging
from functools import cache

import torch

from chairlift.errors import ConfigError
from chairlift.ops.base import Quantization
from chairlift.ops.contract import Ops
from chairlift.ops.cpu import CpuOps
from chairlift.ops.cuda import CudaOps
from chairlift.ops.formats import FORMATS
from chairlift.ops.kv_layout import MAX_HEAD_DIM, has_kernels
from chairlift.ops.native import load_library, product_path
from chairlift.ops.reference import ReferenceOps

logger = logging.getLogger(__name__)


def select_ops(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, quantization: Quantization = "none"
) -> Ops:
    """Return the operations that `name` stands for: "reference", "native", or "auto" for the fastest that work here.

    On CUDA "auto" is the reference with PyTorch's own attention, without cuDNN's, and "native" is refused. On the CPU
    "auto" falls back to the reference, with a warning, where the native library cannot be loaded or has no kernels for
    heads of `head_dim`. Raises ConfigError for "native" where it cannot be had, and for any other name.
    """
    if name not in ("auto", "native", "reference"):
        raise ConfigError(f"ops = {name!r}: must be 'auto', 'native' or 'reference'")
    if device.type == "cuda":
        # cuDNN's attention is planned anew for each length of a text, which takes longer than a batch, and plans stay.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if quantization != "none" and name == "auto":
            logger.warning(
                "quantization = %r on CUDA only imitates the rounding, to compare quality: weights take 8 bits each, "
                "and become 64 in every step, which is slow; leave it out to serve",
                quantization,
            )
    if name == "reference":
        return ReferenceOps(quantization)
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        if name == "native":
            raise ConfigError(f"ops = 'native' has no kernels for {dtype} on {device.type}; set ops = 'auto'")
        return CudaOps(quantization) if device.type == "cuda" else ReferenceOps(quantization)
    if not has_kernels(head_dim):
        reason = f"the native kernels take a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}, not {head_dim}"
        if name == "native":
            raise ConfigError(f"ops = 'native': {reason}; set ops = 'auto'")
        logger.warning("%s: falling back to plain torch, which is several times slower", reason)
        return ReferenceOps(quantization)
    try:
        return CpuOps(dtype, quantization)
    except OSError as error:
        if name == "native":
            raise ConfigError(
                f"ops = 'native': the native library cannot be loaded ({error}); reinstall Chairlift with a C++ "
                "compiler (in a checkout: python setup.py build_ext --inplace) or set ops = 'auto'"
            ) from error
        _warn_once(str(error))
        return ReferenceOps(quantization)


def has_bf16_products() -> bool:
    """Whether the native operations multiply bfloat16 on this processor, so that it is the fastest type here."""
    try:
        return product_path(load_library()[0], FORMATS["bfloat16"]) is not None
    except (OSError, ConfigError):
        return False


@cache
def _warn_once(error: str) -> None:
    logger.warning(
        "the native library cannot be loaded (%s): falling back to plain torch, which is several times slower; "
        "reinstall Chairlift with a C++ compiler, or in a checkout run python setup.py build_ext --inplace",
        error,
    )
