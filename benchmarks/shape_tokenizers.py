"""Tokenizers for models of random weights, made of what is on every machine: Python's own library, and drawn words."""

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# As many as the models of the saved results had; prompts use token ids below 30,000.
TOKENS = 32_000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_pairs(folder: Path) -> None:
    """Byte pairs learned from Python's library, with ChatML's special tokens and template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=TOKENS, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(_library(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, _, eos = SPECIAL
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "pad_token": bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_words(folder: Path, size: int) -> None:
    """A WordPiece vocabulary of drawn words, every third of them the rest of one."""
    from tokenizers import BertWordPieceTokenizer

    draw = random.Random(0)
    words = dict.fromkeys(
        ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_LETTERS, *(f"##{each}" for each in _LETTERS))
    )
    while len(words) < size:
        word = "".join(draw.choices(_LETTERS, k=draw.randint(2, 8)))
        words[word if draw.random() < 2 / 3 else f"##{word}"] = None
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=True).save(str(folder / "tokenizer.json"))
    tokens = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "unk", "mask")}
    about = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(about | tokens, indent=1))


def _library() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")
