"""Training does not depend on the number of ranks: 20 steps of the 10M model in fp32, before and after a resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.trainer.runs import configuration, corpora, steps_of, train_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.xdist_group("trainer")]
TOLERANCE = 1e-5
RESUMED = {
    "1-from-4": (1, "world-4"),
    "2-from-1": (2, "world-1"),
    "3-from-2": (3, "world-2"),
    "4-from-hsdp": (4, "hsdp"),
}
STRAIGHT = ["world-2", "world-3", "world-4", "hsdp", "accumulated"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run, one process start per world size and phase."""
    directory = tmp_path_factory.mktemp("equality")
    paths = corpora(directory / "corpora")

    def job(name: str, **changes: Any) -> dict[str, Any]:
        return configuration(paths, directory / name, **changes)

    def resumed(name: str, **changes: Any) -> dict[str, Any]:
        source = directory / RESUMED[name][1] / "checkpoints" / "step-00000010"
        return job(name, checkpoint__load=str(source), **changes)

    train_on(1, [job("world-1"), job("accumulated", train__micro_batch_size=3)], directory)
    train_on(2, [job("world-2"), resumed("2-from-1")], directory)
    train_on(3, [job("world-3"), resumed("3-from-2")], directory)
    hsdp = {"parallel__replicas": 2}
    train_on(4, [job("world-4"), job("hsdp", **hsdp, train__micro_batch_size=2), resumed("4-from-hsdp")], directory)
    shutil.copytree(
        directory / "world-1" / "checkpoints" / "step-00000010", directory / "exact/checkpoints/step-00000010"
    )
    train_on(1, [resumed("1-from-4"), job("exact")], directory)
    return directory


def largest_difference(steps: list[dict[str, Any]], others: list[dict[str, Any]], key: str) -> float:
    assert [step["step"] for step in steps] == [step["step"] for step in others]
    return max(abs(step[key] - other[key]) for step, other in zip(steps, others, strict=True))


def assert_equal_training(steps: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for key in ("loss", "grad_norm"):
        assert largest_difference(steps, others, key) <= TOLERANCE, key
    for key in ("digest", "samples", "targets", "corpora", "lr"):
        assert [step[key] for step in steps] == [step[key] for step in others], key


@pytest.mark.parametrize("name", STRAIGHT)
def test_loss_and_gradient_norm_are_those_of_one_rank_at_every_step(runs: Path, name: str) -> None:
    one_rank = steps_of(runs / "world-1")
    assert len(one_rank) == 20
    assert one_rank[-1]["loss"] < one_rank[0]["loss"] - 0.1
    assert_equal_training(steps_of(runs / name), one_rank)


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumed_on_another_number_of_ranks_goes_on_as_if_undisturbed(runs: Path, name: str) -> None:
    steps = steps_of(runs / name)
    assert len(steps) == 10
    assert_equal_training(steps, steps_of(runs / "world-1")[10:])


def test_one_rank_resumes_bit_exactly(runs: Path, tmp_path: Path) -> None:
    straight, resumed = steps_of(runs / "world-1")[10:], steps_of(runs / "exact")
    assert [step["loss"] for step in resumed] == [step["loss"] for step in straight]
    assert [step["grad_norm"] for step in resumed] == [step["grad_norm"] for step in straight]
    tensors = []
    for name in ("world-1", "exact"):
        dcp_to_torch_save(runs / name / "checkpoints" / "step-00000020", tmp_path / name)
        tensors.append(torch.load(tmp_path / name))
    assert tensors[0].keys() == tensors[1].keys()
    assert any(key.startswith("optimizer.exp_avg_sq.") for key in tensors[0])
    for key, value in tensors[0].items():
        assert torch.equal(value, tensors[1][key]), key


def test_the_first_step_is_the_same_on_all_ranks_so_initialisation_is(runs: Path) -> None:
    """The gradient norm covers every parameter: a shard with other numbers would show."""
    norms = [steps_of(runs / name)[0]["grad_norm"] for name in ("world-1", *STRAIGHT)]
    assert norms[0] > 1
    assert max(norms) - min(norms) <= TOLERANCE
