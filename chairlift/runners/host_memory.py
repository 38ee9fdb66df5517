"""The memory of the machine, or of the container, that this process runs in."""

import os
from pathlib import Path

from chairlift.runners.host_cpus import control_groups

_NO_LIMIT = 2**62


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
    """What the limits of a container or a service leave (cgroup v2); without any, more than any machine has."""
    return min(map(_left, control_groups()), default=_NO_LIMIT)


def _left(group: Path) -> int:
    """What a group's own limit leaves. The files that the kernel still has in memory make room when it is wanted."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat["active_file"]) + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return _NO_LIMIT
    return max(limit - max(used - cached, 0), 0)


def _kilobytes(path: Path, name: str) -> int:
    """What a file of /proc says of something, or 0."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
