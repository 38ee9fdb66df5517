"""A Hugging Face model folder's JSON files. Without torch, since the HTTP front looks at folders too."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.errors import ConfigError, UnsupportedModel


def read_model_json(folder: Path) -> dict[str, Any]:
    """Read `folder`/config.json. Raises ConfigError if it is no readable model folder."""
    if not folder.is_dir():
        raise ConfigError(
            f"model: there is no folder {str(folder)!r}. Give the path of a local Hugging Face folder (config.json, "
            "tokenizer.json, *.safetensors): names of the Hub are not downloaded"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"model: {str(folder)!r} has no config.json, so it is not a Hugging Face model folder")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"model: {path} must hold a JSON object, not a {type(raw).__name__}")
    return raw


def positive_size(raw: Mapping[str, Any], name: str) -> int:
    """Return a field that must be a whole number above zero. Raises UnsupportedModel naming it."""
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"config.json must give {name} as a positive whole number, got {value!r}")
    return value


def optional_object(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a field that must be an object, empty if it is missing or null. Raises UnsupportedModel naming it."""
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{name} must be an object, got {value!r}")
    return value
