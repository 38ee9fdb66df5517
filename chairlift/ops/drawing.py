"""Drawing tokens in plain torch: min_p, top_k and top_p as one threshold a row, and the draw from what is left."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from chairlift.ops.base import Allowed, Draws, Ints

# Likeliest tokens looked at before a row with top_p alone is sorted as a whole; real distributions rarely need more.
_HEAD = 512
_CHUNK = 128
Floats = NDArray[np.float32]


def draw_tokens(logits: Tensor, draws: Draws) -> Tensor:
    """Draw as `Ops.draw` says."""
    # Relative to the best: a tiny temperature would otherwise overflow. Without a finite best, what is no number ties.
    logits = (logits - logits.amax(-1, keepdim=True)).nan_to_num_(0.0, 0.0, -torch.inf)
    logits /= _tensor(draws.temperature, logits)[:, None]
    narrow = ((draws.min_p > 0) | (draws.top_k > 0) | (draws.top_p < 1)).nonzero()[0]
    if len(narrow):
        where = _tensor(narrow, logits)
        logits[where] = apply_filters(logits[where], draws.min_p[narrow], draws.top_k[narrow], draws.top_p[narrow])
    return draw(logits, _tensor(draws.uniform, logits))


def exclude_tokens(logits: Tensor, allowed: Allowed) -> None:
    """Exclude as `Ops.exclude` says."""
    known = next((each for each in allowed if each is not None), None)
    if known is None:
        return
    every = torch.full_like(known, -1)
    words = torch.stack([every if each is None else each for each in allowed]).to(logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_allowed = (words[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(~is_allowed, -torch.inf)


def best_allowed(logits: Tensor, allowed: Allowed | None) -> tuple[Tensor, Tensor]:
    """Return `Head.best` of logits [R, V] float32, which may be changed."""
    if allowed is not None:
        exclude_tokens(logits, allowed)
    values, indices = logits.max(-1)
    return values, indices


def _tensor(values: NDArray[np.floating] | NDArray[np.integer], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


def apply_filters(logits: Tensor, min_p: Floats, top_k: Ints, top_p: Floats) -> Tensor:
    """Return logits [R, V] float32 with -inf for all tokens that the filters drop.

    min_p [R] (0 is off) keeps tokens with at least min_p times the best token's probability; top_k [R] (0 is off)
    keeps the k likeliest of those; top_p [R] (1 is off) keeps the fewest likeliest of those whose probabilities,
    renormalized, reach top_p. Tokens that tie with the last one kept are kept too, so the outcome depends neither on
    the order of sorting nor on the other rows.
    """
    vocab = logits.shape[1]
    cut = logits.amax(-1) + _tensor(min_p, logits).log()
    nucleus = (top_p < 1).nonzero()[0]
    # Looking whether a part of a row suffices would wait for a device, which sorts quickly.
    sorted_part = _HEAD if logits.device.type == "cpu" else vocab
    size = min(vocab, max(int(top_k.max()), sorted_part if len(nucleus) else 0))
    if size:
        head = logits.topk(size).values
        k = _tensor(top_k, logits)
        kth = head.gather(1, (k.clamp(1, size) - 1)[:, None])[:, 0]
        cut = torch.where((k > 0) & (k < vocab), torch.maximum(cut, kth), cut)
    if len(nucleus):
        where = _tensor(nucleus, logits)
        cut[where] = _top_p_cut(logits[where], head[where], cut[where], _tensor(top_p[nucleus], logits))
    return logits.masked_fill(logits < cut[:, None], -torch.inf)


def _top_p_cut(logits: Tensor, head: Tensor, cut: Tensor, top_p: Tensor) -> Tensor:
    """Return the lowest logit that top_p keeps of those not below `cut` [R]; `head` [R, M] is sorted, best first."""
    best = head[:, :1]
    weights = (logits - best).exp_().masked_fill_(logits < cut[:, None], 0)
    total = weights.sum(-1, dtype=torch.float64)
    head_weights = (head - best).exp_().masked_fill_(head < cut[:, None], 0).double()
    upto = head_weights.cumsum(-1)
    wanted = (top_p.double() * total)[:, None]
    # A token stays while those before it have not reached top_p; so the likeliest always stays.
    stays = (upto - head_weights < wanted) & (head >= cut[:, None])
    found = torch.where(stays, head, torch.inf).amin(-1)
    if head.shape[1] == logits.shape[1]:
        return found
    short = ((upto[:, -1:] < wanted)[:, 0] & stays[:, -1]).nonzero()[:, 0]
    if len(short):
        whole = logits[short].sort(dim=-1, descending=True).values
        found[short] = _top_p_cut(logits[short], whole, cut[short], top_p[short])
    return found


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Draw from softmax(logits [R, V] float32) by inverting its CDF at uniform [R, D] float64: token ids [R, D] int64.

    The CDF runs in vocabulary order and is found in two stages, over chunks and then inside one: that reads the
    vocabulary once with plain sums, and keeps float64 precision where it matters. A token of probability 0 is never
    drawn.
    """
    weights = torch.softmax(logits, dim=-1)
    weights = functional.pad(weights, (0, -weights.shape[1] % _CHUNK)).view(len(weights), -1, _CHUNK)
    upto = weights.sum(-1).double().cumsum(-1)
    target = uniform * upto[:, -1:]
    chunk = _first_above(upto, target)
    before = torch.where(chunk > 0, upto.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    inner = weights.gather(1, chunk[:, :, None].expand(-1, -1, _CHUNK)).double().cumsum(-1)
    return chunk * _CHUNK + _first_above(inner, (target - before)[:, :, None])[:, :, 0]


def _first_above(upto: Tensor, target: Tensor) -> Tensor:
    """Return the index of the first running sum above each target, at most that of the last positive weight.

    upto [..., N], target [..., D]: [..., D].
    """
    last = upto[..., -1:]
    target = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(upto, target, right=True)
