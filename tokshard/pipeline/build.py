"""A build from start to end. Read this file first.

    resolve   from sources and options to inputs, tokenizer and settings; starts and writes nothing       resolve.py
    adopt     take the directory: begin, continue or refuse; save the request, and plan the tasks          adopt.py
    work      run the tasks that left no receipt: an executor runs them, and they leave receipts           work.py
    settle    judge the receipts in input order: limits, bad records, damage, the first failure           judge.py
    commit    turn the receipts into tables, the report, and last of all the manifest                      commit.py

A build has one stage or several, and each is worked and settled; `stages.py` says which. An import and a copy are
builds with other inputs, and a job of an array works on a share: see `jobs.py`. Every step before the last
leaves only files that the next run of the same command can use or will replace.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Unpack

from tokshard.errors import CutSourceError, UsageError
from tokshard.forking import cpu_count
from tokshard.pipeline.adopt import adopt, finished_corpora
from tokshard.pipeline.commit import commit
from tokshard.pipeline.executors.base import Executor, InlineExecutor, MakeExecutor, OnProgress, RunUsage
from tokshard.pipeline.executors.processes import ProcessExecutor
from tokshard.pipeline.executors.worker import prepare_workers, restoring_environment
from tokshard.pipeline.options import (
    DOCUMENTS,
    TEXT,
    TOKENS,
    VIEW,
    BuildOptions,
    OptionalBuildOptions,
    options_of,
    path_option,
    takes_build_options,
)
from tokshard.pipeline.progress import BuildResult, Note, Observer, Report
from tokshard.pipeline.request import Build
from tokshard.pipeline.resolve import resolve
from tokshard.pipeline.sources.iterables import as_sources
from tokshard.pipeline.spool import Spooler
from tokshard.pipeline.stages import run_stages
from tokshard.pipeline.tasks.planning import StreamTask
from tokshard.pipeline.tasks.running import Stage
from tokshard.pipeline.work import BuildRun, run_stage
from tokshard.pipeline.workspace.lease import cannot_write, lock
from tokshard.pipeline.workspace.ownership import check_directory
from tokshard.pipeline.workspace.receipts import Receipt

DEFAULT_MAX_ID_BYTES = 1 << 30
"""The most bytes of ids of an imported document. A file without delimiters would be one, which a task has to hold."""


def ignore(report: Report) -> None:
    """An observer that drops every report."""


def run_build(sources: Sequence[Any], options: BuildOptions, observer: Observer) -> BuildResult:
    """Build a corpus, or continue where an earlier run of the same build stopped.

    Raises:
        TokshardError: as `build_corpus`.
    """
    usage = RunUsage()

    def observe(report: Report) -> None:
        if isinstance(report, Receipt):  # a shuffle makes progress with each token twice
            usage.tokens += report.tokens
        observer(report)

    check_executor(options)
    build, tokenizer = resolve(sources, options)
    with hints(build):
        finished = None if build.options.force else finished_corpora(build)
        if finished is not None:
            return BuildResult(
                directory=build.workspace.out,
                corpora=finished,
                is_new=False,
                ignored=build.ignored,
                notes=build.notes,
                normalizer=build.normalizer,
            )
        check_directory(build.workspace, build.outputs)
    for note in build.notes:
        observer(Note(note))
    with lock(build.workspace) as is_locked, hints(build), executors(options, observer) as make_executor:
        if not is_locked:
            out = build.workspace.out
            observer(Note(f"the file system of {out} has no locks: start no other build there until this one ends"))
        run = BuildRun(make_executor=make_executor, observer=observe, usage=usage.workers)
        spooler = Spooler(sources, observer)
        build, tasks = adopt(build, tokenizer, spooler)
        while True:
            try:
                settled = run_stages(build, tasks, functools.partial(run_stage, build, run=run))
            except CutSourceError:
                build = spooler.with_more(build)
            else:
                return commit(build, settled, usage)


@contextlib.contextmanager
def hints(build: Build) -> Iterator[None]:
    """Add to an interruption how the build continues, and name the output in the error of its disk."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note("run the same command to continue")
        raise
    except OSError as error:  # an input that cannot be read is a SourceError, so this is the output
        raise cannot_write(build.workspace.out, error) from error


@contextlib.contextmanager
def executors(options: BuildOptions, observer: Observer) -> Iterator[MakeExecutor]:
    """A factory for the executor of each stage, connected to a Ray cluster if Ray runs the tasks.

    Raises:
        UsageError: Ray cannot be reached.
    """
    if options.ray is None:
        yield _local
        return
    from tokshard.pipeline.executors.ray import RayExecutor
    from tokshard.pipeline.executors.ray_cluster import connected

    with connected(options.ray, num_workers=options.workers, observer=observer):
        yield lambda build, stage, _, on_progress: RayExecutor(build, stage, on_progress, most_tasks=options.workers)


def _local(build: Build, stage: Stage, num_tasks: int, on_progress: OnProgress) -> Executor:
    num_workers = build.options.workers or cpu_count()
    has_streams = any(isinstance(task, StreamTask) for task in stage.tasks)
    num_workers = num_workers if has_streams else min(num_workers, num_tasks)
    is_daemon = multiprocessing.current_process().daemon
    if num_workers == 1 or (is_daemon and build.options.workers is None):
        return InlineExecutor(build, stage, on_progress)
    if is_daemon:
        raise UsageError(
            f"workers is {build.options.workers}, and this is a daemonic process, which may start no others",
            hint="give workers=1; or start this process with daemon=False, or by concurrent.futures instead of a Pool",
        )
    prepare_workers()
    return ProcessExecutor(build, stage, on_progress, num_workers=num_workers)


def check_executor(options: BuildOptions) -> None:
    """Refuse an executor whose package is missing.

    Raises:
        UsageError: Ray is requested, but not installed.
    """
    if options.ray is None:
        return
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--ray needs the package ray: {error}", hint="pip install 'tokshard[ray]'") from error


@takes_build_options(TEXT)
@restoring_environment()
def build_corpus(
    sources: str | os.PathLike[str] | Iterable[Any],
    *,
    tokenizer: str | os.PathLike[str],
    out: str | os.PathLike[str],
    observer: Observer = ignore,
    **keywords: Unpack[OptionalBuildOptions],
) -> BuildResult:
    """Tokenize sources into a corpus, or continue where an earlier run of the same build stopped.

    Args:
        sources: a file, directory or glob, on this machine or as a URI (``s3://``, ``gs://``, ``az://``; ``https://``
            for single files); an ``hf://`` data set of the hub; ``-`` for standard input; or a list of these, in
            order. Also an iterable of records (mappings, or strings as texts), such as a generator, a list of
            dicts or a ``datasets.Dataset``. Standard input and iterables are first copied into `out`, compressed to
            about a fifth to a third, and the copy is removed when the build is done. A build that stopped during this
            copy needs them again from their start, which a used iterator lacks; one that stopped later does not.
        observer: called with the reports of the build while it runs; see `tokshard.pipeline.progress`.
        {options}

    Raises:
        UsageError: an argument is wrong, or `out` belongs to another build.
        SourceError: an input is damaged, gone, or holds a bad record.
        BuildError: the build cannot continue.
        KeyboardInterrupt: the next run of the same build continues.
    """
    return run_build(as_sources(sources), options_of(tokenizer, out, keywords), observer)


@takes_build_options(TOKENS)
@restoring_environment()
def import_corpus(
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    tokenizer: str | os.PathLike[str],
    out: str | os.PathLike[str],
    observer: Observer = ignore,
    **keywords: Unpack[OptionalBuildOptions],
) -> BuildResult:
    """Make a corpus of documents that another tool has tokenized, or continue where an earlier run stopped.

    Boundaries, order and ids are kept. Every document ends in one EOS: a missing one is added, and a delimiter that
    follows another one is left out and counted. A delimiter inside a document ends a document there.
    Padded and packed rows are split into their documents if a column marks the padding or the starts of documents.

    Args:
        sources: a file, directory or glob, on this machine or as a URI, or a list of these, in order. Files of
            Megatron-LM may be given by their prefix.
        tokenizer: the one that made the ids. An id outside of its vocabulary is an error.
        observer: as for `build_corpus`.
        {options}

    Raises:
        UsageError: an argument is wrong, or `out` belongs to another build.
        SourceError: an input is damaged, gone, or holds an id outside the vocabulary.
        BuildError: the build cannot continue.
        KeyboardInterrupt: the next run of the same import continues.
    """
    options = options_of(tokenizer, out, {"max_document_bytes": DEFAULT_MAX_ID_BYTES, **keywords, "reads": TOKENS})
    return run_build(as_sources(sources), options, observer)


@takes_build_options(DOCUMENTS)
@restoring_environment()
def copy_corpus(
    corpora: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    observer: Observer = ignore,
    **keywords: Unpack[OptionalBuildOptions],
) -> BuildResult:
    """Copy the documents of corpora, one after another, into one corpus, or continue where an earlier run stopped.

    All data are checked against the hashes of the corpora. A copy of all documents of one corpus, in order, has the
    same content fingerprint, so plans over it have the same order. Each document keeps its source and record. The bytes
    do not depend on workers.

    For any size, each worker takes about 150 MB of memory, with `shuffle` about 250 MB, or 400 MB with short documents.
    Until it is done, a shuffle also takes the space of the documents once or twice, in `out`.

    Args:
        corpora: directories or URIs.
        observer: as for `build_corpus`.
        {options}

    Raises:
        UsageError: the corpora do not fit together, or something is at `out`.
        CorpusError: a corpus cannot be read, or is damaged.
        BuildError: the files cannot be written, or no document is taken.
        KeyboardInterrupt: the next run of the same copy continues.
    """
    options = options_of("", out, {**keywords, "reads": DOCUMENTS})
    locations = list(corpora) if isinstance(corpora, list | tuple | Iterator) else [corpora]
    return run_build([path_option("corpora", location) for location in locations], options, observer)


@takes_build_options(VIEW)
@restoring_environment()
def select_corpus(
    corpus: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    observer: Observer = ignore,
    **keywords: Unpack[OptionalBuildOptions],
) -> BuildResult:
    """Make a view: a corpus of some documents of another, without shards of its own. Continues an unfinished run.

    A document is taken if all conditions hold. Columns and bounds are read, but tokens only for `hash_range`; so verify
    the corpus first. The base has to stay: the view records its path and content fingerprint. A view of a view refers
    to the first base. The bytes do not depend on workers.

    The content fingerprint of a view is made of its documents and the fingerprint of its base. A copy of the view has a
    fingerprint of its tokens, so a plan over the copy reads the same documents in another order.

    Args:
        corpus: directory or URI of a corpus or a view.
        observer: as for `build_corpus`.
        {options}

    Raises:
        UsageError: a condition does not fit the corpus, or something is at `out`.
        CorpusError: the corpus cannot be read, or is damaged.
        BuildError: the files cannot be written, or no document is selected.
        KeyboardInterrupt: the next run of the same call continues.
    """
    options = options_of("", out, {**keywords, "reads": VIEW})
    return run_build([path_option("corpus", corpus)], options, observer)
