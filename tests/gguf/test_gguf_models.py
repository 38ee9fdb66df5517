"""GGUF files by the package's own writer: the models in them, and their numbers."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support.decoder_harness import all_logits, make_runner, prompts
from support.encoder_factory import sentence_folder
from support.gguf_files import MODELS, WITH_EXPERTS, add, gguf_file, plain_folder
from support.model_factory import edited_folder
from support.native_isa import needs_native
from tokenizers import Tokenizer, processors

from chairlift import LLM, SamplingParams
from chairlift.cli import main as cli
from chairlift.config.settings import load
from chairlift.errors import ConfigError, UnsupportedModel
from chairlift.folders.kind import is_encoder
from chairlift.folders.sentence_files import SentenceFiles
from chairlift.folders.tensor_files import GGUF_WEIGHTS
from chairlift.gguf import model_config, side_folder
from chairlift.gguf.architectures import architecture_of
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.gguf_tensors import GgufTensors
from chairlift.gguf.part_names import part_name
from chairlift.gguf.side_folder import folder_of
from chairlift.gguf.tensor_types import READ
from chairlift.ops.ggml_blocks import unpack_blocks
from chairlift.runners.encoder.runner import EncoderRunner
from chairlift.text.encoding import TextEncoder

NOTHING = np.empty((0, 32), np.uint8), np.empty((0, 32), np.float32)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_that_of_its_folder(name: str) -> None:
    found = make_runner(folder_of(gguf_file(name)), ops="native")
    wanted = make_runner(plain_folder(name), ops="native")
    assert found.model.config.num_layers == wanted.model.config.num_layers
    texts = list(prompts().values())
    for one, other in zip(all_logits(found, texts), all_logits(wanted, texts), strict=True):
        assert (one - other).abs().max() <= 2e-4 * other.abs().max()


def test_a_model_in_parts_is_that_of_the_whole_file(tmp_path: Path) -> None:
    first = gguf_file("mixtral", "Q8_0", 7)
    assert first.name.endswith("-00001-of-00004.gguf")
    # As a cache of downloads has them: links by these names, to files with others.
    for number, part in enumerate(first.parent.glob(f"{first.name[:-20]}*")):
        (tmp_path / f"blob{number}").write_bytes(part.read_bytes())
        (tmp_path / part.name).symlink_to(tmp_path / f"blob{number}")
    served = load({"model": str(tmp_path / first.name)}, {}, tmp_path, "").models[0]
    assert served.name == "mixtral-Q8_07"
    found, wanted = make_runner(served.config.model), make_runner(folder_of(gguf_file("mixtral", "Q8_0")))
    for one, other in zip(*(all_logits(each, list(prompts().values())) for each in (found, wanted)), strict=True):
        assert torch.equal(one, other)


def test_parts_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    whole = gguf_file("llama", "F32", 10)
    base, count = whole.name[:-20], int(whole.name[-10:-5])
    names = [part_name(base, number, count) for number in range(1, count + 1)]

    def refused(name: str) -> str:
        for each in names:
            if not (tmp_path / each).exists():
                (tmp_path / each).write_bytes((whole.parent / each).read_bytes())
        with pytest.raises(UnsupportedModel) as said:
            folder_of(tmp_path / name)
        return str(said.value)

    assert f"not the first of its parts: name {names[0]}" in refused(names[1])
    (tmp_path / names[1]).write_bytes((whole.parent / names[0]).read_bytes())
    assert f"{names[1]} has split.no = 0" in refused(names[0])
    (tmp_path / names[1]).unlink()
    (tmp_path / names[0]).rename(tmp_path / "m.gguf")
    assert "by its name it is part 1 of 1" in refused("m.gguf")
    (tmp_path / names[-1]).unlink()
    with pytest.raises(UnsupportedModel, match=f"{names[-1]} is missing beside"):
        folder_of(tmp_path / names[0])


def embedded(folder: Path) -> NDArray[np.float32]:
    runner = EncoderRunner(str(folder), dtype="float32", num_threads=1)
    most = runner.load().max_tokens
    found = runner.run(TextEncoder(folder, most, SentenceFiles.read(folder)).encode_texts(["ab a", "b", ""]))
    return np.stack(found)  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (2, "cls"), (3, "lasttoken")])
def test_an_embedder_is_that_of_its_folder(number: int, pooling: str, tmp_path: Path) -> None:
    """As Qwen3-Embedding: pooled as the file says, normalized, and with the end token behind each text."""
    modules: list[tuple[str, dict[str, Any]]] = [("Pooling", {"pooling_mode": pooling}), ("Normalize", {})]
    folder = sentence_folder(tmp_path / "plain", plain_folder("qwen3"), modules)
    words = Tokenizer.from_file(str(folder_of(gguf_file("qwen3")) / "tokenizer.json"))
    words.post_processor = processors.TemplateProcessing("$A <|end|>", None, [("<|end|>", 257)])
    words.save(str(folder / "tokenizer.json"))
    found = folder_of(gguf_file("qwen3", pooling=number))
    assert is_encoder(found)
    np.testing.assert_allclose(embedded(found), embedded(folder), atol=1e-5)


def test_a_tensor_of_an_embedder_s_layer_that_is_not_known_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file("qwen3", pooling=1).read_bytes().replace(b"output.weight", b"blk.1.xx.bias", 1))
    with pytest.raises(UnsupportedModel, match=r"unexpected tensor 'blk\.1\.xx\.bias'"):
        EncoderRunner(str(folder_of(path)), dtype="float32", num_threads=1).load()


def test_without_a_pooling_it_is_a_language_model_and_no_embedder() -> None:
    folder = folder_of(gguf_file("qwen3", pooling=0))
    assert not is_encoder(folder)
    with pytest.raises(UnsupportedModel, match="has no Pooling module"):
        SentenceFiles.read(folder)
    assert not is_encoder(folder_of(gguf_file("qwen3")))


def test_it_is_served_in_the_type_that_it_has() -> None:
    assert make_runner(folder_of(gguf_file("llama", "BF16"))).info.dtype == "bfloat16"
    assert make_runner(folder_of(gguf_file("llama", "Q4_0"))).info.dtype == "bfloat16"
    assert make_runner(folder_of(gguf_file("llama"))).info.dtype == "float32"
    # As a folder of float16 is.
    plain = folder_of(gguf_file("llama", "F16"))
    assert json.loads((plain / "config.json").read_text())["torch_dtype"] == "float16"
    assert make_runner(plain).info.dtype == "float32"
    embeddings = GgufFile(gguf_file("llama", "F16")).tensors["token_embd.weight"]
    assert model_config.dtype_of(embeddings, [embeddings, embeddings._replace(kind=8)]) == "bfloat16"


def test_a_tensor_that_is_missing_is_told_of_a_gguf_file_and_what_may_be_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file("qwen3").read_bytes().replace(b"blk.1.attn_q_norm.weight", b"blk.1.attn_z_norm.weight"))
    with pytest.raises(UnsupportedModel) as refused:
        make_runner(folder_of(path))
    missing = "'model.layers.1.self_attn.q_norm.weight' is missing from the model's GGUF file"
    assert missing in str(refused.value)
    assert "of whose tensors these are not known here: blk.1.attn_z_norm.weight" in str(refused.value)


def test_a_file_of_few_bits_is_said_to_take_more_here(caplog: pytest.LogCaptureFixture) -> None:
    for kind, quantization, is_said in (("Q4_0", "none", True), ("Q4_0", "int4", False), ("F32", "none", False)):
        caplog.clear()
        made = make_runner(folder_of(gguf_file("llama", kind)), ops="native", quantization=quantization)
        assert ("quantization int8 or int4 keeps them small" in caplog.text) is is_said
        assert (", int4" in made.info.ops) == (quantization == "int4")


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *[("qwen2", kind) for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")],
        *[(name, "Q8_0") for name in WITH_EXPERTS],
        ("gpt_oss", "MXFP4"),
    ],
)
def test_a_rounded_model_is_that_of_the_rounded_numbers(model: str, kind: str, tmp_path: Path) -> None:
    """By the package's own rounding, there and back; what chooses experts is not rounded."""
    tensors = load_file(plain_folder(model) / "model.safetensors")
    number = gguf.GGMLQuantizationType[kind]
    for name, tensor in tensors.items():
        if tensor.ndim >= 2 and not name.endswith(("gate.weight", "router.layer.weight", "router.weight", "_bias")):
            is_turned = model == "gpt_oss" and ".experts." in name
            rows = tensor.transpose(1, 2) if is_turned else tensor
            rounded = gguf.quants.quantize(rows.flatten(0, -2).numpy(), number)
            rows = torch.from_numpy(dequantize(rounded, number).astype(np.float32)).view(rows.shape)
            tensors[name] = rows.transpose(1, 2).contiguous() if is_turned else rows
    folder = edited_folder(tmp_path / "plain", plain_folder(model))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for dtype in ("float32", "bfloat16"):
        found = make_runner(folder_of(gguf_file(model, kind)), ops="native", dtype=dtype)
        wanted = make_runner(folder, ops="native", dtype=dtype)
        texts = list(prompts().values())
        for one, other in zip(all_logits(found, texts), all_logits(wanted, texts), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3"])
def test_in_4_bits_files_of_4_bits_nearly_keep_their_numbers(model: str) -> None:
    """Logits beside those of float32 products over the numbers: as 8 bits make them, and not as 4 bits do of others."""
    alike = {}
    for kind, quantization in (("Q4_0", "int8"), ("Q4_0", "int4"), ("Q4_1", "int4"), ("F32", "int4")):
        folder = folder_of(gguf_file(model, kind))
        exact = make_runner(folder, ops="native", dtype="float32")
        found = make_runner(folder, ops="native", dtype="float32", quantization=quantization)
        logits = [torch.cat(all_logits(runner, list(prompts().values()))) for runner in (exact, found)]
        alike[kind, quantization] = float(torch.cosine_similarity(*logits, dim=-1).mean())
    assert alike["Q4_0", "int8"] > 0.999
    assert alike["Q4_0", "int4"] > 0.9985
    assert alike["Q4_1", "int4"] > 0.998
    assert alike["F32", "int4"] < 0.97


@pytest.mark.parametrize("kind", READ)
def test_numbers_are_those_of_the_package(kind: str, tmp_path: Path) -> None:
    """All types, also those that it does not round to: blocks of any bytes."""
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (6, 3 * size), np.uint8)
    if block == 1:
        raw = rng.normal(0, 1, (6, 3)).astype(np.float16 if kind == "F16" else np.float32).view(np.uint8)
        raw = raw[:, : 3 * size].copy()
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        wanted = dequantize(raw, number).astype(np.float32)
        for unpack in (None, unpack_blocks):
            tensors = GgufTensors(path, unpack)
            assert tensors.keys() == ["model.layers.0.mlp.up_proj.weight"]
            assert tensors.get_slice(tensors.keys()[0]).get_shape() == [6, 3 * block]
            found = tensors.get_tensor(tensors.keys()[0]).float().numpy()
            assert np.array_equal(found, wanted, equal_nan=True)


@needs_native
def test_the_types_of_most_files_are_unpacked_natively() -> None:
    known = [kind for kind in READ if unpack_blocks(gguf.GGMLQuantizationType[kind].value, *NOTHING)]
    assert known == ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]


def test_a_library_is_given_a_file() -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompt = {"prompt_token_ids": prompts()["17"]}
    found = []
    for model in (gguf_file("llama"), folder_of(gguf_file("llama"))):
        llm = LLM(str(model), kv_cache_gb=0.01)
        found.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
        llm.close()
    assert found[0] == found[1]


def test_a_server_is_given_a_file(tmp_path: Path) -> None:
    served = load({"model": str(gguf_file("qwen3", "Q8_0"))}, {}, tmp_path, "").models[0]
    assert served.name == "qwen3-Q8_0"
    assert (Path(served.config.model) / GGUF_WEIGHTS).resolve() == gguf_file("qwen3", "Q8_0")


def test_check_says_what_a_file_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["check", str(gguf_file("gemma3", "Q8_0"))]) == 0
    said = capsys.readouterr().out
    assert "gemma3_text, 7 layers of 64" in said
    assert "native kernels" in said


def test_check_refuses_a_file_that_could_not_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cut, packed = tmp_path / "cut.gguf", tmp_path / "packed.gguf"
    cut.write_bytes(gguf_file("qwen3", "Q8_0").read_bytes()[:-4096])
    kind = gguf.GGMLQuantizationType.TQ1_0
    small_file(packed, {}, lambda writer: writer.add_tensor("x", np.zeros((2, 54), np.uint8), raw_dtype=kind))
    for path, problem in ((cut, "lies beyond the end of cut.gguf"), (packed, "'x' is of TQ1_0, which is not read")):
        assert cli(["check", str(path)]) == 1
        said = capsys.readouterr().out
        assert f"{path} can't be served: tensor " in said
        assert problem in said


def test_its_folder_is_made_once_and_anew_if_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file("llama").read_bytes())
    first = folder_of(path)
    made = (first / "config.json").stat().st_mtime_ns
    assert folder_of(path) == first
    assert (first / "config.json").stat().st_mtime_ns == made
    path.write_bytes(gguf_file("qwen2").read_bytes())
    os.utime(path, ns=(1, 1))
    assert folder_of(path) != first
    assert json.loads((folder_of(path) / "config.json").read_text())["model_type"] == "qwen2"
    assert not [each for each in first.parent.iterdir() if each.name.startswith(".")]


def test_what_lies_in_its_place_is_its_own_or_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf_file("llama")
    folder = folder_of(path)
    own = {Path(name).parts[0] for name in side_folder._FILES} | {GGUF_WEIGHTS}
    assert {each.name for each in folder.iterdir()} == own

    def of_nobody() -> None:
        monkeypatch.setattr(side_folder.os, "getuid", lambda: os.geteuid() + 1)

    def elsewhere() -> None:
        (folder / GGUF_WEIGHTS).unlink()
        (folder / GGUF_WEIGHTS).symlink_to(gguf_file("qwen2"))

    def copied() -> None:
        (folder / GGUF_WEIGHTS).unlink()
        (folder / GGUF_WEIGHTS).write_bytes(path.read_bytes())

    def a_link() -> None:
        folder.rename(tmp_path / "real")
        folder.symlink_to(tmp_path / "real")

    def a_file() -> None:
        shutil.rmtree(folder)
        folder.write_text("")

    missing = [(folder / name).unlink for name in side_folder._FILES]
    for change in (*missing, elsewhere, copied, a_link, a_file, of_nobody):
        if folder.is_dir():
            (folder / "planted").touch()
        change()
        assert folder_of(path) == folder
        assert {each.name for each in folder.iterdir()} == own
        assert not folder.is_symlink()
        assert (folder / GGUF_WEIGHTS).readlink() == path
        assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_that_can_not_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"can't be kept in .*; set XDG_CACHE_HOME to a folder that can be"):
        folder_of(gguf_file("llama"))


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_folder, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match=r"pip install 'chairlift\[gguf\]'"):
        folder_of(gguf_file("llama"))


@pytest.mark.parametrize("name", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_alone_scales_positions_linearly(name: str) -> None:
    """As llama.cpp reads older files."""
    told = {name: 4.0, "context_length": 64}
    assert model_config._rotation(told, "llama.", 32, {}) == {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert model_config._rotation(told | {name: 0.0}, "llama.", 32, {}) == {}


def test_what_a_file_says_of_yarn_besides_its_factor() -> None:
    told = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "context_length": 64}
    usual = 0.1 * math.log(4) + 1

    def scaling(**more: float | str) -> dict[str, Any]:
        named = {f"rope.scaling.{key}": value for key, value in more.items()}
        found: dict[str, Any] = model_config._rotation(told | named, "qwen3.", 32, {})["rope_scaling"]
        return found

    assert scaling(yarn_attn_factor=1.0, yarn_ext_factor=-1.0) == {"rope_type": "yarn", "factor": 4.0}
    assert scaling(yarn_ext_factor=1.0, original_context_length=16)["original_max_position_embeddings"] == 16
    betas = scaling(yarn_beta_fast=16.0, yarn_beta_slow=2.0)
    assert (betas["beta_fast"], betas["beta_slow"]) == (16.0, 2.0)
    # `attention_factor` stands for all, and `attn_factor`, as DeepSeek R1 has it, changes what is usual.
    assert scaling(yarn_attn_factor=1.25)["attention_factor"] == 1.25
    assert scaling(yarn_attn_factor=1 / usual)["attention_factor"] == pytest.approx(1.0)
    assert scaling(attn_factor=0.5)["attention_factor"] == pytest.approx(0.5 * usual)
    for value in (0.5, 0.0):
        with pytest.raises(UnsupportedModel, match=rf"qwen3\.rope\.scaling\.yarn_ext_factor = {value}"):
            scaling(yarn_ext_factor=value)
    with pytest.raises(UnsupportedModel, match=r"rope\.scaling\.attn_factor = 0\.5"):
        scaling(attn_factor=0.5, type="linear")


def test_which_layers_have_a_window_is_checked() -> None:
    def read(**more: Any) -> dict[str, Any]:
        told = {"block_count": 4, "rope.freq_base": 1e4, "attention.sliding_window": 8, **more}
        known = architecture_of(
            {f"olmo2.{key}": value for key, value in told.items()} | {"general.architecture": "olmo2"}
        )
        return model_config._windows(told, "olmo2.", known)

    kinds = ["sliding_attention", "full_attention"] * 2
    for pattern in (2, [1, 0, 1, 0]):
        assert read(**{"attention.sliding_window_pattern": pattern}) == {"layer_types": kinds}
    with pytest.raises(UnsupportedModel, match=r"olmo2\.attention\.sliding_window_pattern = \[1\] is not for 4 layers"):
        read(**{"attention.sliding_window_pattern": [1]})
    with pytest.raises(UnsupportedModel, match=r"olmo2\.rope\.freq_base_swa = 1000"):
        read(**{"rope.freq_base_swa": 1e3})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("general.architecture", "mamba", "general.architecture 'mamba'"),
        ("llama.expert_count", 8, "llama.expert_used_count is missing"),
        ("llama.expert_count", 5000, "no more than 1024 experts"),
        ("llama.expert_group_count", 8, "llama.expert_group_count = 8"),
        ("llama.rope.scaling.type", "su", "rope.scaling.type 'su'"),
        ("llama.feed_forward_length", [128, 128], "intermediate_size of"),
        ("llama.block_count", None, "llama.block_count is missing"),
        ("llama.attention.head_count", 0, "llama.attention.head_count is missing in m.gguf, or 0"),
        ("llama.embedding_length", 0, "llama.embedding_length is missing in m.gguf, or 0"),
        ("llama.rope.dimension_count", "many", "a value that is none of its kind"),
        ("llama.attention.value_length", 8, "attention.value_length"),
        ("llama.attention.sliding_window", 16, "llama.attention.sliding_window = 16"),
        ("llama.attention.max_alibi_bias", 8, "llama.attention.max_alibi_bias = 8"),
        ("llama.attention.causal", 0, "llama.attention.causal = 0"),
        ("llama.pooling_type", 4, "llama.pooling_type = 4"),
        ("llama.rope.scaling.yarn_log_multiplier", 1, "yarn_log_multiplier = 1"),
        ("tokenizer.ggml.pre", "default", "tokenizer.ggml.pre 'default'"),
        ("tokenizer.ggml.model", "bert", "tokenizer.ggml.model 'bert'"),
        ("tokenizer.ggml.tokens", None, "tokenizer.ggml.tokens is missing"),
        ("tokenizer.ggml.eos_token_id", 999, "tokenizer.ggml.eos_token_id"),
    ],
)
def test_what_is_not_read_is_refused_by_its_key(key: str, value: object, said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    small_file(path, {key: value})
    with pytest.raises(UnsupportedModel) as refused:
        folder_of(path)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("told", "tensor", "said"),
    [
        ({"rope.scaling.finetuned": 0}, None, "granite.rope.scaling.finetuned = 0"),
        ({"ssm.conv_kernel": 4}, "blk.0.ssm_in.weight", "granite.ssm.conv_kernel = 4"),
        ({"block_count": 2, "attention.head_count_kv": [0, 2]}, None, "num_key_value_heads of m.gguf is [0, 2]"),
        ({"expert_shared_feed_forward_length": 64}, "blk.0.ffn_up_shexp.weight", "shared_feed_forward_length = 64"),
        ({"rope.scaling.finetuned": 1, "ssm.conv_kernel": 4, "attention.head_count_kv": [2]}, None, None),
    ],
)
def test_of_granite_4_only_what_has_states_is_refused(
    told: dict[str, Any], tensor: str | None, said: str | None, tmp_path: Path
) -> None:
    path, sizes = tmp_path / "m.gguf", ("context_length", "embedding_length", "block_count", "feed_forward_length")
    known = dict(zip(sizes, (64, 32, 1, 64), strict=True)) | {"attention.head_count": 2} | told
    made = {"general.architecture": "granite"} | {f"granite.{key}": value for key, value in known.items()}
    small_file(path, made, lambda writer: tensor and add(writer, tensor, np.zeros((32, 32), np.float32)))
    if said is None:
        assert json.loads((folder_of(path) / "config.json").read_text())["num_key_value_heads"] == 2
        return
    with pytest.raises(UnsupportedModel) as refused:
        folder_of(path)
    assert said in str(refused.value)


def test_whether_others_were_trained_for_their_length_is_no_matter(tmp_path: Path) -> None:
    small_file(tmp_path / "m.gguf", {"llama.rope.scaling.finetuned": 0})
    assert folder_of(tmp_path / "m.gguf").is_dir()


def small_file(path: Path, more: dict[str, Any], then: Callable[[gguf.GGUFWriter], object] | None = None) -> None:
    """A file with the metadata of a small Llama and `more`, an embedding, and what is added `then`."""
    told: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.block_count": 1,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 1,
    } | more
    writer = gguf.GGUFWriter(path, str(told.pop("general.architecture")))
    for name, each in told.items():
        if isinstance(each, list):
            writer.add_array(name, each)
        elif isinstance(each, str):
            writer.add_string(name, each)
        elif each is not None:
            writer.add_uint32(name, int(str(each)))
    add(writer, "token_embd.weight", np.zeros((2, 32), np.float32))
    if then is not None:
        then(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
