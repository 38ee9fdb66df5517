"""How the server's and the workers' logs look. Texts that came from clients may be in them, and must not fill them."""

import logging
import re
import traceback
from types import TracebackType

from chairlift.errors import clip

# Of a message, and of each part of a traceback.
_MAX_MESSAGE, _MAX_PART = 1200, 400
# A line break in a client's text would let it write lines of its own, and an escape move the reader's cursor.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

_Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def start_logging(level: str) -> None:
    """Log to the standard error from here on: what `level` (debug, info, warning, error) lets through."""
    handler = logging.StreamHandler()
    handler.setFormatter(ShortFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class ShortFormatter(logging.Formatter):
    """Cuts what is too long: messages, which it keeps on one line, and in tracebacks what the exceptions say."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], super().formatMessage(record).rstrip())
        return clip(text, _MAX_MESSAGE)

    def formatException(self, ei: _Raised) -> str:
        """The traceback, all of its frames and the beginning and end of each exception's text."""
        if ei[1] is None:
            return ""
        parts = traceback.TracebackException.from_exception(ei[1]).format()
        return "".join(clip(part.rstrip("\n"), _MAX_PART) + "\n" for part in parts).rstrip("\n")
