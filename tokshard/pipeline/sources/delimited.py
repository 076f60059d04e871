"""csv and tsv: each row is a record."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from tokshard.errors import UsageError
from tokshard.pipeline.sources.decompress import ByteSource, open_bytes
from tokshard.pipeline.sources.division import CHUNK_BYTES
from tokshard.pipeline.sources.inputs import TSV, Input
from tokshard.pipeline.sources.opening import damaged
from tokshard.pipeline.sources.records import (
    MALFORMED,
    TOO_LONG,
    Records,
    RecordSpec,
    RowBuffer,
    field_hint,
)


def delimited_chunks(input_: Input, spec: RecordSpec) -> Iterator[Records]:
    # a longer field raises an error; the default limit would refuse long documents
    csv.field_size_limit(spec.max_line_bytes)
    with open_bytes(input_) as stream:
        text = io.TextIOWrapper(
            io.BufferedReader(_Raw(stream), CHUNK_BYTES), encoding="utf-8", errors="surrogateescape", newline=""
        )
        lines = _CsvLines(text, spec.max_line_bytes)
        rows = csv.reader(lines, strict=True, delimiter="\t" if input_.format == TSV else ",")
        try:
            header = next(rows)
        except StopIteration:
            raise damaged(input_, "the file is empty, expected a header line") from None
        except csv.Error as error:
            raise damaged(input_, f"line {lines.count}: {error}") from error
        places = _csv_places(input_, header, spec)
        records = _csv_records(_csv_rows(rows, lines, len(header), spec.max_line_bytes), places, spec, stream)
        for chunk in records:
            chunk.num_marks, lines.num_marks = lines.num_marks, 0
            yield chunk


class _CsvLines:
    """The lines of a csv file.

    Args:
        max_chars: of a line; a longer one is never held, and raises a `csv.Error`.
    """

    def __init__(self, text: io.TextIOWrapper, max_chars: int) -> None:
        self._text, self._max_chars = text, max_chars
        self.count = 0
        self.num_quotes = 0
        """Quotes read since this was last set to 0."""
        self.num_marks = 0
        """Byte order marks that were dropped: at most 1."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        line = part = self._text.readline(self._max_chars)
        if not line:
            raise StopIteration
        self.count += 1
        self.num_quotes += line.count('"')
        while len(part) == self._max_chars and not part.endswith("\n"):
            part = self._text.readline(self._max_chars)
            self.num_quotes += part.count('"')
        if part is not line:
            raise csv.Error(_FIELD_TOO_LARGE)
        if self.count == 1 and line.startswith("\ufeff"):
            self.num_marks, line = 1, line[1:]
        return line

    def skip_record(self) -> None:
        """Skip the remaining lines of a record: at its end the number of its quotes is even."""
        while self.num_quotes % 2:
            with contextlib.suppress(csv.Error):
                if next(self, None) is None:
                    return


_FIELD_TOO_LARGE = "field larger than field limit"
"""The start of the csv module's own message."""


def _csv_places(input_: Input, header: Sequence[str], spec: RecordSpec) -> Mapping[str, int]:
    wanted = [spec.text_field, *(path for path, _ in spec.columns.values())]
    for path in wanted:
        if header.count(path) != 1:
            problem = f"{input_.location} has {header.count(path)} columns {path!r}; its header is {', '.join(header)}"
            if len(header) == 1 and (found := [mark for mark in ";\t|," if mark in header[0]]):
                known = "tabs" if input_.format == TSV else "commas"
                raise UsageError(
                    f"{problem}: its fields seem to be separated by {found[0]!r}, not by {known}",
                    hint="convert it to commas as .csv, or to tabs as .tsv",
                )
            raise UsageError(problem, hint=field_hint(path, spec, "column"))
    return {path: header.index(path) for path in wanted}


def _csv_rows(
    rows: Iterator[list[str]], lines: _CsvLines, num_fields: int, max_chars: int
) -> Iterator[tuple[list[str], tuple[str, str] | None]]:
    """The fields of each row, and the reason and detail if it is bad."""
    while True:
        lines.num_quotes = 0
        row: list[str] = []
        reason, problem = MALFORMED, ""
        try:
            row = next(rows) or [""] * num_fields  # an empty line is an empty record
        except StopIteration:
            return
        except csv.Error as error:
            problem = str(error)
        else:
            if len(row) != num_fields:
                problem = f"{len(row)} fields, the header has {num_fields}"
        line = lines.count
        if problem.startswith(_FIELD_TOO_LARGE):
            reason, problem = TOO_LONG, f"a field has more than {max_chars:,} characters"
            lines.skip_record()  # the rest of the field would be taken for rows
        yield row, (reason, f"line {line}: {problem}") if problem else None


def _csv_records(
    rows: Iterator[tuple[list[str], tuple[str, str] | None]],
    places: Mapping[str, int],
    spec: RecordSpec,
    stream: ByteSource,
) -> Iterator[Records]:
    buffer = RowBuffer(spec)
    text_place = places[spec.text_field]
    # an empty field is an empty string, or a missing value of any other type
    columns = [(places[path], "" if kind == "string" else None) for path, kind in spec.columns.values()]
    nothing = [None] * len(columns)
    reported = 0
    for row, problem in rows:
        text = None if problem else _escaped(row[text_place])
        if buffer.add(text, nothing if problem else [row[place] or empty for place, empty in columns], problem):
            here = stream.file_position()
            yield buffer.flush(here - reported)
            reported = here
    if buffer:
        yield buffer.flush(stream.file_position() - reported)


def _escaped(text: str) -> str | bytes:
    """The text; as bytes unless it is ASCII, so that invalid UTF-8 in it is found and reported."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape")


class _Raw(io.RawIOBase):
    """A `ByteSource` as a raw file."""

    def __init__(self, stream: ByteSource) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
