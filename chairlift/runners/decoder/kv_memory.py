"""How much memory the KV cache may take."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from chairlift.config.sequences import SequenceConfig
from chairlift.errors import ConfigError
from chairlift.runners.error_text import one_line
from chairlift.runners.host_memory import host_available_bytes
from chairlift.runners.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    # `chairlift check` computes this too, and has no torch.
    import torch

_GB = 2**30
_DEFAULT_GB = 4
_SHARE = 0.4
# Snapshots kept for each slot. A request leaves up to three: where it parts from others, at its prompt's end and at its
# own end. Conversations come back after many others had their turn.
_SNAPSHOTS_A_SLOT = 64
_SNAPSHOT_SHARE, _SNAPSHOT_PART = 0.1, 0.25


def num_kv_blocks(
    config: SequenceConfig, max_model_len: int, bytes_per_token: int, free: int, snapshot_bytes: int = 0
) -> int:
    """Return how many blocks of `block_size` tokens the KV cache gets, where so many bytes are free beside the weights.

    With n = ceil(max_model_len / block_size), the blocks of one longest sequence, and B = bytes_per_token * block_size:

        kv_cache_gb given:  floor((kv_cache_gb * 2^30 - snapshot_bytes) / B)
        kv_cache_gb unset:  min(slots * n, floor(0.4 * free / B), max(enough, n))

    where enough is 2 * slots * ceil(expected_tokens / block_size) if it is said what requests are like, half of it for
    prefixes that are kept, and else floor(4 GiB / B). Raises ConfigError naming what to change if that is fewer than n.
    Where no layer has keys and values, B is 0 and blocks only count tokens: slots * n of them.
    """
    per_block = bytes_per_token * config.block_size
    longest = -(-max_model_len // config.block_size)
    if not per_block:
        return config.slots * longest
    if config.kv_cache_gb is not None:
        blocks = int((config.kv_cache_gb * _GB - snapshot_bytes) / per_block)
        limit = f"kv_cache_gb={config.kv_cache_gb:g}"
    else:
        enough = config.expected_blocks(config.block_size) or _DEFAULT_GB * _GB // per_block
        blocks = min(config.slots * longest, int(_SHARE * free / per_block), max(enough, longest))
        limit = f"{_SHARE:.0%} of the {free / _GB:.1f} GiB of memory that are free"
    if blocks < longest:
        raise ConfigError(
            f"the KV cache of one sequence of max_model_len={max_model_len} tokens takes "
            f"{longest * per_block / _GB:.3g} GiB, more than {limit}; lower max_model_len or raise kv_cache_gb"
        )
    return blocks


def free_beside_states(config: SequenceConfig, state_bytes: int, free: int) -> int:
    """Return what of so many free bytes is left beside the states of sequences that run.

    Each slot has two: one may have to go back by a token. Raises ConfigError where they do not fit.
    """
    held = 2 * config.slots * state_bytes
    if held > _SHARE * free:
        raise ConfigError(
            f"states of {config.slots} sequences, each twice {state_bytes / _GB:.3g} GiB, take more than {_SHARE:.0%} "
            f"of the {free / _GB:.1f} GiB of memory that are free; lower max_num_seqs"
        )
    return free - held


def num_state_snapshots(config: SequenceConfig, snapshot_bytes: int, free: int) -> int:
    """Return how many snapshots of states are kept, where each takes so many bytes, and so many are free.

    kv_cache_gb given:  min(64 * slots, floor(kv_cache_gb * 2^30 / 4 / snapshot_bytes))
    kv_cache_gb unset:  min(64 * slots, floor(0.1 * free / snapshot_bytes))

    None are, and 0 is returned, where prefixes are not cached.
    """
    if not config.enable_prefix_caching:
        return 0
    room = _SNAPSHOT_SHARE * free if config.kv_cache_gb is None else _SNAPSHOT_PART * config.kv_cache_gb * _GB
    return min(_SNAPSHOTS_A_SLOT * config.slots, int(room / snapshot_bytes))


@contextlib.contextmanager
def taking_kv_memory(size: int) -> Iterator[None]:
    """Have memory that runs out while so many bytes of KV cache are taken raise MemoryError, naming the setting."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = f"there is no room for a KV cache of {size / _GB:.3g} GiB; set a lower kv_cache_gb"
        raise MemoryError(f"{problem} ({one_line(error)})") from error


def available_bytes(device: "torch.device") -> int:
    """Memory that can still be had on the device without pushing anything out, in bytes."""
    if device.type == "cuda":
        import torch

        # What loading has let go of is free too, once PyTorch gives it back.
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return host_available_bytes()
