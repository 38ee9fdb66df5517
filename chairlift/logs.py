"""How the server's and the workers' logs look. Texts that came from clients may be in them, and must not fill them."""

import logging
import traceback
from types import TracebackType

from chairlift.errors import clip

# Of a message, and of each part of a traceback.
_MAX_MESSAGE, _MAX_PART = 1200, 400

_Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def start_logging(level: str) -> None:
    """Log to the standard error from here on: what `level` (debug, info, warning, error) lets through."""
    handler = logging.StreamHandler()
    handler.setFormatter(ShortFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class ShortFormatter(logging.Formatter):
    """Cuts what is too long: messages, and in tracebacks what the exceptions say."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        return clip(super().formatMessage(record), _MAX_MESSAGE)

    def formatException(self, ei: _Raised) -> str:
        """The traceback, all of its frames and the beginning and end of each exception's text."""
        if ei[1] is None:
            return ""
        parts = traceback.TracebackException.from_exception(ei[1]).format()
        return "".join(clip(part.rstrip("\n"), _MAX_PART) + "\n" for part in parts).rstrip("\n")
