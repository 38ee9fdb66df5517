"""`chairlift bench formats`: what each format of weights costs in memory and quality, and gives in speed."""

import argparse
import json
import sys
from pathlib import Path

from tqdm import tqdm

from chairlift.bench.plot import check_plot, plot_formats
from chairlift.bench.raw_results import (
    Column,
    HelpFormatter,
    Recording,
    Results,
    add_result_flags,
    caption,
    saved,
    start,
    table,
)
from chairlift.config.flags import dashed
from chairlift.demo import demo_path
from chairlift.errors import ConfigError
from chairlift.folders.kind import is_encoder
from chairlift.hub.resolve import located

# The module whose `markdown` shows the results.
RESULTS_OF = "chairlift.bench.formats_command"
# Prose that was written for this purpose: no model can have it by heart, nor the demo's, of whose subjects it tells.
PROSE = Path(__file__).with_name("prose.txt")
# What each is, as settings of a model.
FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}


def add_formats(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench formats` to the command line."""
    parser = kinds.add_parser(
        "formats",
        help="what 32, 16, 8 and 4 bits cost a model in memory and quality, and give in speed",
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(run=main)
    parser.add_argument("model", nargs="?", help="a Hugging Face folder, a .gguf file, or a name of the Hub")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto", help="of all formats")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 16, 64], help="how many to decode at once")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--text", type=Path, metavar="FILE", help="what perplexity is of (default: a page of prose)")
    parser.add_argument("--text-tokens", type=int, default=4096, help="take at most so many of it")
    parser.add_argument("--num-threads", type=int, help="CPU threads (default: as the server would)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    add_result_flags(parser, saves="save every round", draws="draw speed over memory")


def main(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.plot:
        check_plot()
    results = saved(args.saved, RESULTS_OF, "bench formats") if args.saved else _measured(args)
    if args.json:
        json.dump({"settings": results["settings"], "formats": results["runs"]}, sys.stdout, indent=2)
        print()
    else:
        print(markdown(results))
    if args.plot:
        plot_formats(results, args.plot)
        print(f"picture: {args.plot}", file=sys.stderr)
    return 0


def markdown(results: Results) -> str:
    """The table, with how it was measured."""
    settings = results["settings"]
    first = results["runs"][0]["format"]
    speeds = [
        Column(f"tok_s.{count}", "tok/s, 1 sequence" if count == 1 else f"{count} sequences", "{:,.0f}")
        for count in settings["sequences"]
    ]
    columns = (
        Column("weight_mb", "weights MB", "{:,.0f}"),
        Column("kv_bytes", "KV bytes a token", "{:,.0f}"),
        *speeds,
        Column("perplexity", "perplexity", "{:,.4g}"),
        Column("ratio", f"over {first}'s", "{:.4f}"),
        Column("standard_error", "±", "{:.4f}"),
        Column("agreement", "same likeliest token", "{:.1%}"),
        Column("load_s", "loads in s", "{:.1f}"),
    )
    about = f"prompts of {settings['prompt_len']} tokens, answers of {settings['output_len']}"
    text = f"perplexity over {results['runs'][0]['text_tokens']:,} tokens of {settings['text'] or 'prose'}"
    names = (Column("format", "format"), Column("ops", "multiplied"))
    return f"{caption(results)}; {about}; {text}:\n\n{table(results['runs'], names, columns)}"


def _measured(args: argparse.Namespace) -> Results:
    _check(args)
    model = located(args.model) if args.model else str(demo_path())
    if is_encoder(Path(model)):
        raise ConfigError(f"{model} embeds or classifies texts: this measures models that write")
    text = _text(args.text)
    from chairlift.bench.measure_formats import Exercise, measure_format

    exercise = Exercise(text, args.text_tokens, args.sequences, args.prompt_len, args.output_len, args.seed)
    limits = {"kv_cache_dtype": args.kv_cache_dtype, "num_threads": args.num_threads}
    hidden = {"run", "command", "bench", "plot", "json", "out", "saved"}
    settings = {name: value for name, value in vars(args).items() if name not in hidden}
    recording = Recording(start(RESULTS_OF, settings, model), args.out)
    exact = None
    with tqdm(total=args.rounds * len(args.formats) * (2 + len(args.sequences)), dynamic_ncols=True) as bar:
        for number in range(1, args.rounds + 1):
            for name in args.formats if number % 2 else reversed(args.formats):
                bar.set_description(name)
                run, found = measure_format(model, limits | FORMATS[name], exercise, on_progress=bar.update)
                exact = exact or found
                ratio, error = found.ratio(exact)
                compared = {"ratio": ratio, "standard_error": error, "agreement": found.agreement(exact)}
                recording.add({"round": number, "format": name} | run | compared)
    return recording.results


def _check(args: argparse.Namespace) -> None:
    names = ("prompt_len", "output_len", "text_tokens", "rounds")
    counts = {f"--{dashed(name)}": getattr(args, name) for name in names}
    for flag, value in (*counts.items(), *(("--sequences", each) for each in args.sequences)):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}")
    for flag, values in (("--formats", args.formats), ("--sequences", args.sequences)):
        if len(set(values)) < len(values):
            raise ConfigError(f"{flag} has one of them twice")


def _text(path: Path | None) -> str:
    try:
        return (path or PROSE).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--text {path}: {error}") from None
