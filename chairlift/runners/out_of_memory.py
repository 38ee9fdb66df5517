"""Telling that memory ran out, whoever it was that asked for it."""

_TEXTS = ("out of memory", "failed to allocate memory", "bad_alloc", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of Python, torch, CUDA or ONNX Runtime says that memory ran out."""
    return isinstance(error, MemoryError) or any(text in str(error).lower() for text in _TEXTS)
