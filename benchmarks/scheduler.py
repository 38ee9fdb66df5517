"""What a step costs in the scheduler: microseconds per running request, with a short and a long line behind.

    python benchmarks/scheduler.py [--running 256] [--waiting 10 100000] [--steps 300] [--runs 5] [--out FILE]

Four workloads: `decode` (all running sequences get one token), `background` (so do they here, each a request that can
wait, within a budget of time that has room for all), `prefill` (besides, one computes a prompt so long that it never
ends, 256 tokens or more a step) and `churn` (in each step one in 32 ends, and the next in line boards). A run's figure
is the mean over its steps in CPU time, garbage collection included; the table shows the median over the runs, which
take turns. `to decode` is the sum relative to that of `decode` with as many waiting.
"""

import argparse
import random
from pathlib import Path
from time import process_time
from typing import NamedTuple

from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table
from chairlift.core.sequences.blocks import BlockPool
from chairlift.core.sequences.budget import LatencyBudget
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.scheduler import SequenceScheduler
from chairlift.core.sequences.step import Step, StepResult
from chairlift.core.sequences.strategy import make_strategy

BLOCK_SIZE = 16
PROMPT = 48
PARAMS = SamplingParams(max_tokens=None)
VOCAB = 32_000
LONG_PROMPT = 200_000
# What a step with background requests may take: far more than it does.
STEP_SECONDS = 100.0


class Workload(NamedTuple):
    """How many tokens a request makes and a step may hold, whether one prompt is very long, whether all can wait."""

    output: int
    budget: int
    one_is_long: bool = False
    background: bool = False


class Cost(NamedTuple):
    """Microseconds per running request and step."""

    schedule: float
    update: float
    ended: float


WORKLOADS = {
    "decode": Workload(output=4096, budget=16_384),
    "background": Workload(output=4096, budget=16_384, background=True),
    "prefill": Workload(output=4096, budget=512, one_is_long=True),
    "churn": Workload(output=32, budget=4096),
}


def fill(workload: Workload, running: int, waiting: int, steps: int) -> tuple[SequenceScheduler, list[Request]]:
    """Put enough requests in the line that `waiting` stay in it, and return those still to come as well."""
    rng = random.Random(1)
    scheduler = SequenceScheduler(
        make_strategy("continuous", running, 0.0),
        BlockPool((running * 4096 + LONG_PROMPT) // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=workload.budget,
        max_model_len=LONG_PROMPT * 2,
        background_budget=LatencyBudget(STEP_SECONDS, workload.budget),
    )
    spare = 2 * running * steps // workload.output
    requests = []
    for number in range(running + waiting + spare):
        long = workload.one_is_long and number == running - 1
        prompt = rng.choices(range(VOCAB), k=LONG_PROMPT if long else PROMPT)
        # The first end staggered, so that each step sees its share of ends.
        output = workload.output - (number % 32 if number < running else 0)
        requests.append(
            Request(
                id=f"r{number}",
                prompt_ids=prompt,
                params=PARAMS,
                max_tokens=output,
                arrival=float(number),
                background=workload.background,
            )
        )
    for request in requests[: running + waiting]:
        scheduler.add(request)
    return scheduler, requests[running + waiting :]


def result_of(step: Step, scheduler: SequenceScheduler, token: int) -> StepResult:
    """A token for everyone whose tokens are all computed by this step."""
    running = scheduler.running + scheduler.background.running
    due = {s.id: [token] for s in running if s.num_computed_tokens + step.num_tokens[s.id] == len(s.token_ids)}
    return StepResult(due, seconds=0.01)


def measure(workload: Workload, running: int, waiting: int, steps: int) -> Cost:
    """One run. The line is refilled outside the clock, so that as many wait in each step."""
    scheduler, spare = fill(workload, running, waiting, steps)
    spare.reverse()
    scheduling = updating = 0.0
    served = ended = 0
    aboard = 0
    while aboard < running:
        step = scheduler.schedule(0.0)
        aboard = len(step.num_tokens)
        for _ in scheduler.update(step, result_of(step, scheduler, 1), 0.0):
            scheduler.add(spare.pop())
    for number in range(steps):
        began = process_time()
        step = scheduler.schedule(float(number))
        scheduled = process_time()
        result = result_of(step, scheduler, number % VOCAB)
        computed = process_time()
        ends = scheduler.update(step, result, float(number))
        updating += process_time() - computed
        scheduling += scheduled - began
        served += len(step.num_tokens)
        ended += len(ends)
        for _ in ends:
            scheduler.add(spare.pop())
    return Cost(scheduling * 1e6 / served, updating * 1e6 / served, ended / steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, nargs=2, default=[10, 100_000])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    args = parser.parse_args()
    recording = Recording(start("scheduler", vars(args)), args.out)
    for number in range(1, args.runs + 1):
        for name, workload in WORKLOADS.items():
            for waiting in args.waiting:  # alternating, so that a slow moment hits all
                cost = measure(workload, args.running, waiting, args.steps)
                about = {"round": number, "workload": name, "waiting": waiting}
                recording.add(about | cost._asdict() | {"sum": cost.schedule + cost.update})
    print(markdown(recording.results))


def markdown(results: Results) -> str:
    """Microseconds for each workload and length of the queue."""
    decode = {(run.get("round"), run["waiting"]): run["sum"] for run in results["runs"] if run["workload"] == "decode"}
    runs = [
        run | {"to_decode": run["sum"] / decode[key]} if (key := (run.get("round"), run["waiting"])) in decode else run
        for run in results["runs"]
    ]
    names = (Column("workload", "work"), Column("waiting", "waiting", "{:,}"))
    figures = [Column(name, name, "{:.2f}") for name in ("schedule", "update", "sum")]
    figures += [Column("to_decode", "to decode", "{:.2f}"), Column("ended", "ends a step", "{:.1f}")]
    about = f"microseconds for each running request and step, {results['settings']['running']} running"
    return f"{caption(results)}; {about}:\n\n{table(runs, names, figures)}"


if __name__ == "__main__":
    main()
