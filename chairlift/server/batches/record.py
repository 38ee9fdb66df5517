"""A batch as it is kept, and as clients see it."""

from typing import Any

import msgspec

from chairlift.jobs.store import Counts, Job, JobState, StoredFile

OVER: frozenset[JobState] = frozenset({"completed", "failed", "expired", "cancelled"})

_TIMES: tuple[JobState, ...] = (
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
)


class Problem(msgspec.Struct):
    """What is wrong with a batch's input, and in which line of it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class About(msgspec.Struct, kw_only=True):
    """What the server notes of a batch. Times in Unix seconds.

    `results` are the ids that its output and its errors will have as files; `output_file_id` and `error_file_id` are
    set once there are such files. `counts` are those at its end. `model` is what its lines name; where they name none,
    `served` is who answers them.
    """

    endpoint: str
    input_file_id: str
    completion_window: str
    expires_at: float
    results: tuple[str, str] = ("", "")
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    model: str | None = None
    served: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    problems: list[Problem] = []
    counts: Counts | None = None


def about(job: Job) -> About:
    """What was noted of a batch."""
    return msgspec.convert(job.about, About)


def note(job: Job, noted: About) -> None:
    """Note something else of it."""
    job.about = msgspec.to_builtins(noted)


def as_batch(job: Job, counts: Counts | None) -> dict[str, Any]:
    """A batch as OpenAI's API has it; `counts` are those of the moment, if it runs."""
    noted = about(job)
    counts = noted.counts or counts or Counts()
    problems = {"object": "list", "data": noted.problems} if noted.problems else None
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": noted.endpoint,
        "model": noted.model or noted.served,
        "errors": problems,
        "input_file_id": noted.input_file_id,
        "completion_window": noted.completion_window,
        "status": job.state,
        "output_file_id": noted.output_file_id,
        "error_file_id": noted.error_file_id,
        "created_at": int(job.entered["validating"]),
        "expires_at": int(noted.expires_at),
        **{f"{state}_at": int(job.entered[state]) if state in job.entered else None for state in _TIMES},
        "request_counts": {"total": job.total or 0, "completed": counts.completed, "failed": counts.failed},
        "usage": _usage(counts),
        "metadata": noted.metadata,
    }


def as_file(file: StoredFile) -> dict[str, Any]:
    """A file as OpenAI's API has it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at),
        "expires_at": None if file.expires_at is None else int(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _usage(counts: Counts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }
