"""ONNX files: what their axes mean, and what is said of inputs that do not fit."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
from onnx import TensorProto, helper
from support.onnx_models import WEIGHT, linear, node, save, summing, tensor

from chairlift.config.items import ItemConfig
from chairlift.errors import ConfigError, UnsupportedModel
from chairlift.runners import onnx as onnx_runner
from chairlift.runners.items import TensorSpec
from chairlift.runners.onnx import Axis, OnnxRunner, find_axis
from chairlift.runners.out_of_memory import is_out_of_memory


def runner_of(model: str, **settings: Any) -> OnnxRunner:
    return OnnxRunner(ItemConfig(model=model, num_threads=1, **settings))


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, dtype=np.float32)


def test_a_dynamic_batch_axis_is_found_and_used(tmp_path: Path) -> None:
    runner = runner_of(linear(tmp_path / "m.onnx"))
    info = runner.load()
    assert info.inputs == (TensorSpec("x", "FP32", (4,)),)
    assert info.outputs == (TensorSpec("y", "FP32", (3,)),)
    assert (info.task, info.device, info.dtype) == ("tensors", "cpu", "float32")
    assert (info.batch_axis, info.shape_keys, info.max_batch_size) == (True, False, None)
    assert info.ops.startswith("onnxruntime 1.")
    runner.warm_up([1, 2, 8])
    items = random(5, 4)
    calls = counted(runner)
    results = runner.run([{"x": row} for row in items])
    assert calls == [5]
    assert all(result["y"].shape == (3,) for result in results)
    np.testing.assert_allclose([result["y"] for result in results], items @ WEIGHT, rtol=1e-6)
    assert runner.run([]) == []
    runner.close()


def test_threads_are_as_many_as_it_has_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_runner, "usable_cpus", lambda: 3)
    runner = OnnxRunner(ItemConfig(model=linear(tmp_path / "m.onnx")))
    runner.load()
    assert runner._session.get_session_options().intra_op_num_threads == 3
    runner.close()


def counted(runner: OnnxRunner) -> list[int]:
    """The leading size of every call from now on."""
    calls: list[int] = []
    compute = runner._compute

    def noted(feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        calls.append(len(next(iter(feed.values()))))
        return compute(feed)

    runner._compute = noted  # type: ignore[method-assign]
    return calls


def test_a_batch_axis_of_one_runs_item_by_item(tmp_path: Path) -> None:
    runner = runner_of(linear(tmp_path / "m.onnx", batch=1))
    info = runner.load()
    assert info.inputs == (TensorSpec("x", "FP32", (4,)),)
    assert (info.batch_axis, info.shape_keys, info.max_batch_size) == (True, False, 1)
    calls = counted(runner)
    items = random(3, 4)
    results = runner.run([{"x": row} for row in items])
    assert calls == [1, 1, 1]
    np.testing.assert_allclose([result["y"] for result in results], items @ WEIGHT, rtol=1e-6)


def test_any_other_first_axis_is_part_of_the_item(tmp_path: Path) -> None:
    runner = runner_of(linear(tmp_path / "m.onnx", batch=2))
    info = runner.load()
    assert info.inputs == (TensorSpec("x", "FP32", (2, 4)),)
    assert info.outputs == (TensorSpec("y", "FP32", (2, 3)),)
    assert (info.batch_axis, info.shape_keys, info.max_batch_size) == (False, False, 1)
    runner.warm_up([1])
    items = random(3, 2, 4)
    results = runner.run([{"x": item} for item in items])
    np.testing.assert_allclose([result["y"] for result in results], items @ WEIGHT, rtol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "outputs", "axis"),
    [
        ([["n", 3], ["n"]], [["m", 2]], Axis.BATCH),
        ([[None, 3]], [["unk__3"]], Axis.BATCH),
        ([["n", 3], [1, 2]], [["n"]], Axis.ONE),
        ([[1, "length"]], [[1, "length"]], Axis.ONE),
        ([[1, "length"]], [["found", 6]], Axis.NONE),
        ([["n", 3]], [[1, 4]], Axis.ONE),
        ([["n", 3], ["m", 3]], [["n"]], Axis.NONE),
        ([["n", 3]], [[]], Axis.NONE),
        ([[], ["n"]], [["n"]], Axis.NONE),
        ([[3, 224, 224]], [[1, 10]], Axis.NONE),
        ([], [["n"]], Axis.NONE),
    ],
    ids=str,
)
def test_axes(inputs: Any, outputs: Any, axis: Axis) -> None:
    assert find_axis(inputs, outputs) is axis


def test_two_inputs_of_open_length_share_a_batch_where_equal(tmp_path: Path) -> None:
    runner = runner_of(summing(tmp_path / "m.onnx"))
    info = runner.load()
    assert info.shape_keys
    assert info.inputs == (TensorSpec("ids", "INT64", (-1,)), TensorSpec("mask", "INT64", (-1,)))
    runner.warm_up([2])
    calls = counted(runner)
    items = [{"ids": np.arange(n), "mask": np.ones(n, np.int64)} for n in (3, 5, 3, 3)]
    results = runner.run(items)
    assert calls == [3, 1]
    assert [int(result["total"]) for result in results] == [3, 10, 3, 3]
    assert results[0]["total"].shape == ()
    assert results[1]["kept"].tolist() == [0, 1, 2, 3, 4]


def test_outputs_can_be_selected(tmp_path: Path) -> None:
    model = summing(tmp_path / "m.onnx")
    runner = runner_of(model, outputs=("total",))
    assert runner.load().outputs == (TensorSpec("total", "INT64", ()),)
    assert runner.run([{"ids": np.arange(3), "mask": np.ones(3, np.int64)}])[0].keys() == {"total"}
    with pytest.raises(ConfigError, match="outputs names 'sum', which the model does not have; it has total, kept"):
        runner_of(model, outputs=("sum",)).load()


def test_strings_are_utf_8_bytes(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.onnx",
        [node("Identity", ["s"], ["t"])],
        [tensor("s", ["n", "k"], TensorProto.STRING)],
        [tensor("t", ["n", "k"], TensorProto.STRING)],
    )
    runner = runner_of(path)
    assert runner.load().inputs == (TensorSpec("s", "BYTES", (-1,)),)
    runner.warm_up([2])

    def words(*each: Any) -> dict[str, np.ndarray]:
        return {"s": np.array(each, dtype=object)}

    results = runner.run([words("ü".encode(), b"a"), words(b"\xff", b""), words(b"x", b"")])
    assert results[0]["t"].tolist() == ["ü".encode(), b"a"]
    assert results[2]["t"].tolist() == [b"x", b""]
    assert str(results[1]).startswith("input 's' must be UTF-8")


def test_half_precision(tmp_path: Path) -> None:
    kinds = {"kind": TensorProto.FLOAT16}
    path = save(
        tmp_path / "m.onnx",
        [node("Identity", ["x"], ["y"])],
        [tensor("x", ["n", 2], **kinds)],
        [tensor("y", ["n", 2], **kinds)],
    )
    runner = runner_of(path)
    assert runner.load().dtype == "float16"
    assert runner.run([{"x": np.array([1, 2], np.float16)}])[0]["y"].dtype == np.float16


def test_unfit_inputs_are_named_and_fail_alone(tmp_path: Path) -> None:
    runner = runner_of(linear(tmp_path / "m.onnx"))
    runner.load()
    good = {"x": np.ones(4, np.float32)}
    results = runner.run(
        [
            good,
            {},
            {"x": np.ones(4)},
            {"x": np.ones(3, np.float32)},
            {"x": [1, 2, 3, 4]},
            good | {"y": good["x"]},
            3,
            good,
        ]
    )
    assert [str(result) for result in results[1:-1]] == [
        "input 'x' is missing",
        "input 'x' must be FP32, got FP64",
        "input 'x' must have shape [4] (-1 is any), got [3]",
        "input 'x' must be an array, got list",
        "the model has no input 'y', only x",
        "an item must be a dict of arrays, got int",
    ]
    assert results[0]["y"].tolist() == results[-1]["y"].tolist() == WEIGHT.sum(axis=0).tolist()


def test_an_output_that_only_looks_batched_is_an_error(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.onnx",
        [node("Concat", ["x", "x"], ["y"], axis=0)],
        [tensor("x", ["n", 2])],
        [tensor("y", ["m", 2])],
    )
    runner = runner_of(path)
    runner.load()
    with pytest.raises(ValueError, match=r"output 'y' has shape \[2, 2\] for a batch of 1"):
        runner.run([{"x": np.ones(2, np.float32)}])


def test_rows_beyond_the_first_are_not_dropped(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.onnx",
        [node("Concat", ["x", "z"], ["y"], axis=0)],
        [tensor("x", [1, 2]), tensor("z", ["n", 2])],
        [tensor("y", ["m", 2])],
    )
    runner = runner_of(path)
    assert runner.load().batch_axis
    (error,) = runner.run([{"x": np.ones(2, np.float32), "z": np.ones(2, np.float32)}])
    assert str(error).startswith("output 'y' has shape [2, 2] for a batch of 1")


def test_running_out_of_memory_is_recognised(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.onnx",
        [node("Expand", ["x", "size"], ["y"])],
        [tensor("size", [1], TensorProto.INT64)],
        [tensor("y", ["n"])],
        x=np.ones(1, np.float32),
    )
    runner = runner_of(path)
    runner.load()
    small, huge = runner.run([{"size": np.array([size])} for size in (3, 2**45)])
    assert small["y"].shape == (3,)
    assert is_out_of_memory(huge)


def test_what_cannot_be_loaded_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        runner_of(str(tmp_path / "none.onnx")).load()
    (tmp_path / "bad.onnx").write_bytes(b"hello")
    with pytest.raises(UnsupportedModel, match="ONNX Runtime can't load"):
        runner_of(str(tmp_path / "bad.onnx")).load()
    kinds = {"kind": TensorProto.BFLOAT16}
    path = save(
        tmp_path / "bf16.onnx",
        [node("Identity", ["x"], ["y"])],
        [tensor("x", ["n"], **kinds)],
        [tensor("y", ["n"], **kinds)],
    )
    with pytest.raises(UnsupportedModel, match=r"input 'x' of .* is tensor\(bfloat16\); what works is tensor\(bool\)"):
        runner_of(path).load()
    with pytest.raises(ConfigError, match="device is cuda, but this ONNX Runtime has no CUDA"):
        runner_of(path, device="cuda").load()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"pip install 'chairlift\[onnx\]'"):
        runner_of(path).load()


def endless(path: Path) -> str:
    """Count up to 2**60, whatever goes in."""
    body = helper.make_graph(
        [node("Identity", ["condition"], ["goes_on"]), node("Add", ["sum", "sum"], ["next"])],
        "body",
        [tensor("i", [], TensorProto.INT64), tensor("condition", [], TensorProto.BOOL), tensor("sum", ["n", 4])],
        [tensor("goes_on", [], TensorProto.BOOL), tensor("next", ["n", 4])],
    )
    return save(
        path,
        [node("Loop", ["times", "", "x"], ["y"], body=body)],
        [tensor("x", ["n", 4])],
        [tensor("y", ["n", 4])],
        times=np.array(2**60),
    )


def test_warming_up_takes_no_longer_than_a_call_may(tmp_path: Path) -> None:
    runner = runner_of(endless(tmp_path / "m.onnx"), call_timeout_s=0.2)
    runner.load()
    with pytest.raises(UnsupportedModel, match=r"did not run 1 items of zeros within 0\.2 s"):
        runner.warm_up([1, 2])


def saved_model(path: Path, nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray]) -> Path:
    """x [n, 64] -> y [n, 48]."""
    held = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name, width in (("x", 64), ("y", 48))
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], held)
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=domains, ir_version=10), path)
    return path


def results_of(path: Path, items: np.ndarray) -> np.ndarray:
    runner = runner_of(str(path))
    assert runner.load().dtype == "float32"
    found = np.stack([result["y"] for result in runner.run([{"x": row} for row in items])])
    runner.close()
    return found


def test_a_file_of_8_bits_runs_as_it_is(tmp_path: Path) -> None:
    """As onnxruntime's own tool quantizes it."""
    from onnxruntime.quantization import quantize_dynamic

    rng = np.random.default_rng(1)
    weight, items = (rng.standard_normal(shape, dtype=np.float32) for shape in ((64, 48), (5, 64)))
    plain = saved_model(tmp_path / "plain.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weight})
    quantize_dynamic(plain, tmp_path / "quantized.onnx")
    found, exact = results_of(tmp_path / "quantized.onnx", items), items @ weight
    assert 1e-4 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.02


def test_a_file_of_4_bits_runs_as_it_is(tmp_path: Path) -> None:
    """Blocks of 32 weights, two in a byte, less 8, with a scale each."""
    rng = np.random.default_rng(1)
    numbers, scales = rng.integers(0, 16, (48, 2, 32)), rng.random((48, 2), dtype=np.float32)
    packed = (numbers[..., ::2] | numbers[..., 1::2] << 4).astype(np.uint8)
    fields = {"K": 64, "N": 48, "bits": 4, "block_size": 32}
    product = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **fields)
    path = saved_model(tmp_path / "four.onnx", [product], {"w": packed, "s": scales.ravel()})
    items = rng.standard_normal((5, 64), dtype=np.float32)
    exact = items @ ((numbers - 8) * scales[..., None]).reshape(48, 64).astype(np.float32).T
    np.testing.assert_allclose(results_of(path, items), exact, rtol=1e-3, atol=1e-3)
