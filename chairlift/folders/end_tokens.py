"""The tokens that end an answer, by any of a model folder's files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from chairlift.folders.model_json import read_object


def special_tokens(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """The texts of tokenizer_config.json's `bos_token`, `eos_token` and so on, and of those in special_tokens_map.json
    that it does not have; one that it has as null is none."""
    given = read_object(folder / "special_tokens_map.json") | tokenizer_config
    named = {key: token_text(value) for key, value in given.items() if key.endswith("_token")}
    return {key: text for key, text in named.items() if text is not None}


def token_text(value: Any) -> str | None:
    """A token's text, which files hold as it is or as {"content": ...}; None for anything else."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


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
