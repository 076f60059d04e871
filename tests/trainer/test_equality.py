"""Training does not depend on the number of ranks: steps in fp32, before and after a resume; long ones are of 10M."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.faults import Launcher
from tests.trainer.runs import chat, configuration, corpora, corpus, evaluations_of, on_ranks, steps_of, train_jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Job:
    """A run on some ranks.

    Args:
        changes: of its recipe.
        like: the run on one rank that has the same steps.
        resumes: a run that it continues from the middle.
    """

    ranks: int
    changes: dict[str, Any] = field(default_factory=dict)
    like: str = "one rank"
    resumes: str = ""


PLANNED = {
    "train__steps": 4,
    "train__skip": [[2, 3]],
    "data__batch_ramp": [[3, 5]],
    "data__schedule": [[20, {"code": 0.2, "prose": 0.8}]],
    "checkpoint__every": 0,
}
# 160 tokens of a rank make chunks of 64, 64 and 32
CHUNKED = {"compute__loss_chunk": 64, "compute__recompute": "full"}
COPIES = {
    "parallel__replicas": 2,
    "train__micro_batch_size": 1,
    "compute__loss_chunk": 20,
    "data__deal": "cost",
}
JOBS = {
    "one rank": Job(1),
    "micro-batches": Job(1, {"train__micro_batch_size": 3}),
    "planned": Job(1, PLANNED, like="planned"),
    "two ranks": Job(2, CHUNKED),
    "two from one": Job(2, {"compute__recompute": "selective"}, resumes="one rank"),
    "planned, two ranks": Job(
        2, PLANNED | {"train__profile_steps": [1, 2], "train__profile_ranks": [1]}, like="planned"
    ),
    "copies": Job(4, COPIES),
    "one again": Job(1, resumes="one rank"),  # by a process that has trained nothing
}
"""Each is trained by the processes of the one before, if it has as many ranks."""
SOAKED = {
    "compiled": Job(2, CHUNKED | {"compute__compile": "eager"}),  # takes 10 seconds on each rank
    "three ranks": Job(3),
    "three from two": Job(3, resumes="two ranks"),
    "four ranks": Job(4),
    "four from copies": Job(4, resumes="copies"),
    "one from four": Job(1, resumes="four ranks"),
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
"""The model of the short runs. The long runs train the 10M preset."""


@pytest.fixture(scope="module")
def num_steps(request: pytest.FixtureRequest) -> int:
    return request.param


def with_runs(names: Iterable[str] = ("one rank",)) -> pytest.MarkDecorator:
    short = [pytest.param(4, name, id=name) for name in names if name in JOBS]
    long = [pytest.param(20, name, id=f"{name}-long", marks=pytest.mark.soak) for name in names]
    # with the scope of the fixture, or the runs would be made again for every name
    return pytest.mark.parametrize(("num_steps", "name"), [*short, *long], indirect=["num_steps"], scope="module")


@pytest.fixture(scope="module")
def runs(num_steps: int, tmp_path_factory: pytest.TempPathFactory, forks: Launcher) -> Path:
    """Every run, in directories of their names."""
    directory, half = tmp_path_factory.mktemp("equality"), num_steps // 2
    paths = corpora(directory / "corpora")
    mixed = paths | {"code": str(directory / "chat")}  # with text: conversations, whose targets have weights
    chat(directory / "chat", np.random.default_rng(2).integers(2, 80, 40).tolist())
    # 11 samples: the second step is short
    held_out = {"held out": corpus(directory / "held-out", step=3, seed=1, num_documents=8), "chat": mixed["code"]}
    is_long = num_steps == 20

    def recipe(name: str, job: Job) -> dict[str, Any]:
        sizes: dict[str, Any] = {"train__steps": num_steps, "checkpoint__every": half, "evaluation__every": half}
        if job.resumes:
            sizes["checkpoint__load"] = str(directory / job.resumes / f"checkpoints/step-{half:08}")
        changes = sizes | {"evaluation__corpora": held_out} | job.changes
        trained = paths if job.like == "planned" else mixed
        return configuration(trained, directory / name, **changes) | ({} if is_long else {"model": KIND})

    jobs = [(job.ranks, recipe(name, job)) for name, job in (JOBS | (SOAKED if is_long else {})).items()]
    for num_ranks, same in groupby(jobs, key=lambda job: job[0]):
        (directory / "jobs.json").write_text(json.dumps([fields for _, fields in same]))
        on_ranks(forks, num_ranks, train_jobs, directory / "jobs.json", seconds=350)
    return directory


def largest_difference(steps: list[dict[str, Any]], others: list[dict[str, Any]], key: str) -> float:
    assert [step["step"] for step in steps] == [step["step"] for step in others]
    return max(abs(step[key] - other[key]) for step, other in zip(steps, others, strict=True))


def assert_equal_training(steps: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    assert largest_difference(steps, others, "loss") <= TOLERANCE
    if "loss_weights" in others[0]:
        assert largest_difference(steps, others, "loss_weights") <= TOLERANCE * max(of["loss_weights"] for of in others)
    largest = max(step["grad_norm"] for step in others)
    assert largest_difference(steps, others, "grad_norm") <= TOLERANCE * largest
    for key in ("digest", "samples", "targets", "corpora", "lr"):
        assert [step[key] for step in steps] == [step[key] for step in others], key


@with_runs([*JOBS, *SOAKED])
def test_losses_gradients_and_evaluations_are_those_of_one_rank_at_every_step(
    runs: Path, num_steps: int, name: str
) -> None:
    """The first gradient norm covers every parameter: a shard with other initial values would show."""
    job = (JOBS | SOAKED)[name]
    first = num_steps // 2 if job.resumes else 0
    steps = [of for of in steps_of(runs / name) if "loss" in of]
    assert_equal_training(steps, [of for of in steps_of(runs / job.like)[first:] if "loss" in of])
    expected = evaluations_of(runs / job.like)
    for step, found in evaluations_of(runs / name).items():
        assert found.keys() == {"held out", "chat"}
        for of_corpus, losses in found.items():
            assert losses == pytest.approx(expected[step][of_corpus], rel=TOLERANCE)
    if name == "one rank":
        assert list(expected) == [num_steps // 2, num_steps]
        assert steps[-1]["loss"] < steps[0]["loss"] - 0.05
        assert steps[0]["grad_norm"] > 1
        assert all(0 < of["loss_weights"] < of["targets"] for of in steps)


@with_runs()
def test_a_plan_leaves_steps_out_has_several_sizes_and_names_the_ranks_that_are_traced(
    runs: Path, num_steps: int, name: str
) -> None:
    assert [of.get("num_samples") for of in steps_of(runs / "planned, two ranks")] == [9, None, 5, 5]
    assert [path.name for path in runs.glob("*/trace-*")] == ["trace-step-1-rank-1.json"]
