"""From logits to the next token of each sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.core.sequences.request import Request, TokenLogprob
from chairlift.ops.base import Draws, Ops
from chairlift.runners.decoder.logprobs import token_logprobs
from chairlift.runners.decoder.penalties import TokenCounts, apply_penalties
from chairlift.runners.decoder.random import request_seed, uniform

Ints = NDArray[np.int64]
_NO_TOKEN = "no token could be sampled: the logits are not finite, or every token is excluded"


@dataclass(slots=True)
class Sampled:
    """What `sample` gave for R rows of logits. `token_ids` [R]; a row in `errors` (by its index) has no valid token."""

    token_ids: Ints
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Each seat's sampling parameters as arrays, so that a step gathers instead of looping.

    Order, as in vLLM: log-probabilities of the raw logits; logit_bias, min_tokens, penalties; greedy rows take the
    likeliest; temperature; min_p, top_k, top_p; draw.
    """

    def __init__(self, seats: int, vocab_size: int, seed: int, device: torch.device, ops: Ops) -> None:
        self.ops = ops
        self.vocab_size = vocab_size
        self.seed = seed
        self.device = device
        self._temperature = np.zeros(seats, np.float32)
        self._min_p = np.zeros(seats, np.float32)
        self._top_k = np.zeros(seats, np.int64)
        self._top_p = np.ones(seats, np.float32)
        self._seed = np.zeros(seats, np.uint64)
        self._logprobs = np.full(seats, -1, np.int64)
        # The first length at which stop tokens may be sampled: prompt + min_tokens.
        self._may_stop = np.zeros(seats, np.int64)
        self._stop_ids: dict[int, Ints] = {}
        self._bias: dict[int, tuple[Ints, NDArray[np.float32]]] = {}
        self._counts: dict[int, TokenCounts] = {}

    def add(self, row: int, request: Request, token_ids: Sequence[int]) -> None:
        """Take a sequence's parameters into a row. Raises ValueError if logit_bias leaves the vocabulary."""
        params = request.params
        prompt = len(request.prompt_ids)
        self.remove(row)
        self._temperature[row] = params.temperature
        self._min_p[row] = params.min_p
        self._top_k[row] = min(max(params.top_k, 0), self.vocab_size)
        self._top_p[row] = params.top_p
        self._seed[row] = request_seed(params.seed, self.seed, request.id)
        self._logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._may_stop[row] = prompt + params.min_tokens if request.stop_ids else 0
        if len(token_ids) < self._may_stop[row]:
            self._stop_ids[row] = np.array([i for i in request.stop_ids if 0 <= i < self.vocab_size], np.int64)
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            self._counts[row] = TokenCounts(request.prompt_ids, token_ids[prompt:], params)
        if params.logit_bias:
            for token in params.logit_bias:
                if not 0 <= token < self.vocab_size:
                    end = self.vocab_size - 1
                    raise ValueError(f"logit_bias names token {token}, but the vocabulary ends at {end}")
            ids = np.array(list(params.logit_bias), np.int64)
            self._bias[row] = ids, np.array(list(params.logit_bias.values()), np.float32)

    def remove(self, row: int) -> None:
        """Forget a row's parameters."""
        for held in (self._stop_ids, self._bias, self._counts):
            held.pop(row, None)

    def takes_best(self, rows: Ints) -> bool:
        """Whether these sequences take the likeliest token as it is, so that nobody need see all logits."""
        if self._temperature[rows].any() or (self._logprobs[rows] >= 0).any():
            return False
        edited = self._bias.keys() | self._stop_ids.keys() | self._counts.keys()
        return not edited or edited.isdisjoint(rows.tolist())

    def take(self, best: Tensor, ids: Tensor) -> Sampled:
        """Take each row's likeliest token, ids [R], if its logit, best [R], is finite."""
        finite = np.isfinite(best.cpu().numpy())
        sampled = Sampled(ids.cpu().numpy())
        if not finite.all():
            sampled.errors = dict.fromkeys((~finite).nonzero()[0].tolist(), _NO_TOKEN)
        return sampled

    def sample(self, logits: Tensor, rows: Ints, lengths: Ints) -> Sampled:
        """Choose the next token of each of R sequences.

        logits [R, V] in any float dtype, not changed; rows [R]; lengths [R]: tokens that each sequence has so far,
        which is the position of the new one. A row without a finite best logit is an error of that row alone.
        """
        # At once, since bfloat16 reductions are many times slower on a CPU than this conversion.
        logits = logits.float()
        temperature = self._temperature[rows]
        edited = self._edit(logits, rows, lengths)
        best, ids = edited.max(-1)
        random = temperature.nonzero()[0]
        sampled = self.take(best, ids)
        random = random[[index not in sampled.errors for index in random.tolist()]]
        if len(random):
            sampled.token_ids[random] = self._draw(edited, random, rows[random], lengths[random])
        self._describe(logits, rows, sampled)
        self._count(rows, sampled)
        return sampled

    def _edit(self, logits: Tensor, rows: Ints, lengths: Ints) -> Tensor:
        """Return logits after bias, min_tokens and penalties; the given logits themselves if there is none."""
        if not (self._bias or self._stop_ids or self._counts):
            return logits
        seats = rows.tolist()
        biased = [index for index, row in enumerate(seats) if row in self._bias]
        stops = [index for index, row in enumerate(seats) if row in self._stop_ids]
        stops = [index for index in stops if lengths[index] < self._may_stop[seats[index]]]
        counted = [index for index, row in enumerate(seats) if row in self._counts]
        if not (biased or stops or counted):
            return logits
        edited = logits.clone()
        if biased:
            ids, values = zip(*(self._bias[seats[index]] for index in biased), strict=True)
            edited[self._pairs(biased, ids)] += torch.from_numpy(np.concatenate(values)).to(self.device)
        if stops:
            edited[self._pairs(stops, [self._stop_ids[seats[index]] for index in stops])] = -torch.inf
        if counted:
            apply_penalties(edited, counted, [self._counts[seats[index]] for index in counted])
        return edited

    def _pairs(self, indices: list[int], ids: Sequence[Ints]) -> tuple[Tensor, Tensor]:
        row = np.repeat(np.asarray(indices, np.int64), [len(some) for some in ids])
        return torch.from_numpy(row).to(self.device), torch.from_numpy(np.concatenate(ids)).to(self.device)

    def _draw(self, edited: Tensor, indices: Ints, rows: Ints, lengths: Ints) -> Ints:
        """Draw for the rows of logits at `indices`, which have a temperature."""
        logits = edited if len(indices) == len(edited) else edited[self._tensor(indices)]
        filters = self._min_p[rows], self._top_k[rows], self._top_p[rows]
        return self.ops.draw(logits, Draws(self._temperature[rows], *filters, uniform(self._seed[rows], lengths)))

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _describe(self, logits: Tensor, rows: Ints, sampled: Sampled) -> None:
        """Add the log-probabilities that were asked for."""
        top = self._logprobs[rows]
        wanted = np.array([i for i in (top >= 0).nonzero()[0].tolist() if i not in sampled.errors], np.int64)
        if len(wanted):
            found = token_logprobs(logits[self._tensor(wanted)], sampled.token_ids[wanted], top[wanted].tolist())
            sampled.logprobs = dict(zip(wanted.tolist(), found, strict=True))

    def _count(self, rows: Ints, sampled: Sampled) -> None:
        """Add the new tokens to the counts that penalties follow."""
        if self._counts:
            for index, row in enumerate(rows.tolist()):
                if row in self._counts and index not in sampled.errors:
                    self._counts[row].add(int(sampled.token_ids[index]))
