"""A build from start to end. Read this file first.

    resolve   from sources and options to inputs, tokenizer and settings; starts and writes nothing    resolve.py
    prepare   take the directory, save the settings and the tokenizer, plan the tasks                  prepare.py
    run       run the tasks that left no receipt yet: the schedule decides, an executor runs           stages.py
    commit    turn the receipts into tables, the report, and last of all the manifest                  commit.py

Every step before the last leaves only files that the next run of the same command can use or will replace.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Unpack

import msgspec

from tokshard.format.manifest import Manifest
from tokshard.pipeline.commit import assemble, check_shards, publish
from tokshard.pipeline.executors.base import cpu_seconds
from tokshard.pipeline.executors.processes import leaving_the_program_alone
from tokshard.pipeline.kept_fields import check_kept_fields
from tokshard.pipeline.options import BuildOptions, OptionalBuildOptions, path_option, takes_build_options
from tokshard.pipeline.prepare import PreparedBuild, prepare
from tokshard.pipeline.progress import print_note
from tokshard.pipeline.report import build_report
from tokshard.pipeline.resolve import ResolvedBuild, resolve
from tokshard.pipeline.result import BuildResult
from tokshard.pipeline.sources.inputs import read_once_name
from tokshard.pipeline.sources.iterables import as_sources
from tokshard.pipeline.stages import StagesOutcome, run_stages
from tokshard.pipeline.tasks.bad_record_limit import loss_warning
from tokshard.pipeline.tasks.planning import StreamTask, Task
from tokshard.pipeline.workspace.lease import cannot_write, lock
from tokshard.pipeline.workspace.output_directory import (
    BuiltCorpus,
    check_directory,
    check_own,
    finished_corpora,
)
from tokshard.pipeline.workspace.receipts import progress_of


@takes_build_options
@leaving_the_program_alone()
def build_corpus(
    sources: str | os.PathLike[str] | Iterable[Any],
    *,
    tokenizer: str | os.PathLike[str],
    out: str | os.PathLike[str],
    **keywords: Unpack[OptionalBuildOptions],
) -> BuildResult:
    """Tokenize sources into a corpus; go on where an earlier run of the same build stopped.

    With several workers the calling module must be importable without side effects
    (``if __name__ == "__main__":``), because worker processes are spawned.

    Args:
        sources: a file, directory, glob, ``hf://`` data set of the hub or ``-`` (standard input), or a list of such, in
            order. Also an iterable of records (mappings, or strings as texts), such as a generator, a list of dicts or
            a ``datasets.Dataset``: it is read once and in this process, so a build of it that stops has to start over.
        {options}

    Raises:
        UsageError: an argument is wrong, or `out` belongs to another build.
        SourceError: an input is damaged, gone, or holds a bad record.
        BuildError: the build could not go on.
        KeyboardInterrupt: the next run of the same build goes on.
    """
    options = BuildOptions(tokenizer=path_option("tokenizer", tokenizer), out=path_option("out", out), **keywords)
    resolved = resolve(as_sources(sources), options)
    workspace, outputs = resolved.context.workspace, resolved.context.outputs
    check_own(workspace)
    finished = None if options.force else finished_corpora(workspace, outputs, resolved.settings)
    if finished is not None:
        return _nothing_to_do(resolved, finished)
    check_directory(workspace, outputs)
    if not options.quiet:
        for note in resolved.found.notes:
            print_note(note)  # now: later is too late for it
    with lock(workspace) as is_locked, _hints(resolved):
        if not is_locked and not options.quiet:
            print_note(
                f"the file system of {workspace.out} has no locks: start no other build there until this one ends"
            )
        prepared = prepare(resolved)
        return commit(prepared, run(prepared))


def run(prepared: PreparedBuild, tasks: Sequence[Task | StreamTask] | None = None) -> StagesOutcome:
    """Run the tasks that have no receipt yet.

    Args:
        tasks: all of the build, or some of them; default: all.

    Raises:
        SourceError: an input is damaged, gone, or holds a bad record.
        BuildError: a worker died twice on the same task, or the disk takes no more.
    """
    tasks = prepared.tasks if tasks is None else tasks
    return run_stages(prepared.resolved, tasks, num_workers=prepared.num_workers)


def commit(prepared: PreparedBuild, outcome: StagesOutcome) -> BuildResult:
    """Turn the receipts of all tasks into corpora: tables, then a look that every shard is there, then the manifests.

    Raises:
        UsageError: a kept field is in no record.
        BuildError: no document was written, or a shard is gone.
    """
    resolved, receipts = prepared.resolved, outcome.receipts
    outputs = resolved.context.outputs
    check_kept_fields(receipts, resolved.context.spec, resolved.found.inputs)
    manifests = [
        assemble(
            resolved.context.workspace,
            [receipt.key for receipt in receipts],
            number=number,
            output=output,
            config=msgspec.structs.replace(resolved.settings.config, split=output.name or None),
            columns=resolved.context.columns,
            tokenizer=resolved.read.info,
            tokenizer_content=resolved.read.content,
            inputs=resolved.found.inputs,
            arguments=resolved.found.arguments,
            bad_inputs=outcome.bad_inputs,
        )
        for number, output in enumerate(outputs)
    ]
    result = _result(prepared, outcome, manifests)
    report = build_report(resolved, result, outcome.bad_inputs)
    for output in outputs:
        check_shards(output)
    # the corpus for training is last: where it is complete, that for validation is too
    for output, manifest in reversed(list(zip(outputs, manifests, strict=True))):
        publish(output, manifest, report)
    resolved.context.workspace.remove()
    return result


def _result(prepared: PreparedBuild, outcome: StagesOutcome, manifests: Sequence[Manifest]) -> BuildResult:
    resolved, usage = prepared.resolved, outcome.usage
    corpora = zip(resolved.context.outputs, manifests, strict=True)
    num_marks = sum(receipt.num_marks for receipt in outcome.receipts)
    marks = [f"{num_marks:,} byte order mark{'s' if num_marks > 1 else ''} dropped: no part of a text"]
    total = progress_of(outcome.receipts)
    warning = loss_warning(total.bad, total.records, is_end=True)
    return BuildResult(
        directory=resolved.context.workspace.out,
        corpora=tuple(BuiltCorpus(directory=output.directory, manifest=manifest) for output, manifest in corpora),
        is_new=True,
        seconds=time.monotonic() - resolved.started,
        cpu_seconds=cpu_seconds() - prepared.cpu_seconds + usage.cpu_seconds + usage.server_cpu_seconds,
        tokens_encoded=outcome.tokens_encoded,
        bytes_encoded=outcome.bytes_encoded,
        num_workers=prepared.num_workers,
        peak_worker_bytes=usage.peak_worker_bytes,
        ignored=resolved.found.ignored,
        notes=(*resolved.read.notes, *(marks if num_marks else [])),
        warnings=() if warning is None else (warning,),
        normalizer=resolved.read.normalizer,
    )


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
    """Say how a build that is interrupted continues, and that it is the output that cannot be written."""
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
    except OSError as error:  # what is read names its input, so this is the output
        raise cannot_write(resolved.context.workspace.out, error) from error
