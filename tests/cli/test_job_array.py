"""Which share of a build a job of a scheduler's array has."""

from __future__ import annotations

import pytest

from tokshard.cli.job_array import job_of


@pytest.mark.parametrize(
    ("numbers", "step", "expected"),
    [
        ("0 1 2", "1", ["job 0 of 3", "job 1 of 3", "job 2 of 3"]),
        ("4 8 12", "4", ["job 0 of 3", "job 1 of 3", "job 2 of 3"]),
        ("3 7", None, ["job 0 of 5", "job 4 of 5"]),  # jobs that are sent again: the others' shares are done, or helped
    ],
)
def test_the_numbers_of_a_slurm_array_are_shares(
    monkeypatch: pytest.MonkeyPatch, numbers: str, step: str | None, expected: list[str]
) -> None:
    first, *_, last = numbers.split()
    monkeypatch.setenv("SLURM_ARRAY_TASK_MIN", first)
    monkeypatch.setenv("SLURM_ARRAY_TASK_MAX", last)
    if step is not None:
        monkeypatch.setenv("SLURM_ARRAY_TASK_STEP", step)
    found = []
    for number in numbers.split():
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", number)
        job = job_of("slurm", None)
        assert job is not None
        found.append(f"job {job.index} of {job.count}")
    assert found == expected
