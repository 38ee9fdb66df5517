"""Mixers of transformers' layers that have states, by our kernels and none of their own code.

A mixer is of a kind if it has these parts, and if its code asks for nothing else. Whoever puts one in a module's place
holds it against the module.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from chairlift.ops.gated_delta_net import GatedDeltaNet
from chairlift.ops.short_convolution import ShortConvolution
from chairlift.runners.decoder.rebound import called_by
from chairlift.runners.decoder.transformers_parts import by_rows, joined
from chairlift.runners.decoder.transformers_recurrence import SpannedFunctions

# What either kind's forward asks for beside its parts: its cache, a mask that is not there, and shapes.
_COMMON = {
    *("apply_mask_to_padding_states", "cache", "get_conv_state", "update_conv_state", "is_recording_past"),
    *("layer_idx", "conv_kernel_size", "shape", "squeeze", "transpose", "weight", "bias", "in_proj", "out_proj"),
    *("causal_conv1d_update", "causal_conv1d_fn", "contiguous"),
}
# LFM2's: a gate, a convolution, another gate.
_SHORT = {"conv", "chunk"}
# Qwen 3.5's: a convolution and the gated delta rule.
_DELTA_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_DELTA_PARTS = {*_DELTA_PROJECTIONS, "conv1d", "norm", "out_proj"}
_DELTA = {
    *("get_recurrent_state", "update_recurrent_state", "torch_recurrent_gated_delta_rule"),
    *("torch_chunk_gated_delta_rule", "activation", "torch", "split", "key_dim", "value_dim", "reshape", "sigmoid"),
    *("head_k_dim", "head_v_dim", "A_log", "float", "exp", "F", "softplus", "dt_bias", "pop"),
}


# Mamba 2's of Granite 4, Bamba, Nemotron H and itself; its norm is run as the module that it is.
_MAMBA_PARTS = {"conv1d", "in_proj", "norm", "out_proj"}
_MAMBA = {
    *("get_recurrent_state", "update_recurrent_state", "mamba2_chunk_scan", "mamba2_selective_state_update"),
    *("mamba2_split_conv1d_scan_combined", "training", "variance_epsilon", "activation", "chunk_size", "dt_bias"),
    *("A_log", "D", "conv_dim", "head_dim", "intermediate_size", "n_groups", "num_heads", "ssm_state_size"),
    *("time_step_limit", "torch", "exp", "float", "dtype", "split", "view", "expand", "reshape", "to"),
}


def shortened(module: Any, functions: SpannedFunctions) -> Callable[..., Tensor] | None:
    """What gives the same as the module over the spans of `functions`, if it is of a kind that is known."""
    parts, called = {name for name, _ in module.named_children()} - {"act"}, called_by(module)
    has_silu = getattr(module, "activation", None) in ("silu", "swish")
    if parts == {"conv", "in_proj", "out_proj"} and called <= _COMMON | _SHORT:
        return _short_convolution(module, functions)
    if parts == _DELTA_PARTS and called <= _COMMON | _DELTA | _DELTA_PARTS and has_silu:
        return _gated_delta_net(module, functions)
    if parts == _MAMBA_PARTS and called <= _COMMON | _MAMBA | _MAMBA_PARTS and has_silu:
        return _mamba2(module, functions)
    return None


def _short_convolution(module: Any, functions: SpannedFunctions) -> Callable[..., Tensor]:
    mixer, place = ShortConvolution(_taps(module.conv), module.conv.bias), (module.layer_idx, 0)
    project, out = by_rows(module.in_proj), by_rows(module.out_proj)

    def convolve(x: Tensor) -> Tensor:
        return functions.convolve(place, x, mixer.weight, mixer.bias, silu=False)

    def forward(hidden_states: Tensor, **_: Any) -> Tensor:
        """[1, T, H] -> [1, T, H]."""
        return out(mixer.run(project(hidden_states[0]), convolve))[None]

    return forward


def _gated_delta_net(module: Any, functions: SpannedFunctions) -> Callable[..., Tensor] | None:
    project, out = joined([getattr(module, name) for name in _DELTA_PROJECTIONS]), by_rows(module.out_proj)
    if project is None:
        return None
    place, norm = (module.layer_idx, 0), module.norm
    mixer = GatedDeltaNet(
        _taps(module.conv1d),
        -module.A_log.detach().float().exp(),
        module.dt_bias.detach().float(),
        norm.weight.detach().contiguous(),
        module.key_dim // module.head_k_dim,
        module.value_dim // module.head_v_dim,
        module.head_k_dim,
        module.head_v_dim,
    )

    def convolve(x: Tensor) -> Tensor:
        return functions.convolve(place, x, mixer.taps, None, silu=True)

    def delta(qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor) -> Tensor:
        return functions.delta(place, qkv, decay, beta, unit=True)

    def normalize(x: Tensor, weight: Tensor) -> Tensor:
        return functions.ops.rms_norm(x, weight, norm.variance_epsilon)

    def forward(hidden_states: Tensor, **_: Any) -> Tensor:
        """[1, T, H] -> [1, T, H]."""
        return out(mixer.run(project(hidden_states[0]), convolve, delta, normalize))[None]

    return forward


def _mamba2(module: Any, functions: SpannedFunctions) -> Callable[..., Tensor]:
    weight, bias, place = _taps(module.conv1d), module.conv1d.bias, (module.layer_idx, 0)
    project, out, norm = by_rows(module.in_proj), by_rows(module.out_proj), module.norm
    width, heads, groups = module.intermediate_size, module.num_heads, module.n_groups
    sizes, parts = [width, module.conv_dim, heads], [width, *[groups * module.ssm_state_size] * 2]
    a, d, limit = -module.A_log.detach().float().exp(), module.D.detach().float(), module.time_step_limit
    step_bias = module.dt_bias.detach()

    def forward(hidden_states: Tensor, **_: Any) -> Tensor:
        """[1, T, H] -> [1, T, H]."""
        gate, mixed, step = torch.split(project(hidden_states[0]), sizes, dim=1)
        x, b, c = torch.split(functions.convolve(place, mixed, weight, bias, silu=True), parts, dim=1)
        count = len(x)
        xbc = x.view(count, heads, -1), b.view(count, groups, -1), c.view(count, groups, -1)
        dt = functional.softplus(step + step_bias.to(step.dtype)).clamp(*limit)
        normed = norm(functions.scan(place, xbc, dt, a, d).view(1, count, -1), gate[None])
        return out(normed[0].to(hidden_states.dtype))[None]

    return forward


@torch.no_grad()
def _taps(convolution: nn.Conv1d) -> Tensor:
    """Its weight [C, K]: each channel is by itself."""
    return convolution.weight.squeeze(1).contiguous()
