"""What rounding costs in quality: python benchmarks/accuracy.py [MODEL] [--text FILE] [--out FILE]

Prints a table of float32, bfloat16, and with bfloat16 activations int8 and int4 weights, alone and with an int8 KV
cache.
`perplexity` is over the text, in windows of 256 tokens; `ratio` is it over that of float32, with the standard error
that follows from how the windows differ. `agreement` is the share of the text's tokens after which the likeliest next
one is that of float32. `prefix` is how many tokens, of 64 that follow each of 32 beginnings greedily, come before the
first that differs.

Without a model it takes the demo. Without a text there is a table for each of three: chats whose questions are put as
the demo was never trained on, though their answers it knows by heart; prose on its subjects that was written for this
purpose and is in no training text (`chairlift/bench/prose.txt`); and the licence, a kind of text that it never saw.
"""

import argparse
import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chairlift
from chairlift.bench.formats_command import PROSE
from chairlift.bench.perplexity import Surprise, surprise, windows_of
from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table
from chairlift.demo import demo_path
from chairlift.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
PROMPTS, GENERATED = 32, 64
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8, KV int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int4, KV int8": {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
}


@dataclass
class Measured:
    """How one variant sees the text, and how it goes on greedily."""

    seen: Surprise
    greedy: list[list[int]]
    ops: str

    def prefix(self, other: "Measured") -> float:
        """Mean number of greedy tokens before the first that differs."""
        lengths = [
            len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=True))))
            for both in zip(self.greedy, other.greedy, strict=True)
        ]
        return sum(lengths) / len(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=demo_path())
    parser.add_argument("--text", type=Path, metavar="FILE", help="plain text (default: three texts, see above)")
    parser.add_argument("--tokens", type=int, default=8192, help="take at most so many from a text")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    args = parser.parse_args()
    name = "the demo model" if args.model == demo_path() else args.model.resolve().name
    recording = Recording(start("accuracy", vars(args), name), args.out)
    for title, text in {args.text.name: args.text.read_text("utf-8")}.items() if args.text else own_texts(args.model):
        for row in rows(args.model, title, cut(args.model, text, args.tokens)):
            recording.add(row)
    print(markdown(recording.results))


def markdown(results: Results) -> str:
    """A row for each text and variant."""
    runs = [run | {"ratio": f"{run['ratio']:.4f} ±{run['standard_error']:.4f}"} for run in results["runs"]]
    names = (Column("text", "text"), Column("tokens", "tokens", "{:,}"), Column("variant", ""),
             Column("ratio", "perplexity over float32's"))  # fmt: skip
    columns = (
        Column("perplexity", "perplexity", "{:,.4g}"),
        Column("agreement", "agreement", "{:.1%}"),
        Column("prefix", f"prefix of {GENERATED}", "{:.1f}"),
    )
    return f"{caption(results)}:\n\n{table(runs, names, columns)}"


def own_texts(model: Path) -> Iterator[tuple[str, str]]:
    """The texts that come with the project."""
    yield "chats", held_out_chats(model)
    yield "prose", PROSE.read_text("utf-8")
    yield "licence", (ROOT / "LICENSE").read_text("utf-8")


def rows(model: Path, title: str, windows: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Measure all variants on a text."""
    exact: Measured | None = None
    for name, settings in VARIANTS.items():
        found = measure(model, windows, **settings)
        exact = exact or found
        ratio, error = found.seen.ratio(exact.seen)
        yield {
            "text": title,
            "tokens": sum(map(len, windows)),
            "variant": name,
            "perplexity": found.seen.perplexity,
            "ratio": ratio,
            "standard_error": error,
            "agreement": found.seen.agreement(exact.seen),
            "prefix": found.prefix(exact),
            "ops": found.ops,
            "nats_a_token_by_window": found.seen.losses,
        }


def held_out_chats(model: Path, seed: int = 0) -> str:
    """Chats whose answers the demo model knows, asked for as it was never trained on, as its template renders them."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
    import demo_corpus

    tokenizer = Tokenizer.from_folder(model)
    facts = [(ask, fact.answer) for fact in demo_corpus.all_facts() for ask in fact.held_out]
    random.Random(seed).shuffle(facts)
    chats = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for ask, answer in facts]
    return "".join(tokenizer.render_chat(chat, add_generation_prompt=False).text for chat in chats)


def cut(model: Path, text: str, most: int) -> list[list[int]]:
    """The text's tokens in windows of equal length."""
    return windows_of(Tokenizer.from_folder(model), text, most)


def measure(model: Path, windows: list[list[int]], **settings: Any) -> Measured:
    """Run one variant over the text."""
    llm = chairlift.LLM(model, max_num_seqs=PROMPTS, kv_cache_gb=1, enable_prefix_caching=False, **settings)
    seen = surprise(llm, windows)
    beginnings = [windows[i % len(windows)][: 24 + 7 * (i // len(windows) + i % 5)] for i in range(PROMPTS)]
    greedy = chairlift.SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True)
    continued = [output.outputs[0].token_ids for output in llm.generate(beginnings, greedy, use_tqdm=False)]
    ops = llm.engine.info.ops
    llm.close()
    return Measured(seen, [list(ids) for ids in continued], ops)


if __name__ == "__main__":
    main()
