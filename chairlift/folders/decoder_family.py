"""Everything in which one family of decoders departs from the common one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from chairlift.folders.alibi import Slopes
from chairlift.folders.config_names import as_it_is
from chairlift.folders.delta_nets import DeltaNets
from chairlift.folders.expert_rules import ExpertRule
from chairlift.folders.layer_norms import BEFORE, LayerNorms
from chairlift.folders.layer_rules import (
    Raw,
    Rotated,
    Windows,
    no_window,
    one_rope,
    rotated_all,
    rotated_but_every_fourth,
)
from chairlift.folders.mamba_mixers import MambaMixers
from chairlift.folders.short_convolutions import ShortConvolutions
from chairlift.folders.tensor_names import LLAMA, TensorNames

# What has states in place of attention.
Mixers = ShortConvolutions | DeltaNets | MambaMixers
# True, False, or the config field that decides, alone (absent means False) or with what it means to leave it out.
Bias = bool | str | tuple[str, bool]


_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """Where one architecture departs from the common decoder.

    `dialect` makes its config.json uniform, and `names` are those of its tensors. `norms` may go by the config, which
    `norms_of` then reads. `norm_kind`: RMS norms, LayerNorms, those without biases, or without weights either.
    `qk_norm`: queries and keys are normalized each head by itself or the whole projection at once, if the config
    field `qk_norm_if` says so where there is one. `norm_offset` is added to the weights of norms. With
    `float_norms` what is normalized is multiplied by those weights before it is rounded, not after. `gated`: MLPs
    have a gate. `parallel`: the MLP is given what attention is given. `activation`: the MLP's config field and what
    it means to leave it out. `head_dim=None` means hidden_size / num_attention_heads. `query_pre_attn_scalar`:
    scores are divided by the square root of this config field, whose default this is, and not of head_dim.
    `scaled_embedding`: embeddings are multiplied by the square root of hidden_size. `multipliers`: the config has
    factors of embeddings, scores, logits, and of what is added to the residual; `logit_scale` is a field with one
    of logits alone, and what it means to leave it out. `tied`, `rms_norm_eps` (which the config has as `eps_field`)
    and `rope_theta` are used where the config leaves them out. `windows` gives each layer's sliding window from the
    raw config, `rope` the fields with the rotation of layers with or without one, and `rotated` which layers are.
    What is rotated together are the two halves of a head, or `neighbours`; of each head a part, if there is a
    `rotary_share`, which a config can change. `slopes`, as alibi.py gives them from the raw config, are added to
    scores. `caps`: the fields with caps of scores and logits, and what it means to leave them out. `sinks`: the files
    have one for each head. `quantized`: the `quant_method` of folders that are packed so. `experts`: how the config
    describes those of layers that have any in place of one MLP. `latent`: keys and values are made of a latent.
    `mixers` reads what some layers have in place of attention. `gated_attention`: what it gives is multiplied by gates.
    `both_ways`: the field by which tokens see what follows them, within the half of a window to either side. `grows`:
    queries may grow with their positions.
    """

    qkv_bias: Bias = False
    o_bias: Bias = False
    mlp_bias: Bias = False
    dialect: Callable[[Raw], Raw] = as_it_is
    names: TensorNames = LLAMA
    norms: LayerNorms = BEFORE
    norms_of: Callable[[Raw], LayerNorms] | None = None
    norm_kind: Literal["rms", "layer", "unbiased", "bare"] = "rms"
    qk_norm: Literal["head", "projection"] | None = None
    qk_norm_if: str | None = None
    norm_offset: float = 0.0
    float_norms: bool = False
    gated: bool = True
    parallel: Bias = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    head_dim: int | None = None
    query_pre_attn_scalar: int | None = None
    scaled_embedding: bool = False
    multipliers: bool = False
    logit_scale: tuple[str, float] | None = None
    tied: bool = False
    rms_norm_eps: float = 1e-6
    eps_field: str = "rms_norm_eps"
    rope_theta: float = 1e4
    windows: Callable[[Raw, int], Windows] = no_window
    rope: Callable[[Raw, bool], Raw] = one_rope
    rotated: Callable[[Raw, Windows], Rotated] = rotated_all
    neighbours: bool = False
    rotary_share: float | None = None
    slopes: Callable[[Raw], Slopes | None] | None = None
    caps: Mapping[str, float] | None = None
    sinks: bool = False
    quantized: str | None = None
    experts: ExpertRule | None = None
    latent: bool = False
    mixers: Callable[[Raw, int], Mixers | None] | None = None
    gated_attention: bool = False
    both_ways: str | None = None
    grows: bool = False

    @property
    def honoured(self) -> set[str]:
        """The fields of a config that only some families read, and this one does."""
        found = set(_MULTIPLIERS) if self.multipliers else set()
        if self.query_pre_attn_scalar is not None:
            found.add("query_pre_attn_scalar")
        if self.rotary_share is not None:
            found.add("partial_rotary_factor")
        if self.rotated is rotated_but_every_fourth:
            found.add("no_rope_layers")
        found.update(self.caps or ())
        if self.both_ways is not None:
            found.add(self.both_ways)
        if self.logit_scale is not None:
            found.add(self.logit_scale[0])
        if not isinstance(self.parallel, bool):
            found.add(self.parallel if isinstance(self.parallel, str) else self.parallel[0])
        if self.experts is not None:
            found.update(self.experts.count)
            if self.experts.group_best is not None:
                found.update(("n_group", "topk_group"))
        return found
