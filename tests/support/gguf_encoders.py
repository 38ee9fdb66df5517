"""Small random encoders as folders, with tokenizers, and as GGUF files as llama.cpp's converters would write them."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import tokenizers
import torch
from safetensors.torch import load_file
from support.encoder_factory import encoder_folder, sentence_folder
from support.gguf_files import add
from support.model_factory import temporary_root

WORDS = 320
# Accents, punctuation, Chinese, capitals, what has no token, and nothing.
TEXTS = (
    *("Hello world, hello Wörlds!", "the CAFÉ's menu -- 42 (forty-two)", "漢字 and 世界", "žluťoučký \U0001f642 kůň"),
    *("", "  spaces\tand\nlines ", "[SEP] <s> is no end", "unaffable", "x" * 120, "\uff21\uff22 \ufb01ne"),
)
_PIECES = ("hello", "world", "##s", "cafe", "the", "menu", "and", "##aff", "##able", "un", "42", "forty", "two", "漢")
_SIGNS = (",", "!", "'", "-", "(", ")", "[", "]", "<", ">")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# What changes the tensors of a folder into those of a file, by the names of the folder.
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def word_pieces(lowers: bool = True) -> tokenizers.Tokenizer:
    """A tokenizer of BERT's; one that keeps capitals has words with them, and with accents."""
    from tokenizers import models, normalizers, pre_tokenizers, processors

    words = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_PIECES, *_SIGNS]
    words += [*_LETTERS, *(f"##{letter}" for letter in _LETTERS)]
    words = list(dict.fromkeys(words)) + ([] if lowers else ["Hello", "CAFÉ", "Wörld"])
    words += [f"[unused{number}]" for number in range(1, WORDS - len(words) + 1)]
    vocab = {word: number for number, word in enumerate(words)}
    found = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    found.normalizer = normalizers.BertNormalizer(lowercase=lowers)
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 3), ("[SEP]", 4)]
    found.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    found.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return found


def add_word_pieces(writer: gguf.GGUFWriter, tokenizer: tokenizers.Tokenizer, marks_brackets: bool = True) -> None:
    """Write them as files have them, of which older ones leave those in brackets as they are."""
    special = set(tokenizer.get_added_tokens_decoder())
    tokens, kinds = [], []
    for number in range(tokenizer.get_vocab_size()):
        token = str(tokenizer.id_to_token(number))
        plain = number in special or (not marks_brackets and token.startswith("[") and token.endswith("]"))
        tokens.append(token if plain else token[2:] if token.startswith("##") else f"\u2581{token}")
        kinds.append(3 if number in special else 1)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_type_count(2)


def with_modules(target: Path, source: Path, tokenizer: tokenizers.Tokenizer, pooling: str | None) -> Path:
    """The folder of an embedder that pools so, or of anything else, with a tokenizer."""
    modules: Sequence[tuple[str, dict[str, Any]]] = ()
    if pooling is not None:
        modules = [("Pooling", {"pooling_mode": pooling}), ("Normalize", {})]
    sentence_folder(target, source, modules)
    if pooling is None:
        (target / "modules.json").unlink()
    tokenizer.save(str(target / "tokenizer.json"))
    return target


def describe(writer: gguf.GGUFWriter, config: dict[str, Any], pooling: int | None, offset: int = 0) -> None:
    """Write what is said of all encoders; `offset`: as many rows of the positions are cut off."""
    writer.add_context_length(config["max_position_embeddings"] - offset)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config.get("layer_norm_eps", 1e-12))
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))


def write(
    path: Path, arch: str, tensors: dict[str, torch.Tensor], tell: Callable[[gguf.GGUFWriter], object], kind: str
) -> Path:
    """A file of that architecture, with tensors of a folder's names; those that no file has are left out."""
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(number, 8)
    writer = gguf.GGUFWriter(path, arch)
    tell(writer)
    for own, tensor in tensors.items():
        plain = own.removeprefix("bert.").removeprefix("roberta.").removeprefix("model.").removeprefix("nomic_bert.")
        new = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        if new is not None:
            add(writer, new, tensor.float().numpy(), kind if tensor.ndim == 2 else "F32")
        else:
            assert "pooler" in own, own
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config_of(folder: Path) -> dict[str, Any]:
    """A folder's config.json."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@functools.cache
def bert_file(pooling: int | None = 2, kind: str = "F32", lowers: bool = True, says: bool = True) -> Path:
    """The BERT of `encoder_folder`; a file that `says` has the ids of special tokens and what becomes of capitals."""
    folder, tokenizer = encoder_folder("bert"), word_pieces(lowers)
    path = temporary_root() / f"bert-{pooling}-{kind}-{lowers}-{says}.gguf"

    def tell(writer: gguf.GGUFWriter) -> None:
        describe(writer, config_of(folder), pooling)
        add_word_pieces(writer, tokenizer, marks_brackets=says)
        if says:
            writer.add_bos_token_id(3)
            writer.add_sep_token_id(4)
            writer.add_unk_token_id(2)
            writer.add_bool("tokenizer.ggml.normalizer.lowercase", lowers)

    return write(path, "bert", load_file(folder / "model.safetensors"), tell, kind)
