"""What the jobs of an array say of themselves: how far each has come, and what it leaves to the commit to judge."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from tokshard.errors import BuildError
from tokshard.pipeline.tasks.planning import Key
from tokshard.pipeline.workspace.places import JOBS, Stage, Workspace
from tokshard.pipeline.workspace.receipts import receipt_name
from tokshard.pipeline.workspace.settings import load_bad_inputs
from tokshard.store import present


class JobState(StrEnum):
    """How a job ended. One that was killed did not end."""

    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


class LeftOutInput(msgspec.Struct, frozen=True, kw_only=True):
    """An input that a job left out whole.

    Args:
        key: of the task that met the damage.
        problem: without the place of the input.
    """

    key: Key
    index: int
    problem: str


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One job of an array in one stage, as it was when it last wrote.

    Args:
        process: that ran it last.
        started, updated: seconds since the epoch, by the clock of its machine.
        num_tasks, tasks_done: of the job; a stream counts as one.
        num_bytes: of input, about; of which
        bytes_done: were read by now, and
        bytes_before: by earlier runs of the job.
        failed: the task or segment whose failure the commit has to weigh; it would fail again.
        problem: why the job failed.
        left_out: damaged inputs.
    """

    job_index: int
    num_jobs: int
    stage: str
    process: str
    state: str
    started: float
    updated: float
    num_tasks: int
    tasks_done: int = 0
    num_bytes: int = 0
    bytes_done: int = 0
    bytes_before: int = 0
    documents: int = 0
    tokens: int = 0
    failed: list[Key] = []
    problem: str = ""
    left_out: list[LeftOutInput] = []

    @property
    def name(self) -> str:
        """How messages call the job."""
        return f"job {self.job_index} of {self.num_jobs}"


def this_process() -> str:
    """How messages call this process."""
    return f"process {os.getpid()} on {platform.node()}"


def save_record(workspace: Workspace, record: JobRecord) -> None:
    """Write down how far a job has come."""
    workspace.store.put(_record_name(record.stage, record.job_index, record.num_jobs), msgspec.json.encode(record))


def load_record(workspace: Workspace, stage: Stage, job_index: int, num_jobs: int) -> JobRecord | None:
    """What a job last wrote in a stage; None if it has not begun.

    Raises:
        BuildError: the file is damaged.
    """
    return _load(workspace, _record_name(stage.value, job_index, num_jobs))


def load_records(workspace: Workspace) -> list[JobRecord]:
    """What all jobs last wrote, of arrays of other sizes too; by stage, size and index.

    Raises:
        BuildError: a file is damaged.
    """
    found = sorted(name for name in present(workspace.store, JOBS) if name.endswith(".json"))
    return [record for name in found if (record := _load(workspace, f"{JOBS}/{name}")) is not None]


def _record_name(stage: str, job_index: int, num_jobs: int) -> str:
    return f"{JOBS}/{stage or 'encoding'}-of-{num_jobs:06d}-{job_index:06d}.json"


def _load(workspace: Workspace, name: str) -> JobRecord | None:
    try:
        return msgspec.json.decode(workspace.store.get(name), type=JobRecord)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.MsgspecError as error:
        raise BuildError(
            f"{workspace.store.where(name)} is damaged: {error}",
            hint="remove that file and run the job again: finished tasks are kept",
        ) from error


def given_up(workspace: Workspace, stage: Stage) -> frozenset[Key]:
    """The tasks and segments of a stage that jobs gave up and no other has done since."""
    return frozenset(_failed(workspace, stage, load_records(workspace)))


def known_bad_inputs(workspace: Workspace) -> dict[int, str]:
    """The inputs that are left out: those that were judged, and those that jobs found before any failure."""
    found = load_bad_inputs(workspace)
    records = load_records(workspace)
    for stage in (Stage.HASHING, Stage.ENCODING):
        lowest = min(_failed(workspace, stage, records), default=None)
        for record in records:
            for left_out in record.left_out if record.stage == stage.value else ():
                if lowest is None or left_out.key <= lowest:
                    found.setdefault(left_out.index, left_out.problem)
    return found


def _failed(workspace: Workspace, stage: Stage, records: Iterable[JobRecord]) -> list[Key]:
    failed = [key for record in records if record.stage == stage.value for key in record.failed]
    if not failed:
        return []
    folder = workspace.hashing.receipts if stage is Stage.HASHING else workspace.receipts
    done = present(workspace.store, folder)
    return [key for key in failed if f"{receipt_name(key)}.arrow" not in done]


@contextlib.contextmanager
def running(workspace: Workspace, job_index: int, num_jobs: int) -> Iterator[None]:
    """Show that a job runs, until the context or the process ends; each run of a job shows it for itself."""
    name = f"{JOBS}/{job_index:06d}-of-{num_jobs:06d}-{secrets.token_hex(8)}.lock"
    try:
        with workspace.store.lease(name).hold(f"job {job_index} of {num_jobs}, {this_process()}"):
            yield
    finally:
        workspace.store.delete(name)


def running_jobs(workspace: Workspace) -> Iterator[str]:
    """The jobs that run now, as they call themselves; none where the store cannot tell."""
    for name in sorted(present(workspace.store, JOBS)):
        if name.endswith(".lock"):
            holder = workspace.store.lease(f"{JOBS}/{name}").holder()
            if holder is not None:
                yield holder
