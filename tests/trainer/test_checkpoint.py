"""A checkpoint exists wholly or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.runtime.sources import ListSource
from tokshard.errors import TrainerError
from tokshard.runtime.loader import StreamingLoader
from tokshard.runtime.mix import load_mix
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.saved import read_state
from tokshard.trainer import checkpoint, config
from tokshard.trainer.model import Shape, Transformer, initialise
from tokshard.trainer.optimizer import make_optimizer
from tokshard.trainer.parallel import process_group

SHAPE = Shape(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, hidden_dim=16, vocab_size=20)

# DCP of torch 2.13 itself warns
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with process_group("cpu"):
        yield


def trained(*, seed: int, shape: Shape = SHAPE) -> tuple[Transformer, torch.optim.AdamW]:
    model = Transformer(shape)
    initialise(model, seed=seed)
    optimizer = make_optimizer(model, config.Optimizer())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(seed))
    optimizer.step()
    return model, optimizer


def save(directory: Path, step: int, *, keep: int = 0) -> Path:
    return Path(checkpoint.save(str(directory), step, *trained(seed=step), {"step": step}, keep=keep))


def latest(directory: Path) -> str | None:
    found = checkpoint.find_latest(str(directory))
    return found and Path(found).name


def test_the_loaders_state_and_the_recipe_are_read_from_a_checkpoint_without_the_model(tmp_path: Path) -> None:
    plan = StreamPlan({"one": ListSource([50])}, seq_len=4)
    loader = StreamingLoader(plan, global_batch_size=3)
    data = {"corpora": {"one": "shards"}, "seq_len": 4, "global_batch_size": 3}
    state = {"step": 7, "loader": loader.state_dict(), "config": {"data": data}}
    path = checkpoint.save(str(tmp_path), 7, *trained(seed=1), state)
    saved = read_state(path)
    assert (saved.step, saved.cursor) == (7, loader.state_dict()["cursor"])
    assert load_mix(path).corpora == {"one": "shards"}


def test_a_checkpoint_brings_back_parameters_moments_state_and_random_numbers(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    expected = torch.rand(4)
    model, optimizer = trained(seed=2)
    assert checkpoint.load(str(path), model, optimizer) == {"step": 1}
    assert torch.equal(torch.rand(4), expected)
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


def test_one_that_lacks_any_file_or_the_end_of_any_file_is_not_picked_up(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newer = save(tmp_path, 2)
    whole = tmp_path / "whole"
    shutil.copytree(newer, whole)
    names = sorted(os.listdir(newer))
    assert {checkpoint.COMPLETE, checkpoint.STATE, ".metadata", "__0_0.distcp"} == set(names)
    for name in names:
        (newer / name).unlink()
        assert latest(tmp_path) == "step-00000001", name
        (newer / name).write_bytes((whole / name).read_bytes()[:-1])
        assert latest(tmp_path) == "step-00000001", name
        shutil.copy(whole / name, newer / name)
        assert latest(tmp_path) == "step-00000002"


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
    assert latest(tmp_path) == "step-00000001"
    assert "step-00000002.partial" in os.listdir(tmp_path)
    save(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_saving_a_step_again_replaces_it_and_old_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 2, 3):
        save(tmp_path, step, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003"]


def test_loading_what_is_no_checkpoint_or_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="no complete checkpoint"):
        checkpoint.load(str(tmp_path), *trained(seed=1))
    path = save(tmp_path, 1)
    wider = Shape(dim=32, num_layers=1, num_heads=2, num_kv_heads=1, hidden_dim=16, vocab_size=20)
    with pytest.raises(TrainerError, match=r"embedding\.weight is \(20, 16\) there, \(20, 32\) here"):
        checkpoint.load(str(path), *trained(seed=1, shape=wider))
