"""A build by several machines that share a directory or a bucket: each job works on a share, and one process commits.

Job I of N runs the tasks t = I mod N of each stage, then helps with what others left. So any job finishes what the
others did not, whatever became of them. Which job comes first prepares the build. What needs all receipts is judged
where a stage ends, by every job alike, and by the commit: limits, bad records, and which failure is the lowest.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tokshard.errors import BuildError, UsageError
from tokshard.format import names
from tokshard.format.opening import read_manifest
from tokshard.pipeline.adopt import BuiltCorpus, adopt, finished_corpora, load_tasks
from tokshard.pipeline.append import newest_generation
from tokshard.pipeline.build import hints, run_stages, save_tokenizer
from tokshard.pipeline.commit import BuildResult, Clock, commit
from tokshard.pipeline.executors.base import MakeExecutor
from tokshard.pipeline.executors.choice import cpu_count, executors
from tokshard.pipeline.executors.worker import leaving_the_program_alone
from tokshard.pipeline.judge import Judge
from tokshard.pipeline.messages import task_error
from tokshard.pipeline.options import (
    LOCAL,
    BuildOptions,
    checked_options,
    command_words,
    path_option,
)
from tokshard.pipeline.progress import Observer, Report, StageEnded, StageStarted, ignore
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
from tokshard.pipeline.sources.inputs import STDIN, read_once_name
from tokshard.pipeline.stages import stages
from tokshard.pipeline.tasks.planning import AnyTask, Planned, StepTask, StreamTask
from tokshard.pipeline.tasks.running import Stage
from tokshard.pipeline.work import UnfinishedStageError, judge_of, judged_on_disk, settle, valid_receipts, work
from tokshard.pipeline.workspace.lease import check_no_build, lock, lock_to_prepare, running_job, running_jobs
from tokshard.pipeline.workspace.ownership import check_directory, check_own
from tokshard.pipeline.workspace.places import DEAL, HASH, WRITE, Workspace, open_workspace
from tokshard.pipeline.workspace.receipts import Key, Receipt, delete_receipt, read_receipts, receipt_keys
from tokshard.store import present

_POLL_SECONDS = 2.0
"""How often a job that has nothing to do checks whether the others have ended a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job of an array."""

    index: int
    count: int

    def owns(self, number: int) -> bool:
        """Whether a task is the job's, by its number among all tasks of a stage."""
        return number % self.count == self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What a job of an array did.

    Args:
        job: which one it was.
        tasks_done: by this run, in all stages; segments of streams count one each.
        documents, tokens: written by this run.
        is_new: False if the corpus was complete before.
    """

    directory: str
    job: Job
    tasks_done: int = 0
    documents: int = 0
    tokens: int = 0
    seconds: float = 0.0
    is_new: bool = True


def run_job(sources: Sequence[Any], options: BuildOptions, job: Job, observer: Observer = ignore) -> JobResult:
    """Run one job of an array; `commit_corpus` makes the corpus when all are done. May run again, or twice at a time.

    Args:
        sources: as of `build_corpus`, but nothing that can be read once only.

    Raises:
        UsageError: an argument is wrong, or `out` belongs to another build.
        SourceError: an input is damaged, gone, or holds a bad record; the commit judges which failure counts.
        BuildError: the job cannot continue.
        KeyboardInterrupt: the next run of any job continues.
    """
    started = time.monotonic()
    options = checked_options(options)
    _check_job(options, job)
    for source in sources:
        if not isinstance(source, str) or source == STDIN:
            raise _read_once(str(source))
    with prepared(list(sources), options) as found:
        if found is None:
            return JobResult(directory=options.out, job=job, is_new=False)
        build, tasks = found
        with running_job(build.workspace, job.index, job.count), executors(options, observer) as make_executor:
            check_no_build(build.workspace)
            share = _Share(build, job, make_executor, observer)
            following = stages(build, tasks)
            stage = next(following)
            while stage.name != WRITE:
                stage = following.send(share.settled(stage))
            share.run(stage)
        build.workspace.run.end()
    return share.result(time.monotonic() - started)


class _Share:
    """What a job does in the stages of a build."""

    def __init__(self, build: Build, job: Job, make_executor: MakeExecutor, observer: Observer) -> None:
        self._build, self._job, self._make_executor, self._observer = build, job, make_executor, observer
        self._store = build.workspace.store
        self._done = self._documents = self._tokens = 0

    def settled(self, stage: Stage) -> Judge:
        """Run a stage until no task is missing, and judge it.

        Raises:
            TokshardError: as `work` and `settle`.
        """
        self.run(stage)
        while True:
            if not self._missing(stage):
                with contextlib.suppress(UnfinishedStageError):  # a receipt was void
                    return settle(self._build, stage, judged_on_disk(self._build, stage))
            elif not self._help(stage):
                time.sleep(_POLL_SECONDS)  # jobs that run have the rest under way

    def run(self, stage: Stage) -> None:
        """Run the job's tasks of a stage, then those that others left.

        Raises:
            TokshardError: a task of the job failed.
        """
        mine = [task for number, task in enumerate(stage.tasks) if self._job.owns(number)]
        judge = judge_of(self._build, stage, mine)
        done = []
        for receipt in valid_receipts(self._build, stage, mine):
            if receipt.failure is not None:  # the file may be back
                delete_receipt(self._store, stage.name, receipt.key)
            else:
                judge.add(receipt)
                done.append(receipt.without_details())
        self._observer(StageStarted(build=self._build, name=stage.name, total_bytes=0, tasks=mine, done=done))
        try:
            self._work(stage, list(judge.missing()), judge)
            if isinstance(judge.failure, Receipt):
                raise task_error(self._build, judge.failure, judge, is_counted=False)
            while self._help(stage):
                pass
        finally:
            self._observer(StageEnded())

    def _work(self, stage: Stage, tasks: Sequence[AnyTask], judge: Judge) -> None:
        if tasks:
            with self._make_executor(self._build, stage, len(tasks), self._observer) as executor:
                work(self._build, stage, tasks, judge, executor, observer=self._count)

    def _help(self, stage: Stage) -> bool:
        """Run some tasks that no running job is likely to have begun, in an order of its own; False: there are none.

        A job takes its tasks in order, so the first ones that it lacks are under way.
        """
        missing = self._missing(stage)
        running = {index for index, count in running_jobs(self._build.workspace) if count == self._job.count}
        under_way = self._build.options.workers or cpu_count()
        left: list[AnyTask] = []
        for index in range(self._job.count):
            theirs = [task for number, task in missing if number % self._job.count == index]
            left += theirs if index == self._job.index or index not in running else theirs[under_way:]
        start = self._job.index * len(left) // self._job.count
        chosen = [*left[start:], *left[:start]][: 4 * under_way]
        judge = judge_of(self._build, stage, sorted(chosen, key=lambda task: task.key))
        self._work(stage, chosen, judge)
        return bool(chosen)

    def _missing(self, stage: Stage) -> list[tuple[int, AnyTask]]:
        """The tasks of a stage that have no receipt, with their numbers, by a list of the receipts."""
        keys = set(receipt_keys(self._store, stage.name))
        return [(number, task) for number, task in enumerate(stage.tasks) if not self._is_there(stage, task, keys)]

    def _is_there(self, stage: Stage, task: AnyTask, keys: set[Key]) -> bool:
        if not isinstance(task, StreamTask):
            return task.key in keys
        last = max((key for key in keys if key[0] == task.key[0]), default=None)
        if last is None:
            return False
        receipt = next(read_receipts(self._store, stage.name, [last]), None)
        return receipt is not None and (receipt.is_last or receipt.failure is not None or self._is_enough(receipt))

    def _is_enough(self, receipt: Receipt) -> bool:
        """Whether a stream ends early because its job has all documents that are wanted."""
        return receipt.max_documents is not None and receipt.most_documents >= receipt.max_documents

    def _count(self, report: Report) -> None:
        if isinstance(report, Receipt):
            self._done += 1
            self._documents += report.documents
            self._tokens += report.tokens
        self._observer(report)

    def result(self, seconds: float) -> JobResult:
        """What the job did."""
        return JobResult(
            directory=self._build.workspace.out,
            job=self._job,
            tasks_done=self._done,
            documents=self._documents,
            tokens=self._tokens,
            seconds=seconds,
        )


@contextlib.contextmanager
def prepared(sources: list[str], options: BuildOptions) -> Iterator[tuple[Build, list[Planned]] | None]:
    """The build, prepared here or by another job, with its tasks; None if its corpus is complete.

    Only the job that prepares it lists the sources, and jobs whose command is not the same to the letter.
    """
    workspace = open_workspace(options.out, attempt=secrets.token_hex(8))
    check_own(workspace)
    build = _saved(workspace, options)
    if build is not None and is_same_command(build, sources, options):
        with hints(build):
            check_versions(build)
            workspace.run.join()
            yield build, _tasks(build)
        return
    build, tokenizer = resolve(sources, options)
    if build.inputs.read_once:
        raise _read_once(build.inputs.read_once[0])
    with hints(build):
        if finished_corpora(build) is not None:
            yield None
            return
        check_directory(build.workspace, build.outputs)
        build = msgspec.structs.replace(build, is_array=True)
        with lock_to_prepare(build.workspace):
            before = load_request(build.workspace)
            # the work folder of an earlier generation can be left although that generation is complete
            if before is None or not before.is_array or before.generation < build.generation:
                tasks = adopt(build)
                save_tokenizer(build, tokenizer)
            else:
                check_same(before, build, out=build.workspace.out)
                build.workspace.run.join()
                save_request(build)
                tasks = _tasks(build)
        yield build, tasks


def _saved(workspace: Workspace, options: BuildOptions) -> Build | None:
    """The build that another job prepared, as this process runs it."""
    request = load_request(workspace)
    if request is None or load_tasks(workspace) is None:
        return None
    mine = {name: getattr(options, name) for name in ("out", "workers", "executor", "ray_address")}
    options = msgspec.structs.replace(request.options, **mine)
    return placed(msgspec.structs.replace(request, options=options), workspace)


def _tasks(build: Build) -> list[Planned]:
    tasks = load_tasks(build.workspace)
    if tasks is None:
        raise BuildError(
            f"{build.workspace.out} was not prepared to its end",
            hint="run the same command again, or remove the folder",
        )
    return tasks


def _check_job(options: BuildOptions, job: Job) -> None:
    if not 0 <= job.index < job.count:
        raise UsageError(
            f"job {job.index} of {job.count} does not exist",
            hint=f"give --job-index a number from 0 to {job.count - 1}",
        )
    if options.force:
        raise UsageError(
            "--force starts over, and every job of an array would remove what the others have done",
            hint="leave out --job-index and --num-jobs"
            if options.append  # what the others have done is in a folder of the corpus, which has to stay
            else f"remove {options.out} first, and leave out --force",
        )
    if options.executor != LOCAL:
        raise UsageError(
            "--executor ray divides a build among machines by itself",
            hint="leave it out, or leave out --job-index and --num-jobs",
        )


def _read_once(name: str) -> UsageError:
    return UsageError(
        f"{read_once_name(name)} can be read once only, and every job of an array reads its sources",
        hint="write it to a file first, or leave out --job-index and --num-jobs",
    )


@leaving_the_program_alone()
def commit_corpus(out: str | os.PathLike[str]) -> BuildResult:
    """Make the corpus of the tasks that jobs ran: the bytes and the errors are those of a build by one process.

    Runs what only all receipts decide: the task at which a limit falls.

    Raises:
        UsageError: no build has begun in `out`.
        SourceError: the lowest failure of any job.
        BuildError: tasks are missing, or jobs still run; it says which.
    """
    clock = Clock.start()
    workspace = open_workspace(path_option("out", out), attempt=secrets.token_hex(8))
    request = load_request(workspace)
    if request is None:
        return _complete(workspace)
    build = placed(request, workspace)
    with hints(build), lock(workspace):
        if all(names.MANIFEST in present(output.store) for output in build.outputs):
            workspace.remove()  # a commit was killed between its manifest and its last step
            return _complete(workspace)
        check_versions(build)
        workspace.run.take_over()
        try:
            settled = run_stages(build, _tasks(build), lambda stage: settle(build, stage, judged_on_disk(build, stage)))
        except UnfinishedStageError as error:
            raise _incomplete(build, error) from None
        return commit(build, settled, clock)


def _incomplete(build: Build, error: UnfinishedStageError) -> BuildError:
    """What is missing, and the command that runs it."""
    first, count = error.missing[0], len(error.missing)
    verb = {HASH: "hashed", WRITE: "written", DEAL: "dealt"}.get(error.stage.name, "done")
    is_reader = not isinstance(first, StepTask)
    place = f", the first of which reads {build.inputs[first.key[0]].location}" if is_reader else ""
    words = command_words(build.sources, build.options)
    words += ["--job-index", "0", "--num-jobs", "1"] if build.is_array else []
    return BuildError(
        f"{build.workspace.out} is not complete: {count:,} of {len(error.stage.tasks):,} tasks are not {verb}{place}",
        hint=f"any job does what the others left: cd {shlex.quote(build.directory)} && {shlex.join(words)}",
    )


def _complete(workspace: Workspace) -> BuildResult:
    """The result where another process has committed.

    Raises:
        UsageError: there is no corpus.
    """
    for is_split in (False, True):
        outputs = workspace.outputs(is_split=is_split)
        if all(names.MANIFEST in present(output.store) for output in outputs):
            outputs = workspace.outputs(is_split=is_split, generation=newest_generation(outputs))
            corpora = [
                BuiltCorpus(directory=output.store.location, manifest=read_manifest(output.store)) for output in outputs
            ]
            return BuildResult(directory=workspace.out, corpora=tuple(corpora), is_new=False, ignored={}, notes=())
    raise UsageError(
        f"{workspace.out} holds no build that has begun",
        hint="run the jobs first: tokshard build ... --job-index I --num-jobs N",
    )
