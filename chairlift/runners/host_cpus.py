"""The processors of the machine, or of the container, that this process may use. Imports nothing: setup.py reads it."""

import os
from pathlib import Path

_OWN_GROUP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """How many processors this process can keep busy: those it may run on, or fewer where its time is limited."""
    # Only Linux has the call.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in control_groups() if (quota := _quota(group)) is not None]
    return max(min([allowed, *quotas]), 1)


def control_groups() -> list[Path]:
    """The folders of the groups that this process is in, its own first (cgroup v2); none where there are none."""
    try:
        own = next(line[3:] for line in _OWN_GROUP.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    group = _GROUPS / own.strip().lstrip("/")
    return [group, *group.parents]


def _quota(group: Path) -> int | None:
    """The processors whose time a group's own limit comes to, a part of one counted as one; None without a limit."""
    try:
        most, period = (group / "cpu.max").read_text().split()
        return -(-int(most) // int(period))
    except (OSError, ValueError):  # "max" is no number
        return None
