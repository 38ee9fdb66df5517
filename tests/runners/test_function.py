"""A user's class: every kind of hook, and what is said about those that can't work."""

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift.config.items import ItemConfig
from chairlift.errors import BadItem, ConfigError, InvalidRequest
from chairlift.runners import function
from chairlift.runners.function import FunctionRunner
from chairlift.runners.items import ItemInfo, TensorSpec


def runner_of(name: str, **settings: Any) -> FunctionRunner:
    return FunctionRunner(ItemConfig(model=f"{__name__}:{name}", **settings))


def loaded(name: str, **settings: Any) -> FunctionRunner:
    runner = runner_of(name, **settings)
    runner.load()
    return runner


def shown(results: list[Any]) -> list[Any]:
    return [f"{type(r).__name__}: {r}" if isinstance(r, BaseException) else r for r in results]


class Bare:
    def predict(self, batch: list[int]) -> list[int]:
        return [value * 2 for value in batch]


class Whole:
    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.factor = 0

    def load(self) -> None:
        self.factor = 10

    def preprocess(self, item: str) -> int:
        return int(item)

    def predict(self, batch: list[int]) -> list[int]:
        if 13 in batch:
            raise RuntimeError("13")
        return [value * self.factor + self.offset for value in batch]

    def postprocess(self, output: int) -> str:
        if output == 70:
            raise KeyError("seven")
        return f"<{output}>"


class Picky:
    """Each hook refuses what it is told to."""

    def preprocess(self, item: str) -> str:
        return self._accept("preprocess", item)

    def predict(self, batch: list[str]) -> list[Any]:
        made = [self._accept("predict", item) for item in batch]
        return [BadItem("not this one") if item == "returned" else item for item in made]

    def postprocess(self, output: str) -> str:
        return self._accept("postprocess", output)

    def _accept(self, hook: str, item: str) -> str:
        if item == hook:
            raise BadItem(f"not in {hook}")
        return item


class Async:
    async def load(self) -> None:
        self.loop = asyncio.get_running_loop()

    async def preprocess(self, item: int) -> int:
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is self.loop
        return 10 // item

    async def predict(self, batch: list[int]) -> list[int]:
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is self.loop
        return batch

    async def postprocess(self, output: int) -> list[int]:
        return [output]


class Stacked:
    stack = True

    def __init__(self) -> None:
        self.shapes: list[Any] = []

    def predict(self, batch: np.ndarray) -> np.ndarray:
        self.shapes.append(batch.shape)
        return batch.sum(axis=-1)


class StackedDicts:
    stack = True

    def preprocess(self, item: dict[str, Any]) -> dict[str, Any]:
        return item | {"y": np.float32(item["y"])}

    def predict(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        return {"sum": batch["x"].sum(axis=1) + batch["y"], "name": [str(row) for row in batch["x"]]}


class Tensors:
    inputs = [("x", "FP32", (-1,)), ("word", "BYTES", ())]
    outputs = [TensorSpec("y", "FP32", ())]
    max_batch_size = 7
    max_wait_ms = 2

    def predict(self, batch: list[dict[str, Any]]) -> list[Any]:
        if any(item["word"] == b"bad" for item in batch):
            return [{"z": 1} for _ in batch]
        return [item["x"].sum().item() + len(item["word"].item()) for item in batch]


class Streams:
    def preprocess(self, item: str) -> str:
        return item.strip()

    def predict(self, batch: list[str]) -> Any:
        for index in range(max(map(len, batch))):
            yield [text[index] if index < len(text) else None for text in batch]
            if "ruin"[: index + 1] in batch:
                raise RuntimeError("ruined")

    def postprocess(self, output: str) -> str:
        if output == "!":
            raise ValueError("no shouting")
        return output.upper()


class AsyncStreams:
    async def predict(self, batch: list[int]) -> Any:
        try:
            for index in range(2):
                await asyncio.sleep(0)
                yield [value + index for value in batch]
        finally:
            self.closed = True


class Odd:
    def predict(self, batch: list[Any]) -> Any:
        match batch[0]:
            case "few":
                return batch[1:]
            case "none":
                return None
            case "text":
                return "ab"
            case "own":
                return [ValueError("mine"), *batch[1:]]
            case "number":
                return np.float32(3)
            case "tensor":
                import torch

                return torch.arange(len(batch))
        return batch


class Exemplary(Odd):
    def example(self) -> Any:
        return "fine"


class Unfit(Odd):
    def preprocess(self, item: Any) -> Any:
        raise ValueError("never")

    def example(self) -> Any:
        return "x"


def test_only_predict_is_required() -> None:
    runner = runner_of("Bare")
    assert runner.load() == ItemInfo(task="python", device="", dtype="")
    assert runner.run([1, 2, 3]) == [2, 4, 6]
    runner.warm_up([1, 2])
    runner.close()
    with pytest.raises(ConfigError, match="not loaded"):
        runner.run([1])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_all_hooks_and_whose_error_it_is(threads: int) -> None:
    runner = loaded("Whole", options={"offset": 0}, num_threads=threads)
    results = shown(runner.run(["1", "x", "7", "3", "2"]))
    assert results == ["<10>", results[1], "KeyError: 'seven'", "<30>", "<20>"]
    assert results[1].startswith("ValueError: invalid literal")
    with pytest.raises(RuntimeError, match="13"):
        runner.run(["1", "13"])
    assert loaded("Whole", options={"offset": 5}).run(["1"]) == ["<15>"]
    assert shown(runner.run(["x"]))[0].startswith("ValueError")


def test_a_hook_may_refuse_an_item() -> None:
    runner = loaded("Picky", num_threads=1)
    results = runner.run(["preprocess", "a", "postprocess", "returned"])
    assert shown(results) == ["BadItem: not in preprocess", "a", "BadItem: not in postprocess", "BadItem: not this one"]
    # Which one `predict` meant is known only where there is one.
    with pytest.raises(BadItem, match="not in predict"):
        runner.run(["a", "predict"])
    assert shown(runner.run(["predict"])) == ["BadItem: not in predict"]


def test_async_hooks_share_one_loop() -> None:
    runner = loaded("Async")
    results = shown(runner.run([1, 0, 5]))
    assert results == [[10], "ZeroDivisionError: integer division or modulo by zero", [2]]
    runner.close()


def test_stacking_makes_one_call_for_each_shape() -> None:
    runner = loaded("Stacked")
    results = runner.run([[1, 2], np.array([3, 4, 5]), [6, 7]])
    assert [int(each) for each in results] == [3, 12, 13]
    assert runner.hooks._object.shapes == [(2, 2), (1, 3)]


def test_texts_that_would_make_a_huge_array_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "_MOST_TEXT", 4000)
    runner = loaded("Stacked")
    good, wide, tall = [1.5] * 2000, ["x" * 900, ["b", "c"]], [["b", 1]] * 16
    results = runner.run([good, wide, tall])
    assert int(results[0]) == 3000
    assert [type(each) for each in results[1:]] == [InvalidRequest, InvalidRequest]
    assert "3 texts of up to 900 characters would be an array of more than 4000 bytes" in str(results[1])
    # One text is as long as it is.
    assert function._as_arrays({"a": "x" * 9000, "b": ["x"] * 900})["b"].shape == (900,)


def test_stacked_dicts_in_and_out() -> None:
    runner = loaded("StackedDicts")
    assert runner.run([{"x": [1, 2], "y": 1}, {"x": [3, 4], "y": 2}]) == [
        {"sum": 4.0, "name": "[1 2]"},
        {"sum": 9.0, "name": "[3 4]"},
    ]


def test_declared_tensors_are_held_to_their_declaration() -> None:
    runner = runner_of("Tensors")
    info = runner.load()
    assert info.task == "tensors"
    assert info.inputs == (TensorSpec("x", "FP32", (-1,)), TensorSpec("word", "BYTES", ()))
    assert (info.max_batch_size, info.max_wait_ms) == (7, 2.0)

    def item(x: Any, word: bytes = b"ab") -> dict[str, Any]:
        return {"x": x, "word": np.array(word, dtype=object)}

    good = item(np.ones(3, np.float32))
    results = runner.run([good, item(np.ones(3)), item(np.ones((1, 1), np.float32)), {"x": good["x"]}, good | {"z": 1}])
    assert results[0]["y"].dtype == np.float32
    assert results[0]["y"] == 5
    assert shown(results[1:]) == [
        "InvalidRequest: input 'x' must be FP32, got FP64",
        "InvalidRequest: input 'x' must have shape [-1] (-1 is any), got [1, 1]",
        "InvalidRequest: input 'word' is missing",
        "InvalidRequest: the model has no input 'z', only x, word",
    ]
    assert shown(runner.run([item(good["x"], b"bad")])) == ["ValueError: output 'y' is missing"]
    assert shown(runner.run([3])) == ["InvalidRequest: an item must be a dict of arrays, got int"]


def test_a_generator_streams_to_each_its_own() -> None:
    runner = runner_of("Streams")
    assert runner.load().streams
    parts: list[dict[int, str]] = []
    results = runner.stream([" ab", "c!d", 3, "efg"], parts.append)
    assert shown(results) == [
        ["A", "B"],
        "ValueError: no shouting",
        "AttributeError: 'int' object has no attribute 'strip'",
        ["E", "F", "G"],
    ]
    assert parts == [{0: "A", 1: "C", 3: "E"}, {0: "B", 3: "F"}, {3: "G"}]
    assert runner.run(["ab"]) == [["A", "B"]]


def test_what_a_stream_raises_after_its_first_part_is_every_item_s_error() -> None:
    runner = loaded("Streams")
    assert shown(runner.run(["r", "abc"])) == ["RuntimeError: ruined", "RuntimeError: ruined"]
    with pytest.raises(ValueError, match="max"):
        runner.hooks.stream([]).__next__()


@pytest.mark.parametrize("after", [0, 1])
def test_what_the_hearer_of_parts_raises_ends_the_stream(after: int) -> None:
    """It is nobody's result: the worker was told that nobody waits."""
    runner = loaded("AsyncStreams")
    parts: list[dict[int, int]] = []

    def emit(new: dict[int, int]) -> None:
        if len(parts) == after:
            raise KeyError("no more")
        parts.append(new)

    with pytest.raises(KeyError, match="no more"):
        runner.stream([1, 5], emit)
    assert parts == [{0: 1, 1: 5}][:after]
    assert runner.hooks._object.closed


def test_async_generators_stream_too() -> None:
    runner = loaded("AsyncStreams")
    assert runner.run([1, 5]) == [[1, 2], [5, 6]]
    runner.hooks._object.closed = False
    stream = runner.hooks.stream([1])
    assert next(stream) == [1]
    stream.close()
    assert runner.hooks._object.closed


@pytest.mark.parametrize(
    ("first", "error"),
    [
        ("few", "returned 1 results for a batch of 2"),
        ("none", "returned NoneType; it must be a list, array or dict of those, with one result for each"),
        ("text", "returned str"),
        ("number", "returned float32"),
    ],
)
def test_output_of_the_wrong_kind_or_number(first: str, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        loaded("Odd").run([first, "b"])


def test_results_may_be_exceptions_or_tensors() -> None:
    assert shown(loaded("Odd").run(["own", 2])) == ["ValueError: mine", 2]
    assert [int(each) for each in loaded("Odd").run(["tensor", 2])] == [0, 1]


def test_warm_up_runs_the_example() -> None:
    loaded("Exemplary").warm_up([1, 4])
    with pytest.raises(ConfigError, match="fails on its own example: ValueError: never"):
        loaded("Unfit").warm_up([2])


MODULE = """
    import helper
    class Model:
        def predict(self, batch):
            return [helper.twice(item) for item in batch]
    class NoPredict:
        pass
    class Wrong:
        def predict(self):
            return []
    class WrongHook:
        def predict(self, batch):
            return batch
        def preprocess(self, one, two):
            return one
    class NotMethod:
        predict = 3
    class BadSize:
        max_batch_size = 0
        def predict(self, batch):
            return batch
    class BadType(BadSize):
        max_batch_size = "many"
    class Endless(Model):
        max_wait_ms = float("inf")
    class NoNumber(Model):
        max_wait_ms = float("nan")
    class HalfSpecs(Model):
        inputs = [("x", "FP32", (1,))]
    class BadSpecs(Model):
        inputs = outputs = [("x", "FLOAT", (1,))]
    def function(batch):
        return batch
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "helper.py").write_text("def twice(value):\n    return value * 2\n")
    (tmp_path / "json.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path.parent))  # restores sys.path at the end
    return tmp_path


def test_a_file_is_imported_under_its_own_name_and_finds_its_neighbours(folder: Path) -> None:
    runner = FunctionRunner(ItemConfig(model=f"{folder}/json.py:Model"))
    runner.load()
    assert runner.run([2]) == [4]


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("missing.py:Model", "no file missing.py"),
        ("nothing_here:Model", "no module 'nothing_here'"),
        ("broken.py:Model", "importing broken.py failed: ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("broken:Model", "importing broken failed: ModuleNotFoundError"),
        ("json.py:Modell", "json.py has no class Modell; it defines Model, NoPredict"),
        ("json.py:function", "not a class but a function"),
        ("json.py:NoPredict", r"NoPredict has no method predict\(self, batch\)"),
        ("json.py:Wrong", r"Wrong.predict\(\) can't be called as Wrong.predict\(batch\): too many"),
        ("json.py:WrongHook", r"preprocess\(one, two\) can't be called as WrongHook.preprocess\(item\)"),
        ("json.py:NotMethod", "NotMethod.predict must be a method, not int"),
        ("json.py:BadSize", "BadSize.max_batch_size must be at least 1, got 0"),
        ("json.py:BadType", "BadType.max_batch_size: must be a whole number, got 'many'"),
        ("json.py:Endless", "Endless.max_wait_ms must be a finite number, got inf"),
        ("json.py:NoNumber", "NoNumber.max_wait_ms must be a finite number, got nan"),
        ("json.py:HalfSpecs", "declares only one of inputs and outputs"),
        ("json.py:BadSpecs", r"BadSpecs.inputs must be a list of .* data type 'FLOAT' is not one of BOOL"),
    ],
)
def test_what_cannot_be_served_is_said(folder: Path, model: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        FunctionRunner(ItemConfig(model=model)).load()


def test_unknown_options_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"Model\(size\): got an unexpected keyword argument 'size'"):
        FunctionRunner(ItemConfig(model="json.py:Model", options={"size": 3})).load()
