"""Decodes as recorded give what they give as they are, whatever they are padded with."""

import pytest
import torch
from support.decoder_harness import Harness, make_request, make_runner, prompts, requests
from support.model_factory import model_folder

from chairlift.runners.decoder.model import Decoder
from chairlift.runners.decoder.recorded_steps import RecordedSteps, Run, _padded
from chairlift.runners.decoder.runner import DecoderRunner


def recording_runner(variant: str) -> tuple[DecoderRunner, list[Run]]:
    """A runner whose decodes are recorded, as far as that goes without a GPU: they read and write the same memory."""
    runner, recorded = make_runner(model_folder(variant), device="cpu", max_model_len=400), list[Run]()

    def record(compute: Run) -> Run:
        recorded.append(compute)
        return compute

    model = runner.model
    assert isinstance(model, Decoder)
    model.recorded = RecordedSteps(model._forward, runner.info.block_size, 400, record)
    return runner, recorded


@pytest.mark.parametrize("variant", ["llama", "gemma3", "gpt2"])
def test_tokens_are_the_same(variant: str) -> None:
    """Of sequences that come and go, so that steps have 1, 7 and 9 of them, over contexts of two shapes."""
    runner, recorded = recording_runner(variant)
    harness, plain = Harness(runner), Harness(make_runner(model_folder(variant), device="cpu", max_model_len=400))
    more = [make_request(f"more{index}", prompts()["100"][index:]) for index in range(2)]
    assert harness.generate(requests(), 30, chunk=60) == plain.generate(requests(), 30, chunk=60)
    assert harness.generate(requests() + more, 30) == plain.generate(requests() + more, 30)
    alone = requests()[0]
    assert harness.generate([alone], 30) == plain.generate([alone], 30)
    # 1, 7 and 10 over the longest context that there may be, and 1 over a short one.
    assert len(recorded) == 4


def test_a_shape_that_is_met_once_is_not_recorded() -> None:
    runner, recorded = recording_runner("llama")
    harness = Harness(runner)
    harness.add(requests()[3])
    for met, known in ((0, 0), (1, 0), (2, 1), (3, 1)):
        harness.step()
        assert len(recorded) == known, met


def test_the_oldest_shapes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.runners.decoder.recorded_steps._MOST", 2)
    runner, recorded = recording_runner("llama")
    harness = Harness(runner)
    for count in (1, 2, 1, 3, 1, 2):
        harness.generate([make_request(f"{count}-{index}", [5, 6, index]) for index in range(count)], 4)
    # 1, 2, 3, and 2 again; 1 was used each time.
    assert len(recorded) == 4


def test_few_shapes_and_little_padding() -> None:
    padded = [_padded(count) for count in range(1, 513)]
    assert padded[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(set(padded)) == 32
    assert all(count <= there <= 1.25 * count for count, there in zip(range(1, 513), padded, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_steps_are_recorded_on_cuda() -> None:
    runner = make_runner(model_folder("llama", "bfloat16"), device="cuda")
    model = runner.model
    assert isinstance(model, Decoder)
    assert model.recorded is not None
    harness = Harness(runner)
    found = harness.generate(requests(), 30)
    assert [step.run is not None for step in model.recorded._steps.values()] == [True]
    model.recorded = None
    assert harness.generate(requests(), 30) == found
