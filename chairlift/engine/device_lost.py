"""Telling that nothing more can be computed in this process: after most of its errors CUDA fails at all it is asked."""

import re
import sys

from chairlift.runners.error_text import text_of
from chairlift.runners.out_of_memory import is_out_of_memory

# What ONNX Runtime says of CUDA, where 2 is that memory ran out, and of its libraries, which may only refuse something.
_OF_ONNX = re.compile(r"CUDA failure (?!2\b)\d+|CU(BLAS|DNN) failure \d+: \w+_(EXECUTION_FAILED|INTERNAL_ERROR)")


def is_device_lost(error: BaseException) -> bool:
    """Whether an exception is one of CUDA's that only another process makes good for; not that memory ran out.

    CUDA does not say which of its errors spare the process, so none is thought to. Who only quotes such an error, as a
    model's code may that was sent one, has not run into it.
    """
    if is_out_of_memory(error):
        return False
    if type(error).__module__.partition(".")[0] == "onnxruntime":
        return _OF_ONNX.search(text_of(error)) is not None
    torch = sys.modules.get("torch")
    if isinstance(error, getattr(torch, "AcceleratorError", ())):
        return True
    # Of libraries' errors only the text tells, and all of torch's others are of this very class.
    return torch is not None and type(error) is RuntimeError and text_of(error).startswith("CUDA error")
