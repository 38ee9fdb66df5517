"""What a folder's safetensors files hold, by their headers: without reading any weights."""

import math
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from chairlift.errors import ConfigError
from chairlift.folders.model_json import MAX_JSON_BYTES

# The name of a GGUF file in a folder that was made for it (chairlift/gguf/side_folder.py).
GGUF_WEIGHTS = "model.gguf"
# Names of tensors of words of 32 bits: GPTQ's, AWQ's, compressed-tensors'.
_WORDS = (".qweight", ".weight_packed")
_METADATA = "__metadata__"


class _Tensor(msgspec.Struct):
    """What a header says of a tensor, in bounds that no file could hold more than."""

    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0, lt=2**48)]], Meta(max_length=8)]


def count_numbers(folder: Path) -> int | None:
    """How many numbers all files of weights hold, where a byte has two, and a word of a packed projection eight.

    None if there are no such files.

    Raises ConfigError for a file that is none of them.
    """
    # Not pipes, which would be waited for.
    files = [path for path in sorted(folder.glob("*.safetensors")) if path.is_file()]
    return sum(map(_numbers_in, files)) if files else None


def _numbers_in(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        most = min(MAX_JSON_BYTES, path.stat().st_size - 8)
        header = file.read(length) if length <= most else b""
    try:
        tensors = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        return sum(
            _count(name, msgspec.json.decode(each, type=_Tensor)) for name, each in tensors.items() if name != _METADATA
        )
    except (ValueError, RecursionError, msgspec.DecodeError):
        raise ConfigError(f"{path} is no file of safetensors") from None


def _count(name: str, tensor: _Tensor) -> int:
    return math.prod(tensor.shape) * (8 if name.endswith(_WORDS) else 2 if tensor.dtype == "U8" else 1)
