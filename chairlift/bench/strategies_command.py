"""`chairlift bench strategies`: what each batching strategy does to the same requests."""

import argparse
import json
import sys
from math import inf
from pathlib import Path
from typing import Any

from tqdm import tqdm

from chairlift.bench.formats_command import add_formats
from chairlift.bench.plot import check_plot, plot
from chairlift.bench.raw_results import HelpFormatter, Recording, Results, add_result_flags, saved, start
from chairlift.bench.replay import add_serve
from chairlift.bench.report import bars, figures, markdown
from chairlift.bench.strategies import run_strategy
from chairlift.bench.workload import TimedRequest, jobs_of_trace, make_jobs
from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.strategy import STRATEGIES, readers_of
from chairlift.demo import demo_path
from chairlift.errors import ConfigError
from chairlift.hub.resolve import located
from chairlift.plan.sequence_candidates import with_strategy
from chairlift.plan.trace_files import read_trace
from chairlift.plan.traffic import LENGTHS

# The module whose `markdown` shows the results.
RESULTS_OF = "chairlift.bench.report"
_PROMPTS, _OUTPUTS = "uniform:4:32", "exponential:32"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench strategies` to the command line."""
    bench = commands.add_parser("bench", help="compare strategies or number formats, or send a trace to a server")
    kinds = bench.add_subparsers(dest="bench", required=True)
    add_serve(kinds)
    add_formats(kinds)
    parser = kinds.add_parser(
        "strategies",
        help="the same model and requests under every batching strategy",
        epilog="; ".join(f"{name}: {strategy.about}" for name, strategy in STRATEGIES.items()),
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(run=main)
    parser.add_argument(
        "model", nargs="?", help="a Hugging Face folder, or a name of the Hub (default: the demo model)"
    )
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--slots", type=int, default=8, help="sequences that may run at once")
    parser.add_argument("--requests", type=int, default=400, help="how many to serve")
    parser.add_argument("--prompt-len", metavar="LENGTHS", help=f"{LENGTHS} (default: {_PROMPTS})")
    parser.add_argument("--output-len", metavar="LENGTHS", help=f"in the same forms (default: {_OUTPUTS})")
    open_loop = "arrivals a second, in place of the closed loop: Poisson, or those of the trace sped up to that"
    parser.add_argument("--rate", type=float, help=open_loop)
    own = "requests as they were recorded by serve --record, of Mooncake, Azure or BurstGPT, in place of made-up ones"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=own)
    parser.add_argument("--concurrency", type=int, help="clients of the closed loop (default: twice the slots)")
    parser.add_argument(
        "--max-wait-ms", type=float, default=5.0, help=f"the window of {' and '.join(readers_of('max_wait_ms'))}"
    )
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--seed", type=int, default=0, help="of lengths, prompts and arrivals")
    saves = "save every round, and what the picture needs of one"
    add_result_flags(parser, saves, draws="draw the batches over time")


def main(args: argparse.Namespace) -> int:
    """Run the comparison and print it."""
    if args.plot:
        check_plot()
    results = saved(args.saved, RESULTS_OF, "bench strategies") if args.saved else _measure(args)
    if args.json:
        rows = [{name: value for name, value in run.items() if name != "bars"} for run in results["runs"]]
        json.dump({"settings": results["settings"], "strategies": rows}, sys.stdout, indent=2)
        print()
    else:
        print(markdown(results))
    if args.plot:
        plot(results, args.plot)
        print(f"picture: {args.plot}", file=sys.stderr)
    return 0


def _measure(args: argparse.Namespace) -> Results:
    """Serve the jobs under each strategy in turn, as often as there are rounds."""
    _check(args)
    config = SequenceConfig(
        model=located(args.model) if args.model else str(demo_path()),
        dtype=args.dtype,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_prefix_caching=False,
    )
    recording = Recording(start(RESULTS_OF, _settings(args), config.model), args.out)
    is_open = args.rate is not None or args.trace is not None
    concurrency = None if is_open else args.concurrency or 2 * args.slots
    jobs = _jobs(config, args)
    with tqdm(total=len(jobs) * len(args.strategies) * args.rounds, unit="req", dynamic_ncols=True) as bar:
        for number in range(1, args.rounds + 1):
            for strategy in args.strategies if number % 2 else reversed(args.strategies):
                bar.set_description(strategy)
                chosen = with_strategy(config, strategy, args.slots, max_wait_ms=args.max_wait_ms)
                run = run_strategy(chosen, _runner, jobs, concurrency, on_finish=lambda: bar.update(1))
                shown = {"bars": bars(run)} if number == 1 else {}
                recording.add({"round": number} | figures(run) | shown)
    return recording.results


def _check(args: argparse.Namespace) -> None:
    """Refuse what contradicts itself, and fill in the lengths of what is made up."""
    for name in ("slots", "requests", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.rate is not None and not 0 < args.rate < inf:
        raise ConfigError(f"--rate must be more than 0, got {args.rate:g}")
    if args.concurrency is not None:
        _check_concurrency(args)
    if args.trace is not None and (args.prompt_len, args.output_len) != (None, None):
        raise ConfigError("the trace has its own lengths: leave out --prompt-len and --output-len")
    if args.trace is None:
        args.prompt_len, args.output_len = args.prompt_len or _PROMPTS, args.output_len or _OUTPUTS


def _check_concurrency(args: argparse.Namespace) -> None:
    """Refuse clients of a closed loop where there is none, and fewer than a batch that waits for all of them takes."""
    if args.concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {args.concurrency}")
    if args.rate is not None or args.trace is not None:
        raise ConfigError("--concurrency is of a closed loop; with --rate or --trace requests come by themselves")
    full = [
        name
        for name in args.strategies
        if STRATEGIES[name].closes_batch and "max_wait_ms" not in STRATEGIES[name].settings
    ]
    # Once all requests have been sent, a batch leaves as it is.
    if full and args.concurrency < min(args.slots, args.requests):
        raise ConfigError(
            f"--concurrency {args.concurrency} never fills {args.slots} --slots, which {' and '.join(full)} waits for: "
            f"raise --concurrency to {args.slots}, lower --slots, or leave {' and '.join(full)} out of --strategies"
        )


def _runner(config: SequenceConfig) -> Any:
    from chairlift.runners.decoder.runner import DecoderRunner

    return DecoderRunner(config)


def _jobs(config: SequenceConfig, args: argparse.Namespace) -> list[TimedRequest]:
    """Make the jobs; the model says how long they may be and from what vocabulary."""
    runner = _runner(config)
    info = runner.load()
    runner.close()
    about: dict[str, Any] = {"vocab_size": info.vocab_size, "max_model_len": info.max_model_len}
    about |= {"rate": args.rate, "seed": args.seed}
    if args.trace is not None:
        return jobs_of_trace(read_trace(args.trace), args.requests, **about)
    return make_jobs(args.requests, args.prompt_len, args.output_len, **about)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that shaped the run."""
    hidden = {"run", "command", "bench", "plot", "json", "out", "saved"}
    return {name: value for name, value in vars(args).items() if name not in hidden}
