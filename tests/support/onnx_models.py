"""Small ONNX models, made on the spot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

Shape = Sequence[int | str | None]


def tensor(name: str, shape: Shape, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    **weights: np.ndarray,
) -> str:
    """Write a model and return its path."""
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "test", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return str(path)


def node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, outputs, **attributes)


WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)


def linear(path: Path, batch: int | str | None = "batch") -> str:
    """Give y = x @ WEIGHT, for x of 4 and y of 3."""
    return save(
        path, [node("MatMul", ["x", "w"], ["y"])], [tensor("x", [batch, 4])], [tensor("y", [batch, 3])], w=WEIGHT
    )


def summing(path: Path) -> str:
    """Give the sum of ids, where a mask is set, over a length that is open, and what is left of the ids."""
    nodes = [
        node("Mul", ["ids", "mask"], ["kept"]),
        node("ReduceSum", ["kept", "axes"], ["total"], keepdims=0),
    ]
    ids, mask = (tensor(name, ["batch", "length"], TensorProto.INT64) for name in ("ids", "mask"))
    outputs = [tensor("total", ["b"], TensorProto.INT64), tensor("kept", ["b", "l"], TensorProto.INT64)]
    return save(path, nodes, [ids, mask], outputs, axes=np.array([1]))
