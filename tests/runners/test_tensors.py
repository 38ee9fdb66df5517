"""Named tensors: types by their protocol names, and what is said of those that do not fit."""

import numpy as np
import pytest

from chairlift.runners.tensors import DATATYPES, as_bytes, datatype_of, dtype_of, groups, split, stack


@pytest.mark.parametrize("datatype", DATATYPES)
def test_types_go_both_ways(datatype: str) -> None:
    # NumPy has no bfloat16, so such numbers go as those that have all of them.
    assert datatype_of(dtype_of(datatype)) == (datatype if datatype != "BF16" else "FP32")


def test_unknown_types_are_named() -> None:
    assert datatype_of(np.dtype(">f4")) == "FP32"
    with pytest.raises(ValueError, match="'FP8' is not one of BOOL, UINT8"):
        dtype_of("FP8")
    with pytest.raises(ValueError, match="complex64"):
        datatype_of(np.dtype(np.complex64))


def test_text_becomes_bytes() -> None:
    assert as_bytes([["a", b"b"], ["ü", ""]]).tolist() == [[b"a", b"b"], ["ü".encode(), b""]]
    assert as_bytes(np.array(["x", "yy"])).tolist() == [b"x", b"yy"]
    assert as_bytes("x").shape == ()


def test_groups_stack_and_split() -> None:
    values = [{"x": np.zeros(2)}, {"x": np.zeros(3)}, {"x": np.ones(2)}, {"x": np.zeros(2, np.float32)}]
    assert groups(values) == [[0, 2], [1], [3]]
    stacked = stack([values[0], values[2]])
    assert stacked["x"].shape == (2, 2)
    assert [row["x"].tolist() for row in split(stacked)] == [[0, 0], [1, 1]]
