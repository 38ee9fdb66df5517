"""A Hugging Face model folder's JSON files. Without torch, since the HTTP front looks at folders too."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from chairlift.errors import ConfigError, UnsupportedModel, clip

# What to say of a folder, or a repository, without a tokenizer that can be read.
NO_TOKENIZER = (
    "has no tokenizer.json. Chairlift reads only that format; convert an older tokenizer with "
    "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), then try again."
)
# Bytes of a JSON file: those of real models have a few hundred kB, and an index of weights a few MB.
MAX_JSON_BYTES = 2**26
# What no model comes near, and what could not be served anyway.
_MOST: dict[str, int] = {
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**14,
    "qk_nope_head_dim": 2**14,
    "qk_rope_head_dim": 2**14,
    "vocab_size": 2**24,
    "type_vocab_size": 2**16,
    **dict.fromkeys(("max_position_embeddings", "max_trained_positions"), 2**24),
    "local_attention": 2**24,
    "num_labels": 2**20,
    "sliding_window": 2**40,
    "sliding_window_pattern": 2**12,
    "no_rope_layer_interval": 2**12,
    "query_pre_attn_scalar": 2**20,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 2**14),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_top_k", "n_shared_experts", "moe_num_shared_experts"), 2**10),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 2**20),
    **dict.fromkeys(("n_group", "topk_group"), 2**10),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 2**16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 2**14),
    "num_nextn_predict_layers": 2**8,
    "expansion_ratio": 2**8,
    **dict.fromkeys(("conv_L_cache", "linear_conv_kernel_dim"), 2**8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2**12),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 2**14),
    "full_attention_interval": 2**12,
    **dict.fromkeys(("mamba_n_heads", "mamba_n_groups"), 2**12),
    **dict.fromkeys(("mamba_d_state", "shared_intermediate_size"), 2**20),
    **dict.fromkeys(("mamba_d_conv", "mamba_expand"), 2**8),
    "block_multiple_of": 2**16,
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_interval", "moe_every_n_layers"), 2**12),
}


def read_json(path: Path) -> Any:
    """Read a JSON file of a model folder. Raises ConfigError if that is not to be had, or far too large."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ConfigError(f"model: {path} has {size} bytes, more than the {MAX_JSON_BYTES} that are read")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {path} cannot be read as JSON: {error}") from error
    except RecursionError:
        raise ConfigError(f"model: {path} is nested too deeply") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object; an empty one if there is no such file. Raises ConfigError."""
    if not path.is_file():
        return {}
    found = read_json(path)
    if not isinstance(found, dict):
        raise ConfigError(f"model: {path} must hold a JSON object, not a {type(found).__name__}")
    return found


def inside(folder: Path, name: Any, source: Path) -> Path:
    """The path of a file or folder that `source` names within the model folder, which a link in it may lead out of.

    Raises UnsupportedModel for a name that is none, or leads out by itself.
    """
    if not isinstance(name, str) or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise UnsupportedModel(f"{source} names {name!r}, which is not the name of a file in the model's folder")
    return folder / name


def read_model_json(folder: Path) -> dict[str, Any]:
    """Read `folder`/config.json. Raises ConfigError if it is no readable model folder."""
    if not folder.is_dir():
        raise ConfigError(
            f"model: there is no folder {str(folder)!r}. Give the path of a local Hugging Face folder (config.json, "
            "tokenizer.json, *.safetensors)"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"model: {str(folder)!r} has no config.json, so it is not a Hugging Face model folder")
    return read_object(path)


def is_classifier(raw: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json names an architecture with a head for classification."""
    names = raw.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)


@contextlib.contextmanager
def values_checked() -> Iterator[None]:
    """Around reading a config.json: a value of a wrong kind, wherever it is, is an UnsupportedModel as any other."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"config.json has a value that is none of its kind: {error!r}") from error


def positive_size(raw: Mapping[str, Any], name: str) -> int:
    """Return a field that must be a whole number above zero. Raises UnsupportedModel naming it."""
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"config.json must give {name} as a positive whole number, got {value!r}")
    if value > _MOST[name]:
        raise UnsupportedModel(f"config.json gives {name} as {value}; no model with more than {_MOST[name]} is served")
    return value


def optional_object(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a field that must be an object, empty if it is missing or null. Raises UnsupportedModel naming it."""
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{name} must be an object, got {clip(repr(value), 80)}")
    return value
