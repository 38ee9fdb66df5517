"""One of llama.cpp's architectures of encoders, and what of it is otherwise than in folders of Hugging Face."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.gguf.architecture import LAYER_NAME, Architecture
from chairlift.gguf.gguf_file import GgufFile, shown

# No model has sizes near this.
_MOST = 2**31


def size_of(metadata: Mapping[str, Any], prefix: str, key: str) -> int:
    """A size that a file must tell below its architecture's name. Raises UnsupportedModel naming the key."""
    value = metadata.get(f"{prefix}{key}")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _MOST:
        raise UnsupportedModel(f"{prefix}{key} must be a whole number above zero in a GGUF file, got {shown(value)}")
    return value


def _nothing(file: GgufFile, prefix: str) -> dict[str, Any]:
    """There is no more to say."""
    return {}


@dataclass(frozen=True, slots=True)
class EncoderArchitecture(Architecture):
    """One of llama.cpp's architectures of encoders, by names of tensors that its family has in folders.

    `layers` is what a layer's tensors begin with, and `whole` names those that are of no layer. `also` is metadata that
    `more` makes fields of config.json of, besides the sizes that all have, and `switches` metadata with the values that
    are served; what a file says beyond these is refused. `head` are the tensors that a file must have of a
    model that ranks or classifies, if such is served.
    """

    layers: str = "encoder.layer.{}."
    whole: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
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
