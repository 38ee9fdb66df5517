"""Which errors say that memory ran out, and which only have such words in their text."""

import errno

import pytest
import torch

from chairlift.errors import BadItem, RequestFailed
from chairlift.runners.error_text import first_line, one_line, text_of
from chairlift.runners.out_of_memory import is_out_of_memory


class Unreadable(RuntimeError):
    def __str__(self) -> str:
        raise KeyError("text")


def of(module: str, text: str) -> Exception:
    """As ONNX Runtime has them: exceptions of classes that are derived from nothing but Exception."""
    return type("RuntimeException", (Exception,), {"__module__": module})(text)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 4398046511104 bytes"), True),
        (of("onnxruntime.capi.onnxruntime_pybind11_state", "Failed to allocate memory for requested buffer"), True),
        (of("torch.cuda", "CUDA error: out of memory"), True),
        (of("onnxruntimes", "std::bad_alloc"), False),
        (RuntimeError("index 7 is out of bounds"), False),
        (ValueError("could not convert string to float: 'out of memory'"), False),
        (KeyError("out of memory"), False),
        (BadItem("'out of memory' is no number"), False),
        (RequestFailed("out of memory"), False),
        (Unreadable(), False),
    ],
    ids=repr,
)
def test_only_who_allocates_is_believed(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


def test_any_error_has_a_text_that_can_be_sent() -> None:
    assert text_of(ValueError("ü a\udc80b")) == "ü a\\udc80b"
    assert text_of(Unreadable()) == "(its text can't be had: KeyError)"
    assert one_line(Unreadable()) == "Unreadable: (its text can't be had: KeyError)"
    assert one_line(ValueError("a\udc80b\nc")) == "ValueError: a\\udc80b"
    assert (first_line(ValueError("\na\udc80b\nc")), first_line(ValueError())) == ("a\\udc80b", "ValueError")
