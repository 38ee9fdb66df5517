"""What a GGUF file says below its architecture's name, as it is read."""

from collections.abc import Mapping, Sequence
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import shown

# No known model has more layers, or a larger size of anything else.
_MOST_LAYERS, _MOST = 1024, 2**24
# Nearly what float32 ends with.
_LARGEST = 3e38
# What says nothing of how a model computes, or says it again.
_NEUTRAL = ("vocab_size", "block_count", "context_length")


class ToldSettings:
    """Numbers by key, checked. What nobody has read is refused in the end, so that nothing is dropped.

    Raises UnsupportedModel naming the key at fault.
    """

    def __init__(self, metadata: Mapping[str, Any], file_name: str) -> None:
        """Take a file's metadata; errors call it by this name."""
        self.file_name = file_name
        self._prefix = f"{metadata['general.architecture']}."
        self._told = {
            key.removeprefix(self._prefix): value for key, value in metadata.items() if key.startswith(self._prefix)
        }
        self._read = set(_NEUTRAL)
        # Behind a model's layers may lie some that guess tokens ahead, which are no part of it.
        self.num_guessing = self.size("nextn_predict_layers", 0, least=0, most=_MOST_LAYERS)
        self.num_layers = self.size("block_count", most=_MOST_LAYERS) - self.num_guessing
        if self.num_layers < 1:
            raise self.wrong("nextn_predict_layers", "not fewer than there are layers")

    def has(self, key: str) -> bool:
        """Whether a file says anything of it."""
        self._read.add(key)
        return key in self._told

    def size(self, key: str, default: int | None = None, *, least: int = 1, most: int = _MOST) -> int:
        """A whole number within these bounds; the default where a file doesn't say it."""
        value = self._value(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, f"not a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above zero that is not beyond what float32 has."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < _LARGEST:
            raise self.wrong(key, "not a number above zero")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Whether something is so."""
        value = self._value(key, default)
        if value not in (True, False):
            raise self.wrong(key, "neither true nor false")
        return bool(value)

    def word(self, key: str, default: str, known: Sequence[str]) -> str:
        """One of these words."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(key, f"none of these: {', '.join(known)}")
        return value

    def sizes(self, key: str, default: int | None = None) -> list[int]:
        """A whole number of each layer, 0 among them; one alone is that of all."""
        value = self._value(key, default)
        found = [value] * self.num_layers if type(value) is int else value
        whole = self.num_layers + self.num_guessing
        if not isinstance(found, list) or len(found) not in (self.num_layers, whole):
            raise self.wrong(key, f"not a number for each of {self.num_layers} layers")
        if any(type(each) not in (int, bool) or not 0 <= each <= _MOST for each in found):
            raise self.wrong(key, f"not whole numbers from 0 to {_MOST}")
        return [int(each) for each in found[: self.num_layers]]

    def quantiles(self, key: str) -> list[float]:
        """A number of each layer, or what is below all numbers."""
        found = self._value(key, None)
        if not isinstance(found, list) or len(found) != self.num_layers:
            raise self.wrong(key, f"not a number for each of {self.num_layers} layers")
        if not all(type(each) in (int, float) and each < _LARGEST for each in found):
            raise self.wrong(key, "not numbers")
        return [float(each) for each in found]

    def same(self, key: str, default: int | None = None) -> int:
        """The one number that all layers have that have any."""
        found = set(self.sizes(key, default)) - {0}
        if len(found) != 1:
            raise self.wrong(key, "not one number for all layers that have any")
        return found.pop()

    def must_be(self, key: str, *values: Any) -> None:
        """Refuse what a file says unless it is one of these, at which it says nothing, or is not said."""
        if self.has(key) and self._told[key] not in values:
            raise self.not_computed(key)

    def refuse_unread(self) -> None:
        """Refuse what a file says that nobody has asked for, unless it says that something is not there."""
        for key, value in self._told.items():
            if key not in self._read and value:
                raise self.not_computed(key)

    def not_computed(self, key: str) -> UnsupportedModel:
        """The error of something that a model of this architecture can't have here."""
        return UnsupportedModel(f"{self._named(key)} in a GGUF file: nothing here computes that")

    def wrong(self, key: str, what: str) -> UnsupportedModel:
        """The error of a value that is none of its kind."""
        if key not in self._told:
            return UnsupportedModel(f"{self._prefix}{key} is missing in {self.file_name}")
        return UnsupportedModel(f"{self._named(key)} in {self.file_name} is {what}")

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        return self._told.get(key, default)

    def _named(self, key: str) -> str:
        return f"{self._prefix}{key} = {shown(self._told[key])}"


def numbers_of_layers(metadata: Mapping[str, Any], key: str, layers: int, file_name: str) -> list[float]:
    """A number of each layer, that a file says under a key of no architecture; one alone is that of all.

    Raises UnsupportedModel naming the key.
    """
    found = metadata.get(key)
    listed = [found] * layers if isinstance(found, float) else found
    if not isinstance(listed, list) or len(listed) != layers:
        raise UnsupportedModel(f"{key} = {shown(found)} in {file_name} is not a number for each of {layers} layers")
    if not all(type(each) is float and abs(each) < _LARGEST for each in listed):
        raise UnsupportedModel(f"{key} = {shown(found)} in {file_name} is not of finite numbers")
    return listed
