"""`quantization="int4"` from end to end: what the rounded weights say, and the same text however the work is cut."""

import functools
from pathlib import Path

import pytest
import torch
from support.decoder_harness import (
    OPS,
    Harness,
    all_logits,
    check_every_way,
    make_runner,
    prompts,
)
from support.model_factory import model_folder, reference_model, rounded_folder
from support.native_isa import ISAS, kernels_of, needs_native
from transformers import AutoModelForCausalLM

from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.demo import demo_path
from chairlift.library.llm import LLM
from chairlift.runners.decoder.runner import DecoderRunner

COUNT = 32


@functools.cache
def runner_of(variant: str, ops: str, dtype: str = "float32", kv: str = "auto") -> DecoderRunner:
    return make_runner(model_folder(variant), ops=ops, dtype=dtype, quantization="int4", kv_cache_dtype=kv)


def likeness(found: list[torch.Tensor], expected: list[torch.Tensor]) -> torch.Tensor:
    pairs = zip(found, expected, strict=True)
    return torch.cat([torch.cosine_similarity(one.float(), other.float(), dim=-1) for one, other in pairs])


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["llama", "llama_tied", "qwen3_window", "granite"])
def test_logits_are_those_of_the_rounded_weights(variant: str, dtype: str, ops: str, tmp_path: Path) -> None:
    """By transformers in float32: what activations of 8 bits add is little beside what 4 bits took."""
    tied = reference_model(variant).config.tie_word_embeddings
    # An embedding of its own stays.
    folder = rounded_folder(tmp_path / "m", model_folder(variant), getattr(torch, dtype), () if tied else ("embed",))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        exact = [model(torch.tensor([prompt])).logits[0] for prompt in prompts().values()]
        unrounded = [reference_model(variant)(torch.tensor([prompt])).logits[0] for prompt in prompts().values()]
    found = all_logits(runner_of(variant, ops, dtype), list(prompts().values()))
    assert likeness(found, exact).mean() > 0.999
    assert likeness(found, unrounded).mean() < likeness(found, exact).mean() - 1e-3


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize(("variant", "kv"), [("llama_tied", "auto"), ("qwen3_window", "int8"), ("qwen2_moe", "auto")])
def test_text_is_the_same_however_it_is_made(variant: str, kv: str, ops: str) -> None:
    """Alone, in company, in chunks, after a prefix hit and after preemptions."""
    check_every_way(Harness(runner_of(variant, ops, "float32", kv)), COUNT)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_says_the_same(isa: str) -> None:
    expected = all_logits(runner_of("qwen3", "reference"), list(prompts().values()))
    with kernels_of(isa):
        runner = make_runner(model_folder("qwen3"), ops="native", dtype="float32", quantization="int4")
        found = all_logits(runner, list(prompts().values()))
        assert runner.model.fused is not None
        path = {"avx512bf16": "avx512vnni"}.get(isa, isa)
        assert runner.info.ops == f"native-{isa}, int4 by {path}"
    alike = likeness(found, expected)
    assert alike.mean() > 0.9995
    assert alike.min() > 0.997


@needs_native
def test_weights_take_a_little_more_than_half_a_byte_each() -> None:
    whole = make_runner(model_folder("llama_tied"), ops="reference").info.weight_bytes
    rounded = runner_of("llama_tied", "native").info.weight_bytes
    # 17 bits for 4 numbers, norms, 8 bytes for each output, and blocks that are filled up.
    assert whole / 8 < rounded < whole / 4.5
    assert rounded < 0.75 * make_runner(model_folder("llama_tied"), ops="native", quantization="int8").info.weight_bytes


def test_the_library_takes_it() -> None:
    llm = LLM(demo_path(), quantization="int4", max_num_seqs=4, kv_cache_gb=0.05)
    assert ", int4" in llm.engine.info.ops
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(question, SamplingParams(temperature=0), use_tqdm=False)
    assert answer[0].outputs[0].text.startswith("The capital of France is Paris")
    llm.close()
