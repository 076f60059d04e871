"""A checkpoint exists wholly or not at all. What is said of a damaged one is in test_damage.py."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from tests.contract.test_promise_11_no_code_from_data import Hostile
from tests.trainer.checkpoints import (
    FIRST,
    FOURTH,
    SECOND,
    THIRD,
    alone,
    latest,
    load,
    save,
    seal,
    state_after,
    trained,
)
from tokshard.errors import LoaderError, TrainerError, UsageError
from tokshard.run_files.checkpoint_directory import STATE_FILE, delete_old
from tokshard.run_files.recipe import Checkpoint
from tokshard.run_files.torch_checkpoints import read_metadata
from tokshard.trainer import checkpoint
from tokshard.trainer.checkpoint import Saver, tensors_of


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with alone():
        yield


def test_a_run_continues_from_the_newest_intact_checkpoint_unless_a_damaged_one_is_newer(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / FIRST / STATE_FILE).unlink()
    assert latest(tmp_path) == THIRD
    for name, hint in ((THIRD, f"to continue from {tmp_path / SECOND}"), (SECOND, "to start a new run")):
        (tmp_path / name / STATE_FILE).write_text("")
        with pytest.raises(TrainerError, match=f"{THIRD} is damaged") as error:
            latest(tmp_path)
        assert error.value.hint == f"restore what is damaged from a copy, or rename it {hint}"
    for name in os.listdir(tmp_path):
        os.rename(tmp_path / name, tmp_path / f"{name}.damaged")
    assert latest(tmp_path) is None


def test_a_copy_under_the_name_of_a_later_step_is_neither_continued_nor_a_reason_to_delete_another(
    tmp_path: Path,
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    shutil.copytree(tmp_path / FIRST, tmp_path / THIRD)
    with pytest.raises(TrainerError, match=f"{THIRD} holds step 1, but its name says another"):
        latest(tmp_path)
    assert list(delete_old(str(tmp_path), 1)) == []
    assert sorted(os.listdir(tmp_path)) == [SECOND, THIRD]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path, name: str) -> None:
    path, ran = save(tmp_path, 1), tmp_path / "ran"
    length = (path / name).stat().st_size if name == "__0_0.distcp" else 0  # its place and length are of a tensor
    (path / name).write_bytes(pickle.dumps(Hostile(ran)).ljust(length, b"."))
    seal(path)
    with pytest.raises(LoaderError):
        load(path)
    assert not ran.exists()


def test_a_saved_value_in_place_of_a_tensor_is_not_unpickled(tmp_path: Path) -> None:
    path, ran = save(tmp_path, 1), tmp_path / "ran"
    save_tensors(dict.fromkeys(read_metadata(str(path)).state_dict_metadata, Hostile(ran)), checkpoint_id=str(path))
    seal(path)
    with pytest.raises(UsageError, match=r"model\.embedding\.weight is None there"):
        load(path)
    assert not ran.exists()


def test_a_start_removes_what_unfinished_saves_and_deletions_left_and_nothing_else(tmp_path: Path) -> None:
    names = ["step-00000003.partial", "notes.partial", "step-00000005.damaged", "x"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("content")
    (tmp_path / "step-00000004.partial").symlink_to(tmp_path / "x")
    assert latest(tmp_path) is None
    assert sorted(os.listdir(tmp_path)) == sorted(names[1:])
    assert (tmp_path / "x" / "file").exists()


def test_files_and_their_names_are_durable_before_a_checkpoint_shows_and_its_own_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[tuple[int, int]] = set()
    rename, fsync = os.rename, os.fsync
    checked = []

    def identity(status: os.stat_result) -> tuple[int, int]:
        return (status.st_ino, status.st_size)  # a size: of what had left its buffer

    def log_fsync(descriptor: int) -> None:
        synced.add(identity(os.fstat(descriptor)))
        fsync(descriptor)

    def check_rename(source: str, target: str) -> None:
        if str(source).endswith(".partial"):
            within = [source, *(os.path.join(source, name) for name in os.listdir(source))]
            checked.extend(path for path in within if identity(os.stat(path)) not in synced)
            synced.clear()
        rename(source, target)

    (tmp_path / "checkpoints" / f"{FIRST}.partial").mkdir(parents=True)
    (tmp_path / "checkpoints" / f"{FIRST}.partial" / "__0_9.distcp").touch()  # of a save that failed
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", log_fsync)
        patch.setattr(os, "rename", check_rename)
        path = save(tmp_path / "checkpoints", 1)
    assert len(os.listdir(path)) == 4
    assert checked == []
    assert identity(os.stat(path.parent)) in synced


@pytest.mark.parametrize("last_call", ["rename", "fsync"])
def test_a_save_that_dies_leaves_the_one_before_as_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_call: str
) -> None:
    save(tmp_path, 1)
    original = getattr(os, last_call)

    def die(first: object, *arguments: object) -> None:
        if last_call == "rename" and not str(first).endswith(".partial"):
            return original(first, *arguments)  # one of DCP's own
        raise OSError("the machine stops here")

    with monkeypatch.context() as patch:
        patch.setattr(os, last_call, die)
        with pytest.raises(TrainerError, match="the machine stops here"):
            save(tmp_path, 2)
    assert f"{SECOND}.partial" in os.listdir(tmp_path)
    assert latest(tmp_path) == FIRST
    assert os.listdir(tmp_path) == [FIRST]
    save(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == [FIRST, SECOND]


def test_old_checkpoints_go_and_damaged_ones_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / THIRD / ".metadata").unlink()
    assert list(delete_old(str(tmp_path), 0)) == []
    assert len(os.listdir(tmp_path)) == 4
    assert not list(delete_old(str(tmp_path), 2))
    assert sorted(os.listdir(tmp_path)) == [SECOND, THIRD, FOURTH]
    (tmp_path / FOURTH / ".metadata").unlink()
    assert not list(delete_old(str(tmp_path), 1))
    assert SECOND in os.listdir(tmp_path)  # the newest that can be loaded


@contextmanager
def saver(directory: Path, *, keep: int = 0) -> Iterator[tuple[Saver, list[str]]]:
    """An asynchronous saver, and what it says."""
    said: list[str] = []
    one = Saver(str(directory), Checkpoint(keep=keep, asynchronous=True), timeout_seconds=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "say", said.append)
        try:
            yield one, said
        finally:
            one.close()


def test_a_deletion_that_fails_half_way_is_told_and_leaves_nothing_that_looks_like_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        raise PermissionError(f"{path} is in use")

    with monkeypatch.context() as patch, saver(tmp_path, keep=1) as (one, said):
        patch.setattr(shutil, "rmtree", fail)
        for step in (1, 2):
            one.save(*trained(seed=1), state_after(step))
    assert said[2:] == [
        f"warning: {tmp_path / FIRST} could not be deleted: {tmp_path / FIRST}.partial is in use",
    ]
    assert sorted(os.listdir(tmp_path)) == [f"{FIRST}.partial", SECOND]
    assert latest(tmp_path) == SECOND
    assert os.listdir(tmp_path) == [SECOND]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Tensors are written when it is set."""
    gate = threading.Event()

    def wait(*arguments: Any, **options: Any) -> None:
        assert gate.wait(60)
        save_tensors(*arguments, **options)

    monkeypatch.setattr(checkpoint, "save_tensors", wait)
    return gate


def test_an_asynchronous_save_holds_the_tensors_of_its_step_although_training_goes_on(
    tmp_path: Path, gate: threading.Event
) -> None:
    model, optimizer = trained(seed=1)
    expected = {name: tensor.clone() for name, tensor in tensors_of(model, optimizer).items()}
    with saver(tmp_path) as (one, said):
        one.save(model, optimizer, state_after(1))
        optimizer.step()
        gate.set()
        one.wait()
        assert said == [f"saved {tmp_path / FIRST}"]
    assert not any(torch.equal(tensor, expected[name]) for name, tensor in tensors_of(model, optimizer).items())
    assert checkpoint.load(str(tmp_path / FIRST), model, optimizer) == state_after(1)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors_of(model, optimizer).items())


@pytest.mark.parametrize("is_used_once", [False, True])
def test_asynchronous_saves_wait_for_each_other_and_use_the_same_memory_where_torch_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_used_once: bool
) -> None:
    places, stage = [], DefaultStager.stage

    def note(tensors: dict[str, torch.Tensor], **options: Any) -> None:
        places.append({name: tensor.data_ptr() for name, tensor in tensors.items()})
        save_tensors(tensors, **options)

    def once(stager: DefaultStager, *given: Any) -> Any:
        try:
            return stage(stager, *given)
        finally:
            stager.close()  # as torch 2.11 and 2.12 do themselves

    monkeypatch.setattr(checkpoint, "save_tensors", note)
    if is_used_once:
        monkeypatch.setattr(DefaultStager, "stage", once)
    model, optimizer = trained(seed=1)
    with saver(tmp_path, keep=2) as (one, said):
        for step in (1, 2, 3):
            one.save(model, optimizer, state_after(step))
            assert len(said) == step - 1  # this one may be in flight, but none before it
    if torch.__version__ >= "2.13" and not is_used_once:
        assert places[0] == places[1] == places[2]
    assert not set(places[0].values()) & {tensor.data_ptr() for tensor in tensors_of(model, optimizer).values()}
    assert sorted(os.listdir(tmp_path)) == [SECOND, THIRD]
    load(tmp_path / THIRD)  # compares all hashes


@pytest.mark.parametrize("room", [500, 50_000])
def test_a_full_disk_is_named_wherever_in_a_file_it_is_met(tmp_path: Path, room: int) -> None:
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(TrainerError, match=r"could not be saved: .*File too large"):
            checkpoint.save(str(tmp_path), {"weight": torch.zeros(30_000)}, state_after(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_checkpoint_is_never_overwritten_and_an_asynchronous_save_that_fails_is_raised_by_what_waits_for_it(
    tmp_path: Path, gate: threading.Event
) -> None:
    (tmp_path / FIRST).mkdir()
    (tmp_path / FIRST / "file").touch()
    with saver(tmp_path) as (one, said):
        one.save(*trained(seed=1), state_after(1))
        assert not one.has_failed
        gate.set()
        with pytest.raises(TrainerError, match=r"could not be saved: .*not empty"):
            one.save(*trained(seed=1), state_after(1))
        one.save(*trained(seed=1), state_after(1))
    assert one.has_failed
    assert said[0].startswith("warning: ")
    assert os.listdir(tmp_path / FIRST) == ["file"]
