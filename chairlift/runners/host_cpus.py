"""The processors of the machine, or of the container, that this process may use. Imports nothing: setup.py reads it."""

import os
from pathlib import Path

_OWN_GROUP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """How many processors this process can keep busy: those it may run on, or fewer where its time is limited."""
    # Only Linux has the call.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in control_groups("cpu") if (quota := _quota(group)) is not None]
    return max(min([allowed, *quotas]), 1)


def control_groups(controller: str) -> list[Path]:
    """The folders of the groups that limit this process's "cpu" or "memory", inner ones first; none without groups.

    In cgroup v2 one tree has all controllers, and its line names none. In v1 each has a tree of its own, and a host may
    have both kinds.
    """
    try:
        lines = _OWN_GROUP.read_text().splitlines()
    except OSError:
        return []
    groups = []
    for _, controllers, own in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if not controllers or controller in controllers.split(","):
            # Where one tree of v1 has several controllers, there are links to it by the name of each.
            group = (_GROUPS / controller if controllers else _GROUPS) / own.strip().lstrip("/")
            groups += [group, *group.parents]
    return groups


def _quota(group: Path) -> int | None:
    """The processors whose time a group's own limit comes to, a part of one counted as one; None without a limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # cgroup v2, and v1
        try:
            most, period = " ".join((group / name).read_text() for name in names).split()
            quota = -(-int(most) // int(period))
        except (OSError, ValueError):  # no such file, or "max", as v2 says for no limit
            continue
        # v1 says -1 for no limit.
        return quota if quota > 0 else None
    return None
