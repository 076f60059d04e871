"""A writing task: its documents go to shards, or to a file for a later stage, and their counts to a receipt."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import IO, Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.format.manifest import IN_OTHER_SPLIT, NO_LENGTHS, DocumentLengths, joined_lengths, shard_schema
from tokshard.format.names import shard_name
from tokshard.format.writer import ShardWriter
from tokshard.pipeline.encode.documents import ChunkResult, Documents, split_documents
from tokshard.pipeline.options import SKIP
from tokshard.pipeline.request import Build
from tokshard.pipeline.sources.records import EMPTY, UNREAD, BadRecord
from tokshard.pipeline.workspace.places import HASH, Output
from tokshard.pipeline.workspace.receipts import (
    Failure,
    Key,
    OutputCounts,
    Progress,
    Receipt,
    SourceCounts,
    TaskFailedError,
    read_receipt,
    readable,
    rejects_path,
)
from tokshard.store import Store, written

MARKS = "byte order mark dropped"
"""Name of this change in the counts."""

_MOST_CHANGES = 64
"""The most changes that a task counts by name: names of fields come from the records."""


class Sink(Protocol):
    """The destination of a task's documents. Leaving the stack early removes unfinished files."""

    def extend(self, parts: Sequence[Documents], source: int, base: int) -> None:
        """Write documents, in order.

        Args:
            parts: the documents for each corpus.
            source: their input, unless they contain it themselves.
            base: records of that input before the chunk.
        """

    def finish(self, receipt: Receipt) -> Receipt:
        """Write the rest, and list the files in the receipt."""


class Shards:
    """A `Sink` that writes shards into each corpus of a build."""

    def __init__(self, build: Build, key: Key, stack: contextlib.ExitStack) -> None:
        self._writers = [stack.enter_context(_shard_writer(build, key, output)) for output in build.outputs]

    def extend(self, parts: Sequence[Documents], source: int, base: int) -> None:
        """Write documents, in order."""
        for writer, part in zip(self._writers, parts, strict=True):
            if len(part):
                writer.extend(
                    part.tokens,
                    part.ends,
                    source=source if part.sources is None else part.sources,
                    records=part.positions + base if part.records is None else part.records,
                    columns={
                        name: values.to_pylist() if isinstance(values, pa.Array) else values
                        for name, values in part.columns.items()
                    },
                )

    def finish(self, receipt: Receipt) -> Receipt:
        """Close the last shards, and list all shards in the receipt."""
        outputs = []
        for output, writer in zip(receipt.outputs, self._writers, strict=True):
            rows = writer.finish()
            shards = dict(zip(rows.column("name").to_pylist(), rows.column("num_bytes").to_pylist(), strict=True))
            table = rows.serialize().to_pybytes() if shards else b""
            outputs.append(msgspec.structs.replace(output, shards=shards, table=table))
        return msgspec.structs.replace(receipt, outputs=outputs)


def _shard_writer(build: Build, key: Key, output: Output) -> ShardWriter:
    return ShardWriter(
        store=output.store,
        name=lambda part: shard_name(generation=output.generation, first_input=key[0], segment=key[1], part=part),
        schema=shard_schema(build.tokenizer, build.columns),
        shard_tokens=build.config.shard_tokens,
    )


class WritingTask:
    """Passes the records of one task to a sink: drops duplicates, lists bad records, and counts everything.

    Bad records are listed in a file of JSON lines, numbered from the task's start in their input; or the first one
    fails the task.

    Args:
        sources: the inputs that it reads; empty if documents contain their source.
        max_documents: the most documents to write.
        stack: has the files of the sink; leaving it before `finish` removes unfinished files.
        drops: the places of duplicates among its texts, ascending; None to keep all.

    Attributes:
        written: documents so far, including a chunk that fails the task.
    """

    def __init__(
        self,
        build: Build,
        stage: str,
        key: Key,
        sources: Sequence[int],
        max_documents: int | None,
        *,
        sink: Sink,
        stack: contextlib.ExitStack,
        drops: NDArray[np.uint32] | None,
    ) -> None:
        self._build, self._stage, self._key, self._sink, self._stack = build, stage, key, sink, stack
        self._max_documents, self._drops = max_documents, drops
        # hashed texts are not split yet
        self._tallies = [_Tally(sources, output) for output in (build.outputs[:1] if stage == HASH else build.outputs)]
        self._rejects: IO[bytes] | None = None
        self._num_rejects = self._rejects_bytes = self._rejects_crc32 = 0
        self._admitted = self._input_bytes = self.written = 0
        self._fields: set[str] = set()
        self._changes: Counter[str] = Counter()
        self._listed: list[NDArray[np.int64]] = []

    @property
    def is_full(self) -> bool:
        """Whether the limit on documents is reached."""
        return self._max_documents is not None and self.written >= self._max_documents

    def is_kept(self, count: int) -> NDArray[np.bool_]:
        """Whether each of the next `count` candidates is kept, not a duplicate: bool [count]."""
        start, self._admitted = self._admitted, self._admitted + count
        kept = np.ones(count, np.bool_)
        if self._drops is not None:
            low, high = np.searchsorted(self._drops, np.array([start, start + count], np.uint32))
            kept[self._drops[low:high].astype(np.int64) - start] = False
        return kept

    def take(self, index: int, made: ChunkResult) -> Progress:
        """Write the documents of a chunk of an input.

        Raises:
            TaskFailedError: a record is bad, and bad records are not skipped.
        """
        if made.candidates is not None:
            made = made.without_duplicates(self.is_kept(len(made.candidates)))
        if self._max_documents is not None:
            made = made.head(self._max_documents - self.written)
        documents, bad = made.documents, made.bad
        count, base = len(documents), self._tallies[0].records_of(index)
        self.written += count  # an upper bound of the documents before it, if a bad record fails the task below
        for record in bad:
            self._reject(index, base, record)
        parts = split_documents(documents)
        self._sink.extend(parts, index, base)
        for tally, part in zip(self._tallies, parts, strict=True):
            tally.add(index, made, part)
        self._input_bytes += made.input_bytes
        self._fields |= made.fields
        for what, found in sorted(made.changes.items()):
            is_one_more = what not in self._changes and what.startswith(UNREAD) and len(self._changes) >= _MOST_CHANGES
            self._changes[f"{UNREAD}..." if is_one_more else what] += len(found)
        self._changes[MARKS] += made.num_marks
        if made.listed is not None and len(made.listed):
            self._listed.append(made.listed)
        example = f"{bad[0].reason}: {bad[0].detail}" if bad else ""
        return Progress(made.input_bytes, count, documents.num_tokens, made.count, len(bad), example)

    def _reject(self, source: int, base: int, bad: BadRecord) -> None:
        record = base + bad.position
        if self._build.options.on_bad_record != SKIP:
            raise TaskFailedError(
                Failure(kind="record", source=source, record=record, reason=bad.reason, problem=bad.detail)
            )
        if self._rejects is None:
            name = rejects_path(self._stage, self._key)
            self._rejects = self._stack.enter_context(written(self._build.workspace.store, name))
        line = {"source": source, "record": record, "reason": bad.reason, "detail": bad.detail}
        content = json.dumps(line).encode() + b"\n"
        self._rejects_bytes += self._rejects.write(content)
        self._rejects_crc32 = zlib.crc32(content, self._rejects_crc32)
        self._num_rejects += 1

    def finish(self) -> Receipt:
        """Publish the files of the sink, and the bad records. The caller writes the receipt."""
        receipt = self._sink.finish(
            Receipt(
                key=self._key,
                max_documents=self._max_documents,
                most_documents=self.written,
                input_bytes=self._input_bytes,
                outputs=[tally.counted() for tally in self._tallies],
                num_rejects=self._num_rejects,
                rejects_bytes=self._rejects_bytes,
                rejects_crc32=self._rejects_crc32,
                fields=sorted(self._fields),
                changes=dict(+self._changes),
                listed=np.concatenate(self._listed).astype("<u4").tobytes() if self._listed else b"",
            )
        )
        self._stack.close()
        return receipt


def read_rejects(store: Store, stage: str, key: Key) -> Iterator[dict[str, Any]]:
    """The bad records of a task.

    Raises:
        BuildError: the list is missing or damaged.
    """
    name, crc32 = rejects_path(stage, key), 0
    expected = read_receipt(store, stage, key).rejects_crc32
    with readable(store, name):
        with store.open(name) as lines:
            for line in lines:
                crc32 = zlib.crc32(line, crc32)
        if crc32 != expected:
            raise ValueError("its content does not have its checksum")
        with store.open(name) as lines:
            yield from map(json.loads, lines)


def lengths_of(lengths: NDArray[np.int64]) -> DocumentLengths:
    """The lengths of one document or more: int64 [documents]."""
    # frexp gives m * 2**e with m in [0.5, 1): e - 1 is the floor of log2, exactly
    counts = np.bincount(np.frexp(lengths)[1] - 1)
    return DocumentLengths(shortest=int(lengths.min()), longest=int(lengths.max()), counts=counts.tolist())


class _Tally:
    """Counts of one task in one corpus."""

    def __init__(self, sources: Sequence[int], output: Output) -> None:
        self._counts = {index: SourceCounts(index) for index in sources}
        self._elsewhere = IN_OTHER_SPLIT.get(output.split, "")
        self._lengths = NO_LENGTHS

    def records_of(self, index: int) -> int:
        """Records of an input that were read before this chunk."""
        return self._counts[index].records_read if index in self._counts else 0

    def add(self, index: int, made: ChunkResult, part: Documents) -> None:
        """Count a chunk.

        Args:
            index: index of the input.
            part: the documents for this corpus.
        """
        if made.sources is None:
            self._count(index, made.count, made, part)
        else:
            sources = made.sources[: made.count]
            starts = np.flatnonzero(np.diff(sources, prepend=-1))  # np.unique imports masked arrays, which take 50 ms
            for source in sorted(set(sources[starts].tolist())):
                is_its = made.sources == source
                self._count(
                    source, int(is_its[: made.count].sum()), made.of(is_its), part.select(is_its[part.positions])
                )
        lengths = part.lengths
        if lengths.any():  # hashed texts have none
            self._lengths = joined_lengths([self._lengths, lengths_of(lengths)])

    def _count(self, source: int, count: int, made: ChunkResult, part: Documents) -> None:
        """Count `count` records of one source, and the result `made` of them."""
        counts, num_written = self._counts.setdefault(source, SourceCounts(source)), len(part)
        if part.omitted is not None:
            for position, omitted in zip(part.positions.tolist(), part.omitted, strict=True):
                for kind, message in omitted:
                    number, *first = counts.omitted.get(kind, (0, counts.records_read + position, message))
                    counts.omitted[kind] = (number + 1, first[0], first[1])
        counts.records_read += count
        counts.documents += num_written
        counts.tokens += part.num_tokens
        counts.text_bytes += 0 if part.text_bytes is None else int(part.text_bytes.sum())
        counts.with_special_text += 0 if part.has_special is None else int(part.has_special.sum())
        counts.padding_ids += 0 if made.padding is None else int(made.padding[: made.count].sum())
        reasons = Counter({reason: len(found) for reason, found in made.left_out.items()})
        reasons.update(record.reason for record in made.bad)
        reasons[self._elsewhere] += len(made.documents) - num_written
        reasons[EMPTY] += count - num_written - reasons.total()
        for reason, number in reasons.items():
            if number:
                counts.left_out[reason] = counts.left_out.get(reason, 0) + number

    def counted(self) -> OutputCounts:
        """The counts for the receipt."""
        return OutputCounts(sources=list(self._counts.values()), lengths=self._lengths)
