"""Writing the corpus that a copy makes: shards, tables, and last of all the manifest."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format import names
from tokshard.format.arrays import table_batch
from tokshard.format.content import TokenHash, join_hashes
from tokshard.format.corpus import Corpus
from tokshard.format.files import HashingFile
from tokshard.format.manifest import (
    BuildConfig,
    DocumentLengths,
    FileFacts,
    Fingerprints,
    Manifest,
    Records,
    content_fingerprint,
    encode_manifest,
    recipe_fingerprint,
)
from tokshard.format.schema import ShardFacts
from tokshard.format.stride_hashes import stride_hash_bytes
from tokshard.format.tables import (
    SHARD_TABLE_SCHEMA,
    SHARDS_PER_BATCH,
    SOURCE_TABLE_SCHEMA,
    SourceInfo,
    shard_rows,
    write_table,
)
from tokshard.format.writer import ShardWriter
from tokshard.interop.copy.selection import CopiedDocuments
from tokshard.store import Store, written

NOT_COPIED = "not copied"
"""Reason for a record that became a document of the corpora, and not of the copy."""

_SOURCES_PER_BATCH = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a copy takes over from its corpora.

    Args:
        sources, arguments: of all of them together.
        columns: kept columns of the copy.
    """

    first: Corpus
    sources: Sequence[SourceInfo]
    arguments: Sequence[str]
    columns: Mapping[str, str]
    build: BuildConfig
    with_special_text: int


class Tally:
    """Counts of the documents of a copy."""

    def __init__(self, num_sources: int) -> None:
        self.documents = np.zeros(num_sources, np.int64)
        self.tokens = np.zeros(num_sources, np.int64)
        self._counts = np.zeros(64, np.int64)
        self._shortest, self._longest = np.iinfo(np.int64).max, 0

    def add(self, documents: CopiedDocuments) -> None:
        """Count some more documents, at least one."""
        lengths = np.diff(documents.ends, prepend=0)
        self._shortest = min(self._shortest, int(lengths.min()))
        self._longest = max(self._longest, int(lengths.max()))
        self._counts += np.bincount(np.frexp(lengths)[1] - 1, minlength=64)
        self.documents += np.bincount(documents.sources, minlength=len(self.documents))
        np.add.at(self.tokens, documents.sources, lengths)

    def lengths(self) -> DocumentLengths:
        """For the manifest."""
        counts = np.trim_zeros(self._counts, "b").tolist()
        return DocumentLengths(shortest=self._shortest, longest=self._longest, counts=counts)


def write_shards(store: Store, origin: Origin, documents: Iterable[CopiedDocuments], tally: Tally) -> pa.RecordBatch:
    """Write shards; the rows of `WRITTEN_SHARD_SCHEMA`."""
    tokenizer = origin.first.manifest.tokenizer
    facts = ShardFacts(
        dtype=origin.first.dtype.name,
        tokenizer_sha256=tokenizer.canonical_sha256,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id,
        columns=origin.columns,
    )
    with ShardWriter(
        store=store,
        name=lambda part: names.shard_name(generation=0, first_input=0, segment=0, part=part),
        facts=facts,
        shard_tokens=origin.build.shard_tokens,
    ) as writer:
        for batch in documents:
            tally.add(batch)
            for start, stop in _of_one_source(batch.sources):
                low = int(batch.ends[start - 1]) if start else 0
                writer.extend(
                    batch.tokens[low : int(batch.ends[stop - 1])],
                    batch.ends[start:stop] - low,
                    source=int(batch.sources[start]),
                    records=batch.records[start:stop],
                    columns={
                        name: column.slice(start, stop - start).to_pylist() for name, column in batch.columns.items()
                    },
                )
        return writer.finish()


def _of_one_source(sources: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    starts = [0, *(np.flatnonzero(np.diff(sources)) + 1).tolist(), len(sources)]
    return ((start, stop) for start, stop in itertools.pairwise(starts))


def write_rest(store: Store, origin: Origin, shards: pa.RecordBatch, tally: Tally) -> Manifest:
    """Write the tables and the tokenizer, and the manifest, which makes the corpus complete."""
    files: dict[str, FileFacts] = {}
    sources = [_copied(source, tally, index) for index, source in enumerate(origin.sources)]
    rows = shard_rows(shards)
    with _side_file(store, names.SHARD_TABLE, files) as file:
        write_table(file, SHARD_TABLE_SCHEMA, [rows], rows_per_batch=SHARDS_PER_BATCH)
    with _side_file(store, names.STRIDE_HASHES, files) as file:
        file.write(stride_hash_bytes(shards))
    with _side_file(store, names.SOURCE_TABLE, files) as file:
        columns = {field.name: [getattr(source, field.name) for source in sources] for field in SOURCE_TABLE_SCHEMA}
        write_table(
            file, SOURCE_TABLE_SCHEMA, [table_batch(columns, SOURCE_TABLE_SCHEMA)], rows_per_batch=_SOURCES_PER_BATCH
        )
    with _side_file(store, names.TOKENIZER, files) as file:
        file.write(_tokenizer(origin.first))
    manifest = _manifest(origin, rows, sources, tally, files)
    store.put(names.MANIFEST, encode_manifest(manifest))
    return manifest


def is_of_corpus(name: str) -> bool:
    """Whether a copy writes a file of this name."""
    return names.is_shard_name(name) or name in {*names.REQUIRED_FILES, names.MANIFEST}


@contextlib.contextmanager
def _side_file(store: Store, name: str, files: dict[str, FileFacts]) -> Iterator[HashingFile]:
    with written(store, name) as file:
        hashing = HashingFile(file)
        yield hashing
    files[name] = FileFacts(num_bytes=hashing.tell(), sha256=hashing.digest().hex())


def _tokenizer(corpus: Corpus) -> bytes:
    try:
        return corpus.store.get(names.TOKENIZER)
    except FileNotFoundError:
        raise DamagedCorpusError(f"{corpus.store.where(names.TOKENIZER)} is missing", hint=RESTORE) from None


def _copied(source: SourceInfo, tally: Tally, index: int) -> SourceInfo:
    """What the source table of the copy says of a source: what was not copied is left out."""
    documents, tokens = int(tally.documents[index]), int(tally.tokens[index])
    if documents == source.documents:
        return source
    left_out = {**source.left_out, NOT_COPIED: source.left_out.get(NOT_COPIED, 0) + source.documents - documents}
    text_bytes = source.text_bytes * tokens // max(1, source.tokens)  # no table has those of each document
    return replace(
        source, documents=documents, tokens=tokens, text_bytes=text_bytes, left_out=dict(sorted(left_out.items()))
    )


def _manifest(
    origin: Origin, rows: pa.RecordBatch, sources: Sequence[SourceInfo], tally: Tally, files: Mapping[str, FileFacts]
) -> Manifest:
    first = origin.first.manifest
    left_out: Counter[str] = Counter()
    for source in sources:
        left_out.update(source.left_out)
    hashes, lengths = rows.column("tokens_hash").to_pylist(), rows.column("num_tokens").to_pylist()
    num_documents, num_tokens = int(tally.documents.sum()), int(tally.tokens.sum())
    return msgspec.structs.replace(
        first,
        num_documents=num_documents,
        num_tokens=num_tokens,
        num_shards=rows.num_rows,
        num_bytes=int(rows.column("num_bytes").to_numpy().sum()),
        text_bytes=sum(source.text_bytes for source in sources),
        columns=dict(origin.columns),
        fingerprints=Fingerprints(
            content=content_fingerprint(
                join_hashes(TokenHash.from_bytes(*each) for each in zip(hashes, lengths, strict=True)),
                num_documents=num_documents,
                eos_id=first.tokenizer.eos_id,
                bos_id=first.tokenizer.bos_id,
            ),
            recipe=recipe_fingerprint(
                origin.build, first.tokenizer, ((one.argument, one.path, one.num_bytes) for one in sources)
            ),
        ),
        arguments=list(origin.arguments),
        build=origin.build,
        records=Records(
            read=sum(source.records_read for source in sources),
            written=num_documents,
            left_out=dict(sorted(left_out.items())),
            with_special_text=origin.with_special_text,
        ),
        document_lengths=tally.lengths(),
        files=dict(files),
        generation=None,
    )
