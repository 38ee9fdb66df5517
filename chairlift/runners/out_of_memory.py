"""Telling that memory ran out, whoever it was that asked for it."""

import errno

from chairlift.runners.error_text import text_of

_TEXTS = ("out of memory", "failed to allocate memory", "bad_alloc", "can't allocate memory")
# Whose exceptions may be of any class.
_LIBRARIES = ("torch", "onnxruntime")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of Python, the system, torch, CUDA or ONNX Runtime says that memory ran out.

    Others only quote: a KeyError, a ValueError or a refused item may have any text that a client sent, and if that were
    believed, one request would have everybody's batches made smaller.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    library = type(error).__module__.partition(".")[0]
    if not isinstance(error, RuntimeError) and library not in _LIBRARIES:
        return False
    text = text_of(error).lower()
    return any(each in text for each in _TEXTS)
