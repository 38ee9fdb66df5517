"""Tensors of encoders that files have otherwise than folders do, put together again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from chairlift.errors import UnsupportedModel
from chairlift.gguf.encoder_architectures import GATE
from chairlift.gguf.gguf_file import TensorPlace

# By a folder's name of a tensor, the file's name of it and where it lies.
NamedPlaces = dict[str, tuple[str, TensorPlace]]
# What reads one, by the latter two.
TensorReading = Callable[[str, TensorPlace], Tensor]
# Of Nomic's layers with experts. The bias behind them all is in no file: converters leave it out, and llama.cpp adds
# none.
_UP, _DOWN, _BIAS = (f".mlp.experts.{part}" for part in ("mlp.w1", "mlp.w2", "bias"))
# Of Jina's layers what is in one tensor.
_BOTH = "mlp.gated_layers"


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A tensor's shape, and what makes it."""

    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def made_tensors(places: NamedPlaces, read: TensorReading) -> dict[str, MadeTensor]:
    """Take tensors out of the places that are in other shapes there, and return them by name as folders have them.

    Raises UnsupportedModel naming a tensor that can't be so.
    """
    made: dict[str, MadeTensor] = {}
    for name in [name for name in places if name.endswith((_UP, _DOWN))]:
        own, place = places.pop(name)
        if len(place.shape) != 3:
            raise UnsupportedModel(f"tensor {own!r} has shape {list(place.shape)}, which is not for several experts")
        count, outs, ins = place.shape
        if name.endswith(_UP):
            made[name] = MadeTensor((count * outs, ins), partial(_joined, read, own, place))
        else:
            # [experts, hidden, middle], and in folders [experts * middle, hidden].
            made[name] = MadeTensor((count * ins, outs), partial(_turned, read, own, place))
            bias = f"{name.removesuffix(_DOWN)}{_BIAS}"
            made[bias] = MadeTensor((outs,), partial(torch.zeros, outs))
    for name in [name for name in places if GATE in name]:
        up = name.replace(GATE, _BOTH)
        if up in places:
            pair = [places.pop(each) for each in (name, up)]
            shapes = [place.shape for _, place in pair]
            if len(shapes[0]) != 2 or shapes[0] != shapes[1]:
                problem = f"tensor {pair[0][0]!r} has shape {list(shapes[0])}, and {pair[1][0]!r}"
                raise UnsupportedModel(f"{problem} {list(shapes[1])}: they are not of one gated projection")
            made[up] = MadeTensor((2 * shapes[0][0], shapes[0][1]), partial(_stacked, read, pair))
    return made


def _stacked(read: TensorReading, parts: Sequence[tuple[str, TensorPlace]]) -> Tensor:
    return torch.cat([read(own, place).float() for own, place in parts])


def _joined(read: TensorReading, own: str, place: TensorPlace) -> Tensor:
    return read(own, place).flatten(0, 1)


def _turned(read: TensorReading, own: str, place: TensorPlace) -> Tensor:
    return read(own, place).transpose(1, 2).flatten(0, 1).contiguous()
