"""How much memory and how many processors there are, by the files of a control group."""

import os
from pathlib import Path

import pytest
import torch

from chairlift.runners import host_cpus, host_memory, threads


def group(folder: Path, limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\nfile {cached}\ninactive_file {cached - 10}\nactive_file 10\n")


def test_a_limit_leaves_what_is_not_used_but_for_files_that_are_only_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    monkeypatch.setattr(host_cpus, "_OWN_GROUP", own)
    monkeypatch.setattr(host_cpus, "_GROUPS", tmp_path / "groups")
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


def test_the_limits_of_cgroup_v1_hold_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cpus, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(host_cpus, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    # A container sees its own group as the root, though its path is that of the host.
    own = "9:memory:/docker/1:2\n4:cpuacct,cpu:/docker/1:2\n1:name=systemd:/docker/1:2\n0::/elsewhere\n"
    (tmp_path / "own").write_text(own)
    cpu, memory = tmp_path / "groups" / "cpu", tmp_path / "groups" / "memory"
    for folder in (cpu, memory, cpu / "docker" / "1:2", memory / "docker" / "1:2"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.cfs_quota_us").write_text("-1\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
        (folder / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
        (folder / "memory.usage_in_bytes").write_text("900\n")
        statistics = "active_file 1\ninactive_file 2\ntotal_active_file 10\ntotal_inactive_file 590\n"
        (folder / "memory.stat").write_text(statistics)
    assert (host_cpus.usable_cpus(), host_memory._cgroup_bytes()) == (8, host_memory._NO_LIMIT)
    (cpu / "cpu.cfs_quota_us").write_text("250000\n")
    (memory / "memory.limit_in_bytes").write_text("1000\n")
    assert (host_cpus.usable_cpus(), host_memory._cgroup_bytes()) == (3, 700)
    (cpu / "docker" / "1:2" / "cpu.cfs_quota_us").write_text("50000\n")
    (memory / "docker" / "1:2" / "memory.limit_in_bytes").write_text("800\n")
    assert (host_cpus.usable_cpus(), host_memory._cgroup_bytes()) == (1, 500)


@pytest.fixture
def cpu_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process that is in a group within a group, and may run on eight processors."""
    (tmp_path / "own").write_text("0::/outer/inner\n")
    folder = tmp_path / "groups" / "outer" / "inner"
    folder.mkdir(parents=True)
    monkeypatch.setattr(host_cpus, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(host_cpus, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    return folder


def test_processors_are_those_it_may_run_on_and_no_more_than_its_groups_have_time_of(
    cpu_groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host_cpus.usable_cpus() == 8
    (cpu_groups / "cpu.max").write_text("max 100000\n")
    assert host_cpus.usable_cpus() == 8
    (cpu_groups / "cpu.max").write_text("350000 100000\n")
    assert host_cpus.usable_cpus() == 4
    (cpu_groups.parent / "cpu.max").write_text("20000 100000\n")
    assert host_cpus.usable_cpus() == 1
    # As on macOS, which has neither groups nor the call.
    monkeypatch.setattr(host_cpus, "_OWN_GROUP", cpu_groups / "none")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert host_cpus.usable_cpus() == 12


def test_a_model_takes_no_more_threads_than_it_has_time_for(cpu_groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    threads.set_threads(None)
    assert taken == [], "torch's own number stands where nothing limits it"
    (cpu_groups / "cpu.max").write_text("150000 100000\n")
    threads.set_threads(None)
    threads.set_threads(6)
    assert taken == [2, 6]
