"""What a job of an array writes down while it runs, and what the records of all jobs say together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from operator import itemgetter

import msgspec

from tokshard.errors import BuildError
from tokshard.pipeline.failures import BadInputError
from tokshard.pipeline.progress import Report, StageStarted, TaskFinished
from tokshard.pipeline.tasks.decisions import Failure
from tokshard.pipeline.tasks.planning import Key
from tokshard.pipeline.workspace.job_records import (
    JobRecord,
    JobState,
    LeftOutInput,
    load_record,
    load_records,
    save_record,
    this_process,
)
from tokshard.pipeline.workspace.places import Stage, Workspace
from tokshard.pipeline.workspace.receipts import Progress, progress_of, receipt_name
from tokshard.pipeline.workspace.settings import load_bad_inputs
from tokshard.store import present

_SAVE_SECONDS = 10.0


class JobLog:
    """An observer that keeps the record of a job: saved every few seconds, and when something happens that counts.

    Args:
        workspace: of the build.
        num_bytes: of input that the tasks of the job read, about.
    """

    def __init__(self, workspace: Workspace, stage: Stage, job_index: int, num_jobs: int, *, num_bytes: int) -> None:
        self._workspace, self.stage = workspace, stage
        before = load_record(workspace, stage, job_index, num_jobs)
        now = time.time()
        self._last_save = time.monotonic()
        self.record = JobRecord(
            job_index=job_index,
            num_jobs=num_jobs,
            stage=stage.value,
            process=this_process(),
            state=JobState.STARTED,
            started=now,
            updated=now,
            num_tasks=0,
            num_bytes=num_bytes,
            left_out=[] if before is None else before.left_out,  # what was found once is not looked for again
        )

    def __call__(self, report: Report) -> None:
        """Take in a report, and save the record if it is time."""
        record = self.record
        match report:
            case StageStarted(tasks=tasks, done=done):
                before = progress_of(done)
                self._update(
                    num_tasks=len(tasks),
                    tasks_done=sum(receipt.is_last for receipt in done),
                    bytes_done=before.input_bytes,
                    bytes_before=before.input_bytes,
                    documents=before.documents,
                    tokens=before.tokens,
                )
                self.save()
            case Progress():
                self._update(
                    bytes_done=record.bytes_done + report.input_bytes,
                    documents=record.documents + report.documents,
                    tokens=record.tokens + report.tokens,
                )
            case TaskFinished(receipt):
                self._update(tasks_done=record.tasks_done + receipt.is_last)
            case _:
                return
        if time.monotonic() - self._last_save >= _SAVE_SECONDS:
            self.save()

    def left_out(self, key: Key, index: int, problem: str) -> None:
        """Write down that an input is left out whole.

        Args:
            key: of the task that met the damage.
        """
        self._update(left_out=[*self.record.left_out, LeftOutInput(key=key, index=index, problem=problem)])
        self.save()

    def failed(self, failures: Mapping[Key, Exception], *, is_passing_damage: bool) -> Failure | None:
        """Leave to the commit what would fail again; returns the failure that ends the job, if there is one.

        Args:
            failures: of the tasks and segments of the job, at least one.
            is_passing_damage: damaged inputs do not end the job: a limit may fall before them.
        """
        again = sorted(key for key, error in failures.items() if not isinstance(error, BuildError))
        self._update(failed=again)
        ending = [
            (key, error)
            for key, error in failures.items()
            if not (is_passing_damage and isinstance(error, BadInputError))
        ]
        return min(ending, key=itemgetter(0), default=None)

    def end(self, state: JobState, problem: str = "") -> None:
        """Write down how the job ended."""
        self._update(state=state.value, problem=problem)
        self.save()

    def bad_inputs(self) -> dict[int, str]:
        """The inputs that the job has to do without: those it left out before, and those that were judged."""
        mine = {found.index: found.problem for found in self.record.left_out}
        return {**mine, **load_bad_inputs(self._workspace)}

    def save(self) -> None:
        """Write the record."""
        self._last_save = time.monotonic()
        self._update(updated=time.time())
        save_record(self._workspace, self.record)

    def _update(self, **changes: object) -> None:
        self.record = msgspec.structs.replace(self.record, **changes)


def given_up(workspace: Workspace, stage: Stage) -> frozenset[Key]:
    """The tasks and segments of a stage that jobs gave up, and that nobody has done since."""
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
