"""Sources that can be read only once: the build spools them into its workspace, and they are files from then on.

Standard input is spooled as its bytes, an iterable of a Python program as its records. Tasks, resumed builds, jobs and
nodes read the file. Where a limit says that the beginning is enough, no more is read, until the build asks for it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import select
import shutil
from collections.abc import Iterator, Sequence
from typing import IO

import msgspec
import zstandard

from tokshard.errors import ConfigurationChangedError, UsageError
from tokshard.pipeline.progress import Note, Observer, StageEnded, StageStarted
from tokshard.pipeline.request import Build
from tokshard.pipeline.sources.decompress import open_bytes
from tokshard.pipeline.sources.division import CHUNK_BYTES
from tokshard.pipeline.sources.inputs import Input, RecordSource, read_once_name
from tokshard.pipeline.sources.iterables import encoded_rows
from tokshard.pipeline.sources.opening import vanished
from tokshard.pipeline.sources.records import ROWS_PER_CHUNK
from tokshard.pipeline.workspace.receipts import Progress, Spooled, forget_spooled, save_spooled, spooled_name
from tokshard.store import written
from tokshard.version import __version__
from tokshard.wording import bytes_text

SPOOLING = "spool"
"""Name of the stage, which has no tasks."""

_LEVEL = 1
_RECORDS_MORE = 2 * ROWS_PER_CHUNK
"""Records beyond twice the limit on documents: some may be bad, and a last chunk is read with its end."""
_PATIENCE_SECONDS = 10.0
"""How long a resumed build waits for a first byte of standard input, which may be a pipe that nobody writes to."""


class _Reading:
    """A source that is being read, piece by piece.

    Args:
        pieces: bytes, and how many more records they give a reader that does not see their end.

    Attributes:
        num_bytes, num_records: taken so far.
    """

    def __init__(self, pieces: Iterator[tuple[bytes, int]]) -> None:
        self._pieces, self._sha256 = pieces, hashlib.sha256()
        self.num_bytes = self.num_records = 0

    @property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the bytes taken so far."""
        return self._sha256.hexdigest()

    def head(self, size: int) -> bytes:
        """The first `size` bytes, or a few more; fewer if there are no more. They are not taken."""
        held, left = list[tuple[bytes, int]](), size
        while left > 0 and (found := next(self._pieces, None)) is not None:
            held.append(found)
            left -= len(found[0])
        self._pieces = itertools.chain(held, self._pieces)
        return b"".join(piece for piece, _ in held)

    def take(self) -> bytes:
        """The next piece; empty at the end."""
        piece, num_records = next(self._pieces, (b"", 0))
        self._sha256.update(piece)
        self.num_bytes, self.num_records = self.num_bytes + len(piece), self.num_records + num_records
        return piece


class Spooler:
    """Spools the sources of a build that can be read only once.

    Args:
        sources: all sources of the build, in order.
    """

    def __init__(self, sources: Sequence[str | RecordSource], observer: Observer) -> None:
        self._sources, self._observer = sources, observer
        self._readings: dict[int, _Reading] = {}

    def spooled(self, build: Build, *, is_continued: bool) -> Build:
        """The build with all its inputs in files. Spooled inputs are not read again.

        Args:
            is_continued: some results depend on the spooled data.

        Raises:
            ConfigurationChangedError: such results exist, and another stream came.
            SourceError: a source cannot be read.
            UsageError: the first job gets no data.
        """
        if not build.inputs.once:
            return build
        inputs = build.inputs.at(build.inputs.roots)
        for input_ in (inputs[index] for index in inputs.once):
            facts, settings_digest = inputs.spooled.get(input_.index), self._settings_digest(build, input_)
            if facts is not None and facts.settings_digest == settings_digest and self._is_same(build, input_, facts):
                size, name = bytes_text(facts.num_bytes), read_once_name(input_.location)
                self._observer(Note(f"the build continues with the {size} of {name} that it read before"))
                if facts.is_cut and _limit(build) is None:
                    self._write(build, input_, facts, settings_digest)
            elif is_continued:
                raise _other_stream(build, input_)
            else:
                self._write(build, input_, None, settings_digest)
        return msgspec.structs.replace(build, inputs=inputs.at(inputs.roots))

    def with_more(self, build: Build) -> Build:
        """The build with at least twice as many records of each stream that was cut.

        Raises:
            ConfigurationChangedError: this process has not read the spooled data, and gets another stream.
            SourceError: a source cannot be read.
        """
        inputs = build.inputs
        for index, facts in inputs.spooled.items():
            if facts.is_cut:
                self._write(build, inputs[index], facts, facts.settings_digest)
        return msgspec.structs.replace(build, inputs=inputs.at(inputs.roots))

    def _settings_digest(self, build: Build, input_: Input) -> str:
        source = self._sources[input_.argument]
        if not isinstance(source, RecordSource):
            return ""
        spec = build.spec
        parts = (__version__, str(source), spec.text_field, sorted(spec.columns.items()), spec.is_chat)
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()

    def _reading(self, build: Build, input_: Input) -> _Reading:
        if input_.index not in self._readings:
            source = self._sources[input_.argument]
            pieces = _standard_input(input_)
            if isinstance(source, RecordSource):
                pieces = ((row, 1) for row in encoded_rows(source, build.spec))
            self._readings[input_.index] = _Reading(pieces)
        return self._readings[input_.index]

    def _is_same(self, build: Build, input_: Input, facts: Spooled) -> bool:
        """Whether a stream starts like the spooled one, or is empty."""
        is_pipe = not isinstance(self._sources[input_.argument], RecordSource)
        if is_pipe and (os.isatty(0) or not select.select([0], [], [], _PATIENCE_SECONDS)[0]):
            return True
        found = self._reading(build, input_).head(CHUNK_BYTES)
        with open_bytes(input_) as stream:
            start = stream.read(min(len(found), facts.num_bytes))
        is_enough = len(found) >= min(CHUNK_BYTES, facts.num_bytes)
        is_more = len(found) > facts.num_bytes and not facts.is_cut
        return not found or (found.startswith(start) and is_enough and not is_more)

    def _write(self, build: Build, input_: Input, before: Spooled | None, settings_digest: str) -> None:
        """Spool a source, after the part of it that was spooled before."""
        store, reading, limit = build.workspace.store, self._reading(build, input_), _limit(build)
        if before is None:
            forget_spooled(store, input_.index)
        else:
            while reading.num_bytes < before.num_bytes and reading.take():
                pass
            if (reading.num_bytes, reading.sha256) != (before.num_bytes, before.sha256):
                raise _other_stream(build, input_)
        wanted = None if limit is None else max(2 * limit + _RECORDS_MORE, 2 * reading.num_records)
        name = spooled_name(input_.index, reading.num_bytes)
        self._observer(StageStarted(build=build, name=SPOOLING, tasks=(), done=()))
        try:
            with written(store, name) as file:
                if before is not None:
                    with store.open(before.name) as earlier:
                        shutil.copyfileobj(earlier, file, CHUNK_BYTES)
                is_cut = self._compress(reading, file, wanted)
        finally:
            self._observer(StageEnded())
        if build.is_array and not reading.num_bytes:
            raise UsageError(
                f"{read_once_name(input_.location)} is empty, and no other job has read it yet",
                hint="begin with the job that gets it",
            )
        facts = Spooled(
            name=name,
            settings_digest=settings_digest,
            num_bytes=reading.num_bytes,
            sha256=reading.sha256,
            num_records=reading.num_records,
            is_cut=is_cut,
        )
        save_spooled(store, input_.index, facts)

    def _compress(self, reading: _Reading, file: IO[bytes], wanted: int | None) -> bool:
        """Write the next pieces as a frame, until there are so many records; returns whether more may follow."""
        piece, reported = b" ", reading.num_bytes
        with zstandard.ZstdCompressor(_LEVEL, write_checksum=True).stream_writer(file, closefd=False) as frame:
            while piece and (wanted is None or reading.num_records < wanted):
                piece = reading.take()
                frame.write(piece)
                if reading.num_bytes - reported >= CHUNK_BYTES or not piece:
                    self._observer(Progress(input_bytes=reading.num_bytes - reported))
                    reported = reading.num_bytes
        return bool(piece)


def _limit(build: Build) -> int | None:
    """The limit for which the beginning is enough; None in an array, because its commit could not read on."""
    return None if build.is_array else build.options.max_documents


def _standard_input(input_: Input) -> Iterator[tuple[bytes, int]]:
    """Chunks, each with the lines of the chunk before: without an end, a reader may not see the lines of the last."""
    num_lines = 0
    try:
        with open(0, "rb", closefd=False) as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece, num_lines
                num_lines = piece.count(b"\n")
    except OSError as error:
        raise vanished(input_, error) from error


def _other_stream(build: Build, input_: Input) -> ConfigurationChangedError:
    return ConfigurationChangedError(
        f"{build.workspace.out} belongs to another build: {read_once_name(input_.location)} is not the data "
        "that it has read",
        hint=f"give it again from its start, give another --out, or {build.start_over}",
    )
