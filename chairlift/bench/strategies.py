"""The same model and requests under every batching strategy."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

from chairlift.bench.recorder import Recorder
from chairlift.bench.workload import TimedRequest
from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.engine.sequences.engine import Engine
from chairlift.engine.sequences.messages import StepOutput
from chairlift.runners.sequences import SequenceRunner


@dataclass(slots=True)
class Life:
    """One request's moments, in seconds of the monotonic clock."""

    arrival: float
    first_token: float = 0.0
    finished: float = 0.0
    num_tokens: int = 0


@dataclass(slots=True)
class StrategyRun:
    """All that was seen while one strategy served the jobs."""

    strategy: str
    slots: int
    seconds: float
    lives: dict[str, Life]
    recorder: Recorder


class Driver:
    """Feeds jobs to an engine: as they arrive, or (closed loop) as one of `concurrency` clients comes free."""

    def __init__(
        self, engine: Engine, jobs: list[TimedRequest], concurrency: int | None, on_finish: Callable[[], object]
    ) -> None:
        self.engine = engine
        self.jobs = jobs
        self.concurrency = concurrency
        self.on_finish = on_finish
        self.lives: dict[str, Life] = {}
        self._sent = 0

    def run(self) -> float:
        """Serve every job; return the seconds from the first arrival to the last token."""
        began = time.monotonic()
        while self._sent < len(self.jobs) or self.engine.num_unfinished:
            self._send(began)
            output = self.engine.step()
            if output is not None:
                self._take(output)
            else:
                self._sleep(began)
        return time.monotonic() - began

    def _send(self, began: float) -> None:
        while self._sent < len(self.jobs):
            job, now = self.jobs[self._sent], time.monotonic()
            if self.concurrency is None and began + job.offset > now:
                return
            if self.concurrency is not None and self.engine.num_unfinished >= self.concurrency:
                return
            arrival = began + job.offset if self.concurrency is None else now
            name = str(self._sent)
            params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
            self.engine.add(
                Request(id=name, prompt_ids=job.prompt_ids, params=params, max_tokens=job.output_len, arrival=arrival)
            )
            self.lives[name] = Life(arrival)
            self._sent += 1
        self.engine.close_queue()

    def _take(self, output: StepOutput) -> None:
        now = time.monotonic()
        for update in output.updates:
            life = self.lives[update.id]
            if not life.num_tokens:
                life.first_token = now
            life.num_tokens += len(update.token_ids)
            if update.finish_reason is not None:
                life.finished = now
                self.on_finish()

    def _sleep(self, began: float) -> None:
        moments = [self.engine.ask_again] if self.engine.ask_again is not None else []
        if self.concurrency is None and self._sent < len(self.jobs):
            moments.append(began + self.jobs[self._sent].offset)
        if not moments:
            raise RuntimeError(f"{self.engine.num_unfinished} requests wait and nothing can ever wake the engine")
        time.sleep(max(min(moments) - time.monotonic(), 0))


def run_strategy(
    config: SequenceConfig,
    make_runner: Callable[[SequenceConfig], SequenceRunner],
    jobs: list[TimedRequest],
    concurrency: int | None,
    on_finish: Callable[[], object] = lambda: None,
) -> StrategyRun:
    """Serve the jobs under `config.strategy` with a freshly loaded model.

    `concurrency` clients each send their next request when the last is answered; None sends each job at its offset.
    """
    recorder = Recorder(make_runner(config))
    engine = Engine(config, recorder)
    recorder.scheduler = engine.scheduler
    driver = Driver(engine, jobs, concurrency, on_finish)
    gc.collect()
    gc.freeze()  # as a worker process does
    seconds = driver.run()
    gc.unfreeze()  # the next model needs the memory
    engine.close()
    return StrategyRun(config.strategy, config.slots, seconds, driver.lives, recorder)
