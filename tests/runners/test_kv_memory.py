"""Memory of the KV cache and of states, in closed form."""

import errno

import pytest
import torch

from chairlift.config.sequences import SequenceConfig
from chairlift.errors import ConfigError
from chairlift.runners.decoder.kv_memory import (
    available_bytes,
    free_beside_states,
    num_kv_blocks,
    num_state_snapshots,
    taking_kv_memory,
)

GB = 2**30


def config(**settings: object) -> SequenceConfig:
    return SequenceConfig(**{"model": "m", "max_num_seqs": 4, "block_size": 16} | settings)  # type: ignore[arg-type]


def test_states_of_those_that_run_come_first() -> None:
    assert free_beside_states(config(), 1000, 10**6) == 10**6 - 2 * 4 * 1000
    with pytest.raises(ConfigError, match="lower max_num_seqs"):
        free_beside_states(config(), GB, 4 * GB)


def test_snapshots_take_a_tenth_of_what_is_free_and_so_many_a_slot() -> None:
    assert num_state_snapshots(config(), 1000, 10**6) == 100
    assert num_state_snapshots(config(), 1000, 10**9) == 64 * 4
    assert num_state_snapshots(config(enable_prefix_caching=False), 1000, 10**9) == 0


def test_memory_that_is_given_holds_snapshots_and_blocks() -> None:
    given = config(kv_cache_gb=1)
    snapshots = num_state_snapshots(given, GB // 100, 10**12)
    assert snapshots == 25
    # 16 tokens of 1,024 bytes each.
    assert num_kv_blocks(given, 512, 1024, 10**12, snapshots * (GB // 100)) == (GB - 25 * (GB // 100)) // (16 * 1024)


def test_where_no_layer_has_keys_blocks_only_count_tokens() -> None:
    assert num_kv_blocks(config(), 100, 0, 10**9) == 4 * 7


def test_kv_memory_that_can_not_be_had_names_the_setting() -> None:
    def refuse(error: Exception) -> None:
        with taking_kv_memory(3 * GB):
            raise error

    with pytest.raises(MemoryError, match=r"a KV cache of 3 GiB; set a lower kv_cache_gb .*Cannot allocate"):
        refuse(OSError(errno.ENOMEM, "Cannot allocate memory"))
    with pytest.raises(ValueError, match="something else"):
        refuse(ValueError("something else"))


def test_what_pytorch_keeps_is_free_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [GB]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GB - sum(kept), 4 * GB))
    assert available_bytes(torch.device("cuda")) == 3 * GB
