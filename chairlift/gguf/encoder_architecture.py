"""One of llama.cpp's architectures of encoders, and what of it is otherwise than in folders of Hugging Face."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chairlift.gguf.architecture import LAYER_NAME, Architecture
from chairlift.gguf.gguf_file import GgufFile


def _nothing(file: GgufFile, prefix: str) -> dict[str, Any]:
    """There is no more to say."""
    return {}


@dataclass(frozen=True, slots=True)
class EncoderArchitecture(Architecture):
    """One of llama.cpp's architectures of encoders, by names of tensors that its family has in folders.

    `layers` is what a layer's tensors begin with, and `whole` names those that are of no layer. `keys` is metadata that
    becomes a field of config.json, besides the sizes that all have, and `switches` metadata with the values that are
    served; what a file says beyond these is refused. `more` makes further fields of a file.
    """

    layers: str = "encoder.layer.{}."
    whole: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[GgufFile, str], dict[str, Any]] = _nothing

    def name_of(self, name: str) -> str:
        """What a folder calls a tensor of a file; as it is, if that is not known."""
        base, _, part = name.rpartition(".")
        if base in self.whole:
            return f"{self.whole[base]}.{part}"
        found = LAYER_NAME.fullmatch(name)
        if found is None:
            return name
        number, base, part = found.groups()
        full, known = self.names.get(f"{base}.{part}"), self.names.get(base)
        if full is None and known is None:
            return name
        return self.layers.replace("{}", number) + (full or f"{known}.{part}")
