"""Corrupt, truncated and lying GGUF files: read or refused by name, in bounded time and memory."""

import itertools
import json
import os
import random
import resource
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.gguf_changes import LATENT, ROUTED
from support.gguf_files import add, gguf_file
from support.gguf_hybrids import WRITTEN, hybrid_file
from support.gguf_lies import FEW, MANY, SAID, mangled
from support.gguf_older import OLDER

from chairlift.errors import UnsupportedModel
from chairlift.folders.multimodal import is_native
from chairlift.folders.transformers_config import parse_transformers
from chairlift.gguf import gguf_tensors
from chairlift.gguf.architectures import WITH_CHANGES
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.gguf_tensors import GgufTensors
from chairlift.gguf.hybrid_config import hybrid_config
from chairlift.gguf.hybrid_tensors import HybridTensors
from chairlift.gguf.model_config import config_of
from chairlift.gguf.tensor_types import TensorTypes
from chairlift.gguf.tokenizer_files import tokenizer_files
from chairlift.runners.decoder.config import parse_config


def parse_changed(config: dict[str, Any]) -> None:
    (parse_config if is_native(config) else parse_transformers)(config)


def read_whole(path: Path) -> None:
    """All that is read of a file that is served."""
    file = GgufFile(path)
    name = file.metadata.get("general.architecture")
    if name in WITH_CHANGES:
        parse_changed(hybrid_config(file))
    else:
        parse_config(config_of(file))
    tokenizer_files(file.metadata, path.name)
    tensors = HybridTensors(path, str(name)) if name in WITH_CHANGES else GgufTensors(path)
    for name in tensors.keys():  # noqa: SIM118
        tensors.get_slice(name)
        tensors.get_tensor(name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[("llama_llama3", kind) for kind in ("F32", "Q4_0", "Q8_0", "IQ4_NL")],
        ("qwen2_moe", "Q4_0"),
        ("deepseek_v3", "F32"),
        ("falcon_two_norms", "Q4_0"),
        ("gemma_embedding", "F32"),
    ],
)
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_whatever_a_file_holds_is_read_or_refused(name: str, kind: str, count: int, tmp_path: Path) -> None:
    try_mangled(gguf_file(name, kind).read_bytes(), count, tmp_path / "m.gguf")


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("count", [FEW // 6, pytest.param(MANY, marks=pytest.mark.slow)])
def test_so_is_what_a_file_with_states_holds(name: str, count: int, tmp_path: Path) -> None:
    try_mangled(hybrid_file(name).read_bytes(), count, tmp_path / "m.gguf")


HOSTILE = (
    0,
    -1,
    1,
    7,
    2**31,
    2**63,
    1.5,
    float("nan"),
    float("inf"),
    True,
    "many",
    [],
    [0],
    [1],
    [-1] * 4,
    [2**40] * 4,
)
HOSTILE += ([0] * 4, [1, 2, 3, 4], ["a"] * 4, [0.5] * 4, [2**20] * 4)


@pytest.mark.parametrize("name", WRITTEN)
def test_any_value_of_a_key_is_read_or_refused_by_its_name(name: str) -> None:
    """Of a model with states. What is read is within the bounds of a model."""
    file = GgufFile(hybrid_file(name))
    before, plain = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, dict(file.metadata)
    keys = [key for key in plain if key.startswith(f"{plain['general.architecture']}.")]
    refused = []
    for key, value in itertools.product(keys, HOSTILE):
        file.metadata = plain | {key: value}
        try:
            parse_changed(hybrid_config(file))
        except UnsupportedModel as error:
            refused.append((key, str(error)))
    assert len(refused) > len(keys) * len(HOSTILE) / 2
    assert not [each for each in refused if len(each[1]) > 400 or "none of its kind" in each[1]]
    named = [each for each in refused if each[0] in each[1]]
    assert len(named) > 0.8 * len(refused)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def try_mangled(whole: bytes, count: int, path: Path) -> None:
    """Read it, in so many ways corrupt."""
    rng = random.Random(len(whole))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = []
    for _ in range(count):
        path.write_bytes(mangled(rng, whole))
        try:
            read_whole(path)
        except UnsupportedModel as error:
            refused.append(str(error))
    assert len(refused) > count / 3
    assert not [each for each in refused if "\n" in each or len(each) > 1000]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


@pytest.mark.parametrize("name", ["glm_joint", "olmo", "minicpm", "gemma_embedding", *LATENT, *ROUTED, *OLDER])
def test_whatever_a_key_says_is_read_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf_file(name)
    file, types = GgufFile(path), TensorTypes()
    monkeypatch.setattr(gguf_tensors, "GgufFile", lambda *given, **named: file)
    monkeypatch.setattr(gguf_tensors, "TensorTypes", lambda: types)
    told = dict(file.metadata)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = []
    for key in (key for key in told if key.startswith(told["general.architecture"])):
        for value in SAID:
            file.metadata = told | {key: value}
            try:
                config = config_of(file)
                json.dumps(config)
                parse_config(config)
                tensors = GgufTensors(path)
                for tensor in tensors.keys():  # noqa: SIM118
                    tensors.get_slice(tensor).get_shape()
                    # Those whose rows are put in another order, or two together.
                    if "attn" in tensor:
                        tensors.get_tensor(tensor)
            except UnsupportedModel as error:
                refused.append(str(error))
    assert len(refused) > len(SAID)
    assert not [each for each in refused if "\n" in each or len(each) > 1000]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "cannot be read"),
        (b"GGML" + bytes(20), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensors, more than"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "pairs of metadata, more than"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**60), "a text of"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QcIIQ", 1, b"k", 9, 9, 1), "unknown type 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QcIIQ", 1, b"k", 9, 4, 2**60), "elements of 'k'"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<QcI", 1, b"t", 99), "99 dimensions"),
    ],
)
def test_what_a_header_claims_is_bounded(body: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(body)
    with pytest.raises(UnsupportedModel) as refused:
        GgufFile(path)
    assert said in str(refused.value)


def test_elements_of_all_lists_together_are_bounded(tmp_path: Path) -> None:
    path, half = tmp_path / "m.gguf", 2**21
    lists = [struct.pack("<QcIIQ", 1, key, 9, 1, half + more) + bytes(half) for key, more in ((b"a", 0), (b"b", 1))]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + b"".join(lists))
    with pytest.raises(UnsupportedModel, match=r"2097153 elements of 'b', and with those of other lists more than"):
        GgufFile(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModel, match=r"model\.gguf cannot be read: it is no file"):
        GgufFile(tmp_path / "model.gguf")


def test_experts_that_are_not_as_many_as_counted_are_named(tmp_path: Path) -> None:
    data = gguf_file("mixtral").read_bytes()
    key = b"llama.expert_count" + struct.pack("<I", 4)
    path = tmp_path / "m.gguf"
    path.write_bytes(data.replace(key + struct.pack("<I", 4), key + struct.pack("<I", 3)))
    with pytest.raises(UnsupportedModel, match=r"ffn_.*_exps.* is of \[4, .*\] numbers, not of 3 by expert_count"):
        read_whole(path)


def test_experts_of_all_tensors_together_are_bounded(tmp_path: Path) -> None:
    """A name in the file is one for each expert, of which there may be a thousand."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_expert_count(1024)
    for layer in range(260):
        writer.add_tensor_info(f"blk.{layer}.ffn_up_exps.weight", (1024, 1, 1), np.dtype(np.float32), 4096)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="more than 262144 tensors, each expert's counted"):
        GgufTensors(path)


@pytest.mark.parametrize("name", ["{}", "a{}{:>99999999}", "{}{0.__class__}", "{}{no}", "blk.0.{}.weight", "{"])
@pytest.mark.parametrize("experts", [0, 4])
def test_braces_in_a_tensor_s_own_name_mean_nothing(name: str, experts: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if experts:
        writer.add_expert_count(experts)
    add(writer, name, np.zeros((4, 2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = GgufTensors(path)
    assert tensors.keys() == [name]
    assert tensors.get_tensor(name).shape == (4, 2, 32)


def test_a_tensor_beyond_the_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file("llama", "Q8_0").read_bytes()[:-4096])
    with pytest.raises(UnsupportedModel, match=r"tensor '.*' lies beyond the end"):
        read_whole(path)
