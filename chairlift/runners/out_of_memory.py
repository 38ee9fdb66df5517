"""Telling that memory ran out, whoever it was that asked for it."""

_MOST_CHARS = 300
_TEXTS = ("out of memory", "failed to allocate memory", "bad_alloc", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of Python, torch, CUDA or ONNX Runtime says that memory ran out."""
    return isinstance(error, MemoryError) or any(text in str(error).lower() for text in _TEXTS)


def one_line(error: BaseException) -> str:
    """An error as a line for the log: its type, and the first line of its text; torch's go on for pages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_MOST_CHARS]}" if lines else type(error).__name__
