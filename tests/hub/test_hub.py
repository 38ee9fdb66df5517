"""Models by their names on the Hub: what is downloaded, what is refused, and that nothing half-written is served."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save
from support.fake_hub import FakeHub, FakeRepo
from support.gguf_files import gguf_file

from chairlift import LLM, SamplingParams
from chairlift.cli import main
from chairlift.config.settings import load
from chairlift.demo import demo_path
from chairlift.errors import ConfigError, DownloadFailed, UnsupportedModel
from chairlift.folders.tensor_files import GGUF_WEIGHTS
from chairlift.gguf.gguf_tensors import GgufTensors
from chairlift.hub import download
from chairlift.hub.cache import HubCache
from chairlift.hub.download import Hub
from chairlift.hub.name import HubName, hub_name
from chairlift.hub.wanted import HubFile, wanted_files

NAME = HubName("org/demo")
NEEDED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def repo() -> FakeRepo:
    """The demo model, and what a repository has beside a model."""
    made = FakeRepo.of(demo_path())
    made.files |= {
        "README.md": b"hello",
        "pytorch_model.bin": b"pickle",
        "modeling_demo.py": b"raise SystemExit",
        "consolidated.safetensors": b"twice",
        "onnx/model.onnx": b"graph",
        "onnx/model.onnx_data": b"weights",
        "demo-Q4_K_M.gguf": b"GGUF",
    }
    return made


@pytest.fixture
def hub(repo: FakeRepo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub({NAME.repo: repo}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def said() -> tuple[Hub, list[str]]:
    lines: list[str] = []
    return Hub(lines.append), lines


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("org/repo:model-Q4_0.gguf", HubName("org/repo", "model-Q4_0.gguf")),
        ("org/repo:onnx/model.onnx", HubName("org/repo", "onnx/model.onnx")),
        *[
            (text, None)
            for text in ("model", "./a/b", "/a/b", "a/b/c", "a/../b", "a/b:c.bin", "a--b/c", "a/b:../c.onnx")
        ],
        *[
            (text, None)
            for text in ("", "/", "a/", "http://a/b", "a/b\n", "module:Class", "x/y.py:Class", "a/" + 97 * "b")
        ],
    ],
)
def test_names(text: str, name: HubName | None) -> None:
    assert hub_name(text) == name


def test_a_model_is_downloaded_once_with_only_what_it_needs(hub: FakeHub, repo: FakeRepo) -> None:
    client, lines = said()
    kept = client.fetch(NAME)
    there = {path.relative_to(kept.path).as_posix() for path in kept.path.rglob("*") if path.is_file()}
    assert there == {name for name in repo.files if name.endswith((".json", ".jinja"))} | {"model.safetensors"}
    assert there >= NEEDED
    assert all((kept.path / name).read_bytes() == repo.files[name] for name in there)
    # The size is said before anything comes.
    assert "MB" in lines[0]
    assert str(client.cache.folder) in lines[0]
    downloads = list(hub.downloads)
    assert set(downloads) == there
    assert client.fetch(NAME) == kept
    assert hub.downloads == downloads


def test_a_family_that_is_refused_is_refused_before_its_weights_come(hub: FakeHub, repo: FakeRepo) -> None:
    repo.files["config.json"] = b'{"model_type": "zamba", "vocab_size": 100}'
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="model_type 'zamba' is not supported: it has layers"):
            said()[0].fetch(NAME)
    assert hub.downloads == ["config.json"]


def test_a_newer_commit_is_downloaded_and_an_old_one_asked_for_by_name(hub: FakeHub, repo: FakeRepo) -> None:
    client, _ = said()
    old = client.fetch(NAME)
    repo.files["generation_config.json"] = b'{"temperature": 0.5}'
    repo.commit, before = "f" * 40, repo.commit
    new = client.fetch(NAME)
    assert new.commit == repo.commit
    assert json.loads((new.path / "generation_config.json").read_text()) == {"temperature": 0.5}
    assert hub.downloads.count("model.safetensors") == 1
    assert old.commit == before
    with pytest.raises(DownloadFailed, match="org/demo has no revision 'v9'"):
        client.fetch(NAME._replace(revision="v9"))
    assert client.fetch(NAME._replace(revision=repo.commit)).path == new.path


def test_what_a_newer_commit_has_in_common_takes_no_room(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, lines = said()
    client.fetch(NAME)
    downloads = list(hub.downloads)
    repo.commit = "f" * 40
    monkeypatch.setattr(download, "free_bytes", lambda folder: 2**28 + 1000)
    assert client.fetch(NAME).commit == repo.commit
    assert hub.downloads == downloads
    assert "of which 0 bytes are to be downloaded" in lines[-1]


def test_what_is_whole_is_served_from_a_cache_that_takes_nothing(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, lines = said()
    kept = client.fetch(NAME)
    notes = kept.path.parents[1] / "chairlift"
    shutil.rmtree(notes)
    notes.write_text("no folder can be made here")
    monkeypatch.setattr(download, "free_bytes", lambda folder: 0)
    again = client.fetch(NAME)
    assert (again.path, again.size) == (kept.path, kept.size)
    assert "can't be written to (File exists), so org/demo is served" in lines[-1]
    # What is not as the Hub has it is still not served, and can't be replaced.
    repo.lies.add("config.json")

    def refuse(repo: str, file: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(client.cache, "discard", refuse)
    with pytest.raises(DownloadFailed, match=r"config.json is otherwise than .* can't be removed: Read-only file"):
        client.fetch(NAME)


def test_where_a_newer_commit_does_not_come_the_one_that_is_here_is_served(hub: FakeHub, repo: FakeRepo) -> None:
    client, lines = said()
    old = client.fetch(NAME)
    repo.commit, repo.files["model.safetensors"] = "f" * 40, repo.files["model.safetensors"] + b"more"
    repo.breaks = Counter({"model.safetensors": 10_000})
    assert client.fetch(NAME) == old
    assert "did not come whole" in lines[-1]
    assert "what was downloaded before is served" in lines[-1]


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_of_downloads_that_are_killed_one_file_is_left_and_no_more(hub: FakeHub, repo: FakeRepo, known: bool) -> None:
    """It is gone on from where a hash tells in the end whether it is right, and made anew elsewhere."""
    client, _ = said()
    tried: list[Path] = []
    found: list[bytes] = []

    def write(path: Path) -> None:
        found.append(path.read_bytes() if path.exists() else b"")
        path.write_bytes(b"half")
        os.link(path, path.with_name("as a killed process leaves it"))
        tried.append(path)
        raise ConnectionError

    file = HubFile("model.safetensors", 100, "a" * 64 if known else None, None)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            client.cache.put(NAME.repo, "f" * 40, file, write)
        tried[0].unlink(missing_ok=True)
        os.replace(tried[0].with_name("as a killed process leaves it"), tried[0])
    assert tried[0] == tried[1]
    assert found == [b"", b"half" if known else b""]
    # What is longer than the file should be is no part of it.
    tried[0].write_bytes(bytes(101))
    with pytest.raises(ConnectionError):
        client.cache.put(NAME.repo, "f" * 40, file, write)
    assert found[2] == b""


def test_without_the_hub_what_is_here_whole_is_served(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = said()
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(DownloadFailed, match="HF_HUB_OFFLINE is set, and org/demo is not here whole"):
            said()[0].fetch(NAME)
    kept = client.fetch(NAME)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    other, lines = said()
    assert other.fetch(NAME) == kept
    assert "can't be reached" in lines[0]
    assert "what was downloaded before is served" in lines[0]
    with pytest.raises(DownloadFailed, match=r"can't be reached .*HF_ENDPOINT names a mirror"):
        other.fetch(HubName("org/other"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert said()[0].fetch(NAME) == kept
    # One file less, and it is not whole.
    (kept.path / "tokenizer.json").unlink()
    with pytest.raises(DownloadFailed, match="not here whole"):
        said()[0].fetch(NAME)


def test_broken_connections_are_taken_up_where_they_ended(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is not a whole chunk is asked for again.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)
    repo.breaks = Counter({"model.safetensors": 2})
    kept = said()[0].fetch(NAME)
    assert (kept.path / "model.safetensors").read_bytes() == repo.files["model.safetensors"]
    assert any(each.startswith("model.safetensors bytes=") for each in hub.ranges)


def test_one_that_breaks_for_ever_says_so_and_goes_on_later(hub: FakeHub, repo: FakeRepo) -> None:
    repo.breaks = Counter({"model.safetensors": 10_000})
    client, _ = said()
    with pytest.raises(
        DownloadFailed, match=r"model\.safetensors of org/demo did not come whole: .*goes on from there"
    ):
        client.fetch(NAME)
    assert client.cache.find(NAME) is None
    repo.breaks.clear()
    assert client.fetch(NAME).size > 0


def test_connections_that_are_reset_are_taken_up_where_they_ended(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other than those that end, the library leaves these."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)
    repo.resets = Counter({"model.safetensors": 2})
    kept = said()[0].fetch(NAME)
    assert (kept.path / "model.safetensors").read_bytes() == repo.files["model.safetensors"]
    assert [each.partition("=")[0] for each in hub.ranges] == ["model.safetensors bytes"] * 2


def broken_off(hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is left of weights whose connections were reset until nothing came any more."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)
    repo.resets = Counter({"model.safetensors": 10_000})
    client, _ = said()
    with pytest.raises(DownloadFailed, match=r"model\.safetensors of org/demo did not come whole: .* from there"):
        client.fetch(NAME)
    assert client.cache.find(NAME) is None
    assert client.cache.all() == []
    repo.resets.clear()
    hub.ranges.clear()
    (left,) = client.cache.folder.rglob("*.incomplete")
    return left


def test_a_download_that_broke_off_goes_on_from_there(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = broken_off(hub, repo, monkeypatch)
    size, whole = left.stat().st_size, repo.files["model.safetensors"]
    assert len(whole) > size > len(whole) // 2
    assert left.read_bytes() == whole[:size]
    # There is room for the rest, and no more.
    monkeypatch.setattr(download, "free_bytes", lambda folder: 2**28 + len(whole) - size + 1000)
    kept = said()[0].fetch(NAME)
    assert hub.ranges == [f"model.safetensors bytes={size}-"]
    assert (kept.path / "model.safetensors").read_bytes() == whole
    assert not left.exists()


def test_a_part_that_came_wrong_is_not_kept_for_ever(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = broken_off(hub, repo, monkeypatch)
    # Of the last one nothing more is asked for.
    for size in (left.stat().st_size, len(repo.files["model.safetensors"])):
        left.write_bytes(bytes(size))
        with pytest.raises(DownloadFailed, match=r"model\.safetensors of org/demo came otherwise than"):
            said()[0].fetch(NAME)
        assert not left.exists()
    assert said()[0].fetch(NAME).size > 0


def test_a_file_that_the_hub_has_less_of_is_begun_anew(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = broken_off(hub, repo, monkeypatch)
    repo.statuses = {"model.safetensors": 416}
    with pytest.raises(DownloadFailed, match=r"has less of model\.safetensors of org/demo than the \d+ bytes it told"):
        said()[0].fetch(NAME)
    assert not left.exists()


def test_what_came_of_a_model_is_removed_with_it(hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch) -> None:
    left = broken_off(hub, repo, monkeypatch)
    repo.commit, repo.files["model.safetensors"] = "f" * 40, b"another" * 100
    said()[0].fetch(NAME)
    assert left.exists()
    assert main(["remove", "org/demo"]) == 0
    assert not left.exists()


@pytest.mark.parametrize(
    ("status", "way_out"),
    [
        (401, "renew or unset HF_TOKEN"),
        (403, "renew or unset HF_TOKEN"),
        (429, "try again later, or set HF_ENDPOINT"),
        (503, "try again later, or set HF_ENDPOINT"),
    ],
)
def test_errors_of_the_hub_say_what_to_do(hub: FakeHub, repo: FakeRepo, status: int, way_out: str) -> None:
    repo.statuses = {"": status}
    with pytest.raises(DownloadFailed, match=f"answers {status} to what it is asked of org/demo; {way_out}"):
        said()[0].fetch(NAME)
    if status == 429:
        # The library asks for files again after a while.
        return
    repo.statuses = {"config.json": status}
    with pytest.raises(DownloadFailed, match=rf"answers {status} to config\.json of org/demo; {way_out}"):
        said()[0].fetch(NAME)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_what_is_not_what_the_hub_says_is_removed(hub: FakeHub, repo: FakeRepo, file: str) -> None:
    repo.lies = {file}
    client, _ = said()
    with pytest.raises(DownloadFailed, match=f"{file} of org/demo came otherwise than .* says"):
        client.fetch(NAME)
    assert client.cache.find(NAME) is None
    assert not (client.cache.snapshot(NAME.repo, repo.commit) / file).exists()
    repo.lies = set()
    kept = client.fetch(NAME)
    assert (kept.path / file).read_bytes() == repo.files[file]


def test_gated_and_unknown_models_say_what_to_do(hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch) -> None:
    repo.gated = True
    client, _ = said()
    with pytest.raises(DownloadFailed, match=f"accepted its conditions: do so at {hub.url}/org/demo, and set HF_TOKEN"):
        client.fetch(NAME)
    monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
    assert client.fetch(NAME).size > 0
    assert hub.leaks == []
    with pytest.raises(DownloadFailed, match="has no model 'org/none'"):
        client.fetch(HubName("org/none"))


def test_a_commit_is_no_path(hub: FakeHub, repo: FakeRepo) -> None:
    repo.commit = "../../../elsewhere"
    with pytest.raises(DownloadFailed, match="does not say which commit"):
        said()[0].fetch(NAME)
    assert hub.downloads == []


def called(path: Path) -> dict[str, str]:
    """Headers by which a hub names a file, as a path that it may be joined to."""
    return {"ETag": f'"{path}"', "X-Linked-ETag": f'"{path}"', "X-Repo-Commit": str(path)}


@pytest.mark.parametrize("lies", [False, True])
def test_what_is_answered_for_a_file_names_none(hub: FakeHub, repo: FakeRepo, tmp_path: Path, lies: bool) -> None:
    own = tmp_path / "own.txt"
    own.write_text("mine")
    repo.answers = {
        "config.json": called(tmp_path / "new.pth"),
        "tokenizer.json": called(Path("../../../new.pth")),
        "model.safetensors": called(own),
    }
    client, _ = said()
    if lies:
        repo.lies = {"model.safetensors"}
        with pytest.raises(DownloadFailed, match=r"model\.safetensors of org/demo came otherwise than .* says"):
            client.fetch(NAME)
    else:
        kept = client.fetch(NAME)
        there = [path for path in kept.path.rglob("*") if path.is_file()]
        assert all(path.resolve().is_relative_to(client.cache.folder.resolve()) for path in there)
        assert all(path.read_bytes() == repo.files[path.relative_to(kept.path).as_posix()] for path in there)
    assert set(tmp_path.iterdir()) == {own, client.cache.folder}
    assert own.read_text() == "mine"


def test_a_file_that_is_gone_names_none_either(hub: FakeHub, repo: FakeRepo, tmp_path: Path) -> None:
    repo.gone, repo.answers = {"config.json"}, {"config.json": called(tmp_path / "new")}
    client, _ = said()
    with pytest.raises(DownloadFailed, match=r"answers 404 to config\.json of org/demo"):
        client.fetch(NAME)
    assert set(tmp_path.iterdir()) == {client.cache.folder}


@pytest.mark.parametrize(
    "about",
    [
        {"blobId": "../../../new"},
        {"blobId": "0" * 40 + "\n"},
        {"lfs": {"sha256": "/new", "size": 1, "pointerSize": 1}},
        {"size": -1},
        {"size": "many"},
        {"rfilename": 5},
    ],
    ids=str,
)
def test_a_list_of_files_with_what_can_t_be_is_refused(hub: FakeHub, repo: FakeRepo, about: dict[str, Any]) -> None:
    repo.listed = {"config.json": about}
    with pytest.raises(DownloadFailed, match="of org/demo with a name, size or hash that is none; set HF_ENDPOINT"):
        said()[0].fetch(NAME)
    assert hub.downloads == []


def test_a_link_out_of_the_cache_is_removed_and_what_it_leads_to_is_not(
    hub: FakeHub, repo: FakeRepo, tmp_path: Path
) -> None:
    client, _ = said()
    kept = client.fetch(NAME)
    shutil.rmtree(kept.path.parents[1] / "chairlift")
    own, link = tmp_path / "own.json", kept.path / "config.json"
    own.write_bytes(bytes(len(repo.files["config.json"])))
    link.unlink()
    link.symlink_to(own)
    with pytest.raises(DownloadFailed, match=r"config\.json of org/demo came otherwise"):
        client.fetch(NAME)
    assert own.exists()
    assert not link.is_symlink()
    assert client.fetch(NAME).path == kept.path
    assert link.read_bytes() == repo.files["config.json"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_no_more_is_taken_than_the_hub_told_of(hub: FakeHub, repo: FakeRepo, name: str) -> None:
    repo.endless = {name}
    client, _ = said()
    size = len(repo.files[name])
    with pytest.raises(DownloadFailed, match=f"sends more of {name} of org/demo than the {size} bytes it told of"):
        client.fetch(NAME)
    assert not list(client.cache.folder.rglob("*.incomplete"))
    repo.endless = set()
    assert (client.fetch(NAME).path / name).read_bytes() == repo.files[name]


def test_check_refuses_a_repository_without_a_tokenizer(
    hub: FakeHub, repo: FakeRepo, capsys: pytest.CaptureFixture[str]
) -> None:
    del repo.files["tokenizer.json"]
    assert main(["check", "org/demo"]) == 1
    assert "org/demo can't be served: it has no tokenizer.json" in capsys.readouterr().out


def test_a_file_of_unknown_size_is_served_if_there_is_room(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = {"size": None, "blobId": None, "lfs": None}
    repo.listed = {"config.json": {"size": None}, "tokenizer.json": unknown, "model.safetensors": unknown}
    assert main(["check", "org/demo"]) == 0
    assert "the Hub does not say how long they are" in capsys.readouterr().out
    client, _ = said()
    with monkeypatch.context() as patch:
        repo.endless = {"model.safetensors"}
        patch.setattr(download, "free_bytes", lambda folder: 2**28 + 2**24)
        with pytest.raises(DownloadFailed, match=r"does not say how long model\.safetensors .*no room .*HF_HUB_CACHE"):
            client.fetch(NAME)
        assert not list(client.cache.folder.rglob("*.incomplete"))
        repo.endless = set()
    kept = client.fetch(NAME)
    assert all((kept.path / name).read_bytes() == repo.files[name] for name in NEEDED)
    assert kept.size == sum((kept.path / path).stat().st_size for path in kept.path.iterdir())
    downloads = list(hub.downloads)
    assert client.fetch(NAME) == kept
    assert hub.downloads == downloads


def test_no_room_is_noticed_before_anything_comes(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "free_bytes", lambda folder: 2**28 + 1000)
    with pytest.raises(DownloadFailed, match=r"there is no room for .* MB in .*HF_HUB_CACHE"):
        said()[0].fetch(NAME)
    assert hub.downloads == []


INDEX, MODULES = "model.safetensors.index.json", "modules.json"


def wanted(*names: str, file: str | None = None, contents: dict[str, Any] | None = None) -> list[str]:
    """Names of the files that a repository's model needs, whose index names all parts, or what it is said to hold."""
    parts = [name for name in names if name.endswith(".safetensors")]
    held = {INDEX: {"weight_map": {f"t{number}": name for number, name in enumerate(parts)}}} | (contents or {})
    files = wanted_files(HubName("o/m", file), [HubFile(name, 1) for name in names], lambda file: held[file.name])
    return [each.name for each in files]


def test_what_is_no_model_in_this_form_is_told(hub: FakeHub) -> None:
    with pytest.raises(UnsupportedModel, match=r"only pytorch_model\.bin, which can hold code.*save_file\("):
        wanted("config.json", "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"no config\.json.*it has a\.gguf.*as o/m:a\.gguf"):
        wanted("a.gguf", "README.md")
    with pytest.raises(UnsupportedModel, match=r"no model\.safetensors; it has a\.gguf, b\.onnx: .*as o/m:a\.gguf"):
        wanted("config.json", "b.onnx", "a.gguf")
    with pytest.raises(UnsupportedModel, match=r"no model\.safetensors, and no other weights"):
        wanted("config.json", "README.md")
    with pytest.raises(UnsupportedModel, match=r"no file 'b\.onnx'; of its kind it has a\.onnx"):
        wanted("a.onnx", file="b.onnx")
    parts = [f"m/x-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    assert wanted(*parts, "other.gguf", file=parts[0]) == [*parts[1:], parts[0]]
    with pytest.raises(UnsupportedModel, match=f"not the first of its parts: name {parts[0]}"):
        wanted(*parts, file=parts[1])
    with pytest.raises(UnsupportedModel, match="in 99999 parts, more than the 2000"):
        wanted("x-00001-of-99999.gguf", file="x-00001-of-99999.gguf")
    with pytest.raises(UnsupportedModel, match=f"has '{parts[0]}', but not its other part '{parts[2]}'"):
        wanted(*parts[:2], file=parts[0])
    with pytest.raises(UnsupportedModel, match="2003 files, more than the 2000"):
        wanted("config.json", INDEX, *(f"model-{i:05}-of-02001.safetensors" for i in range(2001)))
    # Names that lead elsewhere are no files of a model.
    assert wanted("config.json", "model.safetensors", "../up.json", "/etc/x.json", "a\\b.json", ".hidden.json") == [
        "config.json",
        "model.safetensors",
    ]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    named = {INDEX: {"weight_map": dict(zip("ab", shards, strict=True))}}
    others = ["original/model.safetensors", "model-00003-of-00003.safetensors"]
    assert wanted("config.json", INDEX, *shards, *others, contents=named) == ["config.json", INDEX, *shards]
    assert wanted("config.json", *shards, others[0]) == ["config.json", *shards]
    for there, problem in (
        (shards[1:], rf"has '{shards[1]}', but not its other part '{shards[0]}'"),
        (shards[:1], rf"has '{shards[0]}', but not its other part '{shards[1]}'"),
        ([*shards, others[1]], rf"has '{shards[0]}' and '{others[1]}', parts of different weights"),
        ([*shards, "model-00003-of-00002.safetensors"], "has 3 files that are called parts of 2"),
        (["model-0-of-0.safetensors"], "has 1 files that are called parts of 0"),
    ):
        with pytest.raises(UnsupportedModel, match=problem):
            wanted("config.json", *there)
    for shards in (
        ["model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"],
        ["model-1-of-1.safetensors"],
        # As Qwen 3.5 has them.
        ["model.safetensors-00001-of-00001.safetensors"],
        ["model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors"],
    ):
        assert wanted("config.json", *shards) == ["config.json", *shards]
    # As LongCat has them: it is the index that counts.
    parts = ["model_00001-of-00002.safetensors", "model_00002-of-00002.safetensors"]
    assert wanted("config.json", INDEX, *parts) == ["config.json", INDEX, *parts]
    for there, index, problem in (
        (parts[:1], {"weight_map": {"a": parts[0], "b": parts[1]}}, f"names '{parts[1]}', which is no file"),
        (["a.bin"], {"weight_map": {"a": "a.bin"}}, r"names 'a\.bin', which is no file of safetensors"),
        (parts, [], "has no readable weight_map"),
        (parts, {"weight_map": {"a": 1}}, "has no readable weight_map"),
    ):
        with pytest.raises(UnsupportedModel, match=problem):
            wanted("config.json", INDEX, *there, contents={INDEX: index})
    templates = ["additional_chat_templates/tool_use.jinja", "chat_template.jinja"]
    others = ["additional_chat_templates/a/b.jinja", "other/tool_use.jinja"]
    assert wanted("config.json", *templates, *others, "model.safetensors") == [
        templates[0],
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
    ]
    assert wanted("a.onnx", "a.onnx_data", "b.onnx", file="a.onnx") == ["a.onnx_data", "a.onnx"]


def test_what_modules_are_kept_in_is_said_by_their_list() -> None:
    bare = ["config.json", "model.safetensors", "vocab.txt", MODULES]
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "head", "Normalize": "3_Normalize"}
    listed = {MODULES: [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in paths.items()]}
    own = ["1_Pooling/config.json", "head/config.json", "head/model.safetensors"]
    there = [*bare, *own, "2_Other/config.json", "head/pytorch_model.bin"]
    assert set(wanted(*there, contents=listed)) == {*bare, *own}
    for lacking in own:
        with pytest.raises(UnsupportedModel, match=rf"o/m has no '{lacking}', which a \w+ module needs"):
            wanted(*(each for each in there if each != lacking), contents=listed)
    for held in ({}, None, [1], [{"path": "1_Pooling"}], [{"type": "x.Pooling", "path": 1}]):
        with pytest.raises(UnsupportedModel, match=r"modules\.json of o/m must be a list of modules"):
            wanted(*there, contents={MODULES: held or 1})


def test_the_index_is_downloaded_before_the_weights_it_names(hub: FakeHub, repo: FakeRepo) -> None:
    weights, part = repo.files.pop("model.safetensors"), "model_00001-of-00001.safetensors"
    repo.files |= {part: weights, INDEX: json.dumps({"weight_map": {"a": part, "b": "lost.safetensors"}}).encode()}
    client, _ = said()
    with pytest.raises(UnsupportedModel, match=r"index\.json of org/demo names 'lost\.safetensors', which is no file"):
        client.fetch(NAME)
    assert hub.downloads == [INDEX]
    repo.files[INDEX] = json.dumps({"weight_map": {"a": part}}).encode()
    repo.lies = {INDEX}
    with pytest.raises(DownloadFailed, match=r"index\.json of org/demo came otherwise"):
        client.fetch(NAME)
    assert part not in hub.downloads
    repo.lies = set()
    kept = client.fetch(NAME)
    assert (kept.path / part).read_bytes() == weights
    repo.listed = {INDEX: {"size": 2**40}}
    with pytest.raises(UnsupportedModel, match="has 1099511627776 bytes, more than the"):
        client.fetch(NAME)


def test_what_an_older_version_did_not_take_is_downloaded(hub: FakeHub, repo: FakeRepo) -> None:
    client, _ = said()
    kept = client.fetch(NAME)
    (note,) = client.cache.folder.glob("models--*/chairlift/*.json")
    noted = json.loads(note.read_text())
    del noted["files"]["tokenizer_config.json"]
    note.write_text(json.dumps(noted))
    (kept.path / "tokenizer_config.json").unlink()
    assert "tokenizer_config.json" not in Hub().cache.all()[0].files
    again = client.fetch(NAME)
    assert (again.path, again.files) == (kept.path, kept.files)
    assert (kept.path / "tokenizer_config.json").read_bytes() == repo.files["tokenizer_config.json"]


def test_what_the_system_does_not_show_is_told(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/cache/models--org--demo")

    for method in ("find", "all", "remove"):
        monkeypatch.setattr(HubCache, method, denied)
    for command in (["pull", "org/demo"], ["list"], ["remove", "org/demo"], ["check", "org/demo"]):
        assert main(command) == 1
        assert "/cache/models--org--demo can't be looked at: Permission denied" in capsys.readouterr().err


def test_check_guesses_the_memory_of_packed_weights(
    hub: FakeHub, repo: FakeRepo, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "org/demo"]) == 0
    assert "about" not in capsys.readouterr().out
    raw = json.loads(repo.files["config.json"]) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    repo.files["config.json"], repo.commit = json.dumps(raw).encode(), "f" * 40
    assert main(["check", "org/demo"]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["weights"].strip().startswith("about ")


def test_settings_and_the_library_take_names(hub: FakeHub, tmp_path: Path) -> None:
    found = load({"model": "org/demo"}, {}, tmp_path, "").models[0]
    assert (found.name, found.hub) == ("demo", "org/demo")
    assert Path(found.config.model).name == hub.repos["org/demo"].commit
    made = load({"model": "org/demo", "revision": "main", "served_model_name": "a"}, {}, tmp_path, "")
    assert made.models[0].name == "a"
    assert made.server.model_aliases == {"org/demo": "a"}
    (tmp_path / "chairlift.toml").write_text('[models.one]\nmodel = "org/demo"\nrevision = "v9"')
    with pytest.raises(ConfigError, match="as a name of the Hub: org/demo has no revision 'v9'"):
        load({}, {}, tmp_path, "")
    onnx = load({"model": "org/demo:onnx/model.onnx"}, {}, tmp_path / "elsewhere", "").models[0]
    assert onnx.name == "demo"
    assert Path(onnx.config.model).read_bytes() == b"graph"
    assert Path(f"{onnx.config.model}_data").read_bytes() == b"weights"
    with pytest.raises(UnsupportedModel, match="is no whole GGUF file"):
        load({"model": "org/demo:demo-Q4_K_M.gguf"}, {}, tmp_path / "elsewhere", "")
    parts = sorted(gguf_file("llama", "F32", 10).parent.glob("llama-F3210-*.gguf"))
    hub.repos["org/demo"].files |= {f"gguf/{part.name}": part.read_bytes() for part in parts}
    several = load({"model": f"org/demo:gguf/{parts[0].name}"}, {}, tmp_path / "elsewhere", "").models[0]
    assert len(GgufTensors(Path(several.config.model) / GGUF_WEIGHTS).keys()) == sum(
        len(gguf.GGUFReader(part).tensors) for part in parts
    )
    for folder in (str(demo_path()), "org/demo"):
        with pytest.raises(ConfigError, match="revision"):
            LLM(folder, revision="v9")
    output = LLM("org/demo").generate("hello", SamplingParams(max_tokens=2), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) <= 2


def test_what_stops_a_command_is_told_before_a_download(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    (tmp_path / "old.jsonl").write_text("precious")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        settings = tmp_path / "several.toml"
        settings.write_text(f'port = {port}\n[models.one]\nmodel = "org/demo"\n')
        for served in (("org/demo", "--port", port), (str(settings),)):
            assert main(["serve", *served]) == 1
            assert f"can't listen on 127.0.0.1 port {port}" in capsys.readouterr().err
    for given, out, says in (
        ("typo.jsonl", "out.jsonl", "typo.jsonl can't be read"),
        ("in.jsonl", "no/out.jsonl", "there is no folder"),
        ("in.jsonl", "old.jsonl", "--overwrite replaces it"),
    ):
        assert main(["run", str(tmp_path / given), "-o", str(tmp_path / out), "--model", "org/demo"]) == 1
        assert says in capsys.readouterr().err
    assert hub.downloads == []


def test_models_are_pulled_listed_and_removed(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert "nothing that `chairlift pull` downloaded" in capsys.readouterr().out
    assert main(["remove", "org/demo"]) == 1
    assert "org/demo is not in" in capsys.readouterr().err
    assert main(["pull", "org/demo"]) == 0
    assert main(["pull", "org/demo:onnx/model.onnx"]) == 0
    assert main(["pull", "demo"]) == 1
    assert "'demo' is no name of the Hub" in capsys.readouterr().err
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "org/demo", "org/demo:onnx/model.onnx"]
    assert main(["remove", "org/demo"]) == 0
    assert "org/demo: " in capsys.readouterr().out
    assert Hub().cache.all() == []
    assert not list(Path(constants.HF_HUB_CACHE).glob("models--*"))


def test_what_a_link_leads_to_is_not_removed(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, elsewhere = Path(constants.HF_HUB_CACHE) / "models--org--demo", tmp_path / "other disk"
    said()[0].fetch(NAME)
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    assert main(["remove", "org/demo"]) == 1
    assert f"is a link to {elsewhere}; remove both yourself" in capsys.readouterr().err
    assert (elsewhere / "blobs").is_dir()


def test_a_note_that_is_none_is_no_model(hub: FakeHub) -> None:
    client, _ = said()
    client.fetch(NAME)
    (note,) = client.cache.folder.glob("models--*/chairlift/*.json")
    for text in ("", "[]", '{"commit": 1, "files": {}}', '{"commit": "x", "files": {"config.json": 3}}'):
        note.write_text(text)
        assert client.cache.find(NAME) is None
        assert client.cache.all() == []


def chairlift(hub: FakeHub, cache: Path, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-m", "chairlift.cli", *arguments], env=env, text=True, stderr=subprocess.PIPE,
        stdout=subprocess.PIPE, **options
    )  # fmt: skip


@pytest.mark.processes
def test_ctrl_c_leaves_nothing_that_is_taken_for_whole(hub: FakeHub, repo: FakeRepo, tmp_path: Path) -> None:
    repo.slow = 0.02
    default = SimpleNamespace(start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    pulling = chairlift(hub, tmp_path / "cache", "pull", "org/demo", **vars(default))
    while "model.safetensors" not in hub.downloads and pulling.poll() is None:
        time.sleep(0.01)
    pulling.send_signal(signal.SIGINT)
    _, errors = pulling.communicate(timeout=60)
    assert pulling.returncode == 130, errors
    assert "chairlift: stopped; what came is kept" in errors
    assert "Traceback" not in errors
    assert Hub().cache.find(NAME) is None
    repo.slow = 0.0
    again = chairlift(hub, tmp_path / "cache", "pull", "org/demo")
    out, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
    assert "org/demo (0123456789ab)" in out
    assert Hub().cache.find(NAME) is not None


def test_parts_without_an_index_are_served_if_all_are_there(hub: FakeHub, repo: FakeRepo) -> None:
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    tensors = list(load_file(demo_path() / "model.safetensors").items())
    del repo.files["model.safetensors"]
    repo.files |= {part: save(dict(tensors[number::2])) for number, part in enumerate(parts)}
    lost = repo.files.pop(parts[1])
    with pytest.raises(UnsupportedModel, match=f"org/demo has '{parts[0]}', but not its other part '{parts[1]}'"):
        said()[0].fetch(NAME)
    assert hub.downloads == []
    repo.files[parts[1]] = lost
    assert main(["check", "org/demo"]) == 0
    outputs = [
        LLM(model).generate("hello", SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)[0].outputs[0]
        for model in ("org/demo", str(demo_path()))
    ]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert main(["check", str(said()[0].fetch(NAME).path)]) == 0


@pytest.mark.processes
def test_check_tells_of_a_name_without_its_weights(hub: FakeHub, repo: FakeRepo, tmp_path: Path) -> None:
    process = chairlift(hub, tmp_path / "cache", "check", "org/demo")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "writes texts" in out
    assert "bytes a token" in out
    assert "model.safetensors" not in hub.downloads
    shutil.rmtree(tmp_path / "cache")
    raw = json.loads(repo.files["config.json"]) | {"model_type": "mamba", "architectures": ["MambaModel"]}
    repo.files["config.json"] = json.dumps(raw).encode()
    process = chairlift(hub, tmp_path / "cache", "check", "org/demo")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "org/demo can't be served: model_type 'mamba' with architectures ['MambaModel']: none writes texts" in out
