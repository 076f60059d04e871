"""What a job of an array writes down while it runs: how far it is, and what it leaves to the commit to judge."""

from __future__ import annotations

import time
from collections.abc import Mapping
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
    save_record,
    this_process,
)
from tokshard.pipeline.workspace.places import Stage, Workspace
from tokshard.pipeline.workspace.receipts import Progress, progress_of
from tokshard.pipeline.workspace.settings import load_bad_inputs

_SAVE_SECONDS = 10.0


class JobLog:
    """The share of a job, and an observer that keeps its record: saved every few seconds, and when damage is found.

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

    @property
    def is_whole(self) -> bool:
        """Whether the job has all tasks of the build; even one that does leaves the judgement to the commit."""
        return False

    def leave_out(self, key: Key, index: int, bad_inputs: Mapping[int, str]) -> None:
        """Write down that an input is left out whole: see `Share`."""
        left_out = LeftOutInput(key=key, index=index, problem=bad_inputs[index])
        self._update(left_out=[*self.record.left_out, left_out])
        self.save()

    def deciding_failure(
        self,
        lowest: Failure,  # noqa: ARG002 -- of `Share`
        failures: Mapping[Key, Exception],
        *,
        is_passing_damage: bool,
    ) -> Failure | None:
        """Leave to the commit what would fail again, and find the failure that ends the job: see `Share`."""
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
