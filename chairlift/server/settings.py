"""Settings from four places: flag, then environment, then chairlift.toml, then the default."""

import argparse
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.server.config import ServerConfig

ENV_PREFIX = "CHAIRLIFT_"
DEFAULT_FILE = "chairlift.toml"

HELP = {
    "model": "a Hugging Face folder (default: the demo model)",
    "served_model_name": "the name that clients ask for (default: the folder's name)",
    "dtype": "type of weights and activations; auto is the folder's own, float16 counting as float32",
    "device": "where the model runs",
    "ops": "native kernels, or the plain reference",
    "strategy": "when a waiting request may board",
    "batch_size": "static and dynamic: requests in a full batch",
    "max_wait_ms": "dynamic: how long the oldest waits for a full batch",
    "max_num_seqs": "continuous: sequences that may run at once",
    "max_num_batched_tokens": "tokens in one step",
    "target_itl_ms": "continuous: milliseconds that a step may take, by which prompts are cut (default: no target)",
    "max_model_len": "prompt and output tokens of one sequence (default: the model's max_position_embeddings)",
    "block_size": "tokens in one KV block",
    "kv_cache_gb": "memory for the KV cache (default: from what the machine has free)",
    "quantization": "int8 halves bfloat16 weights and is some 1.6 times as fast, rounding them and what they multiply",
    "kv_cache_dtype": "int8 halves a bfloat16 cache and the time to read it, rounding K and V; auto is the dtype",
    "enable_prefix_caching": "share the KV blocks of common prompt prefixes",
    "seed": "of requests that bring none",
    "num_threads": "CPU threads of the worker (default: all cores, or 1 for a model under 32 MB)",
    "host": "the address to listen on; 0.0.0.0 opens the server to the network",
    "port": "the port to listen on; 0 takes any free one",
    "grpc_port": "also serve the Open Inference Protocol over gRPC there (default: no gRPC)",
    "api_key": "ask for 'Authorization: Bearer KEY' (better set as CHAIRLIFT_API_KEY than as a flag)",
    "max_waiting": "sequences that may wait; beyond it a request gets 429",
    "max_body_bytes": "bytes of a request body",
    "max_n": "samples of one request",
    "max_prompts_per_request": "prompts of one completion request",
    "body_timeout_s": "seconds that a request body may take to arrive",
    "keep_alive_s": "seconds that an idle connection is kept",
    "drain_timeout_s": "seconds that running requests get to end after SIGTERM",
    "log_level": "how much the server and its worker say",
}


class Settings(NamedTuple):
    """All that `chairlift serve` needs to know."""

    engine: EngineConfig
    server: ServerConfig


_TYPES: dict[str, Any] = {
    field.name: field.type for config in (EngineConfig, ServerConfig) for field in msgspec.structs.fields(config)
}
_DEFAULTS: dict[str, Any] = {
    field.name: field.default for config in (EngineConfig, ServerConfig) for field in msgspec.structs.fields(config)
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give a parser a flag for every setting; a flag that is not given leaves nothing behind."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=f"{HELP['model']}, or a .toml file")
    parser.add_argument("--config", metavar="FILE", help=f"settings file (default: {DEFAULT_FILE}, if it is there)")
    for config, title in ((EngineConfig, "engine"), (ServerConfig, "server")):
        group = parser.add_argument_group(title)
        for field in msgspec.structs.fields(config):
            if field.name != "model":
                _add_flag(group, field.name)


def load(flags: Mapping[str, Any], environ: Mapping[str, str], folder: Path, default_model: str) -> Settings:
    """Merge all sources; raises ConfigError naming the setting and where it came from."""
    flags = {name: value for name, value in flags.items() if name in _TYPES or name == "config"}
    file = flags.pop("config", None) or environ.get(f"{ENV_PREFIX}CONFIG")
    if str(flags.get("model", "")).endswith(".toml"):
        if file:
            raise ConfigError("name one settings file, not two")
        file = flags.pop("model")
    merged: dict[str, Any] = {}
    merged |= _from_file(folder / file) if file else _from_default_file(folder / DEFAULT_FILE)
    merged |= _from_environment(environ)
    merged |= {name: _convert(name, value, f"--{_dashed(name)}", strict=False) for name, value in flags.items()}
    if merged.get("model") is None:
        merged["model"] = default_model
        merged.setdefault("served_model_name", "demo")
    if not (folder / merged["model"]).is_dir():
        raise ConfigError(f"model {merged['model']!r} is not a folder here; it must hold a Hugging Face model's files")
    engine, server = (
        {name: value for name, value in merged.items() if name in config.__struct_fields__}
        for config in (EngineConfig, ServerConfig)
    )
    return Settings(EngineConfig(**engine), ServerConfig(**server))


def model_name(config: EngineConfig) -> str:
    """The name that clients ask for."""
    return config.served_model_name or Path(config.model).resolve().name


def _from_default_file(path: Path) -> dict[str, Any]:
    return _from_file(path) if path.is_file() else {}


def _from_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for name in values:
        if name not in _TYPES:
            close = difflib.get_close_matches(name.replace("-", "_"), _TYPES, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{path} has an unknown key {name!r}{hint}")
    return {name: _convert(name, value, f"{path}: {name}", strict=True) for name, value in values.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for name in _TYPES:
        variable = ENV_PREFIX + name.upper()
        value = environ.get(variable)
        if not value:
            continue
        if value.startswith("tcp://"):
            raise ConfigError(
                f"{variable} is {value!r}: Kubernetes sets that for a service called 'chairlift'. "
                "Set enableServiceLinks: false on the pod, or name the service otherwise."
            )
        found[name] = _convert(name, value, variable, strict=False)
    return found


def _convert(name: str, value: Any, source: str, strict: bool) -> Any:
    try:
        return msgspec.convert(value, _TYPES[name], strict=strict)
    except msgspec.ValidationError as error:
        problem = str(error).replace("`", "").lower()
        if choices := _choices(_TYPES[name]):
            problem = "must be one of " + ", ".join(choices)
        raise ConfigError(f"{source}: {problem}, got {value!r}") from None


def _add_flag(group: "argparse._ArgumentGroup", name: str) -> None:
    kind, default = _TYPES[name], _DEFAULTS[name]
    described = HELP[name] if default is None else f"{HELP[name]} (default: {default})"
    flag, missing = f"--{_dashed(name)}", argparse.SUPPRESS
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=missing, help=described)
    elif choices := _choices(kind):
        group.add_argument(flag, choices=choices, default=missing, help=described)
    else:
        group.add_argument(flag, metavar=_metavar(kind), default=missing, help=described)


def _choices(kind: Any) -> list[str]:
    return list(typing.get_args(kind)) if typing.get_origin(kind) is Literal else []


def _metavar(kind: Any) -> str:
    inner = [part for part in typing.get_args(kind) if part is not types.NoneType] or [kind]
    return {int: "N", float: "X", str: "TEXT"}[inner[0]]


def _dashed(name: str) -> str:
    return name.replace("_", "-")
