"""The folder of an unfinished build: who holds it, and what it says when a file of it is damaged or gone."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.pipeline.inputs import patch_chunk_bytes, patch_merges, texts_of
from tests.pipeline.places import TEXTS, StoppedError, build, write
from tokshard import open_corpus
from tokshard.cli.build_text import status_lines
from tokshard.cli.main import run
from tokshard.errors import BuildError, TokshardError
from tokshard.format import names
from tokshard.pipeline import build as building
from tokshard.pipeline import stages
from tokshard.pipeline.progress import Note, Report, StageStarted
from tokshard.pipeline.status import read_status
from tokshard.pipeline.workspace import lease
from tokshard.pipeline.workspace.lease import lock, lock_holder
from tokshard.pipeline.workspace.places import FIND, HASH, LOCK, WRITE, open_workspace
from tokshard.pipeline.workspace.receipts import Receipt, read_receipt, read_receipts
from tokshard.store import open_store
from tokshard.store.posix import PosixStore

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


def test_a_build_whose_files_another_process_removed_says_so(place, monkeypatch):

    def removed(*arguments: Any) -> Any:
        shutil.rmtree(place / "out" / names.WORK)  # by a build that ends there
        (place / "out" / names.WORK / "gone").read_bytes()

    with monkeypatch.context() as patched:
        patched.setattr(building, "run_stages", removed)
        with pytest.raises(BuildError, match="another build began or ended there") as found:
            build(place)
    assert found.value.hint == "run the same command again when no other build or job writes there"
    build(place)


def test_a_place_that_cannot_be_made_is_not_taken_for_a_build_whose_files_are_gone(tmp_path):
    error = lease.cannot_write(str(tmp_path / "nowhere"), FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    assert error.problem.endswith("nowhere: No such file or directory")


def test_an_input_that_cannot_be_read_is_named_and_not_taken_for_a_full_disk(place, monkeypatch):
    def fail(*_: object) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield

    monkeypatch.setattr("tokshard.pipeline.tasks.running.read_span", fail)
    with pytest.raises(TokshardError, match=r"a\.jsonl cannot be read: Input/output error"):
        build(place)


# receipts


def some_receipt(place: Path) -> Path:
    (path,) = (place / "out" / names.WORK / "write" / "receipts").glob("*.receipt")
    return path


@pytest.mark.parametrize("damage", ["short", "flipped", "empty"])
def test_a_receipt_that_is_damaged_is_named_with_the_next_step(place, stop, damage):
    stop()
    path = some_receipt(place)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"short": content[:-5], "flipped": content, "empty": b""}[damage])
    with pytest.raises(BuildError, match=r"0000000-000000\.receipt is damaged") as caught:
        build(place)
    assert caught.value.hint.startswith("delete that file and run the same command again")
    assert run(["status", str(place / "out")]) == 1
    path.unlink()
    assert texts_of(open_corpus(build(place))) == TEXTS


def test_a_receipt_in_the_place_of_another_is_damaged(place, stop):
    stop()
    path = some_receipt(place)
    path.rename(path.with_name("0000001-000000.receipt"))
    with pytest.raises(BuildError, match=r"0000001-000000\.receipt is damaged: it is the receipt of another task"):
        read_receipt(open_store(str(place / "out")), WRITE, (1, 0))


def test_a_receipt_that_goes_while_the_status_is_read_is_passed_over(place, stop, monkeypatch):
    stop()
    path = some_receipt(place)
    get = PosixStore.get

    def late(store: PosixStore, name: str) -> bytes:
        if name.endswith(".receipt"):
            path.unlink(missing_ok=True)
        return get(store, name)

    monkeypatch.setattr(PosixStore, "get", late)
    status = read_status(place / "out")
    assert (status.state, status.documents) == ("unfinished", 0)
    store = open_workspace(place / "out").store
    assert list(read_receipts(store, WRITE, [(0, 0)])) == []
    with pytest.raises(BuildError, match="is gone"):
        read_receipt(store, WRITE, (0, 0))


def test_the_status_of_a_build_that_ends_meanwhile_is_complete(place, stop, monkeypatch):
    stop()

    def late(*arguments: Any) -> Any:
        monkeypatch.undo()
        build(place)
        return read_receipts(*arguments)

    monkeypatch.setattr("tokshard.pipeline.workspace.receipts.read_receipts", late)
    assert read_status(place / "out").state == "complete"


def test_the_status_names_the_search_for_duplicates(place, monkeypatch):
    patch_merges(monkeypatch)
    write(place / "a.jsonl", [*TEXTS, *TEXTS])
    begun = []

    def refuse(report: Report) -> None:
        if isinstance(report, StageStarted):
            begun.append(report.name)
        if isinstance(report, Receipt) and begun[-1] == FIND:
            raise StoppedError

    with pytest.raises(StoppedError):
        build(place, dedup="exact", observer=refuse)
    status = read_status(place / "out")
    assert (status.stage, status.tasks_done, status.num_tasks) == ("finding duplicates", 1, 0)
    assert (status.passes, status.passes_done) == (2, 1)
    assert ("tasks", "1 done") in status_lines(status)


def test_a_stream_that_was_read_to_its_end_is_one_task_done_however_many_segments_it_has(place, stop, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    (place / "a.jsonl.gz").write_bytes(gzip.compress(write(place / "a.jsonl", TEXTS).read_bytes()))
    stop(place / "a.jsonl.gz", task_bytes=64)
    assert len(list((place / "out" / names.WORK / "write" / "receipts").iterdir())) > 1
    status = read_status(place / "out")
    assert (status.tasks_done, status.num_tasks, status.segments_done) == (1, 1, 0)


@pytest.mark.parametrize("change", [-4, 4])
def test_hashes_that_change_before_duplicates_are_looked_for_are_damaged(place, monkeypatch, change):
    find = stages.find_duplicates

    def change_first(*arguments: Any) -> Any:
        (path,) = (place / "out" / names.WORK / "hash" / "files").glob("0*.bin")
        content = path.read_bytes()
        path.write_bytes(content[:change] if change < 0 else content + bytes(change))
        return find(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(stages, "find_duplicates", change_first)
        with pytest.raises(BuildError, match=r"0000000-000000\.bin is damaged: it has .* bytes, expected"):
            build(place, dedup="exact")
    assert texts_of(open_corpus(build(place, dedup="exact"))) == TEXTS


def test_a_list_of_duplicates_that_is_gone_is_named_and_made_again(place, monkeypatch):
    patch_merges(monkeypatch)  # what repeats within a part of a task is in no list
    write(place / "a.jsonl", [*TEXTS, *TEXTS])

    def lose(report: Report) -> None:
        if isinstance(report, StageStarted) and report.name == WRITE:
            for path in (place / "out" / names.WORK).glob("[fj]*/files/*.bin"):  # of the stages find and join
                path.unlink()

    with pytest.raises(BuildError, match=r"\.bin cannot be read: No such file") as caught:
        build(place, dedup="exact", observer=lose)
    assert caught.value.hint.startswith("run the same command again")
    assert texts_of(open_corpus(build(place, dedup="exact"))) == TEXTS


@pytest.mark.parametrize("task_bytes", [64, 1 << 20], ids=["tasks of its own", "a common task"])
def test_a_text_is_kept_where_the_input_that_had_it_first_goes_after_it_was_hashed(place, monkeypatch, task_bytes):
    patch_chunk_bytes(monkeypatch, 64)
    texts = ["only here", *TEXTS[:5], *(f"more {number}" for number in range(60))]
    write(place / "b.jsonl", texts)

    def lose(report: Report) -> None:
        if isinstance(report, StageStarted) and report.name == WRITE:
            (place / "a.jsonl").unlink(missing_ok=True)

    sources = [place / "a.jsonl", place / "b.jsonl"]
    out = build(place, *sources, dedup="exact", on_bad_source="skip", task_bytes=task_bytes, observer=lose)
    assert texts_of(open_corpus(out)) == texts


def test_a_stream_goes_on_behind_its_last_receipt(place, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    (place / "a.jsonl.gz").write_bytes(gzip.compress((place / "a.jsonl").read_bytes()))
    left = []

    def stop(report: Report) -> None:
        if isinstance(report, Receipt):
            left.append(report.key)
            if len(left) == 3:
                raise StoppedError

    with pytest.raises(StoppedError):
        build(place, place / "a.jsonl.gz", task_bytes=64, observer=stop)
    out = build(place, place / "a.jsonl.gz", task_bytes=64, observer=stop)
    assert left == [(0, number) for number in range(len(left))]
    assert len(left) > 6
    assert texts_of(open_corpus(out)) == TEXTS


def test_inputs_that_went_one_after_another_are_listed_in_their_order(place, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    damaged = place / "c.jsonl.gz"
    damaged.write_bytes(gzip.compress((place / "a.jsonl").read_bytes())[:-8])
    write(place / "b.jsonl", ["only here"])

    def lose(report: Report) -> None:
        if isinstance(report, StageStarted) and report.name == WRITE:
            (place / "a.jsonl").unlink(missing_ok=True)

    sources = [place / "a.jsonl", place / "b.jsonl", damaged]
    out = build(place, *sources, dedup="exact", on_bad_source="skip", task_bytes=64, observer=lose)
    rejects = (out / names.REJECTS).read_text().splitlines()
    assert [json.loads(line)["source"] for line in rejects] == ["a.jsonl", "c.jsonl.gz"]


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
    assert [report.name for report in reports if isinstance(report, StageStarted)] == [HASH, FIND, WRITE]
    assert capfd.readouterr() == ("", "")
