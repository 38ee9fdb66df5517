"""Which setting of a running model to turn next: one at a time, a step at a time, and back if that was wrong.

Pure: what was measured and what the twin makes of the same traffic comes in, and a decision goes out.
"""

from collections import Counter, deque
from math import ceil, sqrt
from typing import NamedTuple

import msgspec

from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.strategy import STRATEGIES
from chairlift.plan.what_if import Spread, TrafficFigures, WhatIfAnswer

# The twin is believed where it is as near as this to what was measured, or as near as this in seconds.
_CREDIBLE, _NEGLIGIBLE_S = 0.15, 2e-3
# A change must promise as much of a gain, of latency; of what is late, or refused, this is one step.
_GAIN, _LATE_STEP = 0.05, 0.05
# What did not hold is not tried again for so many rounds, and twice as many each time.
_PATIENCE, _MOST_PATIENCE = 4, 64
# So many decisions are kept.
_KEPT = 20
# Settings that may be turned, and what shares of what was configured they may have: never more than that.
_SHARES: dict[str, tuple[float, ...]] = {
    "max_num_seqs": (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0),
    "batch_size": (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0),
    "max_num_batched_tokens": (1 / 4, 1 / 2, 1.0),
    "target_itl_ms": (0.5, 0.65, 0.8, 1.0),
    "step_time_ms": (1 / 6, 1 / 3, 1 / 2, 3 / 4, 1.0),  # and see _LONGER
    "max_wait_ms": (0.0, 1 / 4, 1 / 2, 1.0),
    "background_step_ms": (1 / 4, 1 / 2, 1.0),
}
# What a step takes is no limit of the machine's. Where somebody says that first tokens matter, and not that others do,
# it may also be longer.
_LONGER = (2.0, 4.0)
# Settings that are whole numbers.
COUNTS = ("max_num_seqs", "batch_size", "max_num_batched_tokens")


class TuningDecision(msgspec.Struct, frozen=True):
    """What was turned, from where to where, and why; without a `setting`, why nothing was."""

    reason: str
    setting: str | None = None
    before: float | None = None
    after: float | None = None
    taken_back: bool = False


class _Rank(NamedTuple):
    """How good some figures are, the least the best: by what is late or refused, then by what answers took."""

    late: int
    seconds: float

    def beats(self, other: "_Rank", by: float) -> bool:
        """Whether this is better, of what is late, or else of the time by that share."""
        return self.late < other.late or (self.late == other.late and self.seconds < (1 - by) * other.seconds)


class _Trial(NamedTuple):
    """A change that is yet to prove itself, and the configuration before it."""

    decision: TuningDecision
    before: SequenceConfig


class Tuner:
    """Turns the settings of one model below those that were `configured`, which are what memory and buffers are for.

    Each round the twin is asked about `alternatives()`, of the same traffic, and `hear` takes its answer. `config` is
    what holds by then, and `decisions` are the last ones. While a change is `on_trial` the traffic is all to be from
    after it.
    """

    def __init__(self, configured: SequenceConfig) -> None:
        self.configured = self.config = configured
        self.decisions: deque[TuningDecision] = deque(maxlen=_KEPT)
        self.rounds = 0
        self.num_changes: Counter[str] = Counter()
        self.num_taken_back: Counter[str] = Counter()
        self._trial: _Trial | None = None
        # What the twin was asked about last: with the rounds others are neighbours.
        self._asked: list[tuple[str, SequenceConfig]] = []
        # For (setting, value): the round from which on it may be tried again, and how long it rests the next time.
        self._rests: dict[tuple[str, float], tuple[int, int]] = {}

    def alternatives(self) -> list[SequenceConfig]:
        """The configurations to ask the twin about: while a change is on trial, the one before it."""
        if self._trial is not None:
            return [self._trial.before]
        self._asked = self._neighbours()
        return [config for _, config in self._asked]

    def hear(self, answer: WhatIfAnswer) -> TuningDecision:
        """Take in what came of the alternatives, in their order, and decide."""
        self.rounds += 1
        doubt = disbelieved(answer)
        if self._trial is not None:
            decision = self._judge(self._trial, answer, doubt)
            self._trial = None
        elif doubt is not None:
            decision = TuningDecision(f"nothing was turned: {doubt}")
        else:
            decision = self._turn(answer)
        self.decisions.append(decision)
        return decision

    def give_up(self, problem: str) -> TuningDecision:
        """Take the change on trial back, which nothing could judge."""
        assert self._trial is not None
        decision = self._taken_back(self._trial, problem)
        self._trial = None
        self.decisions.append(decision)
        return decision

    def begin_anew(self, configured: SequenceConfig, config: SequenceConfig | None = None) -> None:
        """Somebody has set something: this is what was configured from now on, and nothing is on trial.

        What holds is `config`, where other settings stay as they were turned.
        """
        self.configured, self.config = configured, config or configured
        self._trial = None
        self._rests.clear()
        self.decisions.append(TuningDecision("settings were changed by hand"))

    @property
    def on_trial(self) -> bool:
        """Whether a change is yet to prove itself."""
        return self._trial is not None

    @property
    def settings(self) -> dict[str, float]:
        """Those that may be turned, as they are."""
        return {name: getattr(self.config, name) for name in self._settings()}

    # One round

    def _turn(self, answer: WhatIfAnswer) -> TuningDecision:
        """Take the best of the alternatives, if it is worth it."""
        now = self._rank(answer.now.figures)
        best: tuple[_Rank, tuple[str, SequenceConfig]] | None = None
        for neighbour, foretold in zip(self._asked, answer.changed, strict=True):
            if foretold is None:
                continue
            rank = self._rank(foretold.figures)
            if rank.beats(now, _GAIN) and (best is None or rank < best[0]):
                best = rank, neighbour
        if best is None:
            return TuningDecision("nothing was turned: no setting a step away promises better")
        setting, config = best[1]
        before, after = getattr(self.config, setting), getattr(config, setting)
        reason = f"{setting} goes from {before:g} to {after:g}: of the last minutes' traffic {_gain(now, best[0])}"
        decision = TuningDecision(reason, setting, before, after)
        self._trial = _Trial(decision, self.config)
        self.config = config
        self.num_changes[setting] += 1
        return decision

    def _judge(self, trial: _Trial, answer: WhatIfAnswer, doubt: str | None) -> TuningDecision:
        """Keep a change if the traffic since then says that it was right."""
        without = answer.changed[0] if answer.changed else None
        problem = doubt
        if problem is None and without is None:
            problem = "the twin had no time to say what would have been without it"
        if problem is None and without is not None:
            was, would = self._rank(answer.measured), self._rank(without.figures)
            if would.beats(was, 0.0):
                problem = f"without it, of the traffic since then {_gain(was, would)}"
        if problem is not None:
            return self._taken_back(trial, problem)
        setting, after = trial.decision.setting, trial.decision.after
        assert setting is not None
        assert after is not None
        self._rests.pop((setting, after), None)
        return TuningDecision(f"{setting} stays at {after:g}: what was measured since then bears it out")

    def _taken_back(self, trial: _Trial, problem: str) -> TuningDecision:
        """Go back to what was before a change, which is not to be tried again for a while."""
        setting, before, after = trial.decision.setting, trial.decision.before, trial.decision.after
        assert setting is not None
        assert before is not None
        assert after is not None
        patience = self._rests.get((setting, after), (0, _PATIENCE))[1]
        self._rests[setting, after] = self.rounds + patience, min(2 * patience, _MOST_PATIENCE)
        self.config = trial.before
        self.num_taken_back[setting] += 1
        return TuningDecision(f"{setting} goes back to {before:g}: {problem}", setting, after, before, taken_back=True)

    def _neighbours(self) -> list[tuple[str, SequenceConfig]]:
        """Each configuration that differs in one setting by one step, but for those that rest."""
        found = []
        for setting in self._settings():
            now = getattr(self.config, setting)
            # Since somebody has set another setting, the one that holds may be between two.
            ladder = sorted({*rungs(self.configured, setting), now})
            place = ladder.index(now)
            for value in ladder[max(place - 1, 0) : place] + ladder[place + 1 : place + 2]:
                if self._rests.get((setting, value), (0, 0))[0] <= self.rounds:
                    found.append((setting, msgspec.structs.replace(self.config, **{setting: value})))
        return found

    def _settings(self) -> list[str]:
        """Those that the strategy reads and that have room to turn."""
        strategy = STRATEGIES[self.configured.strategy]
        own = (strategy.slots_setting, *strategy.settings, "background_step_ms")
        if "target_itl_ms" in strategy.settings:
            own = (*own, "max_num_batched_tokens")
        names = [name for name in _SHARES if name in own]
        if self.configured.target_itl_ms is not None:
            names = [name for name in names if name != "step_time_ms"]
        return [name for name in names if len(rungs(self.configured, name)) > 1]

    def _rank(self, figures: TrafficFigures) -> _Rank:
        config, late = self.configured, 0.0
        for target, seen in ((config.target_ttft_ms, figures.ttft), (config.target_itl_ms, figures.itl)):
            if target is not None and seen is not None:
                late += max(1000 * seen.p95 / target - 1, 0.0)
        late += figures.refused / max(figures.requests + figures.refused, 1)
        latency = figures.latency or Spread(0.0, 0.0)
        return _Rank(ceil(late / _LATE_STEP - 1e-9), sqrt(latency.p50 * latency.p95))


def rungs(configured: SequenceConfig, setting: str) -> list[float]:
    """The values that a setting may have, least first, with what was configured. Of one there is no turning."""
    most = getattr(configured, setting)
    if not most or (setting == "max_wait_ms" and STRATEGIES[configured.strategy].slots_setting is None):
        return [most]
    found = [share * most for share in _SHARES[setting] if share < 1]
    if setting in COUNTS:
        least = configured.slots if setting == "max_num_batched_tokens" else 1
        found = [max(round(each), least) for each in found]
    if setting == "step_time_ms" and configured.target_ttft_ms is not None:
        found += [share * most for share in _LONGER]
    return sorted({*found, most})


def disbelieved(answer: WhatIfAnswer) -> str | None:
    """Say why the twin is not to be believed: how far it is from what was measured. None if it is."""
    measured, now = answer.measured, answer.now.figures
    pairs = (
        ("first tokens", measured.ttft, now.ttft),
        ("the time between tokens", measured.itl, now.itl),
        ("answers", measured.latency, now.latency),
    )
    for what, was, said in pairs:
        if was is None:
            continue
        if said is None:
            return f"the twin says nothing of {what}"
        off = abs(said.p50 - was.p50)
        if off > max(_CREDIBLE * was.p50, _NEGLIGIBLE_S):
            return f"the twin has {what} at {said.p50:.3g} s, and they took {was.p50:.3g} s"
    return None


def _gain(before: _Rank, after: _Rank) -> str:
    """What is better after than before, in words."""
    if after.late < before.late:
        return f"less would be late or refused ({_LATE_STEP * before.late:.2f} to {_LATE_STEP * after.late:.2f})"
    return f"answers would take {1 - after.seconds / before.seconds:.0%} less"
