"""A server of a model that is to be measured, and what its processes use."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.config.settings import ENV_PREFIX
from chairlift.own_server import OwnServer, own_server
from chairlift.plan.as_copied import as_flags
from chairlift.plan.case import changed

# Under this name a model is served to be measured.
MEASURED = "measured"
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


@contextmanager
def measured_server(config: SequenceConfig | ItemConfig) -> Iterator[OwnServer]:
    """Serve a model with these settings, whatever a file and variables say, which have had their say before."""
    # What was fetched in a revision is a folder, which has none.
    settings = {name: value for name, value in changed(config).items() if name != "revision"}
    flags = [*as_flags(settings), "--served-model-name", MEASURED, "--config", os.devnull]
    if isinstance(config, ItemConfig):
        flags += ["--kind", config.kind]
    names = SequenceConfig.__struct_fields__ + ItemConfig.__struct_fields__
    unset = {f"{ENV_PREFIX}{name.upper()}": "" for name in names}
    with own_server(config.model, flags, {**unset, f"{ENV_PREFIX}LOG_LEVEL": "error"}) as server:
        yield server


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, its threads included; 0 where nobody tells."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_bytes(pid: int) -> int:
    """Memory of a process and of those that it has begun; 0 where nobody tells."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except OSError:
        return 0
    return own + sum(resident_bytes(int(child)) for child in children)
