"""Reads documents of other corpora. The shards of all corpora, one after another, are the inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import RESTORE, BuildError, DamagedCorpusError
from tokshard.forking import cached_property
from tokshard.format import names
from tokshard.format.arrays import value_array
from tokshard.format.corpus import Corpus
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS
from tokshard.format.opening import open_corpus
from tokshard.format.schema import COLUMN_TYPES
from tokshard.format.shared import num_shared
from tokshard.format.tables import SourceInfo
from tokshard.format.view import View
from tokshard.format.whole_corpus import checked_batches
from tokshard.pipeline.encode.documents import ChunkResult, Documents
from tokshard.pipeline.sources.inputs import display_path

NOT_COPIED = "not copied"
"""Reason for a record that became a document of the corpora, and not of the copy."""

IN_EARLIER_SPLIT = "in an earlier split"
"""Reason, in a copy with a split of its own, for a document that the split of its corpora put into the other part."""

SLICE_TOKENS = 1 << 20
"""Tokens that are read at once, unless one document is longer."""


def share_documents(one: Corpus, other: Corpus) -> bool:
    """Whether documents of one corpus are also in another, according to their manifests, or to the tables of two views.

    One must hold a whole corpus, in a generation or as a copy, that the other holds or took a part of. Two parts of a
    corpus are not compared, unless they are views.
    """
    if isinstance(one, View) and isinstance(other, View) and num_shared(one, other):
        return True
    (ours, our_parts), (theirs, their_parts) = contents(one), contents(other)
    return bool(ours & (theirs | their_parts) or our_parts & theirs)


def contents(corpus: Corpus) -> tuple[set[str], set[str]]:
    """Content fingerprints of the corpora that a corpus holds as a whole, and of those that it holds in part.

    A copy holds the contents of the corpora that it was made from, back to the first ones.
    """
    whole, parts = set[str](), set[str]()
    if isinstance(corpus, View):
        held, some = contents(corpus.base)
        return {corpus.fingerprint}, held | some
    for manifest, up_to in zip(corpus.manifests, corpus.content_fingerprints, strict=True):
        if not manifest.num_documents:  # any two without documents are equal
            continue
        whole |= {manifest.fingerprints.content, up_to}
        copied = manifest.build.copied
        if copied is not None:
            is_whole = manifest.build.max_documents is None and manifest.build.split is None
            (whole if is_whole else parts).update(copied.corpora, copied.holds)
            parts.update(copied.holds_some)
    return whole, parts


class CorporaReader:
    """Reads the documents of corpora. The corpora are opened at the first read.

    Args:
        corpora: location and newest generation of each.
        columns: the requested kept columns, name to type.
    """

    def __init__(self, corpora: Sequence[tuple[str, int]], columns: Mapping[str, str]) -> None:
        self._locations, self._columns = corpora, columns

    @cached_property
    def _opened(self) -> list[Corpus]:
        return [open_corpus(location, generation=generation) for location, generation in self._locations]

    @cached_property
    def _starts(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The first shard, document and source of each corpus, numbered over all corpora."""
        counts = [(len(corpus.shards), corpus.num_documents, len(corpus.sources())) for corpus in self._opened]
        shards, documents, sources = np.cumsum([(0, 0, 0), *counts], axis=0).T
        return shards, documents, sources

    def read(self, index: int) -> Iterator[ChunkResult]:
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
        with reading(corpus, shard):
            info = corpus.shards[shard]
            of_corpus = range(int(sources[number]), int(sources[number + 1]))
            for found in self._documents(corpus, shard, int(documents[number]), of_corpus):
                # so that all of a shard was read when its last document was
                yield self._made(found, input_bytes=info.num_bytes * len(found.tokens) // info.num_tokens)

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
            columns = shard.columns(batch) if self._columns else {}
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

    def _made(self, documents: Documents, *, input_bytes: int) -> ChunkResult:
        """The documents with the requested columns: nulls if a corpus lacks one."""
        columns = dict[str, pa.Array]()
        for name, kind in self._columns.items():
            columns[name] = documents.columns.get(name)
            if columns[name] is None:
                columns[name] = _missing(kind, documents, columns)
        return ChunkResult(
            count=len(documents),
            input_bytes=input_bytes,
            documents=replace(documents, columns=columns),
            fields=frozenset(self._columns),
            sources=documents.sources,
        )


@contextlib.contextmanager
def reading(corpus: Corpus, index: int) -> Iterator[None]:
    """Turn errors of the store, or of the temporary directory for copies from a bucket, into a `BuildError`.

    Raises:
        BuildError: the shard cannot be read.
    """
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"{corpus.shard_store.where(corpus.shards[index].name)} cannot be read: {error.strerror or error}",
            hint="check its store and the room in TMPDIR; the same command continues where this one stopped",
        ) from error


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
    return [display_path(corpus.manifest.arguments[one.argument], one.path) for one in sources]
