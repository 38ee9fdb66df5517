"""Serves an ONNX file with ONNX Runtime; how items become batches is found in the model's own axes."""

import enum
import importlib
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.config.items import ItemConfig
from chairlift.errors import ConfigError, InvalidRequest, UnsupportedModel
from chairlift.runners.attempt import attempt
from chairlift.runners.host_cpus import usable_cpus
from chairlift.runners.items import ItemInfo, TensorSpec
from chairlift.runners.out_of_memory import is_out_of_memory
from chairlift.runners.tensors import as_bytes, check_tensors, dtype_of, groups, stack

log = logging.getLogger(__name__)

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}
# What warming up puts where the model leaves a size open.
_OPEN_SIZE = 8


class Axis(enum.Enum):
    """What the first axis of all tensors is."""

    BATCH = "of any size: items are stacked along it"
    ONE = "always 1: items run one by one"
    NONE = "something else: an item is the tensors as they are, and items run one by one"


class OnnxRunner:
    """Runs one ONNX model. An item is a dict of arrays, as `ItemInfo.inputs` says; so is a result."""

    def __init__(self, config: ItemConfig) -> None:
        self._config = config

    def load(self) -> ItemInfo:
        """Read the model. Raises ConfigError without ONNX Runtime, or its CUDA, or the file; UnsupportedModel."""
        path = Path(self._config.model)
        if not path.is_file():
            raise ConfigError(f"there is no file {path} (in the working directory {Path.cwd()})")
        runtime = _runtime()
        session = self._session = _open(runtime, self._config)
        self._options = runtime.RunOptions()
        outputs = _selected(session.get_outputs(), self._config.outputs)
        self._axis = find_axis([each.shape for each in session.get_inputs()], [each.shape for each in outputs])
        self._inputs = tuple(self._spec(each, "input") for each in session.get_inputs())
        self._outputs = tuple(self._spec(each, "output") for each in outputs)
        self._names = [spec.name for spec in self._outputs]
        batched = self._axis is Axis.BATCH
        return ItemInfo(
            task="tensors",
            device="cuda" if session.get_providers()[0] == "CUDAExecutionProvider" else "cpu",
            dtype=next((dtype_of(s.datatype).name for s in self._inputs + self._outputs if s.datatype[0] == "F"), ""),
            ops=f"onnxruntime {runtime.__version__}",
            weight_bytes=path.stat().st_size,
            inputs=self._inputs,
            outputs=self._outputs,
            shape_keys=batched and any(-1 in spec.shape for spec in self._inputs),
            batch_axis=self._axis is not Axis.NONE,
            max_batch_size=None if batched else 1,
        )

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Run batches of zeros, with 8 wherever a size is open. A model that can't run those starts cold.

        Raises UnsupportedModel for one that takes longer than `call_timeout_s`.
        """
        item = {
            spec.name: np.full([_OPEN_SIZE if size < 0 else size for size in spec.shape], *_zero(spec.datatype))
            for spec in self._inputs
        }
        for size in sizes if self._axis is Axis.BATCH else sizes[:1]:
            try:
                failed = self._try([item] * size)
            except Exception as error:
                failed = error
            if self._options.terminate:
                raise UnsupportedModel(
                    f"{self._config.model} did not run {size} items of zeros within {self._config.call_timeout_s:g} s "
                    "(call_timeout_s); raise that, or set warm_up_sizes to [] if zeros alone take it so long"
                )
            if failed is not None and is_out_of_memory(failed):
                raise failed
            if failed is not None:
                log.warning("%s was not warmed up, as it can't run zeros: %s", self._config.model, failed)
                return

    def _try(self, items: list[Any]) -> Exception | None:
        """Run a batch, but not for longer than a call may take; gives the error of one that failed."""
        limit = self._config.call_timeout_s
        timer = None if limit is None else threading.Timer(limit, setattr, (self._options, "terminate", True))
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            return next((each for each in self.run(items) if isinstance(each, Exception)), None)
        finally:
            if timer is not None:
                timer.cancel()

    def run(self, payloads: Sequence[Any]) -> list[Any]:
        """Compute one batch, in one call for each set of shapes that there is in it; an unfit item gets its own error.

        Raises ONNX Runtime's exceptions, and ValueError for an output that has not one row for each item.
        """
        results = [attempt(self._feed, payload) for payload in payloads]
        good = [index for index, feed in enumerate(results) if not isinstance(feed, Exception)]
        if self._axis is not Axis.BATCH:
            for index in good:
                results[index] = attempt(self._run_alone, results[index])
            return results
        for group in groups([results[index] for index in good]):
            members = [good[index] for index in group]
            rows = self._run_stacked([results[index] for index in members])
            for index, row in zip(members, rows, strict=True):
                results[index] = row
        return results

    def close(self) -> None:
        """Let go of the session."""
        del self._session

    def _spec(self, node: Any, side: str) -> TensorSpec:
        if node.type not in _DATATYPES:
            hint = "; leave it out with the setting outputs" if side == "output" else ""
            raise UnsupportedModel(
                f"{side} {node.name!r} of {self._config.model} is {node.type}; what works is "
                f"{', '.join(_DATATYPES)}{hint}"
            )
        shape = node.shape or []
        kept = shape if self._axis is Axis.NONE else shape[1:]
        return TensorSpec(node.name, _DATATYPES[node.type], tuple(n if isinstance(n, int) else -1 for n in kept))

    def _feed(self, payload: Any) -> dict[str, np.ndarray]:
        """What ONNX Runtime takes, for one item. Raises InvalidRequest that names the input."""
        if not isinstance(payload, Mapping):
            raise InvalidRequest(f"an item must be a dict of arrays, got {type(payload).__name__}")
        check_tensors(payload, self._inputs)
        return {
            spec.name: _as_text(payload[spec.name], spec.name) if spec.datatype == "BYTES" else payload[spec.name]
            for spec in self._inputs
        }

    def _run_alone(self, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self._compute(feed) if self._axis is Axis.NONE else self._run_stacked([feed])[0]

    def _run_stacked(self, feeds: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        outputs = self._compute(stack(feeds))
        for name, array in outputs.items():
            if array.ndim == 0 or len(array) != len(feeds):
                raise ValueError(
                    f"output {name!r} has shape {list(array.shape)} for a batch of {len(feeds)}, so it can't be shared "
                    "out; leave it out with the setting outputs"
                )
        return [{name: array[index, ...] for name, array in outputs.items()} for index in range(len(feeds))]

    def _compute(self, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays = self._session.run(self._names, feed, self._options)
        return {
            spec.name: as_bytes(array) if spec.datatype == "BYTES" else array
            for spec, array in zip(self._outputs, arrays, strict=True)
        }


def find_axis(inputs: Sequence[Sequence[int | str | None]], outputs: Sequence[Sequence[int | str | None]]) -> Axis:
    """Tell from all shapes what their first axis is. Open sizes are names or None."""
    shapes = [*inputs, *outputs]
    if not inputs or not all(shapes):
        return Axis.NONE
    # Two names for the first axis of two inputs are two sizes; outputs are often named apart from what they follow.
    if len({shape[0] for shape in inputs if isinstance(shape[0], str)}) > 1:
        return Axis.NONE
    given, made = ([shape[0] for shape in side] for side in (inputs, outputs))
    if not any(isinstance(size, int) for size in [*given, *made]):
        return Axis.BATCH
    if all(size == 1 for size in given):
        return Axis.ONE if all(size == 1 for size in made) else Axis.NONE
    return Axis.ONE if all(size == 1 or not isinstance(size, int) for size in [*given, *made]) else Axis.NONE


def _runtime() -> Any:
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ConfigError(f"ONNX models need ONNX Runtime: pip install 'chairlift[onnx]' ({error})") from None


def _open(runtime: Any, config: ItemConfig) -> Any:
    providers = ["CPUExecutionProvider"]
    has_cuda = "CUDAExecutionProvider" in runtime.get_available_providers()
    if config.device == "cuda" or (config.device == "auto" and has_cuda):
        providers.insert(0, "CUDAExecutionProvider")
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device is cuda, but this ONNX Runtime has no CUDA: pip install onnxruntime-gpu")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = config.num_threads or usable_cpus()
    # Threads that spin between calls burn a core, and on few cores slow the very calls that they wait for.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # what it would say is in the exceptions
    try:
        session = runtime.InferenceSession(config.model, options, providers=providers)
    except Exception as error:
        raise UnsupportedModel(f"ONNX Runtime can't load {config.model}: {error}") from error
    if config.device == "cuda" and session.get_providers()[0] != "CUDAExecutionProvider":
        raise ConfigError("device is cuda, but ONNX Runtime can't use it here: CUDA or cuDNN is missing, or too old")
    return session


def _selected(nodes: Sequence[Any], names: Sequence[str] | None) -> list[Any]:
    if names is None:
        return list(nodes)
    by_name = {node.name: node for node in nodes}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"outputs names {name!r}, which the model does not have; it has {', '.join(by_name)}")
    return [by_name[name] for name in names]


def _zero(datatype: str) -> tuple[Any, np.dtype[Any]]:
    return (b"" if datatype == "BYTES" else 0, dtype_of(datatype))


def _as_text(array: np.ndarray, name: str) -> np.ndarray:
    """Decode a BYTES tensor. ONNX Runtime would take bytes for the text of their Python literal."""
    made = np.empty(array.size, dtype=object)
    try:
        made[:] = [each.decode() if isinstance(each, bytes) else str(each) for each in array.ravel()]
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input {name!r} must be UTF-8: {error}", name) from None
    return made.reshape(array.shape)
