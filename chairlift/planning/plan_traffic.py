"""What `chairlift plan` is asked: the traffic that comes, and what is promised of it."""

import argparse
from collections.abc import Sequence
from math import inf

import msgspec

from chairlift.config.flags import dashed
from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.errors import ConfigError
from chairlift.plan.targets import LatencyTargets
from chairlift.plan.trace import TraceRequest, duration, with_answers
from chairlift.plan.trace_files import MOST_HASHES, read_trace
from chairlift.plan.traffic import Traffic, synthetic

# How much of a trace is looked at, and with how little nothing can be said.
_MOST_REQUESTS, _LEAST_REQUESTS = 20_000, 20
_MAKE_UP = 2_000


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


def expect(args: argparse.Namespace, config: SequenceConfig | ItemConfig) -> None:
    """Describe traffic of which only the rate is given as the model's settings expect it: exponential around that."""
    if args.trace is not None or not isinstance(config, SequenceConfig):
        return
    if args.input_lengths is None and config.expected_input_tokens is not None:
        args.input_lengths = f"exponential:{config.expected_input_tokens}"
    if args.output_lengths is None and config.expected_output_tokens is not None:
        args.output_lengths = f"exponential:{config.expected_output_tokens}"


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
    args: argparse.Namespace, items: bool, sized: bool, seen: Sequence[TraceRequest] = ()
) -> list[TraceRequest]:
    """The requests that come: recorded, made up as described, or what a server has `seen`.

    Those with `items` are of models that answer in one call, of which only those that are `sized` have lengths. Raises
    ConfigError for what is missing or too much.
    """
    if args.rate is not None and not 0 < args.rate < inf:
        raise ConfigError(f"--rate must be more than 0, got {args.rate:g}")
    if args.trace is None and args.trace_model is not None:
        raise ConfigError("--trace-model chooses among the models of a --trace, and there is none")
    if args.trace is None and not seen:
        return _made_up(args, items, sized)
    if args.trace is None:
        name, trace = "the server's own", list(seen)
    else:
        if _lengths(args) != (None, None, None):
            raise ConfigError("the trace has its own lengths: leave out --input-lengths, --output-lengths and --items")
        name, trace = f"trace {args.trace}", _of_model(read_trace(args.trace, most=_MOST_REQUESTS), args, items)
    trace = with_answers(trace, args.seed)
    if len(trace) < _LEAST_REQUESTS or duration(trace) == 0:
        message = f"{name}: a plan needs {_LEAST_REQUESTS} requests or more, at more than one moment"
        raise ConfigError(f"{message}, got {len(trace)} in {duration(trace):g} s")
    return trace


def _lengths(args: argparse.Namespace) -> tuple[str | None, str | None, int | None]:
    """What is said of requests beside when they come."""
    return args.input_lengths, args.output_lengths, args.items


def _made_up(args: argparse.Namespace, items: bool, sized: bool) -> list[TraceRequest]:
    """Requests as the flags describe them."""
    if items and args.output_lengths is not None:
        raise ConfigError("--output-lengths is of answers token by token, and this model has none; leave it out")
    if items and not sized and args.input_lengths is not None:
        raise ConfigError("--input-lengths is of texts, and this model takes none; leave it out")
    if not items and args.items is not None:
        raise ConfigError("--items is for models that answer in one call; leave it out")
    needed = ["rate", "input_lengths", "output_lengths"][: 3 if not items else 2 if sized else 1]
    if any(getattr(args, name) is None for name in needed):
        *others, last = (f"--{dashed(name)}" for name in needed)
        said = f"{', '.join(others)} and {last}" if others else last
        raise ConfigError(f"say what comes: --trace FILE, or {said}")
    count = 1 if args.items is None else args.items
    if not 1 <= count <= MOST_HASHES:
        raise ConfigError(f"--items must be between 1 and {MOST_HASHES}, got {count}")
    traffic = Traffic(
        arrivals=f"poisson:{args.rate}",
        input_length=args.input_lengths or "constant:1",
        output_length=args.output_lengths or "constant:1",
        items=count if items else 0,
    )
    return synthetic(traffic, _MAKE_UP / args.rate, args.seed)


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
