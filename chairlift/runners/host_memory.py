"""The memory of the machine, or of the container, that this process runs in."""

import os
from pathlib import Path

from chairlift.runners.host_cpus import control_groups

_NO_LIMIT = 2**62
# The files of a group with its limit and what it uses, and what its statistics say of all groups within: v2, and v1.
_FILES = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))


def host_available_bytes() -> int:
    """Memory that can still be had without pushing anything out, in bytes."""
    return min(_host_bytes(), _cgroup_bytes())


def process_bytes(pid: int) -> int:
    """The most memory that a process has had so far, in bytes; 0 if that can't be told."""
    return _kilobytes(Path(f"/proc/{pid}/status"), "VmHWM:") * 1024


def _host_bytes() -> int:
    available = _kilobytes(Path("/proc/meminfo"), "MemAvailable:") * 1024
    return available or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_bytes() -> int:
    """What the limits of a container or a service leave; without any, more than any machine has."""
    return min(map(_left, control_groups("memory")), default=_NO_LIMIT)


def _left(group: Path) -> int:
    """What a group's own limit leaves. The files that the kernel still has in memory make room when it is wanted."""
    for most, now, prefix in _FILES:
        try:
            limit, used = (int((group / name).read_text()) for name in (most, now))
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = int(stat[f"{prefix}active_file"]) + int(stat[f"{prefix}inactive_file"])
        except (OSError, ValueError, KeyError):
            continue
        return min(max(limit - max(used - cached, 0), 0), _NO_LIMIT)
    return _NO_LIMIT


def _kilobytes(path: Path, name: str) -> int:
    """What a file of /proc says of something, or 0."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
