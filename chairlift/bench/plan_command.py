"""`chairlift plan`: which strategy and settings suit a model's traffic on this machine, and how much it can take."""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path

import msgspec
from tqdm import tqdm

from chairlift.bench.plan_report import PlanResults, markdown
from chairlift.bench.plot import check_plot, plot_curves
from chairlift.bench.raw_results import machine_in_words
from chairlift.config.flags import HELP
from chairlift.config.sequences import SequenceConfig
from chairlift.config.settings import load
from chairlift.demo import demo_path
from chairlift.errors import ConfigError
from chairlift.plan.advice import decision, facts_of
from chairlift.plan.candidates import with_strategy
from chairlift.plan.case import PlanCase
from chairlift.plan.machine_profile import MachineProfile, SequenceProfile
from chairlift.plan.planner import make_plan, with_mode
from chairlift.plan.resampler import thinned
from chairlift.plan.search import MOST_SIMULATED, Mapper
from chairlift.plan.targets import MODES, LatencyTargets
from chairlift.plan.trace import TraceRequest, duration, fitted, with_answers
from chairlift.plan.trace_files import read_trace
from chairlift.plan.traffic import LENGTHS, Traffic, synthetic

# Settings of the model that change what is measured, and hold for the plan as for the server.
_SETTINGS = ("dtype", "quantization", "kv_cache_dtype", "kv_cache_gb", "max_model_len", "device", "num_threads")
# What is measured: as many sequences, and as long steps, as a plan may propose.
_MEASURED_SLOTS, _MEASURED_TOKENS = 64, 2048
# How much of a trace is looked at, and with how little nothing can be said.
_MOST_REQUESTS, _LEAST_REQUESTS = 20_000, 20
_MAKE_UP = 2_000
# Recorded steps that are drawn from: more of them take longer, and tell nothing new.
_MOST_STEPS = 4_000
_BALANCED = "balanced"
# Gives a seat to whoever comes: what measuring, and requests without company, take.
_OPEN = "continuous"
# Questions that a process is given at a time; the case that they have in common is sent once for all of them.
_CHUNK = 4


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Give a parser the flags of `chairlift plan`."""
    parser.description = "Measure a model here, simulate its server under every strategy, and say what to set."
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.set_defaults(run=main)
    parser.add_argument("model", help="a Hugging Face folder of a language model")
    traffic = parser.add_argument_group("what comes")
    traffic.add_argument("--trace", type=Path, metavar="FILE", help="recorded by serve --record, of Azure or BurstGPT")
    traffic.add_argument("--trace-model", metavar="NAME", help="only the trace's requests to this model")
    traffic.add_argument("--rate", type=float, help="requests a second, Poisson; with a trace it is sped up to that")
    traffic.add_argument("--input-lengths", metavar="LENGTHS", help=f"tokens of prompts: {LENGTHS}")
    traffic.add_argument("--output-lengths", metavar="LENGTHS", help="tokens of answers, in the same forms")
    wanted = parser.add_argument_group("what is promised")
    wanted.add_argument("--ttft-ms", type=float, help="to the first token")
    wanted.add_argument("--itl-ms", type=float, help="between two tokens")
    wanted.add_argument("--e2e-ms", type=float, help="to the last token")
    wanted.add_argument("--percentile", type=float, default=95.0, help="how many percent are within these")
    modes = f"in place of targets (without any: {_BALANCED}). {_modes()}"
    wanted.add_argument("--mode", choices=list(MODES), help=modes)
    machine = parser.add_argument_group("the machine")
    saved = "what was measured before; if it is not there yet, it is measured and saved"
    machine.add_argument("--profile", type=Path, metavar="FILE", help=saved)
    machine.add_argument("--measure-seconds", type=float, default=40.0, help="how long to measure, at most 60")
    for name in _SETTINGS:
        flag = f"--{name.replace('_', '-')}"
        machine.add_argument(flag, default=argparse.SUPPRESS, help=HELP[name])
    parser.add_argument("--seed", type=int, default=0, help="of made-up traffic and of the simulation")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that simulate at once")
    parser.add_argument("--out", type=Path, metavar="FILE", help="save the plan as JSON")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw latency over throughput (needs chairlift[plot])")


def main(args: argparse.Namespace) -> int:
    """Make a plan and print it."""
    targets, (config, max_waiting) = _targets(args), _settings(args)
    _check_outputs(args)
    trace = _traffic(args)
    profile, machine = _profile(args, config)
    trace = fitted(trace, min(config.max_model_len or profile.max_model_len, profile.max_model_len))
    case = PlanCase(
        thinned(profile, _MOST_STEPS),
        tuple(trace[:MOST_SIMULATED]),
        targets or LatencyTargets(percentile=args.percentile),
        machine.front,
        max_waiting,
        args.seed,
    )
    mode = None if targets is not None else args.mode or _BALANCED
    if mode is not None:
        case = with_mode(case, config, mode)
    facts = facts_of(trace, args.rate)
    with _mapper(args.processes) as mapper, _bar("simulate") as progress:
        plan = make_plan(case, config, facts.rate, mapper, progress)
    results = PlanResults(
        model=args.model,
        machine=machine.machine,
        mode=mode,
        front=machine.front,
        weight_bytes=profile.weight_bytes,
        kv_bytes=profile.kv_bytes,
        kv_tokens=profile.num_blocks * profile.block_size,
        facts=facts,
        plan=plan,
        decision=decision(plan, facts, trace),
    )
    print(markdown(results))
    if args.out:
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    if args.plot:
        plot_curves(plan, args.plot)
        print(f"picture: {args.plot}", file=sys.stderr)
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse now what would fail at the end."""
    if args.processes < 1:
        raise ConfigError(f"--processes must be at least 1, got {args.processes}")
    for name in ("out", "plot", "profile"):
        path = getattr(args, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no folder {path.absolute().parent}")
    if args.plot is not None:
        check_plot()


def _settings(args: argparse.Namespace) -> tuple[SequenceConfig, int]:
    """The model's settings, but for those that are sought, and how many may wait: as `chairlift serve` has them."""
    given = {name: value for name, value in vars(args).items() if name in ("model", *_SETTINGS)}
    settings = load(given, os.environ, Path.cwd(), str(demo_path()))
    config = settings.models[0].config
    if len(settings.models) > 1 or not isinstance(config, SequenceConfig):
        raise ConfigError(f"chairlift plan is for one language model's folder, and {args.model} is not that")
    return with_strategy(config, _OPEN, config.max_num_seqs, target_itl_ms=None), settings.server.max_waiting


def _targets(args: argparse.Namespace) -> LatencyTargets | None:
    """What was promised; None if nothing was, and a mode says it."""
    given = {name: getattr(args, f"{name}_ms") for name in ("ttft", "itl", "e2e")}
    if all(value is None for value in given.values()):
        LatencyTargets(percentile=args.percentile)  # refuses a percentile that is none
        return None
    if args.mode is not None:
        raise ConfigError("--mode is for those who give no target; leave it out, or --ttft-ms, --itl-ms and --e2e-ms")
    for name, value in given.items():
        if value is not None and not 0 < value < inf:
            raise ConfigError(f"--{name}-ms must be more than 0, got {value:g}")
    seconds = {name: value / 1000 for name, value in given.items() if value is not None}
    return LatencyTargets(**seconds, percentile=args.percentile)


def _traffic(args: argparse.Namespace) -> list[TraceRequest]:
    """The requests that come: recorded, or made up as described."""
    described = (args.input_lengths, args.output_lengths)
    if args.rate is not None and not 0 < args.rate < inf:
        raise ConfigError(f"--rate must be more than 0, got {args.rate:g}")
    if args.trace is None:
        if args.rate is None or None in described:
            raise ConfigError("say what comes: --trace FILE, or --rate, --input-lengths and --output-lengths")
        if args.trace_model is not None:
            raise ConfigError("--trace-model chooses among the models of a --trace, and there is none")
        traffic = Traffic(
            arrivals=f"poisson:{args.rate}", input_length=args.input_lengths, output_length=args.output_lengths
        )
        return synthetic(traffic, _MAKE_UP / args.rate, args.seed)
    if described != (None, None):
        raise ConfigError("the trace has its own lengths: leave out --input-lengths and --output-lengths")
    trace = read_trace(args.trace, most=_MOST_REQUESTS)
    trace = with_answers(_of_model(trace, args), args.seed)
    if len(trace) < _LEAST_REQUESTS or duration(trace) == 0:
        message = f"trace {args.trace}: a plan needs {_LEAST_REQUESTS} requests or more, at more than one moment"
        raise ConfigError(f"{message}, got {len(trace)} in {duration(trace):g} s")
    return trace


def _of_model(trace: list[TraceRequest], args: argparse.Namespace) -> list[TraceRequest]:
    """The requests for tokens, to one model."""
    names = sorted({request.model for request in trace if not request.items})
    if args.trace_model is not None:
        if args.trace_model not in names:
            has = ", ".join(names) or "no language model"
            raise ConfigError(f"--trace-model {args.trace_model}: the trace has {has}")
        names = [args.trace_model]
    if len(names) > 1:
        raise ConfigError(f"trace {args.trace} is of {', '.join(names)}: choose one with --trace-model")
    if not names:
        raise ConfigError(f"trace {args.trace} has no requests to a language model")
    found = [request for request in trace if request.model == names[0] and not request.items]
    return [msgspec.structs.replace(request, arrival=request.arrival - found[0].arrival) for request in found]


def _profile(args: argparse.Namespace, config: SequenceConfig) -> tuple[SequenceProfile, MachineProfile]:
    """The model's profile and the machine's, read or measured."""
    if args.profile is not None and args.profile.exists():
        machine = MachineProfile.load(args.profile)
        models = [each for each in machine.models.values() if isinstance(each, SequenceProfile)]
        if len(models) != 1:
            raise ConfigError(f"profile {args.profile}: it must hold one language model, and has {len(models)}")
        return models[0], machine
    profile = _measured(config, args.measure_seconds)
    machine = MachineProfile(machine=machine_in_words(), models={Path(config.model).name: profile})
    if args.profile is not None:
        machine.save(args.profile)
    return profile, machine


def _measured(config: SequenceConfig, seconds: float) -> SequenceProfile:
    from chairlift.bench.measure_sequences import check_seconds, measure_sequences
    from chairlift.runners.check_model import check_model
    from chairlift.runners.decoder.runner import DecoderRunner

    check_seconds(seconds)
    check_model(config)
    wide = with_strategy(config, _OPEN, _MEASURED_SLOTS, max_num_batched_tokens=_MEASURED_TOKENS)
    with _bar("measure") as progress:
        return measure_sequences(wide, DecoderRunner(wide), seconds, on_progress=progress)


@contextmanager
def _mapper(processes: int) -> Iterator[Mapper]:
    """What asks the simulator many questions at once. Processes start afresh: this one may have threads of a model."""
    if processes == 1:
        yield map
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield partial(pool.map, chunksize=_CHUNK)


@contextmanager
def _bar(title: str) -> Iterator[Callable[[float], object]]:
    """A bar on the standard error, and what moves it to a share of the whole."""
    with tqdm(total=100, desc=title, unit="%", dynamic_ncols=True) as bar:
        yield lambda share: bar.update(int(100 * share) - bar.n)


def _modes() -> str:
    """What the modes stand for."""
    return "; ".join(
        f"{name}: {mode.ttft:g} and {mode.itl:g} times the TTFT and ITL of requests without company"
        if mode.ttft < inf
        else f"{name}: no target"
        for name, mode in MODES.items()
    )
