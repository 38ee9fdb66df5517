"""Serves a user's Python class: `load`, `preprocess`, `predict` and `postprocess`, of which only `predict` must be."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from chairlift.config.items import ItemConfig
from chairlift.errors import BadItem, ConfigError, InvalidRequest
from chairlift.runners.attempt import attempt
from chairlift.runners.error_text import describe
from chairlift.runners.hooks import Hooks
from chairlift.runners.host_cpus import usable_cpus
from chairlift.runners.items import ItemInfo, TensorSpec
from chairlift.runners.locate import find_class
from chairlift.runners.tensors import as_bytes, as_floats, check_tensors, dtype_of, groups, split, stack

_MAX_THREADS = 4
# Bytes of an array that is made of an item's texts.
_MOST_TEXT = 2**24
# As NumPy has it.
_MAX_DIMENSIONS = 64


class FunctionRunner:
    """Runs a class of hooks, each of which may be async:

    - `load(self)` once, before anything else.
    - `preprocess(self, item)` and `postprocess(self, output)` for each item, several at a time in threads; what they
      raise is that item's own error.
    - any of them may raise `chairlift.BadItem`, where the client is to blame. From `predict` it counts against an item
      that is alone in its batch, as batches that raise are tried in halves.
    - `predict(self, batch)` takes the list of items and gives one result for each: a list, an array or tensor whose
      first axis is the batch, or a dict of those. A result may be an exception, for that item alone.
    - a `predict` that yields streams: each yield is a list with one part for each item, None where there is nothing
      new. Each part goes through `postprocess` and to its own caller; an item's result is the list of its parts. What
      is raised after the first part is the error of all items of the batch, since nobody can be given a part twice.

    The class may also have these attributes:

    - `stack = True`: `predict` gets NumPy arrays (or dicts of them) stacked along a new first axis, and is called once
      for each shape that there is in the batch.
    - `max_batch_size`, `max_wait_ms`: defaults for the settings of those names.
    - `inputs`, `outputs`: lists of (name, data type, shape of one item). Items are then dicts of such arrays, and
      results are held against `outputs`; where there is one output, its bare value does.
    - `example(self)`: an item to warm up with; without it there is no warm-up.
    """

    def __init__(self, config: ItemConfig) -> None:
        self._config = config
        self._hooks: Hooks | None = None

    @property
    def hooks(self) -> Hooks:
        """The user's hooks. Raises ConfigError before `load`."""
        if self._hooks is None:
            raise ConfigError(f"{self._config.model} is not loaded")
        return self._hooks

    def load(self) -> ItemInfo:
        """Import the class, make an instance and load it. Raises ConfigError, and what the class raises."""
        threads = self._config.num_threads or min(_MAX_THREADS, usable_cpus())
        hooks = self._hooks = Hooks(find_class(self._config.model), self._config.options, threads)
        hooks.load()
        return ItemInfo(
            task="tensors" if hooks.inputs else "python",
            device="",
            dtype="",
            inputs=hooks.inputs,
            outputs=hooks.outputs,
            shape_keys=hooks.stack,
            streams=hooks.streams,
            max_batch_size=hooks.max_batch_size,
            max_wait_ms=hooks.max_wait_ms,
        )

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Run batches of the class's own example. Raises ConfigError if it does not go through."""
        for example in self.hooks.example():
            for size in sizes:
                error = next((each for each in self.run([example] * size) if isinstance(each, BaseException)), None)
                if error is not None:
                    raise ConfigError(f"the class fails on its own example: {describe(error)}") from error

    def run(self, payloads: Sequence[Any]) -> list[Any]:
        """Compute one batch: a result for each payload, or the exception that only it met."""
        return self.stream(payloads, lambda parts: None)

    def stream(self, payloads: Sequence[Any], emit: Callable[[dict[int, Any]], None]) -> list[Any]:
        """Like `run`, and hand over the parts of a streaming class as they come, by their item's index.

        What `emit` raises ends the stream, and is raised.
        """
        results = self._inputs(payloads)
        emitted = stopped = False

        def passed(parts: dict[int, Any]) -> None:
            nonlocal emitted, stopped
            stopped = True
            emit(parts)
            emitted, stopped = True, False

        good = [index for index, value in enumerate(results) if not isinstance(value, BaseException)]
        members = [good]
        if self.hooks.stack:
            members = [[good[index] for index in group] for group in groups([results[index] for index in good])]
        for group in members:
            if not group:
                continue
            inputs = [results[index] for index in group]
            batch = stack(inputs) if self.hooks.stack else inputs
            try:
                outputs = self._stream(batch, group, passed) if self.hooks.streams else self._predict(batch, len(group))
            except Exception as error:
                if stopped or not (emitted or (len(group) == 1 and isinstance(error, BadItem))):
                    raise
                outputs = [error] * len(group)
            for index, output in zip(group, outputs, strict=True):
                results[index] = output
        return results

    def close(self) -> None:
        """End the hooks' threads and let go of the user's object."""
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None

    def _inputs(self, payloads: Sequence[Any]) -> list[Any]:
        """What goes into `predict`, item by item, or the exception in its place."""
        hooks = self.hooks
        checked = [attempt(self._check, payload) for payload in payloads] if hooks.inputs else list(payloads)
        made = _where_good(hooks.preprocess, checked)
        return [attempt(_as_arrays, each) for each in made] if hooks.stack else made

    def _check(self, payload: Any) -> Any:
        if not isinstance(payload, Mapping):
            raise InvalidRequest(f"an item must be a dict of arrays, got {type(payload).__name__}")
        check_tensors(payload, self.hooks.inputs)
        return payload

    def _predict(self, batch: Any, size: int) -> list[Any]:
        return self._results(_rows(self.hooks.predict(batch), size, "returned"))

    def _stream(self, batch: Any, group: list[int], emit: Callable[[dict[int, Any]], None]) -> list[Any]:
        ends: list[Any] = [[] for _ in group]
        with contextlib.closing(self.hooks.stream(batch)) as stream:
            for made in stream:
                rows = _rows(made, len(group), "yielded")
                going = [i for i, row in enumerate(rows) if row is not None and not isinstance(ends[i], BaseException)]
                parts = {}
                for i, part in zip(going, self._results([rows[i] for i in going]), strict=True):
                    if isinstance(part, BaseException):
                        ends[i] = part
                    else:
                        ends[i].append(part)
                        parts[group[i]] = part
                if parts:
                    emit(parts)
        return ends

    def _results(self, rows: list[Any]) -> list[Any]:
        """What callers get for what `predict` gave."""
        made = _where_good(self.hooks.postprocess, rows)
        specs = self.hooks.outputs
        return [attempt(_as_outputs, each, specs) for each in made] if specs else made


def _where_good(function: Callable[[list[Any]], list[Any]], values: list[Any]) -> list[Any]:
    """Let a function see only the values that are no exceptions."""
    done = iter(function([value for value in values if not isinstance(value, BaseException)]))
    return [value if isinstance(value, BaseException) else next(done) for value in values]


def _rows(made: Any, size: int, verb: str) -> list[Any]:
    """Take a batch's output apart. Raises TypeError or ValueError if it is not one result for each item."""
    if isinstance(made, Mapping) and made:
        columns = {name: _rows(column, size, f"{verb} (in {name!r})") for name, column in made.items()}
        return list(split(columns))
    if not isinstance(made, list | tuple) and not (hasattr(made, "__array__") and getattr(made, "ndim", None)):
        raise TypeError(
            f"predict {verb} {type(made).__name__}; it must be a list, array or dict of those, with one result for "
            f"each of the batch's {size} items"
        )
    rows = list(made)
    if len(rows) != size:
        raise ValueError(f"predict {verb} {len(rows)} results for a batch of {size}; there must be one for each item")
    return rows


def _as_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_array(each) for name, each in value.items()}
    return _as_array(value)


def _as_array(value: Any) -> Any:
    """A value as an array. Raises InvalidRequest for texts of which that would take far more than they have."""
    leaves = [value]
    for _ in range(_MAX_DIMENSIONS):
        kinds = set(map(type, leaves))
        if not kinds & {list, tuple}:
            break
        leaves = list(chain.from_iterable(each if type(each) in (list, tuple) else (each,) for each in leaves))
    if len(leaves) > 1 and kinds & {str, bytes}:
        # NumPy makes every element as wide as the longest, in characters of four bytes; a number has up to 32.
        longest = max(len(each) if isinstance(each, str | bytes) else 32 for each in leaves)
        if 4 * longest * len(leaves) > _MOST_TEXT:
            problem = f"{len(leaves)} texts of up to {longest} characters would be an array of more than {_MOST_TEXT}"
            raise InvalidRequest(f"{problem} bytes; send fewer, or shorter ones")
    return np.asarray(value)


def _as_outputs(value: Any, specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """Make a result what the class declares. Raises ValueError if it is not."""
    if not isinstance(value, Mapping):
        if len(specs) > 1:
            raise ValueError(f"a result must be a dict of the outputs, got {type(value).__name__}")
        value = {specs[0].name: value}
    types = {spec.name: spec.datatype for spec in specs}
    made = {name: _as_output(each, types[name]) if name in types else each for name, each in value.items()}
    try:
        check_tensors(made, specs, "output")
    except InvalidRequest as error:
        raise ValueError(str(error)) from None
    return made


def _as_output(value: Any, datatype: str) -> Any:
    """Make numbers, lists, tensors and text an array of the declared type; other arrays are held to their own."""
    if datatype == "BYTES":
        return as_bytes(value)
    if datatype == "BF16":
        return as_floats(value)
    return value if isinstance(value, np.ndarray) else np.asarray(value, dtype_of(datatype))
