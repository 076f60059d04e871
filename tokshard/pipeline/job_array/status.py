"""How far the jobs of an array are, for ``tokshard status``. Reads what they wrote down, and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tokshard.pipeline.workspace.job_records import JobRecord, JobState, load_records, running_jobs
from tokshard.pipeline.workspace.places import Stage, Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """How far a job is in the stage at hand.

    Args:
        state: ``done``, ``failed``, ``running``, ``not begun``, or ``stopped``: it began, and neither ended nor runs.
        num_bytes: of its inputs, about.
        documents, tokens: written.
        bytes_per_second: of input, in this run of the job; 0 before it has read any.
        silent_seconds: since it last wrote down how far it is, by the clocks of two machines.
        problem: why it failed.
    """

    job_index: int
    num_jobs: int
    state: str
    process: str = ""
    tasks_done: int = 0
    num_tasks: int = 0
    bytes_done: int = 0
    num_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    bytes_per_second: float = 0.0
    silent_seconds: float = 0.0
    problem: str = ""


NOT_BEGUN, STOPPED, RUNNING = "not begun", "stopped", "running"


def job_statuses(workspace: Workspace, stage: Stage) -> tuple[JobStatus, ...]:
    """All jobs of the array that was last heard of, by index; empty if no jobs share the build.

    Raises:
        BuildError: a record is damaged.
    """
    records = load_records(workspace)
    if not records:
        return ()
    num_jobs = max(records, key=lambda record: record.updated).num_jobs
    known = {
        record.job_index: record for record in records if (record.stage, record.num_jobs) == (stage.value, num_jobs)
    }
    alive = {holder.partition(",")[0] for holder in running_jobs(workspace)}
    now = time.time()
    return tuple(
        _status(known[index], now, is_running=known[index].name in alive)
        if index in known
        else JobStatus(job_index=index, num_jobs=num_jobs, state=NOT_BEGUN)
        for index in range(num_jobs)
    )


def seconds_left(jobs: Sequence[JobStatus], bytes_left: int) -> float | None:
    """When the stage will be done, at the rate of the jobs that run now; None if none has a rate yet."""
    rate = sum(job.bytes_per_second for job in jobs if job.state == RUNNING)
    return bytes_left / rate if rate else None


def _status(record: JobRecord, now: float, *, is_running: bool) -> JobStatus:
    state = record.state
    if state == JobState.STARTED:
        state = RUNNING if is_running else STOPPED
    fresh = max(0, record.bytes_done - record.bytes_before)
    return JobStatus(
        job_index=record.job_index,
        num_jobs=record.num_jobs,
        state=state,
        process=record.process,
        tasks_done=record.tasks_done,
        num_tasks=record.num_tasks,
        bytes_done=record.bytes_done,
        num_bytes=record.num_bytes,
        documents=record.documents,
        tokens=record.tokens,
        bytes_per_second=fresh / max(1e-3, record.updated - record.started),
        silent_seconds=max(0.0, now - record.updated),
        problem=record.problem,
    )
