"""Rounding must not cost the demo model more than a hundredth of its perplexity, on what it knows and on what not."""

import ast
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


@pytest.fixture(scope="module", params=["chats", "prose"])
def title(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def windows(accuracy: ModuleType, title: str) -> list[list[int]]:
    return accuracy.cut(demo_path(), dict(accuracy.own_texts(demo_path()))[title], 4096)


@pytest.fixture(scope="module")
def exact(accuracy: ModuleType, windows: list[list[int]]) -> Any:
    return accuracy.measure(demo_path(), windows, **accuracy.VARIANTS["float32"])


def words(text: str) -> list[str]:
    return "".join(letter if letter.isalpha() else " " for letter in text.lower()).split()


def test_the_prose_is_in_no_training_text(accuracy: ModuleType) -> None:
    def runs(text: str) -> set[tuple[str, ...]]:
        found = words(text)
        return {tuple(found[start : start + 8]) for start in range(len(found) - 7)}

    trained: set[tuple[str, ...]] = set()
    for name in ("demo_corpus", "demo_facts", "demo_texts", "demo_tools"):
        for node in ast.walk(ast.parse((ROOT / "scripts" / f"{name}.py").read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                trained |= runs(node.value)
    prose = runs(accuracy.PROSE.read_text())
    assert len(trained) > 2000
    assert len(prose) > 1500
    assert not trained & prose


def test_one_text_is_known_to_the_model_and_the_other_is_not(exact: Any, title: str) -> None:
    """Of a text that says nothing at all to it, no rounding would spoil anything."""
    low, high = {"chats": (1.5, 6), "prose": (5_000, 200_000)}[title]
    assert low < exact.seen.perplexity < high
    assert (exact.seen.agreement(exact.seen), exact.prefix(exact)) == (1, 64)


@pytest.mark.parametrize("variant", ["bfloat16", "int8", "int8, KV int8"])
def test_perplexity_and_choices_stay(
    accuracy: ModuleType, windows: list[list[int]], exact: Any, variant: str, title: str
) -> None:
    # Of what it never saw the model makes nothing, so many choices are nearly ties.
    most, least, shortest = {"chats": (0.01, 0.985, 32), "prose": (0.02, 0.93, 12)}[title]
    rounded = accuracy.measure(demo_path(), windows, **accuracy.VARIANTS[variant])
    ratio, error = rounded.seen.ratio(exact.seen)
    assert ratio == pytest.approx(rounded.seen.perplexity / exact.seen.perplexity)
    assert abs(ratio - 1) < most
    assert 0 < error < 0.01
    assert least < rounded.seen.agreement(exact.seen) <= 1
    assert rounded.seen.perplexity != exact.seen.perplexity
    assert rounded.prefix(exact) > shortest


def test_4_bits_say_nearly_the_same(accuracy: ModuleType, windows: list[list[int]], exact: Any, title: str) -> None:
    """What it knows it says within 3% of the perplexity; what it does not it is less sure of, and so less wrong."""
    worst, best, least = {"chats": (1.03, 0.97, 0.95), "prose": (1.03, 0.8, 0.75)}[title]
    rounded = accuracy.measure(demo_path(), windows, **accuracy.VARIANTS["int4"])
    ratio, error = rounded.seen.ratio(exact.seen)
    assert best < ratio < worst
    assert 0 < error < 0.02
    assert rounded.seen.agreement(exact.seen) > least
