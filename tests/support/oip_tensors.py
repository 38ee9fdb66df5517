"""What Triton's clients send to the `adder`, and what they must get, over HTTP as over gRPC."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from support.items_harness import adder

from chairlift.server.models.item_service import ItemService
from chairlift.server.models.registry import ModelService

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.full((2, 3), 10, dtype=np.float32)
WORDS = np.array([b"fox", "naïve".encode()], dtype=np.object_)


class Shelf:
    """A loader with one model on its shelf."""

    def __init__(self) -> None:
        self.unloaded: list[str] = []
        self.changes: list[dict[str, Any]] = []

    def problem(self) -> str | None:
        return None

    def available(self) -> list[str]:
        return ["adder", "spare"]

    async def load(self, name: str, changes: Mapping[str, Any]) -> list[ItemService]:
        self.changes.append(dict(changes))
        return [adder(name)[0]]

    async def unload(self, model: ModelService) -> None:
        self.unloaded.append(model.name)


def tensors(module: Any, binary: bool, words: Any = WORDS) -> list[Any]:
    made = []
    for name, array, datatype in (("a", A, "FP32"), ("b", B, "FP32"), ("word", words, "BYTES")):
        tensor = module.InferInput(name, array.shape, datatype)
        tensor.set_data_from_numpy(array, **({} if module.__name__.endswith("grpc") else {"binary_data": binary}))
        made.append(tensor)
    return made


def check(result: Any) -> None:
    np.testing.assert_array_equal(result.as_numpy("sum"), A + B)
    np.testing.assert_array_equal(result.as_numpy("mean"), (A + B).mean(axis=1))
    assert result.as_numpy("sum").dtype == np.float32
    assert result.as_numpy("mean").dtype == np.float64
    assert [bytes(each) if isinstance(each, bytes) else each.encode() for each in result.as_numpy("loud")] == [
        b"FOX",
        "naïve".encode().upper(),
    ]
