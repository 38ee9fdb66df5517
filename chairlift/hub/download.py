"""A model of the Hub, whole on this disk: downloaded where it is not, and checked against what the Hub says of it."""

import hashlib
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from chairlift.errors import DownloadFailed, UnsupportedModel, clip
from chairlift.folders.model_json import MAX_JSON_BYTES, read_json
from chairlift.folders.transformers_config import refuse_known
from chairlift.hub.cache import HubCache, Kept, free_bytes, gigabytes, is_here
from chairlift.hub.name import HubName
from chairlift.hub.wanted import HubFile, wanted_files

# Left free on the disk, for whatever else writes there meanwhile.
_SPARE_BYTES = 2**28
_CHUNK = 2**20
# Seconds that the Hub may take to say what a repository has.
_PATIENCE_S = 20.0

_ANOTHER = "set HF_ENDPOINT to another mirror"
_TOKEN = "renew or unset HF_TOKEN, or else the token that `hf auth login` keeps"
_MAKE_ROOM = "make room, or set HF_HUB_CACHE to a folder on another disk"

# The status for a range that begins at the end of what there is, or after it.
_NOT_THAT_LONG = 416

# It becomes part of a path.
_COMMIT = re.compile(r"[0-9a-f]{40,64}")

Say = Callable[[str], None]


def _say(line: str) -> None:
    print(f"chairlift: {line}", file=sys.stderr, flush=True)


class Hub:
    """The Hub, or a mirror of it, as its own variables name it: HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE, HF_HUB_OFFLINE."""

    def __init__(self, say: Say = _say) -> None:
        # Only now: most servers read a folder, and these imports take a good part of a second.
        from huggingface_hub import constants

        self.endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
        self.cache = HubCache(Path(constants.HF_HUB_CACHE))
        self._offline = bool(constants.HF_HUB_OFFLINE)
        self._say = say

    def fetch(self, name: HubName) -> Kept:
        """Return a model that is whole here, after downloading what is missing.

        The Hub is asked what the revision is now; where it can't be reached, or breaks off, what was downloaded before
        is taken.
        Raises DownloadFailed, or UnsupportedModel for a repository that is no model.
        """
        kept = self.cache.find(name)
        if self._offline:
            if kept is None:
                problem = f"HF_HUB_OFFLINE is set, and {name} is not here whole; unset it, or chairlift pull it before"
                raise DownloadFailed(problem)
            return kept
        try:
            commit, there = self._look(name)
            wanted = self._wanted(name, commit, there)
            # An older version of this program may have taken fewer.
            if kept is not None and kept.commit == commit and kept.files.issuperset(file.name for file in wanted):
                return kept
            return self._download(name, commit, wanted)
        except DownloadFailed as error:
            if kept is None or error.__cause__ is None:
                raise
            self._say(f"{error}; what was downloaded before is served")
            return kept

    def config_of(self, name: HubName) -> tuple[Path, list[HubFile]]:
        """A folder with the model's small JSON files and not its weights, and the files that it is served from."""
        commit, there = self._look(name)
        files = self._wanted(name, commit, there)
        for file in files:
            if file.name.endswith(".json") and (file.size or 0) < _CHUNK and "token" not in file.name:
                self._get(name, commit, file)
        return self.cache.snapshot(name.repo, commit), files

    # One model

    def _look(self, name: HubName) -> tuple[str, list[HubFile]]:
        """The commit that a revision is, and its files.

        An error has a cause if the Hub was not reached, rather than has answered that there is no such thing.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        try:
            info = HfApi(self.endpoint).model_info(
                name.repo, revision=name.revision, files_metadata=True, timeout=_PATIENCE_S
            )
        except GatedRepoError:
            raise DownloadFailed(self._gated(name)) from None
        except RepositoryNotFoundError:
            problem = f"{self.endpoint} has no model {name.repo!r}, or shows it to none without a token (HF_TOKEN)"
            raise DownloadFailed(problem) from None
        except RevisionNotFoundError:
            raise DownloadFailed(f"{name.repo} has no revision {name.revision!r}") from None
        except HfHubHTTPError as error:
            status = error.response.status_code
            problem = f"{self.endpoint} answers {status} to what it is asked of {name.repo}"
            raise DownloadFailed(f"{problem}{_way_out(status)}") from error
        except Exception as error:  # which transport there is, and so what it raises, depends on the library's version
            problem = f"{self.endpoint} can't be reached ({type(error).__name__}); HF_ENDPOINT names a mirror"
            raise DownloadFailed(problem) from error
        commit = info.sha or ""
        if not _COMMIT.fullmatch(commit):
            raise DownloadFailed(f"{self.endpoint} does not say which commit of {name.repo} {name.revision!r} is")
        return commit, [self._file(name, each) for each in info.siblings or []]

    def _file(self, name: HubName, sibling: Any) -> HubFile:
        """A file as the Hub describes it; what it does not say is not checked."""
        lfs = sibling.lfs
        sha256 = None if lfs is None else lfs["sha256"] if isinstance(lfs, dict) else lfs.sha256
        try:
            return msgspec.convert((sibling.rfilename, sibling.size, sha256, sibling.blob_id or None), HubFile)
        except msgspec.ValidationError:
            listed = clip(repr(sibling.rfilename), 100)
            problem = f"{self.endpoint} lists {listed} of {name.repo} with a name, size or hash that is none"
            raise DownloadFailed(f"{problem}; {_ANOTHER}") from None

    def _wanted(self, name: HubName, commit: str, there: list[HubFile]) -> list[HubFile]:
        """The files that a model is served from. Those of them that name others are downloaded for that."""
        return wanted_files(name, there, lambda file: self._read(name, commit, file))

    def _read(self, name: HubName, commit: str, file: HubFile) -> Any:
        """What a JSON file holds, which is downloaded if it is not here."""
        folder = self.cache.snapshot(name.repo, commit)
        if (file.size or 0) > MAX_JSON_BYTES:
            problem = f"{file.name} of {name.repo} has {file.size} bytes"
            raise UnsupportedModel(f"{problem}, more than the {MAX_JSON_BYTES} that are read")
        if not is_here(folder / file.name, file):
            self._get(name, commit, file)
        self._check(name, folder, [file])
        return read_json(folder / file.name)

    def _download(self, name: HubName, commit: str, files: list[HubFile]) -> Kept:
        folder = self.cache.snapshot(name.repo, commit)
        missing = [file for file in files if not is_here(folder / file.name, file)]
        # A file that another commit has too is only linked.
        downloads = [file for file in missing if not self.cache.has(name.repo, file)]
        size = _total(downloads) - sum(self.cache.begun(name.repo, file) for file in downloads)
        wanted = _total(files)
        about = f"{name} ({commit[:12]}): {len(files)} files, {gigabytes(wanted)}"
        self._say(f"{about}, of which {gigabytes(size)} are to be downloaded to {self.cache.folder}")
        if downloads and (free := free_bytes(self.cache.folder)) < size + _SPARE_BYTES:
            problem = f"there is no room for {gigabytes(size)} in {self.cache.folder}, where {gigabytes(free)} are free"
            raise DownloadFailed(f"{problem}; {_MAKE_ROOM}")
        # First what it is: nobody waits for gigabytes that can't be served.
        config = next((file for file in files if file.name == "config.json"), None)
        if config is not None:
            refuse_known(self._read(name, commit, config))
        for file in missing:
            if file is not config:
                self._get(name, commit, file)
        self._check(name, folder, files)
        try:
            return self.cache.add(name, commit, files)
        except OSError as error:
            problem = f"{self.cache.folder} can't be written to ({error.strerror or error})"
            self._say(f"{problem}, so {name} is served, and asked about and checked anew at each start")
            return self.cache.without_note(name, commit, files)

    def _get(self, name: HubName, commit: str, file: HubFile) -> None:
        """Download one file, going on after broken connections, and no more of it than the Hub said there is.

        Not by `hf_hub_download`, which names files by what the Hub answers, and takes as many bytes as come.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

        def write(path: Path) -> None:
            url = hf_hub_url(name.repo, file.name, revision=commit, endpoint=self.endpoint)
            with _Bounded(path, *self._bound(name, file)) as opened:
                self._receive(url, opened, name, file)

        again = "files that came whole are kept, and the same command goes on with the others"
        if file.goes_on:
            again = "what came is kept, and the same command goes on from there"
        try:
            self.cache.put(name.repo, commit, file, write)
        except DownloadFailed:
            raise
        except KeyboardInterrupt:
            # Whoever takes it for the end of the command has this to say of it.
            raise KeyboardInterrupt(f"stopped; {again}") from None
        except GatedRepoError:
            raise DownloadFailed(self._gated(name)) from None
        except HfHubHTTPError as error:
            status = error.response.status_code
            problem = f"{self.endpoint} answers {status} to {file.name} of {name.repo}{_way_out(status)}"
            raise DownloadFailed(f"{problem}; {again}") from error
        except Exception as error:
            raise DownloadFailed(f"{file.name} of {name.repo} did not come whole: {error}; {again}") from error

    def _receive(self, url: str, opened: "_Bounded", name: HubName, file: HubFile) -> None:
        """Have what is missing of an opened file, over as many connections as bring something.

        The library takes up some that break, and not those that are reset.
        """
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        while (begin := opened.tell()) != file.size:
            try:
                http_get(url, opened, resume_size=begin, headers=build_hf_headers(), displayed_filename=file.name)
                return
            except HfHubHTTPError as error:
                if not begin or file.size is None or error.response.status_code != _NOT_THAT_LONG:
                    raise
                problem = f"{self.endpoint} has less of {file.name} of {name.repo} than the {file.size} bytes"
                raise DownloadFailed(f"{problem} it told of; {_ANOTHER}") from None
            except Exception as error:
                if opened.tell() <= begin or not _is_of_network(error):
                    raise

    def _bound(self, name: HubName, file: HubFile) -> tuple[int, str]:
        """How many bytes of a file are taken, and what to say if more come."""
        if file.size is not None:
            problem = f"{self.endpoint} sends more of {file.name} of {name.repo} than the {file.size} bytes it told of"
            return file.size, f"{problem}; {_ANOTHER}"
        problem = f"{self.endpoint} does not say how long {file.name} of {name.repo} is, and there is no room for it"
        problem = f"{problem} in {self.cache.folder}; {_MAKE_ROOM}"
        return free_bytes(self.cache.folder) - _SPARE_BYTES, problem

    def _check(self, name: HubName, folder: Path, files: list[HubFile]) -> None:
        """Hold the files against their sizes and hashes; what differs is removed."""
        wrong = []
        with tqdm(total=_total(files), desc="check", unit="B", unit_scale=True, leave=False) as bar:
            for file in files:
                if not _is_right(folder / file.name, file, bar):
                    self._discard(name, folder / file.name)
                    wrong.append(file.name)
        if wrong:
            problem = f"{', '.join(wrong)} of {name.repo} came otherwise than {self.endpoint} says they are"
            raise DownloadFailed(f"{problem}; they were removed, and the same command downloads them anew")

    def _discard(self, name: HubName, path: Path) -> None:
        try:
            self.cache.discard(name.repo, path)
        except OSError as error:
            problem = f"{path} is otherwise than {self.endpoint} says it is, and can't be removed: {error.strerror}"
            raise DownloadFailed(f"{problem}; remove it, or set HF_HUB_CACHE to another folder") from None

    def _gated(self, name: HubName) -> str:
        page = f"{self.endpoint}/{name.repo}"
        return f"{name.repo} is given only to those who accepted its conditions: do so at {page}, and set HF_TOKEN"


class _Bounded(io.BufferedWriter):
    """A file, at the end of what it has, that takes so many bytes in all, and raises DownloadFailed with what to say of
    more."""

    def __init__(self, path: Path, most: int, problem: str) -> None:
        # By its number: what has a name is written by hf_transfer, without us, where older versions are told to.
        super().__init__(io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w"))
        self.seek(0, os.SEEK_END)
        self._most, self._problem = most, problem

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > self._most:
            raise DownloadFailed(self._problem)
        return super().write(data)


def _way_out(status: int) -> str:
    """What to do about an answer of this status, if anything is known to help."""
    if status in (401, 403):
        return f"; {_TOKEN}"
    return f"; try again later, or {_ANOTHER}" if status == 429 or status >= 500 else ""


def _is_of_network(error: Exception) -> bool:
    """Whether an error may be one of a connection: neither ours nor that of a file, as where a disk is full."""
    is_of_file = isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError)
    return not (isinstance(error, DownloadFailed) or is_of_file)


def _total(files: list[HubFile]) -> int:
    """The bytes of all files whose size is known."""
    return sum(file.size or 0 for file in files)


def _is_right(path: Path, file: HubFile, bar: "tqdm[Any]") -> bool:
    """Whether a file is what it should be, by its size and its hash."""
    if not is_here(path, file):
        return False
    if file.sha256 is not None:
        return _hash(path, hashlib.sha256(), bar) == file.sha256
    if file.git_sha1 is not None:
        return _hash(path, hashlib.sha1(b"blob %d\0" % path.stat().st_size), bar) == file.git_sha1
    return True


def _hash(path: Path, hashed: Any, bar: "tqdm[Any]") -> str:
    with path.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            hashed.update(chunk)
            bar.update(len(chunk))
    return str(hashed.hexdigest())
