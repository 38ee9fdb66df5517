"""Puts the tables and pictures of saved results into the documentation: python benchmarks/render.py [--check]

In docs/benchmarks.md, the pages of docs/benchmarks and the README a table lies between `<!-- results: NAME -->` and
`<!-- end -->`, and is made of benchmarks/results/NAME.json alone, by the `markdown` of the benchmark that it names.
Pictures are drawn of all results of their kind. `--check` changes nothing, and fails if they are not what the results
say.
"""

import argparse
import importlib
import json
import re
import sys
from pathlib import Path

from chairlift.bench.raw_results import Results

HERE = Path(__file__).parent
# Where the modules are that results name.
sys.path.append(str(HERE / "dynamic"))

DOCS = HERE.parent / "docs"
PAGES = (DOCS / "benchmarks.md", *sorted((DOCS / "benchmarks").glob("*.md")))
DOCUMENTS = (*PAGES, HERE.parent / "README.md")
RESULTS = HERE / "results"
# Comparisons with peers that the README's picture shows; other shapes have tables.
PICTURED = ("llama-135m-zen4",)
MISSING = "*No results are saved: run the command above with `--out benchmarks/results/{}.json`.*"
_BLOCK = re.compile(r"<!-- results: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for document in DOCUMENTS:
        before = document.read_text()
        after = render(before, RESULTS)
        if args.check and before != after:
            raise SystemExit(f"{document.name} is not what the results say: run benchmarks/render.py")
        if not args.check:
            document.write_text(after)
    if not args.check:
        draw(RESULTS, DOCS)


def render(text: str, folder: Path) -> str:
    """The document with every table made anew of the results in the folder."""
    return _BLOCK.sub(lambda match: f"<!-- results: {match[1]} -->\n{_table(match[1], folder)}\n<!-- end -->", text)


def outside(text: str) -> str:
    """What of a document is written by hand."""
    return _BLOCK.sub("", text)


def draw(folder: Path, docs: Path) -> None:
    """Draw the comparison with peers and the strategies over time, where there are results of them."""
    every = [_load(file) for file in sorted(folder.glob("*.json"))]
    if compared := [_load(file) for name in PICTURED if (file := folder / f"{name}.json").exists()]:
        import comparison

        comparison.draw(compared, docs / "compare.png")
    for results in every:
        if results["benchmark"] == "chairlift.bench.report":
            from chairlift.bench.plot import plot

            plot(results, docs / "strategies.png")


def _table(name: str, folder: Path) -> str:
    file = folder / f"{name}.json"
    if not file.exists():
        return MISSING.format(name)
    results = _load(file)
    text: str = importlib.import_module(results["benchmark"]).markdown(results)
    return text


def _load(file: Path) -> Results:
    results: Results = json.loads(file.read_text())
    return results


if __name__ == "__main__":
    main()
