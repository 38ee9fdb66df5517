"""The tensors of a GGUF file under the names of a folder's, unpacked as they are read."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.errors import UnsupportedModel
from chairlift.gguf.architecture import Architecture
from chairlift.gguf.architectures import architecture_of
from chairlift.gguf.encoder_architecture import EncoderArchitecture
from chairlift.gguf.encoder_tensors import made_tensors
from chairlift.gguf.gguf_file import GgufFile, TensorPlace, shown
from chairlift.gguf.model_config import FACTORS, same_in_all
from chairlift.gguf.row_orders import grouped, joined_up, rows_of_parts, unpaired
from chairlift.gguf.tensor_types import Packing, TensorTypes

# Numbers that are unpacked at a time.
_AT_A_TIME = 2**17
# The largest models have a quarter of that: 384 experts in 60 layers.
_MOST_PLACES = 2**18
# Of each of Gemma 3n's streams one, in one.
_STREAMS = ("altup_proj.", "altup_unembd_proj.")
# Converters may leave out that it is one row.
_ONE_ROW = ".shared_expert_gate.weight"
_PAIRED = (".self_attn.q_proj.", ".self_attn.k_proj.")
_JOINT = ".attn_qkv."
# What makes keys and values of a latent, which converters take apart, and what a folder has instead.
_KEYS_UP, _VALUES_UP, _BOTH_UP = (f".self_attn.{part}_b_proj.weight" for part in ("k", "v", "kv"))


# By a type's number in ggml, of blocks [N, bytes] into numbers [N, numbers of one]; whether it knows the type.
UnpackBlocks = Callable[[int, NDArray[np.uint8], NDArray[np.float32]], bool]


class TensorShape:
    """What safetensors gives for a tensor that is not read yet."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def get_shape(self) -> list[int]:
        """The sizes of its dimensions."""
        return list(self._shape)


class GgufTensors:
    """Reads tensors as a handle of safetensors does. Raises UnsupportedModel naming the tensor at fault."""

    def __init__(
        self, path: Path, unpack_natively: UnpackBlocks | None = None, known: Architecture | None = None
    ) -> None:
        """Open a file, whose blocks that unpacks where it can, and whose names these are, or its architecture's."""
        self._unpack_natively = unpack_natively
        self._file = file = GgufFile(path, with_vocabulary=False)
        self.metadata = file.metadata
        self._known = known or architecture_of(file.metadata, file.tensors)
        prefix = f"{file.metadata['general.architecture']}."
        key, layers = f"{prefix}attention.head_count", file.metadata.get(f"{prefix}block_count")
        heads = file.metadata.get(key)
        # Of queries and of keys, in whose order rows may have to be.
        self._heads = same_in_all(heads, layers), same_in_all(file.metadata.get(f"{key}_kv", heads), layers)
        self._types = TensorTypes()
        # The file's own name of each, and where it lies.
        self._places: dict[str, tuple[str, TensorPlace]] = {}
        for name in file.tensors:
            if name not in FACTORS:
                self._add(name)
        # Of a layer what is in two tensors.
        self._halves = dict(self._pairs())
        # Of an encoder what is otherwise in folders.
        is_encoder = isinstance(self._known, EncoderArchitecture)
        self._made = made_tensors(self._places, self._read) if is_encoder else {}
        # Of an encoder names that are none of its parts' are taken for those of a head, and left.
        if is_encoder and (unknown := [*self.unknown(), *(name for name in FACTORS if name in file.tensors)]):
            raise UnsupportedModel(f"tensor {unknown[0]!r} of {path.name} is none that such encoders have here")

    def keys(self) -> list[str]:
        """The names of all tensors."""
        return [*self._places, *self._halves, *self._made]

    def unknown(self) -> list[str]:
        """Those of names that no folder has anything for."""
        return [name for name, (own, _) in self._places.items() if name == own]

    def own_name(self, name: str) -> str:
        """What the file calls the tensor that this one is, or is a part of."""
        return self._places[name][0]

    def get_slice(self, name: str) -> TensorShape:
        """What has a tensor's shape."""
        if name in self._made:
            return TensorShape(self._made[name].shape)
        if name in self._halves:
            (_, keys), (_, values) = self._halves[name]
            heads, rank, plain = keys.shape
            return TensorShape((heads * (plain + values.shape[1]), rank))
        own, place = self._places[name]
        # Whoever asks takes memory for it next, so it has to be there.
        self._types.packing_within(own, place, self._file.path.name)
        shape = place.shape
        return TensorShape(shape[::-1] if self._is_transposed(name) else shape)

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor as float32, or as it is if it is in 16 bits."""
        if name in self._made:
            return self._made[name].make()
        if name in self._halves:
            keys, values = (self._read(*each) for each in self._halves[name])
            return joined_up(keys, values)
        own, place = self._places[name]
        found = self._read(own, place)
        if self._known.lift and name.endswith("norm.weight"):
            found = found.float() - self._known.lift
        for part, heads in zip(_PAIRED, self._heads, strict=True):
            if self._known.paired and part in name:
                found = unpaired(found, heads, own)
        if self._known.family.grouped and _JOINT in own:
            found = grouped(found, *self._heads, own)
        return found.T.contiguous() if self._is_transposed(name) else found

    def _is_transposed(self, name: str) -> bool:
        """Whether a folder has this projection as [in, out]."""
        family = self._known.family
        is_of_layer = name.startswith(family.base + family.layers)
        return family.transposed and is_of_layer and len(self._places[name][1].shape) == 2

    def _pairs(self) -> Iterator[tuple[str, list[tuple[str, TensorPlace]]]]:
        """What is in two tensors [heads, R, P] and [heads, V, R], taken out of the places."""
        for name in [name for name in self._places if name.endswith(_KEYS_UP)]:
            other = name.replace(_KEYS_UP, _VALUES_UP)
            if other not in self._places:
                continue
            pair = [self._places.pop(each) for each in (name, other)]
            (own, keys), (_, values) = pair
            if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != values.shape[::2]:
                shapes = f"{list(keys.shape)}, and that of its values for {list(values.shape)}"
                raise UnsupportedModel(f"tensor {own!r} is for {shapes}: they are not of the same heads and latent")
            both = name.replace(_KEYS_UP, _BOTH_UP)
            if both in self._places:
                raise UnsupportedModel(f"{self._file.path.name} has a tensor under two names")
            yield both, pair

    def _add(self, name: str) -> None:
        place = self._file.tensors[name]
        new = self._known.name_of(name)
        if new.endswith(_ONE_ROW) and len(place.shape) == 1:
            place = place._replace(shape=(1, *place.shape))
        names, found = [new], [(name, place)]
        # A name that is not known is as the file has it, and may have braces of its own.
        if new != name and "{}" in new:
            parts = self._parts_of(name, place) if _JOINT in name else self._experts_of(name, place)
            found = [(name, each) for each in parts.values()]
            names = [new.replace("{}", label) for label in parts]
        if any(each in self._places for each in names):
            raise UnsupportedModel(f"{self._file.path.name} has a tensor under two names")
        if len(self._places) + len(names) > _MOST_PLACES:
            raise UnsupportedModel(
                f"{self._file.path.name} has more than {_MOST_PLACES} tensors, each expert's counted"
            )
        self._places.update(zip(names, found, strict=True))

    def _parts_of(self, name: str, place: TensorPlace) -> dict[str, TensorPlace]:
        """Where the queries, keys and values of a joint projection lie."""
        counts = rows_of_parts(place.shape[0] if place.shape else 0, *self._heads, name)
        found, offset = {}, place.offset
        for label, count in zip("qkv", counts, strict=True):
            found[label] = place._replace(shape=(count, *place.shape[1:]), offset=offset)
            offset += self._types.packing_of(name, found[label]).num_bytes
        return found

    def _experts_of(self, name: str, place: TensorPlace) -> dict[str, TensorPlace]:
        """Where each expert's part of a tensor [E, outs, ins] lies, or of biases [E, outs]; and so each stream's."""
        metadata, key = self._file.metadata, "altup.num_inputs" if name.startswith(_STREAMS) else "expert_count"
        count = metadata.get(f"{metadata['general.architecture']}.{key}")
        # Of Gemma 3n's streams the first is what layers see, and needs none.
        count = count - 1 if name.startswith(_STREAMS) and isinstance(count, int) else count
        if len(place.shape) != (2 if name.endswith(".bias") else 3) or place.shape[0] != count:
            raise UnsupportedModel(f"tensor {name!r} is of {list(place.shape)} numbers, not of {shown(count)} by {key}")
        each = place._replace(shape=place.shape[1:])
        size = self._types.packing_of(name, each).num_bytes
        return {str(index): each._replace(offset=place.offset + index * size) for index in range(count)}

    def _read(self, name: str, place: TensorPlace) -> Tensor:
        packing = self._types.packing_within(name, place, self._file.path.name)
        raw, kind = np.frombuffer(place.data, np.uint8, packing.num_bytes, place.offset), packing.kind.name
        if kind in ("F32", "F16", "BF16"):
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
            # A copy, since nobody may write to a file's pages.
            return torch.from_numpy(raw.copy()).view(dtype).reshape(place.shape)
        blocks = raw.reshape(-1, packing.block_bytes)
        return torch.from_numpy(self._unpack(blocks, packing)).reshape(place.shape)

    def _unpack(self, blocks: NDArray[np.uint8], packing: Packing) -> NDArray[np.float32]:
        """The numbers of blocks [N, bytes]: natively, or by the package, which has as many at a time as caches hold."""
        kind, numbers = packing.kind, packing.numbers
        found = np.empty((len(blocks), numbers), np.float32)
        if self._unpack_natively is not None and self._unpack_natively(kind.value, blocks, found):
            return found
        count = _AT_A_TIME // numbers
        for begin in range(0, len(blocks), count):
            some = blocks[begin : begin + count]
            # One long row: of many the package takes 16 at a time, which are few numbers.
            unpacked = self._types.dequantize(some.reshape(1, -1), kind)
            found[begin : begin + count] = unpacked.reshape(len(some), numbers)
        return found
