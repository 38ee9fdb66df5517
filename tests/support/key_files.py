"""Files of API keys for tests: each key is its name with `-key` after it."""

import json
from pathlib import Path
from typing import Any

from chairlift.config.keys import RIGHTS, hash_of


def key_of(name: str) -> str:
    return f"{name}-key"


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key_of(name)}"}


def write_keys(path: Path, **entries: dict[str, Any]) -> Path:
    """A file with these entries; what they leave out are all rights, and no limits."""
    lines = []
    for name, entry in entries.items():
        table = {"sha256": [hash_of(key_of(name))], "rights": list(RIGHTS)} | entry
        lines += [f"[keys.{name}]", *(f"{field} = {json.dumps(value)}" for field, value in table.items())]
    # A file that changes is replaced, as editors and deployments do.
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines))
    new.replace(path)
    return path
