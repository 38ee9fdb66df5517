"""From logits to the next token of each sequence."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.core.sequences.request import Request
from chairlift.core.sequences.step import TokenLogprob
from chairlift.ops.base import Draws, Ints
from chairlift.ops.contract import Ops
from chairlift.runners.decoder.exclusions import Exclusions
from chairlift.runners.decoder.logprobs import Logprobs
from chairlift.runners.decoder.penalties import TokenCounts, apply_penalties
from chairlift.runners.grammars.grammar_choices import GrammarChoices

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Between the seeds of the tokens that are drawn for one place, of which so many are tried.
_NEXT_SEED = np.uint64(0xD1B54A32D192ED03)
_TRIALS = 8
# What is above 0 stays so in float32: 0 is another thing, "greedy" or "keep nothing".
_LEAST = float(np.finfo(np.float32).tiny)
_BROKEN = "no token could be sampled: the model's logits are not finite"
_EXCLUDED = "no token is left: allowed_token_ids, bad_words, min_tokens and the grammar exclude every one between them"


@dataclass(slots=True)
class Choice:
    """What `sample` chose for R rows of logits, still on the device.

    token_ids [R] int64 and best [R], each row's highest logit; `logprobs` of the rows `described`, if there are any.
    """

    token_ids: Tensor
    best: Tensor
    described: Ints
    logprobs: Logprobs | None = None

    def keep(self, kept: Ints) -> None:
        """Forget all rows but those `kept`, which are in order, and of which those left out are not described."""
        where = torch.from_numpy(kept).to(self.token_ids.device)
        self.token_ids, self.best = self.token_ids[where], self.best[where]
        self.described = np.searchsorted(kept, self.described)

    @property
    def tensors(self) -> list[Tensor]:
        """What `Sampler.finish` wants of it on the host."""
        return [self.token_ids, self.best, *(() if self.logprobs is None else self.logprobs.tensors)]


@dataclass(slots=True)
class Sampled:
    """The same on the host. `token_ids` [R]; a row in `errors` (by its index) has no valid token.

    That is the fault of the request for those in `excluded`, of the model for the others.
    """

    token_ids: Ints
    logprobs: dict[int, TokenLogprob]
    errors: dict[int, str]
    excluded: list[int]


class Sampler:
    """Each slot's sampling parameters as arrays, so that a step gathers instead of looping.

    Order, as in vLLM: log-probabilities of the raw logits; logit_bias, min_tokens, penalties; what a request or its
    grammar excludes; greedy rows take the likeliest; temperature; min_p, top_k, top_p; draw.
    """

    def __init__(self, slots: int, vocab_size: int, seed: int, device: torch.device, ops: Ops) -> None:
        self.ops = ops
        self.vocab_size = vocab_size
        self.seed = seed
        self.device = device
        self._temperature = np.zeros(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self._top_k = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots, np.float32)
        self._seed = np.zeros(slots, np.uint64)
        self._logprobs = np.full(slots, -1, np.int64)
        # The first length at which stop tokens, and an EOS that is ignored, may be sampled: prompt + min_tokens.
        self._may_stop = np.zeros(slots, np.int64)
        self._stop_ids: dict[int, Ints] = {}
        self._bias: dict[int, tuple[Ints, NDArray[np.float32]]] = {}
        self._counts: dict[int, TokenCounts] = {}
        self._excluded: dict[int, Exclusions] = {}

    def add(self, row: int, request: Request, token_ids: Sequence[int]) -> None:
        """Take a sequence's parameters into a row. Raises ValueError if logit_bias leaves the vocabulary."""
        params = request.params
        prompt = len(request.prompt_ids)
        self.remove(row)
        self._temperature[row] = max(params.temperature, _LEAST) if params.temperature > 0 else 0
        self._min_p[row] = params.min_p
        self._top_k[row] = min(max(params.top_k, 0), self.vocab_size)
        self._top_p[row] = max(params.top_p, _LEAST)
        self._seed[row] = request_seed(params.seed, self.seed, request.id)
        self._logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._may_stop[row] = prompt + params.min_tokens
        if len(token_ids) < self._may_stop[row] and (held_back := request.stop_ids | request.ignored_ids):
            self._stop_ids[row] = np.array([i for i in held_back if 0 <= i < self.vocab_size], np.int64)
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            counts = self._counts[row] = TokenCounts(request.prompt_ids, token_ids[prompt:], params)
            counts.repetition = max(counts.repetition, _LEAST)
        if params.logit_bias:
            for token in params.logit_bias:
                if not 0 <= token < self.vocab_size:
                    end = self.vocab_size - 1
                    raise ValueError(f"logit_bias names token {token}, but the vocabulary ends at {end}")
            ids = np.array(list(params.logit_bias), np.int64)
            self._bias[row] = ids, np.array(list(params.logit_bias.values()), np.float32)
        if params.allowed_token_ids or request.bad_word_ids:
            self._excluded[row] = Exclusions(request, token_ids[prompt:], self.vocab_size)

    def remove(self, row: int) -> None:
        """Forget a row's parameters."""
        for held in (self._stop_ids, self._bias, self._counts, self._excluded):
            held.pop(row, None)

    def takes_best(self, rows: Ints) -> bool:
        """Whether these sequences take the likeliest token as it is, so that nobody need see all logits."""
        if self._temperature[rows].any() or (self._logprobs[rows] >= 0).any():
            return False
        edited = self._bias.keys() | self._stop_ids.keys() | self._counts.keys() | self._excluded.keys()
        return not edited or edited.isdisjoint(rows.tolist())

    def take(self, best: Tensor, ids: Tensor) -> Choice:
        """Take each row's likeliest token, ids [R], whose logit is best [R]."""
        return Choice(ids, best, np.empty(0, np.int64))

    def try_best(self, best: Tensor, ids: Tensor, choices: GrammarChoices) -> Choice:
        """The same of the C likeliest, best [R, C] and ids [R, C], of which some rows try one after the other.

        A row's first id becomes the one that it takes.
        """
        candidates, values = ids.numpy(), best.numpy()
        chosen = candidates[:, 0]
        # On the host, where to look into an array for each row costs more than the trials.
        likeliest, logits = chosen.tolist(), values[:, 0].tolist()
        for index in choices.tried:
            if math.isfinite(logits[index]) and not choices.takes(index, likeliest[index]):
                token = choices.pick(index, _others(candidates[index], values[index]))
                if token is not None:
                    chosen[index] = token
        return self.take(best[:, 0], ids[:, 0])

    def sample(self, logits: Tensor, rows: Ints, lengths: Ints, choices: GrammarChoices | None = None) -> Choice:
        """Choose the next token of each of R sequences, without waiting for the device.

        logits [R, V] in any float dtype, which may be changed; rows [R]; lengths [R]: tokens that each sequence has so
        far, which is the position of the new one. Rows that are tried are, on the host, not chosen if they are refused.
        """
        # At once, since bfloat16 reductions are many times slower on a CPU than this conversion.
        logits = logits.float()
        described = (self._logprobs[rows] >= 0).nonzero()[0]
        changes = choices is not None or self._bias or self._stop_ids or self._counts or self._excluded
        raw = logits.clone() if changes and len(described) else logits
        self._edit(logits, rows, lengths)
        if choices is not None:
            self.ops.exclude(logits, choices.allowed())
        best, ids = self.ops.highest(logits)
        trials = range(_TRIALS if choices is not None and choices.tried else 1)
        candidates = self._candidates(logits, rows, lengths, ids, trials)
        choice = Choice(candidates[:, 0], best, described)
        if choices is not None and choices.tried:
            self._try(logits, rows, lengths, candidates, choices, choice)
        return self._describe(raw, rows, choice)

    def _candidates(self, logits: Tensor, rows: Ints, lengths: Ints, likeliest: Tensor, trials: range) -> Tensor:
        """For each row and trial [R, D] a token: the likeliest of a greedy row, and one that is drawn of others."""
        random = self._temperature[rows].nonzero()[0]
        if len(random) == len(rows):
            return self._draw(logits, rows, lengths, trials)
        candidates = likeliest[:, None].repeat(1, len(trials))
        if len(random):
            where = self._tensor(random)
            candidates[where] = self._draw(logits[where], rows[random], lengths[random], trials)
        return candidates

    def _try(
        self, logits: Tensor, rows: Ints, lengths: Ints, candidates: Tensor, choices: GrammarChoices, choice: Choice
    ) -> None:
        """Give rows that are tried the first candidate that may be next; if none may, one that is drawn from those.

        So each is drawn as if what may not be next had been left out before: candidates are drawn from all tokens,
        independently, and the first that may be next has the odds that it has among those.
        """
        again = []
        # On the host, where to look into a tensor for each row costs more than the trials.
        best, tokens, chosen = choice.best.tolist(), candidates.tolist(), choice.token_ids.numpy()
        for index in choices.tried:
            first = tokens[index][0]
            if math.isfinite(best[index]) and not choices.takes(index, first):
                others = dict.fromkeys(tokens[index])
                del others[first]
                token = choices.pick(index, others)
                if token is not None:
                    chosen[index] = token
                elif index not in choices.refused:
                    again.append(index)
        if again:
            some = logits[again]
            self.ops.exclude(some, choices.known(again))
            choice.best[again] = self.ops.highest(some)[0]
            last = range(_TRIALS, _TRIALS + 1)
            choice.token_ids[again] = self._draw(some, rows[again], lengths[again], last)[:, 0]

    def finish(self, choice: Choice, rows: Ints, arrays: Iterator[NDArray[Any]]) -> Sampled:
        """Take what `choice.tensors` are on the host, the next of `arrays`, for the sequences that it was made for.

        A row without a finite best logit is an error of that row alone.
        """
        ids, best = next(arrays), next(arrays)
        failed = (~np.isfinite(best)).nonzero()[0].tolist()
        excluded = [index for index in failed if best[index] == -np.inf]
        errors = {index: _EXCLUDED if index in excluded else _BROKEN for index in failed}
        found = [] if choice.logprobs is None else choice.logprobs.read(arrays)
        described = zip(choice.described.tolist(), found, strict=True)
        sampled = Sampled(ids, {index: each for index, each in described if index not in errors}, errors, excluded)
        self._count(rows, sampled)
        return sampled

    def count_forced(self, row: int, token_ids: Sequence[int]) -> None:
        """Add tokens that followed without being chosen to the counts that penalties follow, and to words."""
        counts, excluded = self._counts.get(row), self._excluded.get(row)
        for token in token_ids:
            if counts is not None:
                counts.add(token)
            if excluded is not None:
                excluded.add(token)

    def _edit(self, logits: Tensor, rows: Ints, lengths: Ints) -> None:
        """Change logits [R, V] float32 in place as requests ask for."""
        if not (self._bias or self._stop_ids or self._counts or self._excluded):
            return
        slot_of = rows.tolist()
        biased = [index for index, row in enumerate(slot_of) if row in self._bias]
        stops = [index for index, row in enumerate(slot_of) if row in self._stop_ids]
        stops = [index for index in stops if lengths[index] < self._may_stop[slot_of[index]]]
        counted = [index for index, row in enumerate(slot_of) if row in self._counts]
        excluding = [index for index, row in enumerate(slot_of) if row in self._excluded]
        if biased:
            ids, values = zip(*(self._bias[slot_of[index]] for index in biased), strict=True)
            logits[self._pairs(biased, ids)] += torch.from_numpy(np.concatenate(values)).to(self.device)
        if stops:
            logits[self._pairs(stops, [self._stop_ids[slot_of[index]] for index in stops])] = -torch.inf
        if counted:
            apply_penalties(logits, counted, [self._counts[slot_of[index]] for index in counted])
        for index in excluding:
            self._excluded[slot_of[index]].apply(logits[index : index + 1], self.ops)

    def _pairs(self, indices: list[int], ids: Sequence[Ints]) -> tuple[Tensor, Tensor]:
        row = np.repeat(np.asarray(indices, np.int64), [len(some) for some in ids])
        return torch.from_numpy(row).to(self.device), torch.from_numpy(np.concatenate(ids)).to(self.device)

    def _draw(self, logits: Tensor, rows: Ints, lengths: Ints, which: range) -> Tensor:
        """Draw for rows of logits that have a temperature those tokens for a place that `which` counts."""
        filters = self._min_p[rows], self._top_k[rows], self._top_p[rows]
        seeds = self._seed[rows, None] + np.array(which, np.uint64) * _NEXT_SEED
        return self.ops.draw(logits, Draws(self._temperature[rows], *filters, uniform(seeds, lengths[:, None])))

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _describe(self, logits: Tensor, rows: Ints, choice: Choice) -> Choice:
        """Add the log-probabilities that were asked for."""
        if len(choice.described):
            where = self._tensor(choice.described)
            top = self._logprobs[rows[choice.described]].tolist()
            choice.logprobs = Logprobs(logits[where], choice.token_ids[where], top)
        return choice

    def _count(self, rows: Ints, sampled: Sampled) -> None:
        """Add the new tokens to the counts that penalties follow, and to what words are made of."""
        if self._counts or self._excluded:
            for index, row in enumerate(rows.tolist()):
                if index not in sampled.errors:
                    self.count_forced(row, [int(sampled.token_ids[index])])


def _others(candidates: Ints, values: NDArray[np.float32]) -> list[int]:
    """A row's candidates after the likeliest, without those that stand for no token, as their logits say."""
    found = zip(candidates.tolist(), values.tolist(), strict=True)
    return [token for token, value in found if math.isfinite(value)][1:]


# Random numbers are counter-based: the number at a position depends on the seed and the position, on nothing else.


def request_seed(seed: int | None, engine_seed: int, request_id: str) -> int:
    """Return the request's own seed as 64 bits; without one, a seed derived from the engine's and the request's id."""
    if seed is not None:
        return seed % 2**64
    digest = blake2b(f"{engine_seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position), which may be of any shapes that go together.

    The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), applied to the seed and again after stepping by the
    position: one number costs the same wherever a sequence begins, so a preempted request goes on as if nothing was.
    """
    mixed = _mix(_mix(seeds) + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
