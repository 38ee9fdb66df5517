"""The texts that embedding benchmarks run: the same for every engine, made of whole words of a model's vocabulary.

Standard library only, so that a peer's environment can import it.
"""

import argparse
import random
from pathlib import Path

MEDIAN, SIGMA, CAP = 40, 0.9, 512


def make_texts(model: Path, count: int, seed: int = 0) -> tuple[list[str], list[int]]:
    """Return `count` texts and their lengths in tokens, special ones counted: lognormal, capped, in random order.

    Every word is one token of the folder's vocab.txt (WordPiece).
    """
    lines = (model / "vocab.txt").read_text(encoding="utf-8").splitlines()
    words = [line for line in lines if line.isascii() and line.isalpha() and line.islower() and len(line) > 2]
    draw = random.Random(seed)
    lengths = [min(max(round(draw.lognormvariate(0, SIGMA) * MEDIAN), 3), CAP) for _ in range(count)]
    return [" ".join(draw.choices(words, k=length - 2)) for length in lengths], lengths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every engine's script takes."""
    parser.add_argument("model", type=Path, help="a folder with vocab.txt, such as all-MiniLM-L6-v2")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3, help="the best one counts")
    parser.add_argument("--vectors", type=Path, help="write the vectors to this .npy file")
