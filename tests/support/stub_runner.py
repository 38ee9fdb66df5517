"""A model for workers of which only the process is tested: it computes nothing, and spares them seconds of torch."""

import os
import sys
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from support.sequences_virtual import Machine, VirtualRunner

from chairlift.config.sequences import SequenceConfig
from chairlift.core.cost import Coefficients
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.step import Step, StepResult
from chairlift.runners.sequences import SequenceInfo

if TYPE_CHECKING:
    import pytest

TESTS = Path(__file__).parents[1]
# Long enough for a test to meet a worker amid an answer.
STEP = Coefficients(1e-3, 0.0, 0.0, 0.0)


class StubRunner(VirtualRunner):
    """Steps take a millisecond, whatever they hold, and answers all their tokens."""

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__(Machine(STEP, num_blocks=500), seed=0)

    def load(self) -> SequenceInfo:
        # As large as that of any tokenizer in tests.
        return msgspec.structs.replace(super().load(), vocab_size=200_000)

    def _end_of(self, request: Request) -> int:
        return 0

    def execute(self, step: Step) -> StepResult:
        result = super().execute(step)
        time.sleep(result.seconds)
        return result

    def close(self) -> None:
        pass


def take_the_decoders_place() -> None:
    """Have a worker that asks for the decoder get this."""
    module = types.ModuleType("chairlift.runners.decoder.runner")
    module.__dict__["DecoderRunner"] = StubRunner
    sys.modules[module.__name__] = module


def without_torch() -> dict[str, str]:
    """Variables for a server whose workers compute nothing."""
    return {"PYTHONPATH": os.pathsep.join(map(str, (TESTS / "support" / "without_torch", TESTS, TESTS.parent)))}


def spare_workers_torch(patch: "pytest.MonkeyPatch") -> None:
    """Have workers that start from now on compute nothing."""
    for name, value in without_torch().items():
        patch.setenv(name, value)
