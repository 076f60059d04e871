"""One task, start to end: read, parse, encode, write, and leave a receipt."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Self

import numpy as np

from tokshard.build.encoding import DocumentEncoder
from tokshard.build.readers import read_span, read_stream
from tokshard.build.receipts import Receipt, SourceCounts, receipt_name, write_receipt
from tokshard.build.records import (
    EMPTY,
    SPECIAL_TOKEN,
    BadRecord,
    Chunk,
    JsonLinesParser,
    LineChunk,
    Records,
    positions_array,
    utf8_size,
)
from tokshard.build.sources import check_unchanged
from tokshard.build.tasks import Key, StreamTask, Task
from tokshard.build.tokenizer import Encoder
from tokshard.build.workspace import WorkerContext, cannot_write
from tokshard.format.names import shard_name
from tokshard.format.schema import ShardFacts, token_dtype
from tokshard.format.writer import ShardWriter

_LENGTH_BUCKETS = 64


@dataclass(frozen=True, slots=True)
class Progress:
    """What was done since the last report."""

    input_bytes: int
    documents: int
    tokens: int


class RejectedRecordError(Exception):
    """A bad record under ``--on-bad-record fail``; the record is counted within the task and its input.

    The coordinator knows how many records come before, so it writes the message.
    """

    def __init__(self, source: int, record: int, reason: str, detail: str) -> None:
        super().__init__(source, record, reason, detail)
        self.source, self.record, self.reason, self.detail = source, record, reason, detail


class TaskRunner:
    """Runs tasks in this process. Costs the loading of the tokenizer to make.

    Args:
        report: is told of progress after every chunk.
    """

    def __init__(self, context: WorkerContext, report: Callable[[Progress], None]) -> None:
        self._context = context
        self._report = report
        self._encode = DocumentEncoder(Encoder(context.workspace.tokenizer), context.tokenizer)
        self._parse = JsonLinesParser(context.spec)
        self._facts = ShardFacts(
            dtype=token_dtype(context.tokenizer.vocab_size),
            tokenizer_sha256=context.tokenizer.canonical_sha256,
            eos_id=context.tokenizer.eos_id,
            bos_id=context.tokenizer.bos_id,
            columns=context.columns,
        )

    def run_task(self, task: Task, cap: int | None) -> Receipt:
        """Run a task of known extent.

        Args:
            cap: documents to write at most.

        Raises:
            RejectedRecordError, SourceError, UsageError, BuildError: the task left no receipt.
        """

        def chunks() -> Iterator[tuple[int, Chunk]]:
            for index, span in task.parts:
                source = self._context.inputs[index]
                check_unchanged(source)
                for chunk in read_span(source, span, self._context.spec):
                    yield index, chunk
                check_unchanged(source)

        sources = [index for index, _ in task.parts]
        return self._run(task.key, sources, chunks(), cap=cap, previous=None, is_last=lambda: True)

    def run_stream(
        self, task: StreamTask, cap: int | None, done: frozenset[int], on_receipt: Callable[[Receipt], None]
    ) -> None:
        """Run an input that is read from its start, all segments but those in `done`.

        Raises:
            SegmentError: with the segment and the error.
        """
        segments = open_segments(self._context, task)
        for segment in segments:
            try:
                if segment.number in done:
                    segment.skip()
                    continue
                receipt = self.run_segment(
                    task, segment.number, segment.previous, segment.chunks, cap=cap, is_last=segment.is_last
                )
            except Exception as error:
                raise SegmentError(segment.number, error) from error
            on_receipt(receipt)
            if cap is not None:
                cap -= receipt.documents
                if cap <= 0:
                    return

    def run_segment(
        self,
        task: StreamTask,
        number: int,
        previous: int | None,
        chunks: Iterable[Chunk],
        *,
        cap: int | None,
        is_last: Callable[[], bool],
    ) -> Receipt:
        """Run one segment of a stream.

        Args:
            is_last: asked when the chunks are used up.
        """
        index = task.key[0]
        pairs = ((index, chunk) for chunk in chunks)
        return self._run((index, number), [index], pairs, cap=cap, previous=previous, is_last=is_last)

    def _run(
        self,
        key: Key,
        sources: list[int],
        chunks: Iterator[tuple[int, Chunk]],
        *,
        cap: int | None,
        previous: int | None,
        is_last: Callable[[], bool],
    ) -> Receipt:
        workspace = self._context.workspace
        try:
            with contextlib.ExitStack() as stack:
                rejects = stack.enter_context(_RejectsFile(self._context, key))
                writer = stack.enter_context(
                    ShardWriter(
                        directory=workspace.out,
                        partial_directory=workspace.partial,
                        name=lambda part: shard_name(generation=0, first_input=key[0], segment=key[1], part=part),
                        facts=self._facts,
                        shard_tokens=self._context.shard_tokens,
                    )
                )
                tally = _Tally(sources, cap)
                for index, chunk in chunks:
                    records = self._parse(chunk) if isinstance(chunk, LineChunk) else chunk
                    self._write(writer, rejects, tally, index, records)
                    if tally.is_full:
                        break
                receipt = tally.receipt(key, previous=previous, is_last=is_last(), num_rejects=rejects.count)
                shards = writer.finish()
                rejects.publish()
                write_receipt(workspace.receipts, receipt, shards)
                return receipt
        except OSError as error:  # sources raise SourceError, so this is the output
            raise cannot_write(workspace.out, error) from error

    def _write(self, writer: ShardWriter, rejects: _RejectsFile, tally: _Tally, index: int, records: Records) -> None:
        encoded = self._encode(records.texts)
        ends, tokens, count = encoded.ends, encoded.tokens, records.count
        texts, positions = records.texts, positions_array(records)
        columns, bad = records.columns, records.bad
        if encoded.with_special:
            kept = sorted(set(range(len(texts))) - set(encoded.with_special))
            bad = sorted(
                [*bad, *(_special(records.positions[index]) for index in encoded.with_special)],
                key=lambda record: record.position,
            )
            texts = [texts[i] for i in kept]
            positions = positions[kept]
            columns = {name: [values[i] for i in kept] for name, values in columns.items()}
        room = tally.room
        if room is not None and len(texts) >= room:  # cut exactly after the last document that is wanted
            last = int(positions[room - 1])
            count = last + 1
            texts, positions, ends = texts[:room], positions[:room], ends[:room]
            tokens = tokens[: ends[-1]]
            bad = [record for record in bad if record.position < last]
        passed_over = [reason for position, reason in records.passed_over if position < count]
        counts = tally.counts[index]
        base = counts.records_read
        if bad:
            rejects.add(index, base, bad)
        for reason in [*passed_over, *(record.reason for record in bad)]:
            counts.left_out[reason] = counts.left_out.get(reason, 0) + 1
        num_empty = count - len(texts) - len(bad) - len(passed_over)
        if num_empty:
            counts.left_out[EMPTY] = counts.left_out.get(EMPTY, 0) + num_empty
        if len(texts):
            writer.extend(tokens, ends, source=index, records=positions + base, columns=columns)
        tally.add(index, count, texts, ends, records.input_bytes)
        self._report(Progress(records.input_bytes, len(texts), len(tokens)))


class SegmentError(Exception):
    """A segment of a stream failed; `error` says why."""

    def __init__(self, segment: int, error: Exception) -> None:
        super().__init__(segment, error)
        self.segment, self.error = segment, error


class Segment:
    """One segment of a stream being read: its chunks, to be used up before the next segment is asked for."""

    def __init__(self, stream: _Lookahead, number: int, previous: int | None) -> None:
        self._stream, self.number, self.previous = stream, number, previous

    @property
    def chunks(self) -> Iterator[Chunk]:
        """The chunks that are left of this segment."""
        while (found := self._stream.peek) is not None and found[0] == self.number:
            yield found[1]
            self._stream.advance()

    def skip(self) -> None:
        """Pass over what is left."""
        for _ in self.chunks:
            pass

    def is_last(self) -> bool:
        """Whether nothing follows; asked when the chunks are used up."""
        return self._stream.peek is None


class _Lookahead:
    def __init__(self, pairs: Iterator[tuple[int, Chunk]]) -> None:
        self._pairs = pairs
        self.peek: tuple[int, Chunk] | None = None
        self.advance()

    def advance(self) -> None:
        self.peek = next(self._pairs, None)


def open_segments(context: WorkerContext, task: StreamTask) -> Iterator[Segment]:
    """The segments of an input in order. An input without records has one segment without chunks.

    Raises:
        SegmentError: the input cannot be opened or its first bytes are damaged.
    """
    source = context.inputs[task.key[0]]

    def pairs() -> Iterator[tuple[int, Chunk]]:
        check_unchanged(source)
        yield from read_stream(source, context.spec, task_bytes=context.task_bytes)
        check_unchanged(source)

    try:
        stream = _Lookahead(pairs())
    except Exception as error:
        raise SegmentError(0, error) from error
    previous: int | None = None
    while True:
        number = 0 if stream.peek is None else stream.peek[0]
        yield Segment(stream, number, previous)
        previous = number
        if stream.peek is None:
            return


class _Tally:
    """Counts of one task."""

    def __init__(self, sources: list[int], cap: int | None) -> None:
        self.counts = {index: SourceCounts(index=index) for index in sources}
        self._cap = cap
        self._documents = 0
        self._input_bytes = 0
        self._lengths = np.zeros(_LENGTH_BUCKETS, np.int64)
        self._shortest, self._longest = 0, 0

    @property
    def room(self) -> int | None:
        """Documents that may still be written; None: any number."""
        return None if self._cap is None else self._cap - self._documents

    @property
    def is_full(self) -> bool:
        return self._cap is not None and self._documents >= self._cap

    def add(self, index: int, count: int, texts: list[str], ends: np.ndarray[Any, Any], input_bytes: int) -> None:
        counts = self.counts[index]
        counts.records_read += count
        counts.documents += len(texts)
        counts.text_bytes += sum(map(utf8_size, texts))
        self._documents += len(texts)
        self._input_bytes += input_bytes
        if not len(texts):
            return
        counts.tokens += int(ends[-1])
        lengths = np.diff(ends, prepend=0)
        # frexp gives m * 2**e with m in [0.5, 1): e - 1 is the floor of log2, exactly
        self._lengths += np.bincount(np.frexp(lengths)[1] - 1, minlength=_LENGTH_BUCKETS)
        shortest = int(lengths.min())
        self._shortest = min(self._shortest, shortest) if self._shortest else shortest
        self._longest = max(self._longest, int(lengths.max()))

    def receipt(self, key: Key, *, previous: int | None, is_last: bool, num_rejects: int) -> Receipt:
        used = np.flatnonzero(self._lengths)
        return Receipt(
            key=key,
            previous=previous,
            is_last=is_last,
            cap=self._cap,
            input_bytes=self._input_bytes,
            sources=list(self.counts.values()),
            length_counts=self._lengths[: used[-1] + 1].tolist() if len(used) else [],
            shortest=self._shortest,
            longest=self._longest,
            num_rejects=num_rejects,
        )


class _RejectsFile:
    """The bad records of one task, on disk, as JSON lines; records are counted within the task and its input."""

    def __init__(self, context: WorkerContext, key: Key) -> None:
        self._is_skipping = context.is_skipping
        name = f"{receipt_name(key)}.jsonl"
        self._final = context.workspace.rejects / name
        self._partial = context.workspace.partial / f".{name}.{os.getpid()}.partial"
        self._file: IO[str] | None = None
        self.count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def add(self, source: int, base: int, bad: list[BadRecord]) -> None:
        if not self._is_skipping:
            raise RejectedRecordError(source, base + bad[0].position, bad[0].reason, bad[0].detail)
        if self._file is None:
            self._file = self._partial.open("w", encoding="utf-8", errors="backslashreplace")
        for record in bad:
            line = {
                "source": source,
                "record": base + record.position,
                "reason": record.reason,
                "detail": record.detail,
            }
            self._file.write(json.dumps(line) + "\n")
        self.count += len(bad)

    def publish(self) -> None:
        if self._file is None:
            self._final.unlink(missing_ok=True)
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._partial, self._final)


def _special(position: int) -> BadRecord:
    detail = "the tokenizer gives this text the id of a special token, which would be read as control"
    return BadRecord(position, SPECIAL_TOKEN, detail)
