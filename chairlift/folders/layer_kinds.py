"""Which layers of a decoder have attention, and which something with states in its place, by their kinds' names."""

from collections.abc import Sequence

from chairlift.errors import UnsupportedModel

_ATTENTION = "full_attention"
# Tokens that a convolution may see, as in native/kernels.h.
MOST_TAPS = 16


def which_layers(kinds: Sequence[str], kind: str, num_layers: int) -> tuple[bool, ...] | None:
    """Say of each layer whether it is of that kind, and not attention; None if none is.

    Raises UnsupportedModel for other kinds, another number of them, and where no layer is attention.
    """
    unknown = sorted({*kinds} - {kind, _ATTENTION})
    if unknown or len(kinds) != num_layers:
        raise UnsupportedModel(
            f"layer_types must be {kind!r} or {_ATTENTION!r} for each of {num_layers} layers"
            + (f", and has {unknown[0]!r}" if unknown else f", and names {len(kinds)}")
        )
    if kind not in kinds:
        return None
    if _ATTENTION not in kinds:
        raise UnsupportedModel(f"layer_types has no {_ATTENTION!r}: a model of {kind!r} alone is not served natively")
    return tuple(each == kind for each in kinds)
