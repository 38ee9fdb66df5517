"""Embedding throughput beside peers: python benchmarks/dynamic/compare_embed.py MODEL --out FILE PEERS

Each round runs Chairlift's program (embed.py) and those of the peers whose interpreters are given, in turn and alone,
every second round backwards. A program prints a line of JSON for each of its settings, all of which are saved. Of the
programs that differ in a setting alone, only the first round's fastest runs in the others. The table has the setting of
each engine and precision with the highest median, of those that ran in every round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))

from engines import vllm_environment
from peer_versions import binary_version, package_versions

from chairlift.bench.raw_results import Column, Recording, Results, caption, failures, start, table

HERE = Path(__file__).parent
PEERS = {
    "vllm": "vllm_embed.py",
    "sentence_transformers": "sentence_transformers_embed.py",
    "infinity": "infinity_embed.py",
    "onnxruntime": "onnxruntime_embed.py",
}
LLAMA = "llama_embed.py"
SETTINGS = ("batch_size", "batch_tokens")
RUNNER_ALONE = "chairlift, its runner alone"
# What counts in vLLM is the tokens of a step. The programs of the others try their batch sizes themselves.
VLLM_BATCH_TOKENS = (512, 2048, 8192)
# An engine's name and a command.
Program = tuple[str, list[str]]


def main() -> None:
    args = _parser().parse_args()
    print(markdown(measure(args)))


def measure(args: argparse.Namespace) -> Results:
    """Run all rounds, saving as they go."""
    recording = Recording(start("compare_embed", vars(args), args.model, peers=_versions(args)), args.out)
    with tempfile.TemporaryDirectory() as work:
        programs = commands_of(args, work)
        for number in range(1, args.rounds + 1):
            fastest: dict[tuple[str, str], tuple[float, Program]] = {}
            for program in programs if number % 2 else reversed(programs):
                for run in _run(program, args, number, recording):
                    best = fastest.get(engine_of(run), (0.0, program))
                    fastest[engine_of(run)] = max(best, (run["tok_s"], program))
            if number == 1:
                programs = [each for each in programs if each in [kept for _, kept in fastest.values()]]
    return recording.results


def _run(program: Program, args: argparse.Namespace, number: int, recording: Recording) -> list[dict[str, Any]]:
    """Run a program, save what it measured, and return that."""
    name, command = program
    print(f"round {number}: {name}", file=sys.stderr)
    env = vllm_environment(Path(args.vllm)) if name == "vllm" else {}
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"engine"')]
    for run in runs:
        recording.add({"round": number} | run)
    if done.returncode:
        about = {"name": name, "round": number, "results": len(runs)}
        recording.fail(about, done.stderr.strip()[-500:])
    return runs


def commands_of(args: argparse.Namespace, work: str) -> list[Program]:
    """What to run of each engine that the options name; exported files go to the folder `work`."""
    texts = [args.model, "--texts", str(args.texts)]
    own = [sys.executable, str(HERE / "embed.py"), *texts, "--roofline"]
    commands = [("chairlift", own)]
    commands += [(f"chairlift {each}", [*own, "--quantization", each]) for each in ("int8", "int4")]
    more = {
        "vllm": [["--batch-tokens", str(tokens)] for tokens in VLLM_BATCH_TOKENS],
        "onnxruntime": [["--work", work], ["--work", work, "--int8"]],
    }
    for name, script in PEERS.items():
        if python := getattr(args, name):
            program = [python, str(HERE / "peers" / script), *texts]
            commands += [(name, [*program, *flags]) for flags in more.get(name, [[]])]
    files = {"bfloat16": args.gguf, "int8": args.gguf_int8} if args.llama_server else {}
    for precision, gguf in files.items():
        if gguf:
            flags = ["--binary", args.llama_server, "--gguf", gguf, "--precision", precision]
            commands.append((f"llama.cpp {precision}", [sys.executable, str(HERE / "peers" / LLAMA), *texts, *flags]))
    return commands


def markdown(results: Results) -> str:
    """The best setting of each engine and precision."""
    rates: dict[tuple[str, str], dict[str, list[float]]] = {}
    for run in results["runs"]:
        rates.setdefault(engine_of(run), {}).setdefault(setting_of(run), []).append(run["tok_s"])
    best = {
        engine: max(each, key=lambda name: (len(each[name]), statistics.median(each[name])))
        for engine, each in rates.items()
    }
    runs = [
        run | {"name": _called(run), "precision": engine_of(run)[1], "setting": setting_of(run)}
        for run in results["runs"]
        if best[engine_of(run)] == setting_of(run)
    ]
    names = (Column("name", "engine"), Column("precision", "precision"), Column("setting", "best setting"))
    columns = (Column("tok_s", "tokens/s", "{:,.0f}"), Column("share_percent", "of what products allow", "{:.0f}%"))
    about = f"{caption(results)}; {results['settings']['texts']:,} texts:"
    return "\n\n".join([about, table(runs, names, columns), *_how(results), *_ends(results)])


def _called(run: dict[str, Any]) -> str:
    """What a row is called: results from before Chairlift was called through its library don't say by what."""
    if run["engine"] != "chairlift":
        return str(run["engine"])
    return f"chairlift, `{run['through']}`" if "through" in run else RUNNER_ALONE


def _how(results: Results) -> list[str]:
    """What is to be known of rows: which are no whole engines, and how many texts vLLM took at once."""
    alone = any(_called(run) == RUNNER_ALONE for run in results["runs"])
    notes = ["A runner alone is called in a loop over batches; vLLM's and infinity's rows are whole engines."] * alone
    seats = sorted({run["max_num_seqs"] for run in results["runs"] if "max_num_seqs" in run})
    if seats:
        notes.append(f"vLLM takes {' or '.join(map(str, seats))} texts a step at most.")
    return notes


def _ends(results: Results) -> list[str]:
    """A sentence for each failure, and one for those that had a result of the round before they ended with an error."""
    late = [each for each in results["failures"] if _had_results(each, results)]
    failed = [each for each in results["failures"] if each not in late]
    names = dict.fromkeys(each["name"] for each in late)
    rounds = {name: ", ".join(str(each["round"]) for each in late if each["name"] == name) for name in names}
    said = [f"{name} ended with an error after its result in round {rounds[name]}." for name in names]
    return [*failures(results | {"failures": failed}), *said]


def _had_results(failure: dict[str, Any], results: Results) -> bool:
    if "results" in failure:
        return bool(failure["results"])
    # From before that was saved: one of its programs ran in each later round, so a result is of the one that failed.
    engines = {run["engine"] for run in results["runs"] if run["round"] == failure["round"]}
    return failure["round"] > 1 and any(engine.split()[0] == failure["name"] for engine in engines)


def _versions(args: argparse.Namespace) -> dict[str, str]:
    packages = {"infinity": "infinity-emb", "sentence_transformers": "sentence-transformers"}
    found = package_versions({name: (getattr(args, name), packages.get(name, name)) for name in PEERS})
    return found | ({"llama.cpp": binary_version(args.llama_server)} if args.llama_server else {})


def engine_of(run: dict[str, Any]) -> tuple[str, str]:
    """Its name and its precision."""
    rounded = run.get("quantization", "none") != "none"
    return run["engine"], run["quantization"] if rounded else run.get("dtype", "-")


def setting_of(run: dict[str, Any]) -> str:
    """What a peer's program varied."""
    return ", ".join(f"{name} {run[name]}" for name in SETTINGS if name in run) or "-"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with vocab.txt, such as all-MiniLM-L6-v2")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the results are saved")
    for name in PEERS:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="PYTHON", help="its environment's interpreter")
    parser.add_argument("--llama-server", metavar="BINARY")
    parser.add_argument("--gguf", metavar="FILE", help="the same model for llama.cpp, in BF16")
    parser.add_argument("--gguf-int8", metavar="FILE", help="and in Q8_0")
    return parser


if __name__ == "__main__":
    main()
