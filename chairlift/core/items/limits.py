"""What the batches of a model that answers in one call, and those who wait for them, are held to."""

from math import inf

import msgspec

from chairlift.core.queue import ORDERS, QueueOrder

# What may change while items wait and run.
_LIVE = ("max_batch_size", "max_wait", "target_latency")


class BatchLimits(msgspec.Struct, kw_only=True, frozen=True):
    """Settings of a `ItemScheduler`, in items, sizes (as in `Item.size`) and seconds. Raises ValueError if absurd.

    A batch holds at most `max_batch_size` items, for which the runner computes at most `max_batch_tokens` (padding
    included). It leaves when an instance is free and it is full, or its oldest item has waited `max_wait`. With
    `target_latency` both follow from what calls take and how fast items arrive, so that answers come within it: then
    `max_wait` must be 0, and `max_batch_size` is the most. It refuses nobody: that is for deadlines.

    `max_waiting` items, and `max_queue_seconds` of predicted work, may wait; `default_timeout` is the deadline of items
    that bring none. One level of priority is worth `priority_ageing` seconds of waiting, and where `order` is
    "shortest", one unit of size `order_ageing`. A batch of background items is to take `background_step` seconds at
    most, or twice what a call costs by itself. As many of them may wait; they have no deadline unless they bring one.

    A runner that pads each item to the longest sets `sort_window`: the most urgent so many batches' worth of those
    who wait, among whom those of like length are put together; 0 says that nothing is padded. Nobody is passed over by
    later items of its shape in more than `max_passed_over` batches.

    A call that raised, or ran out of memory, is tried again in halves if `bisect`. One that died or timed out is tried
    again item by item, each until it was in `retries` such calls more than its first; 0 tries nothing again.
    """

    max_batch_size: int = 32
    max_wait: float = 0.0
    max_batch_tokens: float | None = None
    max_waiting: int = 1024
    max_queue_seconds: float | None = None
    target_latency: float | None = None
    default_timeout: float | None = None
    order: str = "arrival"
    order_ageing: float = 0.001
    priority_ageing: float = 1.0
    background_step: float = 0.04
    sort_window: int = 0
    max_passed_over: int = 16
    retries: int = 2
    bisect: bool = True

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {self.order!r}")
        for name in ("max_batch_size", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_wait", "priority_ageing", "order_ageing", "sort_window", "max_passed_over", "retries"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("background_step", "max_batch_tokens", "max_queue_seconds", "target_latency", "default_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{name} must be more than 0, got {value}")
        if self.target_latency is not None and self.max_wait:
            raise ValueError("with target_latency the wait follows from it; leave max_wait at 0")

    def check_live(self, other: "BatchLimits") -> None:
        """Raise ValueError unless a queue with items may go on with these others."""
        for name in self.__struct_fields__:
            if name not in _LIVE and getattr(self, name) != getattr(other, name):
                raise ValueError(f"{name} can't change once there are items")

    @property
    def queue_order(self) -> QueueOrder:
        """Who of those who wait is next."""
        return QueueOrder(self.order, self.priority_ageing, self.order_ageing)
