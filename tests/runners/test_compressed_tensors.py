"""Projections compressed by compressed-tensors itself are read as it reads them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from torch import Tensor

from chairlift.folders.quantization_config import parse_quantization
from chairlift.runners.weights import Weights

OUTS, INS = 96, 160
# Of each format: what is asked of weights, and whether inputs would be rounded as well.
SCHEMES: dict[str, list[dict[str, Any]]] = {
    "pack-quantized": [
        {"num_bits": bits, "symmetric": symmetric, **shared}
        for bits in (4, 8)
        for symmetric in (True, False)
        for shared in ({"strategy": "group", "group_size": 32}, {"strategy": "channel"})
    ],
    "int-quantized": [
        {"num_bits": 8, "symmetric": symmetric, "strategy": strategy}
        for symmetric in (True, False)
        for strategy in ("channel", "tensor")
    ],
    "float-quantized": [
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 48]},
    ],
}


def extremes(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """The least and the greatest of all that share a scale."""
    if args.strategy == "tensor":
        return weight.min(), weight.max()
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "group":
        grouped = weight.view(OUTS, -1, args.group_size or 0)
        return grouped.amin(2), grouped.amax(2)
    high, wide = args.block_structure or (0, 0)
    tiles = [list(rows.split(wide, 1)) for rows in weight.split(high)]
    found = [[[func(tile) for tile in row] for row in tiles] for func in (torch.min, torch.max)]
    return torch.tensor(found[0]), torch.tensor(found[1])


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "asked"), [pytest.param(form, each) for form, several in SCHEMES.items() for each in several]
)
def test_a_projection_of_the_tool(form: str, asked: dict[str, Any], saved: torch.dtype, tmp_path: Path) -> None:
    args = QuantizationArgs(**asked)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(OUTS, INS, generator=torch.Generator().manual_seed(1)).to(saved)
    scale, zero = calculate_qparams(*extremes(weight, args), args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors = compressor.compress(state, scheme)
    # It reads in the type of its scales, we in float32.
    exact = {name: tensor.float() if name == "weight_scale" else tensor for name, tensor in tensors.items()}
    wanted = compressor.decompress(exact, scheme)["weight"]
    save_file({f"m.{name}": tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    said = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }
    packing = parse_quantization({"quantization_config": said})
    with Weights(tmp_path, torch.float32, torch.device("cpu"), packing) as weights:
        found = weights.take(["m.weight"], [(OUTS, INS)])
        weights.refuse_unused()
    assert torch.equal(found, wanted)
    assert (found - weight).abs().max() < 0.5
