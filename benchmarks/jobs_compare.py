"""The same batch file through `chairlift run`, `LLM.chat` and vLLM's run-batch: python benchmarks/jobs_compare.py
MODEL_DIR [--rounds 3] [--quantization none int8] [--out FILE]

The file is the workload `varied` as chat lines (run-batch takes no other), with outputs of given lengths. Loaded counts
from the first line's start to the last line's end. All have bfloat16, 2,048 tokens of context, 2 GB of KV memory, 64
sequences and no prefix caching, and else their defaults. Every second round goes backwards.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import workloads
from engines import vllm_environment
from peer_versions import package_versions

from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table

WAYS = {"run": "`chairlift run`", "library": "`LLM.chat`", "vllm": "vLLM's `run-batch`"}
_LIMITS = {"dtype": "bfloat16", "max_model_len": 2048, "kv_cache_gb": 2.0, "enable_prefix_caching": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of an environment with vLLM")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=("run", "library", "vllm"), default=("run", "library", "vllm"))
    parser.add_argument(
        "--quantization", nargs="+", choices=("none", "int8", "int4"), default=["none"], help="Chairlift's"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    parser.add_argument("--in-library", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_library:
        in_library(args)
        return
    peers = package_versions({"vLLM": (args.vllm, "vllm")})
    recording = Recording(start("jobs_compare", vars(args), args.model, peers=peers), args.out)
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "in.jsonl"
        lines.write_text("".join(json.dumps(line) + "\n" for line in batch(args.model)))
        for number in range(1, args.rounds + 1):
            for quantization in args.quantization:
                for name in args.only if number % 2 else reversed(args.only):
                    if name == "vllm" and (not args.vllm or quantization != "none"):
                        continue
                    about = {"name": name, "quantization": quantization, "round": number}
                    recording.add(about | _measure(name, quantization, args, lines))
    print(markdown(recording.results))


def markdown(results: Results) -> str:
    """A row for each way to run the file."""
    columns = (
        Column("tokens_in", "tokens in"),
        Column("tokens_out", "tokens out"),
        Column("output_tok_s", "tok/s loaded"),
        Column("with_load_tok_s", "tok/s with loading"),
    )
    runs = [run | {"way": WAYS[run["name"]]} for run in results["runs"]]
    shown = table(runs, [Column("way", ""), Column("quantization", "quantization")], columns)
    about = "all with their defaults but for bfloat16, 2,048 tokens of context, 2 GB of KV memory and 64 sequences"
    return f"{caption(results)}; {about}:\n\n{shown}"


def batch(model: str) -> list[dict[str, Any]]:
    """The workload's requests as lines; a prompt is the text that its tokens stand for."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    return [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "bench",
                "messages": [{"role": "user", "content": tokenizer.decode(ids)}],
                "max_tokens": length,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        for number, (ids, length) in enumerate(workloads.requests("varied"))
    ]


def in_library(args: argparse.Namespace) -> None:
    """The same through the library, in this process."""
    import chairlift

    bodies = [json.loads(line)["body"] for line in args.in_library.read_text().splitlines()]
    llm = chairlift.LLM(args.model, quantization=args.quantization[0], **_LIMITS)
    params = [chairlift.SamplingParams(max_tokens=b["max_tokens"], ignore_eos=True, temperature=0) for b in bodies]
    print("begin", flush=True)
    outputs = llm.chat([body["messages"] for body in bodies], params, use_tqdm=False)
    print("end", flush=True)
    read, made = (
        sum(map(len, each))
        for each in zip(*((o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs), strict=True)
    )
    print(f"tokens {read} {made}")


def _measure(name: str, quantization: str, args: argparse.Namespace, lines: Path) -> dict[str, Any]:
    output = lines.with_name("out.jsonl")
    output.unlink(missing_ok=True)
    command, env, begin, end = _command(name, quantization, args, lines, output)
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env}
    )
    assert process.stdout is not None
    times: dict[str, float] = {}
    printed = []
    for line in process.stdout:
        printed.append(line)
        for mark in (begin, end):
            if mark in line:
                times.setdefault(mark, time.perf_counter())
    if process.wait() or len(times) < 2:
        raise SystemExit(f"{name} failed:\n{''.join(printed[-30:])}")
    whole = time.perf_counter() - started
    read, made = _tokens(output, printed)
    seconds = times[end] - times[begin]
    return {
        "tokens_in": read,
        "tokens_out": made,
        "seconds": round(seconds, 2),
        "output_tok_s": round(made / seconds, 1),
        "with_load_s": round(whole, 1),
        "with_load_tok_s": round(made / whole, 1),
    }


def _command(
    name: str, quantization: str, args: argparse.Namespace, lines: Path, output: Path
) -> tuple[list[str], dict[str, str], str, str]:
    """What to run, in which environment, and what it prints when the first line begins and when the last has ended."""
    if name == "library":
        arguments = [__file__, args.model, "--in-library", str(lines), "--quantization", quantization]
        return [sys.executable, *arguments], {}, "begin", "end"
    if name == "run":
        flags = ["--dtype", "bfloat16", "--max-model-len", "2048", "--kv-cache-gb", "2", "--no-enable-prefix-caching"]
        arguments = [str(lines), "-o", str(output), "--model", args.model, "--served-model-name", "bench", *flags]
        arguments += ["--quantization", quantization]
        # Before its first line it says how it sends the file.
        return [sys.executable, "-m", "chairlift.cli", "run", *arguments], {}, f"{lines}: ", "tokens out"
    module = [args.vllm, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(lines), "-o", str(output)]
    flags = ["--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64", "--no-enable-prefix-caching"]
    command = [*module, "--model", args.model, "--served-model-name", "bench", *flags]
    return command, vllm_environment(Path(args.vllm)), "Reading batch from", "Writing outputs to"


def _tokens(output: Path, printed: list[str]) -> tuple[int, int]:
    """Tokens read and made; raises SystemExit if not all lines were answered."""
    if not output.exists():
        _, read, made = printed[-1].split()
        return int(read), int(made)
    answers = [json.loads(line)["response"]["body"]["usage"] for line in output.read_text().splitlines()]
    wanted = [length for _, length in workloads.requests("varied")]
    if sorted(answer["completion_tokens"] for answer in answers) != sorted(wanted):
        raise SystemExit(f"not all of {len(wanted)} lines have the answer that they should")
    return sum(answer["prompt_tokens"] for answer in answers), sum(wanted)


if __name__ == "__main__":
    main()
