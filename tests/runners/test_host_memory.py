"""How much memory there is, by the files of a control group."""

from pathlib import Path

import pytest

from chairlift.runners import host_memory


def group(folder: Path, limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\nfile {cached}\ninactive_file {cached - 10}\nactive_file 10\n")


def test_a_limit_leaves_what_is_not_used_but_for_files_that_are_only_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    monkeypatch.setattr(host_memory, "_OWN_GROUP", own)
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path / "groups")
    assert host_memory._cgroup_bytes() == host_memory._NO_LIMIT
    own.write_text("3:cpu:/elsewhere\n0::/system.slice/chairlift.service\n")
    assert host_memory._cgroup_bytes() == host_memory._NO_LIMIT
    group(tmp_path / "groups" / "system.slice" / "chairlift.service", "1000", 900, 600)
    assert host_memory._cgroup_bytes() == 700
    # What is around it has a limit of its own; a container is the root of what it sees.
    group(tmp_path / "groups" / "other", "max", 900, 600)
    (tmp_path / "groups" / "system.slice" / "memory.max").write_text("max\n")
    assert host_memory._cgroup_bytes() == 700
    own.write_text("0::/\n")
    for path in (tmp_path / "groups" / "other").iterdir():
        (tmp_path / "groups" / path.name).write_text(path.read_text())
    assert host_memory._cgroup_bytes() == host_memory._NO_LIMIT
    (tmp_path / "groups" / "memory.max").write_text("800")
    assert host_memory._cgroup_bytes() == 500
