"""Telling that memory ran out, whoever it was that asked for it; and what else is read of an error that may be any."""

import errno

_MOST_CHARS = 300
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


def text_of(error: BaseException) -> str:
    """An error's text, whatever a model's code has made of it, such that it can be sent and logged as UTF-8."""
    try:
        text = str(error)
    except Exception as second:
        text = f"(its text can't be had: {type(second).__name__})"
    return as_utf8(text)


def as_utf8(text: str) -> str:
    """A text without lone surrogates, which can't be sent: Python has them where a file's name is no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def one_line(error: BaseException) -> str:
    """An error as a line for the log: its type, and the first line of its text; torch's go on for pages."""
    lines = text_of(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_MOST_CHARS]}" if lines else type(error).__name__
