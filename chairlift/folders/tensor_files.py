"""What a folder's safetensors files hold, by their headers: without reading any weights."""

import contextlib
import math
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from chairlift.errors import ConfigError, UnsupportedModel
from chairlift.folders.model_json import MAX_JSON_BYTES, inside, read_object, values_checked
from chairlift.folders.quantization_config import parse_quantization

# The name of a GGUF file in a folder that was made for it (chairlift/gguf/side_folder.py).
GGUF_WEIGHTS = "model.gguf"
# Names of tensors of words of 32 bits: GPTQ's, AWQ's, compressed-tensors'.
_WORDS = (".qweight", ".weight_packed")
_METADATA = "__metadata__"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = "pytorch_model*.bin"


class _Tensor(msgspec.Struct):
    """What a header says of a tensor, in bounds that no file could hold more than."""

    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0, lt=2**48)]], Meta(max_length=8)]


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights: not all that lie there, as some have the same in another layout.

    Raises UnsupportedModel, saying what to do, if there are none or one is missing.
    """
    single, index = folder / WEIGHTS, folder / WEIGHTS_INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        if pickled := sorted(folder.glob(_PICKLED)):
            problem = f"{folder} has {pickled[0].name}, which may run code when it is read"
            raise UnsupportedModel(f"{problem}; if you trust it, convert it: {conversion(folder)}")
        raise UnsupportedModel(f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}; only safetensors weights work")
    try:
        named = read_object(index).get("weight_map")
    except ConfigError as error:
        raise UnsupportedModel(f"{index} has no readable weight_map: {error}") from error
    if not isinstance(named, dict):
        raise UnsupportedModel(f"{index} has no readable weight_map: it must be an object of tensors and their files")
    files = sorted({inside(folder, name, index) for name in named.values()})
    for file in files:
        if not file.is_file():
            raise UnsupportedModel(f"{index} names {file.name!r}, but that file is missing")
    return files


def conversion(folder: Path | str) -> str:
    """What makes safetensors of a folder's pickled weights: of the tensors alone, whatever model or module has them."""
    return (
        'python -c "import glob, torch; from safetensors.torch import save_file; save_file({k: v.clone().contiguous() '
        f"for f in glob.glob('{folder}/{_PICKLED}') for k, v in torch.load(f, weights_only=True).items()}}, "
        f"'{folder}/{WEIGHTS}', {{'format': 'pt'}})\""
    )


def count_numbers(folder: Path) -> int | None:
    """How many numbers the files of weights hold, where a byte has two, and a word of a packed projection as many as
    its bits in config.json let it have.

    None if there are no such files. Raises UnsupportedModel if one is missing, ConfigError for one that is none.
    """
    # Not pipes, which would be waited for.
    if not ((folder / WEIGHTS).is_file() or (folder / WEIGHTS_INDEX).is_file()):
        return None
    in_word = 32 // _bits(folder)
    return sum(_numbers_in(path, in_word) for path in weight_files(folder))


def _bits(folder: Path) -> int:
    """Of a number in a packed projection; 4, as most have, where config.json does not say."""
    with contextlib.suppress(UnsupportedModel), values_checked():
        if (packing := parse_quantization(read_object(folder / "config.json"))) is not None:
            return packing.bits
    return 4


def _numbers_in(path: Path, in_word: int) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        most = min(MAX_JSON_BYTES, path.stat().st_size - 8)
        header = file.read(length) if length <= most else b""
    try:
        tensors = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        return sum(
            _count(name, msgspec.json.decode(each, type=_Tensor), in_word)
            for name, each in tensors.items()
            if name != _METADATA
        )
    except (ValueError, RecursionError, msgspec.DecodeError):
        raise ConfigError(f"{path} is no file of safetensors") from None


def _count(name: str, tensor: _Tensor, in_word: int) -> int:
    return math.prod(tensor.shape) * (in_word if name.endswith(_WORDS) else 2 if tensor.dtype == "U8" else 1)
