"""Latent attention: the keys and values of all heads are made of the few numbers that are kept of each token."""

import math
from dataclasses import dataclass

from chairlift.errors import UnsupportedModel
from chairlift.folders.layer_rules import Raw
from chairlift.folders.model_json import optional_object, positive_size


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434).

    Of each token a latent of `rank` numbers is kept, and `rotated` more that are part of all heads' keys. Queries are
    made of `query_rank` numbers, or of the hidden state itself (None). A head's queries and keys have `plain` and
    `rotated` dimensions, its values `value`. Scores are multiplied by `scale`. What is rotated together are
    `neighbours`, or else the two halves.
    """

    rank: int
    query_rank: int | None
    plain: int
    rotated: int
    value: int
    scale: float
    neighbours: bool

    @property
    def width(self) -> int:
        """The dimensions of the one head of keys that is kept."""
        return self.rank + self.rotated

    @property
    def share(self) -> float:
        """The part of that head that is rotated."""
        return self.rotated / self.width


def parse_latent(raw: Raw, num_heads: int) -> LatentConfig:
    """Read what a config.json says of it. Raises UnsupportedModel naming the field at fault."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    rank, plain, rotated, value = (positive_size(raw, name) for name in names)
    for name, size in (("kv_lora_rank", rank), ("qk_rope_head_dim", rotated)):
        if size % 2:
            raise UnsupportedModel(f"{name} must be even, got {size}")
    if raw.get("num_key_value_heads") not in (None, num_heads):
        raise UnsupportedModel(
            f"num_key_value_heads ({raw['num_key_value_heads']!r}) must be num_attention_heads ({num_heads}) where "
            "keys are made of a latent"
        )
    query_rank = None if raw.get("q_lora_rank") is None else positive_size(raw, "q_lora_rank")
    scale = (plain + rotated) ** -0.5 * _stretch(raw) ** 2
    return LatentConfig(rank, query_rank, plain, rotated, value, scale, bool(raw.get("rope_interleave", True)))


def _stretch(raw: Raw) -> float:
    """By what queries and keys are each larger where positions were stretched (YaRN, arXiv:2309.00071)."""
    rope = optional_object(raw, "rope_scaling") or optional_object(raw, "rope_parameters")
    factor, weight = rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0
    if rope.get("rope_type", rope.get("type", "default")) == "default" or factor <= 1:
        return 1.0
    return 1.0 + 0.1 * weight * math.log(factor)
