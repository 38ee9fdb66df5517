"""Activations by name, for gated products and encoders."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    # Whoever only reads a config.json needs no torch.
    from torch import Tensor

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu_clamped"]
# By what config.json calls them.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def gated(gate: "Tensor", up: "Tensor", activation: Activation) -> "Tensor":
    """Return activation(gate) * up.

    `swiglu_clamped` is gpt-oss's: gate at most 7, up within 7, and (up + 1) * gate * sigmoid(1.702 * gate).
    """
    if activation == "swiglu_clamped":
        low = gate.clamp(max=7.0)
        return (up.clamp(-7.0, 7.0) + 1) * low * (1.702 * low).sigmoid()
    return activate(gate, activation) * up


def activate(x: "Tensor", activation: str) -> "Tensor":
    """Apply an activation by its name: one of `Activation`, or "tanh"."""
    # Here, as the front reads the names above, and has no torch.
    import torch
    import torch.nn.functional as F

    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    plain: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": F.gelu,
        "relu": F.relu,
        "silu": F.silu,
        "tanh": torch.tanh,
    }
    return plain[activation](x)
