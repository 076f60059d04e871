"""Reads documents of other corpora. The shards of all corpora, one after another, are the inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import RESTORE, BuildError, DamagedCorpusError, UsageError
from tokshard.forking import cached_property
from tokshard.format import names
from tokshard.format.arrays import value_array
from tokshard.format.conditions import Conditions
from tokshard.format.corpus import Corpus
from tokshard.format.document_list import ID, DocumentList, read_document_list
from tokshard.format.files import file_sha256
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS, kept_columns
from tokshard.format.manifest import BuildConfig, CopyConfig
from tokshard.format.opening import open_corpus
from tokshard.format.schema import COLUMN_TYPES
from tokshard.format.tables import SourceInfo
from tokshard.format.whole_corpus import checked_batches
from tokshard.pipeline.encode.documents import Documents, Made
from tokshard.store import locate

NOT_COPIED = "not copied"
"""Reason for a record that became a document of the corpora, and not of the copy."""

LISTED = "in drop-ids"
"""Reason for a document that the list of a copy names."""

SLICE_TOKENS = 1 << 20
"""Tokens that are read at once, unless one document is longer."""

_HASH_BYTES = 8


def share_documents(one: Corpus, other: Corpus) -> bool:
    """Whether documents of one corpus are also in another, according to their manifests.

    They are if one holds, as a whole, in a generation or as a copy, what the other holds or took a part of. Two parts
    of a corpus are not compared.
    """
    (ours, our_parts), (theirs, their_parts) = contents(one), contents(other)
    return bool(ours & (theirs | their_parts) or our_parts & theirs)


def contents(corpus: Corpus) -> tuple[set[str], set[str]]:
    """Content fingerprints of the corpora that a corpus holds as a whole, and of those that it holds in part.

    A copy holds the contents of the corpora that it was made from, back to the first ones.
    """
    whole, parts = set[str](), set[str]()
    for manifest, up_to in zip(corpus.manifests, corpus.content_fingerprints, strict=True):
        if not manifest.num_documents:  # as any other of no documents
            continue
        whole |= {manifest.fingerprints.content, up_to}
        copied = manifest.build.copied
        if copied is not None:
            (whole if _is_whole(manifest.build, copied) else parts).update(copied.corpora, copied.holds)
            parts.update(copied.holds_some)
    return whole, parts


def _is_whole(build: BuildConfig, copied: CopyConfig) -> bool:
    """Whether a copy has every document of its corpora, but for those equal to another one."""
    conditions = copied.hash_range, copied.source, copied.drop_ids
    limits = build.min_tokens, build.max_tokens, build.max_documents, build.split
    return not copied.where and not any(value is not None for value in (*conditions, *limits))


class CorporaReader:
    """Reads the documents that a copy takes from corpora. The corpora are opened at the first read.

    Args:
        corpora: location and newest generation of each.
        columns: the requested kept columns, name to type.
        copied: the documents to take.
        drop_ids: the list of documents to leave out, if there is one.
    """

    def __init__(
        self,
        corpora: Sequence[tuple[str, int]],
        columns: Mapping[str, str],
        copied: CopyConfig,
        drop_ids: str | None = None,
    ) -> None:
        self._locations, self._columns, self._copied, self._drop_ids = corpora, columns, copied, drop_ids

    @cached_property
    def _opened(self) -> list[Corpus]:
        return [open_corpus(location, generation=generation) for location, generation in self._locations]

    @cached_property
    def _starts(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The first shard, document and source of each corpus, numbered over all corpora."""
        counts = [(len(corpus.shards), corpus.num_documents, len(corpus.sources())) for corpus in self._opened]
        shards, documents, sources = np.cumsum([(0, 0, 0), *counts], axis=0).T
        return shards, documents, sources

    @cached_property
    def _is_wanted(self) -> Chooser:
        labels = [label for corpus in self._opened for label in source_labels(corpus, corpus.sources())]
        kinds = {name: kind for corpus in self._opened for name, kind in kept_columns(corpus.manifest.columns).items()}
        return Chooser(self._copied, labels, kinds)

    @cached_property
    def _listed(self) -> DocumentList | None:
        if self._drop_ids is None:
            return None
        listed = read_document_list(self._drop_ids, self._opened)
        if file_sha256(*locate(self._drop_ids)) != self._copied.drop_ids:
            raise BuildError(
                f"{self._drop_ids} was changed while its documents were left out",
                hint="put the list back with which the copy began, or start over with --force",
            )
        return listed

    def read(self, index: int) -> Iterator[Made]:
        """The documents of one shard in order, `SLICE_TOKENS` at a time.

        The hashes are checked after the last slice, so treat the data as unverified until the iterator ends.

        Args:
            index: number of the shard over all corpora.

        Raises:
            DamagedCorpusError: the shard is missing, or differs from the manifest or its hashes.
        """
        shards, documents, sources = self._starts
        number = int(np.searchsorted(shards, index, "right")) - 1
        corpus, shard = self._opened[number], index - int(shards[number])
        listed = self._listed
        try:
            info = corpus.shards[shard]
            of_corpus = range(int(sources[number]), int(sources[number + 1]))
            for found in self._documents(corpus, shard, int(documents[number]), of_corpus):
                # so that all of a shard was read when its last document was
                made = self._chosen(found, input_bytes=info.num_bytes * len(found.tokens) // info.num_tokens)
                yield made if listed is None else self._unlisted(made, found, listed, number)
        except OSError as error:  # of its store, or of the temporary directory, where it is copied from a bucket
            raise BuildError(
                f"{corpus.store.where(corpus.shards[shard].name)} cannot be read: {error.strerror or error}",
                hint="check its store and the room in TMPDIR; the same command continues where this one stopped",
            ) from error

    def _documents(self, corpus: Corpus, index: int, first_number: int, of_corpus: range) -> Iterator[Documents]:
        runs = corpus.shards.runs(index)
        first = int(corpus.shards.first_documents[index])
        # the sources of a generation are counted from 0
        base = of_corpus.start + corpus.provenance(first).source - int(runs.source[0])
        if base + int(runs.source.min()) < of_corpus.start or base + int(runs.source.max()) >= of_corpus.stop:
            raise DamagedCorpusError(
                f"{corpus.store.where(names.SHARD_TABLE)}: documents of {corpus.shards[index].name} come from the "
                f"sources {runs.source.min()} to {runs.source.max()}, and the corpus has {len(of_corpus)}",
                hint=RESTORE,
            )
        row = 0
        for shard, batch in checked_batches(corpus, index):
            offsets, tokens = shard.batch(batch)
            columns = shard.columns(batch) if self._columns or self._copied.where or self._drop_ids else {}
            start = 0
            while start < len(offsets) - 1:
                stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + SLICE_TOKENS, "right")) - 1)
                rows = np.arange(row + start, row + stop)
                run = np.searchsorted(runs.document, rows, "right") - 1
                low, high = int(offsets[start]), int(offsets[stop])
                yield Documents(
                    tokens=tokens[low:high],
                    ends=offsets[start + 1 : stop + 1] - low,
                    positions=np.arange(stop - start),
                    columns={name: column.slice(start, stop - start) for name, column in columns.items()},
                    numbers=rows + first_number + first,
                    sources=runs.source[run] + base,
                    records=runs.record[run] + rows - runs.document[run],
                )
                start = stop
            row += len(offsets) - 1

    def _chosen(self, documents: Documents, *, input_bytes: int) -> Made:
        """The documents to take, with the requested columns: nulls if a corpus lacks one."""
        assert documents.sources is not None
        is_wanted = self._is_wanted(documents)
        columns = dict[str, pa.Array]()
        for name, kind in self._columns.items():
            columns[name] = documents.columns.get(name)
            if columns[name] is None:
                columns[name] = _missing(kind, documents, columns)
        return Made(
            count=len(documents),
            input_bytes=input_bytes,
            documents=replace(documents, columns=columns).select(is_wanted),
            left_out={} if is_wanted.all() else {NOT_COPIED: np.flatnonzero(~is_wanted)},
            fields=frozenset(self._columns),
            sources=documents.sources,
        )

    def _unlisted(self, made: Made, found: Documents, listed: DocumentList, number: int) -> Made:
        """The documents to take from a slice. Documents on the list are left out first.

        Args:
            found: all documents of the slice.
            number: number of their corpus.
        """
        assert found.numbers is not None
        is_listed, rows = listed.find(number, found.numbers - self._starts[1][number], found.columns.get(ID))
        positions = np.flatnonzero(is_listed)
        others = {reason: left[~is_listed[left]] for reason, left in made.left_out.items()}
        return replace(
            made,
            documents=made.documents.select(~is_listed[made.documents.positions]),
            left_out={**others, LISTED: positions} if len(positions) else made.left_out,
            listed=rows,
        )


def _missing(kind: str, documents: Documents, before: Mapping[str, pa.Array]) -> pa.Array:
    """Values for a column that a corpus lacks: nulls, loss spans of all tokens but the first, or weights of 1.

    Args:
        before: the columns before it, of the same documents.
    """
    if kind == LOSS_COLUMNS[LOSS]:
        lengths = documents.lengths.tolist()
        return value_array([[1, length] if length > 1 else [] for length in lengths], COLUMN_TYPES[kind])
    if kind == LOSS_COLUMNS[WEIGHTS]:
        return value_array([[1.0] * (len(spans) // 2) for spans in before[LOSS].to_pylist()], COLUMN_TYPES[kind])
    return pa.nulls(len(documents), COLUMN_TYPES[kind])


def source_labels(corpus: Corpus, sources: Sequence[SourceInfo]) -> list[str]:
    """The names of the sources of a corpus: the argument of the build, and the path below it."""
    names = corpus.manifest.arguments
    return [f"{names[one.argument]}/{one.path}" if one.path else names[one.argument] for one in sources]


class Chooser:
    """Decides which documents meet the conditions of a copy.

    Args:
        labels: names of all sources.
        columns: kept columns and their types.

    Raises:
        UsageError: a condition names a missing column, or its value has the wrong type.
    """

    def __init__(self, copied: CopyConfig, labels: Sequence[str], columns: Mapping[str, str]) -> None:
        self._hashes, pattern = copied.hash_range, copied.source
        self._of_source = None if pattern is None else np.array([fnmatchcase(label, pattern) for label in labels])
        if self._of_source is not None and not self._of_source.any():
            raise UsageError(f"no source is called {pattern}", hint=f"a source is called {labels[0]}; use * and ?")
        self._where = Conditions(copied.where, columns)

    def __call__(self, documents: Documents) -> NDArray[np.bool_]:
        """Whether each document is taken: bool [documents]."""
        chosen = np.ones(len(documents), np.bool_)
        if self._of_source is not None:
            assert documents.sources is not None
            chosen &= self._of_source[documents.sources]
        chosen &= self._where.are_met(documents.columns, len(documents))
        if self._hashes is not None:
            low, high = self._hashes
            hashes = document_hashes(documents)
            chosen &= (hashes >= low) & (hashes < high)
        return chosen


def document_hashes(documents: Documents) -> NDArray[np.float64]:
    """The hash of each document, from the little-endian uint32 of its tokens: float64 [documents] in [0, 1)."""
    digests = b"".join(hashlib.blake2b(held, digest_size=_HASH_BYTES).digest() for held in documents.contents())
    return (np.frombuffer(digests, "<u8") >> 11) / float(1 << 53)
