"""Families with experts: which layers have them, and what config.json and the files call their parts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from chairlift.errors import UnsupportedModel
from chairlift.folders.layer_rules import Raw
from chairlift.folders.model_json import positive_size

WhichLayers = tuple[bool, ...]
# As in native/kernels.h.
_MOST_GROUPS = 64


def in_all_layers(raw: Raw, num_layers: int) -> WhichLayers:
    """All have experts."""
    return (True,) * num_layers


def if_there_are_any(raw: Raw, num_layers: int) -> WhichLayers:
    """Granite 4: all have experts, or none."""
    return (raw.get("num_local_experts", 8) is not None,) * num_layers


def every_so_many(raw: Raw, num_layers: int) -> WhichLayers:
    """Qwen: at an interval, but for those that are listed."""
    every = positive_size({"decoder_sparse_step": 1, **raw}, "decoder_sparse_step")
    dense = raw.get("mlp_only_layers") or ()
    return tuple(layer not in dense and not (layer + 1) % every for layer in range(num_layers))


def all_but_the_first(default: int, field: str = "first_k_dense_replace") -> Callable[[Raw, int], WhichLayers]:
    """GLM: from one layer on, which a `field` gives."""

    def layers(raw: Raw, num_layers: int) -> WhichLayers:
        first = int(raw.get(field, default) or 0)
        return tuple(layer >= first for layer in range(num_layers))

    return layers


def listed_or(rule: Callable[[Raw, int], WhichLayers]) -> Callable[[Raw, int], WhichLayers]:
    """GLM 4.7 Flash: each layer is listed, or else as by another rule."""

    def layers(raw: Raw, num_layers: int) -> WhichLayers:
        kinds = raw.get("mlp_layer_types")
        if kinds is None:
            return rule(raw, num_layers)
        if len(kinds) != num_layers or not {"dense", "sparse"} >= {*kinds}:
            raise UnsupportedModel(f"mlp_layer_types must say 'dense' or 'sparse' for each of {num_layers} layers")
        return tuple(kind == "sparse" for kind in kinds)

    return layers


def from_one_to_another(raw: Raw, num_layers: int) -> WhichLayers:
    """ERNIE: at an interval, between two layers."""
    every = positive_size({"moe_layer_interval": 1, **raw}, "moe_layer_interval")
    first, last = int(raw.get("moe_layer_start_index", 1)), int(raw.get("moe_layer_end_index", -1))
    last = num_layers - 1 if last == -1 else last
    return tuple(first <= layer <= last and not (layer + 1) % every for layer in range(num_layers))


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What the files call a layer's parts, behind its prefix.

    `experts` has the number of one in place of its braces, and `parts` are the names of gate, up and down. Files where
    all experts lie in two tensors [E, 2 * I, H] and [E, H, I] have these under `together`; `transposed` they are
    [E, H, 2 * I] and [E, I, H], gate and up take turns, and there are biases; those packed in MXFP4 are not transposed.
    """

    router: str = "mlp.gate.weight"
    choice_bias: str | None = None
    experts: str = "mlp.experts.{}"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    together: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    transposed: bool = False
    router_bias: str | None = None
    shared: str = "mlp.shared_experts"
    shared_gate: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertRule:
    """Where a family departs from Qwen 3's experts. Most are names of fields in config.json.

    `count`: how many experts there are, by any of these names; `chosen`: how many a token goes to. `width`: that of
    an expert's intermediate size. `shared_count`: how many experts' widths the shared one has; `shared_width` is
    its own. `renormalized`: whether what the chosen count is divided by their sum, always or if a field says so.
    `least_sum`: what that sum is at least. `scale`: what it is multiplied by. `layers`: which have experts.
    `activation`: of experts, where it is not the one in config.json. `group_best`: experts may be in groups, of which a
    token's are those with the highest sums of so many scores. `names`: those of tensors.
    """

    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    chosen: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    shared_count: str | None = None
    shared_width: str | None = None
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalized: Literal[True] | tuple[str, bool] = ("norm_topk_prob", False)
    least_sum: tuple[str, float] | None = None
    scale: str | None = None
    layers: Callable[[Raw, int], WhichLayers] = in_all_layers
    activation: Literal["swiglu_clamped"] | None = None
    group_best: int | None = None
    names: ExpertNames = ExpertNames()


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The experts of one model. `shared_width` is 0 where no expert is shared; `layers` says which layers have any.

    Groups are as in `Routing`.
    """

    count: int
    chosen: int
    width: int
    shared_width: int
    scoring: Literal["softmax", "sigmoid"]
    renormalized: bool
    least_sum: float
    scale: float
    layers: WhichLayers
    activation: Literal["swiglu_clamped"] | None
    groups: int
    groups_chosen: int
    group_best: int
    names: ExpertNames


def parse_experts(raw: Raw, rule: ExpertRule, num_layers: int) -> ExpertConfig | None:
    """Read the experts that a config.json describes; None if no layer has any. Raises UnsupportedModel."""
    layers = rule.layers(raw, num_layers)
    if not any(layers):
        return None
    counts = {name: positive_size(raw, name) for name in rule.count if raw.get(name) is not None}
    if len(set(counts.values())) > 1:
        raise UnsupportedModel(f"config.json counts experts twice, and not alike: {counts}")
    count = next(iter(counts.values()), 0) or positive_size(raw, rule.count[0])
    chosen, width = positive_size(raw, rule.chosen), positive_size(raw, rule.width)
    if chosen > count:
        raise UnsupportedModel(f"{rule.chosen} ({chosen}) must not be more than there are experts ({count})")
    shared = 0
    if rule.shared_width is not None:
        shared = positive_size(raw, rule.shared_width)
    elif rule.shared_count is not None and raw.get(rule.shared_count):
        shared = width * positive_size(raw, rule.shared_count)
    renormalized = rule.renormalized
    groups, groups_chosen = _groups(raw, rule, count, chosen)
    return ExpertConfig(
        count=count,
        chosen=chosen,
        width=width,
        shared_width=shared,
        scoring=rule.scoring,
        renormalized=renormalized is True or bool(raw.get(*renormalized)),
        # So small that it only keeps the sum from being zero, as all families do in one way or another.
        least_sum=float(raw.get(*rule.least_sum)) if rule.least_sum is not None else 1e-20,
        scale=float(raw.get(rule.scale, 1.0)) if rule.scale is not None else 1.0,
        layers=layers,
        activation=rule.activation,
        groups=groups,
        groups_chosen=groups_chosen,
        group_best=rule.group_best or 1,
        names=rule.names,
    )


def _groups(raw: Raw, rule: ExpertRule, count: int, chosen: int) -> tuple[int, int]:
    """How many groups of experts there are, and in how many of them a token's may be."""
    if rule.group_best is None or raw.get("n_group") in (None, 1):
        return 1, 1
    groups, eligible = positive_size(raw, "n_group"), positive_size(raw, "topk_group")
    if count % groups or groups > _MOST_GROUPS or count // groups < rule.group_best:
        raise UnsupportedModel(
            f"n_group ({groups}) must be at most {_MOST_GROUPS}, and divide {count} experts into groups of at least "
            f"{rule.group_best}"
        )
    if eligible > groups or eligible * (count // groups) < chosen:
        raise UnsupportedModel(
            f"topk_group ({eligible}) must be at most n_group ({groups}), with room for a token's {chosen} experts"
        )
    return groups, eligible


MIXTRAL = ExpertRule(
    width="intermediate_size",
    renormalized=True,
    names=ExpertNames(
        router="block_sparse_moe.gate.weight", experts="block_sparse_moe.experts.{}", parts=("w1", "w3", "w2")
    ),
)
QWEN2 = ExpertRule(
    shared_width="shared_expert_intermediate_size",
    layers=every_so_many,
    names=ExpertNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate.weight"),
)
QWEN3 = ExpertRule(layers=every_so_many)
QWEN3_NEXT = replace(QWEN2, renormalized=("norm_topk_prob", True))
QWEN3_5_MOE = replace(QWEN2, renormalized=True, layers=in_all_layers)
OLMOE = ExpertRule(width="intermediate_size")
GRANITE = ExpertRule(
    width="intermediate_size",
    renormalized=True,
    names=ExpertNames(
        router="block_sparse_moe.router.layer.weight",
        together=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
)
GRANITE4_EXPERTS = replace(
    GRANITE,
    shared_width="shared_intermediate_size",
    layers=if_there_are_any,
    names=replace(GRANITE.names, shared="shared_mlp"),
)
GLM4 = ExpertRule(
    count=("n_routed_experts", "num_local_experts"),
    shared_count="n_shared_experts",
    scoring="sigmoid",
    renormalized=("norm_topk_prob", True),
    scale="routed_scaling_factor",
    layers=all_but_the_first(1),
    group_best=2,
    names=ExpertNames(choice_bias="mlp.gate.e_score_correction_bias"),
)
GLM4_LITE = replace(GLM4, layers=listed_or(all_but_the_first(1)))
DEEPSEEK2 = ExpertRule(
    count=("n_routed_experts", "num_experts"),
    shared_count="n_shared_experts",
    renormalized=("norm_topk_prob", False),
    scale="routed_scaling_factor",
    layers=all_but_the_first(0),
    group_best=1,
)
DEEPSEEK3 = replace(GLM4, layers=all_but_the_first(3))
DOTS1 = replace(GLM4, renormalized=("norm_topk_prob", False), layers=all_but_the_first(0))
ERNIE4_5 = ExpertRule(
    count=("moe_num_experts", "num_experts"),
    chosen="moe_k",
    shared_count="moe_num_shared_experts",
    renormalized=True,
    least_sum=("moe_norm_min", 1e-12),
    layers=from_one_to_another,
    names=ExpertNames(choice_bias="mlp.moe_statics.e_score_correction_bias"),
)
LFM2_MOE = ExpertRule(
    scoring="sigmoid",
    renormalized=("norm_topk_prob", True),
    scale="routed_scaling_factor",
    layers=all_but_the_first(2, "num_dense_layers"),
    names=ExpertNames(
        router="feed_forward.gate.weight",
        choice_bias="feed_forward.expert_bias",
        experts="feed_forward.experts.{}",
        parts=("w1", "w3", "w2"),
        together=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    ),
)
GPT_OSS = ExpertRule(
    count=("num_local_experts", "num_experts"),
    width="intermediate_size",
    renormalized=True,
    activation="swiglu_clamped",
    names=ExpertNames(router="mlp.router.weight", router_bias="mlp.router.bias", transposed=True),
)
