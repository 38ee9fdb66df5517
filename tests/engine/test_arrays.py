"""What crosses between front and worker comes out as it went in."""

import gc
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from chairlift.engine.items import arrays
from chairlift.engine.items.arrays import decode, decode_each, encode, encode_each, size_in_header
from chairlift.runners.items import Encoding

PLAIN = st.one_of(
    arrays_of.boolean_dtypes(),
    arrays_of.integer_dtypes(endianness="?"),
    arrays_of.unsigned_integer_dtypes(),
    arrays_of.floating_dtypes(sizes=(16, 32, 64)),
    arrays_of.complex_number_dtypes(),
    arrays_of.byte_string_dtypes(min_len=1),
    arrays_of.unicode_string_dtypes(min_len=1),
    arrays_of.datetime64_dtypes(),
)
ARRAYS = arrays_of.arrays(PLAIN, arrays_of.array_shapes(min_dims=0, min_side=0, max_side=40, max_dims=3))
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary() | ARRAYS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


def through(value: Any, kind: Any = Any) -> Any:
    return decode([memoryview(bytearray(frame)) for frame in encode(value)], kind)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
            and other.flags.writeable
            and other.flags.aligned
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and bool(one == other)


@settings(deadline=None)
@given(VALUES)
def test_round_trip(value: Any) -> None:
    assert same(value, through(value))
    frames = encode([value, value])
    assert [bytes(frame) for frame in encode_each([value, value])] == [bytes(frame) for frame in frames]
    assert same([value, value], decode_each([memoryview(bytearray(frame)) for frame in frames]))


def test_large_arrays_are_not_copied() -> None:
    array = np.arange(5000, dtype=np.float32).reshape(50, 100)
    header, frame = encode({"x": array})
    assert len(header) < 100
    assert np.shares_memory(np.frombuffer(frame, np.float32), array)
    back = decode([memoryview(header), memoryview(frame)])["x"]
    assert np.shares_memory(back, array)


@pytest.mark.parametrize("view", [np.s_[::2], np.s_[:, ::-1], np.s_[:, 3]], ids=str)
def test_strided_views(view: Any) -> None:
    array = np.arange(40_000, dtype=np.int64).reshape(200, 200)[view]
    assert same(np.ascontiguousarray(array), through(array))


def test_object_arrays_of_strings_and_lists() -> None:
    words = np.array([[b"a", "ü"], [b"", "b" * 9000]], dtype=object)
    back = through([words])[0]
    assert back.dtype == object
    assert back.tolist() == words.tolist()
    lists = np.empty(2, dtype=object)
    lists[0], lists[1] = [1, 2], [3, 4]
    assert through(lists).tolist() == [[1, 2], [3, 4]]


def test_scalars_and_tensors_become_what_a_reader_expects() -> None:
    import torch

    value = {"a": np.float32(0.5), "b": (np.int64(3), np.bool_(True)), "c": np.str_("x")}
    assert through(value) == {"a": 0.5, "b": [3, True], "c": "x"}
    assert same(np.arange(3.0), through(torch.arange(3.0, dtype=torch.float64)))


def test_tensors_that_numpy_cannot_read_say_why() -> None:
    import torch

    with pytest.raises(TypeError, match=r"Parameter can't be made a NumPy array: .* requires grad"):
        encode([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(TypeError, match=r"Tensor can't be made a NumPy array: .*BFloat16"):
        encode(torch.zeros(2, dtype=torch.bfloat16))


def test_encodings_keep_their_type() -> None:
    sent = [Encoding([1, 2, 3]), Encoding([4, 5], [0, 1])]
    assert through(sent, list[Encoding]) == sent


@pytest.mark.parametrize(
    ("value", "error"),
    [
        pytest.param(object(), "builtins.object can't be sent", id="an object"),
        ({"x": {1j}}, "complex can't be sent"),
        (np.zeros(2, dtype=[("a", "f4")]), "can't be sent"),
    ],
    ids=str,
)
def test_what_cannot_be_sent_is_named(value: Any, error: str) -> None:
    with pytest.raises(TypeError, match=error):
        encode(value)


def test_integers_beyond_64_bits_and_cycles() -> None:
    with pytest.raises(OverflowError):
        encode(2**64)
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="contains itself"):
        encode(cycle)


def test_bfloat16_is_refused_by_name() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(TypeError, match="bfloat16"):
        encode(np.zeros(3, dtype=ml_dtypes.bfloat16))


def test_what_is_nested_too_deeply_is_refused_before_it_is_sent() -> None:
    deep: object = 1
    for _ in range(96):
        deep = [deep]
    assert decode([memoryview(frame) for frame in encode(deep)]) == deep
    for value in ([deep], {"a": deep}, [[1], {"b": (deep,)}]):
        with pytest.raises(ValueError, match="96 levels"):
            encode(value)
    twice: list[object] = [1]
    for _ in range(60):
        twice = [twice, twice]
    with pytest.raises(ValueError, match="more than 4,194,304 lists and dicts on one level"):
        encode(twice)


def test_what_was_checked_before_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes seconds where there are millions of lists, and the event loop has no such time."""
    monkeypatch.setattr(arrays, "_MAX_LISTS", 10)
    wide: list[object] = [[]] * 11
    with pytest.raises(ValueError, match="more than 10 lists and dicts on one level"):
        encode(wide)
    assert decode([memoryview(frame) for frame in encode(wide, checked=True)]) == wide
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="contains itself"):
        encode(cycle, checked=True)


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ([1, "abc", b"d", None], 4 * 8 + 4),
        ([[1, 2.5, True]], 8 + 24),
        ([["ab", 1]], 8 + 16 + 2),
        ([{"a": 1, "b": [1]}], 8 + 16 + 8),
        ([{"x": np.zeros(10_000)}, np.zeros(3)], 16 + 8),
        ([np.full(5, "a", object)], 8 + 40),
    ],
    ids=str,
)
def test_the_size_of_values_beside_their_arrays(values: list[Any], size: int) -> None:
    assert size_in_header(values, 1000) == size
    more = size_in_header([*values, [0.5] * 10**6], 1000)
    assert more > 1000
    cycle: list[Any] = []
    cycle.append(cycle)
    assert size_in_header([cycle], 1000) > 1000


def test_values_one_by_one_are_refused_as_all_at_once() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="contains itself"):
        encode_each([1, cycle])
    with pytest.raises(TypeError, match="can't be sent"):
        encode_each([object()])


def test_nothing_waits_for_the_collector() -> None:
    value = [{"text": "a", "array": np.zeros(10_000, np.float32), "odd": np.array(["a", 1], object)}]
    was_on = gc.isenabled()
    gc.disable()
    try:
        gc.collect()
        frames = encode(value)
        decode([memoryview(frame) for frame in frames])
        assert gc.collect() == 0, "frames of many megabytes would stay for as long"
    finally:
        if was_on:
            gc.enable()
