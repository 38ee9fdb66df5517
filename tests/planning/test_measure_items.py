"""Measuring calls of models that answer in one: of every size, with inputs that are made up or given."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from chairlift.config.items import ItemConfig
from chairlift.errors import ConfigError, RequestFailed
from chairlift.planning.measure_items import measure_items
from chairlift.runners.function import FunctionRunner
from chairlift.runners.items import Encoding, ItemInfo, TensorSpec


class CountingRunner:
    """Answers at once, and keeps the sizes of what it was given."""

    def __init__(self, info: ItemInfo) -> None:
        self.info = info
        self.seen: list[tuple[int, int]] = []
        self.payloads: list[Any] = []
        self.closed = False

    def load(self) -> ItemInfo:
        return self.info

    def warm_up(self, sizes: Sequence[int]) -> None:
        pass

    def run(self, payloads: Sequence[Any]) -> list[Any]:
        self.payloads += payloads
        tokens = sum(len(each.token_ids) if isinstance(each, Encoding) else 1 for each in payloads)
        self.seen.append((len(payloads), tokens))
        return [ValueError("no") if each == "bad" else 1 for each in payloads]

    def close(self) -> None:
        self.closed = True


def test_batches_of_texts_have_every_size_and_length() -> None:
    runner = CountingRunner(ItemInfo(task="embed", device="", dtype="", max_tokens=100, vocab_size=50))
    config = ItemConfig(model="folder", kind="encoder", max_batch_size=6, max_batch_tokens=300)
    profile = measure_items(config, runner, 0.5)
    assert [(call.items, call.computed) for call in profile.calls] == runner.seen
    assert set(runner.seen) == {(n, n * t) for n in (1, 2, 4, 6) for t in (8, 32, 100) if n * t <= 300}
    assert runner.closed


def test_other_models_need_examples() -> None:
    config = ItemConfig(model="module:Class")
    info = ItemInfo(task="python", device="", dtype="", max_batch_size=3)
    profile = measure_items(config, CountingRunner(info), 0.5, examples=["a", "b"])
    assert {(call.items, call.computed) for call in profile.calls} == {(1, 1.0), (2, 2.0), (3, 3.0)}
    with pytest.raises(ConfigError, match="examples"):
        measure_items(config, CountingRunner(info), 0.5)
    with pytest.raises(RequestFailed, match="failed at an example: no"):
        measure_items(config, CountingRunner(info), 0.5, examples=["bad"])


def test_tensors_are_made_up_of_what_the_model_says_of_them() -> None:
    specs = (TensorSpec("a", "FP32", (-1, 3)), TensorSpec("b", "BYTES", (2,)))
    info = ItemInfo(task="tensors", device="cpu", dtype="", inputs=specs, weight_bytes=7, max_wait_ms=3.0)
    runner = CountingRunner(info)
    profile = measure_items(ItemConfig(model="net.onnx"), runner, 0.2, largest=4)
    assert {call.items for call in profile.calls} == {1, 2, 4}
    assert {(each["a"].shape, each["a"].dtype.name, each["b"].tolist()[0]) for each in runner.payloads} == {
        ((8, 3), "float32", b"a")
    }
    assert (profile.weight_bytes, profile.max_wait_ms, profile.max_batch_size) == (7, 3.0, None)
    assert profile.cores > 0
    assert profile.cpus >= 1
    assert profile.process_bytes > 0


def test_examples_of_tensors_are_lists_in_a_file() -> None:
    info = ItemInfo(task="tensors", device="cuda:0", dtype="", inputs=(TensorSpec("a", "FP32", (2,)),))
    runner = CountingRunner(info)
    profile = measure_items(ItemConfig(model="net.onnx"), runner, 0.2, examples=[{"a": [1, 2]}], largest=1)
    assert runner.payloads[0]["a"].dtype.name == "float32"
    assert runner.payloads[0]["a"].tolist() == [1.0, 2.0]
    assert (profile.cores, profile.cpus) == (0.0, 0), "of a GPU it is not known"


def test_a_class_has_an_example_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "class Own:\n    def example(self):\n        return 7\n    def predict(self, batch):\n"
        "        assert set(batch) == {7}\n        return batch\n"
    )
    config = ItemConfig(model=f"{tmp_path / 'own.py'}:Own")
    assert len(measure_items(config, FunctionRunner(config), 0.2).calls) >= 8
