"""Which job of an array this process is, from the command line or from the scheduler's environment variables."""

from __future__ import annotations

import os

from tokshard.cli.build_options import KUBERNETES, SLURM
from tokshard.errors import UsageError
from tokshard.pipeline.jobs import Job

_SLURM = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX")
_STEP = "SLURM_ARRAY_TASK_STEP"
_KUBERNETES = "JOB_COMPLETION_INDEX"


def job_of(index: int | str | None, count: int | None) -> Job | None:
    """The job that ``--job-index`` and ``--num-jobs`` name; None if neither is given.

    Raises:
        UsageError: one of them is missing, or a variable of the scheduler.
    """
    if index == SLURM:
        return _slurm_job(count)
    if index == KUBERNETES:
        (number,) = _variables(KUBERNETES, _KUBERNETES, hint="set completionMode: Indexed in the Job")
        if count is None:
            raise UsageError(
                "missing option '--num-jobs': Kubernetes does not tell a pod how many there are",
                hint="give --num-jobs N, where N is the number of completions of the Job",
            )
        return Job(index=number, count=count)
    if index is None and count is None:
        return None
    if index is None or count is None:
        missing = "--job-index" if index is None else "--num-jobs"
        raise UsageError(f"missing option '{missing}'", hint="give --job-index I and --num-jobs N, with I below N")
    return Job(index=int(index), count=count)


def _slurm_job(count: int | None) -> Job:
    """The job of a Slurm array. If the array leaves out numbers, the other jobs run their shares."""
    if count is not None:
        raise UsageError(
            "--num-jobs is given, and Slurm says how many jobs its array has",
            hint=f"leave it out, or --job-index {SLURM}",
        )
    number, first, last = _variables(SLURM, *_SLURM, hint="submit the script as an array, such as sbatch --array=0-15")
    (step,) = _variables(SLURM, _STEP, hint="") if _STEP in os.environ else (1,)
    return Job(index=(number - first) // step, count=(last - first) // step + 1)


def _variables(scheduler: str, *names: str, hint: str) -> list[int]:
    """Numbers from the environment."""
    values = {name: os.environ.get(name, "") for name in names}
    wrong = [name for name, value in values.items() if not value.isdecimal() or len(value) > 18]
    if wrong:
        told = ", ".join(f"{name} is {values[name]!r:.60}" if values[name] else f"{name} is not set" for name in wrong)
        raise UsageError(f"--job-index {scheduler}: {told}", hint=hint or "leave the variables of Slurm as they are")
    return [int(value) for value in values.values()]
