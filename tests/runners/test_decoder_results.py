"""Whatever a step gives comes to the host in one copy."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from support.decoder_harness import GREEDY, Harness, make_request, make_runner
from support.model_factory import model_folder

from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.runners.decoder import runner

PARAMS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(seed=1, max_tokens=None, top_p=0.9, logprobs=2),
    "prompt": SamplingParams(temperature=0, max_tokens=None, prompt_logprobs=1, logprobs=0),
    "penalized": SamplingParams(seed=2, max_tokens=None, presence_penalty=1.0, top_k=9),
}


@pytest.mark.parametrize("names", [["greedy"], ["drawn", "greedy"], list(PARAMS)], ids=len)
def test_results_are_brought_over_once_a_step(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [make_request(name, [5, 6, 7, 8, 9] * 20, PARAMS[name]) for name in names]
    harness = Harness(make_runner(model_folder("llama")))
    expected = harness.generate(requests, 3, chunk=40)
    copies: list[int] = []

    def all_at_once(tensors: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
        """As from another device."""
        copies.append(len(tensors))
        return runner.split(runner.pack(tensors).cpu().numpy(), tensors) if tensors else []

    monkeypatch.setattr(runner, "to_host", all_at_once)
    for request in requests:
        harness.add(request)
    results = [harness.step({name: min(40, harness.remaining(name)) for name in names}) for _ in range(5)]
    # Two chunks that sample nothing, then a token in each step.
    assert len(copies) == len(results)
    assert copies[:2] == [5 * ("prompt" in names)] * 2
    assert all(count >= 2 for count in copies[2:])
    assert {name: [result.tokens[name][0] for result in results[2:]] for name in names} == expected
    if "prompt" in names:
        assert [len(result.prompt_logprobs.get("prompt", ())) for result in results] == [40, 40, 19, 0, 0]
        assert all(result.logprobs["prompt"][0].top == [] for result in results[2:])


def test_a_step_that_gives_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are results, reading them waits."""
    waited: list[torch.device] = []
    harness = Harness(make_runner(model_folder("llama")))
    monkeypatch.setattr(runner, "wait_for", waited.append)
    harness.add(make_request("long", [5, 6, 7, 8, 9] * 20))
    for _ in range(4):
        harness.step(chunk=40)
    assert waited == [harness.runner.model.device] * 2


def test_waiting_is_for_what_was_asked_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            waited.append("synchronized")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    runner.wait_for(torch.device("cpu"))
    assert not waited
    runner.wait_for(torch.device("cuda"))
    assert waited == ["synchronized"]
