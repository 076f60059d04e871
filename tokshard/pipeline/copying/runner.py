"""One task of a copy, start to end: read documents, write shards or a file of dealt documents, and leave a receipt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import BuildError
from tokshard.format.content import TokenHash
from tokshard.format.names import shard_name
from tokshard.format.opening import open_corpus
from tokshard.format.schema import ShardFacts, shard_schema
from tokshard.format.shard_table import Runs
from tokshard.format.tables import BatchPlace, ShardInfo
from tokshard.format.whole_corpus import batches_of_shard
from tokshard.format.writer import ShardWriter
from tokshard.pipeline.copying.dealing import (
    DealtFile,
    DealtWriter,
    dealt_rows,
    dealt_schema,
    read_bucket,
    sorted_documents,
)
from tokshard.pipeline.copying.planning import Kind, Levels, Work
from tokshard.pipeline.copying.selection import (
    Chooser,
    CopiedDocuments,
    Selection,
    read_documents,
    read_shard,
    source_labels,
)
from tokshard.pipeline.tasks.hashing import no_shards
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task
from tokshard.pipeline.workspace.lease import cannot_write
from tokshard.pipeline.workspace.places import Workspace
from tokshard.pipeline.workspace.receipts import (
    OutputCounts,
    Progress,
    Receipt,
    SourceCounts,
    receipt_name,
    receipts_of,
    write_receipt,
)
from tokshard.store import written

_LENGTH_BUCKETS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyContext:
    """What a process needs to run the tasks of one stage of a copy.

    Args:
        corpora: location of each, and the newest of its generations that is copied.
        facts: of the shards that are written.
        seed, levels: of a shuffle.
        works: what each task does.
        dealt: the files of the level before.
        is_dealt_again: that is not the first level.
    """

    workspace: Workspace
    corpora: Sequence[tuple[str, int]]
    selection: Selection
    facts: ShardFacts
    shard_tokens: int
    works: Mapping[Key, Work]
    seed: int = 0
    levels: Levels | None = None
    dealt: Sequence[DealtFile] = ()
    is_dealt_again: bool = False

    def purpose(self, task: Task | StreamTask) -> str:
        """What a worker does with a task, in the past tense."""
        return "put documents in order" if self.works[task.key].kind is Kind.GATHER else "copied documents"


class CopyRunner:
    """Runs the tasks of a copy in this process. The corpora are opened when the first task reads them.

    Args:
        report: called with the progress after every slice.
    """

    def __init__(self, context: CopyContext, report: Callable[[Progress], None]) -> None:
        self._context, self._report = context, report
        self._source: _Corpora | None = None
        self._schema = shard_schema(context.facts)
        self._dealt_schema = dealt_schema(self._schema)

    def run_task(self, task: Task, max_documents: int | None) -> Receipt:
        """Run a task.

        Raises:
            CorpusError: a corpus cannot be read, or is damaged.
            BuildError: nothing can be written, or what an earlier task left is gone.
        """
        assert max_documents is None, "a copy has no limit"
        work = self._context.works[task.key]
        try:
            if work.kind in {Kind.DEAL, Kind.REDEAL}:
                return self._deal(task.key, work)
            return self._write_shards(task.key, work)
        except OSError as error:  # what is read names its file, so this is the output
            raise cannot_write(self._context.workspace.out, error) from error

    def _write_shards(self, key: Key, work: Work) -> Receipt:
        tally = _Tally()
        if work.kind is Kind.COPY:
            documents = self._chosen(work, tally)
        else:
            documents = self._gathered(work) if work.kind is Kind.GATHER else self._written(work)
        with ShardWriter(
            store=self._context.workspace.store,
            name=lambda part: shard_name(generation=0, first_input=key[0], segment=key[1], part=part),
            facts=self._context.facts,
            shard_tokens=self._context.shard_tokens,
        ) as writer:
            for batch in documents:
                writer.extend(
                    batch.tokens,
                    batch.ends,
                    source=batch.sources,
                    records=batch.records,
                    columns={name: column.to_pylist() for name, column in batch.columns.items()},
                )
            shards = writer.finish()
        num_bytes = sum(shards.column("num_bytes").to_pylist())
        return self._finish(key, work, tally, shards, num_bytes=num_bytes)

    def _deal(self, key: Key, work: Work) -> Receipt:
        workspace, levels = self._context.workspace, self._context.levels
        assert levels is not None, "only a shuffle deals"
        tally = _Tally()
        with written(workspace.store, dealt_path(workspace, key)) as file:
            writer = DealtWriter(file, levels, key[0], first=work.start * levels.fan_out if key[0] else 0)
            if work.kind is Kind.DEAL:
                for documents in self._chosen(work, tally):
                    writer.add(dealt_rows(documents, self._context.seed, self._dealt_schema))
            else:
                for rows in self._bucket(work.start):
                    writer.add(rows)
                    self._report(Progress(0, 0, len(rows.column(0).flatten())))
            num_bytes, rounds = writer.finish()
        return self._finish(key, work, tally, no_shards(), num_bytes=num_bytes, rounds=rounds)

    def _finish(
        self,
        key: Key,
        work: Work,
        tally: _Tally,
        shards: pa.RecordBatch,
        *,
        num_bytes: int,
        rounds: int | None = None,
    ) -> Receipt:
        """Leave the receipt.

        Args:
            num_bytes: that were written.
            rounds: of a file of dealt documents.
        """
        is_first = work.kind in {Kind.COPY, Kind.DEAL}
        receipt = Receipt(
            key=key,
            previous=None,
            is_last=True,
            max_documents=None,
            input_bytes=self._source.num_bytes(work) if self._source and is_first else num_bytes,
            outputs=[tally.counted()],
            num_rejects=0,
            rows=rounds or 0,
            dealt_bytes=0 if rounds is None else num_bytes,
            merge=work.digest,
        )
        write_receipt(self._context.workspace, receipt, [shards])
        return receipt

    def _chosen(self, work: Work, tally: _Tally) -> Iterator[CopiedDocuments]:
        """The documents of some shards that are taken, in order."""
        if self._source is None:
            self._source = _Corpora(self._context)
        for index in range(work.start, work.stop):
            for documents in self._source.read(index):
                taken = documents.only(self._source.chooser(documents))
                if len(taken):
                    tally.add(taken)
                    yield taken
                self._report(Progress(0, len(taken), len(documents.tokens)))

    def _written(self, work: Work) -> Iterator[CopiedDocuments]:
        """The documents of the shards that some tasks wrote."""
        workspace = self._context.workspace
        for _, (rows,) in receipts_of(workspace, ((index, 0) for index in range(work.start, work.stop))):
            for index in range(rows.num_rows):
                info, places, runs = written_shard(rows, index)
                hashes = rows.column("stride_hashes")[index].values.to_numpy()
                batches = batches_of_shard(workspace.store, info, places, self._schema, hashes)
                with_columns = bool(self._context.facts.columns)
                for documents in read_documents(batches, runs, first_number=0, with_columns=with_columns):
                    yield documents
                    self._report(Progress(0, len(documents), len(documents.tokens)))

    def _gathered(self, work: Work) -> Iterator[CopiedDocuments]:
        """The documents of some buckets of the last level, in the order of their keys."""
        for bucket in range(work.start, work.stop):
            for documents in sorted_documents(self._bucket(bucket), self._dealt_schema):
                yield documents
                self._report(Progress(0, len(documents), len(documents.tokens)))

    def _bucket(self, bucket: int) -> Iterator[pa.RecordBatch]:
        """The documents of one bucket of the level before, in any order."""
        levels, dealt = self._context.levels, self._context.dealt
        assert levels is not None, "only a shuffle deals"
        # a file of the first level holds documents of all buckets, one of a later level those of one bucket before it
        files = [dealt[bucket // levels.fan_out]] if self._context.is_dealt_again else dealt
        store = self._context.workspace.store
        return read_bucket(store, files, bucket % levels.fan_out, levels.fan_out, self._dealt_schema)


class _Corpora:
    """The documents of all corpora, by the number of a shard among all shards."""

    def __init__(self, context: CopyContext) -> None:
        self._opened = [open_corpus(location, generation=generation) for location, generation in context.corpora]
        self._with_columns = bool(context.facts.columns)
        self._first_shards = _starts([len(corpus.shards) for corpus in self._opened])
        self._first_numbers = _starts([corpus.num_documents for corpus in self._opened])
        sources = [corpus.sources() for corpus in self._opened]
        self._first_sources = _starts([len(of_corpus) for of_corpus in sources])
        labels = [
            label
            for corpus, of_corpus in zip(self._opened, sources, strict=True)
            for label in source_labels(corpus, of_corpus)
        ]
        self._sizes = np.concatenate([corpus.shards.sizes for corpus in self._opened])
        self.chooser = Chooser(context.selection, labels, context.facts.columns)

    def num_bytes(self, work: Work) -> int:
        """Of the shards that a task reads."""
        return int(self._sizes[work.start : work.stop].sum())

    def read(self, index: int) -> Iterator[CopiedDocuments]:
        """The documents of one shard."""
        number = int(np.searchsorted(self._first_shards, index, "right")) - 1
        corpus, shard = self._opened[number], index - int(self._first_shards[number])
        try:
            yield from read_shard(
                corpus,
                shard,
                first_number=int(self._first_numbers[number]),
                first_source=int(self._first_sources[number]),
                with_columns=self._with_columns,
            )
        except OSError as error:  # of its store, or of the temporary directory, where it is copied from a bucket
            raise BuildError(
                f"{corpus.store.where(corpus.shards[shard].name)} cannot be read: {error.strerror or error}",
                hint="check its store and the room in TMPDIR; the same command continues where this one stopped",
            ) from error


class _Tally:
    """Counts of the documents that a task takes."""

    def __init__(self) -> None:
        self._sources: dict[int, SourceCounts] = {}
        self._lengths = np.zeros(_LENGTH_BUCKETS, np.int64)
        self._shortest, self._longest = 0, 0

    def add(self, documents: CopiedDocuments) -> None:
        """Count some more documents, at least one."""
        lengths = np.diff(documents.ends, prepend=0)
        shortest = int(lengths.min())
        self._shortest = min(self._shortest, shortest) if self._shortest else shortest
        self._longest = max(self._longest, int(lengths.max()))
        # frexp gives m * 2**e with m in [0.5, 1): e - 1 is the floor of log2, exactly
        self._lengths += np.bincount(np.frexp(lengths)[1] - 1, minlength=_LENGTH_BUCKETS)
        found, of_document = np.unique(documents.sources, return_inverse=True)
        num_documents = np.bincount(of_document)
        num_tokens = np.zeros(len(found), np.int64)
        np.add.at(num_tokens, of_document, lengths)
        for index, count, tokens in zip(found.tolist(), num_documents.tolist(), num_tokens.tolist(), strict=True):
            counts = self._sources.setdefault(index, SourceCounts(index=index))
            counts.documents += count
            counts.tokens += tokens

    def counted(self) -> OutputCounts:
        """For the receipt."""
        return OutputCounts(
            sources=list(self._sources.values()),
            length_counts=np.trim_zeros(self._lengths, "b").tolist(),
            shortest=self._shortest,
            longest=self._longest,
        )


def written_shard(rows: pa.RecordBatch, index: int) -> tuple[ShardInfo, list[BatchPlace], Runs]:
    """What a row of `WRITTEN_SHARD_SCHEMA` says of a shard."""

    def numbers(name: str) -> NDArray[np.int64]:
        found: NDArray[np.int64] = rows.column(name)[index].values.to_numpy()
        return found

    def value(name: str) -> Any:
        return rows.column(name)[index].as_py()

    columns = ("batch_documents", "batch_tokens", "batch_offsets_position", "batch_values_position")
    info = ShardInfo(
        name=value("name"),
        num_documents=value("num_documents"),
        num_tokens=value("num_tokens"),
        num_bytes=value("num_bytes"),
        sha256=value("sha256").hex(),
        tokens_hash=TokenHash.from_bytes(value("tokens_hash"), value("num_tokens")),
    )
    places = [
        BatchPlace(num_documents=documents, num_tokens=tokens, offsets_position=offsets, values_position=values)
        for documents, tokens, offsets, values in zip(*(numbers(name).tolist() for name in columns), strict=True)
    ]
    runs = Runs(document=numbers("run_document"), source=numbers("run_source"), record=numbers("run_record"))
    return info, places, runs


def _starts(counts: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def dealt_path(workspace: Workspace, key: Key) -> str:
    """Name of the file of dealt documents of a task, in the store."""
    return f"{workspace.dealt}/{receipt_name(key)}"
