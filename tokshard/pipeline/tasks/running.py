"""Runs one task from start to end: read, make documents, write, and leave a receipt, even of a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokshard.errors import BadSourceError, CorpusError, CutSourceError, SourceError, TokshardError, UsageError
from tokshard.forking import cached_property
from tokshard.pipeline.encode.documents import ChunkResult, apply_rules, split_documents
from tokshard.pipeline.encode.maker import Maker
from tokshard.pipeline.options import DOCUMENTS
from tokshard.pipeline.request import Build, saved_tokenizer
from tokshard.pipeline.sources.corpora import CorporaReader
from tokshard.pipeline.sources.division import Span
from tokshard.pipeline.sources.formats import read_span, read_stream
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.opening import check_unchanged, open_file, vanished
from tokshard.pipeline.sources.records import Chunk
from tokshard.pipeline.sources.selected import Selection
from tokshard.pipeline.tasks.cells import Cells
from tokshard.pipeline.tasks.duplicates import Drops, EarlierTexts, HashSink, find
from tokshard.pipeline.tasks.exchange import Dealt, Levels, redeal
from tokshard.pipeline.tasks.planning import AnyTask, Run, StepTask, StreamTask, Task, segment_bytes
from tokshard.pipeline.tasks.shuffle import DealSink, gathered
from tokshard.pipeline.tasks.writing import Shards, Sink, WritingTask
from tokshard.pipeline.workspace.lease import cannot_write
from tokshard.pipeline.workspace.places import HASH
from tokshard.pipeline.workspace.receipts import (
    Failure,
    Key,
    OutputCounts,
    Progress,
    Receipt,
    TaskFailedError,
    file_path,
    write_receipt,
)


class InputReader:
    """Reads the inputs of a build in this process."""

    def __init__(self, build: Build) -> None:
        self._build, self._start_over = build, build.start_over

    def chunks(self, index: int, span: Span) -> Iterator[Chunk | ChunkResult]:
        """The chunks of a part of an input.

        Raises:
            TaskFailedError: the input is damaged or gone.
            SourceError: it was modified since the build began.
            UsageError: it has no such field.
        """
        source = self._build.inputs[index]
        with _errors_of(source):
            if self._build.corpora:
                yield from self._corpora.read(index)
                return
            check_unchanged(source, self._start_over)
            yield from read_span(source, span, self._build.spec)
            check_unchanged(source, self._start_over)

    def numbered_chunks(self, index: int, first: int) -> Iterator[tuple[int, Chunk]]:
        """The chunks of a stream from a segment on, each with its segment's number.

        Raises:
            TaskFailedError, SourceError, UsageError: as `chunks`.
        """
        source = self._build.inputs[index]
        with _errors_of(source):
            check_unchanged(source, self._start_over)
            chunks = read_stream(source, self._build.spec, task_bytes=segment_bytes(self._build.config.task_bytes))
            yield from ((number, chunk) for number, chunk in chunks if number >= first)
            check_unchanged(source, self._start_over)

    def end(self, index: int, chunks: Iterable[Any]) -> None:
        """Make the checks that follow the last chunk of an input, where a limit has ended the reading before it.

        Args:
            chunks: the rest. A shard is read to its end, behind which it is compared with its hashes.

        Raises:
            TaskFailedError, SourceError: as `chunks`.
        """
        source = self._build.inputs[index]
        if self._build.corpora:
            for _ in chunks:
                pass
            return
        with _errors_of(source):
            check_unchanged(source, self._start_over)

    def check(self, index: int) -> None:
        """Check that an input is there, unchanged, and can be opened.

        Raises:
            TaskFailedError: it cannot be read.
            SourceError: it was modified since the build began.
        """
        source = self._build.inputs[index]
        with _errors_of(source):
            if self._build.corpora:
                self._corpora.read(index)
                return
            check_unchanged(source, self._start_over)
            with open_file(source) as file:
                file.read(1)

    @cached_property
    def _corpora(self) -> CorporaReader | Selection:
        build = self._build
        if build.config.selected is not None:
            return Selection(*build.corpora[0], build.config.selected, build.options)
        return CorporaReader(build.corpora, build.columns)


@contextlib.contextmanager
def _errors_of(source: Input) -> Iterator[None]:
    """Name the input that is damaged or cannot be read."""
    try:
        yield
    except (BadSourceError, CorpusError) as error:
        raise TaskFailedError(_damage(source, error)) from error
    except OSError as error:
        raise TaskFailedError(_damage(source, vanished(source, error))) from error


def _damage(source: Input, error: TokshardError) -> Failure:
    place = f"{source.location} "
    place = place if error.problem.startswith(place) else ""
    problem = error.problem.removeprefix(place)
    name, hint = type(error).__name__, error.hint
    if source.format == DOCUMENTS:
        hint = f"{hint}, or leave the shard out with --on-bad-source skip"
    return Failure(kind="input", source=source.index, place=place, problem=problem, hint=hint, error=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a build.

    Args:
        name: the folder of its receipts; the constants of `tokshard.pipeline.workspace.places`, or one with a number.
        tasks: all tasks, in order.
        limit: the most documents to write; None: all.
        inputs_digest: digest of all that its tasks read besides their sources.
        left_out: index of each input that is left out as damaged, with its damage.
        drops: the duplicate texts; None to keep all.
        levels: how its tasks deal rows.
        dealt: the rows that its tasks read.
        earlier, hashed: to find duplicates: the texts of earlier generations, and `Drops.tasks`.
        has_files: whether the files of its tasks for later stages must exist.
    """

    name: str
    tasks: Sequence[AnyTask]
    limit: int | None = None
    inputs_digest: str = ""
    left_out: Mapping[int, str] = field(default_factory=dict)
    drops: Drops | None = None
    levels: Levels | None = None
    dealt: Dealt | None = None
    earlier: Sequence[EarlierTexts] = ()
    hashed: NDArray[np.int64] | None = None
    has_files: bool = True


PrepareAll = Callable[[Iterable[tuple[int, Chunk]]], Iterator[tuple[int, ChunkResult]]]
"""Prepares the chunks of a stream, each with the number of its segment, in order; perhaps in other processes."""

LASTING_ERRORS = (TaskFailedError, SourceError, UsageError, CorpusError)
"""Errors of a task that would recur. Other errors leave no receipt, because the next run may succeed."""


class TaskRunner:
    """Runs tasks of one stage in this process. The tokenizer is loaded when the first text is encoded.

    Args:
        report: called with the progress after every chunk.
    """

    def __init__(self, build: Build, stage: Stage, report: Callable[[Progress], None]) -> None:
        self._build, self._stage, self._report = build, stage, report
        self._store, self._reader = build.workspace.store, InputReader(build)
        self._maker = Maker(build, lambda: saved_tokenizer(build))

    def run(self, run: Run, prepare_all: PrepareAll | None = None) -> Iterator[Receipt]:
        """Run a task. Yields its receipt, or one for each segment of a stream, once it is on disk.

        Args:
            prepare_all: for a stream: prepares its chunks.

        Raises:
            BuildError: something failed that may succeed in another run.
        """
        task = run.task
        try:
            if isinstance(task, StreamTask):
                yield from self._stream(run, task, prepare_all)
            elif isinstance(task, StepTask):
                yield self._leave(self._step(task), task.inputs_digest)
            else:
                yield self._leave(self._task(run, task))
        except OSError as error:  # errors of inputs name their file, so this one is of the output
            raise cannot_write(self._build.workspace.out, error) from error

    def prepare(self, chunk: Chunk | ChunkResult, work: WritingTask | None = None) -> ChunkResult:
        """Prepare a chunk: documents, or hashes of texts. The result depends only on the chunk.

        Args:
            work: the task that reads it: it leaves out duplicates before they are encoded.
        """
        parsed = self._maker.parse(chunk)
        if self._stage.name == HASH:
            return self._maker.hashed(parsed)
        return self._maker.make(parsed, None if work is None else work.is_kept)

    @contextlib.contextmanager
    def _writing(self, key: Key, sources: Sequence[int], max_documents: int | None) -> Iterator[WritingTask]:
        """The rest of a task, after its chunks are prepared. Leaving it early removes unfinished files."""
        drops = None if self._stage.drops is None else self._stage.drops.of(key)
        with contextlib.ExitStack() as stack:
            sink = self._sink(key, stack)
            yield WritingTask(
                self._build, self._stage.name, key, sources, max_documents, sink=sink, stack=stack, drops=drops
            )

    def _sink(self, key: Key, stack: contextlib.ExitStack) -> Sink:
        if self._stage.name == HASH:
            return HashSink(self._store, key, stack)
        if self._build.config.selected is not None:
            return Cells(self._build.config.selected.by)
        levels = self._stage.levels
        return Shards(self._build, key, stack) if levels is None else DealSink(self._build, key, stack, levels=levels)

    def _leave(self, receipt: Receipt, digest: str | None = None) -> Receipt:
        digest = self._stage.inputs_digest if digest is None else digest
        receipt = msgspec.structs.replace(receipt, inputs_digest=digest)
        write_receipt(self._store, self._stage.name, receipt)
        return receipt

    def _task(self, run: Run, task: Task) -> Receipt:
        """Run a task of known extent. If damaged inputs are left out, a group restarts without each one it finds."""
        left_out = {index: found for index, found in self._stage.left_out.items() if index in task.inputs}
        most = 0
        while True:
            inputs = [index for index in task.inputs if index not in left_out]
            index, work = task.key[0], None
            try:
                with self._writing(task.key, [] if self._build.corpora else inputs, run.max_documents) as work:
                    for index in inputs:
                        if work.is_full:
                            break
                        self._take_all(work, index, self._reader.chunks(index, task.span))
                    receipt = work.finish()
                most = max(most, receipt.most_documents)
                return msgspec.structs.replace(receipt, left_out=left_out, most_documents=most)
            except LASTING_ERRORS as error:
                failure, most = _failure(error), max(most, 0 if work is None else work.written)
            if failure.kind != "input" or not task.is_group or not self._build.is_leaving_out:
                return Receipt(key=task.key, failure=failure, max_documents=run.max_documents, most_documents=most)
            left_out[index] = failure.problem
            if run.max_documents is None:
                left_out.update(self._damage(range(index + 1, task.stop)))

    def _take_all(self, work: WritingTask, index: int, chunks: Iterable[Any], *, is_prepared: bool = False) -> None:
        """Write the documents of chunks, until there are enough."""
        source = iter(chunks)
        while not work.is_full and (chunk := next(source, None)) is not None:
            self._report(work.take(index, chunk if is_prepared else self.prepare(chunk, work)))
        if work.is_full:
            self._reader.end(index, source)

    def _damage(self, inputs: Iterable[int]) -> Mapping[int, str]:
        """Other damage in the rest of a group. Otherwise each damaged input would cost another run."""
        found = {}
        for index in inputs:
            try:
                for _ in self._reader.chunks(index, Span()):
                    pass
            except TaskFailedError as error:
                found[index] = error.failure.problem
            except TokshardError:
                break  # no damage: the task will meet it again when it comes there
        return found

    def _stream(self, run: Run, task: StreamTask, prepare_all: PrepareAll | None) -> Iterator[Receipt]:
        """Run a stream from the first segment without a receipt."""
        index, room = task.key[0], run.max_documents
        chunks: Iterator[tuple[int, Any]] = self._reader.numbered_chunks(index, run.num_done)
        if self._stage.name == HASH:  # no limit ends it, so it treats the beginning of an endless stream as all of it
            chunks = _up_to_cut(chunks)
        segment = run.num_done
        ahead: _Lookahead | None = None
        while True:
            key, work = (index, segment), None
            try:
                with self._writing(key, [index], room) as work:
                    ahead = ahead or _Lookahead(chunks if prepare_all is None else prepare_all(chunks))
                    self._take_all(work, index, ahead.segment(segment), is_prepared=prepare_all is not None)
                    receipt = work.finish()
            except LASTING_ERRORS as error:
                failure, most = _failure(error), 0 if work is None else work.written
                receipt = Receipt(key=key, failure=failure, max_documents=room, most_documents=most)
            receipt = self._leave(msgspec.structs.replace(receipt, is_last=ahead is not None and ahead.is_at_end))
            yield receipt
            room = None if room is None else room - receipt.documents
            if receipt.failure is not None or receipt.is_last or (room is not None and room <= 0):
                return
            segment += 1

    def _step(self, task: StepTask) -> Receipt:
        stage, name = self._stage, file_path(self._stage.name, task.key)
        assert stage.dealt is not None, "all steps read what was dealt"
        if task.kind == "gather":
            return self._gather(task, stage.dealt)
        assert stage.levels is not None, "all others deal"
        if task.kind == "find":
            assert stage.hashed is not None
            return find(name, task, stage.dealt, stage.levels, earlier=stage.earlier, hashed=stage.hashed)
        return redeal(name, task, stage.dealt, stage.levels)

    def _gather(self, task: StepTask, dealt: Dealt) -> Receipt:
        with contextlib.ExitStack() as stack:
            shards = Shards(self._build, task.key, stack)
            for documents in gathered(dealt, task.start, task.stop):
                # the split follows from the tokens, as it did when the documents were dealt
                made = apply_rules(ChunkResult(count=0, input_bytes=0, documents=documents), self._build.config)
                shards.extend(split_documents(made.documents), 0, 0)
                self._report(Progress(documents.tokens.nbytes, len(documents), len(documents.tokens)))
            empty = [OutputCounts() for _ in self._build.outputs]
            receipt = shards.finish(Receipt(key=task.key, outputs=empty))
        num_bytes = sum(size for output in receipt.outputs for size in output.shards.values())
        return msgspec.structs.replace(receipt, input_bytes=num_bytes)


def _up_to_cut(chunks: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    with contextlib.suppress(CutSourceError):
        yield from chunks


class _Lookahead:
    """Numbered chunks, with a lookahead of one."""

    def __init__(self, pairs: Iterator[tuple[int, Any]]) -> None:
        self._pairs = pairs
        self._next: tuple[int, Any] | None = next(pairs, None)

    def segment(self, number: int) -> Iterator[Any]:
        """The chunks of a segment that are not read yet."""
        while self._next is not None and self._next[0] == number:
            yield self._next[1]
            self._next = next(self._pairs, None)

    @property
    def is_at_end(self) -> bool:
        """Whether no chunk follows."""
        return self._next is None


def _failure(error: Exception) -> Failure:
    """The failure in a receipt, from an error."""
    if isinstance(error, TaskFailedError):
        return error.failure
    assert isinstance(error, TokshardError)
    return Failure(kind="other", problem=error.problem, hint=error.hint, error=type(error).__name__)
