"""The jobs and files that there are, and how far each job is: one SQLite database, one process at a time."""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from chairlift.errors import JobError, StorageFull, StorageLost, StoreBusy

JobState = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
T = TypeVar("T", "Job", "StoredFile")

# SQLite's own measure.
_LOG_BYTES = 1000 * 4096
_MODE = 0o600
# What makes a database of each version from one of the version before. A tenant of NULL is nobody in particular.
_STEPS = (
    (
        "CREATE TABLE jobs (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, record BLOB NOT NULL)",
        "CREATE TABLE files (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, record BLOB NOT NULL)",
        "CREATE TABLE progress (job TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE, record BLOB NOT NULL)",
    ),
    ("ALTER TABLE jobs ADD COLUMN tenant TEXT", "ALTER TABLE files ADD COLUMN tenant TEXT"),
)
_VERSION = len(_STEPS)


class Counts(msgspec.Struct):
    """What became of a job's lines so far. Tokens are those of answers that say how many they are."""

    completed: int = 0
    failed: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def done(self) -> int:
        """Lines that have their result."""
        return self.completed + self.failed


class Checkpoint(msgspec.Struct, kw_only=True):
    """So many bytes of both result files hold the results of exactly these lines (`Progress.to_bytes`).

    The input's first `number` lines are all among them, and end at byte `offset`, where a reader can go on.
    """

    progress: bytes = bytes(8)
    output_bytes: int = 0
    error_bytes: int = 0
    number: int = 0
    offset: int = 0
    counts: Counts = msgspec.field(default_factory=Counts)


class Job(msgspec.Struct, kw_only=True):
    """One batch job. `entered` has the time in Unix seconds at which it entered each state that it was in.

    `total` is the number of its lines, once that is known. `about` belongs to whoever made the job. `tenant` is whose
    job it is, if it is anybody's in particular.
    """

    id: str
    state: JobState
    entered: dict[JobState, float]
    total: int | None = None
    about: dict[str, Any] = {}
    tenant: str | None = None


class StoredFile(msgspec.Struct, kw_only=True):
    """One file in the store's folder, and whose it is. Times in Unix seconds; `expires_at` of None is never."""

    id: str
    bytes: int
    created_at: float
    filename: str
    purpose: str
    expires_at: float | None = None
    tenant: str | None = None


class Store:
    """Jobs, files and progress in one SQLite database, which is this process's own as long as it is open.

    Any thread may call; each call is one transaction, on the disk when it returns, and blocks for as long as that
    takes. Nobody but the owner may read it. Raises JobError if another process has the store, or it can't be read or
    written; StorageFull if there is no space, and then nothing has changed; StorageLost from then on if its file was
    taken away, or written to by another program, of which SQLite says nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._left: _Place | None = None
        _keep_private(path)
        with self._explained():
            self._db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise
        self._left = _Place.of(path)

    def _open(self) -> None:
        db = self._db
        # Exclusive: a second process is refused, however the first one ended, and there is no memory file to share.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        # All is written to the log, and the database only when we say so: any other change of it is somebody else's.
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("BEGIN IMMEDIATE")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if not 0 <= version <= _VERSION:
            db.execute("ROLLBACK")
            raise JobError(f"{self.path} was written by another release of Chairlift; finish its jobs with that one")
        for step in _STEPS[version:]:
            for statement in step:
                db.execute(statement)
        if version < _VERSION:
            db.execute(f"PRAGMA user_version = {_VERSION}")
        db.execute("COMMIT")

    def close(self) -> None:
        """Let others have the store."""
        with self._lock, self._explained():
            self._db.close()

    def check(self) -> None:
        """Raise StorageLost if the store is not where it was, or not as it was left."""
        with self._lock:
            self._check()

    # Jobs

    def add_job(self, job: Job) -> None:
        """Note a new job, with nothing done."""
        with self._transaction() as db:
            db.execute("INSERT INTO jobs (id, tenant, record) VALUES (?, ?, ?)", _row(job))

    def remove_job(self, job_id: str) -> None:
        """Forget a job and how far it is."""
        with self._transaction() as db:
            db.execute("DELETE FROM jobs WHERE id = ?", (job_id,))

    def job(self, job_id: str) -> Job | None:
        """A job, or None if there is no such job."""
        return self._get("jobs", job_id, Job)

    def jobs(
        self, after: str | None = None, limit: int = 100, newest_first: bool = True, tenant: str | None = None
    ) -> list[Job]:
        """Jobs in the order in which they were added, or the other way round; those that follow the one named.

        All of them, or those of a tenant.
        """
        return self._list("jobs", Job, after, limit, newest_first, tenant)

    def change_job(self, job_id: str, change: Callable[[Job], None], results: Sequence[StoredFile] = ()) -> Job:
        """Change a job, note files that came of it, and return it as it is then. Raises KeyError if there is none."""
        with self._transaction() as db:
            job = self._get_in(db, "jobs", job_id, Job)
            if job is None:
                raise KeyError(job_id)
            change(job)
            db.execute("UPDATE jobs SET record = ? WHERE id = ?", (msgspec.json.encode(job), job_id))
            db.executemany("INSERT INTO files (id, tenant, record) VALUES (?, ?, ?)", map(_row, results))
            return job

    def enter(self, job_id: str, state: JobState, now: float) -> Job:
        """Put a job into a state at a time in Unix seconds, and return it."""

        def change(job: Job) -> None:
            job.state = state
            job.entered.setdefault(state, now)

        return self.change_job(job_id, change)

    def checkpoint(self, job_id: str) -> Checkpoint:
        """How far a job is; as of a job just begun, if nothing was committed."""
        with self._using() as db:
            row = db.execute("SELECT record FROM progress WHERE job = ?", (job_id,)).fetchone()
        return msgspec.msgpack.decode(row[0], type=Checkpoint) if row else Checkpoint()

    def commit(self, job_id: str, checkpoint: Checkpoint) -> None:
        """Note how far a job is. What its files hold beyond is as if it had never been written."""
        with self._transaction() as db:
            record = msgspec.msgpack.encode(checkpoint)
            db.execute("INSERT OR REPLACE INTO progress (job, record) VALUES (?, ?)", (job_id, record))

    # Files

    def add_file(self, file: StoredFile) -> None:
        """Note a new file."""
        with self._transaction() as db:
            db.execute("INSERT INTO files (id, tenant, record) VALUES (?, ?, ?)", _row(file))

    def file(self, file_id: str) -> StoredFile | None:
        """A file, or None if there is no such file."""
        return self._get("files", file_id, StoredFile)

    def files(self, after: str | None = None, limit: int = 100, newest_first: bool = True) -> list[StoredFile]:
        """Files in the order in which they were added, or the other way round; those that follow the one named."""
        return self._list("files", StoredFile, after, limit, newest_first)

    def remove_file(self, file_id: str) -> bool:
        """Forget a file; False if there was none."""
        with self._transaction() as db:
            return db.execute("DELETE FROM files WHERE id = ?", (file_id,)).rowcount > 0

    # SQLite

    def _get(self, table: str, record_id: str, kind: type[T]) -> T | None:
        with self._using() as db:
            return self._get_in(db, table, record_id, kind)

    def _get_in(self, db: sqlite3.Connection, table: str, record_id: str, kind: type[T]) -> T | None:
        row = db.execute(f"SELECT record FROM {table} WHERE id = ?", (record_id,)).fetchone()
        return msgspec.json.decode(row[0], type=kind) if row else None

    def _list(
        self, table: str, kind: type[T], after: str | None, limit: int, newest_first: bool, tenant: str | None = None
    ) -> list[T]:
        order, follows = ("DESC", "<") if newest_first else ("ASC", ">")
        wanted: dict[str, Any] = {}
        if after is not None:
            wanted[f"number {follows} (SELECT number FROM {table} WHERE id = ?)"] = after
        if tenant is not None:
            wanted["tenant = ?"] = tenant
        where = f"WHERE {' AND '.join(wanted)}" if wanted else ""
        query = f"SELECT record FROM {table} {where} ORDER BY number {order} LIMIT ?"
        with self._using() as db:
            rows = db.execute(query, (*wanted.values(), limit))
            return [msgspec.json.decode(record, type=kind) for (record,) in rows]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._using() as db:
            try:
                db.execute("BEGIN IMMEDIATE")
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        """The database, if it is there and as it was left; and once more, when it was used."""
        with self._lock:
            self._check()
            try:
                with self._explained():
                    yield self._db
            finally:
                self._check()

    def _check(self) -> None:
        now = _Place.of(self.path)
        if self._left is None or not now.is_same(self._left) or now.written != self._left.written:
            self._left = None
            raise StorageLost(f"{self.path} was taken away, replaced or written to by another program")
        self._left = now
        if now.log_bytes > _LOG_BYTES:
            # If it fails, the log only grows on until the next time.
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            after = _Place.of(self.path)
            self._left = after if after.is_same(now) else None

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def _explain(self, error: sqlite3.Error) -> JobError:
        exactly = getattr(error, "sqlite_errorcode", 0)
        code = exactly & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreBusy(f"{self.path} is in use: another process works on this job. Wait for it, or end it")
        if code == sqlite3.SQLITE_FULL:
            return StorageFull(f"there is no space for {self.path} ({error}): make some, or raise the quota")
        if exactly == sqlite3.SQLITE_IOERR_WRITE:
            # Of a quota, or a limit on files, SQLite says no more than that.
            return StorageFull(f"{self.path} can't be written ({error}): make space, raise the quota, or mend the disk")
        return JobError(f"{self.path} can't be used: {error}")


def _row(kept: Job | StoredFile) -> tuple[str, str | None, bytes]:
    return kept.id, kept.tenant, msgspec.json.encode(kept)


class _Place(NamedTuple):
    """Which files a database and its log are, when the former was last `written` and how long it was then."""

    database: tuple[int, int] | None
    log: tuple[int, int] | None
    written: tuple[int, int] = (0, 0)
    log_bytes: int = 0

    @classmethod
    def of(cls, path: Path) -> "_Place":
        """As of now."""
        database, log = _stat(path), _stat(path.with_name(f"{path.name}-wal"))
        if database is None:
            return cls(None, None)
        written = (database.st_mtime_ns, database.st_size)
        if log is None:
            return cls((database.st_dev, database.st_ino), None, written)
        return cls((database.st_dev, database.st_ino), (log.st_dev, log.st_ino), written, log.st_size)

    def is_same(self, before: "_Place") -> bool:
        """Whether these are the files of before, changed or not. SQLite makes the log when it is first needed."""
        return self.database == before.database is not None and before.log in (None, self.log)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _keep_private(path: Path) -> None:
    """Make a new database, or one of an older release, its owner's alone. SQLite makes what is beside it alike."""
    # What is wrong with it, if anything is, SQLite says.
    with contextlib.suppress(OSError):
        if not path.exists():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE))
        for each in (path, path.with_name(f"{path.name}-wal")):
            each.chmod(_MODE)
