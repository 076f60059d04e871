"""A corpus made of others, without tokenizing again: the one function behind ``tokshard copy``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from tokshard.errors import UsageError
from tokshard.format.corpus import Corpus
from tokshard.format.manifest import BuildConfig, CopyConfig, Manifest
from tokshard.format.opening import open_corpus
from tokshard.format.tables import SourceInfo
from tokshard.interop.copy.selection import Chooser, CopiedDocuments, Selection, read_copied, source_labels
from tokshard.interop.copy.shuffling import shuffled
from tokshard.interop.copy.writing import Origin, Tally, is_of_corpus, write_rest, write_shards
from tokshard.interop.export.destination import new_place
from tokshard.interop.export.export import OnProgress
from tokshard.store import present

EVERYTHING = Selection()


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """What a copy made.

    Args:
        location: of the new corpus.
        num_documents_before: those of its corpora.
    """

    location: str
    manifest: Manifest
    num_documents_before: int


def copy_corpus(
    corpora: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    shard_tokens: int | None = None,
    selection: Selection = EVERYTHING,
    with_columns: bool = True,
    shuffle: int | None = None,
    on_progress: OnProgress | None = None,
) -> Copy:
    """Write the documents of some corpora, one corpus after another, as one corpus.

    What is read is compared with the hashes of the corpora. A copy of all documents of one corpus, in their order, has
    its content fingerprint, so plans over it have the same order. Each document keeps its source and record.

    Memory is some 200 MB, and with `shuffle` some 300 MB and a temporary copy of the documents on disk.

    Args:
        corpora: directories or URIs.
        out: a directory that does not exist or is empty, or a URI.
        shard_tokens: a shard closes before the document that would exceed this; default: as in the first corpus.
        selection: which documents are taken.
        with_columns: take the kept columns, too, which then have to be the same in all corpora.
        shuffle: seed of a random order.

    Raises:
        UsageError: the corpora do not go together, something is at `out`, or no document is taken.
        CorpusError: a corpus cannot be read, or is damaged.
        ExportError: the files cannot be written.
    """
    locations = [corpora] if isinstance(corpora, str | os.PathLike) else list(corpora)
    if not locations:
        raise UsageError("no corpus is given", hint="give the directory of a corpus")
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(open_corpus(location)) for location in locations]
        origin = _origin(opened, selection, shard_tokens=shard_tokens, shuffle=shuffle, with_columns=with_columns)
        labels = [label for corpus in opened for label in source_labels(corpus, corpus.sources())]
        chooser = Chooser(selection, labels, origin.columns)
        tally = Tally(len(origin.sources))
        documents = _chosen(opened, chooser, with_columns=bool(origin.columns), on_progress=on_progress)
        if shuffle is not None:
            num_bytes = sum(corpus.manifest.num_bytes for corpus in opened)
            documents = shuffled(documents, seed=shuffle, num_bytes=num_bytes)
        # shards in a bucket are not a corpus without a manifest
        with new_place(os.fspath(out), corpora=[corpus.location for corpus in opened], is_marked=True) as store:
            try:
                shards = write_shards(store, origin, documents, tally)
                if not shards.num_rows:
                    raise UsageError("no document meets the conditions", hint="give others, or leave them out")
                manifest = write_rest(store, origin, shards, tally)
            except BaseException:
                store.delete(*filter(is_of_corpus, present(store)))
                raise
        return Copy(
            location=os.fspath(out),
            manifest=manifest,
            num_documents_before=sum(corpus.num_documents for corpus in opened),
        )


def _chosen(
    corpora: Sequence[Corpus], chooser: Chooser, *, with_columns: bool, on_progress: OnProgress | None
) -> Iterator[CopiedDocuments]:
    """The documents that are taken, in order."""
    done, total = 0, sum(corpus.num_tokens for corpus in corpora)
    first_source = 0
    for corpus in corpora:
        for documents in read_copied(corpus, first_source=first_source, with_columns=with_columns):
            taken = documents.only(chooser(documents))
            if len(taken):
                yield taken
            done += len(documents.tokens)
            if on_progress is not None:
                on_progress(done, total)
        first_source += len(corpus.sources())


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
    for corpus in corpora:
        sources += (replace(source, argument=source.argument + len(arguments)) for source in corpus.sources())
        arguments += corpus.manifest.arguments
    is_whole = selection == EVERYTHING
    return Origin(
        first=first,
        sources=sources,
        arguments=arguments,
        columns=first.manifest.columns if with_columns else {},
        build=_build(corpora, selection, shard_tokens=shard_tokens, shuffle=shuffle),
        # which documents these are is not known
        with_special_text=sum(corpus.manifest.records.with_special_text for corpus in corpora) if is_whole else 0,
    )


def _build(
    corpora: Sequence[Corpus], selection: Selection, *, shard_tokens: int | None, shuffle: int | None
) -> BuildConfig:
    build = corpora[0].manifest.build
    return msgspec.structs.replace(
        build,
        shard_tokens=shard_tokens or build.shard_tokens,
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
