"""The file of API keys: who has one, what it opens, and how much of it; and the command that makes keys.

Only hashes are kept. Keys have 256 random bits, so that a hash without salt or stretching says nothing of them.
"""

import argparse
import hashlib
import os
import re
import secrets
import tomllib
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from chairlift.config.flags import dashed
from chairlift.core.quota import Allowance
from chairlift.errors import ConfigError

Right = Literal["infer", "batch", "admin", "metrics"]
RIGHTS: tuple[Right, ...] = get_args(Right)

_USUAL: tuple[Right, ...] = ("infer", "batch")
_PREFIX = "cl-"
_KEY_BYTES = 32
_MODE = 0o600
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ABOUT = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute, read and generated",
    "requests_at_once": "requests under way at once, running and waiting, each sample of each prompt for itself",
}
_Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
_Positive = Annotated[int, Meta(ge=1)]


class KeyEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a key opens, and its limits; None is no limit.

    `sha256` are the hashes of keys that are all alike, so that a new one can be handed out before the old one goes.
    `priorities` are the lowest and the highest number that requests may bring; without them none below 0.
    """

    sha256: Annotated[list[_Hash], Meta(min_length=1)]
    rights: list[Right]
    requests_per_minute: _Positive | None = None
    tokens_per_minute: _Positive | None = None
    requests_at_once: _Positive | None = None
    priorities: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Refuse a range that holds nothing."""
        if self.priorities is not None and self.priorities[0] > self.priorities[1]:
            raise ValueError(f"priorities must be the lowest and the highest, got {list(self.priorities)}")

    @property
    def allowance(self) -> Allowance:
        """The limits."""
        return Allowance(**{name: getattr(self, name) for name in _ABOUT})


def read_keys(path: Path) -> dict[str, KeyEntry]:
    """The entries of a file by name, at least one. Raises ConfigError."""
    entries = _parse(path)
    if not entries:
        raise ConfigError(f"{path} has no keys, so nobody could come in: chairlift keys add NAME --file {path}")
    return entries


def hash_of(key: str) -> str:
    """A key as the file has it."""
    return hashlib.sha256(key.encode()).hexdigest()


def _parse(path: Path) -> dict[str, KeyEntry]:
    try:
        # Some editors begin a file with a byte order mark.
        tables = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"the key file {path} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    keys = tables.pop("keys", {})
    if tables or not isinstance(keys, dict):
        raise ConfigError(f"{path} must hold tables [keys.NAME] and nothing else")
    entries: dict[str, KeyEntry] = {}
    owners: dict[str, str] = {}
    for name, table in keys.items():
        entries[name] = entry = _entry(path, name, table)
        for each in entry.sha256:
            if (other := owners.setdefault(each, name)) != name:
                raise ConfigError(f"{path}: keys.{name} and keys.{other} have the same sha256")
    return entries


def _entry(path: Path, name: str, table: object) -> KeyEntry:
    _check_name(name)
    try:
        return msgspec.convert(table, KeyEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: keys.{name}: {str(error).replace('`', '')}") from None


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a key's name has up to 64 letters, digits, '-' and '_', got {name[:100]!r}")


# The command


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give a parser the flags of `chairlift keys`."""
    commands = parser.add_subparsers(dest="keys_command", required=True, metavar="COMMAND")
    add = commands.add_parser("add", help="make a key for somebody: print it, once, and append its hash to the file")
    add.add_argument("name", help="whose key it is: files, batches and cached prefixes belong to a name")
    add.add_argument("--file", type=Path, required=True, help="the file that api_keys names; made if it is not there")
    add.add_argument("--rights", default=",".join(_USUAL), help=f"some of {','.join(RIGHTS)} (default: %(default)s)")
    for limit, about in _ABOUT.items():
        add.add_argument(f"--{dashed(limit)}", type=int, metavar="N", help=f"{about} (default: any)")
    add.add_argument(
        "--priorities", type=int, nargs=2, metavar=("LOWEST", "HIGHEST"), help="of requests (default: 0 and above)"
    )
    commands.add_parser("new", help="print a key and its hash, to be put into the list of an entry by hand")


def keys_command(args: argparse.Namespace) -> int:
    """Run `chairlift keys`. The key is all that goes to standard output. Raises ConfigError."""
    key = _PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    if args.keys_command == "new":
        print(f"{key}\nsha256 = {hash_of(key)}")
        return 0
    given = {name: getattr(args, name) for name in (*_ABOUT, "priorities") if getattr(args, name) is not None}
    table = {"sha256": [hash_of(key)], "rights": args.rights.split(",")} | given
    _append(args.file, args.name, table)
    print(key)
    return 0


def _append(path: Path, name: str, table: dict[str, object]) -> None:
    _entry(path, name, table)
    if path.exists() and name in _parse(path):
        raise ConfigError(f"{path} has keys.{name} already: give it a second sha256 (chairlift keys new), or remove it")
    # JSON's numbers, plain strings and lists are TOML's too.
    lines = [f"{field} = {msgspec.json.encode(value).decode()}" for field, value in table.items()]
    text = "\n".join((f"\n[keys.{name}]", *lines, ""))
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from None
