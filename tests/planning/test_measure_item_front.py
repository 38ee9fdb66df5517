"""What the front takes of requests for items is seen on a real server, which has the settings of the plan."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from support.serve_process import WORKER_MODELS, language_model, servers
from support.simulated import exact_calls

from chairlift.config.flags import add_flags
from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.config.settings import Settings, load
from chairlift.errors import Unavailable
from chairlift.own_server import OwnServer
from chairlift.plan.machine_profile import FrontCost
from chairlift.planning import measured_server as measured_server_module
from chairlift.planning.measure_item_front import held_seconds, measure_item_front
from chairlift.planning.measure_sequences import measure_sequences

HOSTILE = """
api_key = "secret"
record = "trace.jsonl"
grpc_port = 9
max_waiting = 1
"""
OF_SEQUENCES = 'strategy = "static"\ntarget_ttft_ms = 1.0\nauto = true\nbatch_size = 2\n'
OF_ITEMS = "max_batch_size = 1\ntimeout_ms = 1.0\nmax_queue_ms = 1.0\n"


@pytest.mark.parametrize("kind", ["sequences", "items"])
def test_what_is_measured_has_the_settings_of_the_plan_and_no_others(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file and variables have had their say before."""
    model = str(language_model(tmp_path / "model")) if kind == "sequences" else f"{WORKER_MODELS}:Doubles"
    (tmp_path / "chairlift.toml").write_text(HOSTILE + (OF_SEQUENCES if kind == "sequences" else OF_ITEMS))
    monkeypatch.chdir(tmp_path)
    for name, value in {"API_KEYS": "none", "REVISION": "v1", "MAX_WAITING": "2", "ORDER": "shortest"}.items():
        monkeypatch.setenv(f"CHAIRLIFT_{name}", value)
    made: list[Settings] = []

    @contextmanager
    def own(model: str, flags: list[str], environment: dict[str, str]) -> Iterator[OwnServer]:
        parser = argparse.ArgumentParser()
        add_flags(parser)
        arguments = parser.parse_args([model, "--port", "0", "--data-dir", "", *flags])
        made.append(load(vars(arguments), os.environ | environment, tmp_path, "", own_server=True))
        raise Unavailable("it is not to run")
        yield

    monkeypatch.setattr(measured_server_module, "own_server", own)
    wanted: SequenceConfig | ItemConfig
    if kind == "sequences":
        config = SequenceConfig(model=model, revision="v1", max_num_seqs=64, target_ttft_ms=1.0, order="shortest")
        with pytest.raises(Unavailable, match="not to run"):
            measure_sequences(config, 1.0)
        wanted = msgspec.structs.replace(config, revision=None, target_ttft_ms=None, auto=False)
    else:
        of_items = ItemConfig(model=model, max_waiting=2, max_queue_ms=1.0, timeout_ms=1.0, order="shortest")
        with pytest.raises(Unavailable, match="not to run"):
            measure_item_front(of_items, exact_calls(1e-3, 1e-4), [1], 10.0, lambda share: None)
        wanted = msgspec.structs.replace(of_items, max_waiting=4096, max_queue_ms=None, timeout_ms=None)
    ((served,), server, _) = made[0]
    assert served.config == msgspec.structs.replace(wanted, served_model_name="measured")
    assert (server.api_key, server.api_keys, server.record, server.grpc_port) == (None, None, None, None)
    assert server.max_waiting == ServerConfig().max_waiting or kind == "items"
    assert server.log_level == "error"


@pytest.mark.processes
def test_the_front_of_a_class_takes_something_and_its_server_is_gone_afterwards() -> None:
    config = ItemConfig(model=f"{WORKER_MODELS}:Doubles", kind="python", max_wait_ms=0.0)
    heard: list[float] = []
    before = servers()
    # In this time a crowd is 64 of them.
    front = measure_item_front(config, exact_calls(1e-3, 1e-4), [1, 2], 64 * 8 * 1.1e-3 + 1e-3, heard.append)
    assert heard == sorted(heard)
    assert heard[-1] == 1.0
    assert 0 < front.request < 1
    assert (front.prompt_token, front.item) == (0, 0)
    assert front.hop > 0
    assert 0 <= front.contention <= 2
    assert servers() <= before


@pytest.mark.parametrize(("examples", "call"), [([], 1e-4), ([1], 1.0)])
def test_without_examples_or_time_for_a_crowd_the_front_of_items_counts_as_free(
    examples: list[int], call: float
) -> None:
    config, heard = ItemConfig(model="nobody:Serves", kind="python"), []
    assert measure_item_front(config, exact_calls(call, 1e-4), examples, 10.0, heard.append) == FrontCost()
    assert heard == [1.0]


def test_what_holds_a_thread_is_its_work_and_its_wait_for_a_core() -> None:
    before = held_seconds(os.getpid())
    sum(range(3_000_000))
    assert held_seconds(os.getpid()) > before
