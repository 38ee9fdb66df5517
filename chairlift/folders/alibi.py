"""Slopes in place of positions, by a config.json (ALiBi: Press, Smith and Lewis, 2022).

A head's score of two tokens loses its slope for each step from the one to the other.
"""

import struct
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.folders.layer_rules import Raw
from chairlift.folders.model_json import optional_object

Slopes = tuple[float, ...]


def slopes(heads: int, bias_max: float = 8.0) -> Slopes:
    """Those of so many heads, halved again and again `bias_max` times from the first to the last.

    Where `heads` is no power of two, they are taken from those of the next one: every second first, as in the
    authors' own code.
    """
    size = 1 << (heads - 1).bit_length()
    found = [2.0 ** (-bias_max * (head + 1) / size) for head in range(size)]
    return tuple(found if size == heads else (found[1::2] + found[::2])[:heads])


def slopes_of_bloom(raw: Raw) -> Slopes:
    """BLOOM: as the authors have them."""
    return slopes(raw["num_attention_heads"])


def slopes_of_mpt(raw: Raw) -> Slopes:
    """MPT: the field says how steep they are."""
    given: Any = optional_object(raw, "attn_config").get("alibi_bias_max")
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= 64):
        raise UnsupportedModel(f"attn_config.alibi_bias_max must be a number above zero, and up to 64, got {given!r}")
    return slopes(raw["num_attention_heads"], 8.0 if given is None else given)


def slopes_of_falcon(raw: Raw) -> Slopes | None:
    """Falcon, if `alibi` says so: in bfloat16, and added before scores are scaled."""
    if not raw.get("alibi"):
        return None
    heads = raw["num_attention_heads"]
    scale = (raw["hidden_size"] // heads) ** -0.5
    return tuple(_in_bfloat16(slope) * scale for slope in slopes(heads))


def _in_bfloat16(value: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    (found,) = struct.unpack("<f", struct.pack("<I", rounded))
    return float(found)
