"""Mixtures of experts: an MLP of which each token uses the parts that a router chooses for it (Shazeer et al. 2017)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from chairlift.ops.base import DenseMlp

Scoring = Literal["softmax", "sigmoid"]


@dataclass(slots=True, frozen=True)
class Routing:
    """How experts are chosen, and what each counts.

    A token's scores are the softmax of its logits, or the logistic function of each. The `chosen` of `count` experts
    with the highest ones count as much as their scores, if `renormalized` divided by the sum of those, which is taken
    to be at least `least_sum`, and all times `scale`. Of `groups` of experts, which follow each other and are of one
    size, only those in the best `groups_chosen` are eligible, by the sum of the `group_best` (one or two) highest
    scores in each (DeepSeek-AI, 2024, arXiv:2405.04434 and 2412.19437).
    """

    count: int
    chosen: int
    scoring: Scoring = "softmax"
    renormalized: bool = False
    least_sum: float = 0.0
    scale: float = 1.0
    groups: int = 1
    groups_chosen: int = 1
    group_best: int = 1


@dataclass(slots=True, frozen=True)
class Experts:
    """A layer's experts, E of them, and one that all tokens use if there is a `shared` one. Implements `Mlp`.

    router [E, H] float32: a token's logits; with `shared_gated` one row more, whose logistic function is what the
    shared expert counts, which else is 1. router_bias [E] float32: added to the logits of the experts. choice_bias [E]
    float32: added to the scores while experts are chosen.
    """

    routing: Routing
    router: Tensor
    router_bias: Tensor | None
    choice_bias: Tensor | None
    experts: Sequence[DenseMlp]
    shared: DenseMlp | None
    shared_gated: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        parts = [self.router.nbytes, *(expert.nbytes for expert in self.experts)]
        return sum(parts) + (0 if self.shared is None else self.shared.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H], one expert after the other; sums are in float32."""
        logits = functional.linear(x.float(), self.router)
        routed = logits[:, : self.routing.count]
        chosen, shares = self._choose(routed if self.router_bias is None else routed + self.router_bias)
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == expert)
            out.index_add_(0, rows, self.experts[expert](x[rows]).float() * shares[rows, places].unsqueeze(1))
        if self.shared is not None:
            part = self.shared(x).float()
            out += part * logits[:, -1:].sigmoid() if self.shared_gated else part
        return out.to(x.dtype)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Which experts [T, chosen] each row of logits [T, E] goes to, and how much each counts [T, chosen]."""
        routing = self.routing
        scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
        compared = scores if self.choice_bias is None else scores + self.choice_bias
        chosen = self._eligible(compared).topk(routing.chosen, dim=-1).indices
        shares = scores.gather(1, chosen)
        if routing.renormalized:
            shares = shares / shares.sum(-1, keepdim=True).clamp(min=routing.least_sum)
        return chosen, shares * routing.scale

    def _eligible(self, scores: Tensor) -> Tensor:
        """Scores [T, E], those in groups that are not chosen -inf."""
        routing = self.routing
        if routing.groups_chosen == routing.groups:
            return scores
        groups = scores.view(len(scores), routing.groups, -1)
        best = groups.topk(routing.group_best, dim=-1).values.sum(-1).topk(routing.groups_chosen, dim=-1).indices
        left_out = torch.ones(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
        return groups.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)
