"""A model's configuration and statistics, as Triton tells them; either protocol's, since both have the same fields."""

from collections.abc import Iterable
from typing import Any

from chairlift.runners.items import TensorSpec
from chairlift.server.models.item_service import ItemService
from chairlift.server.oip.tensor_items import signature

_TYPES = {"BYTES": "TYPE_STRING"}


def model_config(service: ItemService) -> dict[str, Any]:
    """A ModelConfig: its tensors, and how requests are batched. Raises Unavailable while it is not loaded."""
    info, limits = service.loaded(), service.dispatcher.limits
    inputs, outputs = signature(info)
    config: dict[str, Any] = {
        "name": service.name,
        "platform": f"chairlift_{info.task}",
        "backend": "chairlift",
        # As Triton has it, 0 says that shapes have no batch dimension.
        "max_batch_size": limits.max_batch_size if info.batch_axis else 0,
        "input": [_tensor(spec) for spec in inputs],
        "output": [_tensor(spec) for spec in outputs],
        "model_transaction_policy": {"decoupled": info.streams},
    }
    if info.batch_axis:
        delay = int(limits.max_wait * 1e6)
        config["dynamic_batching"] = {
            "preferred_batch_size": [limits.max_batch_size],
            "max_queue_delay_microseconds": delay,
        }
    return config


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    # Triton has no tensors without dimensions.
    return {
        "name": spec.name,
        "data_type": _TYPES.get(spec.datatype, f"TYPE_{spec.datatype}"),
        "dims": list(spec.shape) or [1],
    }


def model_statistics(services: Iterable[ItemService]) -> list[dict[str, Any]]:
    """A ModelStatistics of each model and version, since it was loaded."""
    return [_statistics(service) for service in services]


def _statistics(service: ItemService) -> dict[str, Any]:
    counts, nothing = service.metrics.counts, _duration(0, 0.0)
    return {
        "name": service.name,
        "version": service.version,
        "last_inference": int(counts.last * 1000),
        "inference_count": counts.items,
        "execution_count": sum(count for count, _ in counts.batches.values()),
        "inference_stats": {
            "success": _duration(counts.requests, counts.queue_s + counts.run_s),
            "fail": _duration(counts.failed, 0.0),
            "queue": _duration(counts.requests, counts.queue_s),
            # What goes before and after a call is part of the call here.
            "compute_input": nothing,
            "compute_infer": _duration(counts.requests, counts.run_s),
            "compute_output": nothing,
        },
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": nothing,
                "compute_infer": _duration(count, seconds),
                "compute_output": nothing,
            }
            for size, (count, seconds) in sorted(counts.batches.items())
        ],
    }


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": int(seconds * 1e9)}
