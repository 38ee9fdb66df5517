"""Small random encoders as folders, with tokenizers, and as GGUF files as llama.cpp's converters would write them."""

import functools
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import tokenizers
import torch
from safetensors.torch import load_file
from support.defined_encoders import JinaBert, NomicExperts
from support.encoder_factory import encoder_folder, published_folder, sentence_folder
from support.gguf_files import add
from support.model_factory import temporary_root

WORDS = 320
# Accents, punctuation, Chinese, capitals, what has no token, and nothing.
TEXTS = (
    *("Hello world, hello Wörlds!", "the CAFÉ's menu -- 42 (forty-two)", "漢字 and 世界", "žluťoučký \U0001f642 kůň"),
    *(
        "",
        "  spaces\tand\nlines ",
        "[SEP] <s> is no end",
        "unaffable",
        "x" * 120,
        "cafe\u0301",
        "\uff21\uff22 \ufb01ne",
    ),
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


def charsmap(replaced: dict[str, str]) -> bytes:
    """A table of characters as SentencePiece has it, in which each node of the tree has a block of its own."""
    units, texts = [0], b""
    nodes = {b"": 0}

    def block(of: int) -> int:
        """Let the children of a unit lie in a new block, whose place this is."""
        place = -(-len(units) // 256) * 256
        units.extend([0] * (place + 256 - len(units)))
        assert place ^ of < 2**21
        units[of] |= (place ^ of) << 10
        return place

    nodes[b""] = block(0)
    for text, other in replaced.items():
        data = text.encode()
        for end in range(1, len(data) + 1):
            if data[:end] not in nodes:
                unit = nodes[data[: end - 1]] ^ data[end - 1]
                units[unit] |= data[end - 1]
                nodes[data[:end]] = block(unit)
        units[nodes[data[:-1]] ^ data[-1]] |= 256
        units[nodes[data]] = 2**31 | len(texts)
        texts += other.encode() + b"\0"
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + texts


REPLACED = {"\uff21": "A", "\ufb01": "fi", "\t": " ", "\n": " "}


def unigrams() -> tokenizers.Tokenizer:
    """A tokenizer as XLM-R has it."""
    from tokenizers import models, normalizers, pre_tokenizers, processors

    words = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "\u2581",
        "\u2581hello",
        "\u2581world",
        "\u2581the",
        "afé",
        "s",
        "\u2581c",
        "lo",
    ]
    words += list(dict.fromkeys([*_LETTERS, *_SIGNS, "\u2581hel", "af", "able", "un", "漢", "A", "fi", "42", "ö"]))
    words = list(dict.fromkeys(words))
    vocab = [(word, -0.25 * (number % 37) if number > 3 else 0.0) for number, word in enumerate(words)]
    found = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=3))
    found.normalizer = normalizers.Precompiled(charsmap(REPLACED))
    found.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    ends = [("<s>", 0), ("</s>", 2)]
    found.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B </s>", ends)
    found.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    return found


def add_unigrams(writer: gguf.GGUFWriter, tokenizer: tokenizers.Tokenizer, count: int = WORDS) -> None:
    """Write them as files have them, with tokens behind that are not used."""
    saved = json.loads(tokenizer.to_str())["model"]["vocab"]
    more = range(len(saved), count)
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([word for word, _ in saved] + [f"[PAD{number}]" for number in more])
    writer.add_token_scores([score for _, score in saved] + [-10000.0 for _ in more])
    writer.add_token_types([3, 3, 3, 2, *([1] * (len(saved) - 4)), *(5 for _ in more)])
    writer.add_precompiled_charsmap(charsmap(REPLACED))
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    for role, number in (("bos", 0), ("eos", 2), ("unk", 3), ("sep", 2), ("pad", 1)):
        getattr(writer, f"add_{role}_token_id")(number)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


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
            assert "pooler" in own or own.endswith("experts.bias"), own
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


# Rows of the positions of RoBERTa and XLM-R before a text's first one, which converters cut off.
_CUT = 2


@functools.cache
def xlm_roberta_file(labels: int = 0) -> Path:
    """The XLM-R of `encoder_folder`, or one that classifies or ranks."""
    folder = encoder_folder("xlm-roberta", labels)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("position_embeddings.weight"))
    tensors[name] = tensors[name][_CUT:]

    def tell(writer: gguf.GGUFWriter) -> None:
        config = config_of(folder)
        describe(writer, config, None if labels else 2, _CUT)
        add_unigrams(writer, unigrams())
        writer.add_token_type_count(1)
        if labels:
            writer.add_classifier_output_labels(
                list(config["id2label"].values()) if "id2label" in config else ["LABEL_0"]
            )

    return write(temporary_root() / f"xlm-roberta-{labels}.gguf", "bert", tensors, tell, "F32")


@functools.cache
def nomic_file() -> Path:
    """The Nomic of `encoder_folder`, as its authors name its tensors."""
    folder = encoder_folder("nomic_bert")

    def tell(writer: gguf.GGUFWriter) -> None:
        config = config_of(folder)
        describe(writer, config, 1)
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        add_word_pieces(writer, word_pieces())

    tensors = load_file(published_folder(temporary_root() / "nomic-published", folder) / "model.safetensors")
    return write(temporary_root() / "nomic.gguf", "nomic-bert", tensors, tell, "F32")


def nomic_experts_folder() -> Path:
    """A Nomic with experts that add nothing behind them, as no file has that."""
    target = temporary_root() / "nomic-experts"
    if not target.exists():
        defined = NomicExperts(4)
        for name in [name for name in defined.tensors if name.endswith("experts.bias")]:
            defined.tensors[name].zero_()
        defined.folder(target)
    return target


@functools.cache
def nomic_experts_file() -> Path:
    """The same as a file."""
    folder, path = nomic_experts_folder(), temporary_root() / "nomic-experts.gguf"
    config, tensors = config_of(folder), load_file(folder / "model.safetensors")
    shape = config["num_experts"], config["n_inner"], config["n_embd"]
    for name in [name for name in tensors if ".experts." in name]:
        tensor = tensors.pop(name)
        if name.endswith("w1"):
            tensors[f"{name}.weight"] = tensor.view(shape)
        elif name.endswith("w2"):
            tensors[f"{name}.weight"] = tensor.view(shape).transpose(1, 2)

    def tell(writer: gguf.GGUFWriter) -> None:
        sizes = {"max_position_embeddings": "n_positions", "hidden_size": "n_embd", "intermediate_size": "n_inner"}
        sizes |= {
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "layer_norm_eps": "layer_norm_epsilon",
        }
        describe(writer, {name: config[own] for name, own in sizes.items()}, 1)
        writer.add_rope_freq_base(config["rotary_emb_base"])
        writer.add_moe_every_n_layers(config["moe_every_n_layers"])
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["moe_top_k"])
        add_unigrams(writer, unigrams())
        writer.add_token_type_count(config["type_vocab_size"])

    return write(path, "nomic-bert-moe", tensors, tell, "F32")


@functools.cache
def jina_folder() -> Path:
    """One of Jina's BERTs, with slopes."""
    target = temporary_root() / "jina"
    return target if target.exists() else JinaBert(4).folder(target)


@functools.cache
def jina_file(in_two: bool = False) -> Path:
    """The same as a file; in older ones the first projection of a layer is `in_two` tensors."""
    folder = jina_folder()
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "gated_layers" in name and in_two]:
        gate, up = tensors.pop(name).chunk(2)
        tensors |= {
            name.replace("layers.weight", f"layers_{part}.weight"): each for part, each in (("w", gate), ("v", up))
        }

    def tell(writer: gguf.GGUFWriter) -> None:
        describe(writer, config_of(folder), 1)
        add_word_pieces(writer, word_pieces())

    return write(temporary_root() / f"jina-{in_two}.gguf", "jina-bert-v2", tensors, tell, "F32")


def modern_words() -> tokenizers.Tokenizer:
    """A tokenizer as ModernBERT has it, of bytes."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    special = ["[CLS]", "[SEP]", "[UNK]", "[PAD]", "[MASK]"]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special, "he", "ll", "hell", "\u0120w", "\u00c3\u00a9"]
    vocab = {word: number for number, word in enumerate(words)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("\u0120", "w"), ("\u00c3", "\u00a9")]
    found = tokenizers.Tokenizer(models.BPE(vocab, merges))
    found.normalizer = normalizers.NFC()
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    ends = [(word, vocab[word]) for word in special[:2]]
    found.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ends)
    found.add_special_tokens(special)
    return found


@functools.cache
def modern_file(labels: int = 0, in_list: bool = False) -> Path:
    """The ModernBERT of `encoder_folder`, or one that classifies or ranks; it may list which layers have windows."""
    folder = encoder_folder("modernbert", labels)
    config, saved = config_of(folder), json.loads(modern_words().to_str())["model"]

    def tell(writer: gguf.GGUFWriter) -> None:
        describe(writer, config | {"layer_norm_eps": config["norm_eps"]}, None if labels else 1)
        writer.add_layer_norm_rms_eps(config["norm_eps"])
        writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_sliding_window(config["local_attention"])
        windows = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(windows if in_list else 3)
        writer.add_vocab_size(config["vocab_size"])
        more = range(len(saved["vocab"]), config["vocab_size"])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("modern-bert")
        writer.add_token_list([*saved["vocab"], *(f"[PAD{number}]" for number in more)])
        writer.add_token_types(
            [3 if word.startswith("[") and len(word) > 1 else 1 for word in saved["vocab"]] + [5 for _ in more]
        )
        writer.add_token_merges([" ".join(pair) for pair in saved["merges"]])
        for role, number in (("bos", 256), ("eos", 257), ("unk", 258), ("sep", 257), ("pad", 259)):
            getattr(writer, f"add_{role}_token_id")(number)
        if labels:
            writer.add_string("modern-bert.hidden_activation", "gelu")
            writer.add_uint32("modern-bert.classifier.pooling_type", 2)

    path = temporary_root() / f"modern-{labels}-{in_list}.gguf"
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("classifier.", "classifier.out_proj."): tensor for name, tensor in tensors.items()}
    return write(path, "modern-bert", tensors, tell, "F32")
