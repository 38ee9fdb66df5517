"""The limit that a model is held against: what a step must read and multiply."""

import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from support.encoder_factory import encoder_folder
from support.model_factory import model_folder

from chairlift.ops.base import Quantization
from chairlift.runners.decoder.config import read_config
from chairlift.runners.encoder.config import read_encoder_config

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "dynamic"))
import embed
import roofline


def in_layers(folder: Path) -> int:
    """Numbers of all weights that tokens are multiplied with in layers, but for those that choose experts."""
    total = 0
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = [name for name in list(file.keys()) if ".layers." in name and not name.endswith("gate.weight")]
        for name in names:
            shape = file.get_slice(name).get_shape()
            total += shape[0] * shape[1] if len(shape) == 2 and "bias" not in name else 0
    return total


@pytest.mark.parametrize(
    "variant", ["llama", "qwen3_window", "qwen2_moe", "glm4_moe", "ernie4_5_moe", "youtu", "deepseek_v2"]
)
def test_all_weights_are_counted_once(variant: str) -> None:
    layers, head = roofline.weights_of(read_config(model_folder(variant)))
    assert sum(each.layers * each.size * each.count for each in layers) == in_layers(model_folder(variant))
    assert (head.size, head.layers) == (320 * 64, 1)


def test_a_token_reads_the_experts_that_it_chose_and_many_read_all() -> None:
    weights = roofline.Weights((10, 20), layers=3, count=8, chosen=2)
    assert weights.read(1) == pytest.approx(3 * 200 * 2)
    assert weights.read(2) == pytest.approx(3 * 200 * 8 * (1 - 0.75**2))
    assert weights.read(10_000) == pytest.approx(3 * 200 * 8)
    assert roofline.Weights((10, 20), layers=3).read(1) == 600
    assert weights.read(0) == 0


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_products_are_measured_on_any_processor(quantization: Quantization) -> None:
    fastest, rate = roofline.measure_product((64, 96), quantization)
    assert fastest == "ours" or (quantization == "none" and fastest.startswith("oneDNN"))
    assert rate > 0


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_what_products_allow_an_encoder_is_measured_in_each_format(quantization: Quantization) -> None:
    assert embed.products_limit(read_encoder_config(encoder_folder("bert")), quantization) > 0
