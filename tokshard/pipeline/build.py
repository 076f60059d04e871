"""A build from start to end. Read this file first.

    settle what is asked for          sources.discover, tokenizer.read_tokenizer, tasks.plan_tasks
    take the directory                workspace.lock, check_same_settings
    with --dedup exact, find          a stage of its own: hashing (per task), duplicates (over all)
      the duplicates
    run the tasks that are missing    schedule.Schedule decides, executors run, runner does one task, writing writes it
    put it together                   assembly.assemble, assembly.publish: the manifest goes last

Every step before the last leaves only files that the next run of the same command can use or will replace.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import platform
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from tokshard import __version__
from tokshard.errors import BadRecordError, BuildError, TokshardError, UsageError
from tokshard.format import names
from tokshard.format.manifest import BuildConfig, Manifest
from tokshard.pipeline.commit import assemble, check_shards, publish, report_json, shard_sizes
from tokshard.pipeline.encode.documents import DocumentRules
from tokshard.pipeline.encode.tokenizer import TokenizerFile, read_tokenizer
from tokshard.pipeline.executors import processes as executors
from tokshard.pipeline.failures import (
    BadInputError,
    RejectedRecordError,
    SegmentError,
    TaskError,
    TooManyBadRecordsError,
)
from tokshard.pipeline.kept_fields import check_kept_fields
from tokshard.pipeline.options import (
    DEFAULT_MAX_DOCUMENT_BYTES,
    DEFAULT_SHARD_TOKENS,
    BuildOptions,
    checked_options,
    command_words,
    path_option,
)
from tokshard.pipeline.progress import FileCount, PartitionDisplay, ProgressDisplay, tell
from tokshard.pipeline.sources.discover import (
    Discovery,
    Input,
    Inputs,
    RecordSource,
    discover,
    read_once_name,
    vanished,
)
from tokshard.pipeline.sources.hub import SCHEME
from tokshard.pipeline.sources.iterables import as_sources
from tokshard.pipeline.sources.readers import split_of
from tokshard.pipeline.sources.records import FILE, MISSING_TEXT, TOO_LONG, RecordSpec, check_field_name, parse_columns
from tokshard.pipeline.tasks.bad_record_limit import loss_warning, parse_bad_record_limit
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.duplicates import DropLists, find_duplicates
from tokshard.pipeline.tasks.hashing import hashes_bytes, hashes_path
from tokshard.pipeline.tasks.planning import (
    MIN_TASK_BYTES,
    SMALL,
    Key,
    Split,
    StreamTask,
    Task,
    default_task_bytes,
    plan_tasks,
    round_task_bytes,
)
from tokshard.pipeline.tasks.rejects import read_rejects, rejects_path
from tokshard.pipeline.tasks.runner import TaskRunner
from tokshard.pipeline.tasks.schedule import Cut, Policy, Schedule
from tokshard.pipeline.workspace.lease import cannot_write, lock
from tokshard.pipeline.workspace.output_directory import (
    BuiltCorpus,
    check_directory,
    check_own,
    finished_corpora,
    has_begun,
    is_removing,
    remove_build,
)
from tokshard.pipeline.workspace.places import REMOVING, TOKENIZER, Output, Stage, Workspace, open_workspace
from tokshard.pipeline.workspace.receipts import Progress, Receipt, progress_of, read_receipts, receipt_path
from tokshard.pipeline.workspace.settings import (
    Command,
    Settings,
    check_same_settings,
    load_bad_inputs,
    load_settings,
    save_bad_inputs,
    save_command,
    save_settings,
    source_states,
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BuildResult:
    """What a build did.

    Args:
        directory: what it was given: the corpus, or with a validation split the place of two.
        corpora: what it wrote; with a validation split the corpus for training, and then that for validation.
        is_new: False if it was complete before and nothing was done.
        seconds, cpu_seconds: of this run; 0 if nothing was done.
        tokens_encoded: in this run, without those of runs before it.
        ignored: suffix to count of files in source directories whose format is not known.
        notes: what the user should know, a line each.
        warnings: what should worry the user, a line each.
        normalizer: what changes text before it is encoded, such as ``NFKC``; None if nothing does.
    """

    directory: Path
    corpora: tuple[BuiltCorpus, ...]
    is_new: bool
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tokens_encoded: int = 0
    bytes_encoded: int = 0
    num_workers: int = 0
    peak_worker_bytes: int = 0
    ignored: Mapping[str, int]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    normalizer: str | None = None

    def __repr__(self) -> str:
        return f"<BuildResult {', '.join(map(str, self.corpora))}>"

    @property
    def manifest(self) -> Manifest:
        """Of the corpus; with a validation split, of that for training."""
        return self.corpora[0].manifest


@executors.leaving_the_program_alone()
def build_corpus(
    sources: str | os.PathLike[str] | Iterable[Any],
    *,
    tokenizer: str | os.PathLike[str],
    out: str | os.PathLike[str],
    eos: str | None = None,
    bos: str | None = None,
    text_field: str = "text",
    id_field: str | None = None,
    keep: str | Sequence[str] = (),
    input_format: str | None = None,
    text_mode: str = FILE,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    task_bytes: int | None = None,
    max_document_bytes: int = DEFAULT_MAX_DOCUMENT_BYTES,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    dedup: str = "none",
    validation_fraction: float | None = None,
    on_bad_record: str = "fail",
    on_bad_source: str = "fail",
    max_bad_records: str | int | None = None,
    limit: int | None = None,
    workers: int | None = None,
    force: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> BuildResult:
    """Tokenize sources into a corpus; go on where an earlier run of the same build stopped.

    With several workers the calling module must be importable without side effects
    (``if __name__ == "__main__":``), because worker processes are spawned.

    Args:
        sources: a file, directory, glob, ``hf://`` data set of the hub or ``-`` (standard input), or a list of such, in
            order. Also an iterable of records (mappings, or strings as texts), such as a generator, a list of dicts or
            a ``datasets.Dataset``: it is read once and in this process, so a build of it that stops has to start over.
        tokenizer: a ``tokenizer.json``, a directory that holds one, or a model of the hub.
        out: the corpus directory.
        eos: token that ends every document; default: what ``tokenizer_config.json`` says.
        bos: token that starts every document, or ``auto`` for what ``tokenizer_config.json`` says; default: none.
        text_field: dotted path of the text in a record.
        id_field: field to store as column ``id``.
        keep: fields to store as columns, each ``FIELD`` or ``FIELD:TYPE`` (string, int64, float64, bool).
        input_format: read every input as this format instead of going by its name.
        text_mode: what a document is in plain text: a ``file``, ``line`` or ``paragraph``.
        shard_tokens: a shard closes before the document that would exceed this.
        task_bytes: size of the unit of work in bytes of input; default: by the size of the inputs.
        max_document_bytes: a longer text is a bad record.
        min_tokens, max_tokens: leave out documents with fewer or more tokens, delimiters included.
        dedup: ``exact`` leaves out texts that are equal to an earlier one, over all sources; ``none`` keeps them.
        validation_fraction: share of the documents that goes into ``OUT/validation``, by a hash of the text, the rest
            into ``OUT/train``; default: one corpus in `out`.
        on_bad_record: ``fail``, or ``skip`` to leave out records that are no documents.
        on_bad_source: ``fail``, or ``skip`` to leave out inputs that are damaged or gone, whole.
        max_bad_records: fail when more bad records than that would be skipped: a number, or a share of the records
            read, such as ``0.1%``.
        limit: documents to write at most, in input order; with a validation split, in both corpora.
        workers: processes; default: the CPUs this process may use.
        force: start over, removing the corpus or unfinished build in `out`.
        quiet: no progress on stderr.
        verbose: a line on stderr for each task that is done.

    Raises:
        UsageError: an argument is wrong, or `out` belongs to another build.
        SourceError: an input is damaged, gone, or holds a bad record.
        BuildError: the build could not go on.
        KeyboardInterrupt: the next run of the same build goes on.
    """
    options = BuildOptions(
        tokenizer=path_option("tokenizer", tokenizer),
        out=path_option("out", out),
        eos=eos,
        bos=bos,
        text_field=text_field,
        id_field=id_field,
        keep=(keep,) if isinstance(keep, str) else tuple(keep),
        input_format=input_format,
        text_mode=text_mode,
        shard_tokens=shard_tokens,
        task_bytes=task_bytes,
        max_document_bytes=max_document_bytes,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        dedup=dedup,
        validation_fraction=validation_fraction,
        on_bad_record=on_bad_record,
        on_bad_source=on_bad_source,
        max_bad_records=max_bad_records,
        limit=limit,
        workers=workers,
        force=force,
        quiet=quiet,
        verbose=verbose,
    )
    request = settle(as_sources(sources), options)
    workspace = request.context.workspace
    check_own(workspace)
    finished = None if force else finished_corpora(workspace, request.context.outputs, request.settings)
    if finished is None:
        check_directory(workspace, request.context.outputs)
    else:
        return BuildResult(
            directory=workspace.out,
            corpora=finished,
            is_new=False,
            ignored=request.found.ignored,
            notes=request.read.notes,
            normalizer=request.read.normalizer,
        )
    if not quiet:
        for note in request.found.notes:
            tell(note)  # now: later is too late for it
    once = request.found.inputs.read_once
    with lock(workspace) as is_locked:
        if not is_locked and not quiet:
            tell(f"the file system of {workspace.out} has no locks: start no other build there until this one ends")
        try:
            return _Build(request).run()
        except KeyboardInterrupt as error:
            error.add_note(
                f"{read_once_name(once[0])} can be read once only: start over with --force"
                if once
                else "run the same command to continue"
            )
            raise
        except OSError as error:
            raise cannot_write(workspace.out, error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A build that is settled: its options are in order, its inputs are found, its tokenizer is read.

    Args:
        started: by the monotonic clock.
    """

    arguments: Sequence[str | RecordSource]
    options: BuildOptions
    settings: Settings
    context: WorkerContext
    read: TokenizerFile
    found: Discovery
    num_workers: int
    started: float

    @property
    def total_bytes(self) -> int:
        """Size of all inputs."""
        return self.found.inputs.num_bytes

    def plan(self) -> list[Task | StreamTask]:
        """The tasks. Only inputs that are too big for one need to be looked into."""
        inputs, task_bytes = self.found.inputs, self.context.task_bytes

        def split(index: int) -> Split:
            try:
                return split_of(inputs[index], self.options.text_mode)
            except OSError as error:
                raise vanished(inputs[index], error) from error

        splits = (
            split(index) if size > task_bytes or inputs.is_read_once(index) else SMALL
            for index, size in enumerate(inputs.sizes)
        )
        return list(plan_tasks(inputs.sizes, splits, task_bytes))


def settle(arguments: Sequence[str | RecordSource], options: BuildOptions) -> Request:
    """Check what is asked for, find the inputs and read the tokenizer. Writes nothing.

    Raises:
        UsageError: an argument is wrong.
        SourceError: an input cannot be looked at.
    """
    started = time.monotonic()
    options = checked_options(options)
    if not arguments:
        raise UsageError("no source is given", hint="give files, directories or globs")
    workspace = open_workspace(options.out, attempt=secrets.token_hex(8))
    _check_apart(workspace.out, arguments, options.tokenizer)
    found = discover(arguments, input_format=options.input_format, keep_unreadable=options.on_bad_source == "skip")
    _check_no_output(workspace.out, found.inputs)
    if options.dedup == "exact" and found.inputs.read_once:
        raise UsageError(
            f"--dedup exact reads its sources twice, and {read_once_name(found.inputs.read_once[0])} can be read once "
            "only",
            hint="write it to a file first, or leave out --dedup",
        )
    num_workers = options.workers or _cpu_count()
    total_bytes = found.inputs.num_bytes
    read = read_tokenizer(options.tokenizer, eos=options.eos, bos=options.bos)
    check_field_name(options.text_field)
    try:
        columns = parse_columns(options.id_field, options.keep)
    except ValueError as error:
        raise UsageError(str(error), hint="give --keep FIELD or --keep FIELD:TYPE") from error
    config = BuildConfig(
        text_field=options.text_field,
        id_field=options.id_field,
        keep={path: kind for name, (path, kind) in columns.items() if not (name == "id" and path == options.id_field)},
        input_format=options.input_format,
        text_mode=options.text_mode,
        shard_tokens=options.shard_tokens,
        task_bytes=round_task_bytes(options.task_bytes) if options.task_bytes else default_task_bytes(total_bytes),
        max_document_bytes=options.max_document_bytes,
        limit=options.limit,
        dedup=options.dedup,
        min_tokens=options.min_tokens,
        max_tokens=options.max_tokens,
        validation_fraction=options.validation_fraction,
    )
    settings = Settings(
        config=config,
        tokenizer=read.info,
        on_bad_record=options.on_bad_record,
        on_bad_source=options.on_bad_source,
        sources=source_states(found.inputs),
        arguments=list(found.arguments),
    )
    context = WorkerContext(
        workspace=workspace,
        inputs=found.inputs,
        spec=RecordSpec(
            text_field=options.text_field,
            columns=columns,
            max_document_bytes=options.max_document_bytes,
            text_mode=options.text_mode,
        ),
        columns={name: kind for name, (_, kind) in columns.items()},
        tokenizer=read.info,
        task_bytes=config.task_bytes,
        shard_tokens=options.shard_tokens,
        is_skipping=options.on_bad_record == "skip",
        is_leaving_out=options.on_bad_source == "skip" and options.limit is None,
        outputs=workspace.outputs(is_split=options.validation_fraction is not None),
        rules=DocumentRules(
            min_tokens=options.min_tokens,
            max_tokens=options.max_tokens,
            validation_fraction=options.validation_fraction,
        ),
    )
    return Request(
        arguments=arguments,
        options=options,
        settings=settings,
        context=context,
        read=read,
        found=found,
        num_workers=num_workers,
        started=started,
    )


_REPAIRS = {MISSING_TEXT: "check --text-field", TOO_LONG: "allow longer texts with --max-document-bytes"}


def _notes_on_marks(count: int) -> list[str]:
    if not count:
        return []
    return [f"{count:,} byte order mark{'s' if count > 1 else ''} dropped: no part of a text"]


class _Build:
    """One build whose directory is ours."""

    def __init__(self, request: Request) -> None:
        self._request, self._options = request, request.options
        self._context, self._settings = request.context, request.settings
        self._read, self._found = request.read, request.found
        self._workspace = request.context.workspace
        self._new = Progress(0, 0, 0)
        self._usage = executors.Usage()
        self._max_bad_records = parse_bad_record_limit(request.options.max_bad_records)
        self._bad_inputs: dict[int, str] = {}

    def run(self) -> BuildResult:
        cpu_before = _cpu_seconds()
        if self._request.num_workers > 1 and self._request.total_bytes > MIN_TASK_BYTES:
            executors.prepare_workers()
        self._prepare()
        tasks = self._request.plan()
        save_command(self._workspace, self._command(tasks))
        num_workers = min(self._request.num_workers, max(1, _parallelism(tasks)))
        if self._options.limit is not None and self._found.inputs.read_once:
            num_workers = 1  # several read beyond the limit and then again up to it, which such inputs cannot
        schedule = self._encode(tasks, num_workers)
        receipts = list(schedule.receipts_in_order())
        check_kept_fields(receipts, self._context.spec, self._found.inputs)
        num_marks = sum(receipt.num_marks for receipt in receipts)
        corpora = tuple(
            BuiltCorpus(directory=output.directory, manifest=self._assemble(number, output, schedule.in_order()))
            for number, output in enumerate(self._context.outputs)
        )
        usage = self._usage
        result = BuildResult(
            directory=self._workspace.out,
            corpora=corpora,
            is_new=True,
            seconds=time.monotonic() - self._request.started,
            cpu_seconds=_cpu_seconds() - cpu_before + usage.cpu_seconds + usage.server_cpu_seconds,
            tokens_encoded=self._new.tokens,
            bytes_encoded=self._new.input_bytes,
            num_workers=num_workers,
            peak_worker_bytes=usage.peak_worker_bytes,
            ignored=self._found.ignored,
            notes=(*self._read.notes, *_notes_on_marks(num_marks)),
            warnings=_warnings(schedule),
            normalizer=self._read.normalizer,
        )
        # the corpus for training is last: where it is complete, that for validation is too
        for output in self._context.outputs:
            check_shards(output)
        for output, corpus in reversed(list(zip(self._context.outputs, corpora, strict=True))):
            publish(output, corpus.manifest, self._report(result))
        self._workspace.remove()
        return result

    def _prepare(self) -> None:
        """Settle the directory: start over, continue, or begin."""
        workspace, settings = self._workspace, self._settings
        workspace.take_over()  # from here on nobody else changes what is looked at
        if self._options.force or is_removing(workspace):
            if load_settings(workspace) is None:
                save_settings(workspace, settings)
            remove_build(workspace)
        else:
            if all((output.directory / names.MANIFEST).exists() for output in self._context.outputs):
                raise BuildError(
                    f"{workspace.out} was completed by another build just now", hint="run the command again"
                )
            before = load_settings(workspace)
            # a build that stopped before its first shard binds nobody: often its settings were the mistake
            if before is not None and has_begun(workspace):
                check_same_settings(before, settings, out=workspace.out)
            else:
                workspace.clear()
        save_settings(workspace, settings)
        workspace.store.delete(REMOVING)
        workspace.store.put(TOKENIZER, self._read.clean)
        self._bad_inputs = load_bad_inputs(workspace)

    def _encode(self, tasks: Sequence[Task | StreamTask], num_workers: int) -> Schedule:
        """Run all stages; returns the outcome of the last."""
        while True:
            context = self._context
            if self._options.dedup == "exact":
                context = replace(context, drops=self._find_duplicates(tasks, num_workers))
            known = set(self._bad_inputs)
            schedule = self._run_stage(context, tasks, num_workers, label="")
            # of an input that went bad after it was hashed, texts may have counted as the first of their kind
            if context.drops is None or known == set(self._bad_inputs):
                return schedule

    def _find_duplicates(self, tasks: Sequence[Task | StreamTask], num_workers: int) -> DropLists:
        workspace = self._workspace.hashing
        # all is hashed, whatever the limit: nobody knows yet how many records the documents take
        context = replace(self._context, workspace=workspace)
        schedule = self._run_stage(context, tasks, num_workers, label="hashing")
        on_partition = PartitionDisplay(is_quiet=self._options.quiet)
        return find_duplicates(workspace, schedule.receipts_in_order(), on_partition)

    def _run_stage(
        self, context: WorkerContext, tasks: Sequence[Task | StreamTask], num_workers: int, *, label: str
    ) -> Schedule:
        """Run the tasks of one stage that left no receipt yet.

        Raises:
            TokshardError: the failure that decides, as the user should see it.
        """
        workspace, drops = context.workspace, "" if context.drops is None else context.drops.digest

        done = list(_usable_receipts(context, drops, self._bad_inputs))
        files = FileCount(tasks)
        for receipt in done:
            files.add(receipt)
        display = ProgressDisplay(
            0 if self._found.inputs.read_once else self._request.total_bytes,
            files,
            progress_of(done),
            is_quiet=self._options.quiet,
            is_verbose=self._options.verbose,
            label=label,
        )
        limit = None if workspace.stage is Stage.HASHING else self._options.limit
        schedule = Schedule(tasks, done, limit, self._policy(workspace, display), self._bad_inputs)

        def on_progress(progress: Progress) -> None:
            self._count(progress, is_encoding=workspace.stage is Stage.ENCODING)
            display(progress)

        with display:
            if schedule.goes_on():
                run = (
                    executors.run_inline
                    if num_workers == 1
                    else partial(executors.run_workers, num_workers=num_workers)
                )
                self._usage += run(context, schedule, on_progress)
            cut = schedule.boundary()
            if cut is not None:
                self._cut(context, cut, schedule, on_progress)
        if cut is not None and not schedule.is_over:  # a failure that did not come again: what follows it never ran
            return self._run_stage(context, tasks, num_workers, label=label)
        failure = schedule.error
        if failure is None and self._max_bad_records is not None:
            failure = self._max_bad_records.check(schedule.receipts_in_order())
        if failure is not None:
            raise self._explain(workspace, schedule, *failure)
        return schedule

    def _policy(self, workspace: Workspace, display: ProgressDisplay) -> Policy:
        """What the schedule of a stage does about damage and bad records."""

        def leave_out(damage: BadInputError) -> None:
            source = self._found.inputs[damage.source]
            self._bad_inputs[source.index] = damage.error.problem.removeprefix(f"{source.location} ")
            save_bad_inputs(self._workspace, self._bad_inputs)
            display.say(f"left out: {damage.error.problem}")

        return Policy(
            on_bad_input=leave_out if self._options.on_bad_source == "skip" else None,
            on_discard=partial(_discard, workspace),
            on_receipt=lambda receipt: display.finished(receipt, self._found.inputs[receipt.key[0]].location),
            max_bad_records=self._max_bad_records,
        )

    def _cut(self, context: WorkerContext, cut: Cut, schedule: Schedule, on_progress: executors.OnProgress) -> None:
        """Run the task in which the limit falls once more, for exactly the documents that are wanted."""
        runner = TaskRunner(context, on_progress)
        task = schedule.task(cut.key)
        context.workspace.store.delete(receipt_path(context.workspace, cut.key))
        try:
            if isinstance(task, Task):
                schedule.finished(runner.run_task(task, cut.cap))
            else:
                skipped = schedule.done_segments(task) - {cut.key[1]}
                runner.run_stream(task, cut.cap, skipped, schedule.finished)
        except SegmentError as failure:
            raise self._explain(context.workspace, schedule, cut.key, failure.error) from failure
        except TaskError as error:
            raise self._explain(context.workspace, schedule, cut.key, error) from error

    def _assemble(self, number: int, output: Output, keys: Sequence[Key]) -> Manifest:
        return assemble(
            self._workspace,
            keys,
            number=number,
            output=output,
            config=msgspec.structs.replace(self._settings.config, split=output.name or None),
            columns=self._context.columns,
            tokenizer=self._read.info,
            tokenizer_content=self._read.content,
            inputs=self._found.inputs,
            arguments=self._found.arguments,
            bad_inputs=self._bad_inputs,
        )

    def _command(self, tasks: Sequence[Task | StreamTask]) -> Command:
        return Command(
            words=self._pinned_command(),
            directory=os.getcwd(),
            num_tasks=len(tasks),
            num_streams=sum(isinstance(task, StreamTask) for task in tasks),
            total_bytes=self._request.total_bytes,
        )

    def _pinned_command(self) -> list[str]:
        """The command of this build, in which what is on the hub is named with its commit."""
        arguments = [
            label if isinstance(argument, str) and argument.startswith(SCHEME) else str(argument)
            for argument, label in zip(self._request.arguments, self._found.arguments, strict=True)
        ]
        options = self._options
        if not os.path.exists(options.tokenizer):  # it is on the hub, and its name has the commit
            options = replace(options, tokenizer=SCHEME + self._read.info.name)
        return command_words(arguments, options)

    def _explain(self, workspace: Workspace, schedule: Schedule, key: Key, error: Exception) -> TokshardError:
        """An error of a task as the user should see it."""
        if isinstance(error, RejectedRecordError):
            source = self._found.inputs[error.source]
            repair = _REPAIRS.get(error.reason, "repair the record")
            return BadRecordError(
                f"{self._place(schedule, key, source, error.record)}: {error.reason}: {error.detail}",
                hint=f"{repair}, or leave out such records with --on-bad-record skip",
            )
        if isinstance(error, TooManyBadRecordsError):
            return self._too_many_bad_records(workspace, schedule, key, error)
        if isinstance(error, BadInputError):
            return error.error
        if isinstance(error, TokshardError):
            return self._found.inputs.original(error)
        raise error

    def _place(self, schedule: Schedule, key: Key, source: Input, record: int) -> str:
        """Where a record is, that a task counts from its own start."""
        before = sum(receipt.records_of(source.index) for receipt in schedule.receipts_before(key))
        unit = "line" if source.format == "jsonl" else "record"
        return f"{source.location}, {unit} {before + record + 1}"

    def _too_many_bad_records(
        self, workspace: Workspace, schedule: Schedule, key: Key, error: TooManyBadRecordsError
    ) -> BadRecordError:
        allowed = self._max_bad_records
        assert allowed is not None
        listed = workspace.store.where(workspace.rejects)
        hint = f"they are listed in {listed}; repair the sources, or allow more with --max-bad-records"
        if allowed.count is None:
            share = error.bad / max(1, error.records)
            return BadRecordError(
                f"{error.bad:,} of the first {error.records:,} records are bad ({share:.2%}), "
                f"and --max-bad-records allows {allowed}",
                hint=hint,
            )
        first = next(itertools.islice(read_rejects(workspace, key), allowed.count - error.bad_before, None))
        source = self._found.inputs[first["source"]]
        return BadRecordError(
            f"{self._place(schedule, key, source, first['record'])}: {first['reason']}: {first['detail']}; "
            f"this is bad record {allowed.count + 1:,}, and --max-bad-records allows {allowed}",
            hint=hint,
        )

    def _count(self, progress: Progress, *, is_encoding: bool) -> None:
        new = self._new
        input_bytes = progress.input_bytes if is_encoding else 0
        self._new = Progress(
            new.input_bytes + input_bytes, new.documents + progress.documents, new.tokens + progress.tokens
        )

    def _report(self, result: BuildResult) -> Mapping[str, Any]:
        return report_json(
            self._settings,
            tokshard=__version__,
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            host=platform.node(),
            python=platform.python_version(),
            pyarrow=pa.__version__,
            seconds=round(result.seconds, 3),
            cpu_seconds=round(result.cpu_seconds, 3),
            workers=result.num_workers,
            peak_worker_bytes=result.peak_worker_bytes,
            tokens_encoded=result.tokens_encoded,
            on_bad_record=self._settings.on_bad_record,
            on_bad_source=self._settings.on_bad_source,
            damaged_inputs={
                self._found.inputs[index].location: problem for index, problem in sorted(self._bad_inputs.items())
            },
            ignored_files=dict(self._found.ignored),
            notes=list(result.notes),
        )


def _warnings(schedule: Schedule) -> tuple[str, ...]:
    total = progress_of(schedule.receipts_in_order())
    warning = loss_warning(total.bad, total.records, is_end=True)
    return () if warning is None else (warning,)


def _usable_receipts(context: WorkerContext, drops: str, bad_inputs: Mapping[int, str]) -> Iterator[Receipt]:
    """The receipts of a stage, without their sources.

    Those that left out other duplicates than `drops`, are about an input that was left out since, or promise a file
    that is gone or has another size are discarded: their tasks run again.
    """
    workspace = context.workspace
    sizes = [shard_sizes(output.store) for output in context.outputs]
    for receipt, shards in read_receipts(workspace):
        is_wanted = receipt.drops == drops and bad_inputs.keys().isdisjoint(receipt.inputs)
        if is_wanted and _has_its_files(workspace, receipt, shards, sizes):
            yield receipt.without_sources()
        else:
            _discard(workspace, receipt.key)


def _has_its_files(
    workspace: Workspace, receipt: Receipt, shards: Sequence[pa.RecordBatch], sizes: Sequence[Mapping[str, int]]
) -> bool:
    """Whether shards, rejects and hashes of a task are there and as long as its receipt says."""
    if receipt.num_rejects and not _has_size(workspace, rejects_path(workspace, receipt.key), receipt.rejects_bytes):
        return False
    if workspace.stage is Stage.HASHING:
        return _has_size(workspace, hashes_path(workspace, receipt.key), hashes_bytes(receipt.runs))
    return all(
        found.get(name) == num_bytes
        for rows, found in zip(shards, sizes, strict=True)
        for name, num_bytes in zip(rows.column("name").to_pylist(), rows.column("num_bytes").to_pylist(), strict=True)
    )


def _has_size(workspace: Workspace, name: str, num_bytes: int) -> bool:
    try:
        return workspace.store.stat(name).size == num_bytes
    except OSError:
        return False


def _discard(workspace: Workspace, key: Key) -> None:
    workspace.store.delete(receipt_path(workspace, key))
    workspace.store.delete(rejects_path(workspace, key))


def _check_apart(out: Path, arguments: Sequence[str | RecordSource], tokenizer: str) -> None:
    """Refuse an output directory in which the next run of the command would find inputs, or its tokenizer.

    Raises:
        UsageError: a directory or glob reaches it, or it is the tokenizer's directory.
    """
    target = out.resolve()
    for argument in arguments:
        if not isinstance(argument, str):
            continue
        if os.path.isdir(argument):
            is_reached = target.is_relative_to(Path(argument).resolve())
        else:
            is_reached = not os.path.exists(argument) and glob.has_magic(argument) and _matches_output(argument, target)
        if is_reached:
            raise UsageError(
                f"--out {out} lies inside the source {argument}: the next build would read its files",
                hint="give an --out outside of the sources",
            )
    if os.path.exists(tokenizer):
        place = Path(tokenizer).resolve()
        folder = place if place.is_dir() else place.parent
        if folder in (target, target / names.TRAIN, target / names.VALIDATION):
            raise UsageError(
                f"--out {out} is the directory of the tokenizer {tokenizer}: the build would replace its files",
                hint="give another --out",
            )


def _matches_output(pattern: str, out: Path) -> bool:
    """Whether a glob matches a file that a build writes into a directory, now or later."""
    parts = Path(os.path.abspath(pattern)).parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    parts = (*Path(*parts[:fixed]).resolve().parts, *parts[fixed:])
    files = [*sorted(names.SIDE_FILES), names.shard_name(generation=0, first_input=0, segment=0, part=0)]
    folders = (out, out / names.TRAIN, out / names.VALIDATION)
    return any(_matches(parts, (folder / name).parts) for folder in folders for name in files)


def _matches(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """Whether a glob matches a path, part by part; ``**`` stands for any folders that are not hidden."""
    if not pattern or not path:
        return not path and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _matches(pattern[1:], path) or (not path[0].startswith(".") and _matches(pattern, path[1:]))
    is_match = path[0] == pattern[0] or (
        fnmatch.fnmatchcase(path[0], pattern[0]) and (not path[0].startswith(".") or pattern[0].startswith("."))
    )
    return is_match and _matches(pattern[1:], path[1:])


def _check_no_output(out: Path, inputs: Inputs) -> None:
    """Refuse inputs that lie in the output directory, whatever link leads there.

    Raises:
        UsageError: with the first of them.
    """
    target = os.path.realpath(out)
    if not os.path.isdir(target):
        return
    folders: dict[str, str] = {}  # a link is resolved once, not for each of a million files
    for index in range(len(inputs)):
        if inputs.is_read_once(index):
            continue
        location = inputs[index].location
        folder, name = os.path.split(location)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        place = os.path.join(folders[folder], name)
        if os.path.islink(place):
            place = os.path.realpath(place)
        if place.startswith(target + os.sep):
            raise UsageError(
                f"the source {location} lies in --out {out}, where the build writes",
                hint="give an --out outside of the sources",
            )


def _parallelism(tasks: Sequence[Task | StreamTask]) -> int:
    """How many workers can have something to do."""
    streams = sum(isinstance(task, StreamTask) for task in tasks[:1024])
    return len(tasks) if not streams else len(tasks) + 1024


def _cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system
