"""The files that a model is made of: for what holds for this model, and for no other."""

import hashlib
import os
from pathlib import Path

import msgspec

from chairlift.config.items import split_class
from chairlift.config.settings import is_class

_EDGE_BYTES = 2**16


def files_of(model: str) -> list[Path]:
    """A folder's files, or those that begin with a file's name; of a class its module, unless that is installed."""
    if is_class(model):
        where, _ = split_class(model)
        named = Path(*where.split("."))
        places = [Path(where)] if where.endswith(".py") else [named.with_suffix(".py"), named / "__init__.py"]
        return [place for place in places if place.is_file()]
    path = Path(model)
    if path.is_file():
        return sorted(each for each in path.parent.iterdir() if each.name.startswith(path.name))
    files = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sorted(each for each in files if not any(part.startswith(".") for part in each.relative_to(path).parts))


def edges_of(path: Path) -> tuple[os.stat_result, str]:
    """Return what the system says of a file, and a hash of its first and last 64 KiB. Raises OSError."""
    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        digest = hashlib.sha256(file.read(_EDGE_BYTES))
        file.seek(max(about.st_size - _EDGE_BYTES, 0))
        digest.update(file.read(_EDGE_BYTES))
    return about, digest.hexdigest()


def contents_of(model: str) -> str | None:
    """Return a hash of the names, sizes and edges of a model's files, wherever they lie; None if it has none here.

    Raises OSError.
    """
    found = []
    for path in files_of(model):
        if path.is_file():
            about, edges = edges_of(path)
            name = path.relative_to(model).as_posix() if Path(model).is_dir() else path.name
            found.append((name, about.st_size, edges))
    return hashlib.sha256(msgspec.json.encode(found)).hexdigest() if found else None
