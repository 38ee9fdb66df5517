"""What an error says, which may be any: of a model's code, of a library, with any text in it."""

_MOST_CHARS = 300


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


def describe(error: BaseException) -> str:
    """Say what was raised: an error's type and all of its text."""
    return f"{type(error).__name__}: {text_of(error)}"


def one_line(error: BaseException) -> str:
    """An error as a line for the log: its type, and the first line of its text."""
    line = _first_line(error)
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's text, and its type where it has none."""
    return _first_line(error) or type(error).__name__


def _first_line(error: BaseException) -> str:
    """It may be empty, and is no longer than fits into a line; torch's errors go on for pages."""
    lines = text_of(error).strip().splitlines()
    return lines[0][:_MOST_CHARS] if lines else ""
