"""GGUF files of models before Llama: the rows of joint projections, and what of them is refused."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file
from support.gguf_files import gguf_file, plain_folder
from support.gguf_older import OLDER

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.gguf_tensors import GgufTensors
from chairlift.gguf.model_config import config_of
from chairlift.gguf.row_orders import grouped, rows_of_parts


@pytest.mark.parametrize("name", OLDER)
def test_tensors_are_those_of_the_folder(name: str) -> None:
    """In their order, and transposed where they are."""
    found, wanted = GgufTensors(gguf_file(name)), load_file(plain_folder(name) / "model.safetensors")
    assert {*found.keys()} == {"lm_head.weight" if each == "embed_out.weight" else each for each in wanted}
    for each, tensor in wanted.items():
        own = "lm_head.weight" if each == "embed_out.weight" else each
        assert torch.equal(found.get_tensor(own), tensor)
        assert found.get_slice(own).get_shape() == list(tensor.shape)


def test_what_is_packed_is_unpacked_before_it_is_transposed() -> None:
    name = "transformer.h.1.mlp.c_fc.weight"
    kind = gguf.GGMLQuantizationType.Q8_0
    plain = load_file(plain_folder("gpt2") / "model.safetensors")[name]
    wanted = dequantize(gguf.quants.quantize(plain.T.contiguous().numpy(), kind), kind)
    np.testing.assert_array_equal(GgufTensors(gguf_file("gpt2", "Q8_0")).get_tensor(name).numpy(), wanted.T)


def test_rows_are_put_by_heads_of_keys() -> None:
    """Four of queries and two of keys and of values, of one row each."""
    assert grouped(torch.arange(8), 4, 2, "t").tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
    assert grouped(torch.arange(6), 2, 2, "t").tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize(
    ("heads", "key_heads"),
    [(0, 1), (-4, 2), (4, 0), (4, 3), (5, 1), (2**63, 1), ("4", 1), ([4], 1), (4, None), (2.0, 1)],
)
def test_rows_that_are_not_of_so_many_heads_are_named(heads: object, key_heads: object) -> None:
    with pytest.raises(UnsupportedModel, match="tensor 't' has 48 rows, which are not"):
        rows_of_parts(48, heads, key_heads, "t")


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("gpt2", "attention.head_count_kv", 2, "gpt2.attention.head_count_kv = 2"),
        ("gpt_bigcode", "attention.head_count_kv", 4, "starcoder.attention.head_count_kv = 4"),
        ("bloom", "attention.head_count_kv", 2, "bloom.attention.head_count_kv = 2"),
        ("bloom", "attention.max_alibi_bias", 4.0, "bloom.attention.max_alibi_bias = 4.0"),
        ("gpt_neox", "use_parallel_residual", None, "gptneox.use_parallel_residual must be true or false"),
        ("falcon_two_norms", "tensor_data_layout", "other", "falcon.tensor_data_layout = 'other'"),
        ("falcon_one_norm", "rope.freq_base", None, "falcon.rope.freq_base is missing"),
        ("mpt", "attention.max_alibi_bias", 0.0, "mpt.attention.max_alibi_bias = 0.0"),
        ("mpt", "attention.max_alibi_bias", [8.0], "mpt.attention.max_alibi_bias = [8.0]"),
        ("mpt", "attention.clamp_kqv", 8.0, "mpt.attention.clamp_kqv = 8.0"),
        ("mpt", "attention.head_count_kv", 1, "mpt.attention.head_count_kv = 1"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(name: str, key: str, value: object, said: str) -> None:
    file = GgufFile(gguf_file(name))
    whole = f"{file.metadata['general.architecture']}.{key}"
    if value is None:
        del file.metadata[whole]
    else:
        file.metadata[whole] = value
    with pytest.raises(UnsupportedModel) as refused:
        config_of(file)
    assert said in str(refused.value)


def test_rows_of_a_file_are_named_by_its_own_name(tmp_path: Path) -> None:
    path, data = tmp_path / "m.gguf", gguf_file("bloom").read_bytes()
    key = b"bloom.attention.head_count" + (4).to_bytes(4, "little")
    path.write_bytes(data.replace(key + (4).to_bytes(4, "little"), key + (5).to_bytes(4, "little")))
    with pytest.raises(UnsupportedModel, match=r"'blk\.0\.attn_qkv\.weight' has 192 rows, which are not 5 heads"):
        GgufTensors(path).get_tensor("transformer.h.0.self_attention.query_key_value.weight")
