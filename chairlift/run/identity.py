"""What a run was begun with, so that only the same is taken up."""

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from chairlift.config.flags import dashed
from chairlift.config.model_files import edges_of, files_of
from chairlift.config.run import RunConfig
from chairlift.config.settings import Settings, is_class
from chairlift.errors import JobError
from chairlift.jobs.lines import unreadable

# Settings of models and of the server that change what the answers are, and not only when they come.
_OF_RESULTS = (
    *("dtype", "device", "ops", "quantization", "kv_cache_dtype", "max_model_len", "seed", "generation_config"),
    *("kind", "outputs", "options", "max_body_bytes", "max_tensor_bytes", "max_tensor_json_bytes", "max_n"),
    "max_prompts_per_request",
    *("max_stop_strings", "max_stop_chars", "max_stop_chars_total", "max_waiting", "model_aliases", "tool_dialect"),
    *("implementation", "call_timeout_s", "retries", "bisect"),
)
_FILES = "files of --model"
# Where lines that failed go, beside the output.
ERRORS = "--errors"


def identity(config: RunConfig, settings: Settings) -> dict[str, Any]:
    """Everything that results follow from, each under the name by which it is refused. Raises JobError."""
    found: dict[str, Any] = {"INPUT": fingerprint(config.input)}
    for name in ("format", "prompt_field", "id_field", "chat", "params"):
        found[f"--{dashed(name)}"] = getattr(config, name)
    # Both may have been moved to another folder meanwhile.
    found[ERRORS] = os.path.relpath(config.errors, config.output.parent)
    for served in settings.models:
        of = f"{served.name}: " if len(settings.models) > 1 else ""
        model = served.config.model
        found[f"{of}--model"] = model if is_class(model) else os.path.abspath(model)
        if served.hub is None:
            # Of those of the Hub the path says which revision it is.
            found[of + _FILES] = _fingerprint_of_files(model)
        found[f"{of}--served-model-name"] = served.name
        found |= {f"{of}--{dashed(name)}": value for name, value in _of_results(served.config)}
    found |= {f"--{dashed(name)}": value for name, value in _of_results(settings.server)}
    # As it will come back from the store.
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
    return plain


def check_same(before: dict[str, Any], now: dict[str, Any], state: Path) -> None:
    """Raise JobError, naming what differs, if a run is not the one that was begun."""
    for name in now | before:
        was, is_ = before.get(name), now.get(name)
        if was != is_:
            what = f"{name} was {_shown(was)} and is {_shown(is_)}"
            if name == "INPUT" or name.endswith(_FILES):
                what = "it has changed" if name == "INPUT" else f"{name} have changed"
            subject = "another INPUT" if name == "INPUT" else "other settings"
            raise JobError(
                f"{state} is of a run with {subject}: {what}. Run it as it was begun, or begin anew with --restart"
            )


def fingerprint(path: Path) -> dict[str, Any]:
    """A file's size, the time of its last change, and a hash of its first and last 64 KiB."""
    try:
        about, edges = edges_of(path)
    except OSError as error:
        raise unreadable(path, error) from None
    return {"size": about.st_size, "mtime_ns": about.st_mtime_ns, "sha256": edges}


def _fingerprint_of_files(model: str) -> str:
    """A hash of the names, sizes and times of a model's files."""
    about = []
    for path in files_of(model):
        try:
            found = path.stat()
        except OSError as error:
            raise unreadable(path, error) from None
        about.append((os.path.abspath(path), found.st_size, found.st_mtime_ns))
    return hashlib.sha256(msgspec.json.encode(about)).hexdigest()


def _of_results(config: msgspec.Struct) -> list[tuple[str, Any]]:
    return [(name, getattr(config, name)) for name in _OF_RESULTS if name in config.__struct_fields__]


def _shown(value: Any) -> str:
    return "not given" if value is None else msgspec.json.encode(value).decode()
