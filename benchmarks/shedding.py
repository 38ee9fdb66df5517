"""How sure one must be to let a request in: python benchmarks/shedding.py --trace FILE --out FILE

In virtual time, with the production scheduler and admission: the requests of a recorded trace, at several rates, meet a
machine that is nothing but times, whose speed is another every 10 to 60 s. Of all that come, how many are in time if
nobody is refused; if whoever is let in must likely be in time; if that must be all but certain; and if it follows from
how many are refused (docs/decisions/016-shedding.md). The same arguments give the same figures on any machine.
"""

import argparse
import random
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from math import exp
from pathlib import Path
from typing import Any

from tqdm import tqdm

from chairlift.bench.raw_results import Column, Recording, caption, start, table
from chairlift.core.cost import Coefficients
from chairlift.core.sequences import overload
from chairlift.plan.trace import TraceRequest, duration, fitted, scaled
from chairlift.plan.trace_files import read_trace

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.sequences_virtual import Arrival, Machine, Outcome, serve

NAMES = (Column("rate", "requests/s", "{:g}"), Column("asked", "to be let in, one must be", "{}"))
COLUMNS = (
    Column("in_time_percent", "in time", "{:.1f}%"),
    Column("refused_percent", "refused", "{:.1f}%"),
    Column("kept_percent", "in time of those let in", "{:.1f}%"),
)
# The share of refused ones from which a promise is asked for.
ASKED: dict[str, float | None] = {
    "there (no target)": None,
    "likely in time": float("inf"),
    "certainly in time": 1e-9,
    "as sure as the load calls for": overload._SATURATED,
}
# Of a model of 135m on two cores: seconds of a step, a token, a token in the KV cache, and a pair of tokens.
_COST = Coefficients(12e-3, 2.3e-4, 1e-6, 1.1e-7)
_NOISE = 0.05
# Requests of the trace between the beginnings of two parts of it.
_APART = 700


def main() -> None:
    args = _parser().parse_args()
    recording = Recording(start("shedding", vars(args)), args.out)
    trace = fitted(scaled(read_trace(args.trace), 1.0, args.scale_lengths), args.max_model_len)
    for rate in tqdm(args.rates, desc="rates"):
        for asked, share in ASKED.items():
            for number in range(args.rounds):
                arrivals = part(trace, number, rate, args.seconds)
                machine = Machine(_COST, _NOISE, slowness(args.unsteadiness, number))
                recording.add(
                    {"rate": rate, "asked": asked, "round": number + 1, **figures(args, arrivals, machine, share)}
                )
    print(markdown(recording.results))


def part(trace: list[TraceRequest], number: int, rate: float, seconds: float) -> Iterator[Arrival]:
    """So many requests of a trace as come at a rate, spread over the seconds as they were in it."""
    chosen = trace[number * _APART :][: round(rate * seconds)]
    begin, spread = chosen[0].arrival, seconds / (duration(chosen) - chosen[0].arrival)
    for each in chosen:
        yield Arrival((each.arrival - begin) * spread, each.input_length, max(each.output_length, 1))


def slowness(unsteadiness: float, seed: int) -> Callable[[float], float]:
    """How many times as long everything takes at a moment: one number for 10 to 60 s, then another."""
    rng = random.Random(seed)
    moments, values = [0.0], [1.0]
    while moments[-1] < 3600:
        moments.append(moments[-1] + rng.uniform(10, 60))
        values.append(exp(rng.gauss(0, unsteadiness)))
    return lambda now: values[bisect_right(moments, now) - 1]


def figures(
    args: argparse.Namespace, arrivals: Iterator[Arrival], machine: Machine, share: float | None
) -> dict[str, Any]:
    """What becomes of the requests, with a promise asked for from that share of refused ones on."""
    target = {} if share is None else {"target_ttft_ms": args.target_ttft_ms}
    before = overload._SATURATED
    overload._SATURATED = before if share is None else share
    try:
        outcome = serve(arrivals, machine, max_num_seqs=args.slots, **target)
    finally:
        overload._SATURATED = before
    return _summed_up(outcome, args.target_ttft_ms / 1000)


def _summed_up(outcome: Outcome, target: float) -> dict[str, float]:
    waits = [life.ttft for life in outcome.lives if life.ttft is not None]
    refused = sum(life.shed is not None for life in outcome.lives)
    return {
        "in_time_percent": 100 * outcome.inside(target),
        "refused_percent": 100 * refused / len(outcome.lives),
        "kept_percent": 100 * sum(wait <= target for wait in waits) / len(waits),
    }


def markdown(results: dict[str, Any]) -> str:
    """A row for each rate and rule."""
    settings = results["settings"]
    about = f"first token in {settings['target_ttft_ms']:g} ms; each round is another part of the trace"
    return f"{caption(results)}; {about}:\n\n{table(results['runs'], NAMES, COLUMNS)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--scale-lengths", type=float, default=0.25)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--rates", type=float, nargs="+", default=[4.5, 5.5, 6.5, 8.0, 20.0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--target-ttft-ms", type=float, default=1000.0)
    parser.add_argument(
        "--unsteadiness", type=float, default=0.25, help="standard deviation of the logarithm of its speed"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    return parser


if __name__ == "__main__":
    main()
