"""`chairlift plan`: which strategy and settings suit a model's traffic on this machine, and how much it can take."""

import argparse
import multiprocessing
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from chairlift.bench.output_files import check_output, saving
from chairlift.bench.plot import check_plot, plot_curves
from chairlift.bench.raw_results import HelpFormatter
from chairlift.config.flags import HELP, dashed
from chairlift.config.items import ItemConfig
from chairlift.errors import ConfigError
from chairlift.plan.advice import TrafficFacts, facts_of, fewness_notes, rounded
from chairlift.plan.as_copied import as_flags
from chairlift.plan.case import PlanCase, changed, highest_rate
from chairlift.plan.item_advice import item_decision
from chairlift.plan.item_case import ItemCase
from chairlift.plan.machine_profile import ItemProfile, MachineProfile, SequenceProfile
from chairlift.plan.planner import ServingPlan, make_plan, with_mode
from chairlift.plan.resampler import thinned
from chairlift.plan.search import MOST_SIMULATED, Mapper, num_requests
from chairlift.plan.sequence_advice import sequence_decision
from chairlift.plan.sequence_case import SequenceCase
from chairlift.plan.steadiness import steadiness_notes
from chairlift.plan.targets import MODES, LatencyTargets
from chairlift.plan.trace import TraceRequest, cut_notes, fitted
from chairlift.plan.traffic import LENGTHS
from chairlift.planning.plan_report import PlanResults, markdown
from chairlift.planning.plan_served import subject_served
from chairlift.planning.plan_subject import SETTINGS, Subject, profile_of, progress_bar, subject_here
from chairlift.planning.plan_traffic import check_anybody_waits, targets_in, traffic_in
from chairlift.runners.host_cpus import usable_cpus

# Recorded steps, or calls, that are drawn from: more of them take longer, and tell nothing new.
_MOST_SAMPLES = 4_000
_BALANCED = "balanced"
_AS_LIVE = (
    "nobody waits for these requests, which ran in the background: they are simulated as if somebody did, without the"
    " bound of background_step_ms"
)
# Questions that a process is given at a time; the case that they have in common is sent once for all of them.
_CHUNK = 4


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Give a parser the flags of `chairlift plan`."""
    parser.description = "Measure a model, simulate its server under every strategy, and say what to set."
    parser.formatter_class = HelpFormatter
    parser.set_defaults(run=main)
    kinds = "a Hugging Face folder, a name of the Hub, a .gguf or .onnx file, module:Class or file.py:Class"
    parser.add_argument("model", help=f"{kinds}; or a server's http:// URL")
    _add_traffic(parser.add_argument_group("what comes"))
    wanted = parser.add_argument_group("what is promised")
    wanted.add_argument("--target-ttft-ms", type=float, help="to the first token")
    wanted.add_argument("--target-itl-ms", type=float, help="between two tokens")
    wanted.add_argument("--target-e2e-ms", type=float, help="to the last token, or to the whole answer")
    wanted.add_argument("--percentile", type=float, default=95.0, help="how many percent of requests are within these")
    modes = f"in place of targets (without any: {_BALANCED}). {_modes()}"
    wanted.add_argument("--mode", choices=list(MODES), help=modes)
    machine = parser.add_argument_group("the machine")
    saved = "what was measured before; if it is not there yet, it is measured and saved"
    machine.add_argument("--profile", type=Path, metavar="FILE", help=saved)
    machine.add_argument("--measure-seconds", type=float, default=40.0, help="how long to measure, at most 60")
    examples = "what the model is sent, a line of JSON each; for a Python class that has no example of its own"
    machine.add_argument("--examples", type=Path, metavar="FILE", help=examples)
    for name in SETTINGS:
        machine.add_argument(f"--{dashed(name)}", default=argparse.SUPPRESS, help=HELP[name])
    served = parser.add_argument_group("a server that runs already")
    served.add_argument("--model", dest="served_name", metavar="NAME", help="which of its models, if it has several")
    served.add_argument("--api-key", metavar="KEY", help="better set as CHAIRLIFT_API_KEY than as a flag")
    served.add_argument("--yes", action="store_true", help="send requests to one that is not on this machine")
    parser.add_argument("--seed", type=int, default=0, help="of made-up traffic and of the simulation")
    parser.add_argument("--processes", type=int, default=usable_cpus(), help="that simulate at once")
    parser.add_argument("--out", type=Path, metavar="FILE", help="save the plan as JSON")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw latency over throughput (needs chairlift[plot])")


def _add_traffic(traffic: "argparse._ArgumentGroup") -> None:
    recorded = "recorded by serve --record, of Mooncake, Azure or BurstGPT, or an access log of nginx or Apache"
    traffic.add_argument("--trace", type=Path, metavar="FILE", help=recorded)
    traffic.add_argument("--trace-model", metavar="NAME", help="only the trace's requests to this model")
    traffic.add_argument("--seconds", type=float, help="only what comes within so many seconds of the trace")
    traffic.add_argument("--rate", type=float, help="requests a second, Poisson; with a trace it is sped up to that")
    traffic.add_argument("--input-lengths", metavar="LENGTHS", help=f"tokens of prompts, or of each text: {LENGTHS}")
    traffic.add_argument("--output-lengths", metavar="LENGTHS", help="tokens of answers, in the same forms")
    traffic.add_argument("--items", type=int, help="inputs of a request that is answered in one call (default: 1)")


def main(args: argparse.Namespace) -> int:
    """Make a plan and print it."""
    _check_outputs(args)
    subject = subject_served(args) if "://" in args.model else subject_here(args)
    items = isinstance(subject.config, ItemConfig)
    targets = targets_in(args, items)
    mode = None if targets is not None else args.mode or _BALANCED
    traffic = traffic_in(args, subject.config, subject.trace)
    check_anybody_waits(traffic.trace, traffic.trace, mode)
    profile, machine = profile_of(args, subject)
    longest = _longest(subject, profile)
    trace = fitted(traffic.trace, longest)
    targets = targets or LatencyTargets(percentile=args.percentile)
    case = _case(subject, thinned(profile, _MOST_SAMPLES), machine, trace, targets, args.seed)
    notes = [*traffic.notes, *cut_notes(traffic.trace, trace, longest)]
    looked_at = case.trace[: num_requests(case)]
    if all(request.background for request in looked_at):
        check_anybody_waits(looked_at, trace, mode)
        case, notes = _as_live(case), [*notes, _AS_LIVE]
    if mode is not None:
        case = with_mode(case, subject.config, mode)
    facts = facts_of(trace, args.rate)
    with _mapper(args.processes) as mapper, progress_bar("simulate") as progress:
        plan = make_plan(case, subject.config, facts.rate, mapper, progress)
    results = PlanResults(
        title=subject.title or subject.name,
        model=subject.name,
        kind="items" if items else "sequences",
        machine=machine.machine,
        mode=mode,
        front=machine.front,
        notes=[*notes, *subject.notes, *steadiness_notes(profile), *fewness_notes(plan), *_as_it_is(case, subject)],
        given=subject.given,
        facts=facts,
        plan=plan,
        decision=_decision(case, plan, facts, trace),
        **_memory(profile),
    )
    print(markdown(results))
    if args.out:
        with saving("--out", args.out):
            args.out.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    if args.plot:
        with saving("--plot", args.plot):
            plot_curves(plan, args.plot)
        print(f"picture: {args.plot}", file=sys.stderr)
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse now what would fail at the end."""
    if args.processes < 1:
        raise ConfigError(f"--processes must be at least 1, got {args.processes}")
    for name in ("out", "plot", "profile"):
        path = getattr(args, name)
        # A profile that is there is only read.
        if path is not None and not (name == "profile" and os.path.exists(path)):
            check_output(f"--{name}", path)
    if args.plot is not None:
        check_plot()


def _longest(subject: Subject, profile: SequenceProfile | ItemProfile) -> int:
    """Tokens that a request, or an input, may have."""
    most = profile.max_model_len if isinstance(profile, SequenceProfile) else profile.max_tokens or sys.maxsize
    return min(subject.config.max_model_len or most, most)


def _case(
    subject: Subject,
    profile: SequenceProfile | ItemProfile,
    machine: MachineProfile,
    trace: Sequence[TraceRequest],
    targets: LatencyTargets,
    seed: int,
) -> PlanCase[Any, Any]:
    """The question, of either kind."""
    looked_at = tuple(trace[:MOST_SIMULATED])
    if isinstance(profile, ItemProfile):
        return ItemCase(profile, looked_at, targets, machine.front, seed)
    return SequenceCase(profile, looked_at, targets, machine.front, seed, subject.max_waiting)


def _as_live(case: PlanCase[Any, Any]) -> PlanCase[Any, Any]:
    """The same question where somebody waits for each answer: of others no latency is known."""
    return replace(case, trace=tuple(msgspec.structs.replace(each, background=False) for each in case.trace))


def _decision(
    case: PlanCase[Any, Any], plan: ServingPlan, facts: TrafficFacts, trace: Sequence[TraceRequest]
) -> list[str]:
    if isinstance(case, ItemCase):
        return item_decision(plan, facts, case.profile)
    return sequence_decision(plan, facts, trace)


def _as_it_is(case: PlanCase[Any, Any], subject: Subject) -> list[str]:
    """What a server that runs can do with the settings that it has."""
    if subject.now is None:
        return []
    rate = highest_rate(case, subject.now, num_requests(case))
    flags = shlex.join(as_flags(changed(subject.now))) or "the defaults"
    return [f"as it is now, with `{flags}`, it keeps the targets up to {rounded(rate)} requests a second"]


def _memory(profile: SequenceProfile | ItemProfile) -> dict[str, Any]:
    """What the report says of memory."""
    if isinstance(profile, ItemProfile):
        return {"weight_bytes": profile.weight_bytes, "process_bytes": profile.process_bytes}
    tokens = profile.num_blocks * profile.block_size
    return {"weight_bytes": profile.weight_bytes, "kv_bytes": profile.kv_bytes, "kv_tokens": tokens}


@contextmanager
def _mapper(processes: int) -> Iterator[Mapper]:
    """What asks the simulator many questions at once. Processes start afresh: this one may have threads of a model."""
    if processes == 1:
        yield map
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:

        def ask(question: Callable[[Any], Any], cases: Iterable[Any]) -> Iterator[Any]:
            # Ctrl-C reaches all processes of a terminal. Those that begin here stay deaf to it, as this one is
            # meanwhile: where one dies the pool may wait for it in vain.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                return pool.map(question, cases, chunksize=_CHUNK)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

        try:
            yield ask
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


def _modes() -> str:
    """What the modes stand for."""
    return "; ".join(
        f"{name}: {mode.ttft:g} and {mode.itl:g} times the TTFT and ITL of a request that is alone"
        if mode.ttft < inf
        else f"{name}: no target"
        for name, mode in MODES.items()
    )
