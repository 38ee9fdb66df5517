"""What a dispatcher gives back for a payload."""

from typing import Any

import msgspec


class Answer(msgspec.Struct):
    """A result, the seconds that it waited and ran, and how many shared its batch."""

    value: Any
    queue_s: float
    run_s: float
    batch_size: int
