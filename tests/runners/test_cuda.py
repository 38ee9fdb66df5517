"""On CUDA, tokens are chosen as on the CPU."""

import numpy as np
import pytest
import torch
from support.decoder_harness import Harness, make_request, make_runner, prompts
from support.model_factory import model_folder

from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.ops.base import Draws
from chairlift.ops.drawing import exclude_tokens
from chairlift.ops.encoder import text_means
from chairlift.ops.reference import ReferenceLinear, ReferenceOps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
CUDA = torch.device("cuda")
ASKED = [
    {"seed": 1},
    {"seed": 2, "top_k": 7, "temperature": 0.7},
    {"seed": 3, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"seed": 4, "logit_bias": {5: 3.0}, "min_tokens": 4, "logprobs": 3},
    {"seed": 5, "allowed_token_ids": [*range(40, 90)], "prompt_logprobs": 2},
]


def random_logits(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 3


def test_answers_are_those_of_the_cpu() -> None:
    """Drawn and greedy ones, under filters, penalties, biases and exclusions, with their log-probabilities."""
    found = {}
    for device in ("cpu", "cuda"):
        harness = Harness(make_runner(model_folder("llama"), device=device))
        for index, fields in enumerate(ASKED):
            prompt = prompts()["17"]
            harness.add(make_request(str(index), prompt, SamplingParams(max_tokens=20, **fields)))
        results = [harness.step() for _ in range(20)]
        assert not any(result.errors for result in results)
        logprobs = [result.logprobs["4"][0] for result in results]
        found[device] = dict(harness.outputs), logprobs, results[0].prompt_logprobs["5"]
    (tokens, logprobs, prompt), (wanted, wanted_logprobs, wanted_prompt) = found["cuda"], found["cpu"]
    assert tokens == wanted
    assert [each.rank for each in logprobs] == [each.rank for each in wanted_logprobs]
    for mine, theirs in ((logprobs, wanted_logprobs), (prompt, wanted_prompt)):
        assert [each.logprob for each in mine] == pytest.approx([each.logprob for each in theirs], abs=1e-3)


@pytest.mark.parametrize("vocab", [40, 3000, 151_936])
def test_draws_are_those_of_the_cpu(vocab: int) -> None:
    logits, rows = random_logits(64, vocab), np.arange(64)
    draws = Draws(
        np.linspace(0.5, 2, 64, dtype=np.float32),
        np.where(rows % 3 == 0, 0.02, 0).astype(np.float32),
        np.where(rows % 4 == 0, 20, 0),
        np.where(rows % 5 == 0, 0.9, 1).astype(np.float32),
        np.random.default_rng(1).random((64, 3)),
    )
    ops = ReferenceOps()
    found, wanted = ops.draw(logits.to(CUDA), draws).cpu(), ops.draw(logits.clone(), draws)
    # One that lies as near the border of two tokens as sums differ may be either of them.
    assert (found == wanted).float().mean() >= 0.99


def test_what_a_grammar_excludes() -> None:
    logits = random_logits(3, 333)
    bits = torch.randint(-(2**31), 2**31, (11,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    found = logits.to(CUDA)
    exclude_tokens(found, [bits, None, bits])
    exclude_tokens(logits, [bits, None, bits])
    assert torch.equal(found.cpu(), logits)
    assert 0.3 < logits[0].isinf().float().mean() < 0.7


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_are_those_of_the_cpu(quantization: str) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn(96, 64, generator=generator), torch.randn(5, 64, generator=generator)
    wanted = ReferenceLinear(weight, None, quantization)  # type: ignore[arg-type]
    found = ReferenceLinear(weight.to(CUDA), None, quantization)  # type: ignore[arg-type]
    assert (found.weight.cpu() == wanted.weight).float().mean() > 0.999
    assert torch.allclose(found(x.to(CUDA)).cpu(), wanted(x), atol=0.02, rtol=1e-3)


def test_means_are_the_same_each_time_and_those_of_the_cpu() -> None:
    hidden = torch.randn(3000, 384, generator=torch.Generator().manual_seed(4))
    starts = torch.tensor([0, 1, 700, 702, 3000])
    found = [text_means(hidden.to(CUDA), starts.to(CUDA)) for _ in range(20)]
    assert all(torch.equal(each, found[0]) for each in found)
    assert torch.allclose(found[0].cpu(), text_means(hidden, starts), atol=1e-5)
