"""A server that runs already, as the subject of `chairlift plan`."""

import argparse
import os
import sys
from typing import Any

import msgspec

from chairlift.bench.raw_results import machine_in_words
from chairlift.config.flags import dashed
from chairlift.config.items import DEFAULT_MAX_BATCH_SIZE, ItemConfig
from chairlift.config.sequences import SequenceConfig
from chairlift.errors import ConfigError
from chairlift.plan.machine_profile import ItemProfile, MachineProfile, SequenceProfile
from chairlift.planning.measure_sequences import check_answers_one, measure_served_sequences
from chairlift.planning.measure_served_items import measure_served_items
from chairlift.planning.plan_subject import (
    SETTINGS,
    Subject,
    examples_for,
    open_items,
    open_sequences,
    progress_bar,
)
from chairlift.planning.plan_traffic import is_described
from chairlift.planning.running_server import RunningServer
from chairlift.planning.served_traffic import check_tells, served_traffic
from chairlift.runners.items import TEXT_TASKS

_UNSEEN_CALLS = (
    "measured from outside, by requests of known sizes: less exact than `chairlift plan FOLDER`, which sees single "
    "calls: how many cores one takes is not seen, so instances stay as they are, and share them"
)
_UNSEEN_STEPS = "measured while it was served, with what others sent; the KV cache stays as large as it is"


def subject_served(args: argparse.Namespace) -> Subject:
    """What a server says of a model that it serves. Raises ConfigError, Unavailable or RequestFailed."""
    server = RunningServer(args.model, args.api_key or os.environ.get("CHAIRLIFT_API_KEY"))
    own = [dashed(name) for name in SETTINGS if name in vars(args)]
    if own:
        raise ConfigError(f"--{own[0]} is a setting of the server, which has it already; leave it out")
    _check_may_send(args, server, is_described(args))
    about = server.model(args.served_name)
    name, now = str(about["id"]), _settings_now(about)
    described = is_described(args, now)
    _check_may_send(args, server, described)
    notes: list[str] = []
    examples = examples_for(args, now)
    items = isinstance(now, ItemConfig)
    subject = Subject(
        name,
        open_items(now) if isinstance(now, ItemConfig) else open_sequences(now),
        int(about["settings"]["max_waiting"]),
        lambda seconds: _measured(server, about, now, examples, seconds, notes),
        # The model may have defaults of its own, which are not told.
        given={"max_batch_size": DEFAULT_MAX_BATCH_SIZE, "max_wait_ms": 0.0} if items else {},
        notes=notes,
        title=f"{name} at {args.model}",
        now=now,
    )
    if described:
        return subject
    if examples:
        raise ConfigError("--examples are sent to measure a server, and its own traffic is planned for; leave it out")
    traffic = served_traffic(server, about)
    notes.append(traffic.about)
    profile = MachineProfile(machine=_machine(server), front=traffic.front, models={name: traffic.profile})
    try:
        profile.check()
    except ValueError as error:
        raise ConfigError(f"nothing can be simulated with what {args.model} tells of its traffic: {error}") from None
    return subject._replace(measure=lambda seconds: profile, trace=traffic.trace)


def _check_may_send(args: argparse.Namespace, server: RunningServer, described: bool) -> None:
    """Raise ConfigError where another machine would be measured, unasked, for traffic that is described."""
    reads_profile = args.profile is not None and args.profile.exists()
    if described and not (server.is_here or args.yes or reads_profile):
        raise ConfigError(f"{args.model} is another machine, to which requests would be sent: say --yes, or --profile")


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
    about: dict[str, Any],
    now: SequenceConfig | ItemConfig,
    examples: list[Any],
    seconds: float,
    notes: list[str],
) -> MachineProfile:
    """Send requests, and say so."""
    if isinstance(now, SequenceConfig):
        check_answers_one(now.strategy)
        check_tells(server, str(about["id"]))
    said = f"for about {seconds:g} s, at a low priority"
    said += ", to at most half of its slots" if isinstance(now, SequenceConfig) else ", one at a time"
    print(f"note: this sends requests to {server.url} {said}", file=sys.stderr)
    others = server.busy()
    profile: SequenceProfile | ItemProfile
    with progress_bar("measure") as progress:
        if isinstance(now, ItemConfig):
            profile, front = measure_served_items(server, about, now, examples, seconds, progress)
            notes.append(_UNSEEN_CALLS)
        else:
            profile, front = measure_served_sequences(server, about, max(now.slots // 2, 1), seconds, progress)
            notes.append(_UNSEEN_STEPS)
    if others:
        notes.append(f"it had {others} other requests when that began, and what they took is in these times")
    return MachineProfile(machine=_machine(server), front=front, models={str(about["id"]): profile})


def _machine(server: RunningServer) -> str:
    return machine_in_words() if server.is_here else f"that of {server.host}"
