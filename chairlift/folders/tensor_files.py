"""What a folder's safetensors files hold, by their headers: without reading any weights."""

import json
import math
from pathlib import Path

from chairlift.errors import ConfigError
from chairlift.folders.model_json import MAX_JSON_BYTES

# The name of a GGUF file in a folder that was made for it (chairlift/gguf/side_folder.py).
GGUF_WEIGHTS = "model.gguf"
# Names of tensors of words of 32 bits: GPTQ's, AWQ's, compressed-tensors'.
_WORDS = (".qweight", ".weight_packed")


def count_numbers(folder: Path) -> int | None:
    """How many numbers all files of weights hold, where a byte has two, and a word of a packed projection eight.

    None if there are no such files.

    Raises ConfigError for a file that is none of them.
    """
    files = sorted(folder.glob("*.safetensors"))
    return sum(map(_numbers_in, files)) if files else None


def _numbers_in(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= MAX_JSON_BYTES else b""
    try:
        tensors = json.loads(header)
        return sum(
            math.prod(each["shape"]) * (8 if name.endswith(_WORDS) else 2 if each["dtype"] == "U8" else 1)
            for name, each in tensors.items()
            if name != "__metadata__"
        )
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        raise ConfigError(f"{path} is no file of safetensors") from None
