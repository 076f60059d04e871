"""csv and tsv: each row is a record."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

from tokshard.errors import UsageError
from tokshard.numbers import ceil_div
from tokshard.pipeline.sources.decompress import ByteSource, open_bytes
from tokshard.pipeline.sources.division import CHUNK_BYTES, Span
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.opening import damaged
from tokshard.pipeline.sources.protocol import Format
from tokshard.pipeline.sources.records import (
    MALFORMED,
    TOO_LONG,
    Problem,
    Records,
    RecordSpec,
    admit_rows,
    batches,
    content_of,
    counted,
    field_hint,
    value_bytes,
)


def _chunks(input_: Input, _: Span, spec: RecordSpec) -> Iterator[tuple[None, Records]]:
    # the default limit would refuse long documents; never lowered, as all threads of the process share it
    csv.field_size_limit(max(csv.field_size_limit(), spec.max_line_bytes))
    with open_bytes(input_) as stream:
        raw = io.BufferedReader(_Raw(stream), ceil_div(CHUNK_BYTES, 16))  # what is read ahead counts as read
        lines = _Lines(io.TextIOWrapper(raw, "utf-8", "surrogateescape", newline=""), spec.max_line_bytes)
        rows = csv.reader(lines, strict=True, delimiter="\t" if input_.format == TSV.name else ",")
        try:
            header = next(rows)
        except StopIteration:
            raise damaged(input_, "the file is empty, expected a header line") from None
        except csv.Error as error:
            raise damaged(input_, f"{_where(1, lines.count)}: {error}") from error
        found = _records_of(_rows(rows, lines, header, _places(input_, header, spec), spec), spec)
        for place, chunk in counted(found, stream.file_position):
            chunk.num_marks, lines.num_marks = lines.num_marks, 0
            yield place, chunk


def _records_of(rows: Iterable[tuple[Sequence[Any], Problem | None]], spec: RecordSpec) -> Iterator[Records]:
    for held in batches(rows, lambda row: sum(map(value_bytes, row[0]))):
        texts, *columns = zip(*(row for row, _ in held), strict=True)
        problems = {place: problem for place, (_, problem) in enumerate(held) if problem is not None}
        yield admit_rows(spec, texts, columns, problems)


class _Lines:
    """The lines of a csv file.

    Args:
        max_chars: the most characters of a line; a longer line is never held, and raises a `csv.Error`.
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
        """Skip the remaining lines of a record, up to an even number of quotes."""
        while self.num_quotes % 2:
            with contextlib.suppress(csv.Error):
                if next(self, None) is None:
                    return


_FIELD_TOO_LARGE = "field larger than field limit"
"""The start of the csv module's own message."""


def _places(input_: Input, header: Sequence[str], spec: RecordSpec) -> list[int]:
    """The column of the text, and of each kept field."""
    wanted = [spec.text_field, *spec.kept_paths]
    path = next((path for path in wanted if header.count(path) != 1), None)
    if path is None:
        return list(map(header.index, wanted))
    shown = ", ".join(header).encode("utf-8", "surrogateescape")
    if seems := content_of(shown):
        raise damaged(input_, seems)
    problem = f"{input_.location} has {header.count(path)} columns {path!r}; its header is "
    problem += shown.decode(errors="backslashreplace")
    hint = field_hint(path, spec, "column")
    if len(header) == 1 and (found := [mark for mark in ";\t|," if mark in header[0]]):
        known = "tabs" if input_.format == TSV.name else "commas"
        problem += f": its fields seem to be separated by {found[0]!r}, not by {known}"
        hint = "convert it to commas as .csv, or to tabs as .tsv"
    raise UsageError(problem, hint=hint)


def _rows(
    rows: Iterator[list[str]], lines: _Lines, header: Sequence[str], places: Sequence[int], spec: RecordSpec
) -> Iterator[tuple[Sequence[Any], Problem | None]]:
    """The text and the kept values of each row, or its problem if it is bad."""
    text_place, *kept = places
    nothing = [None] * len(places)
    # an empty field is an empty string, or a missing value of any other type
    empty = ["" if kind == "string" else None for _, kind in spec.columns.values()]
    columns = list(zip(kept, empty, strict=True))
    while True:
        lines.num_quotes, first = 0, lines.count + 1
        reason, detail = MALFORMED, ""
        try:
            row = next(rows) or [""] * len(header)  # an empty line is an empty record
            if len(row) != len(header):
                detail = f"{len(row)} fields, the header has {len(header)}"
            if max(map(len, row)) > spec.max_line_bytes:
                detail = _FIELD_TOO_LARGE
        except StopIteration:
            return
        except csv.Error as error:
            detail = str(error)
        if detail.startswith(_FIELD_TOO_LARGE):
            reason, detail = TOO_LONG, f"a field has more than {spec.max_line_bytes:,} characters"
            lines.skip_record()  # the rest of the field would be taken for rows
        if detail:
            yield nothing, (reason, f"{_where(first, lines.count)}: {detail}")
            continue
        text = row[text_place]
        # as bytes, so that invalid UTF-8 in it is found and reported
        found = text if text.isascii() else text.encode("utf-8", "surrogateescape")
        yield (found, *[row[place] or empty for place, empty in columns]), None


def _where(first: int, last: int) -> str:
    """The lines of a record: a quote that is never closed makes one of all the rows behind it."""
    return f"line {first}" if first >= last else f"lines {first} to {last}"


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


CSV = Format(name="csv", read=_chunks, suffixes=(".csv",), is_compressible=True)
TSV = Format(name="tsv", read=_chunks, suffixes=(".tsv",), is_compressible=True)
