"""The memory of the machine, or of the container, that this process runs in."""

import os
from pathlib import Path


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
    """What a container's limit leaves (cgroup v2); without a limit, more than any machine has."""
    root = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((root / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return 2**62
    return max(limit - used, 0)


def _kilobytes(path: Path, name: str) -> int:
    """What a file of /proc says of something, or 0."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
