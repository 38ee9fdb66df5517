"""`quantization="int8"` from end to end: near the unrounded model, and the same text however the work is cut."""

import functools
import re
from typing import Any

import pytest
import torch
from support.decoder_harness import (
    OPS,
    Harness,
    all_logits,
    check_every_way,
    make_request,
    make_runner,
    prompts,
    requests,
)
from support.model_factory import model_folder, reference_model
from support.native_isa import ISAS, kernels_of, needs_native

from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.demo import demo_path
from chairlift.errors import ConfigError
from chairlift.library.llm import LLM
from chairlift.ops.select import select_ops
from chairlift.runners.decoder.runner import DecoderRunner

COUNT = 32
VARIANTS = ["llama", "llama_biases", "llama_tied", "mistral_window", "qwen2_window", "qwen3_window", "gemma3", "olmo2"]
VARIANTS += ["qwen2_moe_all", "glm4_moe_all"]
# Random weights have no outliers, but hardly any redundancy either: trained models come out nearer.
NEAR = 0.99


@functools.cache
def int8_runner(variant: str, ops: str, dtype: str = "float32", kv: str = "auto") -> DecoderRunner:
    return make_runner(model_folder(variant), ops=ops, dtype=dtype, quantization="int8", kv_cache_dtype=kv)


@functools.cache
@torch.no_grad()
def exact_logits(variant: str) -> list[torch.Tensor]:
    """What transformers computes in float32."""
    return [reference_model(variant)(torch.tensor([prompt])).logits[0] for prompt in prompts().values()]


def likeness(found: list[torch.Tensor], expected: list[torch.Tensor]) -> torch.Tensor:
    pairs = zip(found, expected, strict=True)
    return torch.cat([torch.cosine_similarity(one.float(), other.float(), dim=-1) for one, other in pairs])


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_near_those_of_transformers(variant: str, dtype: str, kv: str, ops: str) -> None:
    alike = likeness(all_logits(int8_runner(variant, ops, dtype, kv), list(prompts().values())), exact_logits(variant))
    assert alike.mean() > NEAR + 0.005
    assert alike.min() > NEAR - 0.01
    # Were it ignored, float32 would be equal.
    assert alike.mean() < 1 - 1e-5


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["llama_tied", "qwen3_window", "qwen2_moe"])
def test_text_is_the_same_however_it_is_made(variant: str, dtype: str, ops: str) -> None:
    """Alone, in company, in chunks, after a prefix hit and after preemptions."""
    if (dtype, ops) == ("bfloat16", "reference"):
        pytest.skip("plain torch rounds bfloat16 products by the shape of the batch")
    check_every_way(Harness(int8_runner(variant, ops, dtype)), COUNT)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_instruction_set_says_much_the_same(dtype: str, isa: str) -> None:
    expected = all_logits(int8_runner("qwen3", "reference", dtype), list(prompts().values()))
    with kernels_of(isa):
        runner = make_runner(model_folder("qwen3"), ops="native", dtype=dtype, quantization="int8")
        found = all_logits(runner, list(prompts().values()))
        assert runner.model.fused is not None
    alike = likeness(found, expected)
    # They sum in other orders, and an input halfway between two steps may take the other one.
    assert alike.mean() > (0.9995 if dtype == "float32" else 0.997)
    assert alike.min() > (0.997 if dtype == "float32" else 0.98)
    same = [(one.argmax(-1) == other.argmax(-1)).float() for one, other in zip(found, expected, strict=True)]
    assert torch.cat(same).mean() > (0.98 if dtype == "float32" else 0.9)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_masked_processor_works_and_says_which_path_it_takes(isa: str, quantization: str) -> None:
    with kernels_of(isa):
        runner = make_runner(model_folder("llama", "bfloat16"), ops="auto", quantization=quantization)
        found = all_logits(runner, list(prompts().values()))
        tokens = Harness(runner).generate(requests(), 4)
    path = re.fullmatch(rf"native-{isa}(?:, int8 by (baseline|avx2|avxvnni|avx512|avx512vnni|amx))?", runner.info.ops)
    assert path is not None
    assert (path[1] is not None) == (quantization == "int8")
    if quantization == "int8":
        assert path[1] == {"avx512bf16": "avx512vnni"}.get(isa, isa)
    assert (runner.model.fused is not None) == (quantization == "int8" or isa != "baseline")
    assert runner.info.dtype == "bfloat16"
    assert likeness(found, exact_logits("llama")).min() > (NEAR - 0.01 if quantization == "int8" else 0.997)
    assert all(len(made) == 4 for made in tokens.values())


@pytest.mark.parametrize("ops", OPS)
def test_weights_take_a_byte_each(ops: str) -> None:
    """All but the norms and an embedding of its own; a tied one is there once."""
    whole = make_runner(model_folder("llama_tied"), ops="reference").info.weight_bytes
    rounded = int8_runner("llama_tied", ops).info.weight_bytes
    # Norms, and 4 to 8 bytes for each output.
    assert whole / 4 < rounded < whole / 3.3
    assert int8_runner("llama", ops).model.weights.embedding is not None


@pytest.mark.parametrize("ops", OPS)
def test_greedy_and_sampled_requests_see_the_same_logits(ops: str) -> None:
    """The fast path for greedy sequences does not make logits; one that asks for log-probabilities does."""
    harness = Harness(int8_runner("llama", ops))
    fast = harness.generate(requests(), COUNT)
    slow_params = SamplingParams(temperature=0, max_tokens=None, logprobs=1)
    slow = harness.generate([make_request(name, prompt, slow_params) for name, prompt in prompts().items()], COUNT)
    assert fast == slow


def test_it_is_honoured_wherever_it_is_asked_for() -> None:
    """Also by the reference: on CUDA, for other dtypes and for odd heads."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for name, device, dtype, head_dim in (
        ("reference", cpu, torch.float32, 64),
        ("auto", cpu, torch.bfloat16, 64),
        ("auto", cpu, torch.float16, 64),
        ("auto", cpu, torch.float32, 20),
        ("auto", cuda, torch.bfloat16, 64),
    ):
        ops = select_ops(name, device, dtype, head_dim, "int8")
        assert ops.quantization == "int8"
        assert ", int8" in ops.name
        weight, x = torch.randn(64, 40, dtype=dtype), torch.randn(3, 40, dtype=dtype)
        for layer in (ops.linear(weight, None), ops.gated_linear(weight, None), ops.head(weight)):
            assert layer.nbytes <= weight.numel() + 8 * 64
        plain = torch.nn.functional.linear(x.float(), weight.float())
        error = (ops.linear(weight, None)(x).float() - plain).abs().mean() / plain.abs().mean()
        assert 1e-4 < error < 0.03


def test_the_library_takes_it_and_refuses_what_is_none() -> None:
    settings: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_gb": 0.05}
    llm = LLM(demo_path(), quantization="int8", **settings)
    assert ", int8" in llm.engine.info.ops
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(question, SamplingParams(temperature=0), use_tqdm=False)
    assert answer[0].outputs[0].text.startswith("The capital of France is Paris")
    llm.close()
    with pytest.raises(ConfigError, match="quantization"):
        LLM(demo_path(), quantization="int5", **settings)
