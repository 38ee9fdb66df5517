"""What the front takes is seen on a real server, in the time that there is for it."""

import argparse
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from support.serve_process import WORKER_MODELS, language_model
from support.simulated import exact_calls, exact_profile

from chairlift.bench import measure_front as measure_front_module
from chairlift.bench.completion_stream import Outcome, Target
from chairlift.bench.load import Load
from chairlift.bench.measure_front import (
    _delays,
    _FrontLoad,
    _jobs,
    _pace,
    _seconds,
    front_cost,
    measure_front,
)
from chairlift.bench.measure_item_front import held_seconds, measure_item_front
from chairlift.bench.measure_sequences import measure_sequences
from chairlift.config.flags import add_flags
from chairlift.config.items import ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.config.settings import Settings, load
from chairlift.core.cost import Coefficients
from chairlift.errors import Unavailable
from chairlift.own_server import OwnServer
from chairlift.plan.machine_profile import FrontCost, MachineProfile
from chairlift.plan.resampler import StepTimes
from chairlift.runners.decoder.runner import DecoderRunner


def times(step: float) -> StepTimes:
    return StepTimes(exact_profile(Coefficients(step, step / 100, 0.0, 0.0)), random.Random(0))


def servers() -> set[int]:
    """Children of this process that run the product's commands: other files' tests may have left theirs running."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in children if b"chairlift.cli" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def test_a_fast_model_is_sent_as_many_requests_as_are_of_use() -> None:
    jobs = _jobs(times(1e-5), 32, 10.0, 4096)
    assert [(job.prompt, job.answer, job.crowd, job.number) for job in jobs] == [
        (16, 1, 1, 200),
        (512, 1, 1, 60),
        (16, 128, 1, 3),
        (16, 128, 4, 12),
        (16, 128, 16, 48),
        (16, 128, 32, 96),
    ]


@pytest.mark.parametrize(("slots", "crowds"), [(1, [1]), (4, [1, 4]), (17, [1, 4, 16, 17]), (256, [1, 4, 16, 64])])
def test_crowds_are_those_that_have_a_slot_each(slots: int, crowds: list[int]) -> None:
    assert [job.crowd for job in _jobs(times(1e-5), slots, 10.0, 4096)[2:]] == crowds


@pytest.mark.parametrize("step", [0.01, 0.05, 0.2])
def test_a_slow_model_is_sent_less(step: float) -> None:
    jobs = _jobs(times(step), 32, 10.0, 4096)
    assert all(job.number >= job.crowd for job in jobs)
    for job, share in zip(jobs, (0.15, 0.15, *[0.7 / 4] * 4), strict=True):
        rounds = job.number // job.crowd
        assert rounds == 1 or (1 + rounds) * _seconds(times(step), job) <= share * 10.0


def test_of_a_model_that_would_take_too_long_the_front_counts_as_free() -> None:
    target = Target.of("http://127.0.0.1:9", "nobody listens")
    assert front_cost(target, 0, exact_profile(Coefficients(2.0, 0.02, 0.0, 0.0)), 32, 10.0) == FrontCost()


def test_prompts_and_answers_fit_into_a_short_context() -> None:
    assert all(job.prompt + job.answer <= 40 for job in _jobs(times(1e-5), 4, 10.0, 40))


@pytest.mark.parametrize(("shown", "pace"), [(1, 0.025), (2, 0.036)])
def test_a_step_with_prompts_of_others_is_no_delay(shown: int, pace: float) -> None:
    """Ten steps of 25 ms, the first of which took 135; where only every other token is text, their mean has to do."""
    moments = [0.0, *(0.135 + 0.025 * step for step in range(10))]
    answer = Outcome(0.0, 0.0, moments[-1], moments[::shown], 11)
    assert _pace(Load(0.0, 1.0, [answer] * 4, 0.0)) == pytest.approx(pace, abs=1e-6)


@pytest.mark.parametrize("faster", [1.0, 0.96, 0.7])
def test_steps_that_are_shorter_in_a_server_are_those_of_a_faster_machine(faster: float) -> None:
    """By as much as one stream has become faster the delays of the others are longer, on the machine as it was."""
    crowds = [_FrontLoad(16, 11, crowd, crowd) for crowd in (1, 4, 16)]
    alone = [0.010, 0.012, 0.020]
    served = [faster * (own + longer) for own, longer in zip(alone, (0.0, 0.001, 0.006), strict=True)]
    found = _delays(alone, served, crowds)
    assert [each.sequences for each in found] == [1, 4, 16]
    told = [each.seconds for each in found]
    if faster == 0.96:  # as near as that is no other machine
        assert told == pytest.approx([0.0, 0.00048, 0.00496], abs=1e-6)
    else:
        assert told == pytest.approx([0.0, 0.001, 0.006], abs=1e-6)


@pytest.mark.processes
def test_the_front_of_a_server_takes_something_and_the_server_is_gone_afterwards(tmp_path: Path) -> None:
    config = SequenceConfig(
        model=str(language_model(tmp_path / "model")), max_model_len=400, kv_cache_gb=0.01, num_threads=1
    )
    profile = measure_sequences(config, DecoderRunner(config), 2.0)
    heard: list[float] = []
    before = servers()
    front = measure_front(config, profile, 2.0, heard.append)
    assert heard == sorted(heard)
    assert heard[-1] == pytest.approx(1.0)
    assert 0 < front.request < 1
    assert 0 < front.output_token < front.request
    assert [delay.sequences for delay in front.delays] == [1, 4, 16, 64]
    MachineProfile(machine="", front=front, models={"tiny": profile}).check()
    assert servers() <= before


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

    monkeypatch.setattr(measure_front_module, "own_server", own)
    wanted: SequenceConfig | ItemConfig
    if kind == "sequences":
        config = SequenceConfig(model=model, revision="v1", max_num_seqs=64, target_ttft_ms=1.0, order="shortest")
        with pytest.raises(Unavailable, match="not to run"):
            measure_front(config, exact_profile(), 1.0, lambda share: None)
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
def test_a_model_that_can_not_be_served_is_told(tmp_path: Path) -> None:
    config = SequenceConfig(model=str(tmp_path / "nothing"))
    with pytest.raises(Unavailable, match="can't be served"):
        measure_front(config, exact_profile(), 1.0, lambda share: None)


# Models that answer in one call


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
