"""Chairlift: one inference server, and the batching strategy that suits each model.

Names are imported when first used, so that `import chairlift` costs milliseconds and the HTTP front never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chairlift.core.sequences.sampling_params import SamplingParams, StructuredOutputsParams
    from chairlift.errors import BadItem
    from chairlift.library.async_llm import AsyncLLM
    from chairlift.library.batching import batched
    from chairlift.library.beam_search import BeamSearchParams
    from chairlift.library.llm import LLM
    from chairlift.library.outputs import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BadItem",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "__version__",
    "batched",
]

_HOMES = {
    "AsyncLLM": "chairlift.library.async_llm",
    "BadItem": "chairlift.errors",
    "BeamSearchParams": "chairlift.library.beam_search",
    "LLM": "chairlift.library.llm",
    "batched": "chairlift.library.batching",
    "SamplingParams": "chairlift.core.sequences.sampling_params",
    "StructuredOutputsParams": "chairlift.core.sequences.sampling_params",
    "CompletionOutput": "chairlift.library.outputs",
    "RequestOutput": "chairlift.library.outputs",
    "ClassificationRequestOutput": "chairlift.library.outputs",
    "EmbeddingRequestOutput": "chairlift.library.outputs",
    "ScoringRequestOutput": "chairlift.library.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'chairlift' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
