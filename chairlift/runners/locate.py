"""Finding the class that a user named."""

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from chairlift.config.items import split_class
from chairlift.errors import ConfigError


def find_class(model: str) -> type:
    """Import the class named as "module:Class" or "path/to/file.py:Class".

    Modules are looked for among the installed packages and then in the working directory, and what a file imports in
    its own folder too. Raises ConfigError that says which of it is missing, or what its import raised.
    """
    where, name = split_class(model)
    module = _from_file(Path(where)) if where.endswith(".py") else _from_name(where)
    found = getattr(module, name, None)
    if found is None:
        classes = [each for each, value in vars(module).items() if _defined_in(module, value)]
        has = f"it defines {', '.join(classes)}" if classes else "it defines no class"
        raise ConfigError(f"{where} has no class {name}; {has}")
    if not isinstance(found, type):
        raise ConfigError(f"{model} is not a class but a {type(found).__name__}")
    return found


def _from_name(name: str) -> ModuleType:
    _search(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"there is no module {name!r} among the installed packages or in the working directory ({Path.cwd()})"
            ) from None
        raise _import_failed(name, error) from error
    except Exception as error:
        raise _import_failed(name, error) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {path} (in the working directory {Path.cwd()})")
    _search(path.resolve().parent)
    # A name of its own, so that a file called json.py stands in for no other module.
    spec = importlib.util.spec_from_file_location(f"chairlift_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} can't be imported")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _import_failed(str(path), error) from error
    return module


def _search(folder: Path) -> None:
    """Last, so that nothing in it hides an installed package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import_failed(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"importing {name} failed: {type(error).__name__}: {error}")


def _defined_in(module: ModuleType, value: object) -> bool:
    return inspect.isclass(value) and value.__module__ == module.__name__
