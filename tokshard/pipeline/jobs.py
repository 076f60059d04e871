"""A build by several machines with a shared directory or bucket: each job works on a share, and one process commits.

Job I of N runs the tasks t = I mod N of each stage, then tasks that others have left. So any job
finishes the work of the others, even if they died. The first job prepares the build. Limits, bad records and the first
failure need all receipts: every job judges them where a stage ends, and so does the commit.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec

from tokshard.errors import BuildError, UsageError
from tokshard.forking import cpu_count
from tokshard.format.opening import read_manifest
from tokshard.pipeline.adopt import adopt, finished_corpora, load_tasks, remove_workspace
from tokshard.pipeline.append import newest_generation
from tokshard.pipeline.build import executors, hints, ignore
from tokshard.pipeline.commit import commit
from tokshard.pipeline.executors.base import RunUsage
from tokshard.pipeline.executors.worker import restoring_environment
from tokshard.pipeline.judge import Judge
from tokshard.pipeline.options import BuildOptions, checked_options, command_words, path_option
from tokshard.pipeline.progress import BuildResult, BuiltCorpus, Note, Observer, Report, StageStarted
from tokshard.pipeline.request import (
    Build,
    check_same,
    check_versions,
    is_same_command,
    load_request,
    placed,
    save_request,
)
from tokshard.pipeline.resolve import resolve
from tokshard.pipeline.sources.inputs import RecordSource
from tokshard.pipeline.sources.opening import check_all_unchanged
from tokshard.pipeline.spool import Spooler
from tokshard.pipeline.stages import run_stages
from tokshard.pipeline.tasks.planning import AnyTask, Planned, StepTask, StreamTask
from tokshard.pipeline.tasks.running import Stage
from tokshard.pipeline.work import (
    BuildRun,
    UnfinishedStageError,
    judge_of,
    judged_on_disk,
    run_share,
    settle,
    user_error,
)
from tokshard.pipeline.workspace.lease import check_no_build, lock, running_job, running_jobs
from tokshard.pipeline.workspace.ownership import check_directory, complete_outputs
from tokshard.pipeline.workspace.places import DEAL, HASH, WRITE, Workspace, open_workspace
from tokshard.pipeline.workspace.receipts import Key, Receipt, read_receipts, receipt_keys
from tokshard.wording import counted

_POLL_SECONDS = 2.0
"""How often a job that has nothing to do checks whether the others have ended a stage."""


_MOST_ASKED = 10_000
"""With more sources, no job checks all: a thousand jobs would ask a file server for each source a thousand times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job of an array."""

    index: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The result of a run of a job.

    Args:
        receipts: left by this job, in all stages, without their details.
        written: receipts of the stage that writes documents.
        is_new: False if the corpus was complete before.
    """

    directory: str
    receipts: Sequence[Receipt] = ()
    written: Sequence[Receipt] = ()
    seconds: float = 0.0
    is_new: bool = True


def run_job(sources: Sequence[Any], options: BuildOptions, job: Job, observer: Observer = ignore) -> JobResult:
    """Run one job of an array; `commit_corpus` makes the corpus when all are done. May run again, even twice at once.

    Args:
        sources: as for `build_corpus`. The first job spools the sources that can be read only once, in full; the other
            jobs may get nothing of them.

    Raises:
        UsageError: an argument is wrong, or `out` belongs to another build.
        SourceError: an input is damaged, gone, or holds a bad record; the commit judges which failure counts.
        BuildError: the job cannot continue.
        KeyboardInterrupt: the next run of any job continues.
    """
    started = time.monotonic()
    options = checked_options(options)
    _check_job(options, job)
    receipts: dict[str, dict[Key, Receipt]] = {}

    def observe(report: Report) -> None:
        if isinstance(report, StageStarted):
            receipts[report.name] = receipts.pop(report.name, {})  # a stage may run again after a later one
        elif isinstance(report, Receipt):
            receipts[[*receipts][-1]][report.key] = report.without_details()
        observer(report)

    build = _prepared(sources, options, job, Spooler(sources, observer))
    if build is None:
        return JobResult(directory=options.out, is_new=False)
    with (
        hints(build),
        running_job(build.workspace, job.index, job.count),
        executors(options, observer) as make_executor,
    ):
        check_no_build(build.workspace)
        share = _Share(build, job, BuildRun(make_executor=make_executor, observer=observe))
        with contextlib.suppress(UnfinishedStageError):
            run_stages(build, _tasks(build), share.settled)
    build.workspace.run.end()
    return JobResult(
        directory=options.out,
        receipts=[receipt for stage in receipts.values() for receipt in stage.values()],
        written=list(receipts.get(WRITE, {}).values()),
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True, slots=True)
class _Share:
    """A job's share of the stages of a build."""

    build: Build
    job: Job
    runs: BuildRun

    def settled(self, stage: Stage) -> Judge:
        """Run the job's tasks of a stage, then tasks that others left, wait until none is missing, and judge the stage.

        Raises:
            TokshardError: as `settle`, or a task of the job failed.
            UnfinishedStageError: it was the last stage, which the commit judges.
        """
        judge = judge_of(self.build, stage, stage.tasks[self.job.index :: self.job.count])
        run_share(self.build, stage, judge, self.runs)
        if judge.failure is not None:
            raise user_error(self.build, stage.name, judge, is_share=True)
        has_waited = False
        while True:
            if self._help(stage):
                continue
            if stage.name == WRITE:
                raise UnfinishedStageError(stage, [])
            if missing := self._missing(stage):
                if not has_waited:
                    self.runs.observer(Note(self._waiting(len(missing))))
                has_waited = True
                time.sleep(_POLL_SECONDS)  # running jobs have the rest under way
                continue
            with contextlib.suppress(UnfinishedStageError):  # a receipt was void
                return settle(self.build, stage, judged_on_disk(self.build, stage))

    def _waiting(self, num_tasks: int) -> str:
        """The message of a job that waits: for how many tasks, and which jobs run."""
        others = [f"job {index}" for index, _ in running_jobs(self.build.workspace) if index != self.job.index]
        shown = [*others[:5], *([f"{len(others) - 5:,} more"] if len(others) > 5 else [])]
        return f"waiting for {counted(num_tasks, 'task')} of other jobs; running: {', '.join(shown) or 'none'}"

    def _help(self, stage: Stage) -> bool:
        """Run some tasks that no running job is likely to have begun, in an order of its own; False if there are none.

        A job takes its tasks in order, so the first ones that it lacks are under way.
        """
        missing = self._missing(stage)
        running = {index for index, count in running_jobs(self.build.workspace) if count == self.job.count}
        under_way = self.build.options.workers or cpu_count()
        of_jobs, left = defaultdict[int, list[AnyTask]](list), list[AnyTask]()
        for number, task in missing:
            of_jobs[number % self.job.count].append(task)
        for index, theirs in sorted(of_jobs.items()):
            left += theirs if index == self.job.index or index not in running else theirs[under_way:]
        # with a limit, in the order of the tasks, so that receipts show where it falls
        start = self.job.index * len(left) // self.job.count if stage.limit is None else 0
        chosen = [*left[start:], *left[:start]][: 4 * under_way]
        self.runs.tasks(self.build, stage, chosen, judge_of(self.build, stage, sorted(chosen, key=lambda one: one.key)))
        return bool(chosen)

    def _missing(self, stage: Stage) -> list[tuple[int, AnyTask]]:
        """The tasks of a stage that have no receipt, with their numbers, by a list of the receipts."""
        if stage.limit is not None:  # most tasks may come after it: only receipts show where it falls
            wanted = {task.key for task in judged_on_disk(self.build, stage).missing()}
            return [(number, task) for number, task in enumerate(stage.tasks) if task.key in wanted]
        keys, judge = receipt_keys(self.build.workspace.store, stage.name), judge_of(self.build, stage)
        segments = {first: {segment for _, segment in same} for first, same in groupby(keys, itemgetter(0))}
        found = ((number, task) for number, task in enumerate(stage.tasks) if not self._is_there(stage, task, segments))
        return [(number, task) for number, task in found if not judge.is_pointless(task)]

    def _is_there(self, stage: Stage, task: AnyTask, segments: Mapping[int, set[int]]) -> bool:
        first, segment = task.key
        there = segments.get(first, set())
        if not isinstance(task, StreamTask):
            return segment in there
        last = (first, len(there) - 1)
        if max(there, default=0) != last[1]:  # none, or one was void
            return False
        for receipt in read_receipts(self.build.workspace.store, stage.name, [last]):
            # a stream that ends early has all documents that its job was to write
            is_enough = receipt.max_documents is not None and receipt.most_documents >= receipt.max_documents
            return receipt.is_last or receipt.failure is not None or is_enough
        return False


def _prepared(sources: Sequence[str | RecordSource], options: BuildOptions, job: Job, spooler: Spooler) -> Build | None:
    """The build, prepared here or by another job; None if its corpus is complete.

    The sources are listed by the job that prepares the build, and by jobs whose command differs in any letter. The
    others check whether the listed sources have changed; if there are very many, each job checks its share.
    """
    workspace = open_workspace(options.out)
    saved = load_request(workspace)
    if saved is not None and is_same_command(saved, sources, options) and load_tasks(workspace) is not None:
        build = placed(msgspec.structs.replace(saved, options=options), workspace)
        if not build.is_complete:  # a commit that was killed while it cleaned up leaves the request
            check_versions(build)
            step = 1 if len(build.inputs) <= _MOST_ASKED else job.count
            asked = range(job.index if step > 1 else 0, len(build.inputs), step)
            check_all_unchanged(map(build.inputs.__getitem__, asked), build.start_over)
            with hints(build):
                build = spooler.spooled(build, is_continued=True)
                workspace.run.join()
            return build
    build, tokenizer = resolve(sources, options)
    with hints(build):
        if finished_corpora(build) is not None:
            return None
        check_directory(build.workspace, build.outputs)
    build = msgspec.structs.replace(build, is_array=True)
    with hints(build), lock(build.workspace, is_preparing=True):
        before = load_request(build.workspace)
        # the work folder of an earlier generation can be left although that generation is complete
        is_begun = before is not None and before.is_array and before.generation >= build.generation
        if before is not None and is_begun and load_tasks(build.workspace) is not None:
            check_same(before, build)
            build.workspace.run.join()
            save_request(build)
            build = spooler.spooled(build, is_continued=True)
        else:
            build, _ = adopt(build, tokenizer, spooler)
    return build


def _tasks(build: Build) -> list[Planned]:
    tasks = load_tasks(build.workspace)
    if tasks is None:
        raise BuildError(f"{build.workspace.out} is not complete: no job has planned its tasks", hint=_any_job(build))
    return tasks


def _check_job(options: BuildOptions, job: Job) -> None:
    if not 0 <= job.index < job.count:
        hint = f"give --job-index a number from 0 to {job.count - 1}"
        raise UsageError(f"job {job.index} of {job.count} does not exist", hint=hint)
    if options.force:
        # the work of the others on an append is in a folder of the corpus, which has to stay
        way_out = "leave out --job-index and --num-jobs" if options.append else f"remove {options.out} first"
        raise UsageError(
            "--force starts over, and every job of an array would remove what the others have done", hint=way_out
        )
    if options.ray is not None:
        raise UsageError(
            "--ray divides a build among machines by itself",
            hint="leave it out, or leave out --job-index and --num-jobs",
        )


@restoring_environment()
def commit_corpus(out: str | os.PathLike[str]) -> BuildResult:
    """Make the corpus from the tasks that jobs ran, with the same bytes and errors as a build by one process.

    Runs the task at which a limit falls, which only all receipts decide.

    Raises:
        UsageError: no build has begun in `out`.
        SourceError: the first failure, in input order, of any job; or a source has changed since the build began.
        BuildError: tasks are missing, or jobs still run; it says which.
    """
    usage = RunUsage()
    workspace = open_workspace(path_option("out", out))
    request = load_request(workspace)
    if request is None:
        result = _complete(workspace)
        remove_workspace(workspace)
        return result
    build = placed(request, workspace)
    with hints(build), lock(workspace):
        if build.is_complete:
            workspace.remove()  # a commit was killed between its manifest and its last step
            return _complete(workspace)
        check_versions(build)
        check_all_unchanged(build.inputs, build.start_over)
        workspace.run.take_over()
        try:
            settled = run_stages(build, _tasks(build), lambda stage: settle(build, stage, judged_on_disk(build, stage)))
        except UnfinishedStageError as error:
            raise _incomplete(build, error) from None
        return commit(build, settled, usage)


def _incomplete(build: Build, error: UnfinishedStageError) -> BuildError:
    """The error for missing tasks, with the command that runs them."""
    first, count = error.missing[0], len(error.missing)
    verb = {HASH: "hashed", WRITE: "written", DEAL: "dealt"}.get(error.stage.name, "done")
    is_reader = not isinstance(first, StepTask)
    place = f", the first of which reads {build.inputs[first.key[0]].location}" if is_reader else ""
    return BuildError(
        f"{build.workspace.out} is not complete: {count:,} of {len(error.stage.tasks):,} tasks are not {verb}{place}",
        hint=_any_job(build),
    )


def _any_job(build: Build) -> str:
    words = command_words(build.sources, build.options, is_array=build.is_array)
    return f"any job finishes the tasks of the others: cd {shlex.quote(build.directory)} && {shlex.join(words)}"


def _complete(workspace: Workspace) -> BuildResult:
    """The result if another process has committed the corpus.

    Raises:
        UsageError: there is no corpus.
    """
    outputs = complete_outputs(workspace)
    if not outputs:
        raise UsageError(
            f"no build has begun in {workspace.out}",
            hint="run the jobs first: tokshard build ... --job-index I --num-jobs N",
        )
    outputs = workspace.outputs(is_split=bool(outputs[0].split), generation=newest_generation(outputs))
    corpora = tuple(BuiltCorpus(directory=one.store.location, manifest=read_manifest(one.store)) for one in outputs)
    return BuildResult(directory=workspace.out, corpora=corpora, is_new=False)
