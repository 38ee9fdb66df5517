"""Settings as people copy them: the flags of a command, or the lines of a file."""

import json
from collections.abc import Mapping
from typing import Any

from chairlift.config.flags import dashed


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as `chairlift serve` takes them, for a shell yet to be quoted."""
    return [part for name, value in settings.items() for part in _flag(dashed(name), value)]


def as_toml(settings: Mapping[str, Any]) -> str:
    """Return settings as lines of a settings file; where one can't be a line, a comment says so."""
    return "\n".join(_line(name, value) for name, value in settings.items())


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, float):
        return [f"--{name}", _number(value)]
    if value is None or isinstance(value, list | tuple | dict):
        return [f"--{name}", json.dumps(value)]
    return [f"--{name}", str(value)]


def _line(name: str, value: Any) -> str:
    try:
        return f"{name} = {_number(value) if isinstance(value, float) else _toml(value)}"
    except ValueError:
        return f"# {name} is null, or holds one, which TOML does not have: give it as a flag"


def _number(value: float) -> str:
    """A setting's number as people write it: 25 rather than 25.0, which a setting takes as well."""
    return str(value).removesuffix(".0")


def _toml(value: Any) -> str:
    """A value as TOML has it, which for words, numbers and truths is as JSON has it. Raises ValueError for None."""
    if value is None:
        raise ValueError("TOML has no null")
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_toml(key)} = {_toml(each)}' for key, each in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # The one letter that JSON has as it is, and TOML only escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
