"""`chairlift run`: the models of a server with no server around them, and one file from its first line to its last."""

import argparse
import asyncio
import contextlib
import functools
import gc
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from chairlift.config.flags import model_flags
from chairlift.config.run import RunConfig, run_config
from chairlift.config.sequences import SequenceConfig
from chairlift.config.settings import Settings, load
from chairlift.engine.machine import Machine
from chairlift.errors import ChairliftError, ConfigError, JobError, Unavailable
from chairlift.jobs.executor import JobExecutor, JobOptions, JobOutcome
from chairlift.jobs.ledger import Ledger
from chairlift.jobs.lines import ENVELOPE_BYTES, JsonLines, Line, Reader, count_newlines, parse_batch_line
from chairlift.jobs.result_file import length_of
from chairlift.jobs.result_lines import LineUsage
from chairlift.jobs.store import Job, Store
from chairlift.run.display import Display, summary
from chairlift.run.identity import ERRORS, check_same, fingerprint, identity
from chairlift.run.plan import Plan, StaticSteps, for_throughput, least_at_once, plan_for
from chairlift.server.models.host import Host, host
from chairlift.server.models.loader import HostLoader

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from chairlift.run.template import Template
    from chairlift.server.models.registry import Models, ModelService

TOO_MANY_FAILURES = 3
_SHOW_SECONDS = 0.25
_STALL_SECONDS = 600.0


def main(args: argparse.Namespace) -> int:
    """Run a job to its end, or as far as it goes; returns the exit status. Raises ChairliftError."""
    import uvloop

    from chairlift.demo import demo_path

    config = run_config(args)
    _check_files(config)
    settings = for_throughput(load(model_flags(args), os.environ, Path.cwd(), str(demo_path())))
    _check_concurrency(config, settings)
    if settings.note:
        print(settings.note, file=sys.stderr)
    logging.basicConfig(level=settings.server.log_level.upper(), format="%(levelname)s %(message)s")
    os.environ["CHAIRLIFT_LOG_LEVEL"] = settings.server.log_level  # the workers' too
    with _opened(config, settings) as (store, job, ledger):
        if job.state == "completed":
            print(f"{config.output} was complete already")
            return 0
        most = config.max_failures
        if most is not None and ledger.counts.failed > most:
            raise JobError(f"{ledger.counts.failed} lines have failed already: --max-failures {most} allows no more")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Run(config, settings, store, job, ledger).run())


def _check_files(config: RunConfig) -> None:
    """Refuse files that the run would fail with, before models are downloaded for it."""
    fingerprint(config.input)
    for path in (config.output, config.errors):
        folder = path.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            closed, missing = f"you may not write to {folder}; allow it", f"there is no folder {folder}; make it"
            problem = closed if os.path.isdir(folder) else missing
            raise JobError(f"{path} can't be written: {problem}, or name another file")
    _check_outputs(config)


def _check_concurrency(config: RunConfig, settings: Settings) -> None:
    """Refuse more lines at once than a model's queue takes, and fewer than it needs to begin."""
    least = least_at_once(settings)
    if config.concurrency is not None and config.concurrency < least:
        raise ConfigError(
            f"--concurrency {config.concurrency} is less than the {least} lines at once that static batches need to be "
            "full, and they leave only then: raise it, lower batch_size, or choose another strategy"
        )
    for served in settings.models:
        model = served.config
        most = settings.server.max_waiting if isinstance(model, SequenceConfig) else model.max_waiting
        if config.concurrency is not None and config.concurrency > most:
            raise ConfigError(f"--concurrency {config.concurrency} is more than max_waiting allows, {most}")


@contextlib.contextmanager
def _opened(config: RunConfig, settings: Settings) -> Iterator[tuple[Store, Job, Ledger]]:
    """The job's state and results: those of a run to take up, or new ones. The state goes when it is of no more use."""
    about = identity(config, settings)
    _check_outputs(config)  # again, as loading settings may have taken hours
    store = Store(config.state)
    job, ledger = None, None
    try:
        job = _job(store, about, config)
        ledger = Ledger(store, job.id, config.output, config.errors)
        yield store, job, ledger
    finally:
        nothing_done = ledger is not None and ledger.checkpoint.counts.done == 0
        if ledger is not None:
            ledger.close()
        store.close()
        if job is not None and (job.state == "completed" or nothing_done):
            config.state.unlink(missing_ok=True)


def _check_outputs(config: RunConfig) -> None:
    """Refuse to replace unasked what no run has left that could be taken up."""
    for path in (config.output, config.errors):
        if not config.state.exists():
            _check_free(path, config)


def _check_free(path: Path, config: RunConfig) -> None:
    """Refuse to replace unasked what is no result of this run."""
    if length_of(path) is not None and not config.overwrite:
        raise JobError(f"{path} is there, and belongs to no unfinished run: --overwrite replaces it")


def _job(store: Store, about: dict[str, object], config: RunConfig) -> Job:
    found = store.jobs()
    if found and not config.restart:
        check_same(found[0].about, about, config.state)
        return found[0]
    for each in found:
        if each.about.get(ERRORS) != about[ERRORS]:
            _check_free(config.errors, config)
        store.remove_job(each.id)
    now = time.time()
    job = Job(id=f"batch_{secrets.token_hex(8)}", state="in_progress", entered={"in_progress": now}, about=about)
    store.add_job(job)
    return job


class _Run:
    """One run, from the workers' start to the exit status."""

    def __init__(self, config: RunConfig, settings: Settings, store: Store, job: Job, ledger: Ledger) -> None:
        self._config, self._server = config, settings.server
        self._least_at_once = least_at_once(settings)
        self._store, self._job, self._ledger = store, job, ledger
        machine = Machine() if len(settings.models) > 1 else None
        self._loader = HostLoader(settings, lambda served: host(served, settings.server, machine))
        self._hosts = self._loader.begin()
        self._executor: JobExecutor | None = None
        self._signal: int | None = None
        self._signalled = asyncio.Event()
        self._outcome: JobOutcome | None = None
        self._total: int | None = None
        # Each host's, in their order.
        self._services: list[ModelService] = []
        self._over = threading.Event()

    async def run(self) -> int:
        """Load, run, and say what came of it."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)
        counting = asyncio.create_task(asyncio.to_thread(self._count_lines))
        try:
            for each in self._hosts:
                await each.start()
            models, app = await asyncio.to_thread(self._prepare)
            # A full collection walks every object that the imports made.
            gc.collect()
            gc.freeze()
            await self._wait_ready()
            if self._signal is None:
                await self._go(models, app)
        finally:
            counting.cancel()
            # Its thread would be waited for all the same.
            self._over.set()
            await asyncio.gather(*(each.stop() for each in self._hosts))
        return self._status()

    def _prepare(self) -> "tuple[Models, ASGIApp]":
        from chairlift.server.app import create_app
        from chairlift.server.models.registry import Models

        self._services = [self._loader.prepare(each) for each in self._hosts]
        models = Models(self._services, aliases=self._server.model_aliases)
        # Nobody but this process sends anything, so nobody is asked for a key.
        return models, create_app(models, msgspec.structs.replace(self._server, api_key=None, api_keys=None))

    async def _wait_ready(self) -> None:
        """Wait for all models, or a signal. Raises JobError if one can't be loaded."""
        loading = asyncio.create_task(_all_ready(self._hosts))
        signalled = asyncio.create_task(self._signalled.wait())
        try:
            await asyncio.wait({loading, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
        finally:
            loading.cancel()
            signalled.cancel()
            await asyncio.gather(loading, signalled, return_exceptions=True)

    async def _go(self, models: "Models", app: "ASGIApp") -> None:
        """Run the job, showing how far it is."""
        from chairlift.server.http.local_client import AppClient

        plan = self._plan()
        steps = self._static_steps()
        before = self._ledger.checkpoint.counts
        self._executor = executor = JobExecutor(
            AppClient(app),
            self._ledger,
            self._reader(models),
            self._job.id,
            self._options(plan),
            hopeless=functools.partial(_failure, models),
            on_last=self._close_queues,
            on_answer=_noting(steps) if steps is not None else lambda line, usage: None,
        )
        resumed = f", going on after {before.done:,} lines" if before.done else ""
        print(f"{self._config.input}: {plan.reason}{resumed}", flush=True)
        started = time.monotonic()
        display = Display(before)
        showing = asyncio.create_task(self._show(display, executor))
        try:
            outcome = await executor.run()
        finally:
            showing.cancel()
            display.show(executor.counts, executor.total or self._total)
            display.close()
        self._finish(outcome)
        seconds = time.monotonic() - started
        print(summary(executor.counts, before, seconds, _about(models, seconds, plan, steps)), flush=True)

    def _finish(self, outcome: JobOutcome) -> None:
        self._outcome = outcome
        if outcome is JobOutcome.COMPLETED:
            self._ledger.check()
            # The output has to be there even if no line succeeded, or whoever waits for it waits for ever.
            self._config.output.touch()
            self._job.state = self._store.enter(self._job.id, "completed", time.time()).state

    def _status(self) -> int:
        """The exit status, with a word on how to go on where there is more to do."""
        if self._outcome is JobOutcome.COMPLETED:
            if self._config.errors.exists():
                print(f"lines that failed: {self._config.errors}")
            return 0
        print("the same command goes on from here", file=sys.stderr)
        if self._signal is not None:
            return 128 + self._signal
        print(f"more than {self._config.max_failures} lines failed: see {self._config.errors}", file=sys.stderr)
        return TOO_MANY_FAILURES

    # Parts

    def _plan(self) -> Plan:
        """How to send: what suits the model, or the most demanding of several, unless the flags say otherwise."""
        from chairlift.server.models.item_service import ItemService

        plans = []
        for each, service in zip(self._hosts, self._services, strict=True):
            info = service.info if isinstance(service, ItemService) else None
            plans.append(plan_for(each.served, info, self._server.max_waiting))
        plan = max(plans, key=lambda plan: plan.concurrency)
        if (order := self._config.order) is not None and order != plan.order:
            plan = plan._replace(order=order, reason=f"{plan.reason.partition(';')[0]}; order: {order}, as asked for")
        return plan._replace(concurrency=self._config.concurrency or max(plan.concurrency, self._least_at_once))

    def _options(self, plan: Plan) -> JobOptions:
        return JobOptions(
            concurrency=plan.concurrency,
            order=plan.order,
            max_attempts=self._config.max_attempts,
            max_failures=self._config.max_failures,
            stall_seconds=_STALL_SECONDS,
        )

    def _static_steps(self) -> StaticSteps | None:
        """What to compare with, where there is one language model that batches continuously."""
        model = self._hosts[0].served.config
        if len(self._hosts) > 1 or not isinstance(model, SequenceConfig) or model.strategy != "continuous":
            return None
        return StaticSteps(model.slots)

    def _reader(self, models: "Models") -> Callable[[], Reader]:
        """What opens the input."""
        config = self._config
        server = self._server
        tensors = min(server.max_tensor_bytes, server.max_tensor_json_bytes)
        longest = max(server.max_body_bytes, tensors) + ENVELOPE_BYTES
        if config.format == "batch":
            return lambda: JsonLines(config.input, parse_batch_line, longest)
        from chairlift.run.tables import CsvRows, ParquetRows

        template = self._template(models)
        if config.format == "csv":
            return lambda: CsvRows(config.input, template, longest)
        if config.format == "parquet":
            return lambda: ParquetRows(config.input, template)
        return lambda: JsonLines(config.input, template.parse, longest)

    def _template(self, models: "Models") -> "Template":
        from chairlift.run.template import Template

        config = self._config
        name = config.params.get("model")
        if name is None and len(models.all()) > 1:
            raise ConfigError("several models are loaded: say which one with --param model=NAME")
        assert config.prompt_field is not None
        model = models.all()[0] if name is None else models.get(str(name))
        return Template(model, config.prompt_field, config.id_field, config.params, config.chat)

    def _count_lines(self) -> None:
        """About how many lines there are; in a thread, since the file may be large."""
        # Whatever is wrong with the file, the reader says so.
        with contextlib.suppress(OSError, ChairliftError):
            if self._config.format == "parquet":
                from chairlift.run.tables import count_rows

                self._total = count_rows(self._config.input)
            else:
                self._total = count_newlines(self._config.input, self._over.is_set) - (self._config.format == "csv")

    def _close_queues(self) -> None:
        for each in self._hosts:
            each.close_queue()

    async def _show(self, display: Display, executor: JobExecutor) -> None:
        while True:
            display.show(executor.counts, executor.total or self._total, executor.problem)
            await asyncio.sleep(_SHOW_SECONDS)

    def _on_signal(self, signum: int) -> None:
        if self._signal is not None:
            # Whoever asks twice does not want to wait; the workers end when they see this process gone.
            os._exit(128 + signum)
        self._signal = signum
        self._signalled.set()
        grace = self._server.drain_timeout_s
        print(f"{signal.Signals(signum).name}: finishing what runs, for up to {grace:g} s", file=sys.stderr)
        if self._executor is not None:
            self._executor.stop(grace)


async def _all_ready(hosts: list[Host]) -> None:
    await asyncio.gather(*map(_ready, hosts))


async def _ready(host: Host) -> None:
    try:
        await host.wait_ready()
    except Unavailable as error:
        raise JobError(f"{host.served.name} can't be loaded: {error}") from None


def _failure(models: "Models") -> str | None:
    return next((f"{each.name}: {each.failure}" for each in models.all() if each.state == "failed"), None)


def _noting(steps: StaticSteps) -> Callable[[Line, LineUsage], None]:
    return lambda line, usage: steps.note(usage.completion_tokens)


def _about(models: "Models", seconds: float, plan: Plan, static: StaticSteps | None) -> list[tuple[str, str]]:
    """What there is to say of how the lines were computed."""
    from chairlift.server.models.item_service import ItemService

    rows = [("strategy", _strategy(plan, static, models))]
    if calls := [each for each in models.all() if isinstance(each, ItemService)]:
        busy = sum(each.metrics.busy_seconds for each in calls)
        instances = sum(len(each.dispatcher.executors) for each in calls)
        rows.append(("model busy", f"{busy:,.1f} s ({100 * busy / seconds / instances:.0f}% of the time)"))
    return rows


def _strategy(plan: Plan, static: StaticSteps | None, models: "Models") -> str:
    """The strategy in a few words, with what another would have cost where that is known."""
    from chairlift.server.models.sequence_service import SequenceService

    name = plan.reason.partition(":")[0].partition(";")[0].partition(",")[0]
    (model, *_) = models.all()
    if static is None or not isinstance(model, SequenceService) or static.steps <= model.client.stats.steps:
        return name
    taken = model.client.stats.steps
    return f"{name}: {taken:,} steps, and static batches would have taken {static.steps:,} (outputs differ in length)"
