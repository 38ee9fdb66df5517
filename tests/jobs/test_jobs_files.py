"""Progress, result files, store and order: after any crash each line has its result exactly once."""

import os
import resource
import shutil
import sqlite3
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.config.run import Order
from chairlift.errors import JobError, StorageFull, StorageLost
from chairlift.jobs.line_order import arrange
from chairlift.jobs.progress import Progress
from chairlift.jobs.result_file import ResultFile
from chairlift.jobs.store import Checkpoint, Counts, Job, Store, StoredFile


@given(st.permutations(range(1, 60)), st.integers(0, 59))
def test_progress_is_what_was_finished(order: list[int], cut: int) -> None:
    progress = Progress()
    for number in order[:cut]:
        progress.finish(number)
    again = Progress.from_bytes(progress.to_bytes())
    for either in (progress, again):
        assert [number for number in range(1, 100) if number in either] == sorted(order[:cut])
        assert either.watermark == next(n for n in range(61) if n + 1 not in order[:cut])
    for number in order[cut:]:
        again.finish(number)
    assert again.to_bytes() == (59).to_bytes(8, "little")


def test_no_line_is_finished_twice() -> None:
    progress = Progress(3, [5])
    for number in (1, 3, 5):
        with pytest.raises(ValueError, match="done already"):
            progress.finish(number)
    with pytest.raises(ValueError, match="8 bytes"):
        Progress.from_bytes(b"123")


def test_progress_far_beyond_stays_small() -> None:
    progress = Progress(10**9)
    progress.finish(10**9 + 16_384)
    assert len(progress.to_bytes()) == 8 + 2048


# What a process may do between two crashes: a result for one file or the other, or a commit.
_ACTIONS = st.lists(st.sampled_from(["output", "errors", "commit"]), max_size=12)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(_ACTIONS, st.integers(0, 80)), min_size=1, max_size=5))
def test_whatever_moment_it_dies_each_line_has_one_result(lives: list[tuple[list[str], int]]) -> None:
    """Each life does lines, commits now and then, and dies; a part of what it wrote since may be on the disk."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for actions, torn in [*lives, (["output"] * 40 + ["commit"], 0)]:
            _live(folder, actions, torn)
        text = "".join(path.read_text() for path in (folder / "out", folder / "err") if path.exists())
        numbers = [int(line) for line in text.splitlines()]
        assert text.endswith("\n")
        assert sorted(numbers) == list(range(1, len(numbers) + 1))


def _live(folder: Path, actions: list[str], torn: int) -> None:
    store = Store(folder / "state")
    if not store.jobs():
        store.add_job(Job(id="j", state="in_progress", entered={}))
    at = store.checkpoint("j")
    progress = Progress.from_bytes(at.progress)
    files = {
        "output": ResultFile(folder / "out", at.output_bytes),
        "errors": ResultFile(folder / "err", at.error_bytes),
    }
    number = progress.watermark
    for action in actions:
        if action == "commit":
            lengths = [file.append([]) for file in files.values()]
            at = Checkpoint(progress=progress.to_bytes(), output_bytes=lengths[0], error_bytes=lengths[1])
            store.commit("j", at)
            for file in files.values():
                file.keep()
        else:
            number += 1
            progress.finish(number)
            files[action].append([b"%d\n" % number])
    for file in files.values():
        # Death: nothing is cut off or closed in order, and not all of what was written got to the disk.
        if file.path.exists():
            os.truncate(file.path, max(file.committed, file.path.stat().st_size - torn))
        if file._fd is not None:
            os.close(file._fd)
    store.close()


def test_a_result_file_keeps_what_counts(tmp_path: Path) -> None:
    path = tmp_path / "out"
    file = ResultFile(path, 0)
    assert not path.exists()
    assert file.append([b"one\n"]) == 4
    file.keep()
    assert file.append([b"t", b"wo\n"]) == 8
    file.drop()
    assert path.read_bytes() == b"one\n"
    assert file.append([b"three\n"]) == 10
    file.close()
    assert path.read_bytes() == b"one\n"
    path.write_bytes(b"one\ntorn li")
    ResultFile(path, 4).close()
    assert path.read_bytes() == b"one\n"
    with pytest.raises(JobError, match="fewer than the 9"):
        ResultFile(path, 9)
    ResultFile(path, 0)
    assert not path.exists()


def test_results_reach_the_disk_where_only_whole_files_can_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.delattr(os, "fdatasync", raising=False)  # macOS
    monkeypatch.setattr(os, "fsync", flushed.append)
    file = ResultFile(tmp_path / "out", 0)
    assert file.append([b"line\n"]) == 5
    assert len(flushed) == 2, "the file, and its name in the folder"
    file.close()


def test_what_others_make_after_a_run_began_is_theirs(tmp_path: Path) -> None:
    path = tmp_path / "err"
    file = ResultFile(path, 0)
    path.write_bytes(b"of another run")
    with pytest.raises(JobError, match=r"err was made by another program after this run began: name a file"):
        file.append([b"one\n"])
    file.close()
    assert path.read_bytes() == b"of another run"


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    folder, pipe, loop = tmp_path / "folder", tmp_path / "pipe", tmp_path / "loop"
    folder.mkdir()
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    for path in (folder, pipe):
        with pytest.raises(JobError, match=f"{path.name} is not a regular file.*: name another"):
            ResultFile(path, 0)
    with pytest.raises(JobError, match="loop can't be written: Too many levels"):
        ResultFile(loop, 0)
    assert folder.is_dir()
    assert pipe.is_fifo()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="can't be written: No such file"):
        ResultFile(tmp_path / "no" / "out", 0).append([b"x"])
    with pytest.raises(JobError, match="can't be used"):
        Store(tmp_path / "no" / "state")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_store_is_its_owners_alone(umask: int, tmp_path: Path) -> None:
    path = tmp_path / "state"
    before = os.umask(umask)
    try:
        store = Store(path)
        store.add_job(Job(id="j", state="in_progress", entered={}))
        modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
        assert modes == {"state": 0o600, "state-wal": 0o600}
        store.close()
        # As an older release left it.
        path.chmod(0o644)
        store = Store(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert store.job("j") is not None
        store.close()
    finally:
        os.umask(before)


def test_the_store_remembers(tmp_path: Path) -> None:
    path = tmp_path / "state"
    store = Store(path)
    for number in range(5):
        store.add_job(Job(id=f"j{number}", state="validating", entered={"validating": 1.5}, about={"n": number}))
    job = store.enter("j1", "in_progress", 2.0)
    store.enter("j1", "in_progress", 3.0)
    checkpoint = Checkpoint(
        progress=Progress(3, [7]).to_bytes(), output_bytes=9, number=3, offset=70, counts=Counts(4, 1)
    )
    store.commit("j1", checkpoint)
    with pytest.raises(KeyError):
        store.enter("none", "failed", 1.0)
    store.close()
    store = Store(path)
    assert store.job("j1") == job
    assert job.entered == {"validating": 1.5, "in_progress": 2.0}
    assert store.job("none") is None
    assert [each.id for each in store.jobs(limit=2)] == ["j4", "j3"]
    assert [each.id for each in store.jobs(after="j3", limit=2)] == ["j2", "j1"]
    assert [each.id for each in store.jobs(after="j3", newest_first=False)] == ["j4"]
    assert store.checkpoint("j1") == checkpoint
    assert store.checkpoint("j2") == Checkpoint()
    store.remove_job("j1")
    assert store.job("j1") is None
    assert store.checkpoint("j1") == Checkpoint()
    file = StoredFile(id="f", bytes=3, created_at=1.0, filename="a.jsonl", purpose="batch")
    store.add_file(file)
    assert store.file("f") == file
    assert store.files() == [file]
    assert store.remove_file("f")
    assert not store.remove_file("f")
    store.close()


def test_a_store_of_another_release_or_none_at_all_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(JobError, match="another release"):
        Store(path)
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(JobError, match="can't be used"):
        Store(path)


def test_a_store_without_room_stays_as_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    store.add_job(Job(id="j", state="in_progress", entered={}))
    store.commit("j", Checkpoint(output_bytes=1))
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageFull, match=r"no space for .*state"):
        store.commit("j", Checkpoint(progress=bytes(10_000), output_bytes=2))
    assert store.checkpoint("j").output_bytes == 1
    store._db.execute("PRAGMA max_page_count = 1000")
    store.commit("j", Checkpoint(progress=bytes(10_000), output_bytes=3))
    assert store.checkpoint("j").output_bytes == 3
    store.close()


def test_a_store_that_may_not_grow_stays_as_it_was(tmp_path: Path) -> None:
    """As of a quota, or a limit on files, SQLite says no more than that it could not write."""
    store = Store(tmp_path / "state")
    store.add_job(Job(id="j", state="in_progress", entered={}))
    store.commit("j", Checkpoint(output_bytes=1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "state-wal").stat().st_size, before[1]))
    try:
        with pytest.raises(StorageFull, match=r"state can't be written .*: make space, raise the quota"):
            store.commit("j", Checkpoint(output_bytes=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.checkpoint("j").output_bytes == 1
    store.commit("j", Checkpoint(output_bytes=3))
    assert store.checkpoint("j").output_bytes == 3
    store.close()


def test_a_copy_of_the_store_after_a_crash_is_whole(tmp_path: Path) -> None:
    """What is committed is in the files that a dead process leaves behind."""
    store = Store(tmp_path / "state")
    store.add_job(Job(id="j", state="in_progress", entered={}))
    store.commit("j", Checkpoint(output_bytes=5))
    left = tmp_path / "left"
    left.mkdir()
    for path in tmp_path.glob("state*"):
        shutil.copy(path, left)
    store.close()
    again = Store(left / "state")
    assert again.checkpoint("j").output_bytes == 5
    again.close()


@given(st.lists(st.binary(max_size=20)), st.sampled_from(["file", "prefix", "length"]))
def test_order_is_a_permutation(bodies: list[bytes], order: Order) -> None:
    lines = list(enumerate(bodies))
    arranged = arrange(lines, order, lambda line: line[1])
    assert sorted(arranged) == lines
    if order == "file":
        assert arranged == lines
    lengths = [len(body) for _, body in arranged]
    assert order != "length" or lengths == sorted(lengths, reverse=True)


def test_prefixes_come_together_whatever_stands_before_them() -> None:
    bodies = [
        b'{"model":"m","prompt":"a tale of one"}',
        b'{"messages":[{"role":"user","content":"b"}]}',
        b'{"max_tokens":9,"prompt":"a tale of two"}',
        b'{"model":"m","messages":[{"role":"user","content":"b"}]}',
        b'{"model":"m","prompt":"c"}',
    ]
    assert arrange(range(5), "prefix", lambda place: bodies[place]) == [1, 3, 0, 2, 4]


def test_the_log_of_the_store_stays_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.jobs.store._LOG_BYTES", 100_000)
    store = Store(tmp_path / "state")
    store.add_job(Job(id="j", state="in_progress", entered={}))
    log, longest = tmp_path / "state-wal", 0
    for number in range(200):
        store.commit("j", Checkpoint(number=number))
        longest = max(longest, log.stat().st_size)
    assert 90_000 < longest < 130_000
    assert (tmp_path / "state").stat().st_size > 4096
    store.close()
    assert Store(tmp_path / "state").checkpoint("j").number == 199


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere offsets count, and a hole is not noticed")
def test_a_file_that_is_cut_between_two_writes_of_one_append_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, write = ResultFile(tmp_path / "results.jsonl", 0), os.pwrite
    sizes: list[int] = []

    def cut_before_the_second(fd: int, raw: memoryview, offset: int) -> int:
        if sizes:
            os.truncate(results.path, 10)
        sizes.append(write(fd, raw, offset))
        return sizes[-1]

    monkeypatch.setattr("chairlift.jobs.result_file.os.pwrite", cut_before_the_second)
    with pytest.raises(StorageLost, match="was written to by another program"):
        results.append([b"a result\n"] * 300)
    assert len(sizes) == 2
