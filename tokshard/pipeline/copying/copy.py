"""A corpus made of others, without tokenizing again: a build whose inputs are corpora. Read this file first.

resolve   open the corpora, and check that they go together; writes nothing
prepare   take the directory, as a build does, and save what is asked for
run       run the tasks that left no receipt yet, stage by stage: see `planning`
commit    turn the receipts into tables, and last of all the manifest
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from tokshard.errors import UsageError
from tokshard.format.corpus import Corpus
from tokshard.format.manifest import BuildConfig, CopyConfig, Manifest
from tokshard.format.opening import open_corpus
from tokshard.format.tables import SourceInfo
from tokshard.format.whole_corpus import check_side_files
from tokshard.pipeline.copying.commit import Origin, commit_copy
from tokshard.pipeline.copying.selection import Chooser, Selection, source_labels
from tokshard.pipeline.copying.stages import CopyStages
from tokshard.pipeline.executors.surroundings import leaving_the_program_alone
from tokshard.pipeline.prepare import take_directory
from tokshard.pipeline.resolve import check_outside_corpora, cpu_count
from tokshard.pipeline.sources.inputs import InputTable, InputTableBuilder
from tokshard.pipeline.workspace.lease import cannot_write, lock
from tokshard.pipeline.workspace.output_directory import check_directory, check_own, finished_corpora, roots_at_build
from tokshard.pipeline.workspace.places import REMOVING, open_workspace
from tokshard.pipeline.workspace.settings import Command, Settings, save_command, save_settings
from tokshard.store import real_location

EVERYTHING = Selection()

OnProgress = Callable[[int, int], None]
"""Called with the tokens that are read by now, and with all that will be: a shuffle reads them twice and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """What a copy made.

    Args:
        location: of the new corpus.
        num_documents_before: those of its corpora.
        is_new: it was not complete before.
    """

    location: str
    manifest: Manifest
    num_documents_before: int
    is_new: bool


@leaving_the_program_alone()
def copy_corpus(
    corpora: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    shard_tokens: int | None = None,
    selection: Selection = EVERYTHING,
    with_columns: bool = True,
    shuffle: int | None = None,
    workers: int | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> Copy:
    """Write the documents of some corpora, one corpus after another, as one corpus, or continue where a copy stopped.

    What is read is compared with the hashes of the corpora. A copy of all documents of one corpus, in their order, has
    its content fingerprint, so plans over it have the same order. Each document keeps its source and record. Workers
    change no byte.

    Memory of each worker is some 150 MB, and with `shuffle` some 250 MB, or 400 MB with short documents, whatever the
    size. A shuffle also takes the space of the documents once or twice, in `out`, until it is done.

    With several workers the calling module must be importable without side effects
    (``if __name__ == "__main__":``), because worker processes are spawned.

    Args:
        corpora: directories or URIs.
        out: the new corpus: a new or empty directory or URI, or one that an unfinished copy left.
        shard_tokens: a shard closes before the document that would exceed this; default: as in the first corpus.
        selection: which documents are taken.
        with_columns: take the kept columns, too, which then have to be the same in all corpora.
        shuffle: seed of a random order.
        workers: processes; default: one for each CPU that this process may use.
        force: start over, removing the corpus or unfinished copy in `out`.

    Raises:
        UsageError: the corpora do not go together, something is at `out`, or no document is taken.
        CorpusError: a corpus cannot be read, or is damaged.
        BuildError: the files cannot be written.
        KeyboardInterrupt: the next run of the same copy continues.
    """
    locations = [corpora] if isinstance(corpora, str | os.PathLike) else list(corpora)
    if not locations:
        raise UsageError("no corpus is given", hint="give the directory of a corpus")
    out = os.fspath(out)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(open_corpus(location)) for location in locations]
        _check_apart(out, opened)
        check_outside_corpora(out)
        origin = _origin(opened, selection, shard_tokens=shard_tokens, shuffle=shuffle, with_columns=with_columns)
        # refuses conditions that mean nothing
        labels = [label for corpus in opened for label in source_labels(corpus, corpus.sources())]
        Chooser(selection, labels, origin.columns)
        settings = _settings(origin)
        workspace = open_workspace(out, attempt=secrets.token_hex(8))
        outputs = workspace.outputs(is_split=False)
        check_own(workspace)
        before = sum(corpus.num_documents for corpus in opened)
        finished = None if force else finished_corpora(workspace, outputs, settings)
        if finished is not None:
            return Copy(location=out, manifest=finished[0].manifest, num_documents_before=before, is_new=False)
        check_directory(workspace, outputs)
        for corpus in opened:
            check_side_files(corpus)
        with lock(workspace), _hints(out):
            take_directory(workspace, outputs, settings, is_forced=force)
            save_settings(workspace, settings)
            workspace.store.delete(REMOVING)
            stages = CopyStages(
                workspace, opened, origin, selection, workers=workers or cpu_count(), on_progress=on_progress
            )
            save_command(workspace, _command(opened, out, origin, selection, stages))
            manifest = commit_copy(workspace, outputs[0], origin, stages.run())
            workspace.remove()
    return Copy(location=out, manifest=manifest, num_documents_before=before, is_new=True)


@contextlib.contextmanager
def _hints(out: str) -> Iterator[None]:
    """Add to an interruption how the copy continues, and to a failing disk that it is the output's."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note("run the same command to continue")
        raise
    except OSError as error:
        raise cannot_write(out, error) from error


def _check_apart(out: str, corpora: Sequence[Corpus]) -> None:
    """Refuse a place that is, holds or lies in a corpus that is read: starting over would remove its files.

    Raises:
        UsageError: with the corpus.
    """
    target = real_location(out)
    for corpus in corpora:
        place = real_location(corpus.location)
        if f"{target}/".startswith(f"{place}/"):
            raise UsageError(f"{out} is in {corpus.location}, a corpus that is read", hint="give another --out")
        if place.startswith(f"{target}/"):
            raise UsageError(f"{corpus.location}, a corpus that is read, is in {out}", hint="give another --out")


def _origin(
    corpora: Sequence[Corpus],
    selection: Selection,
    *,
    shard_tokens: int | None,
    shuffle: int | None,
    with_columns: bool,
) -> Origin:
    first = corpora[0]
    _check_distinct(corpora)
    for other in corpora[1:]:
        _check_together(first, other, with_columns=with_columns)
    sources: list[SourceInfo] = []
    arguments: list[str] = []
    roots: list[str] = []
    for corpus in corpora:
        sources += (replace(source, argument=source.argument + len(arguments)) for source in corpus.sources())
        arguments += corpus.manifest.arguments
        roots += (root for store, _ in corpus.generations for root in roots_at_build(store))
    is_whole = selection == EVERYTHING
    return Origin(
        first=first,
        sources=sources,
        arguments=arguments,
        roots=roots if len(roots) == len(arguments) else [],
        columns=first.manifest.columns if with_columns else {},
        build=_build(corpora, selection, shard_tokens=shard_tokens, shuffle=shuffle, with_columns=with_columns),
        # which documents these are is not known
        with_special_text=sum(corpus.manifest.records.with_special_text for corpus in corpora) if is_whole else 0,
    )


def _build(
    corpora: Sequence[Corpus],
    selection: Selection,
    *,
    shard_tokens: int | None,
    shuffle: int | None,
    with_columns: bool,
) -> BuildConfig:
    build = corpora[0].manifest.build
    if not with_columns:
        build = msgspec.structs.replace(build, id_field=None, keep={})
    return msgspec.structs.replace(
        build,
        shard_tokens=shard_tokens or build.shard_tokens,
        validation_fraction=None,  # an append to the copy would look for the other part
        split=None,
        copied=CopyConfig(
            corpora=[corpus.fingerprint for corpus in corpora],
            recipes=[corpus.manifest.fingerprints.recipe for corpus in corpora],
            hashes=selection.hashes,
            where=dict(selection.where),
            source=selection.source,
            min_tokens=selection.min_tokens,
            max_tokens=selection.max_tokens,
            shuffle=shuffle,
        ),
    )


def _settings(origin: Origin) -> Settings:
    """What has to stay the same for the copy to be continued."""
    return Settings(
        config=origin.build,
        tokenizer=origin.first.manifest.tokenizer,
        on_bad_record="fail",
        on_bad_source="fail",
        sources=_inputs(origin),
        arguments=list(origin.arguments),
    )


def _inputs(origin: Origin) -> InputTable:
    builder = InputTableBuilder(origin.arguments)
    for source in origin.sources:
        builder.append(source.argument, source.path, ("", None), source.num_bytes, "")
    return builder.finish()


def _command(corpora: Sequence[Corpus], out: str, origin: Origin, selection: Selection, stages: CopyStages) -> Command:
    """The command that continues the copy."""
    words = ["tokshard", "copy", *(corpus.location for corpus in corpora), "--out", out]
    words += ["--shard-tokens", str(origin.build.shard_tokens)]
    for name in ("min_tokens", "max_tokens", "source"):
        if (value := getattr(selection, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if selection.hashes is not None:
        words += ["--hash", "{}:{}".format(*selection.hashes)]
    for column, value in selection.where.items():
        words += ["--where", f"{column}={value}"]
    if origin.columns != corpora[0].manifest.columns:
        words.append("--no-columns")
    copied = origin.build.copied
    if copied is not None and copied.shuffle is not None:
        words += ["--shuffle", str(copied.shuffle)]
    return Command(
        words=words,
        directory=os.getcwd(),
        num_tasks=stages.num_tasks,
        num_streams=0,
        total_bytes=sum(corpus.manifest.num_bytes for corpus in corpora),
    )


def _check_distinct(corpora: Sequence[Corpus]) -> None:
    """Refuse the same documents twice; in training, weights repeat a corpus.

    Raises:
        UsageError: with the two corpora.
    """
    seen: dict[str, str] = {}
    for corpus in corpora:
        if corpus.fingerprint in seen:
            raise UsageError(
                f"{corpus.location} holds the same documents as {seen[corpus.fingerprint]}",
                hint="give each corpus once; a plan can read one more often, by its weight",
            )
        seen[corpus.fingerprint] = corpus.location


def _check_together(first: Corpus, other: Corpus, *, with_columns: bool) -> None:
    """Refuse corpora that cannot be one.

    Raises:
        UsageError: their tokenizers, delimiters or kept columns differ.
    """
    ours, theirs = first.manifest.tokenizer, other.manifest.tokenizer
    for what, mine, its in (
        ("tokenizer", ours.canonical_sha256[:16], theirs.canonical_sha256[:16]),
        ("EOS", ours.eos, theirs.eos),
        ("BOS", ours.bos, theirs.bos),
    ):
        if mine != its:
            raise UsageError(
                f"{first.location} has the {what} {mine}, {other.location} has {its}",
                hint="only corpora with the same tokenizer and delimiters can become one",
            )
    if with_columns and first.manifest.columns != other.manifest.columns:
        raise UsageError(
            f"{first.location} has the kept columns {first.manifest.columns}, {other.location} has "
            f"{other.manifest.columns}",
            hint="leave the kept columns out with --no-columns",
        )
