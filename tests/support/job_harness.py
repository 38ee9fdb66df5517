"""Jobs over models that are computed here."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.config.server import ServerConfig
from chairlift.jobs.executor import JobExecutor, JobOptions, JobOutcome
from chairlift.jobs.ledger import Ledger
from chairlift.jobs.lines import JsonLines, parse_batch_line
from chairlift.jobs.store import Job, Store
from chairlift.server.app import create_app
from chairlift.server.http.local_client import AppClient
from chairlift.server.models.registry import Models, ModelService

URL = "/v1/models/function:predict"


def app_of(*models: ModelService) -> ASGIApp:
    return create_app(Models(models), ServerConfig())


def batch_line(custom_id: str, body: dict[str, Any], url: str = URL) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def write_doubling(path: Path, count: int) -> None:
    path.write_text("".join(batch_line(f"c{i}", {"instances": [i]}) + "\n" for i in range(count)))


def results(path: Path) -> list[Any]:
    raw = path.read_text() if path.exists() else ""
    assert not raw or raw.endswith("\n")
    return [json.loads(line) for line in raw.splitlines()]


def check_doubled(path: Path, count: int) -> None:
    """Each line has exactly one result, and the right one."""
    found = results(path)
    assert sorted(result["custom_id"] for result in found) == sorted(f"c{i}" for i in range(count))
    for result in found:
        assert result["response"]["body"] == {"predictions": [int(result["custom_id"][1:]) * 2]}
        assert result["error"] is None


class Flow:
    """A job in a folder, which may be run more than once."""

    def __init__(self, folder: Path, app: ASGIApp) -> None:
        self.folder, self.app = folder, app
        self.input, self.output, self.errors = (folder / name for name in ("in.jsonl", "out.jsonl", "errors.jsonl"))
        self.executor: JobExecutor | None = None

    def run(self, during: Callable[["Flow"], Any] | None = None, **options: Any) -> JobOutcome:
        return asyncio.run(self.go(during, **options))

    async def go(self, during: Callable[["Flow"], Any] | None = None, **options: Any) -> JobOutcome:
        hooks = {name: options.pop(name) for name in ("hopeless", "on_last", "on_answer") if name in options}
        store = Store(self.folder / "jobs.sqlite")
        if store.job("batch_1") is None:
            store.add_job(Job(id="batch_1", state="in_progress", entered={}))
        ledger = Ledger(store, "batch_1", self.output, self.errors)
        self.executor = JobExecutor(
            AppClient(self.app),
            ledger,
            lambda: JsonLines(self.input, parse_batch_line),
            "batch_1",
            JobOptions(**options),
            **hooks,
        )
        beside = asyncio.ensure_future(during(self)) if during is not None else None
        try:
            return await self.executor.run()
        finally:
            if beside is not None:
                beside.cancel()
            ledger.close()
            store.close()
            if beside is not None:
                # If it failed, that is what there is to say.
                with contextlib.suppress(asyncio.CancelledError):
                    await beside


class Scripted:
    """An application that answers each body with what its `say` holds, in turn, and then with 200."""

    def __init__(self, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.seen: list[Any] = []
        self.scopes: list[Scope] = []
        self.running = 0
        self.most = 0
        self._headers = list(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        body = json.loads(message["body"])
        self.scopes.append(scope)
        self.seen.append(body["id"])
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            status, answer, *more = await self.answer(body)
        finally:
            self.running -= 1
        headers = [(b"content-type", b"application/json"), *self._headers, *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer, separators=(",", ":")).encode()})

    async def answer(self, body: Any) -> tuple[Any, ...]:
        """The status and the body, and what headers there are."""
        await asyncio.sleep(0)
        left = body.get("say")
        times = self.seen.count(body["id"])
        status = left[times - 1] if left and times <= len(left) else 200
        if status == "lost":
            return 503, {"error": {"code": "worker_lost", "message": "died"}}
        return status, {"echo": body["id"]} if status == 200 else {"error": {"message": f"status {status}"}}
