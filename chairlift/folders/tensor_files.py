"""What a folder's safetensors files hold, by their headers: without reading any weights."""

import contextlib
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from chairlift.errors import ConfigError, UnsupportedModel
from chairlift.folders.model_json import MAX_JSON_BYTES, inside, optional_object, read_object, values_checked
from chairlift.folders.quantization_config import UNPACKED_BY, QuantizationConfig, parse_quantization

# The name of a GGUF file in a folder that was made for it (chairlift/gguf/side_folder.py).
GGUF_WEIGHTS = "model.gguf"
# Names of tensors of words of 32 bits: GPTQ's, AWQ's, compressed-tensors'.
_WORDS = (".qweight", ".weight_packed")
_HOW = tuple(f".{part}" for part in UNPACKED_BY)
_METADATA = "__metadata__"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = "pytorch_model*.bin"
# Parts of the weights, by names that tell which each is, from 1 on, and how many there are.
_PART = re.compile(r"(model(?:\.safetensors)?-)([0-9]{1,6})-of-([0-9]{1,6})\.safetensors")


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
        if parts := _parts_of(folder):
            return parts
        if pickled := sorted(folder.glob(_PICKLED)):
            problem = f"{folder} has {pickled[0].name}, which may run code when it is read"
            raise UnsupportedModel(f"{problem}; if you trust it, convert it: {conversion(folder)}")
        problem = f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}, nor parts as model-00001-of-00002.safetensors"
        raise UnsupportedModel(f"{problem}; only safetensors weights work")
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


def all_parts(where: object, names: Iterable[str]) -> list[str]:
    """Of names of files those that are parts of the weights where no index says so, in their order; none if none is.

    Raises UnsupportedModel, naming the place, unless they are all parts of one whole.
    """
    found = sorted(filter(None, map(_PART.fullmatch, names)), key=lambda part: (int(part[2]), part[0]))
    if not found:
        return []
    first, count = found[0], int(found[0][3])
    which = f"and no {WEIGHTS_INDEX} that names those of the model"
    other = next((part[0] for part in found if (part[1], part[3]) != (first[1], first[3])), None)
    if other is not None:
        raise UnsupportedModel(f"{where} has {first[0]!r} and {other!r}, parts of different weights, {which}")
    there = {int(part[2]) for part in found}
    missing = next((number for number in range(1, count + 1) if number not in there), None)
    if missing is not None:
        name = f"{first[1]}{missing:0{len(first[2])}}-of-{first[3]}.safetensors"
        raise UnsupportedModel(f"{where} has {first[0]!r}, but not its other part {name!r}")
    if len(found) > count:
        raise UnsupportedModel(f"{where} has {len(found)} files that are called parts of {count}, {which}")
    return [part[0] for part in found]


def conversion(folder: Path | str) -> str:
    """What makes safetensors of a folder's pickled weights: of the tensors alone, whatever model or module has them."""
    return (
        'python -c "import glob, torch; from safetensors.torch import save_file; save_file({k: v.clone().contiguous() '
        f"for f in glob.glob('{folder}/{_PICKLED}') for k, v in torch.load(f, weights_only=True).items()}}, "
        f"'{folder}/{WEIGHTS}', {{'format': 'pt'}})\""
    )


def count_numbers(folder: Path, left: Sequence[str] = ()) -> int | None:
    """How many numbers the files of weights hold, where a byte has two, and a word of a packed projection as many as
    its bits in config.json let it have; of such a folder what they are unpacked by is not counted. Nor are those of
    tensors whose names begin with one of `left`.

    None if there are no such files. Raises UnsupportedModel if one is missing, ConfigError for one that is none.
    """
    # Not pipes, which would be waited for.
    if not (names_weights(folder) or _parts_of(folder)):
        return None
    packing = _packing(folder)
    in_word = 32 // (4 if packing is None else packing.bits)
    how = () if packing is None else _HOW
    return sum(_numbers_in(path, in_word, tuple(left), how) for path in weight_files(folder))


def names_weights(folder: Path) -> bool:
    """Whether a folder tells what its weights are in as other programs expect it: by one file's name, or an index."""
    return (folder / WEIGHTS).is_file() or (folder / WEIGHTS_INDEX).is_file()


def _parts_of(folder: Path) -> list[Path]:
    """The parts of a folder's weights, by their names."""
    names = [path.name for path in folder.glob("model*.safetensors") if path.is_file()]
    return [folder / name for name in all_parts(folder, names)]


def _packing(folder: Path) -> QuantizationConfig | None:
    """What config.json says of packed projections; None where it says nothing that is read."""
    with contextlib.suppress(UnsupportedModel), values_checked():
        raw = read_object(folder / "config.json")
        return parse_quantization(raw) or parse_quantization(optional_object(raw, "text_config"))
    return None


def _numbers_in(path: Path, in_word: int, left: tuple[str, ...], how: tuple[str, ...]) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        most = min(MAX_JSON_BYTES, path.stat().st_size - 8)
        header = file.read(length) if length <= most else b""
    try:
        tensors = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        return sum(
            _count(name, msgspec.json.decode(each, type=_Tensor), in_word)
            for name, each in tensors.items()
            if name != _METADATA and not name.startswith(left) and not name.endswith(how)
        )
    except (ValueError, RecursionError, msgspec.DecodeError):
        raise ConfigError(f"{path} is no file of safetensors") from None


def _count(name: str, tensor: _Tensor, in_word: int) -> int:
    return math.prod(tensor.shape) * (in_word if name.endswith(_WORDS) else 2 if tensor.dtype == "U8" else 1)
