"""A build from start to end. Read this file first.

    resolve   from sources and options to inputs, tokenizer and settings; starts and writes nothing       resolve.py
    adopt     take the directory: begin, continue or refuse; save what was asked for, and plan the tasks   adopt.py
    work      run the tasks that left no receipt: an executor runs them, and they leave receipts           work.py
    settle    judge the receipts in input order: limits, bad records, damage, the first failure           judge.py
    commit    turn the receipts into tables, the report, and last of all the manifest                      commit.py

A build has one stage or several, and each is worked and settled; `stages.py` says which. An import and a copy are
builds with other inputs, and a job of an array works on a share: see `jobs.py`. Every step before the last
leaves only files that the next run of the same command can use or will replace.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Unpack

from tokshard.pipeline.adopt import adopt, finished_corpora
from tokshard.pipeline.commit import BuildResult, commit
from tokshard.pipeline.executors.base import Usage
from tokshard.pipeline.executors.choice import check_executor, executors
from tokshard.pipeline.executors.worker import leaving_the_program_alone
from tokshard.pipeline.options import BuildOptions, OptionalBuildOptions, path_option, takes_build_options
from tokshard.pipeline.progress import Note, Observer, Report
from tokshard.pipeline.request import Build
from tokshard.pipeline.resolve import resolve
from tokshard.pipeline.sources.inputs import DOCUMENTS, TOKENS, read_once_name
from tokshard.pipeline.sources.iterables import as_sources
from tokshard.pipeline.stages import run_stages
from tokshard.pipeline.work import RunsTasks, run_stage
from tokshard.pipeline.workspace.lease import cannot_write, lock
from tokshard.pipeline.workspace.ownership import check_directory
from tokshard.pipeline.workspace.receipts import Receipt

DEFAULT_MAX_ID_BYTES = 1 << 30
"""Bytes of ids of one imported document. A file without delimiters would be one document, which a task has to hold."""


def ignore(report: Report) -> None:
    """An observer that drops every report."""


def run_build(sources: Sequence[Any], options: BuildOptions, observer: Observer) -> BuildResult:
    """Build a corpus, or continue where an earlier run of the same build stopped.

    Raises:
        TokshardError: as `build_corpus`.
    """
    usage = Usage()

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
        run = RunsTasks(make_executor=make_executor, observer=observe, usage=usage)
        tasks = adopt(build, tokenizer)
        settled = run_stages(build, tasks, lambda stage: run_stage(build, stage, run))
        return commit(build, settled, usage)


@contextlib.contextmanager
def hints(build: Build) -> Iterator[None]:
    """Add to an interruption how the build continues, and to a failing disk that it is the output's."""
    once = build.inputs.read_once
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(
            f"{read_once_name(once[0])} can be read once only: {build.start_over}"
            if once
            else "run the same command to continue"
        )
        raise
    except OSError as error:  # an input that cannot be read is a SourceError, so this is the output
        raise cannot_write(build.workspace.out, error) from error


@takes_build_options
@leaving_the_program_alone()
def build_corpus(
    sources: str | os.PathLike[str] | Iterable[Any],
    *,
    tokenizer: str | os.PathLike[str],
    out: str | os.PathLike[str],
    observer: Observer = ignore,
    **keywords: Unpack[OptionalBuildOptions],
) -> BuildResult:
    """Tokenize sources into a corpus, or continue where an earlier run of the same build stopped.

    With several workers the calling module must be importable without side effects
    (``if __name__ == "__main__":``), because worker processes are spawned.

    Args:
        sources: a file, directory or glob, on this machine or as a URI (``s3://``, ``gs://``, ``az://``; ``https://``
            for single files), an ``hf://`` data set of the hub or ``-`` (standard input), or a list of these, in
            order. Also an iterable of records (mappings, or strings as texts), such as a generator, a list of
            dicts or a ``datasets.Dataset``: it is read once and in this process, so a build of it that stops has to
            start over.
        observer: called with the reports of the build while it runs; see `tokshard.pipeline.progress`.
        {options}

    Raises:
        UsageError: an argument is wrong, or `out` belongs to another build.
        SourceError: an input is damaged, gone, or holds a bad record.
        BuildError: the build cannot continue.
        KeyboardInterrupt: the next run of the same build continues.
    """
    return run_build(as_sources(sources), options_of(tokenizer, out, keywords), observer)


@takes_build_options
@leaving_the_program_alone()
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
    Padded and packed rows become their documents where a column says what is padding, or where documents begin.

    Args:
        sources: a file, directory or glob, on this machine or as a URI, or a list of these, in order. Files of
            Megatron-LM may be given by their prefix.
        tokenizer: the one that made the ids. An id outside of its vocabulary is an error.
        observer: as of `build_corpus`.
        {options}

    Raises:
        UsageError: an argument is wrong, or `out` belongs to another build.
        SourceError: an input is damaged, gone, or holds an id outside the vocabulary.
        BuildError: the build cannot continue.
        KeyboardInterrupt: the next run of the same import continues.
    """
    options = options_of(tokenizer, out, {"max_document_bytes": DEFAULT_MAX_ID_BYTES, **keywords, "reads": TOKENS})
    return run_build(as_sources(sources), options, observer)


@takes_build_options
@leaving_the_program_alone()
def copy_corpus(
    corpora: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    observer: Observer = ignore,
    **keywords: Unpack[OptionalBuildOptions],
) -> BuildResult:
    """Write the documents of some corpora, one corpus after another, as one corpus, or continue where a copy stopped.

    All data are checked against the hashes of the corpora. A copy of all documents of one corpus, in order, has its
    content fingerprint, so plans over it have the same order. Each document keeps its source and record. The bytes do
    not depend on workers.

    Each worker takes about 150 MB of memory for any size, with `shuffle` about 250 MB, or 400 MB with short documents.
    A shuffle also takes the space of the documents once or twice, in `out`, until it is done.

    Args:
        corpora: directories or URIs.
        observer: as of `build_corpus`.
        {options}

    Raises:
        UsageError: the corpora do not fit together, or something is at `out`.
        CorpusError: a corpus cannot be read, or is damaged.
        BuildError: the files cannot be written, or no document is taken.
        KeyboardInterrupt: the next run of the same copy continues.
    """
    options = options_of("", out, {**keywords, "reads": DOCUMENTS})
    locations = [corpora] if isinstance(corpora, str | os.PathLike) else list(corpora)
    return run_build([path_option("corpora", location) for location in locations], options, observer)


def options_of(tokenizer: str | os.PathLike[str], out: str | os.PathLike[str], keywords: Any) -> BuildOptions:
    """The options of a call.

    Raises:
        UsageError: one does not exist.
    """
    return BuildOptions(tokenizer=path_option("tokenizer", tokenizer), out=path_option("out", out), **keywords)
