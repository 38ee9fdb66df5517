"""What a line costs beside its model, and whether memory stays flat: python benchmarks/jobs.py [--lines N] [--model
DIR]

Runs `chairlift run` over short lines, through a Python class that does nothing or an embedder's folder, and prints the
wall time of a line less the model's own, and the resident memory of the run's process (not the model's) after the first
10,000 lines and at most after that.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table

_FIRST = 10_000
_CLASS = """
class Nothing:
    def predict(self, batch):
        return batch
"""
_WORDS = (
    "a",
    "cable",
    "car",
    "goes",
    "up",
    "the",
    "hill",
    "and",
    "down",
    "again",
    "while",
    "a",
    "lift",
    "never",
    "stops",
    "now",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--model", help="an embedder's folder (default: a Python class that does nothing)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    parser.add_argument("flags", nargs="*", help="for `chairlift run`, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "nothing.py").write_text(_CLASS)
        write(folder / "in.jsonl", args.lines, args.model)
        model = args.model or "nothing.py:Nothing"
        command = [
            "run",
            "in.jsonl",
            "-o",
            "out.jsonl",
            "--overwrite",
            "--model",
            model,
            "--served-model-name",
            "bench",
            *args.flags,
        ]
        recording = Recording(start("jobs", vars(args), args.model), args.out)
        for number in range(1, args.rounds + 1):
            recording.add({"round": number} | measure(command, folder, args.lines))
    print(markdown(recording.results))


def markdown(results: Results) -> str:
    """What a line cost, and the memory of the process that ran the file."""
    columns = (
        Column("lines_per_s", "lines/s"),
        Column("overhead_us_per_line", "beside the model, us a line"),
        Column("resident_mb_first", f"resident MB after {_FIRST:,} lines", "{:.1f}"),
        Column("resident_mb_most", "at most later", "{:.1f}"),
    )
    return f"{caption(results)}:\n\n{table(results['runs'], [Column('lines', 'lines', '{:,}')], columns)}"


def write(path: Path, count: int, embedder: str | None) -> None:
    """Lines of a few words, or of a number."""
    url = "/v1/embeddings" if embedder else "/v1/models/bench:predict"
    with path.open("w") as file:
        for number in range(count):
            text = f"{_WORDS[number % 16]} {_WORDS[number // 16 % 16]} {number}"
            body = {"model": "bench", "input": text} if embedder else {"instances": [number]}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}
            file.write(json.dumps(line) + "\n")


def measure(command: list[str], folder: Path, count: int) -> dict[str, float]:
    """Run to the end, looking at the memory ten times a second."""
    # What an earlier round has left would count as done.
    (folder / "out.jsonl").unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "chairlift.cli", *command], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    resident: list[tuple[int, float]] = []
    watching = threading.Thread(target=_watch, args=(process, folder / "out.jsonl", resident))
    watching.start()
    printed, _ = process.communicate()
    watching.join()
    if process.returncode:
        raise SystemExit(f"it ended with {process.returncode}: {printed}")
    found = dict(re.findall(r"^(\S[^\n]*?)  +(.*)$", printed, re.MULTILINE))
    seconds = float(found["seconds"].replace(",", ""))
    busy = float(found["model busy"].partition(" ")[0].replace(",", ""))
    size = (folder / "out.jsonl").stat().st_size / count
    first = next((memory for length, memory in resident if length >= _FIRST * size), 0.0)
    later = [memory for length, memory in resident if length >= _FIRST * size]
    return {
        "lines": count,
        "seconds": seconds,
        "lines_per_s": round(count / seconds, 1),
        "model_busy_s": busy,
        "overhead_us_per_line": round((seconds - busy) / count * 1e6, 1),
        "resident_mb_first": round(first, 1),
        "resident_mb_most": round(max(later, default=0.0), 1),
    }


def _watch(process: "subprocess.Popen[str]", output: Path, resident: list[tuple[int, float]]) -> None:
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        found = re.search(r"VmRSS:\s+(\d+)", status.read_text()) if status.exists() else None
        if found:
            resident.append((output.stat().st_size if output.exists() else 0, int(found[1]) / 1024))
        time.sleep(0.1)


if __name__ == "__main__":
    main()
