"""`chairlift check`: whether and how a model would be served, and in what memory, before any weights are read."""

import argparse
import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.strategy import STRATEGIES
from chairlift.errors import ChairliftError, ConfigError, UnsupportedModel, looking_at
from chairlift.folders.decoder_families import FAMILIES as DECODERS
from chairlift.folders.kind import is_encoder, task_of
from chairlift.folders.model_json import NO_TOKENIZER, optional_object, read_model_json, values_checked
from chairlift.folders.multimodal import is_native, multimodal_of
from chairlift.folders.quantization_config import parse_quantization
from chairlift.folders.sentence_files import SentenceFiles
from chairlift.folders.tensor_files import count_numbers, weight_files
from chairlift.gguf.side_folder import folder_of, is_gguf
from chairlift.gguf.tensor_types import numbers_of
from chairlift.hub.cache import gigabytes
from chairlift.hub.name import hub_name
from chairlift.hub.resolve import refuse_revision
from chairlift.runners.check_model import check_model
from chairlift.runners.decoder.config import DecoderConfig, computed_dtype, read_any_config, read_config
from chairlift.runners.decoder.kv_memory import num_kv_blocks
from chairlift.runners.encoder.config import EncoderConfig, read_encoder_config
from chairlift.runners.host_memory import host_available_bytes

Rows = list[tuple[str, str]]

_TASKS = {"embed": "embeds texts", "classify": "classifies texts", "rerank": "scores pairs of texts"}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# What packed files have their other tensors in.
_PLAIN_BYTES = 2
# Bytes of a number, with what groups of 4 bits have besides.
_WEIGHTS = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 1 / 16}
# Bytes of a number, and of a head's scale.
_CACHES = {"float32": (4, 0), "bfloat16": (2, 0), "int8": (1, 4)}
_COMPUTED = ("float32", "bfloat16")
# Of the type that is served where no setting names one.
_AUTO = ' (dtype "auto")'
_AUTO_FLOAT16 = f"{_AUTO}, half of it from AVX2 on, where products take weights of float16 as they are"
_TOKENIZER = "tokenizer.json"
_MODEL = "a Hugging Face folder, a .gguf file, or a name of the Hub, whose small JSON files are downloaded"
# Tokens of requests, to say how many there may be at once.
_LENGTHS = (512, 4096)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give a parser the flags of `chairlift check`."""
    parser.description = "Say whether a model can be served, how, and what memory it takes. Its weights are not read."
    parser.add_argument("model", help=_MODEL)
    parser.add_argument("--revision", help="branch, tag or commit of a model of the Hub (default: main)")


def check_command(args: argparse.Namespace) -> int:
    """Print what is known of a model; the exit status is 1 if it can't be served."""
    with looking_at(Path(args.model)):
        found = _looked_up(args.model, args.revision)
    try:
        with looking_at(found.folder):
            rows = about(found)
        if found.problem is not None:
            raise UnsupportedModel(found.problem)
    except ChairliftError as error:
        print(f"{args.model} can't be served: {error}")
        return 1
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name.ljust(width)}  {value}")
    return 0


class _LookedUp(NamedTuple):
    """A folder with a model's config.json, how many numbers its weights are, None if that is not known, what beside
    config.json keeps it from being served, and whether the numbers are told by the size of packed files alone."""

    folder: Path
    numbers: int | None
    problem: str | None = None
    is_estimate: bool = False


class _Held(NamedTuple):
    """How many numbers are in memory of a model, and how many of them, the embedding's, stay in the type that it is
    computed in however the others are rounded."""

    numbers: int
    plain: int

    def bytes(self, kind: str, computed: str) -> int:
        """Of those, where the others are of a kind of `_WEIGHTS`; where that is rounded, the model is `computed` so."""
        plain = _WEIGHTS[kind if kind in _COMPUTED else computed]
        return round(_WEIGHTS[kind] * max(self.numbers - self.plain, 0)) + round(plain * self.plain)


def about(found: _LookedUp) -> Rows:
    """What to say of a model. Raises ConfigError or UnsupportedModel, saying why, if it can't be served."""
    folder = found.folder
    if is_encoder(folder):
        return _of_items(found)
    check_model(SequenceConfig(model=str(folder)))
    config = read_any_config(folder, "auto")
    if isinstance(config, DecoderConfig):
        return _of_sequences(found, config)
    raw = read_model_json(folder)
    held = _held(found, 0 if _is_tied(raw) else _embedding(raw))
    return [
        ("model", f"{config.model_type}: writes texts"),
        ("computed by", "transformers' modules, with our attention and products, if all of them can be taken over"),
        ("strategies", ", ".join(STRATEGIES)),
        ("positions", f"{config.max_positions:,}"),
        *_of_weights(found, held, host_available_bytes(), computed_dtype("auto", config), config.dtype),
    ]


def _of_sequences(found: _LookedUp, config: DecoderConfig) -> Rows:
    free = host_available_bytes()
    # Of a head that is the embedding rows are looked up too, unless these are centred and those are not.
    is_centred = config.family.norm_kind != "rms"
    embedding = config.vocab_size * config.hidden_size if is_centred or not config.tied else 0
    held, computed = _held(found, embedding, is_copied=config.tied), computed_dtype("auto", config)
    less = "" if config.multimodal is None else "; its parts for images and sounds are left out"
    rows = [
        ("model", f"{config.model_type}, {config.num_layers} layers of {config.hidden_size}: writes texts{less}"),
        ("computed by", "native kernels"),
        ("strategies", ", ".join(STRATEGIES)),
        ("positions", f"{config.max_positions:,}"),
        *_of_weights(found, held, free, computed, config.dtype),
    ]
    if states := config.state_bytes(_CACHES[computed][0]):
        rows.append(("states", f"{states:,} bytes a sequence, and as many a snapshot"))
    for name, (itemsize, scale) in _CACHES.items():
        each, mark = config.kv_bytes_per_token(itemsize, scale), _AUTO if name == computed else ""
        settings = SequenceConfig(model=str(found.folder))
        beside = free - (0 if held is None else held.bytes(name if name in _COMPUTED else computed, computed))
        try:
            blocks = num_kv_blocks(settings, config.max_positions, each, max(beside, 0))
        except ConfigError as error:
            rows.append((f"{name} KV cache", f"{error}{mark}"))
            continue
        tokens = blocks * settings.block_size
        at_once = {length: min(tokens // length, settings.slots) for length in (*_LENGTHS, config.max_positions)}
        fits = ", ".join(
            f"{count} of {length:,}" for length, count in at_once.items() if length <= config.max_positions
        )
        room = f"{tokens:,} tokens in {gigabytes(blocks * settings.block_size * each)}"
        rows.append((f"{name} KV cache", f"{each:,} bytes a token{mark}; {room}; sequences at once: {fits} tokens"))
    return rows


def _of_items(found: _LookedUp) -> Rows:
    folder = found.folder
    check_model(ItemConfig(model=str(folder), kind="encoder"))
    raw = read_model_json(folder)
    config: DecoderConfig | EncoderConfig = read_config(folder) if is_native(raw) else read_encoder_config(folder)
    positions = config.max_positions if isinstance(config, DecoderConfig) else config.max_tokens
    held = _held(found, config.vocab_size * config.hidden_size)
    return [
        ("model", f"{raw['model_type']}: {_TASKS[task_of(folder, raw)]}"),
        *_of_texts(SentenceFiles.read(folder)),
        ("computed by", "native kernels"),
        ("batches", "dynamic, by max_batch_size, max_batch_tokens and max_wait_ms or target_latency_ms"),
        ("positions", f"{positions:,}"),
        *_of_weights(found, held, host_available_bytes()),
    ]


def _of_texts(files: SentenceFiles) -> Rows:
    """What a score is, where it is no classification head's, and how texts and pairs are written, where a chat template
    does it."""
    rows: Rows = []
    if (score := files.logit_score) is not None:
        less = "" if score.false_id is None else f" less that of {score.false_id}"
        rows.append(("score", f"the logit of token {score.true_id} as the next one{less}"))
    if files.chat is not None and files.judges:
        rows.append(("pairs", "as chats of a query and a document, by the folder's chat template"))
    elif files.chat is not None:
        rows.append(("texts", "as what a user says in a chat, by the folder's chat template"))
    return rows


def _held(found: _LookedUp, embedding: int, is_copied: bool = False) -> _Held | None:
    """What is in memory of a model with an embedding of so many numbers beside what is packed, maybe a copy of some."""
    if found.numbers is None:
        return None
    return _Held(found.numbers + (embedding if is_copied else 0), embedding)


def _of_weights(
    found: _LookedUp, held: _Held | None, free: int, computed: str | None = None, stored: str | None = None
) -> Rows:
    """What weights take in each type, the one marked that is `computed` unasked; None where the processor decides."""
    where = f"{gigabytes(free)} of this machine, for device cpu; a GPU's is not looked at"
    if held is None:
        return [("weights", "the Hub does not say how long they are"), ("free memory", where)]
    mark = _AUTO_FLOAT16 if computed == "float32" and stored == "float16" else _AUTO
    memory = ", ".join(
        f"{gigabytes(held.bytes(kind, computed or 'bfloat16'))} in {kind}{mark if kind == computed else ''}"
        for kind in _WEIGHTS
    )
    return [("weights", f"about {memory}" if found.is_estimate else memory), ("free memory", where)]


def _of_file(path: Path) -> _LookedUp:
    folder = folder_of(path)
    try:
        return _LookedUp(folder, numbers_of(path))
    except UnsupportedModel as error:
        return _LookedUp(folder, None, str(error))


def _of_folder(folder: Path) -> _LookedUp:
    try:
        weight_files(folder)
    except UnsupportedModel as error:
        return _LookedUp(folder, None, str(error))
    problem = None if (folder / _TOKENIZER).is_file() else f"{folder} {NO_TOKENIZER}"
    parts = multimodal_of(read_model_json(folder))
    return _LookedUp(folder, count_numbers(folder, () if parts is None else parts.left), problem)


def _looked_up(model: str, revision: str | None) -> _LookedUp:
    folder = Path(model)
    if folder.exists():
        refuse_revision(model, revision)
        return _of_file(folder) if is_gguf(folder) else _of_folder(folder)
    name = hub_name(model, revision)
    if name is not None and name.file is not None:
        raise ConfigError(f"of a file on the Hub only the file itself tells: `chairlift pull {model}`, and check that")
    if name is None:
        raise ConfigError(f"{model!r} is no folder here, and no name of the Hub, as organization/model")
    from chairlift.hub.download import Hub

    hub = Hub()
    if (kept := hub.cache.find(name)) is not None:
        return _of_folder(kept.path)
    folder, there = hub.config_of(name)
    sizes = [file.size for file in there if file.name.endswith(".safetensors")]
    known = [size for size in sizes if size is not None]
    raw = read_model_json(folder)
    numbers = numbers_in(sum(known), raw) if len(known) == len(sizes) else None
    problem = None if any(file.name == _TOKENIZER for file in there) else f"it {NO_TOKENIZER}"
    # Of other parts than that for texts only the files themselves tell.
    is_estimate = raw.get("quantization_config") is not None or multimodal_of(raw) is not None
    return _LookedUp(folder, numbers, problem, is_estimate)


def numbers_in(size: int, raw: Mapping[str, Any]) -> int:
    """About how many numbers files of so many bytes hold, by a model's config.json."""
    packed = raw.get("quantization_config")
    with contextlib.suppress(UnsupportedModel), values_checked():
        # Embedding and head are left as they were.
        plain = min(_embedding(raw) * (1 if _is_tied(raw) else 2), size // _PLAIN_BYTES)
        rest = size - plain * _PLAIN_BYTES
        if isinstance(packed, dict) and packed.get("quant_method") == "mxfp4":
            # Of the rest nearly all: 32 in 16 bytes and a scale.
            return plain + rest * 32 // 17
        if (packing := parse_quantization(raw)) is not None:
            return plain + rest * 8 // packing.bits
    return size // _BYTES.get(str(raw.get("dtype") or raw.get("torch_dtype")), 4)


def _embedding(raw: Mapping[str, Any]) -> int:
    """How many numbers a model's embedding has; 0 if config.json does not say it in the usual way."""
    text = optional_object(raw, "text_config") or raw
    sizes = [text.get(name) for name in ("vocab_size", "hidden_size")]
    return math.prod(size if isinstance(size, int) and size > 0 else 0 for size in sizes)


def _is_tied(raw: Mapping[str, Any]) -> bool:
    """Whether a model's head is its embedding."""
    if (parts := multimodal_of(raw)) is not None:
        raw = parts.text_config(raw)
    family = DECODERS.get(str(raw.get("model_type")))
    return bool(raw.get("tie_word_embeddings", family is None or family.tied))
