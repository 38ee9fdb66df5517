"""Decodes as recorded give what they give as they are, whatever they are padded with."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.decoder_harness import Harness, make_request, make_runner, prompts, requests
from support.foreign_factory import FOREIGN, foreign_folder
from support.model_factory import model_folder
from torch import Tensor

from chairlift.ops.base import Forward, Inputs
from chairlift.runners.decoder.model import Decoder
from chairlift.runners.decoder.recorded_steps import GraphRecorder, RecordedSteps, Run, _padded
from chairlift.runners.decoder.runner import DecoderRunner
from chairlift.runners.decoder.transformers_model import TransformersModel


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


def foreign_runner(name: str, device: str = "cpu", dtype: str = "float32") -> tuple[DecoderRunner, TransformersModel]:
    folder = foreign_folder(FOREIGN[name][0], name)
    settings = {"device": device, "dtype": dtype, "max_model_len": 400}
    runner = make_runner(folder, implementation="transformers", **settings)
    assert isinstance(runner.model, TransformersModel)
    return runner, runner.model


def record_foreign(
    runner: DecoderRunner, model: TransformersModel, forward: Forward, record: Callable[[Run], Run]
) -> None:
    size = runner.info.block_size
    with torch.inference_mode():
        model.record(RecordedSteps(forward, size, 400, record), runner.info.num_blocks, size, 400)


@pytest.mark.parametrize("name", ["opt", "phimoe", "cohere2"])
def test_tokens_of_models_through_transformers_are_the_same(name: str) -> None:
    (runner, model), (plain, _) = foreign_runner(name), foreign_runner(name)
    recorded: list[Run] = []

    def record(compute: Run) -> Run:
        recorded.append(compute)
        return compute

    record_foreign(runner, model, model._forward, record)
    # The shape that it was tried with.
    assert len(recorded) == 1
    assert Harness(runner).generate(requests(), 30) == Harness(plain).generate(requests(), 30)
    assert len(recorded) == 2


def test_a_model_that_waits_for_the_gpu_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    runner, model = foreign_runner("opt")

    def record(compute: Run) -> Run:
        raise RuntimeError("called a synchronizing CUDA operation")

    record_foreign(runner, model, model._forward, record)
    assert model.recorded is None
    assert "not recorded as CUDA graphs, which makes them slow: called a synchronizing" in caplog.text
    assert Harness(runner).generate([requests()[0]], 4)


def test_a_model_whose_recording_gives_something_else_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """As one does that has looked at where its tokens are when it was recorded."""
    runner, model = foreign_runner("opt")
    places: list[Tensor] = []

    def forward(inputs: Inputs) -> Tensor:
        if inputs.attention.max_query_len == 1:
            places[:] = places or [inputs.attention.positions.clone()]
            inputs = replace(inputs, attention=replace(inputs.attention, positions=places[0]))
        return model._forward(inputs)

    record_foreign(runner, model, forward, lambda compute: compute)
    assert model.recorded is None
    assert "a recorded step gives something else" in caplog.text


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


def test_a_shape_that_memory_has_run_out_for_is_computed_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """And is not tried again: each time a step would have been for nothing."""
    runner, tried = make_runner(model_folder("llama"), device="cpu", max_model_len=400), list[Run]()
    plain = Harness(make_runner(model_folder("llama"), device="cpu", max_model_len=400))

    def record(compute: Run) -> Run:
        tried.append(compute)
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = runner.model
    assert isinstance(model, Decoder)
    model.recorded = RecordedSteps(model._forward, runner.info.block_size, 400, record)
    assert Harness(runner).generate([requests()[0]], 30) == plain.generate([requests()[0]], 30)
    assert len(tried) == 1
    assert not model.recorded.has_recordings
    assert "1 sequences over 256 tokens are not recorded, for want of memory" in caplog.text


def test_steps_of_too_many_keys_are_computed_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.runners.decoder.recorded_steps._MOST_KEYS", 2 * 256)
    runner, recorded = recording_runner("llama")
    for count, known in ((3, 0), (2, 1), (1, 2)):
        Harness(runner).generate([make_request(f"{count}-{index}", [5, 6, index]) for index in range(count)], 4)
        assert len(recorded) == known


def test_nothing_is_collected_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def pool(self) -> int:
            return 1

        def replay(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **settings: contextlib.nullcontext())
    collects = [gc.isenabled()]
    GraphRecorder()(lambda: collects.append(gc.isenabled()))
    assert [*collects, gc.isenabled()] == [True, False, True]


def test_a_model_whose_steps_are_recorded_is_gone_once_it_is_closed() -> None:
    runner = recording_runner("llama")[0]
    # Of one token there is no recording: what stands in for one holds the model, as a graph does not.
    Harness(runner).generate([requests()[0]], 1)
    model = weakref.ref(runner.model)
    gc.disable()
    try:
        runner.close()
        assert model() is None
    finally:
        gc.enable()


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", ["opt", "cohere2", "starcoder2"])
def test_models_through_transformers_are_recorded_on_cuda(name: str) -> None:
    runner, model = foreign_runner(name, "cuda", "bfloat16")
    assert model.recorded is not None
    harness = Harness(runner)
    found = harness.generate(requests(), 30)
    model.recorded = None
    assert harness.generate(requests(), 30) == found
