"""What a language model takes on this machine: steps of many shapes, timed, and what passes between two of them."""

import random
import time
from collections.abc import Callable, Iterator
from itertools import product

import msgspec
import zmq

from chairlift.bench.recorder import RunnerAround
from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.calibration import Probe
from chairlift.core.sequences.request import Request, SamplingParams, Step, StepResult
from chairlift.core.sequences.scheduler import SequenceScheduler
from chairlift.engine.sequences.calibrate import timed_steps
from chairlift.engine.sequences.engine import Engine
from chairlift.engine.sequences.messages import Add
from chairlift.errors import ConfigError
from chairlift.plan.machine_profile import LEAST_SAMPLES, SequenceProfile, StepSample
from chairlift.plan.resampler import fit_steps
from chairlift.runners.sequences import SequenceInfo, SequenceRunner

# The longest that a measurement may take, and of its time, what single shapes have; traffic has the rest.
MOST_SECONDS = 60.0
_PROBED = 0.4
# Where the machine stands still meanwhile it goes on until there are enough steps, up to so many times as long.
_STALLED = 5.0
_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (16, 256, 1024, 4096)
_CHUNKS = (8, 32, 64, 128, 256, 512, 1024, 2048)
_DECODES = 3
_LONGEST_PROMPT, _MEAN_OUTPUT = 512, 32
# What the API does for those who say nothing: with a temperature a step sees all logits, and not just the likeliest.
TEMPERATURE = 1.0
_PARAMS = SamplingParams(temperature=TEMPERATURE, max_tokens=None, ignore_eos=True)


class TimedRunner(RunnerAround):
    """Keeps what the last step held and took. `scheduler` comes before the first step of which that is wanted."""

    def __init__(self, runner: SequenceRunner) -> None:
        super().__init__(runner)
        self.scheduler: SequenceScheduler | None = None
        self.sample: StepSample | None = None
        self.overhead = 0.0

    def execute(self, step: Step) -> StepResult:
        """Run the step; the time that it takes to write down what it holds is in `overhead`."""
        if self.scheduler is None:
            return self.runner.execute(step)
        began = time.monotonic()
        read = pairs = 0
        for sequence in self.scheduler.running:
            given, computed = step.num_tokens[sequence.id], sequence.num_computed_tokens
            read += computed + given
            pairs += given * computed + given * (given + 1) // 2
        self.overhead = time.monotonic() - began
        result = self.runner.execute(step)
        self.sample = StepSample(len(step.num_tokens), step.total_tokens, read, pairs, result.seconds)
        return result


def measure_sequences(
    config: SequenceConfig,
    runner: SequenceRunner,
    seconds: float = 40.0,
    *,
    params: SamplingParams = _PARAMS,
    seed: int = 0,
    on_progress: Callable[[float], object] = lambda share: None,
) -> SequenceProfile:
    """Load a model, and time it for so many seconds, of which `on_progress` hears the share that has passed.

    First steps of single shapes, then the engine with requests of many lengths, at every number of them at once, for
    the time between steps too; these choose their tokens by `params`, which has its cost. Raises ConfigError if there
    is too little time for enough steps.
    """
    check_seconds(seconds)
    timed = TimedRunner(runner)
    engine = Engine(config, timed)
    began = time.monotonic()
    try:
        steps: list[StepSample] = []
        for sample in _probed(engine, config, params, seed):
            steps.append(sample)
            passed = (time.monotonic() - began) / seconds
            on_progress(min(passed, 1.0))
            if passed > _PROBED and (len(steps) >= LEAST_SAMPLES or passed > _STALLED):
                break
        timed.scheduler = engine.scheduler
        requests = _requests(engine.info, params, seed)
        for sample in _served(engine, timed, requests, config.slots, began + seconds):
            steps.append(sample)
            on_progress(min((time.monotonic() - began) / seconds, 1.0))
    finally:
        engine.close()
    if len(steps) < LEAST_SAMPLES:
        raise ConfigError(f"only {len(steps)} steps were timed in {seconds:g} s; give it more time")
    return SequenceProfile(
        model=config.model,
        max_model_len=engine.info.max_model_len,
        num_blocks=engine.info.num_blocks,
        block_size=engine.info.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        cost=fit_steps(steps, engine.info.experts).of_all_weights(),
        steps=steps,
        weight_bytes=engine.info.weight_bytes,
        kv_bytes=engine.info.kv_bytes,
        num_snapshots=engine.info.num_snapshots,
        experts=engine.info.experts,
    )


def check_seconds(seconds: float) -> None:
    """Raise ConfigError for a time in which nothing can be measured, or that nobody wants to wait for."""
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(f"a measurement takes more than 0 and at most {MOST_SECONDS:g} seconds, got {seconds:g}")


def _probed(engine: Engine, config: SequenceConfig, params: SamplingParams, seed: int) -> Iterator[StepSample]:
    """Steps of single shapes, in an order of which each part has some of all; those that do not fit are cut or left."""
    probes = [Probe(width, context, 1, _DECODES) for width, context in product(_WIDTHS, _CONTEXTS)]
    probes = [probe for probe in probes if probe.width <= config.slots]
    probes += [Probe(1, context, chunk, 0) for context, chunk in product((0, 1024), _CHUNKS)]
    random.Random(seed).shuffle(probes)
    # What lies in KV memory that nobody has touched yet takes longer to read, once.
    limits = engine.info, config.slots, config.max_num_batched_tokens, params
    for touch in (Probe(config.slots, 1024, 1, 1), Probe(1, 0, 64, 1)):
        timed_steps(touch, engine.runner, *limits)
    fits = True
    while fits:
        fits = False
        for probe in probes:
            for step, taken in timed_steps(probe, engine.runner, *limits):
                fits = True
                yield StepSample(step.width, step.tokens, step.kv_tokens, step.pairs, taken)


class _Wire:
    """What a worker does for each step beside its engine's part: it looks for messages, and sends one."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._worker, self._front = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._worker.bind("inproc://measure")
        self._front.connect("inproc://measure")
        self._poller = zmq.Poller()
        self._poller.register(self._worker, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Add)

    def post(self, request: Request) -> None:
        """Put a request on its way."""
        self._front.send(self._encoder.encode(Add(request)))

    def listen(self) -> list[Request]:
        """Take in what has come."""
        found = []
        while self._poller.poll(0):
            found.append(self._decoder.decode(self._worker.recv()).request)
        return found

    def send(self, output: msgspec.Struct) -> None:
        """Send what a step gave."""
        self._worker.send(self._encoder.encode(output))

    def drain(self) -> None:
        """Throw away what was sent."""
        while self._front.poll(0):
            self._front.recv()

    def close(self) -> None:
        """Close both ends."""
        self._worker.close(linger=0)
        self._front.close(linger=0)


def _served(
    engine: Engine, timed: TimedRunner, requests: Iterator[Request], slots: int, end: float
) -> Iterator[StepSample]:
    """Steps of the engine at work, with one request at a time, with two, and so on to all slots, until a moment."""
    levels = [width for width in _WIDTHS if width < slots] + [slots]
    began = time.monotonic()
    each = max(end - began, 0.0) / len(levels)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    wire = _Wire(context)
    try:
        for number, level in enumerate(levels, 1):
            yield from _at_level(engine, timed, wire, level, requests, began + number * each)
    finally:
        wire.close()
        context.term()


def _at_level(
    engine: Engine, timed: TimedRunner, wire: _Wire, level: int, requests: Iterator[Request], until: float
) -> Iterator[StepSample]:
    """Steps with so many requests at once, each of which is followed by the next, until a moment."""
    last: StepSample | None = None
    rest = 0.0
    engine.close_queue()
    while time.monotonic() < until:
        wire.drain()
        for _ in range(level - engine.num_unfinished):
            wire.post(next(requests))
        before = time.monotonic()
        for request in wire.listen():
            engine.add(request)
        began = time.monotonic()
        if last is not None:
            yield msgspec.structs.replace(last, gap=rest + began - before)
        began = time.monotonic()
        output = engine.step()
        if output is None or timed.sample is None:
            return
        wire.send(output)
        last = timed.sample
        rest = max(time.monotonic() - began - timed.overhead - last.seconds, 0.0)


def _requests(info: SequenceInfo, params: SamplingParams, seed: int) -> Iterator[Request]:
    """Requests of many lengths, without end."""
    rng = random.Random(seed)
    longest = min(_LONGEST_PROMPT, max(info.max_model_len // 2, 1))
    number = 0
    while True:
        number += 1
        prompt = [rng.randrange(info.vocab_size) for _ in range(rng.randint(1, longest))]
        output = min(1 + int(rng.expovariate(1 / _MEAN_OUTPUT)), info.max_model_len - len(prompt))
        yield Request(
            id=f"measured-{number}", prompt_ids=prompt, params=params, max_tokens=output, arrival=time.monotonic()
        )
