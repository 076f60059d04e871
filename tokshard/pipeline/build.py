"""A build from start to end. Read this file first.

    resolve   from sources and options to inputs, tokenizer and settings; starts and writes nothing    resolve.py
    prepare   take the directory, save the settings and the tokenizer, plan the tasks                  prepare.py
    run       run the tasks that left no receipt yet: the schedule decides, an executor runs           run.py
    commit    turn the receipts into tables, the report, and last of all the manifest                  commit.py

Every step before the last leaves only files that the next run of the same command can use or will replace.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any, Unpack

from tokshard.pipeline.commit import commit
from tokshard.pipeline.executors.choice import check_executor
from tokshard.pipeline.executors.surroundings import leaving_the_program_alone
from tokshard.pipeline.options import BuildOptions, OptionalBuildOptions, path_option, takes_build_options
from tokshard.pipeline.prepare import prepare
from tokshard.pipeline.progress import Note, Observer, ignore
from tokshard.pipeline.resolve import ResolvedBuild, resolve
from tokshard.pipeline.result import BuildResult
from tokshard.pipeline.run import run
from tokshard.pipeline.sources.inputs import read_once_name
from tokshard.pipeline.sources.iterables import as_sources
from tokshard.pipeline.workspace.lease import cannot_write, lock
from tokshard.pipeline.workspace.output_directory import (
    BuiltCorpus,
    check_directory,
    check_own,
    finished_corpora,
)


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
        observer: called with what the build reports while it runs; see `tokshard.pipeline.progress`.
        {options}

    Raises:
        UsageError: an argument is wrong, or `out` belongs to another build.
        SourceError: an input is damaged, gone, or holds a bad record.
        BuildError: the build cannot continue.
        KeyboardInterrupt: the next run of the same build continues.
    """
    options = BuildOptions(tokenizer=path_option("tokenizer", tokenizer), out=path_option("out", out), **keywords)
    check_executor(options)
    resolved = resolve(as_sources(sources), options)
    workspace, outputs = resolved.context.workspace, resolved.context.outputs
    check_own(workspace)
    finished = None if options.force else finished_corpora(workspace, outputs, resolved.settings)
    if finished is not None:
        return _nothing_to_do(resolved, finished)
    check_directory(workspace, outputs)
    for note in resolved.found.notes:
        observer(Note(note))
    with lock(workspace) as is_locked, _hints(resolved):
        if not is_locked:
            observer(
                Note(f"the file system of {workspace.out} has no locks: start no other build there until this one ends")
            )
        prepared = prepare(resolved)
        return commit(prepared, run(prepared, observer=observer))


def _nothing_to_do(resolved: ResolvedBuild, corpora: tuple[BuiltCorpus, ...]) -> BuildResult:
    return BuildResult(
        directory=resolved.context.workspace.out,
        corpora=corpora,
        is_new=False,
        ignored=resolved.found.ignored,
        notes=resolved.read.notes,
        normalizer=resolved.read.normalizer,
    )


@contextlib.contextmanager
def _hints(resolved: ResolvedBuild) -> Iterator[None]:
    """Add to an interruption how the build continues, and to a failing disk that it is the output's."""
    once = resolved.found.inputs.read_once
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(
            f"{read_once_name(once[0])} can be read once only: start over with --force"
            if once
            else "run the same command to continue"
        )
        raise
    except OSError as error:  # an input that cannot be read is a SourceError, so this is the output
        raise cannot_write(resolved.context.workspace.out, error) from error
