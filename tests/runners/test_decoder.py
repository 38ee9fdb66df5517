"""Logits and greedy tokens of the decoder against transformers, however the work is cut into steps."""

import functools
from collections.abc import Iterable
from typing import Any, Literal

import pytest
import torch
from support.decoder_harness import OPS, Harness, all_logits, make_request, make_runner, prompts, requests
from support.device import DEVICE
from support.foreign_factory import greedy
from support.model_factory import EXACT, EXPERTS, FAMILIES, ROUNDED, model_folder, reference_model
from support.native_isa import needs_native

from chairlift.ops.native import LIBRARY
from chairlift.runners.decoder.runner import DecoderRunner

NUM_OUTPUT = 64
FEW, FEWER = 20, 12
# What a step's cut, the cache and preemption do is of the parts that families are made of, and there are few of those:
# the reference operations meet the other families behind the marker `slow`.
THOROUGH = ["llama", "gemma3", "gpt2", "falcon", "mixtral", "gpt_oss", "deepseek_v3"]


def with_ops(variants: Iterable[str]) -> list[Any]:
    """Parameters `variant` and `ops`."""
    reference = [
        pytest.param(variant, "reference", marks=() if variant in THOROUGH else pytest.mark.slow)
        for variant in variants
    ]
    return reference + [pytest.param(variant, "native", marks=needs_native) for variant in variants]


FAMILIES_AND_OPS = with_ops(FAMILIES)


@functools.cache
def mixed(variant: str, ops: str) -> dict[str, list[int]]:
    """Greedy continuations in one mixed batch."""
    return Harness(runner_of(variant, ops)).generate(requests(), NUM_OUTPUT)


@functools.cache
def expected(variant: str) -> dict[str, list[int]]:
    """Greedy continuations by transformers, one prompt at a time."""
    ops = "native" if LIBRARY.exists() and DEVICE != "cuda" else "reference"
    model, guess = reference_model(variant), mixed(variant, ops)
    return {name: greedy(model, prompt, guess[name]) for name, prompt in prompts().items()}


def first(count: int, of: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: tokens[:count] for name, tokens in of.items()}


@functools.cache
def runner_of(variant: str, ops: str, dtype: str = "float32") -> DecoderRunner:
    return make_runner(model_folder(variant, dtype), ops=ops)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("variant", EXACT)
def test_logits_equal_transformers(variant: str, ops: str) -> None:
    found = all_logits(runner_of(variant, ops), list(prompts().values()))
    for logits, prompt in zip(found, prompts().values(), strict=True):
        with torch.no_grad():
            wanted = reference_model(variant)(torch.tensor([prompt])).logits[0]
        assert (logits - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize(("variant", "ops"), with_ops(EXACT))
def test_greedy_tokens_equal_transformers(variant: str, ops: str) -> None:
    """In one mixed batch, and in chunks of 7 tokens, whose last chunks mix with other requests' decodes."""
    assert mixed(variant, ops) == expected(variant)
    assert Harness(runner_of(variant, ops)).generate(requests(), NUM_OUTPUT, chunk=7) == expected(variant)


@pytest.mark.parametrize(("variant", "ops"), FAMILIES_AND_OPS)
def test_one_by_one(variant: str, ops: str) -> None:
    """A token, a whole block, and one that is longer than windows are; other lengths differ in their prompts alone."""
    wanted, harness = first(FEW, expected(variant)), Harness(runner_of(variant, ops))
    for request in requests():
        if request.id in ("1", "16", "300"):
            assert harness.generate([request], FEW)[request.id] == wanted[request.id]


@pytest.mark.parametrize(("variant", "ops"), FAMILIES_AND_OPS)
def test_prefix_hits(variant: str, ops: str) -> None:
    """A request that shares computed blocks, and one that shares blocks computed in the very same step."""
    wanted, harness = first(FEW, expected(variant)), Harness(runner_of(variant, ops))
    size = harness.block_size
    for request in requests("first"):
        harness.add(request)
    harness.step()
    for name in ("17", "100", "300"):
        prompt = prompts()[name]
        cached = (len(prompt) - 1) // size * size
        harness.add(make_request(name, prompt), cached, harness.tables[f"first{name}"][: cached // size])
    assert harness.finish(["17", "100", "300"], FEW) == {name: wanted[name] for name in ("17", "100", "300")}
    for name in prompts():
        harness.release(f"first{name}")

    prompt = prompts()["100"]
    harness.add(make_request("writer", prompt))
    table = [harness.free.pop() for _ in range(7)]
    harness.tables["writer"], harness.owned["writer"] = list(table), list(table)
    harness.add(make_request("reader", prompt), 96, table[:6])
    both = harness.finish(["writer", "reader"], FEW)
    assert both == dict.fromkeys(["writer", "reader"], wanted["100"])


@pytest.mark.parametrize(("variant", "ops"), FAMILIES_AND_OPS)
def test_preemption_by_recompute(variant: str, ops: str) -> None:
    """Two sequences are dropped amid decoding and amid their prompt, and start again with all of their tokens."""
    wanted, harness = expected(variant), Harness(runner_of(variant, ops))
    for request in requests():
        harness.add(request)
    for _ in range(20):
        harness.step(chunk=9)
    assert harness.remaining("300") > 1
    assert len(harness.outputs["17"]) > 1
    harness.preempt("300")
    harness.preempt("17")
    harness.step({name: harness.remaining(name) for name in prompts() if name not in ("300", "17")})
    assert harness.finish(list(prompts()), 30, chunk=30) == first(30, wanted)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("variant", ROUNDED)
def test_bfloat16(variant: str, ops: str) -> None:
    runner = runner_of(variant, ops, "bfloat16")
    assert runner.info.dtype == "bfloat16"
    found = all_logits(runner, list(prompts().values()))
    distances = []
    for logits, prompt in zip(found, prompts().values(), strict=True):
        with torch.no_grad():
            wanted = reference_model(variant, "bfloat16").float()(torch.tensor([prompt])).logits[0]
        distances.append(1 - torch.cosine_similarity(logits.float(), wanted, dim=-1))
    assert torch.cat(distances).mean() < 1.5e-4
    assert torch.cat(distances).max() < 1e-3


@torch.no_grad()
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("variant", EXPERTS)
def test_bfloat16_chooses_other_experts_no_more_often_than_transformers(variant: str, ops: str) -> None:
    found = torch.cat(all_logits(runner_of(variant, ops, "bfloat16"), list(prompts().values()))).float()
    ids = [torch.tensor([prompt]) for prompt in prompts().values()]
    theirs, exact = (
        torch.cat([reference_model(variant, dtype)(prompt).logits[0].float() for prompt in ids])
        for dtype in ("bfloat16", "float32")
    )
    far, theirs_far = (
        (torch.cosine_similarity(each, exact, dim=-1) < 0.999).float().mean() for each in (found, theirs)
    )
    # Which tokens it happens to is chance: three standard deviations of the difference of two such shares.
    chance = 3 * float(2 * theirs_far * (1 - theirs_far) / len(exact)) ** 0.5
    assert far <= theirs_far + chance
    assert far < 0.2


@torch.inference_mode()
@pytest.mark.parametrize("ops", OPS)
def test_scaled_embeddings_are_rounded_as_transformers_does_it(ops: str) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.arange(320)
    theirs = AutoModelForCausalLM.from_pretrained(model_folder("gemma3", "bfloat16"), dtype=torch.bfloat16)
    own = runner_of("gemma3", ops, "bfloat16").model
    assert torch.equal(own._embed(ids.to(DEVICE), ids.to(DEVICE)).cpu(), theirs.model.embed_tokens(ids))


@functools.cache
def rounding_runner(variant: str, ops: str) -> DecoderRunner:
    return make_runner(model_folder(variant), ops=ops, kv_cache_dtype="int8")


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("variant", ROUNDED)
def test_logits_over_an_int8_cache_are_near(variant: str, ops: str) -> None:
    found = all_logits(rounding_runner(variant, ops), list(prompts().values()))
    for logits, prompt in zip(found, prompts().values(), strict=True):
        with torch.no_grad():
            wanted = reference_model(variant)(torch.tensor([prompt])).logits[0]
        assert 0 < (logits - wanted).abs().max() <= 0.05 * wanted.abs().max()
        assert torch.cosine_similarity(logits, wanted, dim=-1).min() > 0.999


@pytest.mark.parametrize(("variant", "ops"), FAMILIES_AND_OPS)
def test_an_int8_cache_survives_chunks_prefix_hits_and_preemption(variant: str, ops: str) -> None:
    harness = Harness(rounding_runner(variant, ops))
    wanted = harness.generate(requests(), FEWER)
    for request in requests():
        if request.id in ("1", "17", "300"):
            assert harness.generate([request], FEWER)[request.id] == wanted[request.id]
    assert harness.generate(requests(), FEWER, chunk=7) == wanted

    harness.add(make_request("first", prompts()["300"]))
    harness.step()
    cached = 299 // harness.block_size * harness.block_size
    harness.add(make_request("300", prompts()["300"]), cached, harness.tables["first"][: cached // harness.block_size])
    harness.add(make_request("17", prompts()["17"]))
    harness.step()
    harness.preempt("17")
    assert harness.finish(["300", "17"], FEWER) == {name: wanted[name] for name in ("300", "17")}


@pytest.mark.parametrize("ops", OPS)
def test_an_int8_cache_is_counted_with_its_scales(ops: str) -> None:
    plain, rounding = runner_of("llama", ops), rounding_runner("llama", ops)
    config = rounding.model.config
    per_token = config.num_layers * 2 * config.num_kv_heads
    assert plain.model.kv_bytes_per_token() == per_token * config.head_dim * 4
    assert rounding.model.kv_bytes_per_token() == per_token * (config.head_dim + 4)
    held = sum(pages.nbytes for cache in rounding.model.caches for pages in cache)
    assert (
        held
        == rounding.info.kv_bytes
        == rounding.info.num_blocks * rounding.info.block_size * per_token * (config.head_dim + 4)
    )
    tight = {"kv_cache_gb": 0.02}
    more, fewer = (
        make_runner(model_folder("llama"), ops=ops, kv_cache_dtype=each, **tight) for each in ("int8", "auto")
    )
    assert more.info.num_blocks > 3 * fewer.info.num_blocks


@pytest.mark.parametrize("cache", ["auto", "int8"])
@pytest.mark.parametrize("ops", OPS)
def test_rows_of_values_are_counted_as_they_are_padded(ops: str, cache: Literal["auto", "int8"]) -> None:
    """In the native cache those of 40 numbers take the room of 48."""
    runner = make_runner(model_folder("youtu"), ops=ops, kv_cache_dtype=cache)
    held = sum(pages.nbytes for each in runner.model.caches for pages in each)
    assert held == runner.info.kv_bytes
    config = runner.model.config
    assert config.head_dim == 40
    values = 48 if runner.info.ops.startswith("native") else 40
    size, scale = (1, 4) if cache == "int8" else (4, 0)
    each = config.num_layers * config.num_kv_heads * ((40 + values) * size + 2 * scale)
    assert runner.model.kv_bytes_per_token() == each
    if values == 48:
        # `chairlift check` counts so too.
        assert config.kv_bytes_per_token(size, scale) == each


def test_order_within_a_step_is_free() -> None:
    harness = Harness(runner_of("llama", "reference"))
    for request in requests():
        harness.add(request)
    names = list(prompts())
    for turn in range(NUM_OUTPUT):
        order = names[turn % 7 :] + names[: turn % 7]
        harness.step({name: harness.remaining(name) for name in order})
    assert harness.outputs == expected("llama")
    for name in names:
        harness.release(name)
    harness.step({})


def test_warm_up_leaves_no_trace() -> None:
    runner = make_runner(model_folder("llama"), max_num_batched_tokens=64)
    runner.warm_up()
    assert Harness(runner).generate(requests(), NUM_OUTPUT, chunk=50) == expected("llama")
    runner.close()
    assert not hasattr(runner, "model")


def test_a_sequence_may_fill_max_model_len() -> None:
    prompt = prompts()["100"]
    runner = make_runner(model_folder("llama"), max_model_len=132, block_size=10, kv_cache_gb=0.01)
    harness = Harness(runner)
    got = harness.generate([make_request("full", prompt)], 33)["full"]
    assert got == expected("llama")["100"][:33]
