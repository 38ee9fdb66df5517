"""Rounding must not cost the demo model more than a hundredth of its perplexity."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from chairlift.demo import demo_path

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "benchmarks" / "accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accuracy"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def windows(accuracy: ModuleType) -> list[list[int]]:
    return accuracy.cut(demo_path(), accuracy.held_out_chats(demo_path()), 4096)


@pytest.fixture(scope="module")
def exact(accuracy: ModuleType, windows: list[list[int]]) -> Any:
    return accuracy.measure(demo_path(), windows, **accuracy.VARIANTS["float32"])


def test_the_text_is_one_that_the_model_knows(exact: Any) -> None:
    """Of a text that says nothing to it, no rounding would spoil anything."""
    assert 1.5 < exact.perplexity < 6
    assert (exact.agreement(exact), exact.prefix(exact)) == (1, 64)


@pytest.mark.parametrize("variant", ["bfloat16", "int8", "int8, KV int8"])
def test_perplexity_and_choices_stay(accuracy: ModuleType, windows: list[list[int]], exact: Any, variant: str) -> None:
    rounded = accuracy.measure(demo_path(), windows, **accuracy.VARIANTS[variant])
    assert abs(rounded.perplexity / exact.perplexity - 1) < 0.01
    assert 0.985 < rounded.agreement(exact) <= 1
    assert rounded.perplexity != exact.perplexity
    assert rounded.prefix(exact) > 32
