"""How well the cost model foresees a mixture's steps, with and without what it knows of experts.

    python benchmarks/mixture_cost.py MODEL_DIR [--seconds 40] [--rounds 2] [--out FILE] [-- SETTINGS]

Each round times the model's steps as `chairlift plan` does. Those of every other ten are learned from, by a model that
knows which share of the weights so many tokens read and by one that does not, and foretell the rest: the table shows by
how much the mean of a size's steps is foreseen too high or too low.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fidelity import settings_of

from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table
from chairlift.core.cost import Coefficients, ExpertReads
from chairlift.plan.machine_profile import StepSample
from chairlift.plan.resampler import fit_steps, step_seconds
from chairlift.planning.measure_sequences import measure_sequences

NAMES = (Column("tokens", "tokens of a step", "{}"),)
COLUMNS = (
    Column("count", "steps"),
    Column("measured_ms", "measured ms", "{:.1f}"),
    Column("plain_percent", "without", "{:+.0f}%"),
    Column("experts_percent", "with experts", "{:+.0f}%"),
)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
_RUN = 10
# Fewer steps of a size say nothing of it.
_LEAST = 4


def main() -> None:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    args, flags = _parser().parse_args(given[:cut]), given[cut + 1 :]
    print(markdown(compare(args, flags)))


def compare(args: argparse.Namespace, flags: Sequence[str]) -> Results:
    """Time the model's steps in rounds, and foretell half of them from the others."""
    config = settings_of(args.model, list(flags))
    recording = Recording(start("mixture_cost", {**vars(args), "settings": list(flags)}, args.model), args.out)
    for number in range(args.rounds):
        profile, _ = measure_sequences(config, args.seconds, seed=number)
        if profile.experts is None:
            raise SystemExit(f"{args.model} has no experts")
        recording.results["experts"] = list(profile.experts)
        for row in rows(profile.steps, profile.experts):
            recording.add({"round": number + 1, **row})
    return recording.results


def rows(steps: Sequence[StepSample], experts: ExpertReads) -> list[dict[str, Any]]:
    """For each size of steps by how many percent both are off."""
    learned = [step for index, step in enumerate(steps) if index // _RUN % 2 == 0]
    asked = [step for index, step in enumerate(steps) if index // _RUN % 2]
    models = {"plain_percent": None, "experts_percent": experts}
    costs = {name: fit_steps(learned, known) for name, known in models.items()}
    found = []
    for below, size in zip((0, *_SIZES), _SIZES, strict=False):
        part = [step for step in asked if below < step.tokens <= size]
        if len(part) < _LEAST:
            continue
        real = fmean(step.seconds for step in part)
        off = {
            name: 100 * (fmean(_foreseen(step, costs[name], known) for step in part) / real - 1)
            for name, known in models.items()
        }
        name = f"{size}" if below + 1 == size else f"{below + 1} to {size}"
        found.append({"tokens": name, "count": len(part), "measured_ms": 1000 * real, **off})
    return found


def _foreseen(step: StepSample, cost: Coefficients, experts: ExpertReads | None) -> float:
    return step_seconds(cost, experts, step.tokens, step.kv_tokens, step.pairs)


def markdown(results: Results) -> str:
    """The table, and what is known of the experts."""
    share, chance = results["experts"]
    about = f"{share:.0%} of the weights in experts, of which a token chooses {chance:.1%}"
    return f"{caption(results)}; {about}:\n\n{table(results['runs'], NAMES, COLUMNS)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    return parser


if __name__ == "__main__":
    main()
