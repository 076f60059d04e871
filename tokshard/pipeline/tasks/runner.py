"""One task, start to end: read, parse, encode, write, and leave a receipt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from tokshard.errors import BadSourceError, TokshardError
from tokshard.pipeline.failures import BadInputError, SegmentError
from tokshard.pipeline.sources.division import Span
from tokshard.pipeline.sources.formats import read_span, read_stream
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.json_lines import JsonLinesParser
from tokshard.pipeline.sources.opening import check_unchanged, vanished
from tokshard.pipeline.sources.records import Chunk, LineChunk
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.duplicates import run_merge
from tokshard.pipeline.tasks.hashing import TextHashers
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task, segment_bytes
from tokshard.pipeline.tasks.writing import DocumentWriters
from tokshard.pipeline.workspace.lease import cannot_write
from tokshard.pipeline.workspace.places import Stage
from tokshard.pipeline.workspace.receipts import Progress, Receipt


class TaskRunner:
    """Runs tasks of one stage in this process. To make one for encoding costs the loading of the tokenizer.

    Args:
        report: called with the progress after every chunk.
    """

    def __init__(self, context: WorkerContext, report: Callable[[Progress], None]) -> None:
        self._context = context
        self._report = report
        self._parse = JsonLinesParser(context.spec)
        self._maker = DocumentWriters(context) if context.workspace.stage is Stage.ENCODING else TextHashers(context)

    def run_task(self, task: Task, max_documents: int | None) -> Receipt:
        """Run a task of known extent.

        Args:
            max_documents: documents to write at most.

        Raises:
            TaskError, SourceError, UsageError, BuildError: the task left no receipt.
        """
        if task.merge is not None:
            with self._writing():
                return run_merge(self._context.workspace, task.key, task.merge)

        def chunks() -> Iterator[tuple[int, Chunk]]:
            for number, (index, span) in enumerate(task.parts):
                try:
                    for chunk in self._read(index, span):
                        yield index, chunk
                except BadInputError as damage:
                    if self._context.is_leaving_out:
                        raise BadInputError(index, damage.error, self._damage(task.parts[number + 1 :])) from damage
                    raise

        sources = [index for index, _ in task.parts]
        return self._run(task.key, sources, chunks(), max_documents=max_documents, previous=None, is_last=lambda: True)

    def _read(self, index: int, span: Span) -> Iterator[Chunk]:
        source = self._context.inputs[index]
        with blaming(source):
            check_unchanged(source)
            yield from read_span(source, span, self._context.spec)
            check_unchanged(source)

    def _damage(self, parts: Sequence[tuple[int, Span]]) -> tuple[BadInputError, ...]:
        """The other damage in the rest of a group. If each run found one damaged input, each would cost another run."""
        found = []
        for index, span in parts:
            try:
                for _ in self._read(index, span):
                    pass
            except BadInputError as damage:
                found.append(damage)
            except TokshardError:
                break  # not damage: the task will meet it again when it comes there
        return tuple(found)

    def run_stream(self, task: StreamTask, max_documents: int | None, done: frozenset[int]) -> Iterator[Receipt]:
        """Run an input that is read from its start, segment by segment, all but those in `done`.

        Raises:
            SegmentError: with the segment and the error.
        """
        for segment in open_segments(self._context, task):
            try:
                if segment.number in done:
                    segment.skip()
                    continue
                receipt = self.run_segment(
                    task,
                    segment.number,
                    segment.previous,
                    segment.chunks,
                    max_documents=max_documents,
                    is_last=segment.is_last,
                )
            except Exception as error:
                raise SegmentError(segment.number, error) from error
            yield receipt
            if max_documents is not None:
                max_documents -= receipt.documents
                if max_documents <= 0:
                    return

    def run_segment(
        self,
        task: StreamTask,
        number: int,
        previous: int | None,
        chunks: Iterable[Chunk],
        *,
        max_documents: int | None,
        is_last: Callable[[], bool],
    ) -> Receipt:
        """Run one segment of a stream.

        Args:
            is_last: whether the stream ends with this segment; called when the chunks are used up.
        """
        index = task.key[0]
        pairs = ((index, chunk) for chunk in chunks)
        return self._run(
            (index, number), [index], pairs, max_documents=max_documents, previous=previous, is_last=is_last
        )

    def _run(
        self,
        key: Key,
        sources: list[int],
        chunks: Iterator[tuple[int, Chunk]],
        *,
        max_documents: int | None,
        previous: int | None,
        is_last: Callable[[], bool],
    ) -> Receipt:
        with self._writing(), self._maker.begin(key, sources, max_documents) as work:
            for index, chunk in chunks:
                records = self._parse(chunk) if isinstance(chunk, LineChunk) else chunk
                self._report(work.take(index, records))
                if work.is_full:
                    break
            return work.finish(previous=previous, is_last=is_last())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # what is read names its file, so this is the output
            raise cannot_write(self._context.workspace.out, error) from error


@contextlib.contextmanager
def blaming(source: Input) -> Iterator[None]:
    """Name the input that turns out to be damaged, or cannot be read."""
    try:
        yield
    except BadSourceError as error:
        raise BadInputError(source.index, error) from error
    except OSError as error:
        raise BadInputError(source.index, vanished(source, error)) from error


class Segment:
    """One segment of a stream. Its chunks have to be used up before the next segment is asked for."""

    def __init__(self, stream: _Lookahead, number: int, previous: int | None) -> None:
        self._stream, self.number, self.previous = stream, number, previous

    @property
    def chunks(self) -> Iterator[Chunk]:
        """The chunks of this segment that were not read yet."""
        while (found := self._stream.peek) is not None and found[0] == self.number:
            yield found[1]
            self._stream.advance()

    def skip(self) -> None:
        """Read to the end of the segment and drop what is read."""
        for _ in self.chunks:
            pass

    def is_last(self) -> bool:
        """Whether the stream ends with this segment. To be asked when its chunks are used up."""
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
        with blaming(source):
            check_unchanged(source)
            yield from read_stream(source, context.spec, task_bytes=segment_bytes(context.task_bytes))
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
