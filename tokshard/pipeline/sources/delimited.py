"""csv and tsv, one row a record."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from tokshard.errors import UsageError
from tokshard.pipeline.sources.decompress import ByteSource, open_bytes
from tokshard.pipeline.sources.division import CHUNK_BYTES
from tokshard.pipeline.sources.inputs import TSV, Input, damaged
from tokshard.pipeline.sources.records import (
    MALFORMED,
    ROWS_PER_CHUNK,
    TOO_LONG,
    Records,
    RecordSpec,
    admit_rows,
    field_hint,
    value_bytes,
)


def delimited_chunks(input_: Input, spec: RecordSpec) -> Iterator[Records]:
    # a field longer than this raises; the largest the type allows is far above what memory should hold
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
    """The lines of a csv file; of one that is too long to be held comes a `csv.Error`.

    Args:
        max_chars: of a line.
    """

    def __init__(self, text: io.TextIOWrapper, max_chars: int) -> None:
        self._text, self._max_chars = text, max_chars
        self.count = 0
        self.num_quotes = 0
        """Since it was last set to 0."""
        self.num_marks = 0
        """Byte order marks that were dropped: 1 at most."""

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
        """Pass over the lines of a record whose first ones were read: its quotes are even at its end."""
        while self.num_quotes % 2:
            with contextlib.suppress(csv.Error):
                if next(self, None) is None:
                    return


_FIELD_TOO_LARGE = "field larger than field limit"
"""What the csv module says too."""


def _csv_places(input_: Input, header: Sequence[str], spec: RecordSpec) -> Mapping[str, int]:
    wanted = [spec.text_field, *(path for path, _ in spec.columns.values())]
    for path in wanted:
        if header.count(path) != 1:
            problem = f"{input_.location} has {header.count(path)} columns {path!r}; its header is {', '.join(header)}"
            if len(header) == 1 and (found := [mark for mark in ";\t|," if mark in header[0]]):
                known = "tabs" if input_.format == TSV else "commas"
                raise UsageError(
                    f"{problem}: its fields seem to be divided by {found[0]!r}, not by {known}",
                    hint="write it again with commas as .csv, or with tabs as .tsv",
                )
            raise UsageError(problem, hint=field_hint(path, spec, "column"))
    return {path: header.index(path) for path in wanted}


def _csv_rows(
    rows: Iterator[list[str]], lines: _CsvLines, num_fields: int, max_chars: int
) -> Iterator[tuple[list[str], tuple[str, str] | None]]:
    """The fields of each row, and reason and detail of what is wrong with it."""
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
            lines.skip_record()  # what is left of the field would be taken for rows
        yield row, (reason, f"line {line}: {problem}") if problem else None


def _csv_records(
    rows: Iterator[tuple[list[str], tuple[str, str] | None]],
    places: Mapping[str, int],
    spec: RecordSpec,
    stream: ByteSource,
) -> Iterator[Records]:
    texts: list[Any] = []
    columns: dict[str, list[Any]] = {name: [] for name in spec.columns}
    broken: dict[int, tuple[str, str]] = {}
    size, reported = 0, 0

    def flush() -> Records:
        nonlocal texts, columns, broken, size, reported
        here = stream.file_position()
        records = admit_rows(spec, texts, columns, input_bytes=here - reported, broken=broken)
        reported = here
        texts, columns, broken, size = [], {name: [] for name in spec.columns}, {}, 0
        return records

    for row, problem in rows:
        if problem:
            broken[len(texts)] = problem
        texts.append(None if problem else _escaped(row[places[spec.text_field]]))
        size += value_bytes(texts[-1])
        for name, (path, kind) in spec.columns.items():
            value = None if problem else row[places[path]]
            columns[name].append(None if kind != "string" and not value else value)
            size += value_bytes(value)
        if size >= CHUNK_BYTES or len(texts) >= ROWS_PER_CHUNK:
            yield flush()
    if texts:
        yield flush()


def _escaped(text: str) -> str | bytes:
    """Bytes where the text holds what was not UTF-8, so that it is reported as that."""
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
