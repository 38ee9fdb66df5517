"""How a model that transformers computes rotates its heads, out of a GGUF file's metadata and tensors of factors."""

import math

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import GgufFile
from chairlift.gguf.model_config import FACTORS, yarn_attention
from chairlift.gguf.told_fields import Fields, rotation
from chairlift.gguf.told_settings import ToldSettings

_WAVES = FACTORS[0]
_TURNED, _KIND, _FACTOR = "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"
_ATTENTION, _OF_YARN = "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"
_KINDS = ("none", "linear", "yarn")


def part_that_turns(told: ToldSettings, head_dim: int) -> Fields:
    """How much of a head is rotated, of families that have to be told: its first numbers, or all."""
    turned = told.size(_TURNED, head_dim, most=head_dim)
    if turned % 2:
        raise told.wrong(_TURNED, "odd")
    share = turned / head_dim
    # Multiplied by a head's numbers it is rounded down.
    return {"partial_rotary_factor": share if int(head_dim * share) == turned else math.nextafter(share, 2)}


def unscaled(told: ToldSettings, file: GgufFile) -> Fields:
    """A rotation that nothing scales, neither metadata nor a tensor."""
    refuse_factors(told, file)
    return rotation(told)


def scaled(told: ToldSettings, file: GgufFile, turned: int, *, by_waves: bool) -> Fields:
    """A rotation of so many numbers that may be stretched: all wavelengths alike, by YaRN, or each by a factor."""
    kind = told.word(_KIND, "linear", _KINDS)
    found = {"rope_theta": told.number("rope.freq_base", 1e4), "rope_type": "default"}
    told.has("rope.scaling.finetuned")
    told.must_be(_ATTENTION, 1.0)
    if by_waves and _WAVES in file.tensors:
        refuse_factors(told, file, _WAVES)
        told.must_be(_KIND, "none", "linear")
        told.must_be(_FACTOR, 1.0)
        return found | _by_waves(told, file, turned)
    refuse_factors(told, file)
    if kind == "none":
        told.must_be(_FACTOR, 1.0)
        return found
    factor = told.number(_FACTOR, 1.0)
    if kind == "yarn":
        return found | _yarn_of(told, factor)
    return found if factor == 1 else found | {"rope_type": "linear", "factor": factor}


def refuse_factors(told: ToldSettings, file: GgufFile, *known: str) -> None:
    """Refuse tensors that stretch rotations, but for these."""
    for name in FACTORS:
        if name in file.tensors and name not in known:
            raise UnsupportedModel(f"tensor {name!r} of {told.file_name}: nothing here computes that")


def _by_waves(told: ToldSettings, file: GgufFile, turned: int) -> Fields:
    """Factors of wavelengths, which were made from another rule (Llama 3.1): the same for texts of any length."""
    factors = file.floats(_WAVES)
    if len(factors) != turned // 2 or not all(0 < each < math.inf for each in factors):
        raise UnsupportedModel(
            f"tensor {_WAVES!r} of {told.file_name} is not {turned // 2} factors above zero, for halves of heads"
        )
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": told.size("context_length"),
    }


def _yarn_of(told: ToldSettings, factor: float) -> Fields:
    # Below 0 it is what the rule has anyway.
    told.must_be("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    given = told.number(_OF_YARN, 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": told.size(
            "rope.scaling.original_context_length", told.size("context_length")
        ),
        "beta_fast": told.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": told.number("rope.scaling.yarn_beta_slow", 1.0),
        **({} if given == 1 else {"attention_factor": yarn_attention(factor, given)}),
    }
