"""What files call the tensors of a model that transformers computes, and how a folder's are made of them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from chairlift.gguf.architecture import Architecture
from chairlift.gguf.told_settings import ToldSettings

_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
_PART = re.compile(r"(.+)\.(weight|bias)")


class TensorChange(NamedTuple):
    """A tensor that a folder has in another form: its name, of which it is made, and how.

    Names are those of a layer's, or of the whole model's, that `HybridNames` gives.
    """

    target: str
    parts: tuple[str, ...]
    make: Callable[[Sequence[Tensor], ToldSettings], Tensor]


class ToldTensor(NamedTuple):
    """A tensor of each layer with one number, which is metadata of a file: its name, the key, and its shape."""

    target: str
    key: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HybridNames(Architecture):
    """Names of tensors: in `names` all of a layer's, in full or without ending, and in `whole` those of no layer.

    Layers of a folder are called `layers` and their number. `told` are tensors that are none in a file.
    """

    layers: str = "model.layers"
    whole: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[TensorChange, ...] = ()
    told: tuple[ToldTensor, ...] = ()

    def name_of(self, name: str) -> str:
        """What a folder calls a tensor of a file, before it is changed; as it is, if that is not known."""
        found = _LAYER.fullmatch(name)
        new = _renamed(found[2] if found else name, self.names if found else self.whole)
        if new is None:
            return name
        return f"{self.layers}.{found[1]}.{new}" if found else new

    def layer_of(self, name: str) -> tuple[str, str]:
        """What stands before the name that a layer's tensor has within its layer, and that; of others nothing."""
        found = re.match(rf"{re.escape(self.layers)}\.\d+\.", name)
        return (found[0], name[found.end() :]) if found else ("", name)


def _renamed(name: str, names: Mapping[str, str]) -> str | None:
    if name in names:
        return names[name]
    found = _PART.fullmatch(name)
    return f"{names[found[1]]}.{found[2]}" if found and found[1] in names else None
