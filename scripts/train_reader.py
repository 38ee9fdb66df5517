"""Trains a small model on the source of Python's standard library, and keeps a part of that from it.

    python scripts/train_reader.py FOLDER --minutes 12

The demo model knows its texts by heart, so that rounding its weights says little of how a model does on text that it
never saw. This one reads on: every twentieth module is held out, in FOLDER/held_out.txt, and `benchmarks/accuracy.py
FOLDER --text FOLDER/held_out.txt` tells what rounding costs there. Needs the development dependencies.
"""

import argparse
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from train_demo import Batch, Schedule, keep_memory, train
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
VOCAB, WINDOW, ROWS = 4096, 512, 8
HELD_OUT = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    keep_memory()
    torch.manual_seed(args.seed)
    known, held_out = modules(args.seed)
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "held_out.txt").write_text("\n\n".join(held_out), "utf-8")
    tokenizer = train_tokenizer(known)
    model = LlamaForCausalLM(config())
    schedule = Schedule(steps=10**6, minutes=args.minutes, peak=1.0, falling=0.7)
    train(model.train(), batches(tokenizer, known, args.seed), schedule, lambda: None)
    model.to(torch.bfloat16).save_pretrained(args.folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(args.folder)


def modules(seed: int) -> tuple[list[str], list[str]]:
    """The sources of the library's modules, without its tests: those to learn, and those held out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__", "pydoc_data"}
    files = sorted(file for file in library.rglob("*.py") if not left_out & set(file.relative_to(library).parts))
    texts = [file.read_text("utf-8", errors="replace") for file in files]
    random.Random(seed).shuffle(texts)
    return [text for index, text in enumerate(texts) if index % HELD_OUT], texts[::HELD_OUT]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE, made of what is learned alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def config() -> LlamaConfig:
    """About as many weights as the demo model has."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2 * WINDOW,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )


def batches(tokenizer: Tokenizer, texts: list[str], seed: int) -> Iterator[Batch]:
    """Endless batches of windows from anywhere in the texts, laid end to end."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream = torch.tensor([token for text in tokenizer.encode_batch(texts) for token in [*text.ids, end]])
    rng = random.Random(seed)
    while True:
        starts = [rng.randrange(len(stream) - WINDOW) for _ in range(ROWS)]
        ids = torch.stack([stream[start : start + WINDOW] for start in starts])
        yield Batch(ids, torch.ones(ids.shape))


if __name__ == "__main__":
    main()
