"""The model that `chairlift plan` is asked about, its settings, and how it is measured."""

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tqdm import tqdm

from chairlift.bench.output_files import saving
from chairlift.bench.raw_results import machine_in_words
from chairlift.config.items import ItemConfig
from chairlift.config.model_files import contents_of
from chairlift.config.sequences import SequenceConfig
from chairlift.config.settings import load
from chairlift.demo import demo_path
from chairlift.errors import ConfigError, looking_at
from chairlift.plan.machine_profile import ItemProfile, MachineProfile, SequenceProfile
from chairlift.plan.sequence_candidates import with_strategy
from chairlift.plan.trace import TraceRequest

# Settings of the model that change what is measured, and hold for the plan as for the server.
SETTINGS = (
    *("kind", "dtype", "quantization", "kv_cache_dtype", "kv_cache_gb", "max_model_len", "device", "num_threads"),
    "max_batch_tokens",
)
# Other settings of the model that change what is measured.
_NO_FLAGS = ("ops", "implementation", "block_size", "outputs", "options")
# KV memory goes by these two together; and the name under which a profile has what a model's files hold.
_EXPECTED, _FILES = "expected_input_tokens + expected_output_tokens", "files"
# What is measured: as many sequences, and as long steps, as a plan may propose; and as many items.
_MEASURED_SLOTS, _MEASURED_TOKENS, _MEASURED_ITEMS = 128, 2048, 64
# Of the time of a measurement of items, what the front has.
_FRONT = 0.3
# Gives a slot to whoever comes: what measuring, and requests without company, take.
OPEN = "continuous"
_MOST_EXAMPLES = 10_000


class Subject(NamedTuple):
    """A model: under which `name` it is copied, with which settings, and what measures it within so many seconds.

    `config` waits for nobody, and has what is sought at any value. `given` are settings that go with any plan, `notes`
    say how far what was measured can be trusted. A server that runs has a `title`, settings `now`, and where nobody
    says what comes, the `trace` of what came.
    """

    name: str
    config: SequenceConfig | ItemConfig
    max_waiting: int
    measure: Callable[[float], MachineProfile]
    given: dict[str, Any] = {}
    notes: Sequence[str] = ()
    title: str = ""
    now: SequenceConfig | ItemConfig | None = None
    trace: Sequence[TraceRequest] = ()


def subject_here(args: argparse.Namespace) -> Subject:
    """A model on this machine, with the settings that `chairlift serve` would have. Raises ConfigError."""
    given = {name: value for name, value in vars(args).items() if name in ("model", *SETTINGS)}
    settings = load(given, os.environ, Path.cwd(), str(demo_path()))
    config = settings.models[0].config
    if len(settings.models) > 1:
        raise ConfigError(f"chairlift plan is for one model, and {args.model} has {len(settings.models)}")
    kept = {"kind": given["kind"]} if given.get("kind", "auto") != "auto" else {}
    if isinstance(config, ItemConfig):
        examples = examples_for(args, config)
        open_config = open_items(config)
        return Subject(
            args.model,
            open_config,
            config.max_waiting,
            lambda seconds: _measured_items(open_config, seconds, examples),
            given=kept,
        )
    examples_for(args, config)
    wanted = open_sequences(config)
    return Subject(
        args.model, wanted, settings.server.max_waiting, lambda seconds: _measured_sequences(wanted, seconds)
    )


def open_sequences(config: SequenceConfig) -> SequenceConfig:
    """The same settings, but for those that a plan seeks."""
    return with_strategy(config, OPEN, config.max_num_seqs, target_itl_ms=None)


def open_items(config: ItemConfig) -> ItemConfig:
    """The same settings, but for those that a plan seeks."""
    return msgspec.structs.replace(config, max_batch_size=None, max_wait_ms=0.0, target_latency_ms=None)


def profile_of(args: argparse.Namespace, subject: Subject) -> tuple[SequenceProfile | ItemProfile, MachineProfile]:
    """The model's profile and the machine's, read or measured. Raises ConfigError."""
    wanted = ItemProfile if isinstance(subject.config, ItemConfig) else SequenceProfile
    if args.profile is not None and args.profile.exists():
        machine = MachineProfile.load(args.profile)
        models = [each for each in machine.models.values() if isinstance(each, wanted)]
        if len(models) != 1:
            kind = "model that answers in one call" if wanted is ItemProfile else "language model"
            raise ConfigError(f"profile {args.profile}: it must hold one {kind}, and has {len(models)}")
        _check_settings(args.profile, machine, subject)
        return models[0], machine
    machine = subject.measure(args.measure_seconds)
    machine.settings = _settings_of(subject)
    (profile,) = machine.models.values()
    if args.profile is not None:
        with saving("--profile", args.profile):
            machine.save(args.profile)
    return profile, machine


def _settings_of(subject: Subject) -> dict[str, Any]:
    """What steps and calls depend on, beside what a plan seeks, as a profile has it."""
    config = subject.config
    found = {name: getattr(config, name) for name in (*SETTINGS, *_NO_FLAGS) if name in config.__struct_fields__}
    if isinstance(config, SequenceConfig):
        found[_EXPECTED] = config.expected_tokens
    found["model"] = Path(config.model).name
    # A server tells no files.
    if not subject.title:
        with looking_at(Path(config.model)):
            found[_FILES] = contents_of(config.model)
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
    return plain


def _check_settings(path: Path, machine: MachineProfile, subject: Subject) -> None:
    """Raise ConfigError for a profile of something else, which would be planned for in silence."""
    wanted, before = _settings_of(subject), machine.settings
    # Files tell a model better than the name of its folder, which may have been moved; not all models have some.
    untold = _FILES if None in (wanted.get(_FILES), before.get(_FILES)) else "model"
    for name, measured in before.items():
        if name == untold or name not in wanted or wanted[name] == measured:
            continue
        problem = f"it was measured with {name} {measured!r}, and the plan is for {wanted[name]!r}"
        if name == _FILES:
            problem = f"it was measured with other files than those of {subject.config.model}"
        raise ConfigError(f"profile {path}: {problem}; name another file, and that is measured and saved there")


def examples_for(args: argparse.Namespace, config: SequenceConfig | ItemConfig) -> list[Any]:
    """What a model is sent, as far as that is given. Raises ConfigError for a model of which it is made up."""
    if args.examples is None:
        return []
    if isinstance(config, SequenceConfig):
        raise ConfigError("--examples is for models that answer in one call; leave it out")
    if config.kind == "encoder":
        raise ConfigError("--examples is not for models of texts, which are made up; leave it out")
    return read_examples(args.examples)


def read_examples(path: Path) -> list[Any]:
    """What a model is sent, a line of JSON each. Raises ConfigError naming the line."""
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()][:_MOST_EXAMPLES]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--examples {path}: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--examples {path}, line {number}: {error}") from None
    if not found:
        raise ConfigError(f"--examples {path} holds none")
    return found


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float], object]]:
    """A bar on the standard error, and what moves it to a share of the whole."""
    with tqdm(total=100, desc=title, unit="%", dynamic_ncols=True) as bar:
        yield lambda share: bar.update(int(100 * share) - bar.n)


def _measured_sequences(config: SequenceConfig, seconds: float) -> MachineProfile:
    """Steps of a server with as many slots, and as many tokens a step, as a plan may propose."""
    from chairlift.planning.measure_sequences import check_seconds, measure_sequences
    from chairlift.runners.check_model import check_model

    check_seconds(seconds)
    check_model(config)
    # Nothing is cut to time, so that steps of all sizes are seen.
    wide = with_strategy(
        config, OPEN, _MEASURED_SLOTS, max_num_batched_tokens=_MEASURED_TOKENS, step_time_ms=0.0, target_itl_ms=None
    )
    with progress_bar("measure") as progress:
        profile, front = measure_sequences(wide, seconds, progress)
    return MachineProfile(machine=machine_in_words(), front=front, models={Path(config.model).name: profile})


def _free_memory() -> None:
    """Have nothing left of a model, since another process loads it now."""
    gc.collect()
    # Not every model has loaded it.
    if (torch := sys.modules.get("torch")) is not None:
        torch.cuda.empty_cache()


def _measured_items(config: ItemConfig, seconds: float, examples: list[Any]) -> MachineProfile:
    """Calls by themselves, and then a server of the same model, for what its front takes."""
    from chairlift.planning.measure_item_front import measure_item_front
    from chairlift.planning.measure_items import measure_items
    from chairlift.planning.measure_sequences import check_seconds
    from chairlift.runners.check_model import check_model
    from chairlift.runners.make_runner import make_runner

    check_seconds(seconds)
    check_model(config)
    with progress_bar("measure") as progress:
        profile = measure_items(
            config,
            make_runner(config),
            (1 - _FRONT) * seconds,
            examples=examples,
            largest=_MEASURED_ITEMS,
            on_progress=lambda share: progress((1 - _FRONT) * share),
        )
        _free_memory()
        front = measure_item_front(
            config, profile, examples, _FRONT * seconds, lambda share: progress(1 - _FRONT + _FRONT * share)
        )
    return MachineProfile(machine=machine_in_words(), front=front, models={Path(config.model).name: profile})
