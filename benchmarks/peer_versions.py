"""Which version of each peer is measured, asked of its own interpreter or binary, for the raw results."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

# A module may come by a package of another name, as vLLM does for CPUs.
_ASK = (
    "import importlib.metadata as m, sys; name = sys.argv[1]; "
    "print(m.version(m.packages_distributions().get(name, [name])[0]))"
)
UNKNOWN = "version unknown"


def package_versions(wanted: Mapping[str, tuple[str | Path | None, str]]) -> dict[str, str]:
    """By the name of each peer the version of its package or module, of those whose interpreter is given."""
    return {
        name: _said([str(python), "-c", _ASK, package]) or UNKNOWN
        for name, (python, package) in wanted.items()
        if python
    }


def binary_version(binary: str) -> str:
    """What a binary says to --version, in a line; llama-server adds the compiler it was built with."""
    return "; ".join(line.strip() for line in _said([binary, "--version"]).splitlines() if line.strip()) or UNKNOWN


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    # llama-server says it on the error stream.
    return "" if done.returncode else (done.stdout.strip() or done.stderr.strip())
