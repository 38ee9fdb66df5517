"""`chairlift check`: what it says of folders, and that it reads no weights and needs no torch."""

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.encoder_factory import encoder_folder, judge_folder, sentence_folder
from support.foreign_factory import foreign_folder, gemma3_folder
from support.gguf_files import gguf_file
from support.model_factory import edited_folder, model_folder
from support.multimodal_factory import multimodal_folder
from support.packers import packed_pair
from support.text_tokenizers import build
from torch import Tensor

from chairlift.cli import main
from chairlift.commands import check
from chairlift.commands.check import numbers_in
from chairlift.config.sequences import SequenceConfig
from chairlift.errors import ConfigError
from chairlift.folders.tensor_files import count_numbers
from chairlift.hub.cache import gigabytes
from chairlift.runners.decoder.model import Decoder
from chairlift.runners.decoder.runner import DecoderRunner


def tokenized(target: Path, source: Path) -> Path:
    """A copy of a model's folder, with a tokenizer."""
    folder = edited_folder(target, source)
    build("bytelevel").save(str(folder / "tokenizer.json"))
    return folder


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    assert main(["check", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition("  ") for line in lines)}


def test_what_it_says_of_a_language_model_is_what_its_runner_finds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tokenized(tmp_path / "model", model_folder("llama"))
    # The same weights as the authors' own programs have them, which is what Mistral's repositories hold as well.
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    rows = told(capsys, str(folder))
    runner = DecoderRunner(SequenceConfig(model=str(folder), dtype="bfloat16"))
    info = runner.load()
    assert rows["strategies"] == "none, static, dynamic, continuous"
    assert f"{runner.model.kv_bytes_per_token():,} bytes a token" in rows["bfloat16 KV cache"]
    assert f"{info.num_blocks * info.block_size:,} tokens" in rows["bfloat16 KV cache"]
    assert f"{gigabytes(2 * sum(tensor.numel() for tensor in _tensors(folder)))} in bfloat16" in rows["weights"]
    assert rows["free memory"].endswith("of this machine, for device cpu; a GPU's is not looked at")


@pytest.mark.parametrize(
    ("saved", "computed"), [("float16", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")]
)
def test_the_type_that_a_model_is_computed_in_unasked_is_told_and_marked(
    saved: str, computed: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tokenized(tmp_path / "model", model_folder("llama", saved))
    rows = told(capsys, str(folder))
    runner = DecoderRunner(SequenceConfig(model=str(folder)))
    info = runner.load()
    assert info.dtype == computed
    size = 4 if computed == "float32" else 2
    numbers = sum(tensor.numel() for tensor in _tensors(folder))
    assert f'{gigabytes(size * numbers)} in {computed} (dtype "auto")' in rows["weights"]
    assert rows["weights"].count("auto") == 1
    assert ("half of it from AVX2 on" in rows["weights"]) == (saved == "float16")
    assert f'{runner.model.kv_bytes_per_token():,} bytes a token (dtype "auto");' in rows[f"{computed} KV cache"]
    assert [name for name, value in rows.items() if '"auto"' in value] == ["weights", f"{computed} KV cache"]
    # An embedding that is not rounded stays in that type.
    raw = json.loads((folder / "config.json").read_text())
    embedding = raw["vocab_size"] * raw["hidden_size"]
    assert f"{gigabytes(numbers + (size - 1) * embedding)} in int8" in rows["weights"]


@pytest.mark.parametrize(("kind", "computed"), [("F16", "float32"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")])
def test_the_type_that_a_gguf_file_is_computed_in_is_marked(
    kind: str, computed: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = told(capsys, str(gguf_file("llama", kind)))
    assert f'in {computed} (dtype "auto")' in rows["weights"]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"model_type": "mpt", "architectures": ["MPTForCausalLM"], "d_model": 4096, "n_heads": 32, "n_layers": 32}
            | {"max_seq_len": 65536, "vocab_size": 50432, "attn_config": {"clip_qkv": 6, "alibi_bias_max": 16}},
            "attn_config.clip_qkv=6 is not supported",
        ),
        (
            {"model_type": "zamba", "architectures": ["ZambaForCausalLM"], "hidden_size": 64}
            | {"num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 512, "vocab_size": 320},
            "model_type 'zamba' is not supported: it has layers that share one attention",
        ),
    ],
    ids=["mpt", "zamba"],
)
def test_what_loading_would_refuse_is_refused(
    config: dict[str, Any], problem: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    build("bytelevel").save(str(tmp_path / "tokenizer.json"))
    save_file({}, tmp_path / "model.safetensors")
    assert main(["check", str(tmp_path)]) == 1
    assert f"can't be served: {problem}" in capsys.readouterr().out


def test_parts_without_an_index_are_counted_if_all_are_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tokenized(tmp_path / "model", model_folder("llama_sharded"))
    rows = told(capsys, str(folder))["weights"]
    (folder / "model.safetensors.index.json").unlink()
    assert told(capsys, str(folder))["weights"] == rows
    part = min(folder.glob("model-*.safetensors"))
    part.unlink()
    assert main(["check", str(folder)]) == 1
    assert f"but not its other part '{part.name}'" in capsys.readouterr().out


@pytest.mark.parametrize(("variant", "kept", "copied"), [("llama", 1, 0), ("llama_tied", 0, 0), ("gpt2", 1, 1)])
def test_what_is_not_rounded_is_told(
    variant: str, kept: int, copied: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An embedding, unless rows of the head are looked up; where it is centred, the head is a copy of it besides."""
    rows = told(capsys, str(tokenized(tmp_path / "model", model_folder(variant))))
    numbers = sum(tensor.numel() for tensor in _tensors(model_folder(variant)))
    raw = json.loads((model_folder(variant) / "config.json").read_text())
    embedding = raw["vocab_size"] * raw.get("hidden_size", raw.get("n_embd"))
    others = numbers + (copied - kept) * embedding
    assert f"{gigabytes(others + 4 * kept * embedding)} in int8" in rows["weights"]
    assert f"{gigabytes(round(others * 9 / 16) + 4 * kept * embedding)} in int4" in rows["weights"]
    runner = DecoderRunner(SequenceConfig(model=str(model_folder(variant)), quantization="int8"))
    runner.load()
    assert isinstance(runner.model, Decoder)
    assert (runner.model.weights.embedding is not None) == bool(kept)


def test_what_the_system_does_not_show_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(folder: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder / "model.safetensors"))

    folder = tokenized(tmp_path / "model", model_folder("llama"))
    monkeypatch.setattr(check, "count_numbers", denied)
    assert main(["check", str(folder)]) == 1
    assert "model.safetensors can't be looked at: Permission denied" in capsys.readouterr().err
    assert main(["check", "a" * 300]) == 1


def test_what_it_says_of_a_language_model_that_reranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = judge_folder(tmp_path / "judge", tokenized(tmp_path / "model", model_folder("qwen3")), 7, 9)
    rows = told(capsys, str(folder))
    assert rows["model"] == "qwen3: scores pairs of texts"
    assert rows["score"] == "the logit of token 7 as the next one less that of 9"
    assert rows["pairs"] == "as chats of a query and a document, by the folder's chat template"
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    (folder / "sentence_bert_config.json").write_text('{"modality_config": {"message": {}}}')
    assert told(capsys, str(folder))["texts"] == "as what a user says in a chat, by the folder's chat template"


def test_what_it_says_of_a_model_that_reads_images_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tokenized(tmp_path / "gemma", gemma3_folder(tmp_path / "bare", "4b"))
    save_file({}, folder / "model.safetensors")
    rows = told(capsys, str(folder))
    assert rows["model"].startswith("gemma3_text, 34 layers of 2560: writes texts; its parts for images")
    assert (rows["computed by"], rows["positions"]) == ("native kernels", "131,072")
    folder = tokenized(tmp_path / "model", multimodal_folder("llava"))
    texts = [tensor for name, tensor in load_file(folder / "model.safetensors").items() if "language_model" in name]
    held = sum(tensor.numel() for tensor in texts)
    assert f"{gigabytes(4 * held)} in float32" in told(capsys, str(folder))["weights"]


def test_other_models_and_what_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "embeds texts" in told(capsys, str(tokenized(tmp_path / "bert", encoder_folder("bert"))))["model"]
    pickled = tokenized(tmp_path / "pickled", encoder_folder("bert"))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    modules = sentence_folder(tmp_path / "modules", encoder_folder("bert"), [("Normalize", {})])
    for path, problem in (
        (model_folder("llama"), "has no tokenizer.json"),
        (encoder_folder("bert"), "has no tokenizer.json"),
        (pickled, "has pytorch_model.bin, which may run code"),
        (modules, "has no Pooling module"),
        (tmp_path, "has no config.json"),
        (tmp_path / "none", "no name of the Hub"),
        ("someone/files:model-q4_k_m.gguf", "`chairlift pull someone/files:model-q4_k_m.gguf`, and check that"),
    ):
        assert main(["check", str(path)]) == 1
        assert problem in "".join(capsys.readouterr())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    save_file({}, tmp_path / "model.safetensors")
    assert main(["check", str(tmp_path)]) == 1
    assert "can't be served: model_type 'mamba' with architectures []: none writes texts" in capsys.readouterr().out
    foreign = tokenized(tmp_path / "phi", foreign_folder("phi", "phi"))
    assert "transformers' modules" in told(capsys, str(foreign))["computed by"]
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    assert main(["check", str(tmp_path)]) == 1
    assert "is no file of safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["gptq", "compressed, 8 bits, ordered", "fp8, blocks"])
def test_packed_folders_are_counted_as_they_run(
    layout: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Those of native families and through transformers."""
    for source, computed in ((model_folder("llama"), "native"), (foreign_folder("arcee", "arcee"), "transformers'")):
        pair = packed_pair(tmp_path / computed, source, layout, lambda name, _: name.endswith("up_proj.weight"))
        packed, plain = (tokenized(folder.with_name(f"{folder.name}-told"), folder) for folder in pair)
        rows, wanted = told(capsys, str(packed)), told(capsys, str(plain))
        assert computed in rows["computed by"]
        assert rows["weights"] == wanted["weights"]
        half = tokenized(tmp_path / f"{computed}-half", packed)
        raw = json.loads((half / "config.json").read_text())
        (half / "config.json").write_text(json.dumps({**raw, "dtype": "float16"}))
        assert 'in bfloat16 (dtype "auto")' in told(capsys, str(half))["weights"]


def test_packed_folders_that_are_not_read_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for method, said in (
        ({"quant_method": "hqq"}, "quant_method 'hqq'"),
        ({"quant_method": "awq", "bits": 3}, "bits=3"),
    ):
        folder = tokenized(tmp_path / str(method["quant_method"]), foreign_folder("lfm2", "lfm2"))
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": method}))
        assert main(["check", str(folder)]) == 1
        assert f"can't be served: quantization_config: {said}" in capsys.readouterr().out


def write_header(path: Path, header: bytes, length: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)


@pytest.mark.parametrize(
    "shape",
    [
        f'["{"x" * 1000}", 100000000]',
        "[[1], 100000000]",
        f"[{'9' * 4000}, {'9' * 4000}]",
        "[281474976710656]",
        "[-1]",
        "[2.5]",
        "[true]",
        f"[{', '.join('2' * 9)}]",
        "5",
        "[" * 100_000,
    ],
    ids=lambda shape: shape[:20],
)
def test_a_shape_that_no_file_could_hold_is_refused(shape: str, tmp_path: Path) -> None:
    write_header(tmp_path / "model.safetensors", f'{{"a": {{"dtype": "F32", "shape": {shape}}}}}'.encode())
    with pytest.raises(ConfigError, match=r"model\.safetensors is no file of safetensors"):
        count_numbers(tmp_path)


def test_what_headers_say_is_counted(tmp_path: Path) -> None:
    tensors = {
        "__metadata__": {"shape": "none"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b.qweight": {"dtype": "I32", "shape": [5], "data_offsets": [24, 44]},
        "c_blocks": {"dtype": "U8", "shape": [7], "data_offsets": [44, 51]},
        "d": {"dtype": "F32", "shape": [], "data_offsets": [51, 55]},
    }
    write_header(tmp_path / "model.safetensors", json.dumps(tensors).encode() + b"   ")
    assert count_numbers(tmp_path) == 6 + 40 + 14 + 1
    for bits, in_word in ((8, 4), (2, 16)):
        packed = {"quantization_config": {"quant_method": "gptq", "bits": bits}}
        (tmp_path / "config.json").write_text(json.dumps(packed))
        assert count_numbers(tmp_path) == 6 + 5 * in_word + 14 + 1
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "hqq"}}))
    assert count_numbers(tmp_path) == 6 + 40 + 14 + 1
    write_header(tmp_path / "model.safetensors", b"{}", length=3)
    with pytest.raises(ConfigError, match="is no file of safetensors"):
        count_numbers(tmp_path)


def test_what_is_named_as_a_file_of_weights_and_is_none_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    assert count_numbers(tmp_path) is None


def test_only_the_files_that_are_read_are_counted(tmp_path: Path) -> None:
    tensor = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
    for number, name in enumerate(("a", "b", "consolidated")):
        write_header(tmp_path / f"{name}.safetensors", json.dumps({f"t{number}": tensor}).encode())
    index = {"weight_map": {"t0": "a.safetensors", "t1": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert count_numbers(tmp_path) == 6


@pytest.mark.processes
def test_it_needs_no_torch(tmp_path: Path) -> None:
    program = f"""
import sys
from chairlift.cli import main
assert main(["check", {str(tokenized(tmp_path / "model", model_folder("llama")))!r}]) == 0
assert main(["check", {str(gguf_file("llama"))!r}]) == 0
assert "torch" not in sys.modules
"""
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=env)


def _tensors(folder: Path) -> list[Tensor]:
    return list(load_file(folder / "model.safetensors").values())


@pytest.mark.parametrize(
    ("size", "config", "numbers"),
    [
        (4000, {}, 1000),
        (4000, {"dtype": "bfloat16"}, 2000),
        (4000, {"torch_dtype": "float16"}, 2000),
        (1700, {"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}, 3200),
        (4000, {"dtype": "bfloat16", "quantization_config": {"quant_method": "awq"}}, 8000),
        (4000, {"dtype": "float16", "quantization_config": {"quant_method": "gptq", "bits": 8}}, 4000),
        (4000, {"dtype": "bfloat16", "quantization_config": {"quant_method": "hqq"}}, 2000),
        (4000, {"quantization_config": "mxfp4"}, 1000),
        # Embedding and head are not packed.
        (8000, {"quantization_config": {"quant_method": "awq"}, "vocab_size": 100, "hidden_size": 10}, 1000 + 12000),
        (
            8000,
            {"quantization_config": {"quant_method": "awq"}, "vocab_size": 100, "hidden_size": 10}
            | {"tie_word_embeddings": False},
            2000 + 8000,
        ),
        (
            3400 + 4000,
            {"quantization_config": {"quant_method": "mxfp4"}, "vocab_size": 100, "hidden_size": 10}
            | {"tie_word_embeddings": False},
            2000 + 6400,
        ),
        (100, {"quantization_config": {"quant_method": "awq"}, "vocab_size": 100, "hidden_size": 10}, 50),
    ],
)
def test_numbers_are_told_from_the_size_of_files(size: int, config: dict[str, Any], numbers: int) -> None:
    assert numbers_in(size, config) == numbers
