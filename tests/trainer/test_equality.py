"""Training does not depend on the number of ranks: steps in fp32, before and after a resume; long ones are of 10M."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.forks import Forks
from tests.trainer.runs import configuration, corpora, corpus, evaluations_of, steps_of, train_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TOLERANCE = 1e-5
RESUMED = {
    "1-from-4": (1, "world-4"),
    "2-from-1": (2, "world-1"),
    "3-from-2": (3, "world-2"),
    "4-from-hsdp": (4, "hsdp"),
}
STRAIGHT = ["world-2", "world-3", "world-4", "hsdp", "accumulated"]
LONG = ["world-3", "world-4", "3-from-2", "1-from-4", "4-from-hsdp"]
"""Runs that are made only where they are long: the others show the same in half the time."""
PLANNED = {
    "train__steps": 4,
    "train__skip": [[2, 3]],
    "data__batch_ramp": [[3, 5]],
    "data__schedule": [[20, {"code": 0.2, "prose": 0.8}]],
    "checkpoint__every": 0,
}
KIND: dict[str, Any] = {
    "dim": 64,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 24,
    "hidden_dim": 96,
    "qk_norm": True,
    "tied_embeddings": True,
    "rope_factor": 8.0,
    "rope_original_length": 64,
}
"""The model of the short runs. The long runs train the 10M preset, and some of them this model."""
SHORT_STEPS, LONG_STEPS = 4, 20


@pytest.fixture(scope="module")
def num_steps(request: pytest.FixtureRequest) -> int:
    """Of a straight run; the others continue from the middle."""
    return request.param


def for_each(names: Iterable[str]) -> pytest.MarkDecorator:
    short = [pytest.param(SHORT_STEPS, name, id=name) for name in names if name not in LONG]
    long = [pytest.param(LONG_STEPS, name, id=f"{name}-long", marks=pytest.mark.soak) for name in names]
    # with the scope of the fixture, or the runs would be made again for every name
    return pytest.mark.parametrize(("num_steps", "name"), [*short, *long], indirect=["num_steps"], scope="module")


each_length = pytest.mark.parametrize(
    "num_steps", [SHORT_STEPS, pytest.param(LONG_STEPS, marks=pytest.mark.soak)], indirect=True, scope="module"
)

long_only = pytest.mark.parametrize(
    "num_steps", [pytest.param(LONG_STEPS, marks=pytest.mark.soak)], indirect=True, scope="module"
)


@pytest.fixture(scope="module")
def runs(num_steps: int, tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """Every run, those of one world size by the same ranks."""
    is_long, half = num_steps == LONG_STEPS, f"checkpoints/step-{num_steps // 2:08}"
    directory = tmp_path_factory.mktemp("equality")
    paths = corpora(directory / "corpora")
    # 11 samples: the second step is short
    held_out = {"held out": corpus(directory / "held-out", step=3, seed=1, num_documents=8)}

    def job(name: str, **changes: Any) -> dict[str, Any]:
        sizes: dict[str, Any] = {"train__steps": num_steps, "checkpoint__every": num_steps // 2}
        sizes |= {"evaluation__every": num_steps // 2, "evaluation__corpora": held_out}
        model = {} if is_long else {"model": KIND}
        return configuration(paths, directory / name, **(sizes | changes)) | model

    def resumed(name: str, **changes: Any) -> dict[str, Any]:
        return job(name, checkpoint__load=str(directory / RESUMED[name][1] / half), **changes)

    tied: dict[str, Any] = {"train__steps": SHORT_STEPS, "checkpoint__every": 2, "evaluation__every": 2}
    tied |= {"evaluation__corpora": {"held out": paths["code"]}, "compute__loss_chunk": 64}

    def of_kind(name: str, **changes: Any) -> dict[str, Any]:
        return job(name, **(tied | changes)) | {"model": KIND}

    evaluated_by_3 = job(
        "evaluated-by-3", checkpoint__load=str(directory / "world-1" / f"checkpoints/step-{num_steps:08}")
    )
    tied_again = of_kind("tied-again", checkpoint__load=str(directory / "tied-hsdp" / "checkpoints/step-00000002"))
    tied_hsdp = of_kind("tied-hsdp", parallel__replicas=2, train__micro_batch_size=1, compute__recompute="full")
    # the same numbers, computed in other ways; 160 tokens of a rank make chunks of 64, 64 and 32
    compiled = {"compute__compile": "eager"} if is_long else {}  # which takes 10 seconds on each rank
    by_two = job("world-2", compute__loss_chunk=64, compute__recompute="full", **compiled)
    hsdp = job("hsdp", parallel__replicas=2, train__micro_batch_size=1, compute__loss_chunk=20)
    phases = [
        (
            1,
            [
                job("world-1"),
                job("accumulated", train__micro_batch_size=3),
                job("exact", train__stop_after=num_steps // 2),
                job("planned-1", **PLANNED),
                *([of_kind("tied-1")] if is_long else []),
            ],
        ),
        (
            2,
            [
                by_two,
                resumed("2-from-1", compute__recompute="selective"),
                job("planned-2", **PLANNED, train__profile_steps=[1, 2], train__profile_ranks=[1]),
                *([of_kind("tied-2", compute__compile="eager")] if is_long else []),
            ],
        ),
        *([(3, [job("world-3"), resumed("3-from-2"), evaluated_by_3])] if is_long else []),
        (4, [hsdp, *([resumed("4-from-hsdp"), job("world-4"), tied_hsdp] if is_long else [])]),
        # by a process that has trained nothing
        (1, [job("exact"), *([resumed("1-from-4"), tied_again] if is_long else [])]),
    ]
    train_on(phases, directory, forks)
    return directory


def largest_difference(steps: list[dict[str, Any]], others: list[dict[str, Any]], key: str) -> float:
    assert [step["step"] for step in steps] == [step["step"] for step in others]
    return max(abs(step[key] - other[key]) for step, other in zip(steps, others, strict=True))


def assert_equal_training(steps: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    assert largest_difference(steps, others, "loss") <= TOLERANCE
    largest = max(step["grad_norm"] for step in others)
    assert largest_difference(steps, others, "grad_norm") <= TOLERANCE * largest
    for key in ("digest", "samples", "targets", "corpora", "lr"):
        assert [step[key] for step in steps] == [step[key] for step in others], key


@for_each(STRAIGHT)
def test_loss_and_gradient_norm_are_those_of_one_rank_at_every_step(runs: Path, num_steps: int, name: str) -> None:
    one_rank = steps_of(runs / "world-1")
    assert len(one_rank) == num_steps
    assert one_rank[-1]["loss"] < one_rank[0]["loss"] - 0.1
    assert_equal_training(steps_of(runs / name), one_rank)


@for_each([*STRAIGHT, *RESUMED])
def test_an_evaluation_has_the_loss_and_targets_of_one_rank(runs: Path, num_steps: int, name: str) -> None:
    one_rank, found = evaluations_of(runs / "world-1"), evaluations_of(runs / name)
    assert set(one_rank) == set(found) == {num_steps // 2, num_steps}  # a new run evaluates what it starts from
    for step, of_step in found.items():
        expected = one_rank[step]["held out"]
        assert of_step["held out"] == {
            "targets": expected["targets"],
            "loss": pytest.approx(expected["loss"], abs=TOLERANCE),
        }


@long_only
def test_three_ranks_find_the_loss_and_targets_of_one(runs: Path, num_steps: int) -> None:
    one_rank = evaluations_of(runs / "world-1")[num_steps]["held out"]
    found = evaluations_of(runs / "evaluated-by-3")[num_steps]["held out"]
    assert found == one_rank | {"loss": pytest.approx(one_rank["loss"], abs=TOLERANCE)}


@for_each(RESUMED)
def test_a_run_resumed_on_another_number_of_ranks_goes_on_as_if_undisturbed(
    runs: Path, num_steps: int, name: str
) -> None:
    steps = steps_of(runs / name)
    assert len(steps) == num_steps // 2
    assert_equal_training(steps, steps_of(runs / "world-1")[num_steps // 2 :])


@each_length
def test_one_rank_resumes_bit_exactly(runs: Path, num_steps: int, tmp_path: Path) -> None:
    straight, resumed = steps_of(runs / "world-1"), steps_of(runs / "exact")
    assert [step["loss"] for step in resumed] == [step["loss"] for step in straight]
    assert [step["grad_norm"] for step in resumed] == [step["grad_norm"] for step in straight]
    tensors = []
    for name in ("world-1", "exact"):
        dcp_to_torch_save(runs / name / "checkpoints" / f"step-{num_steps:08}", tmp_path / name)
        tensors.append(torch.load(tmp_path / name))
    assert tensors[0].keys() == tensors[1].keys()
    assert any(key.startswith("optimizer.exp_avg_sq.") for key in tensors[0])
    for key, value in tensors[0].items():
        assert torch.equal(value, tensors[1][key]), key


@each_length
def test_a_plan_of_batch_sizes_weights_and_left_out_steps_is_the_same_on_two_ranks(runs: Path, num_steps: int) -> None:
    one, two = ([of for of in steps_of(runs / name) if "loss" in of] for name in ("planned-1", "planned-2"))
    assert [step["num_samples"] for step in one] == [9, 5, 5]
    assert_equal_training(two, one)


@each_length
def test_a_recipe_says_which_ranks_are_traced(runs: Path, num_steps: int) -> None:
    assert [path.name for path in (runs / "planned-2").glob("trace-*")] == ["trace-step-1-rank-1.json"]


@long_only
def test_a_tied_model_with_norms_of_heads_trains_on_ranks_and_copies_as_on_one_rank(runs: Path, num_steps: int) -> None:
    one_rank = steps_of(runs / "tied-1")
    assert one_rank[-1]["loss"] < one_rank[0]["loss"]
    for name in ("tied-2", "tied-hsdp"):
        assert_equal_training(steps_of(runs / name), one_rank)
        for step, found in evaluations_of(runs / name).items():
            expected = evaluations_of(runs / "tied-1")[step]["held out"]["loss"]
            assert found["held out"]["loss"] == pytest.approx(expected, abs=TOLERANCE)
    assert_equal_training(steps_of(runs / "tied-again"), one_rank[2:])


@each_length
def test_the_first_step_and_so_the_initialisation_is_the_same_on_all_ranks(runs: Path, num_steps: int) -> None:
    """The gradient norm covers every parameter: a shard with other numbers would show."""
    names = [name for name in ("world-1", *STRAIGHT) if num_steps == LONG_STEPS or name not in LONG]
    norms = [steps_of(runs / name)[0]["grad_norm"] for name in names]
    assert norms[0] > 1
    assert max(norms) - min(norms) <= TOLERANCE
