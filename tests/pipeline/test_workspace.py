"""The folder of an unfinished build: who holds it, and what it says when a file of it is damaged or gone."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import shutil
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import pytest

from tests.contract import small
from tests.pipeline.inputs import patch_chunk_bytes, texts_of
from tests.pipeline.places import TEXTS, at, build, interrupt, write
from tokshard import open_corpus
from tokshard.cli.main import run
from tokshard.errors import BuildError, StoreError, TokshardError
from tokshard.format import names
from tokshard.pipeline.progress import Note, Progress, Report, StageEnded, StageStarted
from tokshard.pipeline.status import read_status
from tokshard.pipeline.workspace import lease
from tokshard.pipeline.workspace.lease import lock, lock_holder
from tokshard.pipeline.workspace.places import FIND, HASH, LOCK, WRITE, open_workspace
from tokshard.pipeline.workspace.receipts import Receipt, read_receipt, read_receipts
from tokshard.store import PosixStore, open_store

# the lock


def failing(code: int) -> Mock:
    """A call of the system that ends in an error."""
    return Mock(side_effect=OSError(code, os.strerror(code)))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_builds_with_a_note(place, stop, monkeypatch, code):
    monkeypatch.setattr(fcntl, "flock", failing(code))
    stop()
    assert read_status(place / "out").state == "unfinished"
    reports: list[Report] = []
    assert texts_of(open_corpus(build(place, observer=reports.append))) == TEXTS
    (note,) = (report.text for report in reports if isinstance(report, Note))
    assert note.endswith("has no locks: start no other build there until this one ends")
    assert not (place / "out" / names.WORK).exists()


def test_a_lock_that_fails_in_another_way_is_an_error_and_leaves_no_descriptor(place, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BuildError, match=r"cannot write to"):
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


def test_only_a_full_disk_asks_for_room():
    ways_out = {errno.ENOSPC: "make room, or give", errno.EMFILE: "raise the limit of open files"}
    ways_out |= dict.fromkeys((errno.EACCES, errno.ENOENT), "check the disk and its permissions, or")
    for code, way_out in ways_out.items():
        error = lease.cannot_write("nowhere", OSError(code, os.strerror(code)))
        assert error.problem == f"cannot write to nowhere: {os.strerror(code)}"
        assert error.hint.startswith(way_out)


def test_a_saved_tokenizer_that_no_descriptor_is_left_for_is_not_called_damaged(place, monkeypatch):
    get = PosixStore.get

    def crowded(store: PosixStore, name: str) -> bytes:
        if name.endswith(f"{names.WORK}/{names.TOKENIZER}"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return get(store, name)

    small.on_disk(monkeypatch.setattr, get=crowded)
    with pytest.raises(BuildError, match=r"cannot write to .*: Too many open files") as found:
        build(place)
    assert found.value.hint.startswith("raise the limit of open files")
    monkeypatch.undo()
    build(place)


def test_a_build_whose_files_another_process_removed_says_so(place):
    def removed(_: object) -> None:
        shutil.rmtree(place / "out" / names.WORK)  # by a build that ends there
        (place / "out" / names.WORK / "gone").read_bytes()

    with pytest.raises(BuildError, match="another build began or ended there") as found:
        build(place, observer=at(StageStarted, removed))
    assert found.value.hint == "run the same command again when no other build or job writes there"
    build(place)


def test_an_input_that_cannot_be_read_is_named_and_not_taken_for_a_full_disk(place, monkeypatch):
    monkeypatch.setattr("tokshard.pipeline.tasks.running.read_span", failing(errno.EIO))
    with pytest.raises(TokshardError, match=r"a\.jsonl cannot be read: Input/output error"):
        build(place)


# receipts


def some_receipt(place: Path) -> Path:
    (path,) = (place / "out" / names.WORK / small.RECEIPTS).glob("*.receipt")
    return path


def test_a_receipt_in_the_place_of_another_is_damaged(place, stop):
    stop()
    path = some_receipt(place)
    path.rename(path.with_name("0000001-000000.receipt"))
    with pytest.raises(BuildError, match=r"0000001-000000\.receipt is damaged: it is the receipt of another task"):
        read_receipt(open_store(str(place / "out")), WRITE, (1, 0))


def test_a_receipt_that_goes_while_the_status_is_read_is_passed_over(place, stop, monkeypatch):
    stop()
    path, get = some_receipt(place), PosixStore.get

    def late(store: PosixStore, name: str) -> bytes:
        if name.endswith(".receipt"):
            path.unlink(missing_ok=True)
        return get(store, name)

    small.on_disk(monkeypatch.setattr, get=late)
    status = read_status(place / "out")
    assert (status.state, status.documents) == ("unfinished", 0)
    store = open_workspace(place / "out").store
    assert list(read_receipts(store, WRITE, [(0, 0)])) == []
    with pytest.raises(BuildError, match="is gone"):
        read_receipt(store, WRITE, (0, 0))


def test_the_status_names_the_search_for_duplicates(place, monkeypatch, capsys):
    small.shrink(monkeypatch.setattr, **small.MERGES)
    write(place / "a.jsonl", [*TEXTS, *TEXTS])
    with pytest.raises(KeyboardInterrupt):
        build(place, dedup="exact", observer=at(Receipt, interrupt, stage=FIND))
    status = read_status(place / "out")
    assert (status.stage, status.tasks_done, status.num_tasks) == ("finding duplicates", 1, 0)
    assert (status.passes, status.passes_done) == (2, 1)
    found = place / "out" / names.WORK / FIND
    for number in (9, 10):
        shutil.copytree(found, found.with_name(f"{FIND}-{number}"))
    (receipt,) = found.with_name(f"{FIND}-9").rglob("*.receipt")
    receipt.write_bytes(b"damaged, if this is taken for the newest stage")
    assert run(["status", str(place / "out")]) == 0
    assert "tasks 1 done" in " ".join(capsys.readouterr().out.split())


def test_a_build_that_succeeded_may_leave_its_files_in_a_store_that_fails(place, monkeypatch):
    delete = PosixStore.delete

    def refuse(store: PosixStore, *found: str) -> None:
        if LOCK in found:
            raise StoreError("access denied", hint="ask for access")
        delete(store, *found)

    small.on_disk(monkeypatch.setattr, delete=refuse)
    assert texts_of(open_corpus(build(place))) == TEXTS


def test_a_stream_goes_on_behind_its_last_segment_and_is_one_task(place, stop, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    (place / "a.jsonl.gz").write_bytes(gzip.compress((place / "a.jsonl").read_bytes()))
    with pytest.raises(KeyboardInterrupt) as caught:
        build(place, place / "a.jsonl.gz", task_bytes=64, observer=at(Receipt, interrupt, number=3))
    assert caught.value.__notes__ == ["run the same command to continue"]
    reports: list[Report] = []
    stop(place / "a.jsonl.gz", task_bytes=64, observer=reports.append)
    left = [report.key for report in reports if isinstance(report, Receipt)]
    assert left == [(0, number) for number in range(3, 3 + len(left))]
    assert len(left) > 3
    status = read_status(place / "out")
    assert (status.tasks_done, status.num_tasks, status.segments_done) == (1, 1, 0)
    assert texts_of(open_corpus(build(place, place / "a.jsonl.gz", task_bytes=64))) == TEXTS


def test_inputs_that_went_one_after_another_are_listed_in_their_order(place, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    damaged = place / "c.jsonl.gz"
    damaged.write_bytes(gzip.compress((place / "a.jsonl").read_bytes())[:-8])
    write(place / "b.jsonl", ["only here"])

    lose = at(StageStarted, lambda _: (place / "a.jsonl").unlink(), stage=WRITE)
    sources = [place / "a.jsonl", place / "b.jsonl", damaged]
    out = build(place, *sources, dedup="exact", on_bad_source="skip", task_bytes=64, observer=lose)
    rejects = (out / names.REJECTS).read_text().splitlines()
    assert [json.loads(line)["source"] for line in rejects] == ["a.jsonl", "c.jsonl.gz"]


def test_a_build_reports_to_its_observer_and_prints_nothing(place, capfd):
    damaged = place / "b.jsonl.gz"
    damaged.write_bytes(gzip.compress((place / "a.jsonl").read_bytes())[:-8])
    reports: list[Report] = []
    out = build(place, place / "a.jsonl", damaged, dedup="exact", on_bad_source="skip", observer=reports.append)
    assert {type(report) for report in reports} == set(get_args(Report)) - {Note}
    assert [report.name for report in reports if isinstance(report, StageStarted)] == [HASH, FIND, WRITE]
    assert isinstance(reports[-1], StageEnded)
    progress = [report for report in reports if isinstance(report, Progress)]
    assert sum(report.tokens for report in progress) == open_corpus(out).manifest.num_tokens
    assert all(report.documents <= report.records for report in progress)
    assert capfd.readouterr() == ("", "")
