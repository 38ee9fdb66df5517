"""Numbers and elements that a tensor can't hold are refused, and those that it can are the very same."""

import itertools
from typing import Any

import numpy as np
import pytest

from chairlift.errors import InvalidRequest
from chairlift.server.oip.codec import from_raw, from_values


@pytest.mark.parametrize(("datatype", "value"), [("FP32", 1e39), ("FP32", -1e39), ("FP16", 70_000), ("FP16", 1e300)])
def test_a_number_that_would_become_infinite_is_refused(datatype: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"'x' has values outside the range of {datatype}"):
        from_values("x", datatype, [2], [1.0, value])


def test_what_was_sent_as_infinite_stays_so() -> None:
    given = [float("inf"), -float("inf"), float("nan"), 65504.0]
    for datatype in ("FP16", "FP32", "FP64"):
        np.testing.assert_array_equal(from_values("x", datatype, [4], given), given)


@pytest.mark.parametrize(
    "values", [*itertools.permutations([0, 1, 2**63 - 1, 2**63, 2**64 - 1], 3), (2**64 - 1,), (0, 0), ()]
)
def test_integers_of_64_bits_are_exact(values: tuple[int, ...]) -> None:
    assert from_values("x", "UINT64", [len(values)], list(values)).tolist() == list(values)
    nested = from_values("x", "UINT64", [len(values), 1], [[value] for value in values])
    assert nested.ravel().tolist() == list(values)
    assert nested.dtype == np.uint64


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([-1, 2**64 - 1], "outside the range of UINT64"),
        ([-1, 1], "outside the range of UINT64"),
        ([0, 2**64], "outside the range of UINT64"),
        ([0.0, 2**64 - 1], "values that are not UINT64"),
        ([True, False], "values that are not UINT64"),
        (["0", 2**64 - 1], "values that are not UINT64"),
        ([[0], 2**64 - 1], "rows of different lengths"),
        ([0, 1, 2**64 - 1], "needs 2 values"),
    ],
    ids=str,
)
def test_what_is_no_integer_of_64_bits_is_refused(values: list[Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        from_values("x", "UINT64", [2], values)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_elements_are_taken_apart_only_as_far_as_the_shape_goes(size: int) -> None:
    with pytest.raises(InvalidRequest, match=f"'x' needs {size} elements, got more"):
        from_raw("x", "BYTES", [size], bytes(4 * 1000))
    assert from_raw("x", "BYTES", [size], bytes(4 * size)).tolist() == [b""] * size
    with pytest.raises(InvalidRequest, match=f"needs {size + 1} elements, got {size}"):
        from_raw("x", "BYTES", [size + 1], bytes(4 * size))
