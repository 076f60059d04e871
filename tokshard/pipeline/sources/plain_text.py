"""Documents of plain text: a whole file, a line, or a paragraph."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator

from tokshard.pipeline.sources.division import CHUNK_BYTES
from tokshard.pipeline.sources.lines import line_chunks
from tokshard.pipeline.sources.records import ROWS_PER_CHUNK, TOO_LONG, LineChunk, Records, RecordSpec, admit_rows

_BLANK_LINES = re.compile(rb"(?m)(?:^[ \t\r\f\v]*\n)+")


def whole_text(read: Callable[[int], bytes], spec: RecordSpec, *, input_bytes: int) -> Records:
    """All bytes of `read` as one document; of a document that is too long, no more than the limit is held."""
    data, num_marks = without_mark(read(len(codecs.BOM_UTF8) + spec.max_document_bytes + 1))
    if len(data) > spec.max_document_bytes:
        detail = f"the file holds more than {spec.max_document_bytes:,} bytes of text"
        return _records(spec, [None], {0: (TOO_LONG, detail)}, input_bytes, num_marks)
    return _records(spec, [data], {}, input_bytes, num_marks)


def without_mark(data: bytes) -> tuple[bytes, int]:
    """The start of a text without its byte order mark, and the number of marks dropped: 0 or 1."""
    text = data.removeprefix(codecs.BOM_UTF8)
    return text, int(len(text) < len(data))


def line_documents(index: int, chunk: LineChunk, spec: RecordSpec) -> Records:
    r"""Each line as a document, without its ``\n`` or ``\r\n``. Chunk 0 may start with a byte order mark."""
    data, num_marks = without_mark(chunk.data) if index == 0 else (chunk.data, 0)
    lines: list[bytes | None] = list(data.split(b"\n"))
    if not lines[-1]:
        lines.pop()  # a newline ends the last line and does not start another
    if b"\r" in chunk.data:
        lines = [line and line.removesuffix(b"\r") for line in lines]
    broken = {}
    if chunk.oversized_bytes:
        broken[len(lines)] = _too_long(spec, "line", chunk.oversized_bytes)
        lines.append(None)
    return _records(spec, lines, broken, chunk.input_bytes, num_marks)


def max_text_line_bytes(spec: RecordSpec) -> int:
    """A longer line is too long for a document, whatever ends it."""
    return spec.max_document_bytes + len(b"\r\n")


def paragraphs(
    read: Callable[[int], bytes], spec: RecordSpec, *, position: Callable[[], int]
) -> Iterator[tuple[int, Records]]:
    """The documents between blank lines. A blank line holds nothing but white space, and is not part of a document.

    Yields:
        Index of the chunk of `CHUNK_BYTES` in which the documents start, ascending, and the documents.
    """
    batch = _Paragraphs(spec)
    chunks = line_chunks(read, start=0, stop=None, max_line_bytes=max_text_line_bytes(spec), position=position)
    for index, chunk in chunks:
        batch.input_bytes += chunk.input_bytes
        data, num_marks = without_mark(chunk.data) if index == 0 else (chunk.data, 0)
        batch.num_marks += num_marks
        done = 0
        if data and not data.endswith(b"\n"):
            data += b"\n"  # ends the last line, so that the pattern finds it if it is blank
        for blank in _BLANK_LINES.finditer(data):
            if batch.add(index, data[done : blank.start()]):
                yield batch.flush()
            batch.close()
            done = blank.end()
        if batch.add(index, data[done:]):
            yield batch.flush()
        if batch.add(index, b"", oversized_bytes=chunk.oversized_bytes):
            yield batch.flush()
    batch.close()
    if batch.is_filled:
        yield batch.flush()


class _Paragraphs:
    """Complete paragraphs, and the current one. A paragraph that is too long is counted, not held."""

    def __init__(self, spec: RecordSpec) -> None:
        self._spec = spec
        self._texts: list[bytes | None] = []
        self._broken: dict[int, tuple[str, str]] = {}
        self._size = 0
        self._index = 0
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._start = 0
        self.input_bytes = 0
        self.num_marks = 0

    @property
    def is_filled(self) -> bool:
        return bool(self._texts)

    def add(self, index: int, lines: bytes, *, oversized_bytes: int = 0) -> bool:
        """Append lines to the current paragraph; True if the complete ones should be flushed now."""
        num_bytes = len(lines) + oversized_bytes
        if not num_bytes:
            return False
        if not self._num_bytes:
            self._start = index
        self._num_bytes += num_bytes
        if self._num_bytes <= max_text_line_bytes(self._spec):
            self._lines.append(lines)
        else:
            self._lines.clear()
        return self.is_filled and (
            self._start != self._index or self._size >= CHUNK_BYTES or len(self._texts) >= ROWS_PER_CHUNK
        )

    def close(self) -> None:
        """End the current paragraph, if there is one."""
        if not self._num_bytes:
            return
        text = None
        if self._num_bytes <= max_text_line_bytes(self._spec):
            text = b"".join(self._lines).removesuffix(b"\n").removesuffix(b"\r")
            self._size += len(text)
        else:
            self._broken[len(self._texts)] = _too_long(self._spec, "paragraph", self._num_bytes)
        self._index = self._start
        self._texts.append(text)
        self._lines.clear()
        self._num_bytes = 0

    def flush(self) -> tuple[int, Records]:
        """Return the complete paragraphs, and the index of the chunk in which they start."""
        records = _records(self._spec, self._texts, self._broken, self.input_bytes, self.num_marks)
        self._texts, self._broken, self._size, self.input_bytes, self.num_marks = [], {}, 0, 0, 0
        return self._index, records


def _records(
    spec: RecordSpec,
    texts: list[bytes | None],
    broken: dict[int, tuple[str, str]],
    input_bytes: int,
    num_marks: int,
) -> Records:
    columns = dict.fromkeys(spec.columns, [None] * len(texts))
    records = admit_rows(spec, texts, columns, input_bytes=input_bytes, broken=broken)
    records.fields, records.num_marks = set(), num_marks
    return records


def _too_long(spec: RecordSpec, what: str, num_bytes: int) -> tuple[str, str]:
    return TOO_LONG, f"{what} has {num_bytes:,} bytes, at most {spec.max_document_bytes:,} are allowed"
