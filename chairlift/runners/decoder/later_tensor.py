"""A tensor as transformers loads a model from it that has none in memory yet."""

from collections.abc import Callable, Iterable
from types import EllipsisType

from torch import Tensor


class LaterTensor:
    """One of a file's tensors, which is read when all of it is asked for, as a slice of safetensors is."""

    def __init__(self, name: str, get: Callable[[str], Tensor]) -> None:
        self._name, self._get = name, get

    def __getitem__(self, whole: EllipsisType) -> Tensor:
        return self._get(self._name)


def later_tensors(names: Iterable[str], get: Callable[[str], Tensor]) -> dict[str, LaterTensor]:
    """Tensors of these names, each of which `get` reads when its turn comes, of several threads maybe."""
    return {name: LaterTensor(name, get) for name in names}
