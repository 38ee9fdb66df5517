"""What a language model takes on this machine: the steps of a server of its own under load, as it tells of them."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import cycle
from statistics import median
from typing import Any, NamedTuple

import msgspec

from chairlift.bench.completion_stream import Outcome, Target
from chairlift.bench.load import LATE, Load, Phase, changing_loop, closed_loop
from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.strategy import STRATEGIES
from chairlift.errors import ConfigError, RequestFailed
from chairlift.plan.machine_profile import LEAST_SAMPLES, FrontCost, SequenceProfile
from chairlift.plan.resampler import fit_steps
from chairlift.planning.measured_server import MEASURED, cpu_seconds, measured_server, resident_bytes
from chairlift.planning.running_server import RunningServer
from chairlift.planning.told_steps import ToldSteps

# For how long a measurement may be asked for, and how long it waits for requests without company: a busy server may
# answer none.
MOST_SECONDS, _PATIENCE_S = 60.0, 60.0
# What the API does for those who say nothing: with a temperature a step sees all logits, and not just the likeliest.
TEMPERATURE = 1.0
# Token ids that every vocabulary has, and that are no special tokens.
_IDS = range(10, 100)
_LEVELS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Requests without company: tokens of a short prompt and of an answer, and how many short ones, which of a slow model
# have no more than such a share of the time.
_SHORT, _ANSWER = 16, 9
_ALONE, _ALONE_SHARE = 24, 0.15
# Prompts without company, which tell what attention to all that came before costs, and the share of the time they have.
_PROMPTS, _ALONE_PROMPTS_SHARE = (64, 256, 2048, 512, 1024, 128), 0.15
# Prompts of the crowds, even in octaves, and so of a seventh of the longest on average; and answers. Of a slow model
# both are shorter: a prompt for each slot, and one answer, take such shares of the time. Where prompts are too many
# even so, crowds are smaller.
_LONGEST, _LEAST_LONGEST, _SEVENTH, _PROMPTS_SHARE, _CROWD_SHARE = 1024, 64, 7, 0.1, 0.2
_MEAN_ANSWER, _LEAST_ANSWER, _ANSWER_SHARE = 64, 8, 0.025
# Of the time, what prompts that use KV memory have, and the wait for the rest of it. That is over when memory has grown
# by no more than this in between.
_TOUCH_SHARE, _QUIET_SHARE, _QUIET_S, _GROWS = 0.08, 0.2, 0.5, 2**24
# The crowds have at least this share of the time.
_LEAST_SHARE = 0.3
# A server tells of its last requests and steps: it is asked before there are more.
_MOST_SENT, _MOST_TOKENS, _MOST_STEPS = 400, 100_000, 2000
_LEAST_HOP_S, _MOST_HOP_S, _LEAST_S = 2e-5, 1e-3, 1e-6
# How often a server is asked for what its front answers by itself.
_ROUND_TRIPS = 7


class _Alone(NamedTuple):
    """Seconds that a token of a prompt takes, and one of an answer, of a request that has no company."""

    prompt_token: float
    output_token: float


class _Crowds(NamedTuple):
    """How many ask at once, from the fewest; tokens of their longest prompt, and of their answers on average."""

    levels: list[int]
    longest: int
    answer: float


class _Requests:
    """Requests of many lengths, without end, and how many were sent, with how many tokens; set these to 0 at will."""

    def __init__(self, target: Target, rng: random.Random, crowds: _Crowds, room: int) -> None:
        self._target, self._rng, self._crowds, self._room = target, rng, crowds, room
        self.sent = self.tokens = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        prompt = round(self._crowds.longest ** self._rng.random())
        answer = min(1 + int(self._rng.expovariate(1 / self._crowds.answer)), self._room)
        self.sent += 1
        self.tokens += prompt + answer
        return request_of(self._target, self._rng, prompt, answer)


def measure_sequences(
    config: SequenceConfig,
    seconds: float = 40.0,
    on_progress: Callable[[float], object] = lambda share: None,
    *,
    seed: int = 0,
) -> tuple[SequenceProfile, FrontCost]:
    """Serve a model and measure its server, as `measure_served_sequences` does. Raises Unavailable if that can't be."""
    check_seconds(seconds)
    # With a target some would be refused, and settings turned meanwhile.
    config = msgspec.structs.replace(config, target_ttft_ms=None, target_itl_ms=None, auto=False)
    with measured_server(config) as own:
        server = RunningServer(own.url)
        about = server.model(MEASURED)
        found, front = measure_served_sequences(
            server, about, config.slots, seconds, on_progress, pid=own.pid, seed=seed
        )
    return msgspec.structs.replace(found, model=config.model), front


def measure_served_sequences(
    server: RunningServer,
    about: dict[str, Any],
    most: int,
    seconds: float,
    on_progress: Callable[[float], object],
    *,
    pid: int | None = None,
    seed: int = 0,
) -> tuple[SequenceProfile, FrontCost]:
    """Have ever more clients ask a server, `most` at last, and then ever fewer, for about so many seconds.

    It tells which steps it took, of others' requests too; in them is what the front and all clients on its machine take
    of the same cores. `on_progress` hears the share of the time that has passed; `pid` is the server's process, if that
    is here. Raises ConfigError if there is too little time for enough steps, and RequestFailed with the server's error.
    """
    check_seconds(seconds)
    check_answers_one(about["settings"]["strategy"])
    return _Measurement(server, about, most, seconds, on_progress, pid, seed).run()


def check_seconds(seconds: float) -> None:
    """Raise ConfigError for a time in which nothing can be measured, or that nobody wants to wait for."""
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(f"a measurement takes more than 0 and at most {MOST_SECONDS:g} seconds, got {seconds:g}")


def check_answers_one(name: str) -> None:
    """Raise ConfigError for a strategy by which a server waits for full batches, however long."""
    strategy = STRATEGIES[name]
    if strategy.closes_batch and "max_wait_ms" not in strategy.settings:
        raise ConfigError(f"a {name} server answers full batches only: plan with its folder, or a --profile")


class _Measurement:
    """Of one server."""

    def __init__(
        self,
        server: RunningServer,
        about: dict[str, Any],
        most: int,
        seconds: float,
        on_progress: Callable[[float], object],
        pid: int | None,
        seed: int,
    ) -> None:
        self._about, self._most, self._seconds, self._on_progress, self._pid = about, most, seconds, on_progress, pid
        name = str(about["id"])
        self._server, self._told, self._telling = server, ToldSteps(server, name), 0.0
        server.check_priority("/v1/completions", {"model": name, "prompt": [_IDS[0]], "max_tokens": 1})
        self._target = server.target(name)
        most_tokens = int(about["max_model_len"])
        # With an answer of the crowds a prompt fits into the context; without company all but the answer's token is it.
        self._room, self._longest = max(most_tokens // 2, 1), max(most_tokens - 1, 1)
        self._rng = random.Random(seed)
        self._began = time.monotonic()

    def run(self) -> tuple[SequenceProfile, FrontCost]:
        """Measure requests without company, and then crowds of them."""
        self._use_memory()
        alone, front = self._without_company()
        before, self._telling = self._used(), 0.0
        load = self._crowds(_crowds(alone, self._seconds, self._most, self._room), alone)
        used = self._used() - before - self._telling - front.request * len(load.outcomes)
        tokens = sum(outcome.tokens for outcome in load.outcomes)
        seen, steps = self._told.ask(), self._told.samples
        if len(steps) < LEAST_SAMPLES:
            raise ConfigError(f"only {len(steps)} steps were timed in {self._seconds:g} s; give it more time")
        self._on_progress(1.0)
        memory, experts = self._about["memory"], seen.profile.experts
        profile = msgspec.structs.replace(
            seen.profile,
            model=str(self._about["id"]),
            cost=fit_steps(steps, experts),
            steps=steps,
            weight_bytes=memory["weight_bytes"],
            kv_bytes=memory["kv_bytes"],
        )
        return profile, msgspec.structs.replace(front, output_token=max(used / max(tokens, 1), 0.0))

    def _without_company(self) -> tuple[_Alone, FrontCost]:
        """What a request takes without company, and what of that the front takes."""
        short, answer = min(_SHORT, self._room), min(_ANSWER, self._room)
        first = median(self._times(short, 1, 1))
        number = max(min(int(_ALONE_SHARE * self._seconds / max(first, _LEAST_S)), _ALONE), 1)
        before = self._used()
        whole = median(self._times(short, 1, number))
        used = (self._used() - before) / number if self._pid is not None else self._round_trip()
        front = FrontCost(hop=_LEAST_HOP_S)
        # Of a model so slow that nothing is told yet the front counts as free: next to its steps it is.
        with suppress(ConfigError):
            seen = self._told.ask().requests
            inside = [each.first - each.arrival for each in seen if each.first is not None and each.size == short]
            beside = max(whole - median(inside), 0.0) if inside else 0.0
            request = min(beside, used)
            front = FrontCost(request=request, hop=min(max((beside - request) / 2, _LEAST_HOP_S), _MOST_HOP_S))
        answers = median(self._times(short, answer, min(number, 3)))
        output_token = max((answers - whole) / max(answer - 1, 1), _LEAST_S)
        return _Alone(self._prompts(short, whole, _ALONE_PROMPTS_SHARE), output_token), front

    def _round_trip(self) -> float:
        """Seconds of the shortest request, which the front answers by itself."""
        times = []
        for _ in range(_ROUND_TRIPS):
            began = time.perf_counter()
            self._server.get("/version")
            times.append(time.perf_counter() - began)
        return median(times)

    def _prompts(self, short: int, whole: float, share: float) -> float:
        """Seconds that a token of a prompt takes without company, of many lengths; a short one takes `whole`."""
        end, rounds = time.monotonic() + share * self._seconds, cycle(_PROMPTS)
        found: list[float] = []
        while not found or time.monotonic() < end:
            fits = int((end - time.monotonic()) / found[-1]) if found else _PROMPTS[0]
            length = max(min(next(rounds), self._longest, fits), short)
            seconds = median(self._times(length, 1, 1))
            found.append(max((seconds - whole) / max(length - short, 1), _LEAST_S))
        return median(found)

    def _times(self, prompt: int, answer: int, number: int) -> list[float]:
        """Seconds from sending to the end of requests that come one after the other."""
        requests = [request_of(self._target, self._rng, prompt, answer) for _ in range(number)]
        outcomes = closed_loop(self._target, requests, 1, None, _PATIENCE_S).outcomes
        if any(outcome.error == LATE for outcome in outcomes):
            raise RequestFailed(f"{number} short requests without company were not answered in {_PATIENCE_S:g} s")
        _check(outcomes)
        self._on_progress(self._passed())
        return [outcome.ended - outcome.sent for outcome in outcomes]

    def _use_memory(self) -> None:
        """Have a new server fetch all of its KV memory, as one that has been up for a while has, and forget its steps.

        It does so once prompts have used some of it and nothing is asked of it any more.
        """
        if self._pid is None:
            return
        self._prompts(1, 0.0, _TOUCH_SHARE)
        end = time.monotonic() + _QUIET_SHARE * self._seconds
        before, now = 0, self._resident()
        while now > before + _GROWS and (left := end - time.monotonic()) > 0:
            time.sleep(min(_QUIET_S, left))
            before, now = now, self._resident()
            self._on_progress(self._passed())
        with suppress(ConfigError):
            self._told.forget()

    def _crowds(self, crowds: _Crowds, alone: _Alone) -> Load:
        """Requests of many lengths, from ever more clients, and then from ever fewer."""
        requests = _Requests(self._target, self._rng, crowds, self._room)
        left = max(self._seconds - (time.monotonic() - self._began), _LEAST_SHARE * self._seconds)
        asked = time.monotonic()

        def after_each() -> None:
            nonlocal asked
            self._on_progress(self._passed())
            steps = (time.monotonic() - asked) / alone.output_token
            if requests.sent > _MOST_SENT or requests.tokens > _MOST_TOKENS or steps > _MOST_STEPS:
                before = self._used()
                self._told.ask()
                self._telling += self._used() - before
                requests.sent = requests.tokens = 0
                asked = time.monotonic()

        load = changing_loop(self._target, requests, _phases(crowds.levels, left), after_each)
        _check(load.outcomes)
        return load

    def _passed(self) -> float:
        return min((time.monotonic() - self._began) / self._seconds, 1.0)

    def _used(self) -> float:
        return 0.0 if self._pid is None else cpu_seconds(self._pid)

    def _resident(self) -> int:
        return 0 if self._pid is None else resident_bytes(self._pid)


def _crowds(alone: _Alone, seconds: float, most: int, room: int) -> _Crowds:
    """What there is time for, of a model that takes so long."""
    longest = int(_SEVENTH * _PROMPTS_SHARE * seconds / (alone.prompt_token * most))
    longest = min(max(min(longest, _LONGEST), _LEAST_LONGEST), room)
    answer = min(max(_ANSWER_SHARE * seconds / alone.output_token, _LEAST_ANSWER), _MEAN_ANSWER)
    enough = max(_CROWD_SHARE * seconds / (alone.prompt_token * longest / _SEVENTH), 1)
    levels = [level for level in (*(each for each in _LEVELS if each < most), most) if level <= enough]
    return _Crowds(levels, longest, answer)


def _phases(levels: Sequence[int], seconds: float) -> list[Phase]:
    """So many clients at once, up and down, for seconds in proportion to the octaves, as larger crowds begin slowly."""
    climb = [*levels, *reversed(levels)]
    shares = [level.bit_length() for level in climb]
    return [Phase(level, seconds * share / sum(shares)) for level, share in zip(climb, shares, strict=True)]


def request_of(target: Target, rng: random.Random, prompt: int, answer: int) -> bytes:
    """A request for so many tokens after as many that nobody had before."""
    return target.request(rng.choices(_IDS, k=prompt), answer, temperature=TEMPERATURE)


def _check(outcomes: Sequence[Outcome]) -> None:
    """Raise RequestFailed with the first error."""
    errors = [outcome.error for outcome in outcomes if outcome.error not in (None, LATE)]
    if errors:
        raise RequestFailed(f"the server failed {len(errors)} of {len(outcomes)} requests: {errors[0]}")
