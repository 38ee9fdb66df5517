"""The tokens that end an answer, by any of a model folder's files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from chairlift.folders.model_json import read_object


def special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """The texts of tokenizer_config.json's `bos_token`, `eos_token` and so on."""
    found = {}
    for key, value in tokenizer_config.items():
        # Files hold a token as a string or as {"content": ...}.
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def end_token_ids(folder: Path, eos_token: str | None, token_to_id: Callable[[str], int | None]) -> tuple[int, ...]:
    """Ids of generation_config.json and config.json, and of tokenizer_config.json's `eos_token`, each once."""
    found: list[int] = []
    config = read_object(folder / "config.json")
    nested = config.get("text_config")
    for source in (read_object(folder / "generation_config.json"), config, nested if isinstance(nested, dict) else {}):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    if eos_token is not None and (token_id := token_to_id(eos_token)) is not None:
        found.append(token_id)
    return tuple(dict.fromkeys(found))
