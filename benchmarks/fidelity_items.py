"""How true the simulator is for models that answer in one call: `fidelity.py` for an embedder, or for a Python class.

    python benchmarks/fidelity_items.py MODEL [--loads 0.5 0.85 0.95 1.1] [--out FILE] [-- SETTINGS]

MODEL is a folder, whose texts go to TEI's /embed, or FILE.py:Class, of which each item is `--item`. First its calls are
measured, in a process of its own; then the front, as `chairlift plan` does, by a crowd with the traffic's own lengths,
by short texts, long ones, and several in a request. Capacity is what
the simulator says it is, and each of the `--loads` a share of it. Requests come in bursts, as
seen by a client with one thread, whose time for a request is measured and simulated, too. After each load the server
is asked for a forecast of its last two minutes as they were: the same simulator, told of the very calls that it is held
against; its error is from what the server saw.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from engines import SERVED_NAME
from fidelity import COLUMNS as SEQUENCE_COLUMNS
from fidelity import NAMES, at_load, forecast, outside
from server_process import free_port, front_pid, running

from chairlift.bench.completion_stream import Outcome, Target
from chairlift.bench.load import Load
from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table
from chairlift.bench.replay import PromptMaker, make_target, replay
from chairlift.config.flags import add_flags
from chairlift.config.items import ItemConfig
from chairlift.config.settings import load
from chairlift.plan.item_case import ItemCase
from chairlift.plan.items import ItemModel
from chairlift.plan.machine_profile import FrontCost, ItemProfile, MachineProfile
from chairlift.plan.simulator import simulate
from chairlift.plan.trace import TraceRequest, duration
from chairlift.plan.traffic import Traffic, synthetic
from chairlift.planning.measure_item_front import ItemRequests, item_front
from chairlift.planning.plan_subject import open_items

# Words of a text: `[CLS]` and `[SEP]` come on top, for the simulator as for the server.
_ADDED = 2
# Requests of a crowd.
_CROWD = 800
COLUMNS = tuple(
    Column(each.key, "by its own calls", each.form) if each.key == "own" else each for each in SEQUENCE_COLUMNS
)
ERRORS = (("error_percent", "simulated"), ("own_percent", "by its own calls"))
# What a forecast calls our figures: the names, the place in a spread, and how many of its unit are one of ours.
FORECAST = {"answers/s": ("requests_per_s", None, 1.0), "p50 ms": ("latency", 0, 1e3), "p95 ms": ("latency", 1, 1e3)}


def main() -> None:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    args, flags = _parser().parse_args(given[:cut]), given[cut + 1 :]
    if args.measure_into:
        measure(args, flags)
    else:
        print(markdown(compare(args, flags)))


def settings_of(model: str, flags: list[str]) -> ItemConfig:
    """The settings that flags of `chairlift serve` give a model that answers in one call."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    found = load({**vars(parser.parse_args(flags)), "model": model}, {}, Path.cwd(), "").models[0].config
    if not isinstance(found, ItemConfig):
        raise SystemExit(f"{model} writes texts: fidelity.py is for those")
    return found


def measure(args: argparse.Namespace, flags: list[str]) -> None:
    """Measure the model and save its profile."""
    from chairlift.planning.measure_items import measure_items
    from chairlift.runners.make_runner import make_runner

    config = open_items(settings_of(args.model, flags))
    examples = [json.loads(args.item)] if _is_class(args.model) else []
    profile = measure_items(config, make_runner(config), args.measure_seconds, examples=examples)
    MachineProfile(machine="this one", models={"": profile}).save(args.measure_into)


def compare(args: argparse.Namespace, flags: list[str]) -> Results:
    """Measure, serve, replay and simulate; each load's figures are saved as they come."""
    config = settings_of(args.model, flags)
    recording = Recording(start("fidelity_items", {**vars(args), "server": flags}, args.model), args.out)
    profile, port = measured(args, flags), free_port()
    command = [sys.executable, "-m", "chairlift.cli", "serve", args.model, "--served-model-name", SERVED_NAME]
    command += ["--port", str(port), "--data-dir", "", *flags]
    length = "constant:1" if _is_class(args.model) else f"lognormal:{args.median}:{4 * args.median}"
    trace = synthetic(Traffic(arrivals="gamma:100:3", input_length=length), 200.0)
    trace = [msgspec.structs.replace(each, input_length=min(each.input_length, args.longest)) for each in trace]
    with running(command, port, "/health/ready", {"PYTHONPATH": str(Path(__file__).parents[1])}):
        target, api = target_of(args, port)
        lengths = [each.input_length for each in trace[:_CROWD]]
        front, client = item_front(requests_of(target, api), front_pid(port), config, profile, lengths)
        recording.results["front"] = msgspec.to_builtins(front)
        recording.results["client"] = client
        case = ItemCase(profile, tuple(map(tokens_of, trace)), front=front)
        capacity = case.capacity(config, _CROWD)
        recording.results["capacity"] = capacity
        for share in args.loads:
            sent = at_load(trace, share * capacity, args.seconds)
            real = replay(target, sent, api, PromptMaker(seed=random.randrange(2**32)), args.drain)
            seen = simulated(case.model(config), front, list(map(tokens_of, sent)), client)
            own = forecast(port, FORECAST)
            for row in rows(real, seen, duration(sent)):
                recording.add({"trace": "bursts", "load": share} | row | own.get(row["figure"], {}))
    return recording.results


def measured(args: argparse.Namespace, flags: list[str]) -> ItemProfile:
    """The model's profile, measured in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        command = [sys.executable, __file__, args.model, "--measure-into", str(path), "--item", args.item]
        command += ["--measure-seconds", f"{args.measure_seconds:g}", "--", *flags]
        subprocess.run(command, check=True)
        profile = MachineProfile.load(path).models[""]
    assert isinstance(profile, ItemProfile)
    return profile


def target_of(args: argparse.Namespace, port: int) -> tuple[Target, str]:
    """Where requests go, and in which of the replay's protocols."""
    url = f"http://127.0.0.1:{port}"
    if not _is_class(args.model):
        return make_target(url, SERVED_NAME, "tei"), "tei"
    body = {"instances": [json.loads(args.item)]}
    return Target.of(url, SERVED_NAME, body, f"/v1/models/{SERVED_NAME}:predict"), "oip"


def requests_of(target: Target, api: str) -> ItemRequests:
    """Requests in the replay's protocol."""
    prompts, numbers = PromptMaker(seed=1), count()

    def body(items: int, length: int) -> dict[str, Any]:
        wanted = TraceRequest(arrival=0.0, input_length=length)
        return {} if api == "oip" else {"inputs": [prompts.text(wanted, next(numbers)) for _ in range(items)]}

    return ItemRequests(target, body, api != "oip")


def tokens_of(request: TraceRequest) -> TraceRequest:
    """A text of so many words as the server's tokenizer has it."""
    return msgspec.structs.replace(request, input_length=request.input_length + _ADDED)


def simulated(model: ItemModel, front: FrontCost, trace: Sequence[TraceRequest], client: float = 0.0) -> Load:
    """A simulated run as the load generator would have seen it, which takes `client` seconds for a request.

    Half of them to send it, and half to read its answer: one after the other.
    """
    sent = one_by_one([each.arrival for each in trace], client / 2)
    coming = [msgspec.structs.replace(each, arrival=moment) for each, moment in zip(trace, sent, strict=True)]
    lives = simulate([model], coming, front=front).requests
    answered = sorted((life.end, index) for index, life in enumerate(lives) if life.end is not None)
    read = dict(
        zip((index for _, index in answered), one_by_one([end for end, _ in answered], client / 2), strict=True)
    )
    outcomes = []
    for index, request in enumerate(trace):
        due, end = request.arrival, read.get(index)
        outcome = Outcome(due, sent[index], end or due, [end or due], 1)
        if end is None:
            outcome.error = "refused"
        outcomes.append(outcome)
    return Load(0.0, duration(trace), outcomes, 0.0)


def one_by_one(moments: Sequence[float], each: float) -> list[float]:
    """When a thread is done with what comes at these moments, in order, and takes it so many seconds each."""
    done, free = [], 0.0
    for moment in moments:
        free = max(free, moment) + each
        done.append(free)
    return done


def rows(real: Load, seen: Load, seconds: float) -> list[dict[str, Any]]:
    """Each figure of both, and by how many percent the simulated one is off."""
    one, other = summed_up(real, seconds), summed_up(seen, seconds)
    return [
        {
            "figure": title,
            "real": one[title],
            "simulated": other[title],
            "error_percent": 100 * (other[title] / one[title] - 1) if one[title] else None,
        }
        for title in one
    ]


def summed_up(load: Load, seconds: float) -> dict[str, float]:
    """Answers a second while requests came, and how long they took in milliseconds, from when they were due."""
    answered = [each for each in load.outcomes if each.error is None]
    taken = [1000 * (each.ended - each.due) for each in answered]
    return {
        "answers/s": sum(each.ended <= load.began + seconds for each in answered) / seconds,
        **{f"p{q} ms": float(np.percentile(taken, q)) for q in (50, 95)},
        "mean ms": fmean(taken),
        "failed": float(len(load.outcomes) - len(answered)),
    }


def markdown(results: Results) -> str:
    """What was measured around the table."""
    costs = {name: value for name, value in results["front"].items() if value and name != "contention"}
    front = ", ".join(f"{name} {1e6 * value:.1f} us" for name, value in costs.items())
    about = f"front: {front}, contention {results['front']['contention']:.2f}; capacity {results['capacity']:.0f}/s"
    if client := results.get("client"):
        about += f"; client {1e6 * client:.1f} us"
    shown = table(results["runs"], NAMES, COLUMNS)
    return f"{caption(results)}; {about}:\n\n{shown}\n\n{outside(results['runs'], ERRORS)}"


def _is_class(model: str) -> bool:
    return ".py:" in model


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an embedder's folder, or FILE.py:Class")
    parser.add_argument("--item", default="[1.0, 2.0]", metavar="JSON", help="what a Python class is sent")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.85, 0.95, 1.1], help="shares of the capacity")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long requests come at each load")
    parser.add_argument("--drain", type=float, default=60.0)
    parser.add_argument(
        "--median", type=int, default=24, help="words of a text; the 95th percentile is four times that"
    )
    parser.add_argument("--longest", type=int, default=200, help="words at most")
    parser.add_argument("--measure-seconds", type=float, default=20.0)
    parser.add_argument("--measure-into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    return parser


if __name__ == "__main__":
    main()
