"""A build from start to end. Read this file first.

    settle what is asked for          sources.discover, tokenizer.read_tokenizer, tasks.plan_tasks
    take the directory                workspace.lock, check_same_settings
    run the tasks that are missing    schedule.Schedule decides, executors run, runner does one task
    put it together                   assembly.assemble, assembly.publish: the manifest goes last

Every step before the last leaves only files that the next run of the same command can use or will replace.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from tokshard import __version__
from tokshard.build import executors
from tokshard.build.assembly import assemble, publish, report_json, times_sha256
from tokshard.build.hub import SCHEME
from tokshard.build.progress import ProgressDisplay, tell
from tokshard.build.readers import split_of
from tokshard.build.receipts import Receipt, read_receipts, receipt_name
from tokshard.build.records import FILE, MISSING_TEXT, TEXT_MODES, RecordSpec, parse_columns
from tokshard.build.runner import Progress, RejectedRecordError, SegmentError, TaskRunner
from tokshard.build.schedule import Cut, Schedule
from tokshard.build.sources import INPUT_FORMATS, STDIN, Discovery, discover
from tokshard.build.tasks import (
    MIN_TASK_BYTES,
    SMALL,
    Key,
    StreamTask,
    Task,
    default_task_bytes,
    plan_tasks,
    round_task_bytes,
)
from tokshard.build.tokenizer import TokenizerFile, read_tokenizer
from tokshard.build.workspace import (
    Settings,
    WorkerContext,
    Workspace,
    cannot_write,
    check_same_settings,
    load_settings,
    lock,
    pack_states,
    save_settings,
    source_states,
)
from tokshard.errors import BadRecordError, BuildError, ConfigurationChangedError, TokshardError, UsageError
from tokshard.format import names
from tokshard.format.manifest import BuildConfig, Manifest, recipe_fingerprint
from tokshard.format.reader import open_corpus
from tokshard.format.storage import atomic_write, local_directory

DEFAULT_SHARD_TOKENS = 256_000_000
DEFAULT_MAX_DOCUMENT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """What a build did.

    Args:
        directory: the corpus.
        is_new: False if it was complete before and nothing was done.
        seconds, cpu_seconds: of this run; 0 if nothing was done.
        tokens_encoded: in this run, without those of runs before it.
        ignored: suffix to count of files in source directories whose format is not known.
        notes: what the user should know, a line each.
    """

    directory: Path
    manifest: Manifest
    is_new: bool
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tokens_encoded: int = 0
    bytes_encoded: int = 0
    num_workers: int = 0
    peak_worker_bytes: int = 0
    ignored: Mapping[str, int]
    notes: tuple[str, ...]


def build_corpus(
    sources: Sequence[str | os.PathLike[str]],
    *,
    tokenizer: str | os.PathLike[str],
    out: str | os.PathLike[str],
    eos: str | None = None,
    bos: str | None = None,
    text_field: str = "text",
    id_field: str | None = None,
    keep: Sequence[str] = (),
    input_format: str | None = None,
    text_mode: str = FILE,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    task_bytes: int | None = None,
    max_document_bytes: int = DEFAULT_MAX_DOCUMENT_BYTES,
    on_bad_record: str = "fail",
    limit: int | None = None,
    workers: int | None = None,
    force: bool = False,
    quiet: bool = False,
) -> BuildResult:
    """Tokenize sources into a corpus; go on where an earlier run of the same build stopped.

    With several workers the calling module must be importable without side effects
    (``if __name__ == "__main__":``), because worker processes are spawned.

    Args:
        sources: files, directories, globs, ``hf://`` data sets of the hub and ``-`` (standard input), in order.
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
        on_bad_record: ``fail`` or ``skip``.
        limit: documents to write at most, in input order.
        workers: processes; default: the CPUs this process may use.
        force: start over, removing the corpus or unfinished build in `out`.
        quiet: no progress on stderr.

    Raises:
        UsageError: an argument is wrong, or `out` belongs to another build.
        SourceError: an input is damaged, gone, or holds a bad record.
        BuildError: the build could not go on.
        KeyboardInterrupt: the next run of the same build goes on.
    """
    started = time.monotonic()
    _check_numbers(
        shard_tokens=shard_tokens,
        task_bytes=task_bytes,
        max_document_bytes=max_document_bytes,
        limit=limit,
        workers=workers,
    )
    _check_choices(on_bad_record, input_format, text_mode)
    arguments = [os.fspath(source) for source in sources]
    if not arguments:
        raise UsageError("no source is given", hint="give files, directories or globs")
    workspace = Workspace(local_directory(out))
    _check_apart(workspace.out, arguments)
    found = discover(arguments, input_format=input_format)
    num_workers = workers or _cpu_count()
    if num_workers > 1 and found.inputs.num_bytes > MIN_TASK_BYTES:
        executors.prepare_workers()
    read = read_tokenizer(os.fspath(tokenizer), eos=eos, bos=bos)
    try:
        columns = parse_columns(id_field, keep)
    except ValueError as error:
        raise UsageError(str(error), hint="give --keep FIELD or --keep FIELD:TYPE") from error
    total_bytes = found.inputs.num_bytes
    config = BuildConfig(
        text_field=text_field,
        id_field=id_field,
        keep={path: kind for name, (path, kind) in columns.items() if not (name == "id" and path == id_field)},
        input_format=input_format,
        text_mode=text_mode,
        shard_tokens=shard_tokens,
        task_bytes=round_task_bytes(task_bytes) if task_bytes else default_task_bytes(total_bytes),
        max_document_bytes=max_document_bytes,
        limit=limit,
    )
    settings = Settings(
        config=config,
        tokenizer=read.info,
        on_bad_record=on_bad_record,
        sources=source_states(found.inputs),
        revisions=_revisions(found.arguments),
    )
    context = WorkerContext(
        workspace=workspace,
        inputs=found.inputs,
        spec=RecordSpec(
            text_field=text_field, columns=columns, max_document_bytes=max_document_bytes, text_mode=text_mode
        ),
        columns={name: kind for name, (_, kind) in columns.items()},
        tokenizer=read.info,
        task_bytes=config.task_bytes,
        shard_tokens=shard_tokens,
        is_skipping=on_bad_record == "skip",
    )
    _check_directory(workspace.out)
    finished = None if force else _finished_corpus(workspace, settings)
    if finished is not None:
        return BuildResult(
            directory=workspace.out, manifest=finished, is_new=False, ignored=found.ignored, notes=read.notes
        )
    if not quiet:
        for note in found.notes:
            tell(note)  # now: later is too late for it
    with lock(workspace):
        try:
            return _Build(context, settings, read, found, started).run(
                num_workers=num_workers, force=force, quiet=quiet
            )
        except OSError as error:
            raise cannot_write(workspace.out, error) from error


class _Build:
    """One build whose directory is ours."""

    def __init__(
        self,
        context: WorkerContext,
        settings: Settings,
        read: TokenizerFile,
        found: Discovery,
        started: float,
    ) -> None:
        self._context, self._settings, self._read, self._found = context, settings, read, found
        self._workspace = context.workspace
        self._started = started
        self._new = Progress(0, 0, 0)

    def run(self, *, num_workers: int, force: bool, quiet: bool) -> BuildResult:
        cpu_before = _cpu_seconds()
        done = self._prepare(force=force)
        tasks = self._plan()
        config = self._settings.config
        schedule = Schedule(tasks, done, config.limit)
        before = Progress(
            sum(receipt.input_bytes for receipt in done),
            sum(receipt.documents for receipt in done),
            sum(receipt.tokens for receipt in done),
        )
        total_bytes = self._found.inputs.num_bytes
        num_workers = min(num_workers, max(1, _parallelism(tasks)))
        if config.limit is not None and STDIN in self._found.inputs.roots:
            num_workers = 1  # several read beyond the limit and then again up to it, which standard input cannot
        with ProgressDisplay(total_bytes, before, is_quiet=quiet) as display:

            def on_progress(progress: Progress) -> None:
                self._count(progress)
                display(progress)

            if schedule.is_over:
                usage = executors.Usage()
            elif num_workers == 1:
                usage = executors.run_inline(self._context, schedule, on_progress)
            else:
                usage = executors.run_workers(self._context, schedule, on_progress, num_workers=num_workers)
            failure, cut = schedule.error, schedule.boundary()
            if cut is not None:
                self._cut(cut, tasks, schedule, on_progress)
            if failure is not None and not schedule.is_limit_reached:
                raise self._explain(schedule, *failure)
        manifest = assemble(
            self._workspace,
            schedule.in_order(),
            config=config,
            columns=self._context.columns,
            tokenizer=self._read.info,
            tokenizer_content=self._read.content,
            inputs=self._found.inputs,
            arguments=self._found.arguments,
        )
        seconds = time.monotonic() - self._started
        cpu_seconds = _cpu_seconds() - cpu_before + usage.cpu_seconds + usage.server_cpu_seconds
        result = BuildResult(
            directory=self._workspace.out,
            manifest=manifest,
            is_new=True,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            tokens_encoded=self._new.tokens,
            bytes_encoded=self._new.input_bytes,
            num_workers=num_workers,
            peak_worker_bytes=usage.peak_worker_bytes,
            ignored=self._found.ignored,
            notes=self._read.notes,
        )
        publish(self._workspace, manifest, self._report(result))
        self._workspace.remove()
        return result

    def _prepare(self, *, force: bool) -> list[Receipt]:
        """Settle the directory: start over, continue, or begin. Returns the receipts of tasks that are done."""
        workspace, settings = self._workspace, self._settings
        if force:
            (workspace.out / names.MANIFEST).unlink(missing_ok=True)  # from here on this is no corpus
            _remove_build(workspace)
        else:
            if (workspace.out / names.MANIFEST).exists():
                raise BuildError(
                    f"{workspace.out} was completed by another build just now", hint="run the command again"
                )
            before = load_settings(workspace)
            # a build that stopped before its first shard binds nobody: often its settings were the mistake
            if before is not None and _has_begun(workspace):
                check_same_settings(before, settings, out=workspace.out)
        workspace.clear_partial()
        save_settings(workspace, settings)
        atomic_write(workspace.tokenizer, self._read.clean)
        return [receipt.without_sources() for receipt in read_receipts(workspace.receipts)]

    def _plan(self) -> list[Task | StreamTask]:
        inputs, config = self._found.inputs, self._settings.config
        # only inputs that are too big for one task need to be looked into
        splits = (
            split_of(inputs[index], config.text_mode) if size > config.task_bytes or inputs.is_stdin(index) else SMALL
            for index, size in enumerate(inputs.sizes)
        )
        return list(plan_tasks(inputs.sizes, splits, config.task_bytes))

    def _cut(
        self, cut: Cut, tasks: Sequence[Task | StreamTask], schedule: Schedule, on_progress: executors.OnProgress
    ) -> None:
        """Run the task in which the limit falls once more, for exactly the documents that are wanted."""
        runner = TaskRunner(self._context, on_progress)
        task = next(task for task in reversed(tasks) if task.key <= cut.key)
        (self._workspace.receipts / f"{receipt_name(cut.key)}.arrow").unlink(missing_ok=True)
        try:
            if isinstance(task, Task):
                schedule.finished(runner.run_task(task, cut.cap))
            else:
                skipped = schedule.done_segments(task) - {cut.key[1]}
                runner.run_stream(task, cut.cap, skipped, schedule.finished)
        except SegmentError as failure:
            raise self._explain(schedule, cut.key, failure.error) from failure
        except RejectedRecordError as error:
            raise self._explain(schedule, cut.key, error) from error

    def _explain(self, schedule: Schedule, key: Key, error: Exception) -> TokshardError:
        """An error of a task as the user should see it."""
        if isinstance(error, RejectedRecordError):
            source = self._found.inputs[error.source]
            before = sum(
                counts.records_read
                for receipt in schedule.receipts_before(key)
                for counts in receipt.sources
                if counts.index == error.source
            )
            unit = "line" if source.format == "jsonl" else "record"
            repair = "check --text-field" if error.reason == MISSING_TEXT else "repair the record"
            return BadRecordError(
                f"{source.location}, {unit} {before + error.record + 1}: {error.reason}: {error.detail}",
                hint=f"{repair}, or leave out such records with --on-bad-record skip",
            )
        if isinstance(error, TokshardError):
            return error
        raise error

    def _count(self, progress: Progress) -> None:
        new = self._new
        self._new = Progress(
            new.input_bytes + progress.input_bytes, new.documents + progress.documents, new.tokens + progress.tokens
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
            ignored_files=dict(self._found.ignored),
            notes=list(result.notes),
        )


def _check_numbers(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise UsageError(
                f"{name} is {number}, expected at least 1", hint=f"give --{name.replace('_', '-')} 1 or more"
            )


def _check_choices(on_bad_record: str, input_format: str | None, text_mode: str) -> None:
    if on_bad_record not in ("fail", "skip"):
        raise UsageError(f"on_bad_record is {on_bad_record!r}", hint="give fail or skip")
    if input_format is not None and input_format not in INPUT_FORMATS:
        raise UsageError(f"input_format is {input_format!r}", hint=f"give one of {', '.join(INPUT_FORMATS)}")
    if text_mode not in TEXT_MODES:
        raise UsageError(f"text_mode is {text_mode!r}", hint=f"give one of {', '.join(TEXT_MODES)}")


def _check_apart(out: Path, arguments: Sequence[str]) -> None:
    target = out.resolve()
    for argument in arguments:
        if os.path.isdir(argument) and target.is_relative_to(Path(argument).resolve()):
            raise UsageError(
                f"--out {out} lies inside the source {argument}: the next build would read its shards",
                hint="give an --out outside of the sources",
            )


def _check_directory(out: Path) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"--out {out} is a file", hint="give a directory")
    foreign = [path.name for path in out.iterdir() if not _is_ours(path.name)]
    if foreign and not (out / names.MANIFEST).exists() and not (out / names.WORK).exists():
        raise UsageError(
            f"--out {out} is not empty and holds no build: {', '.join(sorted(foreign)[:3])}",
            hint="give a new or empty directory",
        )


def _is_ours(name: str) -> bool:
    return name in names.SIDE_FILES or names.is_shard_name(name)


def _has_begun(workspace: Workspace) -> bool:
    """Whether a build left a shard or a receipt."""
    shards = (path for path in workspace.out.iterdir() if names.is_shard_name(path.name))
    return any(workspace.receipts.iterdir()) or any(shards)


def _remove_build(workspace: Workspace) -> None:
    """Remove every file of a corpus or build, the lock excepted, and nothing else."""
    for path in workspace.out.iterdir():
        if path.name != names.WORK and _is_ours(path.name):
            path.unlink()
    for folder in (workspace.receipts, workspace.rejects, workspace.partial):
        for path in folder.iterdir():
            path.unlink()
    workspace.settings.unlink(missing_ok=True)


def _finished_corpus(workspace: Workspace, settings: Settings) -> Manifest | None:
    """The manifest, if the directory holds the corpus that is asked for.

    Raises:
        ConfigurationChangedError: it holds another corpus, or the sources have changed since.
    """
    if not (workspace.out / names.MANIFEST).exists():
        return None
    with open_corpus(workspace.out) as corpus:
        manifest, sources = corpus.manifest, corpus.sources()
    times = _times_at_build(workspace.out, settings)
    before = Settings(
        config=manifest.build,
        tokenizer=manifest.tokenizer,
        on_bad_record="fail",
        # places and times are in no manifest; a source that moved is the same if its size and time are
        sources=pack_states(
            settings.sources.roots,
            (
                (old.argument, old.path, old.num_bytes, times.get((old.argument, old.path), now.mtime_ns))
                for old, now in zip(sources, settings.sources, strict=False)
            ),
        ),
        revisions=_revisions(manifest.arguments),
    )
    check_same_settings(before, settings, out=workspace.out)
    fingerprint = recipe_fingerprint(
        settings.config,
        settings.tokenizer,
        ((source.argument, source.path, source.num_bytes) for source in settings.sources),
    )
    if fingerprint != manifest.fingerprints.recipe:
        raise ConfigurationChangedError(
            f"{workspace.out} was built from other sources: {len(sources)} then, {len(settings.sources)} now",
            hint="give another --out, or --force to start over",
        )
    workspace.remove()  # a build that was stopped between its manifest and its last step
    return manifest


def _times_at_build(out: Path, settings: Settings) -> dict[tuple[int, str], int]:
    """Modification time of each source when it was read, from the build report; empty if that is gone.

    Raises:
        ConfigurationChangedError: there are too many sources for a list, and some have another time now.
    """
    try:
        report = json.loads((out / names.REPORT).read_bytes())
        times = {(source["argument"], source["path"]): source["mtime_ns"] for source in report["sources"]}
        expected = report.get("source_times_sha256")
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if expected is not None and expected != times_sha256(settings.sources):
        raise ConfigurationChangedError(
            f"{out} was built from {len(settings.sources):,} sources, some of which were modified since",
            hint="give another --out, or --force to start over",
        )
    return times


def _revisions(arguments: Iterable[str]) -> list[str]:
    """The labels of sources on the hub, which name a commit."""
    return [label for label in arguments if label.startswith(SCHEME)]


def _parallelism(tasks: Sequence[Task | StreamTask]) -> int:
    """How many workers can have something to do."""
    streams = sum(isinstance(task, StreamTask) for task in tasks[:1024])
    return len(tasks) if not streams else len(tasks) + 1024


def _cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system
