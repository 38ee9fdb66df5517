"""Settings from four places: flag, then environment, then chairlift.toml, then the default."""

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from chairlift.config.choices import choices, problem_of
from chairlift.config.flags import dashed, holds_json
from chairlift.config.items import ItemConfig, detect_kind
from chairlift.config.other_names import hint
from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import CLOSING, ServerConfig
from chairlift.errors import ConfigError, looking_at
from chairlift.folders.kind import is_encoder
from chairlift.gguf.part_names import GGUF_PART
from chairlift.gguf.side_folder import folder_of, is_gguf
from chairlift.hub.name import hub_name
from chairlift.hub.resolve import fetched, refuse_revision

ENV_PREFIX = "CHAIRLIFT_"
DEFAULT_FILE = "chairlift.toml"

# Anybody may set variables, so a name must be this much like a setting's to count as one misspelt.
_ALIKE = 0.8

ModelConfig = SequenceConfig | ItemConfig


class Share(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What only a model beside others has: its version, and its weight in sharing the machine (0: it needs no turn)."""

    version: str = "1"
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a share that is none."""
        if not 0 <= self.weight < math.inf:
            raise ConfigError(f"weight must not be negative, got {self.weight}")


class ServedModel(NamedTuple):
    """One model, under the name that clients ask for; `hub` is its name on the Hub, if it came from there."""

    name: str
    config: ModelConfig
    share: Share = Share()
    hub: str | None = None


class Settings(NamedTuple):
    """All that `chairlift serve` needs to know; `note` says what of a settings file was not used, if that is so."""

    models: tuple[ServedModel, ...]
    server: ServerConfig
    note: str = ""


class _Given(NamedTuple):
    """A setting as it was found, and where. Only a file has types: everything else is text."""

    value: Any
    source: str
    typed: bool


_Found = dict[str, _Given]
_NOT_GIVEN = _Given(None, "", typed=False)
# The one setting of the server that is about models.
_ALIASES = "model_aliases"
# Settings of the server that are relative to the file in which they are.
_PATHS = ("data_dir", "record", "api_keys", "tls_cert", "tls_key", "tls_ca")
_FIELDS: dict[type, dict[str, Any]] = {
    config: {field.name: field.type for field in msgspec.structs.fields(config)}
    for config in (SequenceConfig, ItemConfig, ServerConfig, Share)
}
_OF_MODELS = _FIELDS[SequenceConfig] | _FIELDS[ItemConfig]
_KNOWN = _OF_MODELS | _FIELDS[ServerConfig]
# What a server that a command starts for itself takes from no file and no variable: they are about the users' server.
_NOT_FOR_OWN = _FIELDS[ServerConfig].keys() - _OF_MODELS.keys() - {"log_level"}


def load(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    folder: Path,
    default_model: str,
    *,
    own_server: bool = False,
    before_fetch: Callable[[ServerConfig], object] = lambda server: None,
) -> Settings:
    """Merge all sources; raises ConfigError naming the setting and where it came from.

    With `own_server` it is for one that a command starts for itself. `before_fetch` is called before the Hub is asked
    for a model, and may raise what makes that vain.
    """
    flags = {name: value for name, value in flags.items() if name in _KNOWN or name == "config"}
    file = flags.pop("config", None) or environ.get(f"{ENV_PREFIX}CONFIG")
    if str(flags.get("model", "")).endswith(".toml"):
        if file:
            raise ConfigError("name one settings file, not two")
        file = flags.pop("model")
    path = folder / (file or DEFAULT_FILE)
    with looking_at(path):
        is_there = bool(file) or path.is_file()
    values = _read(path) if is_there else {}
    above = _from_environment(environ)
    if own_server:
        values, above = _for_own_server(values), _for_own_server(above)
    note = ""
    if "model" in flags and not file and _names_others(values, folder, str(flags["model"])):
        # The file was written for other models, and lies here by chance, or for another command.
        _from_file({name: value for name, value in values.items() if name != "models"}, path, _KNOWN, "")
        values = {name: value for name, value in values.items() if name in _FIELDS[ServerConfig] and name != _ALIASES}
        about = f"of its settings the server's hold ({', '.join(values)})" if values else "nothing of it holds"
        note = f"{path.name} here names other models than {flags['model']}: {about}; --config {path.name} takes it all"
    above |= {name: _Given(value, f"--{dashed(name)}", typed=False) for name, value in flags.items()}
    if "models" in values:
        return _several(values, path, above, before_fetch)
    found = _from_file(values, path, _KNOWN, "") | above
    if "model" not in found:
        found["model"] = _Given(default_model, "the default", typed=True)
        found.setdefault("served_model_name", _Given("demo", "the default", typed=True))
    # Paths in a file are relative to it, all others to the working directory.
    from_file = "model" in values and "model" not in above
    server = _server(found, path.parent)
    served = _model(found, path.parent if from_file else folder, None, lambda: before_fetch(server))
    _check_queue(server, (served,))
    return Settings((served,), _with_names(server, (served,)), note)


def _for_own_server(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in _NOT_FOR_OWN}


def _names_others(values: Mapping[str, Any], folder: Path, model: str) -> bool:
    """Whether a file in `folder` is about models, and not about this one alone."""
    named = values.get("model")
    return "models" in values or (named is not None and (folder / str(named)) != folder / model)


def _several(
    values: dict[str, Any], path: Path, above: _Found, before_fetch: Callable[[ServerConfig], object]
) -> Settings:
    """Settings of a file with [models.NAME] tables; paths in it are relative to it."""
    tables = values.pop("models")
    if not isinstance(tables, dict) or not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{path}: models must hold tables, [models.NAME], one for each model")
    found = _from_file(values, path, _KNOWN, "") | above
    for name, given in found.items():
        if name not in _FIELDS[ServerConfig]:
            raise ConfigError(
                f"{given.source} is a model's setting, but {path} has several models: put it under [models.NAME]"
            )
    models, server = [], _server(found, path.parent)
    for name, table in tables.items():
        known = _OF_MODELS | _FIELDS[Share]
        of_model = _from_file(table, path, known, f"models.{name}.")
        if "model" not in of_model:
            raise ConfigError(f"{path}: models.{name} must say where the model is: model = ...")
        models.append(_model(of_model, path.parent, name, lambda: before_fetch(server)))
    names = [(served.name, served.share.version) for served in models]
    if twice := next((pair for pair in names if names.count(pair) > 1), None):
        raise ConfigError(f"{path} has version {twice[1]} of {twice[0]!r} twice: give each its own version")
    _check_queue(server, models)
    return Settings(tuple(models), _with_names(server, models))


def _model(found: _Found, folder: Path, name: str | None, before_fetch: Callable[[], object]) -> ServedModel:
    """One model's settings. Raises ConfigError for those that its kind does not have."""
    given = str(_convert(found["model"], str))
    path, hub = folder / given, None
    revision = None if "revision" not in found else str(_convert(found["revision"], str))
    with looking_at(path):
        is_here = path.is_dir() or path.is_file()
    if is_here or is_class(given):
        refuse_revision(given, revision)
    else:
        before_fetch()
        path, hub = fetched(given, revision), given
        found = found | {"model": found["model"]._replace(value=str(path))}
    if is_gguf(path):
        path = folder_of(path)
        found = found | {"model": found["model"]._replace(value=str(path))}
    elif hub is None and folder != Path.cwd() and (not is_class(given) or given.rpartition(":")[0].endswith(".py")):
        found = found | {"model": found["model"]._replace(value=str(path))}
    config: type[ModelConfig] = ItemConfig
    with looking_at(path):
        is_decoder = path.is_dir() and not is_encoder(path)
    if is_decoder and ("kind" not in found or found["kind"].value == "auto"):
        config = SequenceConfig
    # The server's settings may stand beside those of a single model, but not in a model's table.
    taken = _FIELDS[config] if name is not None else _FIELDS[config] | _FIELDS[ServerConfig]
    wrong = [key for key in found if key in _OF_MODELS and key not in taken]
    for key in wrong:
        if key != "kind":
            what = "is a language model" if config is SequenceConfig else "is not a language model"
            instead = "put it above the tables" if key in _FIELDS[ServerConfig] else "leave it out"
            raise ConfigError(f"{found[key].source} has no effect on {given!r}, which {what}; {instead}")
    made = config(**_of(config, found))
    version = found.get("version")
    if version is not None and type(version.value) is int:
        found = found | {"version": version._replace(value=str(version.value))}
    return ServedModel(made.served_model_name or name or name_of(given), made, Share(**_of(Share, found)), hub)


def name_of(model: str) -> str:
    """The name of a model that was given none: that of its folder, file or class, or of its repository."""
    if is_class(model):
        return model.rpartition(":")[2]
    path = Path(model)
    with looking_at(path):
        is_here = path.exists()
    if not is_here and (name := hub_name(model)):
        return name.repo.rpartition("/")[2]
    if (part := GGUF_PART.fullmatch(path.name)) is not None:
        return part[1]
    return path.stem if path.suffix in (".gguf", ".onnx") else path.resolve().name


def is_class(model: str) -> bool:
    """Whether this is module:Class or file.py:Class."""
    return detect_kind(model) == "python"


def _server(found: _Found, folder: Path) -> ServerConfig:
    """The server's settings; `folder` is that of the file."""
    config = ServerConfig(**_of(ServerConfig, found))
    for name in _PATHS:
        if (path := getattr(config, name)) and found.get(name, _NOT_GIVEN).typed:
            setattr(config, name, str(folder / path))
    return config


def _check_queue(server: ServerConfig, models: Iterable[ServedModel]) -> None:
    """Raises ConfigError where a model's queue holds less than a batch that leaves only when it is full."""
    static = [each.config for each in models if isinstance(each.config, SequenceConfig)]
    largest = max((each.slots for each in static if each.strategy == "static"), default=0)
    if largest > server.max_waiting:
        raise ConfigError(
            f"max_waiting {server.max_waiting} is less than batch_size {largest}, and a static batch leaves only when "
            "it is full: raise max_waiting, or lower batch_size"
        )


def _with_names(config: ServerConfig, models: Iterable[ServedModel]) -> ServerConfig:
    """The server's settings with all further names of its models. Raises ConfigError for aliases that suit none."""
    names = {served.name for served in models}
    for alias, name in config.model_aliases.items():
        if not alias or alias in names:
            raise ConfigError(f"model_aliases must be new names, got {alias!r}; the models are {', '.join(names)}")
        if name not in names:
            raise ConfigError(f"model_aliases: {alias!r} is to be {name!r}, but the models are {', '.join(names)}")
    # Clients may also ask for a model by its whole name on the Hub.
    whole = {served.hub: served.name for served in models if served.hub and served.hub not in names}
    config.model_aliases = whole | config.model_aliases
    return config


def _of(config: type, found: _Found) -> dict[str, Any]:
    """The settings of one class, as its types want them."""
    return {name: _convert(found[name], kind) for name, kind in _FIELDS[config].items() if name in found}


def _read(path: Path) -> dict[str, Any]:
    try:
        # Some editors begin a file with a byte order mark.
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _from_file(values: Mapping[str, Any], path: Path, known: Mapping[str, Any], prefix: str) -> _Found:
    """The settings of a table. Raises ConfigError for one that is not known."""
    for name, value in values.items():
        if name in _KNOWN and name not in known:
            where = "put it above the first [models.NAME] table"
            raise ConfigError(f"{path}: {prefix}{name} is a setting of the server, not of a model; {where}")
        if name not in known and isinstance(value, dict) and not prefix:
            where = "those of the server stand above all tables, those of a model in [models.NAME]"
            raise ConfigError(f"{path} has a table [{name}], and no settings are there: {where}")
        if name not in known:
            raise ConfigError(f"{path} has an unknown key {prefix + name!r}{hint(name, known, repr)}")
    return {name: _Given(value, f"{path}: {prefix}{name}", typed=True) for name, value in values.items()}


def _from_environment(environ: Mapping[str, str]) -> _Found:
    """The settings of the environment. Raises ConfigError for a variable whose name is nearly one of them."""
    for variable, given in environ.items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        # Kubernetes sets variables for services: CHAIRLIFT_HTTP_PORT=tcp://... for one called chairlift-http.
        if not variable.startswith(ENV_PREFIX) or name in _KNOWN or not given or "://" in given:
            continue
        if guess := hint(name, _KNOWN, lambda known: ENV_PREFIX + known.upper(), least=_ALIKE):
            raise ConfigError(f"{variable} is no setting{guess}")
    found = {}
    for name in _KNOWN:
        variable = ENV_PREFIX + name.upper()
        value = environ.get(variable)
        if value == "" and name in CLOSING:
            raise ConfigError(f"{variable} is empty, which would open what it is to close; unset it if that is meant")
        if not value:
            continue
        if value.startswith("tcp://"):
            raise ConfigError(
                f"{variable} is {value!r}: Kubernetes sets that for a service called 'chairlift'. "
                "Set enableServiceLinks: false on the pod, or name the service otherwise."
            )
        found[name] = _Given(value, variable, typed=False)
    return found


def _convert(given: _Given, kind: Any) -> Any:
    value = given.value
    if not given.typed and holds_json(kind):
        try:
            value = json.loads(value)
        except ValueError:
            raise ConfigError(f"{given.source}: must be JSON, got {value!r}") from None
    words = choices(kind)
    try:
        converted = msgspec.convert(value, kind, strict=given.typed)
    except msgspec.ValidationError as error:
        problem = problem_of(error)
    else:
        if not words or converted in words:
            return converted
    if words:
        problem = "must be one of " + ", ".join(words)
    raise ConfigError(f"{given.source}: {problem}, got {given.value!r}")
