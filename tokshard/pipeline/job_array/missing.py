"""What to say if a job or a commit cannot continue: which tasks are missing, of which jobs, and the command to run."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator

from tokshard.errors import BuildError
from tokshard.pipeline.job_array.saved_build import load_build
from tokshard.pipeline.job_array.stages import STAGE_NAMES
from tokshard.pipeline.stage import UnfinishedStageError
from tokshard.pipeline.workspace.job_records import load_records
from tokshard.pipeline.workspace.lease import cannot_write
from tokshard.pipeline.workspace.places import Stage, Workspace
from tokshard.pipeline.workspace.settings import load_command

_MAX_JOBS_NAMED = 10


@contextlib.contextmanager
def explained(workspace: Workspace) -> Iterator[None]:
    """Say how a job that is interrupted continues, which tasks are missing, and that the output cannot be written."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note("run the same command to continue")
        raise
    except UnfinishedStageError as error:
        raise _incomplete(workspace, error) from None
    except OSError as error:  # an input that cannot be read is a SourceError, so this is the output
        raise cannot_write(workspace.out, error) from error


def _incomplete(workspace: Workspace, error: UnfinishedStageError) -> BuildError:
    """What is missing, of which jobs, and the command that runs the first of them."""
    saved = load_build(workspace, workers=None)
    assert saved is not None
    command = load_command(workspace)
    words = [] if command is None else command.words
    if saved.resolved.options.dedup == "exact":
        words = [*words, "--stage", STAGE_NAMES[error.stage]]
    if error.stage is Stage.DUPLICATES:
        problem = f"{workspace.out} is not complete: the duplicates among its texts have not been found yet"
        return BuildError(problem, hint=f"run {shlex.join(words)}")
    verb = "hashed" if error.stage is Stage.HASHING else "written"
    first = saved.resolved.found.inputs[saved.tasks[error.tasks[0]].key[0]].location
    problem = (
        f"{workspace.out} is not complete: {len(error.tasks):,} of {len(saved.tasks):,} tasks have not been {verb}, "
        f"the first of which reads {first}"
    )
    records = [record for record in load_records(workspace) if record.stage == error.stage.value]
    if not records:
        return BuildError(problem, hint=f"run for every I below N: {shlex.join(words)} --job-index I --num-jobs N")
    num_jobs = max(records, key=lambda record: record.updated).num_jobs
    jobs = sorted({index % num_jobs for index in error.tasks})
    named = ", ".join(map(str, jobs[:_MAX_JOBS_NAMED])) + (" and more" if len(jobs) > _MAX_JOBS_NAMED else "")
    problem += f"; they belong to job{'s' if len(jobs) > 1 else ''} {named} of {num_jobs}"
    failed = [
        record for record in records if record.num_jobs == num_jobs and record.job_index in jobs and record.problem
    ]
    if failed:
        problem += f"; job {failed[0].job_index} failed: {failed[0].problem}"
    words += ["--job-index", str(jobs[0]), "--num-jobs", str(num_jobs)]
    return BuildError(problem, hint=f"run {'them' if len(jobs) > 1 else 'it'} again: {shlex.join(words)}")
