"""Every setting of one language model, with its default, in one place."""

from math import inf, isfinite
from typing import Annotated, Literal

import msgspec

from chairlift.config.choices import check_choices, one_of
from chairlift.config.units import seconds
from chairlift.core.cost import CostModel, ExpertReads
from chairlift.core.queue import ORDERS, QueueOrder
from chairlift.core.sequences.blocks import BlockPool
from chairlift.core.sequences.budget import LatencyBudget, StepTimeBudget
from chairlift.core.sequences.forecast import StepLimits
from chairlift.core.sequences.live_settings import LiveSettings
from chairlift.core.sequences.overload import LoadShedder
from chairlift.core.sequences.scheduler import SequenceScheduler
from chairlift.core.sequences.snapshots import SnapshotPool
from chairlift.core.sequences.strategy import STRATEGIES, make_strategy, readers_of
from chairlift.errors import ConfigError

# How a model writes calls of tools; "auto" is what its folder says, "none" that it writes none.
ToolDialect = Literal[
    "auto",
    "none",
    "hermes",
    "llama",
    "mistral",
    "mistral_nemo",
    "mistral_args",
    "pythonic",
    "deepseek",
    "deepseek_v31",
    "glm",
    "glm_47",
    "qwen_xml",
    "seed",
    "gemma",
    "function_gemma",
    "harmony",
    "lfm2",
    "granite",
    "phi",
    "command",
]

# Tokens that prompts or answers may be expected to have.
_MOST_EXPECTED = 2**20
# KV memory for what runs, and as much for prefixes that are kept.
_KEPT = 2


class SequenceConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of one model's engine. Each is also a CLI flag, a CHAIRLIFT_ variable and a key of chairlift.toml.

    `strategy` is a row of `STRATEGIES`, which says which settings have an effect under it; of `batch_size`,
    `max_num_seqs`, `max_wait_ms` and the like others must be left at their defaults. `kv_cache_gb=None` and
    `max_model_len=None` are derived from the machine and the model. A step in which some decode and others read prompts
    is to take at most `step_time_ms` (0: any time), or `target_itl_ms` where there is one, and one with background
    requests in it at most `background_step_ms`. Who would have the first token later than `target_ttft_ms` after
    arrival is refused. A level of priority is worth `priority_ageing_ms` of waiting, and where `order` is "shortest", a
    token of prompt or output `order_ageing_ms`. A worker is ended, and another started, if its process is stopped for
    `heartbeat_timeout_s`, or if it is at a step for `step_timeout_s` and 20 times what that should take. With `auto` a
    server turns what it may below what is set here, and with a target unless that is false. What requests are like, if
    that is said, is what answers' lengths are taken to be until some have ended, and what KV memory is for. What the
    folder's generation_config.json says of sampling holds for requests that say nothing, unless it is "none".
    Raises ConfigError naming the setting.
    """

    model: str
    revision: str | None = None
    served_model_name: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ops: Literal["auto", "native", "reference"] = "auto"
    implementation: Literal["auto", "native", "transformers"] = "auto"
    strategy: Annotated[str, one_of(STRATEGIES)] = "continuous"
    batch_size: int = 8
    max_wait_ms: float = 5.0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    step_time_ms: float = 300.0
    target_itl_ms: float | None = None
    target_ttft_ms: float | None = None
    background_step_ms: float = 40.0
    order: Annotated[str, one_of(ORDERS)] = "arrival"
    order_ageing_ms: float = 1.0
    priority_ageing_ms: float = 1000.0
    max_model_len: int | None = None
    block_size: int = 16
    expected_input_tokens: int | None = None
    expected_output_tokens: int | None = None
    kv_cache_gb: float | None = None
    quantization: Literal["none", "int8", "int4"] = "none"
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    enable_prefix_caching: bool = True
    tool_dialect: ToolDialect = "auto"
    generation_config: Literal["auto", "none"] = "auto"
    seed: int = 0
    num_threads: int | None = None
    heartbeat_timeout_s: float = 3.0
    step_timeout_s: float = 30.0
    auto: bool | None = None

    def __post_init__(self) -> None:
        """Refuse contradictions and unknown choices by name."""
        check_choices(self)
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not isfinite(value):
                raise ConfigError(f"{name} must be a finite number, got {value}")
        for name in ("batch_size", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_wait_ms", "step_time_ms", "order_ageing_ms", "priority_ageing_ms"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.heartbeat_timeout_s < 1:
            raise ConfigError(f"heartbeat_timeout_s must be at least 1, got {self.heartbeat_timeout_s}")
        times = ("target_itl_ms", "target_ttft_ms", "background_step_ms", "step_timeout_s")
        counts = ("max_model_len", "num_threads", "expected_input_tokens", "expected_output_tokens")
        for name in ("kv_cache_gb", *counts, *times):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive, got {value}")
        for name in ("expected_input_tokens", "expected_output_tokens"):
            if (getattr(self, name) or 0) > _MOST_EXPECTED:
                raise ConfigError(f"{name} must be at most {_MOST_EXPECTED}, got {getattr(self, name)}")
        defaults = dict(zip(self.__struct_fields__[::-1], self.__struct_defaults__[::-1], strict=False))
        for name, default in defaults.items():
            strategies = readers_of(name)
            if strategies and self.strategy not in strategies and getattr(self, name) != default:
                raise ConfigError(
                    f"{name} has no effect under the {self.strategy} strategy: it belongs to "
                    f"{' and '.join(strategies)}; leave it out, or choose another strategy"
                )
        if self.max_num_batched_tokens < self.slots:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least the number of slots "
                f"({self.slots}), or a running sequence could get no token in a step"
            )

    @property
    def expected_tokens(self) -> int | None:
        """Tokens of a request as they are expected, prompt and answer; None unless both are said."""
        if self.expected_input_tokens is None or self.expected_output_tokens is None:
            return None
        return self.expected_input_tokens + self.expected_output_tokens

    def expected_blocks(self, block_size: int) -> int | None:
        """KV blocks for slots full of such requests, and as many for prefixes that are kept; None if nobody said."""
        if self.expected_tokens is None:
            return None
        return _KEPT * self.slots * -(-self.expected_tokens // block_size)

    @property
    def slots(self) -> int:
        """The most sequences that may run at once under the chosen strategy."""
        setting = STRATEGIES[self.strategy].slots_setting
        return 1 if setting is None else int(getattr(self, setting))

    # What these settings say, as the engine, its front and the simulator have it

    @property
    def queue_order(self) -> QueueOrder:
        """Who of those who wait is next."""
        return QueueOrder(self.order, self.priority_ageing_ms / 1000, self.order_ageing_ms / 1000)

    def make_scheduler(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        num_snapshots: int | None = None,
        experts: ExpertReads | None = None,
    ) -> SequenceScheduler:
        """Return a scheduler for a loaded model with so many KV blocks, of so many tokens each.

        `num_snapshots` is None where no layer has a state, and `experts` where there are none. One cost model learns
        for all its budgets.
        """
        most, target, step_time = self.max_num_batched_tokens, seconds(self.target_itl_ms), self._step_time
        meter = LatencyBudget(inf, most, CostModel(experts=experts))
        budget = None if step_time is None else StepTimeBudget(step_time, most, meter.model)
        return SequenceScheduler(
            make_strategy(self.strategy, self.slots, self.max_wait_ms / 1000),
            BlockPool(num_blocks),
            block_size=block_size,
            max_num_batched_tokens=most,
            max_model_len=max_model_len,
            enable_prefix_caching=self.enable_prefix_caching,
            snapshots=None if num_snapshots is None else SnapshotPool(num_snapshots, block_size),
            budget=budget if target is None else LatencyBudget(target, most, meter.model),
            background_budget=LatencyBudget(min(self.background_step_ms / 1000, target or inf), most, meter.model),
            meter=meter,
            order=self.queue_order,
        )

    def make_shedder(self) -> LoadShedder:
        """Return what says who is let in."""
        return LoadShedder(seconds(self.target_ttft_ms), self.queue_order, self.expected_output_tokens)

    def step_limits(self, num_blocks: int, block_size: int) -> StepLimits | None:
        """What steps are held to; None where a closed batch waits for company, whose time nobody knows."""
        if STRATEGIES[self.strategy].closes_batch:
            return None
        target = seconds(self.target_itl_ms)
        return StepLimits(self.slots, self.max_num_batched_tokens, num_blocks, block_size, target, self._step_time)

    @property
    def live_settings(self) -> LiveSettings:
        """What of these may change while the model runs."""
        return LiveSettings(
            self.slots,
            self.max_num_batched_tokens,
            self.max_wait_ms / 1000,
            self.background_step_ms / 1000,
            self._step_time,
            seconds(self.target_itl_ms),
        )

    @property
    def tunes(self) -> bool:
        """Whether settings are to follow the traffic: `auto` says so, or else a target."""
        if self.auto is not None:
            return self.auto
        return self.target_itl_ms is not None or self.target_ttft_ms is not None

    @property
    def _step_time(self) -> float | None:
        """Seconds that prompts may make others' steps take, where neither a target nor the strategy says so."""
        if self.strategy not in readers_of("step_time_ms") or self.target_itl_ms is not None:
            return None
        return seconds(self.step_time_ms or None)
