"""Model folders from strangers: refused by name, from the smallest file that tells, before anything large is done."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.model_factory import TINY

from chairlift.errors import ChairliftError, ConfigError, UnsupportedModel
from chairlift.folders.kind import is_encoder, labels_of
from chairlift.folders.model_json import MAX_JSON_BYTES, read_model_json
from chairlift.folders.sentence_files import SentenceFiles
from chairlift.folders.tensor_files import weight_files
from chairlift.runners.decoder.config import read_config
from chairlift.runners.encoder.config import read_encoder_config
from chairlift.text import Tokenizer

ABSURD: list[dict[str, Any]] = [
    {"hidden_size": 2**40},
    {"intermediate_size": 2**40},
    {"num_hidden_layers": 10**9},
    {"num_attention_heads": 2**30, "hidden_size": 2**16},
    {"vocab_size": 10**12},
    {"max_position_embeddings": 10**15},
    {"head_dim": 2**40},
]
ODD: list[dict[str, Any]] = [
    {"model_type": ["llama"]},
    {"rms_norm_eps": [1]},
    {"layer_norm_eps": [1]},
    {"layer_types": 5},
    {"hidden_act": {"a": 1}, "hidden_activation": {"a": 1}},
    {"rope_scaling": {"rope_type": "linear", "factor": "x"}, "rope_parameters": {"full_attention": 5}},
    {"original_max_position_embeddings": 1e999, "pad_token_id": "x"},
]


def folder(path: Path, **fields: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(TINY | {"model_type": "llama"} | fields))
    return path


@pytest.mark.parametrize("fields", ABSURD, ids=str)
def test_absurd_sizes_are_refused_by_name(fields: dict[str, Any], tmp_path: Path) -> None:
    name = next(iter(fields))
    with pytest.raises(UnsupportedModel, match=name):
        read_config(folder(tmp_path, **fields))
    if name == "head_dim":
        return
    for family in ("bert", "modernbert"):
        with pytest.raises(UnsupportedModel, match=name):
            read_encoder_config(folder(tmp_path, model_type=family, type_vocab_size=2, **fields))


@pytest.mark.parametrize("fields", ODD, ids=str)
def test_values_of_the_wrong_kind_are_unsupported(fields: dict[str, Any], tmp_path: Path) -> None:
    raised = 0
    for family, read in (("llama", read_config), ("modernbert", read_encoder_config), ("roberta", read_encoder_config)):
        made = folder(tmp_path, **({"model_type": family, "type_vocab_size": 2} | fields))
        for look in (read, is_encoder):
            try:
                look(made)
            except ChairliftError:
                raised += 1
    assert raised


def test_too_many_labels() -> None:
    with pytest.raises(UnsupportedModel, match="num_labels"):
        labels_of({"num_labels": 10**12})


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "modules.json",
        "tokenizer_config.json",
        "generation_config.json",
        "added_tokens.json",
        "special_tokens_map.json",
    ],
)
@pytest.mark.parametrize("kind", ["large", "deep"])
def test_absurd_json_files_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    from support.text_tokenizers import build

    build("bytelevel").save(str(folder(tmp_path) / "tokenizer.json"))
    if kind == "large":
        with (tmp_path / name).open("wb") as file:
            file.truncate(MAX_JSON_BYTES + 1)
    else:
        (tmp_path / name).write_text("[" * 100_000 + "]" * 100_000)
    read: Any = {"config.json": read_model_json, "modules.json": SentenceFiles.read}.get(name, Tokenizer.from_folder)
    with pytest.raises(ConfigError, match=r"bytes, more than|nested too deeply"):
        read(tmp_path)


def test_an_absurd_tokenizer_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**34)
    with pytest.raises(UnsupportedModel, match="17179869184 bytes"):
        Tokenizer.from_folder(tmp_path)


def weights(path: Path, name: Any) -> Path:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    return path


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "a/../../secret.safetensors", "/etc/passwd", "a\0b", 5, None]
)
def test_weights_do_not_leave_the_folder_by_their_names(name: Any, tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"")
    (tmp_path / "model").mkdir()
    with pytest.raises(UnsupportedModel, match="not the name of a file in the model's folder"):
        weight_files(weights(tmp_path / "model", name))
    (tmp_path / "model" / "modules.json").write_text(json.dumps([{"type": "a.Transformer", "path": name}]))
    with pytest.raises(ChairliftError, match=r"not the name of a file in the model's folder|a list of modules"):
        SentenceFiles.read(tmp_path / "model")


def test_a_link_out_of_the_folder_is_how_caches_are_made(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "0123"
    blob.parent.mkdir()
    blob.write_bytes(b"")
    (tmp_path / "model" / "parts").mkdir(parents=True)
    (tmp_path / "model" / "parts" / "1.safetensors").symlink_to(blob)
    assert weight_files(weights(tmp_path / "model", "parts/1.safetensors")) == [
        tmp_path / "model" / "parts" / "1.safetensors"
    ]


@pytest.mark.processes
@pytest.mark.parametrize(
    "fields", [{"hidden_size": 2**40}, {"model_type": "zamba"}, {"quantization_config": {"a": 1}}], ids=str
)
def test_a_worker_refuses_before_it_loads_torch(fields: dict[str, Any], tmp_path: Path) -> None:
    """Its modules say so, rather than a clock."""
    path = str(folder(tmp_path, **fields))
    program = f"""
import os, sys, zmq, msgspec
def leave(status): raise SystemExit(status)
os._exit = leave
from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
for kind, config in (("sequences", SequenceConfig(model={path!r})), ("items", ItemConfig(model={path!r}))):
    worker = __import__(f"chairlift.engine.{{kind}}.worker", fromlist=["main"])
    context = zmq.Context()
    front = context.socket(zmq.PAIR)
    front.bind(f"ipc://{tmp_path}/{{kind}}")
    try:
        status = worker.main(f"ipc://{tmp_path}/{{kind}}", msgspec.json.encode(config).decode())
    except SystemExit as left:
        status = left.code
    assert status == 1, status
    print(front.recv().decode(errors="replace"))
    context.destroy(linger=0)
assert "torch" not in sys.modules, "torch"
"""
    # A worker ends when its standard input does.
    theirs, ours = os.pipe()
    made = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        stdin=theirs,
        timeout=60,
    )
    os.close(theirs)
    os.close(ours)
    assert made.returncode == 0, made.stderr
    assert made.stdout.count("LoadFailed") == 2
    assert made.stdout.count(next(iter(fields))) >= 2
