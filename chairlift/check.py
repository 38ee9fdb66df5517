"""`chairlift check`: whether and how a model would be served, and in what memory, before any weights are read."""

import argparse
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.strategy import STRATEGIES
from chairlift.errors import ChairliftError, ConfigError, UnsupportedModel
from chairlift.folders.decoder_families import FAMILIES as DECODERS
from chairlift.folders.kind import is_encoder, task_of
from chairlift.folders.model_json import NO_TOKENIZER, read_model_json, values_checked
from chairlift.folders.quantization_config import parse_quantization
from chairlift.folders.sentence_files import SentenceFiles
from chairlift.folders.tensor_files import count_numbers, weight_files
from chairlift.gguf.gguf_file import numbers_of
from chairlift.gguf.side_folder import folder_of, is_gguf
from chairlift.hub.cache import gigabytes
from chairlift.hub.name import hub_name
from chairlift.hub.resolve import refuse_revision
from chairlift.runners.check_model import check_model
from chairlift.runners.decoder.config import DecoderConfig, read_any_config, read_config
from chairlift.runners.decoder.kv_memory import num_kv_blocks
from chairlift.runners.encoder.config import read_encoder_config
from chairlift.runners.host_memory import host_available_bytes

Rows = list[tuple[str, str]]

_TASKS = {"embed": "embeds texts", "classify": "classifies texts", "rerank": "scores pairs of texts"}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Bytes of a number, with what groups of 4 bits have besides.
_WEIGHTS = {"bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 1 / 16}
# Of bfloat16 and int8: bytes of a number, and of the scale of a head's.
_CACHES = {"bfloat16": (2, 0), "int8": (1, 4)}
_TOKENIZER = "tokenizer.json"
_MODEL = "a Hugging Face folder, a .gguf file, or a name of the Hub, whose config.json is downloaded"
# Tokens of requests, to say how many there may be at once.
_LENGTHS = (512, 4096)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give a parser the flags of `chairlift check`."""
    parser.description = "Say whether a model can be served, how, and what memory it takes. Its weights are not read."
    parser.add_argument("model", help=_MODEL)
    parser.add_argument("--revision", help="branch, tag or commit of a model of the Hub (default: main)")


def check_command(args: argparse.Namespace) -> int:
    """Print what is known of a model; the exit status is 1 if it can't be served."""
    found = _looked_up(args.model, args.revision)
    try:
        rows = about(found.folder, found.numbers)
        if found.problem is not None:
            raise UnsupportedModel(found.problem)
    except ChairliftError as error:
        print(f"{args.model} can't be served: {error}")
        return 1
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name.ljust(width)}  {value}")
    return 0


def about(folder: Path, numbers: int | None) -> Rows:
    """What to say of a model whose weights are so many numbers, None if that is not known.

    Raises ConfigError or UnsupportedModel, saying why, if it can't be served.
    """
    if is_encoder(folder):
        return _of_items(folder, numbers)
    check_model(SequenceConfig(model=str(folder)))
    config = read_any_config(folder, "auto")
    if isinstance(config, DecoderConfig):
        return _of_sequences(str(folder), config, numbers)
    return [
        ("model", f"{config.model_type}: writes texts"),
        ("computed by", "transformers' modules, with our attention and products, if all of them can be taken over"),
        ("strategies", ", ".join(STRATEGIES)),
        ("positions", f"{config.max_positions:,}"),
        *_of_weights(numbers, host_available_bytes()),
    ]


def _of_sequences(model: str, config: DecoderConfig, numbers: int | None) -> Rows:
    free = host_available_bytes()
    rows = [
        ("model", f"{config.model_type}, {config.num_layers} layers of {config.hidden_size}: writes texts"),
        ("computed by", "native kernels"),
        ("strategies", ", ".join(STRATEGIES)),
        ("positions", f"{config.max_positions:,}"),
        *_of_weights(numbers, free),
    ]
    for name, (itemsize, scale) in _CACHES.items():
        each = config.kv_bytes_per_token(itemsize, scale)
        settings = SequenceConfig(model=model)
        try:
            blocks = num_kv_blocks(settings, config.max_positions, each, max(free - 2 * (numbers or 0), 0))
        except ConfigError as error:
            rows.append((f"{name} KV cache", str(error)))
            continue
        tokens = blocks * settings.block_size
        at_once = {length: min(tokens // length, settings.slots) for length in (*_LENGTHS, config.max_positions)}
        fits = ", ".join(
            f"{count} of {length:,}" for length, count in at_once.items() if length <= config.max_positions
        )
        held = f"{tokens:,} tokens in {gigabytes(blocks * settings.block_size * each)}"
        rows.append((f"{name} KV cache", f"{each:,} bytes a token; {held}; sequences at once: {fits} tokens"))
    return rows


def _of_items(folder: Path, numbers: int | None) -> Rows:
    check_model(ItemConfig(model=str(folder), kind="encoder"))
    raw = read_model_json(folder)
    is_decoder = raw.get("model_type") in DECODERS
    positions = read_config(folder).max_positions if is_decoder else read_encoder_config(folder).max_tokens
    return [
        ("model", f"{raw['model_type']}: {_TASKS[task_of(folder, raw)]}"),
        *_of_pairs(SentenceFiles.read(folder)),
        ("computed by", "native kernels"),
        ("batches", "dynamic, by max_batch_size, max_batch_tokens and max_wait_ms or target_latency_ms"),
        ("positions", f"{positions:,}"),
        *_of_weights(numbers, host_available_bytes()),
    ]


def _of_pairs(files: SentenceFiles) -> Rows:
    """What a score is, where it is no classification head's, and how pairs are written, where it is not end to end."""
    rows: Rows = []
    if (score := files.logit_score) is not None:
        less = "" if score.false_id is None else f" less that of {score.false_id}"
        rows.append(("score", f"the logit of token {score.true_id} as the next one{less}"))
    if files.pairs is not None:
        rows.append(("pairs", "as chats of a query and a document, by the folder's chat template"))
    return rows


def _of_weights(numbers: int | None, free: int) -> Rows:
    where = f"{gigabytes(free)} of this machine, for device cpu; a GPU's is not looked at"
    if numbers is None:
        return [("weights", "the Hub does not say how long they are"), ("free memory", where)]
    memory = ", ".join(f"{gigabytes(round(size * numbers))} in {name}" for name, size in _WEIGHTS.items())
    return [("weights", memory), ("free memory", where)]


class _LookedUp(NamedTuple):
    """A folder with a model's config.json, how many numbers its weights are, on the Hub by their size alone, and what
    beside config.json keeps it from being served."""

    folder: Path
    numbers: int | None
    problem: str | None = None


def _of_folder(folder: Path) -> _LookedUp:
    try:
        weight_files(folder)
    except UnsupportedModel as error:
        return _LookedUp(folder, None, str(error))
    problem = None if (folder / _TOKENIZER).is_file() else f"{folder} {NO_TOKENIZER}"
    return _LookedUp(folder, count_numbers(folder), problem)


def _looked_up(model: str, revision: str | None) -> _LookedUp:
    folder = Path(model)
    if folder.exists():
        refuse_revision(model, revision)
        return _LookedUp(folder_of(folder), numbers_of(folder)) if is_gguf(folder) else _of_folder(folder)
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
    numbers = numbers_in(sum(known), read_model_json(folder)) if len(known) == len(sizes) else None
    return _LookedUp(folder, numbers, None if any(file.name == _TOKENIZER for file in there) else f"it {NO_TOKENIZER}")


def numbers_in(size: int, raw: Mapping[str, Any]) -> int:
    """About how many numbers files of so many bytes hold, by a model's config.json."""
    packed = raw.get("quantization_config")
    if isinstance(packed, dict) and packed.get("quant_method") == "mxfp4":
        # Nearly all of them: 32 in 16 bytes and a scale.
        return size * 32 // 17
    with contextlib.suppress(UnsupportedModel), values_checked():
        if (packing := parse_quantization(raw)) is not None:
            return size * 8 // packing.bits
    return size // _BYTES.get(str(raw.get("dtype") or raw.get("torch_dtype")), 4)
