"""A checkpoint exists wholly or not at all."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from tests.runtime.sources import ListSource
from tokshard.errors import LoaderError, TokshardError, TrainerError, UsageError
from tokshard.run_files.checkpoint_directory import COMPLETE, STATE_FILE, State, delete_old, state_of
from tokshard.run_files.model_shape import Shape
from tokshard.run_files.plan_file import load_mix
from tokshard.run_files.recipe import Checkpoint, Optimizer, Parallel
from tokshard.run_files.saved_state import read_state
from tokshard.run_files.torch_checkpoints import read_metadata
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamingLoader
from tokshard.trainer import checkpoint
from tokshard.trainer.checkpoint import Saver, tensors_of
from tokshard.trainer.model import Transformer, initialise
from tokshard.trainer.optimizer import make_optimizer
from tokshard.trainer.parallel import process_group

SHAPE = Shape(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, hidden_dim=16, vocab_size=20)

# DCP of torch 2.13 itself warns
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with process_group(Parallel(device="cpu")):
        yield


def trained(*, seed: int, shape: Shape = SHAPE) -> tuple[Transformer, torch.optim.AdamW]:
    model = Transformer(shape)
    initialise(model, seed=seed)
    optimizer = make_optimizer(model, Optimizer())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(seed))
    optimizer.step()
    return model, optimizer


def save(directory: Path, step: int) -> Path:
    state = State(step=step, loader={}, config={})
    return Path(checkpoint.save(str(directory), tensors_of(*trained(seed=step)), state))


def latest(directory: Path) -> str | None:
    found = checkpoint.find_latest(str(directory))
    return found and Path(found).name


def load(path: Path) -> State:
    return checkpoint.load(str(path), *trained(seed=9))


def seal(path: Path) -> None:
    """Make COMPLETE true again after a change, as one who means harm would."""
    contents = {file.name: file.read_bytes() for file in path.iterdir() if file.name != COMPLETE}
    files = {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in contents.items()}
    (path / COMPLETE).write_text(json.dumps(files))


class Touch:
    """What unpickles into a file that is made."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_the_loaders_state_and_the_recipe_are_read_from_a_checkpoint_without_the_model(tmp_path: Path) -> None:
    plan = StreamPlan({"one": ListSource([50])}, seq_len=4)
    loader = StreamingLoader(plan, global_batch_size=3)
    data = {"corpora": {"one": "shards"}, "seq_len": 4, "global_batch_size": 3}
    state = State(step=7, loader=loader.state_dict(), config={"data": data})
    path = checkpoint.save(str(tmp_path), tensors_of(*trained(seed=1)), state)
    saved = read_state(path)
    assert (saved.step, saved.cursor) == (7, loader.state_dict()["cursor"])
    assert load_mix(path).corpora == {"one": "shards"}


def test_a_checkpoint_brings_back_parameters_moments_and_state(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    model, optimizer = trained(seed=2)
    assert checkpoint.load(str(path), model, optimizer) == State(step=1, loader={}, config={})
    saved_model, saved_optimizer = trained(seed=1)
    for parameter, saved in zip(model.parameters(), saved_model.parameters(), strict=True):
        assert torch.equal(parameter, saved)
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, saved_optimizer.state[saved][key])


def test_the_latest_complete_checkpoint_is_found_by_number(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    for step in (9, 100_000_000, 10):
        save(tmp_path, step)
    assert latest(tmp_path) == "step-100000000"


def test_a_damaged_newest_checkpoint_is_named_and_neither_passed_over_nor_started_anew(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    whole = tmp_path / "whole"
    shutil.copytree(newest, whole)
    names = sorted(os.listdir(newest))
    assert {COMPLETE, STATE_FILE, ".metadata", "__0_0.distcp"} == set(names)
    for name in names:
        (newest / name).unlink()
        with pytest.raises(TrainerError, match=rf"step-00000002 is damaged .*{re.escape(name)}") as error:
            latest(tmp_path)
        assert "rename it to continue from " + str(tmp_path / "step-00000001") in error.value.hint
        (newest / name).write_bytes((whole / name).read_bytes()[:-1])
        with pytest.raises(TrainerError, match=rf"step-00000002 is damaged .*{re.escape(name)}"):
            latest(tmp_path)
        shutil.copy(whole / name, newest / name)
        assert latest(tmp_path) == "step-00000002"


def test_a_run_does_not_start_anew_where_every_checkpoint_is_damaged_until_they_are_renamed(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / STATE_FILE).write_text("")
    with pytest.raises(TrainerError, match=r"step-00000002 .*; .*step-00000001 ") as error:
        latest(tmp_path)
    assert error.value.hint.endswith("to start a new run")
    for name in os.listdir(tmp_path):
        os.rename(tmp_path / name, tmp_path / f"{name}.damaged")
    assert latest(tmp_path) is None


def test_a_damaged_checkpoint_that_is_older_than_the_one_to_load_does_not_matter(tmp_path: Path) -> None:
    (save(tmp_path, 1) / STATE_FILE).unlink()
    save(tmp_path, 2)
    assert latest(tmp_path) == "step-00000002"


def test_an_unreadable_directory_of_checkpoints_is_not_taken_for_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path / "a disk that is not mounted")
    with pytest.raises(TrainerError, match="cannot be listed"):
        latest(tmp_path / "checkpoints")


def test_a_marker_of_other_content_is_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    of_others = ('{"state.json": 17}', '{"x": {"bytes": 1, "sha256": ""}}')
    for content in ("", "[]", "{}", "garbage", "[" * 10_000, '{"\udcff": 1}', *of_others):
        (path / COMPLETE).write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(TrainerError, match="step-00000001 is damaged"):
            latest(tmp_path)
        with pytest.raises(TrainerError, match="step-00000001 is damaged"):
            load(path)


def test_a_state_that_is_not_utf_8_is_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / STATE_FILE).write_bytes(b'{"\xff": 1}')
    with pytest.raises(TrainerError, match=r"step-00000001 is damaged .*state\.json"):
        state_of(str(path))


def test_a_marker_that_names_a_file_outside_of_the_checkpoint_is_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (tmp_path / "other").write_bytes(b"x")
    files = json.loads((path / COMPLETE).read_bytes())
    files["../other"] = {"bytes": 1, "sha256": sha256(b"x").hexdigest()}
    (path / COMPLETE).write_text(json.dumps(files))
    with pytest.raises(TrainerError, match=r"step-00000001 is damaged .*'\.\./other' is missing"):
        load(path)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json"])
def test_a_flipped_bit_in_any_file_is_found_before_anything_is_loaded(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    model, optimizer = trained(seed=2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(TrainerError, match=rf"damaged .*{re.escape(name)} has SHA-256 \w+, expected \w+"):
        checkpoint.load(str(path), model, optimizer)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", [".metadata", "state.json"])
def test_files_that_are_not_what_they_should_be_are_damage_even_with_true_hashes(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1)
    for content in (b"", b"garbage", b"[]", b"{}", b"N.", b"\xff" * 9, b"[" * 100_000):
        (path / name).write_bytes(content)
        seal(path)
        with pytest.raises(TokshardError, match=re.escape(name)):
            load(path)


def test_a_marker_that_leaves_out_a_file_of_tensors_is_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    files = json.loads((path / COMPLETE).read_text())
    del files["__0_0.distcp"]
    (path / COMPLETE).write_text(json.dumps(files))
    with pytest.raises(TrainerError, match=r"COMPLETE does not list '__0_0\.distcp'"):
        load(path)


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    for name in (".metadata", "__0_0.distcp"):
        path, ran = save(tmp_path / name, 1), tmp_path / f"ran by {name}"
        if name == "__0_0.distcp":  # its place and length are those of a tensor
            length = (path / name).stat().st_size
            (path / name).write_bytes(pickle.dumps(Touch(ran)).ljust(length, b"."))
        else:
            (path / name).write_bytes(pickle.dumps(Touch(ran)))
        seal(path)
        with pytest.raises(LoaderError):
            load(path)
        assert not ran.exists()


def test_a_saved_value_in_place_of_a_tensor_is_not_unpickled(tmp_path: Path) -> None:
    path, ran = save(tmp_path, 1), tmp_path / "ran"
    tensors = {"model.norm.weight": Touch(ran)}
    for name, entry in read_metadata(str(path)).state_dict_metadata.items():
        tensors.setdefault(name, torch.zeros(entry.size))
    shutil.rmtree(path)
    save_tensors(tensors, checkpoint_id=str(path))
    (path / STATE_FILE).write_text('{"step": 1, "loader": {}, "config": {}}')
    seal(path)
    with pytest.raises(UsageError, match=r"model\.norm\.weight is None there"):
        load(path)
    assert not ran.exists()


def test_a_file_that_rank_0_does_not_see_makes_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(*arguments: Any, storage_writer: FileSystemWriter, **options: Any) -> None:
        save_tensors(*arguments, storage_writer=storage_writer, **options)
        os.rename(Path(storage_writer.path) / "__0_0.distcp", tmp_path / "on another disk")

    monkeypatch.setattr(checkpoint, "save_tensors", elsewhere)
    with pytest.raises(TrainerError, match=r"rank 0 does not see __0_0\.distcp") as error:
        save(tmp_path / "checkpoints", 1)
    assert "a file system that all ranks share" in error.value.hint
    assert latest(tmp_path / "checkpoints") is None


def test_a_start_removes_what_unfinished_saves_and_deletions_left_and_nothing_else(tmp_path: Path) -> None:
    names = ["step-00000003.partial", "notes.partial", "step-00000005.damaged", "x"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("content")
    assert latest(tmp_path) is None
    assert sorted(os.listdir(tmp_path)) == sorted(names[1:])


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
    assert "step-00000002.partial" in os.listdir(tmp_path)
    assert latest(tmp_path) == "step-00000001"
    assert os.listdir(tmp_path) == ["step-00000001"]
    save(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(TrainerError, match=r"could not be saved: .*not empty"):
        save(tmp_path, 1)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_old_checkpoints_go_and_damaged_ones_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step-00000003" / ".metadata").unlink()
    assert list(delete_old(str(tmp_path), 0)) == []
    assert len(os.listdir(tmp_path)) == 4
    assert not list(delete_old(str(tmp_path), 2))
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003", "step-00000004"]
    (tmp_path / "step-00000004" / ".metadata").unlink()
    assert not list(delete_old(str(tmp_path), 1))
    assert "step-00000002" in os.listdir(tmp_path)  # the newest that can be loaded


def test_a_deletion_that_fails_half_way_is_told_and_leaves_nothing_that_looks_like_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, step)

    def fail(path: str) -> None:
        raise PermissionError(f"{path} is in use")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        (problem,) = delete_old(str(tmp_path), 1)
    assert "step-00000001 could not be deleted: " in problem
    assert sorted(os.listdir(tmp_path)) == ["step-00000001.partial", "step-00000002"]
    assert latest(tmp_path) == "step-00000002"
    assert os.listdir(tmp_path) == ["step-00000002"]


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
        one.save(model, optimizer, State(step=1, loader={}, config={}))
        optimizer.step()
        gate.set()
        one.wait()
        path = tmp_path / "step-00000001"
        assert said == [f"saved {path}"]
    assert not any(torch.equal(tensor, expected[name]) for name, tensor in tensors_of(model, optimizer).items())
    checkpoint.load(str(path), model, optimizer)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors_of(model, optimizer).items())


def test_asynchronous_saves_wait_for_each_other_and_use_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []

    def note(tensors: dict[str, torch.Tensor], **options: Any) -> None:
        places.append({name: tensor.data_ptr() for name, tensor in tensors.items()})
        save_tensors(tensors, **options)

    monkeypatch.setattr(checkpoint, "save_tensors", note)
    model, optimizer = trained(seed=1)
    with saver(tmp_path, keep=2) as (one, said):
        for step in (1, 2, 3):
            one.save(model, optimizer, State(step=step, loader={}, config={}))
            assert len(said) == step - 1  # this one may be in flight, but none before it
        one.wait()
    if torch.__version__ >= "2.13":
        assert places[0] == places[1] == places[2]
    assert not set(places[0].values()) & {tensor.data_ptr() for tensor in tensors_of(model, optimizer).values()}
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003"]


def test_asynchronous_saves_work_where_a_stager_of_torch_can_be_used_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = DefaultStager.stage

    def once(stager: DefaultStager, *given: Any) -> Any:
        try:
            return stage(stager, *given)
        finally:
            stager.close()  # as torch 2.11 and 2.12 do themselves

    monkeypatch.setattr(DefaultStager, "stage", once)
    model, optimizer = trained(seed=1)
    with saver(tmp_path) as (one, _):
        for step in (1, 2):
            one.save(model, optimizer, State(step=step, loader={}, config={}))
    assert latest(tmp_path) == "step-00000002"
    checkpoint.load(str(tmp_path / "step-00000002"), *trained(seed=2))  # checks all hashes


def test_a_save_in_flight_ends_before_its_saver_does(tmp_path: Path, gate: threading.Event) -> None:
    with saver(tmp_path) as (one, _):
        one.save(*trained(seed=1), State(step=1, loader={}, config={}))
        threading.Timer(0.05, gate.set).start()
    assert latest(tmp_path) == "step-00000001"


def test_an_asynchronous_save_that_fails_is_known_and_raised_by_whatever_waits_for_it(
    tmp_path: Path, gate: threading.Event
) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "file").touch()
    state = State(step=1, loader={}, config={})
    with saver(tmp_path) as (one, said):
        one.save(*trained(seed=1), state)
        assert not one.has_failed
        gate.set()
        with pytest.raises(TrainerError, match=r"could not be saved: .*not empty"):
            one.save(*trained(seed=1), state)
        one.save(*trained(seed=1), state)
    assert one.has_failed
    assert said[0].startswith("warning: ")


def test_a_directory_without_a_checkpoint_and_one_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="not a complete checkpoint"):
        checkpoint.load(str(tmp_path), *trained(seed=1))
    with pytest.raises(UsageError, match="nowhere is not a directory"):
        checkpoint.load(str(tmp_path / "nowhere"), *trained(seed=1))
    path = save(tmp_path, 1)
    wider = Shape(dim=32, num_layers=1, num_heads=2, num_kv_heads=1, hidden_dim=16, vocab_size=20)
    with pytest.raises(UsageError, match=r"embedding\.weight is \(20, 16\) there, \(20, 32\) here"):
        checkpoint.load(str(path), *trained(seed=1, shape=wider))
