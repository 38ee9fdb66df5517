"""A folder for a GGUF file, with what all other models have beside their weights."""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chairlift.errors import ConfigError, UnsupportedModel, looking_at
from chairlift.folders.tensor_files import GGUF_WEIGHTS
from chairlift.gguf.architectures import WITH_CHANGES
from chairlift.gguf.encoder_architectures import ENCODERS
from chairlift.gguf.encoder_tokenizers import encoder_tokenizer_files
from chairlift.gguf.gguf_file import GgufFile, parts_of
from chairlift.gguf.hybrid_config import hybrid_config
from chairlift.gguf.model_config import config_of
from chairlift.gguf.pooling_files import MODULES, POOLING, pooling_files
from chairlift.gguf.tokenizer_files import tokenizer_files

# Changes with what is made of a file, so that it is made anew.
_VERSION = 8
# What is made, beside the link to the weights.
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", MODULES, POOLING)


def is_gguf(path: Path) -> bool:
    """Whether this is a GGUF file, by its name."""
    return path.suffix == ".gguf" and path.is_file()


def folder_of(path: Path) -> Path:
    """Return a folder with config.json, the tokenizer's files, and a link to a GGUF file; made if it is not there yet.

    Raises UnsupportedModel for what is not read, ConfigError if the folder can't be made.
    """
    # Not where links lead: parts lie beside each other by the names that these have.
    path = path.absolute()
    with looking_at(path):
        about = [each.stat() for each in parts_of(path)]
    mark = f"{path} {[(each.st_size, each.st_mtime_ns) for each in about]} {_VERSION}"
    folder = _home() / f"{path.stem[:80]}-{hashlib.sha256(mark.encode()).hexdigest()[:16]}"
    if not _is_made(folder, path):
        files = _contents(path)
        try:
            _make(folder, files, path)
        except OSError as error:
            problem = f"model: what {path.name} has beside weights can't be kept in {folder}: {error}"
            raise ConfigError(f"{problem}; set XDG_CACHE_HOME to a folder that can be written to") from error
    return folder


def _is_made(folder: Path, weights: Path) -> bool:
    """Whether a folder is this user's own and has all that is made of a file: its name is no secret."""
    with looking_at(folder):
        try:
            about = folder.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        link = folder / GGUF_WEIGHTS
        return (
            stat.S_ISDIR(about.st_mode)
            and about.st_uid == os.getuid()
            and all((folder / name).is_file() for name in _FILES)
            and link.is_symlink()
            and link.readlink() == weights
        )


def _contents(path: Path) -> dict[str, Any]:
    if find_spec("gguf") is None:
        raise UnsupportedModel(f"{path.name} is a GGUF file, which needs: pip install 'chairlift[gguf]'")
    file = GgufFile(path)
    name = file.metadata.get("general.architecture")
    config, is_encoder = (hybrid_config if name in WITH_CHANGES else config_of)(file), name in ENCODERS
    tokenizer = (encoder_tokenizer_files if is_encoder else tokenizer_files)(file.metadata, path.name)
    return {"config.json": config} | tokenizer | pooling_files(file, config)


def _make(folder: Path, files: dict[str, Any], weights: Path) -> None:
    """Write it elsewhere and move it here: who is stopped in the middle leaves nothing that looks whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    try:
        for name, content in files.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_text(json.dumps(content), encoding="utf-8")
        # Of what is behind pooling, too, in whose folders sentence-transformers looks for it.
        for name in {"", *(path.split("/")[0] for path in files if path.endswith("_Dense/config.json"))}:
            (made / name / GGUF_WEIGHTS).symlink_to(weights)
        _put(made, folder, weights)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _put(made: Path, folder: Path, weights: Path) -> None:
    """Move it to its place, unless another process was faster, and away from there what is none of it."""
    try:
        made.rename(folder)
    except OSError:
        if _is_made(folder, weights):
            return
        if not os.path.lexists(folder):
            raise
        old = made.with_name(f"{made.name}-old")
        folder.rename(old)
        made.rename(folder)
        # Somebody else's may have to stay there.
        shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(OSError):
            old.unlink()


def _home() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "chairlift" / "gguf"
