"""The rows of a batch whose sequences follow a grammar: what of a step they choose, are given, or must wait for."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.core.sequences.request import Start, StepResult
from chairlift.runners.decoder.grammar import CompiledGrammar, Follower
from chairlift.runners.decoder.grammar_threads import LookAhead

# Seconds that a step waits for what is allowed, and the part of them where there are others in the step, for whom that
# is lost.
_MOST_WAIT, _WITH_OTHERS = 0.005, 0.2
# Part of a step that it waits afterwards for tokens that follow from what was chosen: they save a step each.
_WAIT_FOR_FORCED = 0.01


class RuledRows:
    """Followers by row. What a step gives them goes into its result; who is late computes its last token again."""

    def __init__(self) -> None:
        self._followers: dict[int, Follower] = {}
        self._look_ahead = LookAhead()

    def __bool__(self) -> bool:
        return bool(self._followers)

    def add(self, row: int, start: Start, grammar: CompiledGrammar) -> None:
        """Have a row follow a grammar. Log-probabilities are those of tokens that were chosen, so then all are."""
        request = start.request
        forces = request.params.logprobs is None
        follower = grammar.follow(start.token_ids[len(request.prompt_ids) :], forces)
        self._followers[row] = follower
        self._look_ahead.post([follower])

    def remove(self, row: int) -> None:
        """Forget a row's grammar."""
        follower = self._followers.pop(row, None)
        if follower is not None:
            self._look_ahead.forget(follower)

    def settle(self, rows: Sequence[int], names: Sequence[str], result: StepResult) -> dict[int, list[int]]:
        """Tell the result of those that do not choose a token now; return what they are given instead, by row.

        Nothing for one that is late, that has failed, or that nothing can follow.
        """
        ruled = [(row, name, self._followers[row]) for row, name in zip(rows, names, strict=True) if row in self]
        busy = sum(follower.busy for _, _, follower in ruled)
        if busy:
            self._look_ahead.wait(_MOST_WAIT * (_WITH_OTHERS if busy < len(rows) else 1))
            self._look_ahead.tend([follower for _, _, follower in ruled])
        given: dict[int, list[int]] = {}
        for row, name, follower in ruled:
            if follower.error is not None:
                result.errors[name] = follower.error
                result.invalid.add(name)
                given[row] = []
            elif follower.busy:
                result.late.add(name)
                given[row] = []
            else:
                self._give(row, name, follower, given, result)
        return given

    def __contains__(self, row: int) -> bool:
        return row in self._followers

    def allowed(self, rows: Sequence[int], device: torch.device) -> Tensor | None:
        """What rows [R] may choose, as `Ops.exclude` has it; None if none of them follows a grammar."""
        ruled = [(index, self._followers[row]) for index, row in enumerate(rows) if row in self._followers]
        if not ruled:
            return None
        bits = np.full((len(rows), len(ruled[0][1].allowed)), -1, np.int32)
        for index, follower in ruled:
            bits[index] = follower.allowed
        return torch.from_numpy(bits).to(device)

    def say(
        self, rows: Sequence[int], names: Sequence[str], seconds: float, result: StepResult
    ) -> dict[int, list[int]]:
        """Take in the tokens that rows have chosen, which the result of a step of so many seconds holds by name.

        Returns what follows from them, as far as it is soon known, and tells the result who has ended by it.
        """
        chosen = zip(rows, names, strict=True)
        ruled = [(row, name, self._followers[row]) for row, name in chosen if row in self and name in result.tokens]
        for _, name, follower in ruled:
            follower.say(result.tokens[name][-1])
        followers = [follower for _, _, follower in ruled]
        self._look_ahead.post(followers)
        self._look_ahead.wait(min(_WAIT_FOR_FORCED * seconds, _MOST_WAIT))
        given: dict[int, list[int]] = {}
        for row, name, follower in ruled:
            if not follower.busy and follower.error is None:
                self._give(row, name, follower, given, result)
        return given

    def _give(self, row: int, name: str, follower: Follower, given: dict[int, list[int]], result: StepResult) -> None:
        forced = follower.take_forced()
        if follower.ended:
            result.ended.add(name)
        if forced or follower.ended:
            given[row] = forced

    def close(self) -> None:
        """Forget all, and end the thread."""
        self._followers.clear()
        self._look_ahead.close()
