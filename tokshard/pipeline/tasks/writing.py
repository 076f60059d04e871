"""One encoding task: from records to shards, rejects, and a receipt."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tokshard.format.manifest import IN_OTHER_SPLIT
from tokshard.format.names import shard_name
from tokshard.format.schema import ShardFacts, token_dtype
from tokshard.format.writer import ShardWriter
from tokshard.interop.tokens.batches import TokenBatch
from tokshard.pipeline.encode.documents import ChunkDocuments, Documents, split_documents, within_limits
from tokshard.pipeline.encode.encoder import DocumentEncoder
from tokshard.pipeline.encode.passing import TokenPasser
from tokshard.pipeline.encode.special_text import SpecialText
from tokshard.pipeline.encode.tokenizer import Encoder
from tokshard.pipeline.sources.records import (
    EMPTY,
    NOT_ENCODED,
    SPECIAL_TOKEN,
    BadRecord,
    Records,
    positions_array,
    utf8_sizes,
)
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.duplicates import DUPLICATE
from tokshard.pipeline.tasks.planning import Key
from tokshard.pipeline.tasks.rejects import RejectsFile
from tokshard.pipeline.workspace.places import TOKENIZER, Output
from tokshard.pipeline.workspace.receipts import OutputCounts, Progress, Receipt, SourceCounts, write_receipt
from tokshard.store import local_file

_LENGTH_BUCKETS = 64


class DocumentWriters:
    """Makes a `WritingTask` for each task. Creating one loads the tokenizer, unless tokens are passed on."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        if context.spec.tokens is not None:
            self.pass_on = TokenPasser(context.tokenizer, context.spec)
        else:
            with local_file(context.workspace.store, TOKENIZER) as path:
                self.encode = DocumentEncoder(Encoder(Path(path)), context.tokenizer)
        self.special = SpecialText(context.tokenizer.special_ids)
        self.facts = ShardFacts(
            dtype=token_dtype(context.tokenizer.vocab_size),
            tokenizer_sha256=context.tokenizer.canonical_sha256,
            eos_id=context.tokenizer.eos_id,
            bos_id=context.tokenizer.bos_id,
            columns=context.columns,
        )

    def begin(self, key: Key, sources: Sequence[int], max_documents: int | None) -> WritingTask:
        """A task to write, as a context."""
        return WritingTask(self, key, sources, max_documents)


class WritingTask:
    """The records of one task become documents, in order.

    Leaving the context before `finish` removes what is unfinished.

    Args:
        max_documents: documents to write at most.
    """

    def __init__(self, writers: DocumentWriters, key: Key, sources: Sequence[int], max_documents: int | None) -> None:
        context = writers.context
        self._writers, self._context, self._key, self._max_documents = writers, context, key, max_documents
        self._rejects = RejectsFile(context, key)
        self._shards = [self._shard_writer(output) for output in context.outputs]
        self._tallies = [_Tally(sources, output) for output in context.outputs]
        self._drops = None if context.drops is None else context.drops.of(key)
        self._written = 0
        self._admitted = 0
        self._input_bytes = 0
        self._fields: set[str] = set()
        self._num_marks = 0
        self._changes: Counter[str] = Counter()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._rejects)
        for shards in self._shards:
            self._stack.enter_context(shards)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def is_full(self) -> bool:
        """Whether as many documents are written as may be."""
        return self._max_documents is not None and self._written >= self._max_documents

    def take(self, index: int, records: Records | TokenBatch) -> Progress:
        """Write the records of a chunk of an input."""
        made = self._writers.pass_on(records) if isinstance(records, TokenBatch) else self._encode(records)
        count, bad = made.count, made.bad
        documents, too_long_or_short = within_limits(made.documents, self._context.rules)
        left_out = {**made.left_out, **too_long_or_short}
        if self._max_documents is not None and len(documents) >= (room := self._max_documents - self._written):
            # cut exactly after the last document that is wanted
            documents = documents.head(room)
            last = int(documents.positions[-1])
            count = last + 1
            bad = [record for record in bad if record.position < last]
            left_out = {reason: positions[positions < last] for reason, positions in left_out.items()}
        reasons = {reason: len(positions) for reason, positions in left_out.items() if len(positions)}
        base = self._tallies[0].counts[index].records_read
        if bad:
            self._rejects.add(index, base, bad)
        for record in bad:
            reasons[record.reason] = reasons.get(record.reason, 0) + 1
        num_empty = count - len(documents) - sum(reasons.values())
        if num_empty:
            reasons[EMPTY] = num_empty
        self._write(index, base, count, documents, reasons)
        self._input_bytes += records.input_bytes
        self._changes.update({what: int((positions < count).sum()) for what, positions in made.changes.items()})
        if isinstance(records, TokenBatch):
            self._fields |= records.columns.keys()
        else:
            self._fields |= records.fields
            self._num_marks += records.num_marks
        example = f"{bad[0].reason}: {bad[0].detail}" if bad else ""
        return Progress(records.input_bytes, len(documents), len(documents.tokens), count, len(bad), example)

    def finish(self, *, previous: int | None, is_last: bool) -> Receipt:
        """Publish shards and rejects, and last the receipt."""
        shards = [writer.finish() for writer in self._shards]
        self._rejects.publish()
        receipt = Receipt(
            key=self._key,
            previous=previous,
            is_last=is_last,
            max_documents=self._max_documents,
            input_bytes=self._input_bytes,
            outputs=[tally.counted() for tally in self._tallies],
            num_rejects=self._rejects.count,
            rejects_bytes=self._rejects.num_bytes,
            fields=sorted(self._fields),
            num_marks=self._num_marks,
            changes={what: count for what, count in self._changes.items() if count},
            drops="" if self._context.drops is None else self._context.drops.digest,
        )
        write_receipt(self._context.workspace, receipt, shards)
        return receipt

    def _encode(self, records: Records) -> ChunkDocuments:
        """Encode the texts of a chunk."""
        texts, positions = records.texts, positions_array(records)
        columns, bad = records.columns, records.bad
        left_out = {
            reason: np.array([position for position, why in records.passed_over if why == reason], np.int64)
            for reason in {why for _, why in records.passed_over}
        }
        if self._drops is not None:
            is_kept = self._drops.is_kept(self._admitted, len(texts))
            self._admitted += len(texts)
            if not is_kept.all():
                left_out[DUPLICATE] = positions[~is_kept]
                texts, positions, columns = _chosen(np.flatnonzero(is_kept).tolist(), texts, positions, columns)
        encoded = self._writers.encode(texts)
        if encoded.with_special or encoded.failed:
            rejected = [_special(int(positions[index])) for index in encoded.with_special]
            rejected += [
                BadRecord(int(positions[index]), NOT_ENCODED, detail) for index, detail in encoded.failed.items()
            ]
            bad = sorted([*bad, *rejected], key=lambda record: record.position)
            kept = sorted(set(range(len(texts))) - {*encoded.with_special, *encoded.failed})
            texts, positions, columns = _chosen(kept, texts, positions, columns)
        documents = Documents(texts, positions, columns, encoded.tokens, encoded.ends)
        return ChunkDocuments(count=records.count, documents=documents, bad=bad, left_out=left_out)

    def _write(self, index: int, base: int, count: int, documents: Documents, reasons: Mapping[str, int]) -> None:
        """Write documents into the corpora that they belong to, and count them in each."""
        parts = split_documents(documents, self._context.rules)
        for writer, tally, part in zip(self._shards, self._tallies, parts, strict=True):
            if len(part):
                writer.extend(part.tokens, part.ends, source=index, records=part.positions + base, columns=part.columns)
            elsewhere = len(documents) - len(part)
            counts = tally.add(index, count, part, reasons, elsewhere)
            counts.with_special_text += self._writers.special.count(part.texts or ())
        self._written += len(documents)

    def _shard_writer(self, output: Output) -> ShardWriter:
        key = self._key
        return ShardWriter(
            store=output.store,
            name=lambda part: shard_name(generation=output.generation, first_input=key[0], segment=key[1], part=part),
            facts=self._writers.facts,
            shard_tokens=self._context.shard_tokens,
        )


class _Tally:
    """Counts of one task in one corpus."""

    def __init__(self, sources: Sequence[int], output: Output) -> None:
        self.counts = {index: SourceCounts(index=index) for index in sources}
        self._elsewhere = IN_OTHER_SPLIT.get(output.split, "")
        self._lengths = np.zeros(_LENGTH_BUCKETS, np.int64)
        self._shortest, self._longest = 0, 0

    def add(
        self, index: int, count: int, documents: Documents, reasons: Mapping[str, int], elsewhere: int
    ) -> SourceCounts:
        counts = self.counts[index]
        counts.records_read += count
        counts.documents += len(documents)
        counts.text_bytes += utf8_sizes(documents.texts or ())
        for reason, number in (*reasons.items(), (self._elsewhere, elsewhere)):
            if number:
                counts.left_out[reason] = counts.left_out.get(reason, 0) + number
        if not len(documents):
            return counts
        counts.tokens += len(documents.tokens)
        lengths = documents.lengths
        # frexp gives m * 2**e with m in [0.5, 1): e - 1 is the floor of log2, exactly
        self._lengths += np.bincount(np.frexp(lengths)[1] - 1, minlength=_LENGTH_BUCKETS)
        shortest = int(lengths.min())
        self._shortest = min(self._shortest, shortest) if self._shortest else shortest
        self._longest = max(self._longest, int(lengths.max()))
        return counts

    def counted(self) -> OutputCounts:
        used = np.flatnonzero(self._lengths)
        return OutputCounts(
            sources=list(self.counts.values()),
            length_counts=self._lengths[: used[-1] + 1].tolist() if len(used) else [],
            shortest=self._shortest,
            longest=self._longest,
        )


def _chosen(
    chosen: Sequence[int], texts: Sequence[str], positions: NDArray[np.int64], columns: Mapping[str, Sequence[Any]]
) -> tuple[list[str], NDArray[np.int64], dict[str, list[Any]]]:
    return (
        [texts[index] for index in chosen],
        positions[chosen],
        {name: [values[index] for index in chosen] for name, values in columns.items()},
    )


def _special(position: int) -> BadRecord:
    detail = "the tokenizer gives this text the id of a special token, which would be read as control"
    return BadRecord(position, SPECIAL_TOKEN, detail)
