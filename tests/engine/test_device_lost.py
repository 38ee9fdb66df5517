"""Errors after which nothing can be computed in a process: who runs into one ends, and does not go on failing."""

import sys
from typing import Any

import pytest
import torch
from support.model_factory import model_folder

from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.step import Step, StepResult
from chairlift.engine.device_lost import is_device_lost
from chairlift.engine.items.call import CallFailed
from chairlift.engine.items.worker import compute
from chairlift.engine.sequences.engine import Engine
from chairlift.runners.decoder.runner import DecoderRunner

# Older versions of torch raise a RuntimeError of the same text.
OWN: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)


class Wordless(RuntimeError):
    def __str__(self) -> str:
        raise TypeError("an error without a text")


class Own(RuntimeError):
    """Of a model's code."""


def of_onnx(text: str) -> Exception:
    """ONNX Runtime's are of classes that are derived from nothing but Exception."""
    module = "onnxruntime.capi.onnxruntime_pybind11_state"
    return type("RuntimeException", (Exception,), {"__module__": module})(f"Non-zero status code: {text} ; GPU=0")


def test_an_error_whose_text_cannot_be_had_is_not_the_device_s() -> None:
    assert not is_device_lost(Wordless())


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (OWN("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"), True),
        (OWN("CUDA error: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("index 7 is out of bounds"), False),
        (ValueError("no word of a CUDA error: it is the client's"), False),
        (RuntimeError("bad input: CUDA error"), False),
        (Own("CUDA error: so a client says"), False),
        (of_onnx("CUDA failure 700: an illegal memory access was encountered"), True),
        (of_onnx("CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED"), True),
        (of_onnx("CUDA failure 2: out of memory"), False),
        (of_onnx("CUDA failure 2: no room"), False),
        (of_onnx("CUDNN failure 3000: CUDNN_STATUS_NOT_SUPPORTED"), False),
        (of_onnx("Got invalid dimensions for input: x"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=str,
)
def test_which_errors_take_the_device_along(error: BaseException, lost: bool) -> None:
    assert is_device_lost(error) is lost


def test_without_torch_no_text_is_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert not is_device_lost(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_an_engine_whose_device_is_lost_does_not_carry_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SequenceConfig(model=str(model_folder()), max_model_len=400, kv_cache_gb=0.01, num_threads=1)
    engine = Engine(config, DecoderRunner(config))
    failures: list[Exception] = [RuntimeError("a mistake"), OWN("CUDA error: device-side assert triggered")]

    def fails(step: Step) -> StepResult:
        raise failures.pop(0)

    monkeypatch.setattr(engine.runner, "execute", fails)
    params = SamplingParams(temperature=0, max_tokens=None)
    for name in ("first", "second"):
        engine.add(Request(id=name, prompt_ids=[1, 2, 3], params=params, max_tokens=5, arrival=0.0))
        if name == "first":
            output = engine.step()
            assert output is not None
            assert [update.detail for update in output.updates] == ["RuntimeError: a mistake"]
            continue
        with pytest.raises(OWN, match="device-side assert"):
            engine.step()
    assert engine.num_unfinished == engine.scheduler.pool.num_used == 0


def test_a_call_whose_device_is_lost_ends_the_worker() -> None:
    """So no other call is answered by the same error, and the item at fault is found by whom it ends."""

    class Fails:
        def run(self, payloads: list[Exception]) -> list[int]:
            raise payloads[0]

    fails: Any = Fails()
    with pytest.raises(CallFailed):
        compute(fails, [RuntimeError("a mistake")])
    with pytest.raises(OWN, match="device-side assert"):
        compute(fails, [OWN("CUDA error: device-side assert triggered")])


def test_an_item_whose_device_is_lost_ends_the_worker() -> None:
    class Gives:
        def run(self, payloads: list[object]) -> list[object]:
            return payloads

    gives: Any = Gives()
    assert len(compute(gives, [1, of_onnx("Got invalid dimensions")]).results) == 2
    with pytest.raises(Exception, match="CUDA failure 700"):
        compute(gives, [1, of_onnx("CUDA failure 700: an illegal memory access was encountered")])
