"""A build by several machines that share a directory or a bucket: jobs run its tasks, and one process commits.

Job I of N runs the tasks t = I mod N. Which job comes first prepares the build; from then on no job waits for another.
What needs all receipts is judged by the commit: limits, the share of bad records, and which failure is the lowest.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Unpack

from tokshard.errors import BuildError, TokshardError, UsageError
from tokshard.format import names
from tokshard.format.opening import read_manifest
from tokshard.pipeline.append import newest_generation
from tokshard.pipeline.commit import commit
from tokshard.pipeline.executors.surroundings import leaving_the_program_alone
from tokshard.pipeline.job_log import JobLog
from tokshard.pipeline.options import (
    LOCAL,
    BuildOptions,
    OptionalBuildOptions,
    checked_options,
    path_option,
    takes_build_options,
)
from tokshard.pipeline.prepare import PreparedBuild, prepare, prepared_before
from tokshard.pipeline.progress import Observer, ignore
from tokshard.pipeline.resolve import ResolvedBuild, resolve
from tokshard.pipeline.result import BuildResult
from tokshard.pipeline.run import Access, UnfinishedStageError, find_duplicates_of_jobs, run
from tokshard.pipeline.run import run_job as run_tasks
from tokshard.pipeline.saved_build import SavedBuild, load_build, save_resolved
from tokshard.pipeline.sources.inputs import STDIN, read_once_name
from tokshard.pipeline.sources.iterables import as_sources
from tokshard.pipeline.tasks.planning import StreamTask, Task
from tokshard.pipeline.tasks.saved_plan import share_bytes
from tokshard.pipeline.workspace.job_records import JobRecord, JobState, load_records, running
from tokshard.pipeline.workspace.lease import cannot_write, check_no_build, lock, lock_to_prepare
from tokshard.pipeline.workspace.output_directory import BuiltCorpus, check_directory, check_own, finished_corpora
from tokshard.pipeline.workspace.places import Stage, Workspace, open_workspace
from tokshard.pipeline.workspace.settings import (
    check_same_settings,
    load_command,
    load_settings,
    save_bad_inputs,
    save_settings,
)
from tokshard.store import present

HASH, DUPLICATES, WRITE = STAGES = ("hash", "duplicates", "write")
"""Values of ``--stage``, in the order in which a build with ``--dedup exact`` needs them."""

_STAGE_NAMES = {Stage.HASHING: HASH, Stage.DUPLICATES: DUPLICATES, Stage.ENCODING: WRITE}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What a job of an array did.

    Args:
        record: what it wrote down of itself; None if the corpus was complete before, or no share of the tasks was run.
        stage: with ``--dedup exact``, the stage that was run.
    """

    directory: str
    record: JobRecord | None
    stage: str | None = None
    seconds: float = 0.0


@takes_build_options
@leaving_the_program_alone()
def run_job(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    job_index: int = 0,
    num_jobs: int = 1,
    stage: str | None = None,
    tokenizer: str | os.PathLike[str],
    out: str | os.PathLike[str],
    observer: Observer = ignore,
    **keywords: Unpack[OptionalBuildOptions],
) -> JobResult:
    """Run one job of an array; `commit_jobs` makes the corpus when all are done. May run again, or twice at a time.

    Args:
        sources: as of `build_corpus`, but nothing that can be read once only.
        job_index, num_jobs: the job runs the tasks t = job_index mod num_jobs.
        stage: with ``dedup="exact"``, ``hash``, ``duplicates`` or ``write``. Each needs the one before it to be
            complete; ``duplicates`` is one process, whatever the number of jobs.
        observer: is called with what the job reports while it runs, see `tokshard.pipeline.progress`.
        {options}

    Raises:
        UsageError: an argument is wrong, or `out` belongs to another build.
        SourceError: an input is damaged, gone, or holds a bad record; the commit judges which failure counts.
        BuildError: the job could not go on, or the stage before is not complete.
        KeyboardInterrupt: the next run of the same job goes on.
    """
    started = time.monotonic()
    given = BuildOptions(tokenizer=path_option("tokenizer", tokenizer), out=path_option("out", out), **keywords)
    options = checked_options(given)
    _check_job(options, job_index, num_jobs, stage)
    arguments = as_sources(sources)
    for argument in arguments:
        if not isinstance(argument, str) or argument == STDIN:
            raise _read_once(str(argument))
    workspace = open_workspace(options.out, attempt=secrets.token_hex(8))
    with _saying_what_failed(workspace):
        prepared = _prepared(workspace, [str(argument) for argument in arguments], options, num_jobs)
        if prepared is None:
            return JobResult(directory=workspace.out, record=None, stage=stage)
        if stage == DUPLICATES:
            _find_duplicates(prepared, observer)
            record = None
        else:
            record = _run_share(prepared, job_index, num_jobs, stage, observer)
    return JobResult(directory=workspace.out, record=record, stage=stage, seconds=time.monotonic() - started)


@leaving_the_program_alone()
def commit_jobs(out: str | os.PathLike[str], *, workers: int | None = None, observer: Observer = ignore) -> BuildResult:
    """Make the corpus of the tasks that jobs ran: the bytes and the errors are those of a build by one process.

    Runs what only all receipts decide: the task at which a limit falls, and those that jobs gave up.

    Raises:
        UsageError: no jobs have begun a build in `out`.
        SourceError: the lowest failure of any job.
        BuildError: tasks are missing, or jobs still run; it says which.
    """
    workspace = open_workspace(path_option("out", out), attempt=secrets.token_hex(8))
    if load_build(workspace, workers=workers) is None:
        return _complete(workspace)
    with _saying_what_failed(workspace), lock(workspace):
        saved = load_build(workspace, workers=workers)
        if saved is None:
            return _complete(workspace)
        outputs = saved.resolved.context.outputs
        if all(names.MANIFEST in present(output.store) for output in outputs):
            workspace.remove()  # a commit was killed between its manifest and its last step
            return _complete(workspace)
        workspace.take_over()
        prepared = prepared_before(saved.resolved, saved.tasks)
        return commit(prepared, run(prepared, observer=observer, access=Access.JUDGE))


def _check_job(options: BuildOptions, job_index: int, num_jobs: int, stage: str | None) -> None:
    if not 0 <= job_index < num_jobs:
        raise UsageError(
            f"job {job_index} of {num_jobs} does not exist", hint=f"give --job-index a number from 0 to {num_jobs - 1}"
        )
    if options.force:
        raise UsageError(
            "--force starts over, and every job of an array would remove what the others have done",
            hint=f"remove {options.out} first, and leave out --force",
        )
    if options.executor != LOCAL:
        raise UsageError(
            "--executor ray divides a build among machines by itself",
            hint="leave it out, or leave out --job-index and --num-jobs",
        )
    if (options.dedup == "exact") != (stage is not None):
        is_missing = stage is None
        raise UsageError(
            "jobs of a build with --dedup exact run in stages" if is_missing else "--stage is for --dedup exact",
            hint="give --stage hash, then --stage duplicates, then --stage write; each when the one before is complete"
            if is_missing
            else "leave out --stage",
        )
    if stage not in (None, *STAGES):
        raise UsageError(f"stage is {stage!r}", hint=f"give one of {', '.join(STAGES)}")


def _read_once(name: str) -> UsageError:
    return UsageError(
        f"{read_once_name(name)} can be read once only, and every job of an array reads its sources",
        hint="write it to a file first, or leave out --job-index and --num-jobs",
    )


@contextlib.contextmanager
def _saying_what_failed(workspace: Workspace) -> Iterator[None]:
    """Say how a job that is interrupted continues, which tasks are missing, and that the output cannot be written."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note("run the same command to continue")
        raise
    except UnfinishedStageError as error:
        raise _incomplete(workspace, error) from None
    except OSError as error:  # what is read names its input, so this is the output
        raise cannot_write(workspace.out, error) from error


def _prepared(workspace: Workspace, sources: list[str], options: BuildOptions, num_jobs: int) -> PreparedBuild | None:
    """The build, prepared here or by another job; None if its corpus is complete.

    Only the job that prepares it looks for the inputs, and jobs whose command is not the same to the letter.
    """
    check_own(workspace)
    saved = load_build(workspace, workers=options.workers)
    if saved is not None and saved.is_asked_for_by(sources, options):
        workspace.join()
        return prepared_before(saved.resolved, saved.tasks, num_jobs)
    resolved = resolve(sources, options)
    workspace, outputs = resolved.context.workspace, resolved.context.outputs
    if resolved.found.inputs.read_once:
        raise _read_once(resolved.found.inputs.read_once[0])
    if finished_corpora(workspace, outputs, resolved.settings) is not None:
        return None
    check_directory(workspace, outputs)
    with lock_to_prepare(workspace):
        saved = load_build(workspace, workers=options.workers)
        # one of an earlier generation is complete, and was stopped before it had removed its folder
        is_new = saved is None or saved.resolved.settings.generation < resolved.settings.generation
        tasks = prepare(resolved).tasks if saved is None or is_new else _joined(saved, resolved)
    return prepared_before(resolved, tasks, num_jobs)


def _joined(saved: SavedBuild, resolved: ResolvedBuild) -> Sequence[Task | StreamTask]:
    """The tasks that were planned before, if this is the same build; what may change from then on is saved."""
    workspace = resolved.context.workspace
    before = load_settings(workspace)
    assert before is not None, "settings are saved before the plan"
    check_same_settings(before, resolved.settings, out=workspace.out)
    workspace.join()
    if not saved.has_options(resolved.options):
        save_settings(workspace, resolved.settings)
        save_resolved(resolved)
    return saved.tasks


def _run_share(
    prepared: PreparedBuild, job_index: int, num_jobs: int, stage: str | None, observer: Observer
) -> JobRecord:
    workspace = prepared.resolved.context.workspace
    tasks = prepared.tasks[job_index::num_jobs]
    log = JobLog(
        workspace,
        Stage.HASHING if stage == HASH else Stage.ENCODING,
        job_index,
        num_jobs,
        num_bytes=share_bytes(tasks, prepared.tasks, prepared.resolved.found.inputs.sizes),
    )
    with running(workspace, job_index, num_jobs):
        check_no_build(workspace)
        try:
            run_tasks(prepared, tasks, log, observer=observer)
        except TokshardError as error:
            log.end(JobState.FAILED, error.problem)
            raise
        log.end(JobState.DONE)
    assert workspace.attempt is not None
    workspace.attempt.end()
    return log.record


def _find_duplicates(prepared: PreparedBuild, observer: Observer) -> None:
    workspace = prepared.resolved.context.workspace
    with lock(workspace):
        workspace.take_over()
        outcome = find_duplicates_of_jobs(prepared, observer=observer)
        # those that write go by the duplicates among all other inputs
        save_bad_inputs(workspace, outcome.bad_inputs)


def _complete(workspace: Workspace) -> BuildResult:
    for is_split in (False, True):
        outputs = workspace.outputs(is_split=is_split)
        if all(names.MANIFEST in present(output.store) for output in outputs):
            outputs = workspace.outputs(is_split=is_split, generation=newest_generation(outputs))
            corpora = [
                BuiltCorpus(directory=output.store.location, manifest=read_manifest(output.store)) for output in outputs
            ]
            return BuildResult(directory=workspace.out, corpora=tuple(corpora), is_new=False, ignored={}, notes=())
    raise UsageError(
        f"{workspace.out} holds no build that jobs have begun",
        hint="run the jobs first: tokshard build ... --job-index I --num-jobs N",
    )


_MAX_JOBS_NAMED = 10


def _incomplete(workspace: Workspace, error: UnfinishedStageError) -> BuildError:
    """What is missing, of which jobs, and the command that runs the first of them."""
    saved = load_build(workspace, workers=None)
    assert saved is not None
    command = load_command(workspace)
    words = [] if command is None else command.words
    is_staged = saved.resolved.options.dedup == "exact"
    if is_staged:
        words = [*words, "--stage", _STAGE_NAMES[error.stage]]
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
