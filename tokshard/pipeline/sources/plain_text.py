"""Documents of plain text: a whole file, a line, or a paragraph."""

from __future__ import annotations

import codecs
import itertools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from tokshard.pipeline.sources.decompress import open_bytes
from tokshard.pipeline.sources.division import INDIVISIBLE, LINES, STREAM, Divisibility, Span
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.lines import line_chunks, lines_of
from tokshard.pipeline.sources.protocol import Format
from tokshard.pipeline.sources.records import (
    FILE,
    LINE,
    TOO_LONG,
    LineChunk,
    Problem,
    Records,
    RecordSpec,
    admit_rows,
    batches,
)

_BLANK_LINES = re.compile(rb"(?m)(?:^[ \t\r\f\v]*\n)+")


def _without_mark(data: bytes) -> tuple[bytes, int]:
    """The start of a text without its byte order mark, and the number of marks dropped: 0 or 1."""
    text = data.removeprefix(codecs.BOM_UTF8)
    return text, int(len(text) < len(data))


def _chunks(input_: Input, span: Span, spec: RecordSpec) -> Iterator[tuple[int, Records]]:
    name = input_.path or os.path.basename(input_.location)
    if spec.text_unit == FILE:
        found = _whole_text(input_, spec)
    elif spec.text_unit == LINE:
        lines = lines_of(input_, span, _max_line_bytes(spec))
        found = ((place, _line_documents(place, chunk, spec)) for place, chunk in lines)
    else:
        found = _paragraphs(input_, spec)
    for place, records in found:
        records.set_name(spec, name)
        yield place, records


def _divisibility(input_: Input, text_unit: str) -> Divisibility:
    if text_unit == FILE:
        return INDIVISIBLE
    return LINES if text_unit == LINE and input_.compression is None else STREAM


FORMAT = Format(name="txt", read=_chunks, divide=_divisibility, suffixes=(".txt",), is_compressible=True)


def _whole_text(input_: Input, spec: RecordSpec) -> Iterator[tuple[int, Records]]:
    """A file as one document. If it is too long, no more than the limit is held."""
    with open_bytes(input_) as stream:
        data, num_marks = _without_mark(stream.read(len(codecs.BOM_UTF8) + spec.max_document_bytes + 1))
    detail = f"the file holds more than {spec.max_document_bytes:,} bytes of text"
    records = admit_rows(spec, [data], None, {0: (TOO_LONG, detail)} if len(data) > spec.max_document_bytes else {})
    records.input_bytes, records.num_marks = input_.num_bytes, num_marks
    yield 0, records


def _line_documents(place: int, chunk: LineChunk, spec: RecordSpec) -> Records:
    r"""Each line as a document, without its ``\n`` or ``\r\n``. The first chunk may start with a byte order mark."""
    data, num_marks = (chunk.data, 0) if place else _without_mark(chunk.data)
    try:
        lines: list[Any] = [line.removesuffix("\r") for line in data.decode().split("\n")]
    except UnicodeDecodeError:
        lines = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    if not lines[-1]:
        lines.pop()  # a newline ends the last line and does not start another
    problems = {}
    if chunk.oversized_bytes:
        problems[len(lines)] = _too_long(spec, "line", chunk.oversized_bytes)
        lines.append(None)
    records = admit_rows(spec, lines, None, problems)
    records.input_bytes, records.num_marks = chunk.input_bytes, num_marks
    return records


def _paragraphs(input_: Input, spec: RecordSpec) -> Iterator[tuple[int, Records]]:
    """The documents between blank lines. A chunk has the documents that start in one chunk of lines."""
    reported = 0
    with open_bytes(input_) as stream:
        for place, found in itertools.groupby(_split(stream.read, spec), lambda one: one[0]):
            for held in batches(found, lambda one: len(one[1])):
                _, texts, sizes, marks, stops = zip(*held, strict=True)
                too_long = [number for number, size in enumerate(sizes) if size > _max_line_bytes(spec)]
                problems = {number: _too_long(spec, "paragraph", sizes[number]) for number in too_long}
                records, here = admit_rows(spec, texts, None, problems), stream.file_position(stops[-1])
                records.num_marks = sum(marks)
                records.input_bytes, reported = here - reported, here
                yield place, records


def _split(read: Callable[[int], bytes], spec: RecordSpec) -> Iterator[tuple[int, bytes, int, int, int]]:
    """Cut a text at its blank lines, which hold only white space and belong to no paragraph.

    Yields:
        The place of the chunk of lines in which a paragraph starts; its text, empty if it is too long; its size; the
        number of byte order marks dropped before it; and the place where the next one may start.
    """
    start = num_bytes = num_marks = stop = 0
    parts: list[bytes] = []
    for place, chunk in line_chunks(read, _max_line_bytes(spec)):
        data, is_marked = (chunk.data, 0) if place else _without_mark(chunk.data)
        num_marks += is_marked
        if data and not data.endswith(b"\n"):
            data += b"\n"  # ends the last line, so that the pattern finds it if it is blank
        pieces = _BLANK_LINES.split(data)
        stop = chunk.stop
        stops = [stop - len(data) + blank.end() for blank in _BLANK_LINES.finditer(data)]
        for number, piece in enumerate(pieces, 1):
            start = start if num_bytes else place
            num_bytes += len(piece) + (chunk.oversized_bytes if number == len(pieces) else 0)
            parts = [*parts, piece] if num_bytes <= _max_line_bytes(spec) else []
            if num_bytes and number < len(pieces):
                yield start, _joined(parts), num_bytes, num_marks, stops[number - 1]
                parts, num_bytes, num_marks = [], 0, 0
    if num_bytes:
        yield start, _joined(parts), num_bytes, num_marks, stop


def _max_line_bytes(spec: RecordSpec) -> int:
    """The longest line that a document can hold, with any line ending and a byte order mark."""
    return spec.max_document_bytes + len(b"\r\n") + len(codecs.BOM_UTF8)


def _joined(parts: list[bytes]) -> bytes:
    return b"".join(parts).removesuffix(b"\n").removesuffix(b"\r")


def _too_long(spec: RecordSpec, what: str, num_bytes: int) -> Problem:
    return TOO_LONG, f"{what} has {num_bytes:,} bytes, at most {spec.max_document_bytes:,} are allowed"
