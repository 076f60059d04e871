"""The folder of an unfinished build: who holds it, and what it says when a file of it is damaged or gone."""

from __future__ import annotations

import errno
import fcntl
import gzip
import os
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pytest
from pyarrow import ipc

from tests.pipeline.inputs import patch_chunk_bytes, patch_merges, texts_of
from tests.pipeline.places import TEXTS, StoppedError, build, write
from tokshard import open_corpus
from tokshard.cli.build_text import status_lines
from tokshard.cli.main import run
from tokshard.errors import BuildError, TokshardError
from tokshard.format import names
from tokshard.pipeline import run as running
from tokshard.pipeline.progress import Note, Report, StageStarted
from tokshard.pipeline.status import read_status
from tokshard.pipeline.tasks import duplicates
from tokshard.pipeline.workspace import lease, receipts
from tokshard.pipeline.workspace.lease import lock, lock_holder
from tokshard.pipeline.workspace.places import LOCK, Stage, Workspace, open_workspace
from tokshard.pipeline.workspace.receipts import read_receipt, read_receipts
from tokshard.store import Store

# the lock


def without_locks(code: int) -> Any:
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return flock


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_builds_with_a_note(place, monkeypatch, code):
    monkeypatch.setattr(fcntl, "flock", without_locks(code))
    reports: list[Report] = []
    out = build(place, observer=reports.append)
    assert texts_of(open_corpus(out)) == TEXTS
    (note,) = (report.text for report in reports if isinstance(report, Note))
    assert note.endswith("has no locks: start no other build there until this one ends")
    assert not (out / names.WORK).exists()


def test_the_status_of_a_build_on_a_file_system_without_locks(place, stop, monkeypatch):
    stop()
    monkeypatch.setattr(fcntl, "flock", without_locks(errno.ENOSYS))
    assert read_status(place / "out").state == "unfinished"


def test_a_lock_that_fails_in_another_way_is_an_error_and_leaves_no_descriptor(place, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", without_locks(errno.EIO))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BuildError, match="cannot write to"):
        build(place)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lock_is_taken_on_the_file_that_is_there_and_not_on_one_that_was_removed(tmp_path, monkeypatch):
    held = open_workspace(tmp_path)
    flock, removed = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(True)
            (tmp_path / LOCK).unlink()  # by the build before, which just ends
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock(held):
        assert removed
        assert lock_holder(held) == (tmp_path / LOCK).read_text()


# errors of the disk


@pytest.mark.parametrize(
    ("code", "way_out"),
    [(errno.ENOSPC, "make room, or give"), (errno.EACCES, "check the disk and its permissions, or")],
)
def test_only_a_full_disk_asks_for_room(code, way_out):
    hint = lease.cannot_write(Path("out"), OSError(code, os.strerror(code))).hint
    assert hint.startswith(way_out)


def test_an_input_that_cannot_be_read_is_named_and_not_taken_for_a_full_disk(place, monkeypatch):
    def fail(*_: object) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield

    monkeypatch.setattr("tokshard.pipeline.tasks.runner.read_span", fail)
    with pytest.raises(TokshardError, match=r"a\.jsonl cannot be read: Input/output error"):
        build(place)


# receipts


def some_receipt(place: Path) -> Path:
    (path,) = (place / "out" / names.WORK / "receipts").glob("*.arrow")
    return path


def test_a_receipt_with_too_few_batches_is_damaged(place, stop):
    stop()
    path = some_receipt(place)
    schema = ipc.open_file(pa.py_buffer(path.read_bytes())).schema
    with ipc.new_file(str(path), schema):
        pass
    with pytest.raises(BuildError, match="0 batches of shards for 1 corpora"):
        read_receipt(open_workspace(place / "out"), (0, 0))
    assert run(["status", str(place / "out")]) == 1


def test_a_receipt_that_goes_while_the_status_is_read_is_passed_over(place, stop, monkeypatch):
    stop()
    path = some_receipt(place)
    map_file = receipts.map_file

    def late(store: Store, name: str) -> Any:
        path.unlink(missing_ok=True)
        return map_file(store, name)

    monkeypatch.setattr(receipts, "map_file", late)
    status = read_status(place / "out")
    assert (status.state, status.documents) == ("unfinished", 0)
    left = open_workspace(place / "out")
    assert list(read_receipts(left)) == []
    with pytest.raises(BuildError, match="is gone"):
        read_receipt(left, (0, 0))


def test_the_status_of_a_build_that_ends_meanwhile_is_complete(place, stop, monkeypatch):
    stop()

    def late(left: Workspace) -> Any:
        build(place)
        return read_receipts(left)

    monkeypatch.setattr("tokshard.pipeline.status.read_receipts", late)
    assert read_status(place / "out").state == "complete"


def test_the_status_names_the_search_for_duplicates(place, monkeypatch):
    def refuse(*_: Any) -> None:
        raise StoppedError

    monkeypatch.setattr("tokshard.pipeline.run.find_duplicates", refuse)
    with pytest.raises(StoppedError):
        build(place, dedup="exact")
    status = read_status(place / "out")
    assert (status.stage, status.tasks_done, status.num_tasks) == ("finding duplicates", 0, 0)
    assert ("tasks", "0 done") in status_lines(status)


def test_a_stream_that_was_read_to_its_end_is_one_task_done_however_many_segments_it_has(place, stop, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    (place / "a.jsonl.gz").write_bytes(gzip.compress(write(place / "a.jsonl", TEXTS).read_bytes()))
    stop(place / "a.jsonl.gz", task_bytes=64)
    assert len(list((place / "out" / names.WORK / "receipts").iterdir())) > 1
    status = read_status(place / "out")
    assert (status.tasks_done, status.num_tasks, status.segments_done) == (1, 1, 0)


@pytest.mark.parametrize("change", [-4, 4])
def test_hashes_that_change_before_duplicates_are_looked_for_are_damaged(place, monkeypatch, change):
    find = duplicates.find_duplicates

    def change_first(found: Workspace, *arguments: Any) -> Any:
        (path,) = (place / "out" / found.hashes).glob("0*.bin")
        content = path.read_bytes()
        path.write_bytes(content[:change] if change < 0 else content + bytes(change))
        return find(found, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(running, "find_duplicates", change_first)
        with pytest.raises(BuildError, match=r"0000000-000000\.bin is damaged: it has .* bytes, expected"):
            build(place, dedup="exact")
    assert texts_of(open_corpus(build(place, dedup="exact"))) == TEXTS


def test_a_list_of_duplicates_that_is_gone_is_named_and_made_again(place, monkeypatch):
    patch_merges(monkeypatch)  # what repeats within a part of a task is in no list
    write(place / "a.jsonl", [*TEXTS, *TEXTS])
    find = duplicates.find_duplicates

    def lose(*arguments: Any) -> Any:
        found = find(*arguments)
        for path in (place / "out" / found.workspace.duplicates.hashes).iterdir():
            path.unlink()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(running, "find_duplicates", lose)
        with pytest.raises(BuildError, match=r"duplicates.*\.bin cannot be read: No such file") as caught:
            build(place, dedup="exact")
    assert caught.value.hint.startswith("run the same command again")
    assert texts_of(open_corpus(build(place, dedup="exact"))) == TEXTS


def test_a_text_is_kept_where_the_input_that_had_it_first_goes_after_it_was_hashed(place, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)  # each source has tasks of its own
    write(place / "b.jsonl", ["only here", *TEXTS[:5]])
    find = duplicates.find_duplicates

    def lose(*arguments: Any) -> Any:
        (place / "a.jsonl").unlink(missing_ok=True)
        return find(*arguments)

    monkeypatch.setattr(running, "find_duplicates", lose)
    out = build(place, place / "a.jsonl", place / "b.jsonl", dedup="exact", on_bad_source="skip", task_bytes=64)
    assert texts_of(open_corpus(out)) == ["only here", *TEXTS[:5]]


def test_a_build_that_writes_nothing_leaves_no_table(place):
    (place / "a.jsonl").write_bytes(b'{"text": ""}\n')
    with pytest.raises(BuildError, match="no document was written"):
        build(place)
    assert [path.name for path in (place / "out").iterdir()] == [names.WORK]


def test_a_build_reports_to_its_observer_and_prints_nothing(place, capfd):
    damaged = place / "b.jsonl.gz"
    damaged.write_bytes(gzip.compress((place / "a.jsonl").read_bytes())[:-8])
    reports: list[Report] = []
    build(place, place / "a.jsonl", damaged, dedup="exact", on_bad_source="skip", observer=reports.append)
    assert {type(report) for report in reports} == set(get_args(Report)) - {Note}
    hashing, encoding = (report.stage for report in reports if isinstance(report, StageStarted))
    assert (hashing, encoding) == (Stage.HASHING, Stage.ENCODING)
    assert capfd.readouterr() == ("", "")
