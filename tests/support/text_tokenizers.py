"""Small tokenizers of every kind, trained on a few words, for the text tests."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

KINDS = ["bytelevel", "sentencepiece", "metaspace", "wordpiece"]
SAMPLE = "Hello world, the quick brown fox sees 漢字 and 😀😀 and é and naïve words. hello hello world! "


def build(kind: str) -> Tokenizer:
    """A fresh tokenizer of a kind, with special tokens <s> and <|end|>."""
    return Tokenizer.from_str(_as_json(kind))


@cache
def _as_json(kind: str) -> str:
    special = [AddedToken("<s>", special=True), AddedToken("<|end|>", special=True)]
    if kind == "bytelevel":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator([SAMPLE], trainer)
    elif kind == "sentencepiece":
        letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz,.! HT") | {"é"})
        tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁h", "▁w", "or", "▁wor", "▁▁"]
        vocab = {token: index for index, token in enumerate(tokens)}
        merges = [("▁", "h"), ("▁", "w"), ("o", "r"), ("▁w", "or"), ("▁", "▁")]
        tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    elif kind == "metaspace":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        )
        tokenizer.train_from_iterator([SAMPLE] * 5, trainer)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"], show_progress=False)
        tokenizer.train_from_iterator([SAMPLE], trainer)
    tokenizer.add_special_tokens(special)
    return str(tokenizer.to_str())
