"""A server that runs already, as the subject of `chairlift plan`."""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from chairlift.bench.measure_server import measure_served_items, measure_served_sequences
from chairlift.bench.plan_subject import (
    SETTINGS,
    Subject,
    examples_for,
    open_items,
    open_sequences,
    progress_bar,
)
from chairlift.bench.raw_results import machine_in_words
from chairlift.bench.running_server import RunningServer
from chairlift.config.flags import dashed
from chairlift.config.items import DEFAULT_MAX_BATCH_SIZE, ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.errors import ConfigError
from chairlift.plan.machine_profile import MachineProfile
from chairlift.runners.items import TEXT_TASKS

_LESS_EXACT = (
    "measured from outside, by requests of known lengths: less exact than `chairlift plan FOLDER`, which sees single "
)


def subject_served(args: argparse.Namespace) -> Subject:
    """What a server says of a model that it serves. Raises ConfigError, Unavailable or RequestFailed."""
    server = RunningServer(args.model, args.api_key or os.environ.get("CHAIRLIFT_API_KEY"))
    own = [dashed(name) for name in SETTINGS if name in vars(args)]
    if own:
        raise ConfigError(f"--{own[0]} is a setting of the server, which has it already; leave it out")
    reads_profile = args.profile is not None and args.profile.exists()
    if not (server.is_here or args.yes or reads_profile):
        raise ConfigError(f"{args.model} is another machine, to which requests would be sent: say --yes, or --profile")
    about = server.model(args.served_name)
    name, now = str(about["id"]), _settings_now(about)
    notes: list[str] = []
    given: dict[str, Any] = {}
    examples = examples_for(args, now)
    if isinstance(now, ItemConfig):
        measure: Callable[..., Any] = partial(measure_served_items, server, about, now, examples)
        waits_for_nobody: SequenceConfig | ItemConfig = open_items(now)
        unseen = "calls: how many cores one takes is not seen, so instances stay as they are, and share them"
        # The model may have defaults of its own, which are not told.
        given = {"max_batch_size": DEFAULT_MAX_BATCH_SIZE, "max_wait_ms": 0.0}
    else:
        measure = partial(measure_served_sequences, server, about, now)
        waits_for_nobody = open_sequences(now)
        unseen = "steps: these have the time after them, and the front's, in them; the KV cache stays as large as it is"
    return Subject(
        name,
        waits_for_nobody,
        int(about["settings"]["max_waiting"]),
        lambda seconds: _measured(server, name, measure, seconds, unseen, notes),
        given=given,
        notes=notes,
        title=f"{name} at {args.model}",
        now=now,
    )


def _settings_now(about: dict[str, Any]) -> SequenceConfig | ItemConfig:
    """The settings that a server tells. Raises ConfigError for some that this version does not know."""
    name, task = str(about["id"]), about["task"]
    kind: type[SequenceConfig | ItemConfig] = SequenceConfig if task == "generate" else ItemConfig
    known = set(kind.__struct_fields__)
    values = {"model": name} | {key: value for key, value in about["settings"].items() if key in known}
    if kind is ItemConfig:
        # Of these kinds one counts tokens, and the other items; neither looks at its files for that.
        values["kind"] = "encoder" if task in TEXT_TASKS else "onnx"
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the server's settings are none: {error}") from None


def _measured(
    server: RunningServer,
    name: str,
    measure: Callable[..., Any],
    seconds: float,
    unseen: str,
    notes: list[str],
) -> MachineProfile:
    """Send requests, and say so."""
    about = f"for at most {seconds:g} s, at a low priority, to at most half of its slots"
    print(f"note: this sends requests to {server.url} {about}", file=sys.stderr)
    others = server.busy()
    with progress_bar("measure") as progress:
        profile, front = measure(seconds, progress)
    notes.append(_LESS_EXACT + unseen)
    if others:
        notes.append(f"it had {others} other requests when that began, and what they took is in these times")
    machine = machine_in_words() if server.is_here else f"that of {server.host}"
    return MachineProfile(machine=machine, front=front, models={name: profile})
