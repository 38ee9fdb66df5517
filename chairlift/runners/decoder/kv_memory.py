"""How much memory the KV cache may take."""

import os
from pathlib import Path

import torch

from chairlift.config.sequences import SequenceConfig
from chairlift.errors import ConfigError

_GB = 2**30
_DEFAULT_GB = 4
_SHARE = 0.4


def num_kv_blocks(config: SequenceConfig, max_model_len: int, bytes_per_token: int, device: torch.device) -> int:
    """Return how many blocks of `block_size` tokens the KV cache gets.

    With n = ceil(max_model_len / block_size), the blocks of one longest sequence, and B = bytes_per_token * block_size:

        kv_cache_gb given:  floor(kv_cache_gb * 2^30 / B)
        kv_cache_gb unset:  min(slots * n, floor(0.4 * available memory / B), max(floor(4 GiB / B), n))

    Raises ConfigError naming what to change if that is fewer than n.
    """
    per_block = bytes_per_token * config.block_size
    longest = -(-max_model_len // config.block_size)
    if config.kv_cache_gb is not None:
        blocks = int(config.kv_cache_gb * _GB / per_block)
        limit = f"kv_cache_gb={config.kv_cache_gb:g}"
    else:
        free = available_bytes(device)
        enough = max(_DEFAULT_GB * _GB // per_block, longest)
        blocks = min(config.slots * longest, int(_SHARE * free / per_block), enough)
        limit = f"{_SHARE:.0%} of the {free / _GB:.1f} GiB of memory that are free"
    if blocks < longest:
        raise ConfigError(
            f"the KV cache of one sequence of max_model_len={max_model_len} tokens takes "
            f"{longest * per_block / _GB:.3g} GiB, more than {limit}; lower max_model_len or raise kv_cache_gb"
        )
    return blocks


def available_bytes(device: torch.device) -> int:
    """Memory that can still be had on the device without pushing anything out, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_host_bytes(), _cgroup_bytes())


def _host_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_bytes() -> int:
    """What a container's limit leaves (cgroup v2); without a limit, more than any machine has."""
    root = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((root / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return 2**62
    return max(limit - used, 0)
