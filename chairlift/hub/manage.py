"""`chairlift pull`, `list` and `remove`: models of the Hub on this disk."""

import argparse
import time
from typing import TYPE_CHECKING

from chairlift.errors import ConfigError, looking_at
from chairlift.hub.cache import gigabytes
from chairlift.hub.name import MAIN, HubName, hub_name

if TYPE_CHECKING:
    from chairlift.hub.download import Hub

_NAME = "organization/model, or organization/model:file for one file of it"


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Give the `chairlift` command these three."""
    pull = commands.add_parser("pull", help="download a model of the Hub, or what is missing of it")
    pull.add_argument("model", help=_NAME)
    pull.add_argument("--revision", default=MAIN, help="branch, tag or commit (default: main)")
    pull.set_defaults(run=pull_command)
    there = commands.add_parser("list", help="show the models of the Hub that are on this disk")
    there.set_defaults(run=list_command)
    remove = commands.add_parser("remove", help="remove a model of the Hub from this disk")
    remove.add_argument("model", help="organization/model; all of its revisions and files go")
    remove.set_defaults(run=remove_command)


def pull_command(args: argparse.Namespace) -> int:
    """Fetch a model, and print where it is. Raises DownloadFailed, ConfigError or UnsupportedModel."""
    name, hub = _named(args.model, args.revision), _hub()
    with looking_at(hub.cache.folder):
        kept = hub.fetch(name)
    print(f"{kept.name} ({kept.commit[:12]}), {gigabytes(kept.size)}: {kept.path}")
    return 0


def list_command(args: argparse.Namespace) -> int:
    """Print a line for each model that is here, whole."""
    hub = _hub()
    rows = [("model", "commit", "size", "downloaded")]
    with looking_at(hub.cache.folder):
        models = hub.cache.all()
    for kept in models:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept.when))
        rows.append((str(kept.name), kept.commit[:12], gigabytes(kept.size), when))
    if len(rows) == 1:
        print(f"nothing that `chairlift pull` downloaded is in {hub.cache.folder}")
        return 0
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def remove_command(args: argparse.Namespace) -> int:
    """Remove a model, and print what that frees. Raises ConfigError if it is not here."""
    name = _named(args.model, MAIN)
    if name.file is not None:
        raise ConfigError(f"a model is removed as a whole: chairlift remove {name.repo}")
    hub = _hub()
    with looking_at(hub.cache.folder):
        freed = hub.cache.remove(name.repo)
    if not freed:
        raise ConfigError(f"{name.repo} is not in {hub.cache.folder}; chairlift list shows what is")
    print(f"{name.repo}: {gigabytes(freed)} freed")
    return 0


def _hub() -> "Hub":
    from chairlift.hub.download import Hub

    return Hub()


def _named(model: str, revision: str) -> HubName:
    name = hub_name(model, revision)
    if name is None:
        raise ConfigError(f"{model!r} is no name of the Hub: give {_NAME}")
    return name
