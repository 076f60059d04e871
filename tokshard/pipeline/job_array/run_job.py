"""A build by several machines that share a directory or a bucket: jobs run its tasks, and one process commits.

Job I of N runs the tasks t = I mod N. Which job comes first prepares the build; from then on no job waits for another.
What needs all receipts is judged by the commit: limits, the share of bad records, and which failure is the lowest.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from tokshard.errors import TokshardError, UsageError
from tokshard.pipeline.executors.choice import executors
from tokshard.pipeline.executors.surroundings import leaving_the_program_alone
from tokshard.pipeline.job_array.log import JobLog
from tokshard.pipeline.job_array.missing import explained
from tokshard.pipeline.job_array.saved_build import SavedBuild, load_build, save_resolved
from tokshard.pipeline.job_array.stages import DUPLICATES, HASH, STAGES
from tokshard.pipeline.options import (
    LOCAL,
    BuildOptions,
    OptionalBuildOptions,
    checked_options,
    path_option,
    takes_build_options,
)
from tokshard.pipeline.prepare import PreparedBuild, prepare, prepared_before
from tokshard.pipeline.progress import Observer, Report, ignore
from tokshard.pipeline.resolve import ResolvedBuild, resolve
from tokshard.pipeline.run import find_drops, has_more_bad_inputs
from tokshard.pipeline.sources.inputs import STDIN, read_once_name
from tokshard.pipeline.sources.iterables import as_sources
from tokshard.pipeline.stage import Access, Outcome, StageRunner, UnfinishedStageError, WholeBuild, Work
from tokshard.pipeline.tasks.duplicates import DropLists
from tokshard.pipeline.tasks.planning import StreamTask, Task
from tokshard.pipeline.tasks.saved_drops import load_drops, save_drops
from tokshard.pipeline.tasks.saved_plan import share_bytes
from tokshard.pipeline.workspace.job_records import JobRecord, JobState, known_bad_inputs, running
from tokshard.pipeline.workspace.lease import check_no_build, lock, lock_to_prepare
from tokshard.pipeline.workspace.output_directory import check_directory, check_own, finished_corpora
from tokshard.pipeline.workspace.places import Stage, Workspace, open_workspace
from tokshard.pipeline.workspace.settings import check_same_settings, load_settings, save_bad_inputs, save_settings


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
        BuildError: the job cannot continue, or the stage before is not complete.
        KeyboardInterrupt: the next run of the same job continues.
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
    with explained(workspace):
        prepared = _prepared(workspace, [str(argument) for argument in arguments], options, num_jobs)
        if prepared is None:
            return JobResult(directory=workspace.out, record=None, stage=stage)
        if stage == DUPLICATES:
            _find_duplicates(prepared, observer)
            record = None
        else:
            record = _run_share(prepared, job_index, num_jobs, stage, observer)
    return JobResult(directory=workspace.out, record=record, stage=stage, seconds=time.monotonic() - started)


def _check_job(options: BuildOptions, job_index: int, num_jobs: int, stage: str | None) -> None:
    if not 0 <= job_index < num_jobs:
        raise UsageError(
            f"job {job_index} of {num_jobs} does not exist", hint=f"give --job-index a number from 0 to {num_jobs - 1}"
        )
    if options.force:
        raise UsageError(
            "--force starts over, and every job of an array would remove what the others have done",
            hint="leave out --job-index, --num-jobs and --stage"
            if options.append  # what the others have done is in a folder of the corpus, which has to stay
            else f"remove {options.out} first, and leave out --force",
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
            _run_tasks(prepared, tasks, log, observer=observer)
        except TokshardError as error:
            log.end(JobState.FAILED, error.problem)
            raise
        log.end(JobState.DONE)
    assert workspace.attempt is not None
    workspace.attempt.end()
    return log.record


def _run_tasks(prepared: PreparedBuild, tasks: Sequence[Task | StreamTask], log: JobLog, *, observer: Observer) -> None:
    """Run the tasks of one job that have no receipt yet, in the stage of its log.

    Failures are raised, and those that would come again are left to the commit to judge, with all that only the
    receipts of all jobs decide.

    Raises:
        TokshardError: as `run`.
    """

    def observe(report: Report) -> None:
        log(report)
        observer(report)

    outcome = Outcome(bad_inputs=log.bad_inputs())
    with executors(prepared.resolved.options, observer) as make:
        work = Work(prepared=prepared, share=log, outcome=outcome, observer=observe, make=make)
        context = work.context
        if log.stage is Stage.HASHING:
            context = replace(context, workspace=context.workspace.hashing)
        elif prepared.resolved.options.dedup == "exact":
            context = replace(context, drops=_found_drops(work))
        StageRunner(work, context, Access.RUN).run(tasks)


def _found_drops(work: Work) -> DropLists:
    """The duplicates that `_find_duplicates` found.

    Raises:
        UnfinishedStageError: it has not, or not among the inputs that are left.
    """
    hashing = work.context.workspace.hashing
    drops = load_drops(hashing, work.outcome.bad_inputs)
    if drops is None:
        looking = replace(work, share=WholeBuild(work.context.workspace), observer=ignore)
        StageRunner(looking, replace(work.context, workspace=hashing), Access.LOOK).run(work.prepared.tasks)
        raise UnfinishedStageError(Stage.DUPLICATES)
    return drops


def _find_duplicates(prepared: PreparedBuild, observer: Observer) -> None:
    """The second stage of ``--dedup exact``: judge the failures of those that hashed, and find the duplicates."""
    workspace = prepared.resolved.context.workspace
    with lock(workspace), executors(prepared.resolved.options, observer) as make:
        workspace.take_over()
        outcome = Outcome(bad_inputs=known_bad_inputs(workspace))
        work = Work(prepared=prepared, share=WholeBuild(workspace), outcome=outcome, observer=observer, make=make)
        drops = find_drops(work, hashing=Access.JUDGE, merging=Access.RUN)
        while has_more_bad_inputs(work):
            drops = find_drops(work, hashing=Access.JUDGE, merging=Access.RUN)
        # those that write go by the duplicates among all other inputs
        save_bad_inputs(workspace, outcome.bad_inputs)
        save_drops(drops, outcome.bad_inputs)
