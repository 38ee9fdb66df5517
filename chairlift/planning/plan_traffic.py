"""What `chairlift plan` is asked: the traffic that comes, and what is promised of it."""

import argparse
from collections.abc import Collection, Sequence
from math import inf
from typing import NamedTuple

import msgspec

from chairlift.config.flags import dashed
from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.errors import ConfigError
from chairlift.plan.access_log import AccessLog
from chairlift.plan.advice import pause_notes
from chairlift.plan.targets import LatencyTargets, has_targets
from chairlift.plan.trace import TraceRequest, duration, with_answers
from chairlift.plan.trace_files import MOST_HASHES, read_trace_or_log
from chairlift.plan.traffic import Traffic, requests_at, synthetic

# How much of a trace is looked at, and with how little nothing can be said.
_MOST_REQUESTS, _LEAST_REQUESTS = 20_000, 20
_MAKE_UP = 2_000
# What a trace with a pause is not good for, and what is.
_NO_TRACE = "with --rate and what requests are like"
_PART = f"with a part of the trace, by --seconds, or {_NO_TRACE}"


class ExpectedTraffic(NamedTuple):
    """The requests that come, and what is to be said of them."""

    trace: list[TraceRequest]
    notes: list[str]


def targets_in(args: argparse.Namespace, items: bool) -> LatencyTargets | None:
    """What was promised; None if nothing was, and a mode says it. Raises ConfigError for what nobody can promise."""
    given = {name: getattr(args, f"target_{name}_ms") for name in ("ttft", "itl", "e2e")}
    if items and (given["ttft"] or given["itl"]) is not None:
        problem = "--target-ttft-ms and --target-itl-ms are of answers token by token"
        raise ConfigError(f"{problem}; this model has one: --target-e2e-ms")
    if all(value is None for value in given.values()):
        LatencyTargets(percentile=args.percentile)  # refuses a percentile that is none
        return None
    if args.mode is not None:
        flags = "--target-ttft-ms, --target-itl-ms and --target-e2e-ms"
        raise ConfigError(f"--mode is for those who give no target; leave it out, or {flags}")
    for name, value in given.items():
        if value is not None and not 0 < value < inf:
            raise ConfigError(f"--target-{name}-ms must be more than 0, got {value:g}")
    seconds = {name: value / 1000 for name, value in given.items() if value is not None}
    return LatencyTargets(**seconds, percentile=args.percentile)


def check_anybody_waits(part: Sequence[TraceRequest], whole: Sequence[TraceRequest], mode: str | None) -> None:
    """Raise ConfigError where latency is promised, by targets or a mode, and nobody waits in what is simulated."""
    if (mode is not None and not has_targets(mode)) or not all(request.background for request in part):
        return
    count = len(part)
    which = f"all {count} requests" if count == len(whole) else f"the first {count} requests, which are simulated,"
    said = f"{which} ran in the background, where nobody waits, so no latency can be promised"
    instead = "leave out the targets, and say" if mode is None else "say"
    raise ConfigError(f"{said}: to plan for their throughput, {instead} --mode high-throughput")


def is_described(args: argparse.Namespace, config: SequenceConfig | ItemConfig | None = None) -> bool:
    """Whether the flags say what comes, by themselves or with what a server's settings expect."""
    if args.trace is not None or _lengths(args) != (None, None, None):
        return True
    if args.rate is None or config is None:
        return False
    if isinstance(config, ItemConfig):
        return config.kind != "encoder"
    return config.expected_input_tokens is not None and config.expected_output_tokens is not None


def traffic_in(
    args: argparse.Namespace, config: SequenceConfig | ItemConfig, seen: Sequence[TraceRequest] = ()
) -> ExpectedTraffic:
    """The requests that come: recorded, made up as described, or what a server has `seen`.

    Raises ConfigError for what is missing or too much.
    """
    for name in ("rate", "seconds"):
        value = getattr(args, name)
        if value is not None and not 0 < value < inf:
            raise ConfigError(f"--{name} must be more than 0, and finite, got {value:g}")
    if args.trace is None and args.trace_model is not None:
        raise ConfigError("--trace-model chooses among the models of a --trace, and there is none")
    if args.trace is None and args.seconds is not None:
        raise ConfigError("--seconds takes a part of a --trace, and there is none")
    if args.trace is None and not seen:
        return ExpectedTraffic(_made_up(args, config), [])
    found = ExpectedTraffic(list(seen), []) if args.trace is None else _recorded(args, config)
    trace = with_answers(found.trace, args.seed)
    if len(trace) < _LEAST_REQUESTS or duration(trace) == 0:
        name = "the server's own" if args.trace is None else f"trace {args.trace}"
        message = f"{name}: a plan needs {_LEAST_REQUESTS} requests or more, at more than one moment"
        raise ConfigError(f"{message}, got {len(trace)} in {duration(trace):g} s")
    notes = pause_notes(trace, _NO_TRACE if args.trace is None else _PART)
    return ExpectedTraffic(trace, [*found.notes, *notes])


def _lengths(args: argparse.Namespace) -> tuple[str | None, str | None, int | None]:
    """What is said of requests beside when they come."""
    return args.input_lengths, args.output_lengths, args.items


def _made_up(args: argparse.Namespace, config: SequenceConfig | ItemConfig) -> list[TraceRequest]:
    """Requests as the flags describe them."""
    traffic = _described(args, config, ["rate"], "say what comes: --trace FILE, or")
    traffic = msgspec.structs.replace(traffic, arrivals=f"poisson:{args.rate}")
    return synthetic(traffic, _MAKE_UP / args.rate, args.seed)


def _recorded(args: argparse.Namespace, config: SequenceConfig | ItemConfig) -> ExpectedTraffic:
    """The requests of a file, or of the part of it that is wanted."""
    items = isinstance(config, ItemConfig)
    found = read_trace_or_log(args.trace, most=_MOST_REQUESTS)
    notes: list[str] = []
    if isinstance(found, AccessLog):
        if args.trace_model is not None:
            raise ConfigError("--trace-model chooses among models, which an access log does not name; leave it out")
        traffic = _described(args, config, [], f"trace {args.trace} is an access log, which tells no lengths: say")
        moments, about = found.moments(items, args.seed)
        trace, notes = requests_at(moments, traffic, args.seed), [about]
    elif _lengths(args) != (None, None, None):
        raise ConfigError("the trace has its own lengths: leave out --input-lengths, --output-lengths and --items")
    else:
        trace = _of_model(found, args, items)
    until = inf if args.seconds is None else args.seconds
    return ExpectedTraffic([request for request in trace if request.arrival <= until], notes)


def _described(
    args: argparse.Namespace, config: SequenceConfig | ItemConfig, others: Collection[str], ask: str
) -> Traffic:
    """What requests are like, as the flags say, or else the settings expect: exponential around that.

    Raises ConfigError, which begins with `ask`, if that is not all known, or one of the `others` is missing.
    """
    items = isinstance(config, ItemConfig)
    sized = isinstance(config, ItemConfig) and config.kind == "encoder"
    if items and args.output_lengths is not None:
        raise ConfigError("--output-lengths is of answers token by token, and this model has none; leave it out")
    if items and not sized and args.input_lengths is not None:
        raise ConfigError("--input-lengths is of texts, and this model takes none; leave it out")
    if not items and args.items is not None:
        raise ConfigError("--items is for models that answer in one call; leave it out")
    given = {name: getattr(args, name) for name in others}
    if sized or not items:
        given["input_lengths"] = _or_expected(args.input_lengths, config, "expected_input_tokens")
    if not items:
        given["output_lengths"] = _or_expected(args.output_lengths, config, "expected_output_tokens")
    if None in given.values():
        *first, last = (f"--{dashed(name)}" for name in given)
        said = f"{', '.join(first)} and {last}" if first else last
        raise ConfigError(f"{ask} {said}")
    count = 1 if args.items is None else args.items
    if not 1 <= count <= MOST_HASHES:
        raise ConfigError(f"--items must be between 1 and {MOST_HASHES}, got {count}")
    return Traffic(
        input_length=given.get("input_lengths", "constant:1"),
        output_length=given.get("output_lengths", "constant:1"),
        items=count if items else 0,
    )


def _or_expected(lengths: str | None, config: SequenceConfig | ItemConfig, name: str) -> str | None:
    """Lengths as they are given, or else as the model's settings expect them, if they do."""
    tokens = getattr(config, name, None)
    return f"exponential:{tokens}" if lengths is None and tokens is not None else lengths


def _of_model(trace: list[TraceRequest], args: argparse.Namespace, items: bool) -> list[TraceRequest]:
    """The requests to one model, for tokens or with items."""
    kind = "model that answers in one call" if items else "language model"
    names = sorted({request.model for request in trace if bool(request.items) == items})
    if args.trace_model is not None:
        if args.trace_model not in names:
            raise ConfigError(f"--trace-model {args.trace_model}: the trace has {', '.join(names) or f'no {kind}'}")
        names = [args.trace_model]
    if len(names) > 1:
        raise ConfigError(f"trace {args.trace} is of {', '.join(names)}: choose one with --trace-model")
    if not names:
        raise ConfigError(f"trace {args.trace} has no requests to a {kind}")
    found = [request for request in trace if request.model == names[0] and bool(request.items) == items]
    return [msgspec.structs.replace(request, arrival=request.arrival - found[0].arrival) for request in found]
