"""The rows of a batch whose sequences follow a grammar: what of a step they choose, are given, or must wait for."""

import time
from collections.abc import Callable, Sequence

from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.step import Start, StepResult
from chairlift.runners.grammars.grammar import CompiledGrammar, Follower, TrialKind
from chairlift.runners.grammars.grammar_choices import GrammarChoices
from chairlift.runners.grammars.look_ahead import LookAhead
from chairlift.runners.low_priority import while_waiting

# Seconds that a step waits for what is allowed, and the part of them where there are others in the step, for whom that
# is lost.
_MOST_WAIT, _WITH_OTHERS = 0.005, 0.2
# Seconds that a step waits for one whose grammar takes long, where there is nothing else in the step: who comes
# meanwhile waits as well.
_MOST_WAIT_FOR_SLOW = 0.005
# With fewer sequences than this no token is tried: what is allowed is found soon, all are waited for, and a trial in
# vain costs each of them a step.
_FEW = 8
# Share of a step that this thread spends on sequences that are soon done, where there are many. Another thread takes
# three times as long for it while the model computes, as all the model's threads wait for the one whose core is taken.
_HERE = 0.05
# The same of what the thread of a pass does besides, half of which its other threads make up for.
_IN_PASS = 0.1
# Seconds of a core for one of those, beyond which none is done here: for a minute, then for twice as long each time, as
# often as it doubles.
_LONG_HERE, _NOT_HERE, _DOUBLES = 0.002, 60.0, 6
# Seconds of a core for which what is allowed is found in a row during a pass, as long as its other threads have enough
# to take over: the first one finds caches cold, and the others less so.
_IN_A_ROW = 0.001
# Part of a step that it waits afterwards for tokens that follow from what was chosen, of few sequences or where they
# can be known by then: they save a step each.
_WAIT_FOR_FORCED = 0.01


class GrammarRows:
    """Followers by row. What a step gives them goes into its result; who is late computes its last token again."""

    def __init__(self, tries: bool, tries_best: bool) -> None:
        """`tries`: whether tokens are tried, of greedy rows only if it `tries_best`."""
        self._tries, self._tries_best = tries, tries_best
        self._followers: dict[int, Follower] = {}
        # Those that a step may have to give something, or to wait for: all but those that went on at once.
        self._unsettled: dict[int, Follower] = {}
        # Those that go on once the model computes: until then this thread needs the interpreter itself.
        self._held: dict[int, Follower] = {}
        # Those that are to find what is allowed, by this thread, while the model computes or afterwards.
        self._for_pass: dict[int, Follower] = {}
        self._look_ahead = LookAhead()
        # Names of those that were late, until they are in a step again or need not be left out of one.
        self._late: dict[int, str] = {}
        # When followers are advanced by this thread again, and how often one of them took long.
        self._here_from, self._times_long = 0.0, 0

    def __bool__(self) -> bool:
        return bool(self._followers)

    def add(self, row: int, start: Start, grammar: CompiledGrammar) -> None:
        """Have a row follow a grammar. Log-probabilities are those of tokens that were chosen, so then all are."""
        request = start.request
        forces, trial = request.params.logprobs is None, self._trial(request.params)
        output_ids = start.token_ids[len(request.prompt_ids) :]
        # Of few, what is allowed is found as well, which beginnings may leave out.
        if forces and not output_ids and len(self._followers) + 1 >= _FEW:
            self._followers[row] = self._unsettled[row] = grammar.begin(trial)
            return
        follower = self._followers[row] = self._unsettled[row] = grammar.follow(output_ids, forces, trial)
        follower.prepares = len(self._followers) < _FEW
        self._look_ahead.post([follower])

    def _trial(self, params: SamplingParams) -> TrialKind:
        """What of a request can be tried: nothing where filters depend on what is allowed, or a choice is described."""
        filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        if not self._tries or params.logprobs is not None or (params.temperature and filtered):
            return TrialKind.NEVER
        if params.temperature:
            return TrialKind.OF_DRAWN
        return TrialKind.OF_BEST if self._tries_best else TrialKind.NEVER

    def remove(self, row: int) -> None:
        """Forget a row's grammar."""
        follower = self._followers.pop(row, None)
        self._held.pop(row, None)
        self._for_pass.pop(row, None)
        self._unsettled.pop(row, None)
        self._late.pop(row, None)
        if follower is not None:
            follower.give_up("nobody waits for it")

    def settle(
        self, rows: Sequence[int], names: Sequence[str], result: StepResult, are_all: bool = False
    ) -> dict[int, list[int]]:
        """Tell the result of those that do not choose a token now; return what they are given instead, by row.

        Nothing for one that is late, that has failed, or that nothing can follow. `are_all`: whether nothing else is in
        the step, so that it costs nobody to wait for them.
        """
        ruled = _among(self._unsettled, rows, names)
        busy = [follower for _, _, follower in ruled if follower.busy]
        if busy:
            self._look_ahead.wait(_MOST_WAIT * (_WITH_OTHERS if len(busy) < len(rows) else 1))
        if are_all and len(busy) == len(rows):
            self._wait_for_slow(busy)
        self._tell_ready(set(rows), result)
        given: dict[int, list[int]] = {}
        for row, name, follower in ruled:
            if follower.error is not None:
                result.errors[name] = follower.error
                result.invalid.add(name)
                given[row] = []
            elif follower.busy:
                result.late.add(name)
                self._late[row] = name
                given[row] = []
            else:
                self._give(row, name, follower, given, result)
                if not follower.ended:
                    del self._unsettled[row]
        return given

    def _wait_for_slow(self, followers: Sequence[Follower]) -> None:
        """If these are left to what time others leave, of which a step leaves hardly any, wait until any such goes on.

        Those that rest until they are ready may be the first.
        """
        slow = [follower for follower in self._followers.values() if follower.busy and follower.grammar.is_aside]
        if followers and all(follower in slow for follower in followers):
            with while_waiting():
                self._look_ahead.wait_for_slow(slow, _MOST_WAIT_FOR_SLOW)

    def _tell_ready(self, here: set[int], result: StepResult) -> None:
        """Tell the result who was late before and need not be left out any longer; `here` are the rows of this step."""
        self._look_ahead.tend(list(self._unsettled.values()))
        for row in list(self._late):
            follower = self._followers[row]
            if row in here:
                del self._late[row]
            elif not follower.busy or follower.error is not None:
                result.ready.add(self._late.pop(row))

    def __contains__(self, row: int) -> bool:
        return row in self._followers

    def choices(self, rows: Sequence[int]) -> GrammarChoices | None:
        """What rows may choose; None if none of them follows a grammar."""
        if not any(row in self._followers for row in rows):
            return None
        return GrammarChoices([self._followers.get(row) for row in rows])

    def refuse(self, rows: Sequence[int], names: Sequence[str], result: StepResult) -> None:
        """Those whose tokens were tried in vain are late."""
        result.late.update(names)
        self._late.update(zip(rows, names, strict=True))
        self._unsettled |= {row: self._followers[row] for row in rows}
        self._look_ahead.post([self._followers[row] for row in rows])

    def say(
        self, rows: Sequence[int], names: Sequence[str], seconds: float, result: StepResult
    ) -> dict[int, list[int]]:
        """Take in the tokens that rows have chosen, which the result of a step of so many seconds holds by name.

        Returns what follows from them, as far as it is soon known, and tells the result who has ended by it.
        """
        tokens = result.tokens
        ruled = [each for each in _among(self._followers, rows, names) if each[1] in tokens]
        prepares = len(ruled) < _FEW
        held = []
        for each in ruled:
            _, name, follower = each
            follower.prepares = prepares
            follower.say(tokens[name][-1])
            if not follower.go_on():
                held.append(each)
        self._held = {row: follower for row, _, follower in held}
        self._unsettled |= self._held
        if self._tries and not prepares:
            self._advance_here(seconds)
        patience = min(_WAIT_FOR_FORCED * seconds, _MOST_WAIT)
        is_soon = len(self._held) < _FEW or self._look_ahead.usual_seconds * len(self._held) < patience
        # What is left of many is not soon done, and would have to be for one more token of one of them.
        if self._held and is_soon and (prepares or not self._tries):
            self.go_on()
            self._look_ahead.wait(patience)
        given: dict[int, list[int]] = {}
        # Nothing follows yet where a token was tried and others can be.
        for row, name, follower in held:
            if not follower.busy and follower.error is None:
                self._give(row, name, follower, given, result)
        return given

    def _advance_here(self, seconds: float) -> None:
        """Advance those that are soon done in a step of so many seconds, or leave them to the next pass."""
        now = time.perf_counter()
        if time.monotonic() < self._here_from:
            return
        end, left = now + _HERE * seconds, _IN_PASS * seconds
        for row, follower in list(self._held.items()):
            usual = follower.seconds
            if not follower.is_light or usual > left:
                continue
            del self._held[row]
            if follower.is_quiet or time.perf_counter() > end or not follower.advance_in_part():
                self._for_pass[row] = follower
                left -= usual
            if self._took_long(follower):
                return

    def _took_long(self, follower: Follower) -> bool:
        """If one took long, have none advanced here for a while; return whether it did."""
        if follower.seconds <= _LONG_HERE:
            return False
        self._here_from = time.monotonic() + _NOT_HERE * 2 ** min(self._times_long, _DOUBLES)
        self._times_long += 1
        return True

    @property
    def side_work(self) -> Callable[[], bool] | None:
        """What the thread of a pass can do besides, a part at a time, each of which says whether there is more."""
        return self._find_some if self._for_pass else None

    def _find_some(self) -> bool:
        """Have some of those that wait for it find what is allowed; return whether there are others."""
        left = _IN_A_ROW
        while self._for_pass and left > 0:
            left -= self._find_one()
        return bool(self._for_pass)

    def _find_one(self) -> float:
        """Have one of them do so; return the seconds that this took here."""
        follower = self._for_pass.pop(next(iter(self._for_pass)))
        if not follower.grammar.is_free():
            self._look_ahead.post([follower])
            return 0.0
        follower.advance()
        if self._took_long(follower):
            self._look_ahead.post(list(self._for_pass.values()))
            self._for_pass.clear()
        return follower.seconds

    def finish(self) -> None:
        """Do what a pass had no time for."""
        while self._for_pass:
            self._find_one()

    def go_on(self) -> None:
        """Have all find what may be next, while this thread does something else."""
        if self._held:
            self._look_ahead.post(list(self._held.values()))
            self._held = {}

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


def _among(
    followers: dict[int, Follower], rows: Sequence[int], names: Sequence[str]
) -> list[tuple[int, str, Follower]]:
    """Rows, names and followers of those rows that have one there."""
    found = zip(rows, names, map(followers.get, rows), strict=True)
    return [(row, name, follower) for row, name, follower in found if follower is not None]
