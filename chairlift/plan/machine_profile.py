"""What a machine and its models were measured to take: recorded steps and calls, saved as JSON."""

from math import inf
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from chairlift.core.cost import Coefficients, ExpertReads
from chairlift.errors import ConfigError

# Fewer than this tell too little to draw from.
LEAST_SAMPLES = 8

SampleT = TypeVar("SampleT", "StepSample", "CallSample")
ProfileT = TypeVar("ProfileT", bound="SequenceProfile | ItemProfile")


class StepSample(msgspec.Struct, array_like=True, frozen=True):
    """A step as it was recorded: what it held, as in `CostModel`, and the seconds that it took.

    `gap` is how many seconds later the next one began, where nothing else kept the worker waiting. Of a server's own
    traffic it is known when it began, in seconds from the first request's arrival.
    """

    sequences: int
    tokens: int
    kv_tokens: int
    pairs: int
    seconds: float
    gap: float | None = None
    began: float | None = None


class CallSample(msgspec.Struct, array_like=True, frozen=True):
    """A call of a model of items as it was recorded: items, their computed size, and the seconds that it took.

    Of a server's own traffic more is known. One is when it `began`, in seconds from the first request's arrival: when
    it was sent, or if that was ahead of its time, when the front heard of the end of the call before it. Another is
    its `lag`: how many seconds passed until the front heard of its end, and if it was not sent ahead, as many before it
    began. If it was, its instance had other things to do for so many, the `gap`, after the call before it. Its `hold`
    is how long the front took to send it, once there were an item and an instance that had nothing to do.
    """

    items: int
    computed: float
    seconds: float
    began: float | None = None
    lag: float | None = None
    gap: float | None = None
    hold: float | None = None


class SequenceProfile(msgspec.Struct, kw_only=True, tag="sequences"):
    """A language model on its machine. Steps are in the order in which they were recorded.

    `cost` is what steps are predicted to take; how far the recorded ones are from that, simulated ones will be too.
    Where it has `experts`, the cost of a step is that of one which reads them all.
    Of memory it had `weight_bytes` and `kv_bytes`; 0 where nobody noted that. Where layers have states it had room for
    `num_snapshots` of them.
    """

    model: str
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    cost: Coefficients
    steps: list[StepSample]
    weight_bytes: int = 0
    kv_bytes: int = 0
    num_snapshots: int | None = None
    experts: ExpertReads | None = None


class ItemProfile(msgspec.Struct, kw_only=True, tag="items"):
    """A model that answers in one call: `call` + `size` * computed seconds, and calls as they were recorded.

    A call kept `cores` of the machine's `cpus` busy on average, and a worker had `process_bytes` of memory, of which
    `weight_bytes` are weights; 0 where nobody noted that. `max_tokens` bounds an input, and the settings are the
    model's own defaults, where it has any.
    """

    model: str
    call: float
    size: float
    calls: list[CallSample]
    cores: float = 0.0
    cpus: int = 0
    weight_bytes: int = 0
    process_bytes: int = 0
    max_tokens: int | None = None
    max_batch_size: int | None = None
    max_wait_ms: float | None = None


class FrontCost(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Seconds of the front's one thread, for each request, token, item or batch, and of the way to a worker or back.

    `between` is what a worker takes between two calls of which the second was there before the first was over.
    While the front works, a worker that uses all cores is slower: for each second that requests, prompts and items take
    it is `contention` seconds later. There is none where there are cores to spare, or where steps were recorded under
    such load.
    """

    request: float = 0.0
    prompt_token: float = 0.0
    output_token: float = 0.0
    item: float = 0.0
    batch: float = 0.0
    hop: float = 0.0
    between: float = 0.0
    contention: float = 0.0


class MachineProfile(msgspec.Struct, kw_only=True):
    """A machine, in words, what its front costs, and the models that were measured on it, by name.

    `settings` are those that what was measured depends on, where they are known.
    """

    machine: str
    settings: dict[str, Any] = {}
    front: FrontCost = FrontCost()
    models: dict[str, SequenceProfile | ItemProfile] = {}

    @classmethod
    def load(cls, path: Path) -> "MachineProfile":
        """Read a profile. Raises ConfigError, saying what is wrong with it."""
        try:
            profile = msgspec.json.decode(path.read_bytes(), type=cls)
            profile.check()
        except OSError as error:
            raise ConfigError(f"profile {path}: {error.strerror}") from None
        except (msgspec.DecodeError, ValueError) as error:
            raise ConfigError(f"profile {path}: {error}") from None
        return profile

    def save(self, path: Path) -> None:
        """Write it, indented, so that two of them can be compared."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))

    def check(self) -> None:
        """Raise ValueError, naming the model and what is wrong, for numbers that nothing can be simulated with."""
        _check_front(self.front)
        for name, model in self.models.items():
            if isinstance(model, SequenceProfile):
                _check_sequences(f"models.{name}", model)
            else:
                _check_calls(f"models.{name}", model)


def _check_front(front: FrontCost) -> None:
    for name, value in msgspec.structs.asdict(front).items():
        _check_seconds(f"front.{name}", value)


def _check_sequences(where: str, model: SequenceProfile) -> None:
    for field in ("max_model_len", "num_blocks", "block_size", "max_num_batched_tokens"):
        if getattr(model, field) < 1:
            raise ValueError(f"{where}.{field} must be at least 1, got {getattr(model, field)}")
    if (model.num_snapshots or 0) < 0:
        raise ValueError(f"{where}.num_snapshots must be at least 0, got {model.num_snapshots}")
    for field, value in zip(ExpertReads._fields, model.experts or (), strict=False):
        if not 0 <= value <= 1:
            raise ValueError(f"{where}.experts.{field} must be from 0 to 1, got {value}")
    for field, value in zip(Coefficients._fields, model.cost, strict=True):
        _check_seconds(f"{where}.cost.{field}", value)
    _check_count(f"{where}.steps", model.steps)
    for index, step in enumerate(model.steps):
        at = f"{where}.steps[{index}]"
        if not 1 <= step.sequences <= step.tokens <= step.kv_tokens or step.pairs < step.tokens:
            raise ValueError(f"{at} holds {step.sequences} sequences with {step.tokens} tokens: impossible counts")
        _check_seconds(f"{at}.seconds", step.seconds, above_zero=True)
        _check_seconds(f"{at}.gap", step.gap or 0.0)


def _check_calls(where: str, model: ItemProfile) -> None:
    for field in ("call", "size", "cores", "cpus"):
        _check_seconds(f"{where}.{field}", getattr(model, field))
    _check_count(f"{where}.calls", model.calls)
    for index, call in enumerate(model.calls):
        at = f"{where}.calls[{index}]"
        if call.items < 1 or not 0 < call.computed < inf:
            raise ValueError(f"{at} holds {call.items} items of size {call.computed}: both must be positive")
        _check_seconds(f"{at}.seconds", call.seconds, above_zero=True)
        _check_seconds(f"{at}.lag", call.lag or 0.0)
        _check_seconds(f"{at}.gap", call.gap or 0.0)
        _check_seconds(f"{at}.hold", call.hold or 0.0)


def _check_count(where: str, samples: list[SampleT]) -> None:
    if len(samples) < LEAST_SAMPLES:
        raise ValueError(f"{where} has {len(samples)} samples, and at least {LEAST_SAMPLES} are needed; measure again")


def _check_seconds(where: str, value: float, above_zero: bool = False) -> None:
    if not 0 <= value < inf or (above_zero and value == 0):
        raise ValueError(f"{where} must be {'more than' if above_zero else 'at least'} 0 and finite, got {value}")
