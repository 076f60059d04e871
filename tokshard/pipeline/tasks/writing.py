"""One task that writes: the documents of its chunks become shards, or a file for a shuffle, and a receipt."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.format.manifest import IN_OTHER_SPLIT
from tokshard.format.names import shard_name
from tokshard.format.writer import ShardWriter
from tokshard.pipeline.encode.documents import Documents, Made, split_documents
from tokshard.pipeline.encode.maker import Maker, Parsed
from tokshard.pipeline.options import SKIP
from tokshard.pipeline.request import Build
from tokshard.pipeline.sources.records import EMPTY
from tokshard.pipeline.tasks.duplicates import Drops, TaskDrops
from tokshard.pipeline.tasks.rejects import RejectsFile
from tokshard.pipeline.workspace.places import Output
from tokshard.pipeline.workspace.receipts import Key, OutputCounts, Progress, Receipt, SourceCounts

MARKS = "byte order mark dropped"
"""What is counted of texts that had one."""

_LENGTH_BUCKETS = 64


class Shards:
    """Where the documents of a task go: the shards that it writes into each corpus of a build.

    Leaving the context before `finish` removes what is unfinished.
    """

    def __init__(self, build: Build, key: Key) -> None:
        self._writers = [_shard_writer(build, key, output) for output in build.outputs]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for writer in self._writers:
            self._stack.enter_context(writer)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def extend(self, parts: Sequence[Documents], source: int, base: int) -> None:
        """Write documents, in order.

        Args:
            parts: those for each corpus.
            source: the input that they come from, unless they say it themselves.
            base: records of that input before those of the chunk.
        """
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
        """Close the last shards, and say in the receipt which there are."""
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
        facts=build.facts,
        shard_tokens=build.config.shard_tokens,
    )


class Writer:
    """Makes documents of chunks, and a `WritingTask` for each task.

    Args:
        make_sink: what makes `Shards`, or what takes their place.
        drops: which documents are duplicates; None if all are wanted.
    """

    def __init__(
        self,
        build: Build,
        stage: str,
        maker: Maker,
        *,
        make_sink: Callable[[Build, Key], Any] = Shards,
        drops: Drops | None = None,
    ) -> None:
        self.build, self.stage, self.maker = build, stage, maker
        self.make_sink, self.drops = make_sink, drops

    def prepare(self, parsed: Parsed, task: WritingTask | None = None) -> Made:
        """The documents of a chunk. A task that is given leaves out its duplicates before they are encoded."""
        return self.maker.make(parsed, None if task is None else task.is_kept(len(parsed.positions)))

    def begin(self, key: Key, sources: Sequence[int], max_documents: int | None) -> WritingTask:
        """A task to write, as a context."""
        return WritingTask(self, key, sources, max_documents)


class WritingTask:
    """The records of one task become documents, in order.

    Leaving the context before `finish` removes what is unfinished.

    Args:
        sources: the inputs that it reads; empty where documents say where they come from.
        max_documents: documents to write at most.

    Attributes:
        written: documents, up to now; those of a chunk that fails the task are counted too.
    """

    def __init__(self, writer: Writer, key: Key, sources: Sequence[int], max_documents: int | None) -> None:
        build = writer.build
        self._writer, self._key, self._max_documents = writer, key, max_documents
        self._rejects = RejectsFile(
            build.workspace.store, writer.stage, key, is_skipping=build.options.on_bad_record == SKIP
        )
        self._sink = writer.make_sink(build, key)
        self._tallies = [_Tally(sources, output) for output in build.outputs]
        self._drops: TaskDrops | None = None if writer.drops is None else writer.drops.of(key)
        self._admitted = 0
        self._input_bytes = 0
        self._fields: set[str] = set()
        self._changes: Counter[str] = Counter()
        self._stack = contextlib.ExitStack()
        self.written = 0

    def __enter__(self) -> Self:
        self._stack.enter_context(self._rejects)
        self._stack.enter_context(self._sink)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def is_full(self) -> bool:
        """Whether as many documents are written as may be."""
        return self._max_documents is not None and self.written >= self._max_documents

    def is_kept(self, count: int) -> NDArray[np.bool_]:
        """Which of the next `count` candidates are no duplicates: bool [count]."""
        self._admitted += count
        if self._drops is None:
            return np.ones(count, np.bool_)
        return self._drops.is_kept(self._admitted - count, count)

    def take(self, index: int, made: Made) -> Progress:
        """Write the documents of a chunk of an input."""
        if made.candidates is not None:
            made = made.without_duplicates(self.is_kept(len(made.candidates)))
        if self._max_documents is not None:
            made = made.head(self._max_documents - self.written)
        documents, bad = made.documents, made.bad
        base = self._tallies[0].records_of(index)
        self.written += len(documents)  # if the next line fails the task, it is known how many came before at most
        self._rejects.add(index, base, bad)
        parts = split_documents(documents)
        self._sink.extend(parts, index, base)
        for tally, part in zip(self._tallies, parts, strict=True):
            tally.add(index, made, part)
        self._input_bytes += made.input_bytes
        self._fields |= made.fields
        self._changes.update({what: len(found) for what, found in made.changes.items()})
        self._changes[MARKS] += made.num_marks
        example = f"{bad[0].reason}: {bad[0].detail}" if bad else ""
        return Progress(made.input_bytes, len(documents), len(documents.tokens), made.count, len(bad), example)

    def finish(self) -> Receipt:
        """Publish shards and rejects; the receipt is still to be written."""
        receipt: Receipt = self._sink.finish(
            Receipt(
                key=self._key,
                max_documents=self._max_documents,
                most_documents=self.written,
                input_bytes=self._input_bytes,
                outputs=[tally.counted() for tally in self._tallies],
                num_rejects=self._rejects.count,
                rejects_bytes=self._rejects.num_bytes,
                fields=sorted(self._fields),
                changes=dict(+self._changes),
            )
        )
        self._rejects.publish()
        return receipt


class _Tally:
    """Counts of one task in one corpus."""

    def __init__(self, sources: Sequence[int], output: Output) -> None:
        self._counts = {index: SourceCounts(index) for index in sources}
        self._elsewhere = IN_OTHER_SPLIT.get(output.split, "")
        self._lengths = np.zeros(_LENGTH_BUCKETS, np.int64)
        self._shortest, self._longest = 0, 0

    def records_of(self, index: int) -> int:
        """Records of an input that were read before."""
        return self._counts[index].records_read if index in self._counts else 0

    def add(self, index: int, made: Made, part: Documents) -> None:
        """Count a chunk.

        Args:
            index: the input that was read.
            part: the documents that this corpus gets.
        """
        if made.sources is None:
            self._count(index, made.count, made, part)
        else:
            for source in np.unique(made.sources[: made.count]).tolist():
                is_its = made.sources == source
                self._count(
                    source, int(is_its[: made.count].sum()), made.of(is_its), part.select(is_its[part.positions])
                )
        if not len(part):
            return
        lengths = part.lengths
        # frexp gives m * 2**e with m in [0.5, 1): e - 1 is the floor of log2, exactly
        self._lengths += np.bincount(np.frexp(lengths)[1] - 1, minlength=_LENGTH_BUCKETS)
        shortest = int(lengths.min())
        self._shortest = min(self._shortest, shortest) if self._shortest else shortest
        self._longest = max(self._longest, int(lengths.max()))

    def _count(self, source: int, count: int, made: Made, part: Documents) -> None:
        """Count `count` records of one source, of which `made` is what they became."""
        counts = self._counts.setdefault(source, SourceCounts(source))
        counts.records_read += count
        counts.documents += len(part)
        counts.tokens += len(part.tokens)
        counts.text_bytes += 0 if part.text_bytes is None else int(part.text_bytes.sum())
        counts.with_special_text += 0 if part.has_special is None else int(part.has_special.sum())
        reasons = Counter({reason: len(found) for reason, found in made.left_out.items()})
        reasons.update(record.reason for record in made.bad)
        reasons[self._elsewhere] += len(made.documents) - len(part)
        reasons[EMPTY] += count - len(part) - reasons.total()
        for reason, number in reasons.items():
            if number:
                counts.left_out[reason] = counts.left_out.get(reason, 0) + number

    def counted(self) -> OutputCounts:
        """For the receipt."""
        return OutputCounts(
            sources=list(self._counts.values()),
            length_counts=np.trim_zeros(self._lengths, "b").tolist(),
            shortest=self._shortest,
            longest=self._longest,
        )
