"""The structures that Python and the native library share: a difference is found when the library is loaded."""

import ctypes
import re
from typing import Any

import pytest
import torch
from support.native_isa import needs_native

from chairlift.errors import StaleLibrary
from chairlift.ops import native
from chairlift.ops.formats import FORMATS, WeightFormat

pytestmark = needs_native


def variant(of: type[ctypes.Structure], fields: list[tuple[Any, ...]]) -> type[ctypes.Structure]:
    """A structure of the same name with other fields."""
    return type(of.__name__, (ctypes.Structure,), {"_fields_": fields})


def refusal(structure: type[ctypes.Structure]) -> str:
    library = native.load_library()[0]
    with pytest.raises(StaleLibrary) as caught:
        native.check_layout(library, [structure])
    assert "pip install -e ." in str(caught.value)
    return str(caught.value)


def test_every_mirror_is_checked() -> None:
    mirrors = {each for each in vars(native).values() if isinstance(each, type) and issubclass(each, ctypes.Structure)}
    # What tells of the others is not among them.
    assert mirrors - {native.FieldStruct} == set(native.STRUCTURES)


@pytest.mark.parametrize("structure", native.STRUCTURES, ids=lambda each: each.__name__)
def test_two_fields_in_another_order_are_noticed(structure: type[ctypes.Structure]) -> None:
    """Each field swapped with the one behind it. Padding may leave one of them where it was, never both."""
    native.check_layout(native.load_library()[0], [structure])
    fields = list(structure._fields_)
    for place in range(len(fields) - 1):
        swapped = [*fields[:place], fields[place + 1], fields[place], *fields[place + 2 :]]
        names = f"{fields[place + 1][0]}|{fields[place][0]}"
        pattern = rf"structure {structure.__name__.removesuffix('Struct')}: ({names}) is \d+ bytes at offset"
        assert re.match(pattern, refusal(variant(structure, swapped)))


@pytest.mark.parametrize("structure", native.STRUCTURES, ids=lambda each: each.__name__)
def test_a_field_too_few_or_too_many_is_noticed(structure: type[ctypes.Structure]) -> None:
    fields = list(structure._fields_)
    assert f"{fields[-1][0]} is in the native library alone" in refusal(variant(structure, fields[:-1]))
    longer = refusal(variant(structure, [*fields, ("novelty", native.INT32)]))
    assert "novelty is missing from the native library" in longer


def test_a_field_of_another_size_is_noticed() -> None:
    fields = [(name, native.INT64 if name == "window" else kind) for name, kind in native.HeadsStruct._fields_]
    assert "window is 4 bytes at offset 16 in the native library, not 8 at 16" in refusal(
        variant(native.HeadsStruct, fields)
    )


def test_a_structure_that_the_library_lacks_is_noticed() -> None:
    assert "is missing" in refusal(type("Unheard", (ctypes.Structure,), {"_fields_": [("field", native.INT32)]}))


def test_a_library_without_a_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(native._SIGNATURES, "chairlift_unheard", [])
    with pytest.raises(StaleLibrary, match=r"chairlift_unheard.*pip install -e \."):
        native.load_library()


@pytest.mark.parametrize(
    "changed",
    [
        WeightFormat("int8", 1, 4, (4, 128), torch.uint8, scaled=True, compensated=True),
        WeightFormat("int8", 0, 8, (4, 128), torch.uint8, scaled=True, compensated=True),
        WeightFormat("int8", 1, 8, (4, 128), torch.uint8, scaled=True, compensated=False),
        WeightFormat("int8", 1, 8, (4, 64), torch.uint8, scaled=True, compensated=True),
        WeightFormat("int8", len(FORMATS), 8, (4, 128), torch.uint8, scaled=True, compensated=True),
    ],
    ids=["bits", "id", "compensated", "block", "unknown"],
)
def test_a_format_that_differs_is_noticed(changed: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "int8", changed)
    with pytest.raises(StaleLibrary, match=r"weight format int8 .*pip install -e \."):
        native.load_library()
