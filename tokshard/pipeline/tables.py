"""The sums of a build's receipts for one of its corpora: the rows of its tables, and its counts."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import islice

import numpy as np
import pyarrow as pa

from tokshard.errors import UsageError
from tokshard.format import names
from tokshard.format.arrays import lists_array, numbers_of, table_batch
from tokshard.format.content import Content
from tokshard.format.files import HashingFile
from tokshard.format.manifest import DAMAGED_INPUT, IN_OTHER_SPLIT, NO_LENGTHS, FileFacts, joined_lengths
from tokshard.format.opening import open_corpus
from tokshard.format.stride_hashes import stride_hash_bytes
from tokshard.format.tables import (
    SHARD_TABLE_SCHEMA,
    SHARDS_PER_BATCH,
    SOURCE_TABLE_SCHEMA,
    SourceInfo,
    all_sources,
    contents,
    shard_rows,
    write_table,
)
from tokshard.pipeline.request import Build
from tokshard.pipeline.sources.corpora import IN_EARLIER_SPLIT, NOT_COPIED
from tokshard.pipeline.stages import StageResults
from tokshard.pipeline.workspace.places import WRITE
from tokshard.pipeline.workspace.receipts import Key, Receipt, read_receipt, written_rows
from tokshard.store import Store, side_by_side, written

_SOURCES_PER_BATCH = 65_536

_RECEIPTS_AT_ONCE = 16
"""Receipts per call of Arrow: a call costs more than the content of a receipt."""

_COUNTED = ("records_read", "documents", "tokens", "text_bytes")


class Totals:
    """Sums over receipts in order, for one corpus of a build.

    Args:
        number: which corpus of the build.

    Attributes:
        originals: for a copy: the sources of its corpora, as they record them. They become the sources of the copy.
        padding_ids: ids of padding that were left out, here or in the corpora that a copy reads.
        records_before: for each task, the records of its sources that tasks before it have read.
        with_rejects: tasks that listed bad records.
        omitted: kind of what a chat template left out, to its count, and to source, record (from 0) and message of
            the first.
        records, text_bytes, left_out: of all sources; known when the source table is written.
    """

    def __init__(self, build: Build, settled: StageResults, number: int) -> None:
        self._build, self._settled, self._number = build, settled, number
        self.originals, self.padding_ids = _originals(build)
        # 32 bytes a source: there may be a million
        self._counts = np.zeros((len(self.originals or build.inputs), len(_COUNTED)), np.int64)
        self._left_out: dict[int, Counter[str]] = {}
        for index in () if self.originals else settled.left_out:
            self._counts[index, 0] = 1
            self._left_out[index] = Counter({DAMAGED_INPUT: 1})
        self.documents = self.tokens = self.with_special_text = 0
        self.records = self.text_bytes = 0
        self.left_out: Counter[str] = Counter()
        self.shard_sizes: dict[str, int] = {}
        self.content = Content()
        self.lengths = NO_LENGTHS
        self.omitted: dict[str, tuple[int, int, int, int]] = {}
        self.records_before: dict[Key, dict[int, int]] = {}
        self.with_rejects: list[Key] = []

    def write_tables(self, out: Store, files: dict[str, FileFacts]) -> None:
        """Write the stride hashes and the tables of shards and sources. Meanwhile the receipts are added up."""
        with side_file(out, names.STRIDE_HASHES, files) as hashes, side_file(out, names.SHARD_TABLE, files) as file:
            write_table(file, SHARD_TABLE_SCHEMA, self._shard_table(hashes), rows_per_batch=SHARDS_PER_BATCH)
        with side_file(out, names.SOURCE_TABLE, files) as file:
            write_sources(file, self._sources())

    def _shard_table(self, hashes: HashingFile) -> Iterator[pa.RecordBatch]:
        """The rows of the shard table, task by task.

        Args:
            hashes: gets the stride hashes of the shards.
        """
        store = self._build.workspace.store
        stage, counted = self._settled.counts
        if stage != WRITE:
            for receipt in side_by_side(store, partial(read_receipt, store, stage), (one.key for one in counted)):
                self._add(receipt)
        receipts = side_by_side(store, partial(read_receipt, store, WRITE), (one.key for one in self._settled.shards))
        while part := list(islice(receipts, _RECEIPTS_AT_ONCE)):
            for receipt in part if stage == WRITE else ():
                self._add(receipt)
            written = written_rows([receipt.outputs[self._number] for receipt in part])
            hashes.write(stride_hash_bytes(written))
            columns = (written.column(one).to_pylist() for one in ("name", "num_bytes"))
            self.shard_sizes.update(zip(*columns, strict=True))
            self.content = reduce(Content.then, contents(written), self.content)
            yield self._with_records_before(part, shard_rows(written))

    def _add(self, receipt: Receipt) -> None:
        output = receipt.outputs[self._number]
        before: dict[int, int] = {}
        for counts in output.sources:
            row = self._counts[counts.index]
            for kind, (number, record, message) in counts.omitted.items():
                so_far, *first = self.omitted.get(kind, (0, counts.index, int(row[0]) + record, message))
                self.omitted[kind] = (so_far + number, first[0], first[1], first[2])
            if row[0] and not self.originals:  # documents of corpora know their records
                before[counts.index] = int(row[0])
            row += [getattr(counts, name) for name in _COUNTED]
            self.tokens += counts.tokens
            self.documents += counts.documents
            self.with_special_text += counts.with_special_text
            self.padding_ids += counts.padding_ids
            if counts.left_out:
                self._left_out.setdefault(counts.index, Counter()).update(counts.left_out)
        if before:
            self.records_before[receipt.key] = before
        if receipt.num_rejects:
            self.with_rejects.append(receipt.key)
        self.lengths = joined_lengths([self.lengths, output.lengths])

    def _with_records_before(self, receipts: Sequence[Receipt], rows: pa.RecordBatch) -> pa.RecordBatch:
        """Record numbers counted from the start of the source rather than of the task."""
        records, of_value = rows.column("run_record"), numbers_of(rows.column("run_source").values)
        values, offsets = numbers_of(records.values).copy(), numbers_of(records.offsets)
        row = 0
        for receipt in receipts:
            first, row = row, row + len(receipt.outputs[self._number].shards)
            mine = slice(offsets[first], offsets[row])
            for source, base in self.records_before.get(receipt.key, {}).items():
                values[mine][of_value[mine] == source] += base
        index = rows.schema.get_field_index("run_record")
        field = rows.schema.field(index)
        return rows.set_column(index, field, lists_array(offsets, values, field.type))

    def _sources(self) -> Iterator[SourceInfo]:
        for source in map(self._source, range(len(self._counts))):
            self.records += source.records_read
            self.text_bytes += source.text_bytes
            self.left_out.update(source.left_out)
            yield source

    def _source(self, index: int) -> SourceInfo:
        """A source with its counts of what was read, written and left out."""
        counts = dict(zip(_COUNTED, self._counts[index].tolist(), strict=True))
        left_out = self._left_out.get(index, Counter())
        if self.originals:
            return self._copied(self.originals[index], counts, left_out)
        source = self._build.inputs[index]
        return SourceInfo(
            argument=source.argument,
            path=source.path,
            num_bytes=source.num_bytes,
            left_out=dict(sorted(left_out.items())),
            **counts,
        )

    def _copied(self, source: SourceInfo, counts: dict[str, int], left_out: Counter[str]) -> SourceInfo:
        """A source of a copy: its earlier counts, and the documents that were not copied."""
        is_damage = self._settled.left_out and not self._settled.is_limited
        if self._build.outputs[self._number].split:  # which has the same reasons for documents of its own
            earlier = Counter(source.left_out)
            earlier[IN_EARLIER_SPLIT] += sum(earlier.pop(reason, 0) for reason in IN_OTHER_SPLIT.values())
            source = replace(source, left_out=earlier)
        unread = {DAMAGED_INPUT if is_damage else NOT_COPIED: source.documents - counts["records_read"]}
        return kept_source(source, counts["documents"], counts["tokens"], left_out + Counter(unread))


def kept_source(source: SourceInfo, documents: int, tokens: int, left_out: Counter[str]) -> SourceInfo:
    """A source of a corpus with the counts of a copy or a view.

    Args:
        left_out: reason to documents that are in the corpus, and not in the copy or view.
    """
    return replace(
        source,
        documents=documents,
        tokens=tokens,
        # no table has the bytes of each text
        text_bytes=source.text_bytes * tokens // max(1, source.tokens),
        left_out=dict(sorted((Counter(source.left_out) + left_out).items())),
    )


@contextlib.contextmanager
def side_file(out: Store, name: str, files: dict[str, FileFacts]) -> Iterator[HashingFile]:
    """A file next to the manifest; its size and hash are added to `files` when it is written."""
    with written(out, name) as file:
        hashing = HashingFile(file)
        yield hashing
    files[name] = hashing.facts


def write_sources(file: HashingFile, sources: Iterable[SourceInfo]) -> None:
    """Write a source table."""
    rest, columns = iter(sources), SOURCE_TABLE_SCHEMA.names

    def batches() -> Iterator[pa.RecordBatch]:
        while part := list(islice(rest, _SOURCES_PER_BATCH)):
            yield table_batch({name: [getattr(one, name) for one in part] for name in columns}, SOURCE_TABLE_SCHEMA)

    write_table(file, SOURCE_TABLE_SCHEMA, batches(), rows_per_batch=_SOURCES_PER_BATCH)


def _originals(build: Build) -> tuple[list[SourceInfo], int]:
    """The sources of a copy's corpora, with arguments numbered over all corpora; and their count of padding ids."""
    generations, padding_ids = [], 0
    for location, generation in build.corpora:
        with open_corpus(location, generation=generation) as corpus:
            generations += corpus.generations
            padding_ids += corpus.manifest.records.padding_ids
    return all_sources(generations) if generations else [], padding_ids


def check_kept_fields(build: Build, receipts: Sequence[Receipt]) -> None:
    """Refuse a build in which a kept field was found in no record of any input.

    Args:
        receipts: the receipts of all tasks.

    Raises:
        UsageError: with the field.
    """
    found = {name for receipt in receipts for name in receipt.fields}
    for name, (path, _) in build.spec.columns.items():
        if name not in found and (records := sum(receipt.records_read for receipt in receipts)):
            option = "--id-field" if name == "id" != path else "--keep-field"
            raise UsageError(
                f"none of {records:,} records has the field {path!r}",
                hint=f"correct or leave out {option} {path}, and {build.start_over}",
            )
