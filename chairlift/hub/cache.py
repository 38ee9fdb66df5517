"""What of the Hub is on this disk: in the cache that all of its programs share, and known to be whole.

A download ends by leaving a note beside the files, which names them all. What has no such note may lack files, and is
not served.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote
from uuid import uuid4

import msgspec

from chairlift.errors import ConfigError, DownloadFailed, looking_at
from chairlift.folders.model_json import read_object
from chairlift.hub.name import HubName
from chairlift.hub.wanted import HubFile

_NOTES = "chairlift"


class _Note(msgspec.Struct):
    """Which commit a revision was when it was downloaded, and the files of it: names and bytes."""

    commit: str
    files: dict[str, int]


class Kept(NamedTuple):
    """A model that is here, whole: where it is, its bytes, when it was downloaded, in seconds since 1970, and the names
    of its files."""

    name: HubName
    commit: str
    path: Path
    size: int
    when: float
    files: frozenset[str]


class HubCache:
    """The models in a folder of the Hub's cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, name: HubName) -> Kept | None:
        """A model that is here with all of its files, or None."""
        path = self._note_path(name)
        try:
            note = msgspec.convert(read_object(path), _Note) if path.is_file() else None
        except Exception:
            # Whatever is wrong with a note, a download writes it anew.
            return None
        if note is None:
            return None
        snapshot = self.snapshot(name.repo, note.commit)
        if not all(_size(snapshot / file) == size for file, size in note.files.items()):
            return None
        size, when = sum(note.files.values()), path.stat().st_mtime
        return Kept(name, note.commit, self._model(name, note.commit), size, when, frozenset(note.files))

    def has(self, repo: str, file: HubFile) -> bool:
        """Whether a file is here under its hash, of whatever commit."""
        known = file.sha256 or file.git_sha1
        return known is not None and is_here(self._blobs(repo) / known, file)

    def begun(self, repo: str, file: HubFile) -> int:
        """The bytes that are here of a file that did not come whole, and that its next download goes on from."""
        path = self._incomplete(repo, file)
        return path.stat().st_size if _goes_on(path, file) else 0

    def put(self, repo: str, commit: str, file: HubFile, write: Callable[[Path], None]) -> None:
        """Have a file in a commit's folder: what is here of the same hash, or else what `write` makes at a path.

        All names come from what the Hub said before: what it answers when the file itself is asked for names nothing.
        A part may be at that path already, from a download that broke off; DownloadFailed from `write` says that what
        came is none of the file.
        """
        # Only now: this import takes a good part of a second.
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        place, blobs = self.snapshot(repo, commit) / file.name, self._blobs(repo)
        known = file.sha256 or file.git_sha1
        target = blobs / known if known else place
        # As other programs name it, which so wait for the file rather than download it as well.
        lock = self.folder / ".locks" / self._repo(repo).name / f"{_label(file)}.lock"
        for folder in (blobs, place.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if is_here(place, file):
                return
            if not is_here(target, file):
                self._make(self._incomplete(repo, file), target, file, write)
            if target != place:
                _link(place, target)

    def _make(self, new: Path, target: Path, file: HubFile, write: Callable[[Path], None]) -> None:
        """Have `write` make a file, or the rest of it, and move it to its place."""
        if not _goes_on(new, file):
            new.unlink(missing_ok=True)
        is_kept = file.goes_on
        try:
            write(new)
            os.replace(new, target)
        except DownloadFailed:
            is_kept = False
            raise
        finally:
            if not is_kept:
                new.unlink(missing_ok=True)

    def add(self, name: HubName, commit: str, files: Sequence[HubFile]) -> Kept:
        """Note that all of these files are here and what they should be."""
        path, snapshot = self._note_path(name), self.snapshot(name.repo, commit)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        sizes = {file.name: _size(snapshot / file.name) if file.size is None else file.size for file in files}
        try:
            beside.write_text(json.dumps({"commit": commit, "files": sizes}))
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
        found = self.find(name)
        assert found is not None, "a file has changed since it was looked at"
        return found

    def without_note(self, name: HubName, commit: str, files: Sequence[HubFile]) -> Kept:
        """What `add` returns, where it can't note anything."""
        snapshot = self.snapshot(name.repo, commit)
        size = sum(_size(snapshot / file.name) or 0 for file in files)
        return Kept(name, commit, self._model(name, commit), size, time.time(), frozenset(file.name for file in files))

    def _model(self, name: HubName, commit: str) -> Path:
        snapshot = self.snapshot(name.repo, commit)
        return snapshot if name.file is None else snapshot / name.file

    def discard(self, repo: str, file: Path) -> None:
        """Remove a file of a snapshot, so that it is downloaded anew, and what it links to if that is the model's."""
        if file.is_symlink():
            target = Path(os.path.abspath(file.parent / file.readlink()))
            if target.parent == Path(os.path.abspath(self._blobs(repo))):
                target.unlink(missing_ok=True)
        file.unlink(missing_ok=True)

    def snapshot(self, repo: str, commit: str) -> Path:
        """Where the files of a commit are."""
        return self._repo(repo) / "snapshots" / commit

    def all(self) -> list[Kept]:
        """Every model that is here, by name."""
        found = [self.find(name) for name in self._noted()]
        return sorted((each for each in found if each is not None), key=lambda each: str(each.name))

    def remove(self, repo: str) -> int:
        """Remove a model with all its revisions; return how many bytes that frees. 0 if it is not here.

        Raises ConfigError if it can't be removed.
        """
        folder = self._repo(repo)
        if folder.is_symlink():
            # Where it leads to is for whoever made it to say: that may be any folder.
            raise ConfigError(f"{folder} is a link to {folder.resolve()}; remove both yourself")
        # Links lead to files that are counted where they are.
        freed = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        try:
            if folder.is_dir():
                shutil.rmtree(folder)
        except OSError as error:
            raise ConfigError(f"{repo} can't be removed: {error.filename or folder}: {error.strerror}") from None
        shutil.rmtree(self.folder / ".locks" / folder.name, ignore_errors=True)
        return freed

    def _noted(self) -> Iterator[HubName]:
        for path in self.folder.glob(f"models--*/{_NOTES}/*.json"):
            repo = path.parents[1].name.removeprefix("models--").replace("--", "/", 1)
            revision, _, file = path.name.removesuffix(".json").partition("!")
            yield HubName(repo, unquote(file) or None, unquote(revision))

    def _note_path(self, name: HubName) -> Path:
        what = quote(name.revision, safe="") + (f"!{quote(name.file, safe='')}" if name.file else "")
        return self._repo(name.repo) / _NOTES / f"{what}.json"

    def _repo(self, repo: str) -> Path:
        return self.folder / f"models--{repo.replace('/', '--')}"

    def _incomplete(self, repo: str, file: HubFile) -> Path:
        """Where a file is until all of it has come.

        The same each time: of a process that is killed in the middle no more than one is left.
        """
        name = blake2b(f"{_label(file)}.lock".encode(), digest_size=16).hexdigest()
        return self._blobs(repo) / f"{name}.incomplete"

    def _blobs(self, repo: str) -> Path:
        """Where the bytes of all commits' files are, each under its hash."""
        return self._repo(repo) / "blobs"


def _label(file: HubFile) -> str:
    """What locks know a file by."""
    return file.sha256 or file.git_sha1 or quote(file.name, safe="")


def _goes_on(path: Path, file: HubFile) -> bool:
    """Whether at a path there is what a download can go on from."""
    is_part = file.goes_on and path.is_file() and not path.is_symlink() and os.access(path, os.W_OK)
    return is_part and path.stat().st_size <= (file.size or 0)


def is_here(path: Path, file: HubFile) -> bool:
    """Whether a file is at a path, and as long as it should be."""
    return path.is_file() and file.size in (None, path.stat().st_size)


def _link(place: Path, target: Path) -> None:
    """Put a link to a file at a place, or the file itself where the file system has no links."""
    beside = place.with_name(uuid4().hex)
    try:
        beside.symlink_to(os.path.relpath(target, place.parent))
    except OSError:
        beside = target
    os.replace(beside, place)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def gigabytes(size: int) -> str:
    """Bytes in words."""
    for unit, word in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.2f} {word}"
    return f"{size} bytes"


def free_bytes(folder: Path) -> int:
    """What the disk has room for, on which a folder is or will be."""
    with looking_at(folder):
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free
