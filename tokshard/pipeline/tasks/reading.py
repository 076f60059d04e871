"""Reading inputs for tasks: each error names its input, and a file that changes while it is read is refused."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from tokshard.errors import BadSourceError, CorpusError, TokshardError
from tokshard.pipeline.encode.documents import Made
from tokshard.pipeline.request import Build
from tokshard.pipeline.sources.corpora import CorporaReader
from tokshard.pipeline.sources.division import Span
from tokshard.pipeline.sources.formats import read_span, read_stream
from tokshard.pipeline.sources.inputs import DOCUMENTS, Input
from tokshard.pipeline.sources.opening import check_unchanged, open_file, vanished
from tokshard.pipeline.sources.records import Chunk
from tokshard.pipeline.tasks.planning import segment_bytes
from tokshard.pipeline.workspace.receipts import Failure, TaskFailedError


class InputReader:
    """Reads the inputs of a build in this process."""

    def __init__(self, build: Build) -> None:
        self._build = build

    def chunks(self, index: int, span: Span) -> Iterator[Chunk | Made]:
        """The chunks of a part of an input.

        Raises:
            TaskFailedError: the input is damaged or gone.
            SourceError: it was modified since the build began.
            UsageError: it has no such field.
        """
        source = self._build.inputs[index]
        with _errors_of(source):
            if source.format == DOCUMENTS:
                yield from self._corpora.read(index)
                return
            check_unchanged(source)
            yield from read_span(source, span, self._build.spec)
            check_unchanged(source)

    def numbered_chunks(self, index: int, first: int) -> Iterator[tuple[int, Chunk]]:
        """The chunks of a stream from a segment on, each with the number of its segment.

        Raises:
            TaskFailedError, SourceError, UsageError: as `chunks`.
        """
        source = self._build.inputs[index]
        with _errors_of(source):
            check_unchanged(source)
            chunks = read_stream(source, self._build.spec, task_bytes=segment_bytes(self._build.config.task_bytes))
            yield from ((number, chunk) for number, chunk in chunks if number >= first)
            check_unchanged(source)

    def check(self, index: int) -> None:
        """Check that an input is there, unchanged, and can be opened.

        Raises:
            TaskFailedError: it cannot be read.
            SourceError: it was modified since the build began.
        """
        source = self._build.inputs[index]
        with _errors_of(source):
            if source.format == DOCUMENTS:
                self._corpora.read(index)
                return
            check_unchanged(source)
            with open_file(source) as file:
                file.read(1)

    @functools.cached_property
    def _corpora(self) -> CorporaReader:
        copied = self._build.config.copied
        assert copied is not None, "only a copy reads documents"
        return CorporaReader(self._build.corpora, self._build.columns, copied)


@contextlib.contextmanager
def _errors_of(source: Input) -> Iterator[None]:
    """Name the input that turns out to be damaged, or cannot be read."""
    try:
        yield
    except (BadSourceError, CorpusError) as error:
        raise TaskFailedError(_damage(source, error)) from error
    except OSError as error:
        raise TaskFailedError(_damage(source, vanished(source, error))) from error


def _damage(source: Input, error: TokshardError) -> Failure:
    return Failure(
        kind="input", source=source.index, problem=error.problem, hint=error.hint, error=type(error).__name__
    )
