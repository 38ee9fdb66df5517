"""Every setting of one model that answers in one call (encoder, ONNX file, Python class), with its default."""

import re
from math import inf
from typing import Annotated, Any, Literal

import msgspec

from chairlift.config.choices import check_choices, one_of
from chairlift.config.units import seconds
from chairlift.core.items.limits import BatchLimits
from chairlift.core.queue import ORDERS
from chairlift.errors import ConfigError

Kind = Literal["auto", "encoder", "onnx", "python"]

DEFAULT_MAX_BATCH_SIZE = 32

# Settings that only some kinds of model read.
_READ_BY: dict[str, tuple[Kind, ...]] = {
    "dtype": ("encoder",),
    "ops": ("encoder",),
    "quantization": ("encoder",),
    "max_model_len": ("encoder",),
    "max_batch_tokens": ("encoder",),
    "device": ("encoder", "onnx"),
    "outputs": ("onnx",),
    "options": ("python",),
}
_CLASS = re.compile(r"(?P<where>.+):(?P<name>[A-Za-z_]\w*)")


class ItemConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of one model that answers in one call. Raises ConfigError by name, also for what its kind does not read.

    `model` is a Hugging Face folder, a .onnx file, or a class as "module:Class" or "path/to/file.py:Class"; `kind`
    follows from it. `revision` is the one that was fetched of a model of the Hub. Kind "encoder" is any that embeds or
    classifies texts, a decoder's folder too. `max_batch_size` (items in one call) and `max_wait_ms` (for the oldest
    item, until the batch is full) default to what the model says, or else to 32 and 0. `max_model_len` bounds one
    item's tokens (default: the model's own), `max_batch_tokens` a batch's, `max_waiting` the items that wait,
    `max_queue_ms` the predicted time until they are done. A level of priority is worth `priority_ageing_ms` of waiting,
    and where `order` is "shortest", a unit of size (a token, or an item) `order_ageing_ms`.
    `target_latency_ms` lets batch size and wait follow from measured times and arrivals, so
    `max_wait_ms` is refused beside it. `timeout_ms` is the deadline of items that bring none;
    `call_timeout_s` is when a call counts as hung and its process is ended, `heartbeat_timeout_s` for how long that may
    be stopped by a signal. A call of background items is to take
    `background_step_ms` at most, or twice what a call costs by itself. A failed call is tried again up to `retries`
    times: one that raised in halves, if `bisect`, and one that ended or hung its process item by item, so each item's
    computation may run more than once. A `standby` worker takes part then: "auto" starts it where there is one
    instance, not on a GPU, and memory for another; "always" keeps it ready from the start.
    `warm_up_sizes=None` is powers of two up to the batch size; an empty list is no warm-up. `outputs` selects those of
    an ONNX model (default: all), `options` are keywords for a class's constructor.
    """

    model: str
    revision: str | None = None
    kind: Kind = "auto"
    served_model_name: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ops: Literal["auto", "native", "reference"] = "auto"
    quantization: Literal["none", "int8", "int4"] = "none"
    max_model_len: int | None = None
    max_batch_size: int | None = None
    max_wait_ms: float | None = None
    max_batch_tokens: int | None = None
    max_waiting: int = 4096
    max_queue_ms: float | None = None
    background_step_ms: float = 40.0
    order: Annotated[str, one_of(ORDERS)] = "arrival"
    order_ageing_ms: float = 1.0
    priority_ageing_ms: float = 1000.0
    target_latency_ms: float | None = None
    timeout_ms: float | None = None
    call_timeout_s: float | None = 60.0
    heartbeat_timeout_s: float = 3.0
    retries: int = 2
    bisect: bool = True
    instances: int = 1
    standby: Literal["auto", "always", "never"] = "auto"
    num_threads: int | None = None
    warm_up_sizes: tuple[int, ...] | None = None
    outputs: tuple[str, ...] | None = None
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Find the kind, and refuse contradictions and unknown choices by name."""
        check_choices(self)
        self._check_numbers()
        if self.kind == "auto":
            self.kind = detect_kind(self.model)
        if self.kind == "python":
            split_class(self.model)
        defaults = dict(zip(self.__struct_fields__[::-1], self.__struct_defaults__[::-1], strict=False))
        for name, kinds in _READ_BY.items():
            # The default of `options` is a factory, whose products are equal but not it.
            if self.kind not in kinds and getattr(self, name) != ({} if name == "options" else defaults[name]):
                raise ConfigError(
                    f"{name} has no effect on {self.model!r}, which is of kind {self.kind}: it belongs to "
                    f"{' and '.join(kinds)}; leave it out"
                )

    def _check_numbers(self) -> None:
        for name in ("max_model_len", "max_batch_size", "max_batch_tokens", "max_waiting", "instances", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        for name in ("max_wait_ms", "order_ageing_ms", "priority_ageing_ms", "retries"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < inf:
                raise ConfigError(f"{name} must be at least 0, got {value}")
        for name in ("max_queue_ms", "target_latency_ms", "timeout_ms", "call_timeout_s", "background_step_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ConfigError(f"{name} must be positive and finite, got {value}")
        if not 1 <= self.heartbeat_timeout_s < inf:
            raise ConfigError(f"heartbeat_timeout_s must be at least 1, got {self.heartbeat_timeout_s}")
        if self.target_latency_ms is not None and self.max_wait_ms:
            raise ConfigError("with target_latency_ms the wait follows from it; leave max_wait_ms out")
        if any(size < 1 for size in self.warm_up_sizes or ()):
            raise ConfigError(f"warm_up_sizes must be at least 1 each, got {list(self.warm_up_sizes or ())}")
        if self.outputs is not None and not self.outputs:
            raise ConfigError("outputs must name at least one; leave it out to have all")

    def limits(self, max_batch_size: int | None = None, max_wait_ms: float | None = None) -> BatchLimits:
        """What batches and the queue are held to; settings go before what the model, once known, says itself."""
        wait = max_wait_ms if self.max_wait_ms is None else self.max_wait_ms
        if self.target_latency_ms is not None:
            wait = None
        return BatchLimits(
            max_batch_size=self.max_batch_size or max_batch_size or DEFAULT_MAX_BATCH_SIZE,
            max_wait=(wait or 0.0) / 1000,
            max_batch_tokens=self.max_batch_tokens,
            max_waiting=self.max_waiting,
            max_queue_seconds=seconds(self.max_queue_ms),
            target_latency=seconds(self.target_latency_ms),
            order=self.order,
            order_ageing=self.order_ageing_ms / 1000,
            priority_ageing=self.priority_ageing_ms / 1000,
            background_step=self.background_step_ms / 1000,
            default_timeout=seconds(self.timeout_ms),
            retries=self.retries,
            bisect=self.bisect,
        )

    def warm_up_for(self, most: int) -> list[int]:
        """The batch sizes to warm up, given the most items that a call will hold."""
        if self.warm_up_sizes is not None:
            return list(self.warm_up_sizes)
        return [*(2**power for power in range((most - 1).bit_length())), most]


def detect_kind(model: str) -> Kind:
    """Tell what a model is from how it is named. Raises ConfigError for a Python file without a class."""
    if model.endswith(".onnx"):
        return "onnx"
    if model.endswith(".py"):
        raise ConfigError(f"model {model!r} is a Python file; name the class in it too, as {model}:Class")
    return "python" if _CLASS.fullmatch(model) else "encoder"


def split_class(model: str) -> tuple[str, str]:
    """Split "module:Class" or "file.py:Class" into where and what. Raises ConfigError for anything else."""
    found = _CLASS.fullmatch(model)
    if found is None:
        raise ConfigError(f"model {model!r} must be given as module:Class or path/to/file.py:Class")
    return found["where"], found["name"]
