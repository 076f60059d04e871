"""Takes an output directory, which is empty, or holds this build in any state, another build, or finished corpora."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from itertools import chain, starmap

import msgspec
import numpy as np

from tokshard.errors import UNDECODABLE, BuildError, ConfigurationChangedError
from tokshard.forking import decodable
from tokshard.format import names
from tokshard.format.manifest import Manifest, manifest_hash, recipe_fingerprint
from tokshard.format.opening import open_corpus
from tokshard.format.tables import SourceInfo
from tokshard.pipeline.progress import BuiltCorpus
from tokshard.pipeline.request import Build, Request, check_same, load_request, placed, save_request
from tokshard.pipeline.sources.division import INDIVISIBLE, Divisibility
from tokshard.pipeline.sources.formats import divisibility_of
from tokshard.pipeline.sources.inputs import InputTable, input_table
from tokshard.pipeline.sources.opening import vanished
from tokshard.pipeline.sources.records import TOO_LONG
from tokshard.pipeline.spool import Spooler
from tokshard.pipeline.tasks.planning import Planned, plan_groups, plan_tasks
from tokshard.pipeline.workspace.lease import lock
from tokshard.pipeline.workspace.ownership import manifest_of, remove_corpora
from tokshard.pipeline.workspace.places import DEAL, HASH, SPOOL, TASKS, TOKENIZER, WRITE, Output, Workspace
from tokshard.pipeline.workspace.receipts import Receipt, readable, receipts_of, save, saved
from tokshard.store import Store, present


def adopt(build: Build, tokenizer: bytes, spooler: Spooler) -> tuple[Build, list[Planned]]:
    """Take the directory, which is locked: start over if forced, continue the same build, or begin.

    Returns the build with all of its inputs in files, and its tasks. The tasks are written last: a job of an array that
    finds them continues at once, without the lock.

    Args:
        tokenizer: the ``tokenizer.json``, for workers and the commit.

    Raises:
        ConfigurationChangedError: it holds an unfinished build with other settings, or of another stream.
        BuildError: another build completed it, or replaced the corpus to which this one appends.
        SourceError: an input cannot be read to plan the tasks.
    """
    workspace = build.workspace
    workspace.run.take_over()  # from here on no other process changes anything here
    if build.generation and previous_of(build.outputs, build.generation) != build.previous:
        raise BuildError(f"{workspace.out} was replaced by another build just now", hint="run the command again")
    before, is_continued = load_request(workspace), False
    if build.options.force:
        if before is None:
            save_request(build)  # if this run is killed here, the next one refuses or continues the build
    elif build.is_complete:
        raise BuildError(f"{workspace.out} was completed by another build just now", hint="run the command again")
    # a build that stopped before its first shard may be continued with other settings: often these were the mistake;
    # the work folder of an earlier generation can be left although that generation is complete
    elif before is not None and before.generation >= build.generation and _has_results(build, before):
        check_same(_with_raised_limit(before, build), build)
        is_continued = before.inputs.spooled.keys() == before.inputs.once.keys()
    if not is_continued:
        workspace.clear(*(() if build.options.force else (SPOOL,)))
    if before is not None or build.options.force:
        remove_corpora(workspace, build.outputs, are_complete=build.options.force, has_begun=before is not None)
    save_request(build)
    workspace.store.put(TOKENIZER, tokenizer)
    build = spooler.spooled(build, is_continued=is_continued)
    if is_continued and (planned := load_tasks(workspace)) is not None:
        return build, planned
    tasks = plan(build)
    save(workspace.store, TASKS, tasks)
    return build, tasks


def previous_of(outputs: Sequence[Output], generation: int) -> list[str]:
    """``manifest_sha256`` of the generation before one, in each corpus."""
    name = names.in_folder(names.generation_folder(generation - 1), names.MANIFEST)
    return [manifest_hash(output.corpus.get(name)) for output in outputs]


def _has_results(build: Build, before: Request) -> bool:
    """Whether an unfinished build left a shard, or the receipt of a finished task."""
    if any(output.shard_sizes() for output in placed(before, build.workspace).outputs):
        return True
    return any(receipt.failure is None for receipt in _receipts(build.workspace.store))


def _receipts(store: Store) -> Iterable[Receipt]:
    return chain.from_iterable(receipts_of(store, stage) for stage in (HASH, DEAL, WRITE))


def _with_raised_limit(before: Request, now: Build) -> Request:
    """The earlier request, with the present limit on the size of documents if no task met the old one."""
    limit = now.config.max_document_bytes
    is_met = limit < before.config.max_document_bytes or any(
        TOO_LONG in source.left_out
        for receipt in _receipts(now.workspace.store)
        for output in receipt.outputs
        for source in output.sources
    )
    if limit == before.config.max_document_bytes or is_met:
        return before
    return msgspec.structs.replace(before, config=msgspec.structs.replace(before.config, max_document_bytes=limit))


def load_tasks(workspace: Workspace) -> list[Planned] | None:
    """The tasks that were planned before; None if there are none.

    Raises:
        BuildError: the file is damaged.
    """
    hint = "delete that file and run the same command again"
    with readable(workspace.store, TASKS, hint=hint), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return saved(workspace.store, TASKS, list[Planned])
    return None


def plan(build: Build) -> list[Planned]:
    """The tasks that read inputs. Opens only inputs that are too big for one task."""
    inputs, config = build.inputs, build.config
    if build.corpora:
        tokens: list[int] = []
        for location, generation in build.corpora:
            with open_corpus(location, generation=generation) as corpus:
                tokens += np.diff(corpus.shards.first_tokens).tolist()
        is_written = config.copied is not None and build.options.shuffle is None
        return list(plan_groups(tokens, config.shard_tokens if is_written else None))

    def divisibility(index: int, size: int) -> Divisibility:
        if size <= config.task_bytes and index not in inputs.once:
            return INDIVISIBLE
        try:
            return divisibility_of(inputs[index], config.text_unit)
        except OSError as error:
            raise vanished(inputs[index], error) from error

    sizes = inputs.sizes
    return list(plan_tasks(sizes, starmap(divisibility, enumerate(sizes)), config.task_bytes))


def finished_corpora(build: Build) -> tuple[BuiltCorpus, ...] | None:
    """The requested corpora, if they are all complete; else None.

    Raises:
        ConfigurationChangedError: the directory holds other corpora, or the sources have changed since.
    """
    workspace, outputs = build.workspace, build.outputs
    if not present(workspace.store):
        return None
    for is_split in (True, False):
        for output in workspace.outputs(is_split=is_split, generation=build.generation):
            if output not in outputs and manifest_of(output) is not None:
                raise ConfigurationChangedError(
                    f"{workspace.out} belongs to another build: {output.store.location} is a corpus "
                    f"{'of a validation split' if is_split else 'without a validation split'}",
                    hint="give the settings of that build, another --out, or --force to start over",
                )
    complete = [output for output in outputs if names.MANIFEST in present(output.store)]
    left = load_request(workspace)
    if len(complete) < len(outputs):
        if complete and left is None:
            missing = next(output for output in outputs if output not in complete)
            raise ConfigurationChangedError(
                f"{workspace.out} belongs to another build: it has {complete[0].store.location}, but not "
                f"{missing.store.location}",
                hint="put that back, give another --out, or --force to start over",
            )
        return None  # a build that was stopped, perhaps between the two
    corpora = tuple(
        BuiltCorpus(directory=output.store.location, manifest=_checked_manifest(build, output)) for output in outputs
    )
    if left is None or left.generation <= build.generation:
        remove_workspace(workspace)
    return corpora


def remove_workspace(workspace: Workspace) -> None:
    """Remove the files of a build that was stopped between its manifest and its last step.

    Its request may be gone already, because that is removed before the rest of the folder.
    """
    if names.WORK in present(workspace.store):
        with contextlib.suppress(BuildError), lock(workspace):  # another process may start over just now
            workspace.remove()


def _checked_manifest(build: Build, output: Output) -> Manifest:
    """The manifest of a complete corpus that the same command wrote."""
    with open_corpus(output.store.location, generation=0) as corpus:
        manifest, sources = corpus.manifest, corpus.sources()
    report = read_report(output.store)
    before = msgspec.structs.replace(
        build,
        config=msgspec.structs.replace(manifest.build, split=None),
        tokenizer=manifest.tokenizer,
        arguments=manifest.arguments,
        inputs=build.inputs if build.corpora else _inputs_at_build(sources, report, build),
        versions={},
    )
    check_same(before, build, is_complete=True)
    inputs = ((one.argument, one.path, one.num_bytes) for one in build.inputs)
    is_same = report.source_times_sha256 in (None, build.inputs.versions_sha256)
    if not build.corpora:
        recipe = recipe_fingerprint(manifest.build, build.tokenizer, inputs)
        is_same = is_same and recipe == manifest.fingerprints.recipe
    if not is_same:
        then, now = report.num_sources or len(sources), len(build.inputs)
        raise ConfigurationChangedError(
            f"{build.workspace.out} was made from other sources, or they changed since: {then:,} then, {now:,} now",
            hint="give another --out, or --force to start over",
        )
    return manifest


class _ReportedSource(msgspec.Struct, frozen=True):
    """An input of a build, as its report lists it."""

    argument: int
    path: str
    version: str


@decodable
class BuildReport(msgspec.Struct, frozen=True):
    """The part of ``build-report.json`` that a later build reads. No hash covers it: all of it may be missing.

    Args:
        roots: the place of each argument.
        sources: the inputs; empty if there were too many to list.
        num_sources, source_times_sha256: the number of inputs and a hash of their versions, instead of the list.
    """

    roots: list[str] = []
    sources: list[_ReportedSource] = []
    num_sources: int | None = None
    source_times_sha256: str | None = None


def _inputs_at_build(sources: Iterable[SourceInfo], report: BuildReport, request: Request) -> InputTable:
    """The inputs that a corpus was made from.

    Places and versions are in no manifest; an input that moved is the same if its size and version are.
    """
    now = request.inputs.absolute()
    versions = {(one.argument, one.path): one.version for one in report.sources}
    rows = (
        (one.argument, one.path, one.num_bytes, one.version, ("", None, ()))
        if one.is_read_once  # its content is not known
        else (
            old.argument,
            old.path,
            old.num_bytes,
            versions.get((old.argument, old.path), one.version),
            ("", None, ()),
        )
        for old, one in zip(sources, now, strict=False)
    )
    return input_table(rows, report.roots if sorted(report.roots) == sorted(now.roots) else now.roots)


def read_report(store: Store) -> BuildReport:
    """The report of the build of a corpus; an empty one if it is gone or is not a report."""
    try:
        return msgspec.json.decode(store.get(names.REPORT), type=BuildReport)
    except (OSError, *UNDECODABLE):
        return BuildReport()
