"""Records, which an input yields before encoding, and the reasons why a record does not become a document."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.schema import SUPPORTED_COLUMN_TYPES, TOKENS
from tokshard.interop.tokens.batches import TokenBatch, TokenSpec
from tokshard.interop.tokens.lists import USUAL_FIELDS
from tokshard.interop.tokens.loss import LOSS_FIELDS, STARTS
from tokshard.interop.tokens.rows import ROW_FIELDS
from tokshard.pipeline.options import READS
from tokshard.pipeline.sources.chats import CHAT_FIELDS, NO_CHAT
from tokshard.pipeline.sources.division import CHUNK_BYTES
from tokshard.pipeline.sources.kept_values import WrongTypeError, typed_value

MALFORMED = "malformed"
MISSING_TEXT = "missing text"
MISSING_IDS = "missing token ids"
NOT_A_STRING = "text is not a string"
INVALID_UTF8 = "invalid UTF-8"
TOO_LONG = "over max-document-bytes"
WRONG_TYPE = "kept field of another type"
SPECIAL_TOKEN = "special token in text"
NOT_ENCODED = "tokenizer fails on the text"
EMPTY = "empty"
UNREAD = "field not read: "
"""Prefix of the name of a field of conversations that is not read, in the counts."""

ROWS_PER_CHUNK = 1_024
"""The most records that are handled at once."""

NAME = "__name__"
"""Field of a text file: its path below the argument."""

FILE, LINE = "file", "line"
"""Values of ``--text-unit``; the third is ``paragraph``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSpec:
    """The parts of a record that a build reads.

    Args:
        text_field: dotted path of the text. As with every path, a field with exactly that name is preferred to a nested
            one.
        columns: kept column to (dotted path, type name).
        max_document_bytes: a longer text is a bad record; UTF-8 bytes.
        text_unit: the unit of plain text that becomes a document: `FILE`, `LINE` or ``paragraph``.
        tokens: how tokens are read; None if texts are read.
        is_chat: a text is a conversation, as JSON of the fields that it has.
    """

    text_field: str
    columns: Mapping[str, tuple[str, str]]
    max_document_bytes: int
    text_unit: str = FILE
    tokens: TokenSpec | None = None
    is_chat: bool = False

    @property
    def reads(self) -> str:
        """The kind of the records: one of `READS`."""
        return READS[self.tokens is not None]

    @property
    def object_fields(self) -> tuple[str, ...]:
        """The fields of a JSON object that are read together, as one text of JSON; none if one field is the text."""
        if self.tokens is None:
            return CHAT_FIELDS if self.is_chat else ()
        ids, loss = self.tokens.field, self.tokens.loss_field
        of_tokens = (*((ids,) if ids else USUAL_FIELDS), *((loss,) if loss else LOSS_FIELDS))
        return tuple(dict.fromkeys((*of_tokens, *ROW_FIELDS, STARTS)))

    @property
    def kept_paths(self) -> list[str]:
        """The dotted path of each kept column."""
        return [path for path, _ in self.columns.values()]

    @property
    def max_line_bytes(self) -> int:
        """A longer line is a bad record, never held in memory. JSON escapes can turn one byte into six."""
        return min(8 * self.max_document_bytes + (1 << 20), 1 << 62)  # a number that C can hold


Problem = tuple[str, str]
"""Why a record is bad: one of the constants of this module, and what was found, for a person."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot become a document.

    Args:
        position: index of the record in its chunk.
        reason: one of the constants of this module.
        detail: what was found, for a person.
    """

    position: int
    reason: str
    detail: str


@dataclass(slots=True)
class Records:
    """The parsed records of one chunk of an input.

    Args:
        count: all records in the chunk.
        texts: texts that can become documents.
        positions: index in the chunk of each text; ascending.
        columns: kept column to one value per text.
        bad: records that cannot become documents, by ascending position.
        num_empty: records whose text is empty.
        input_bytes: bytes of the input that the chunk stands for.
        fields: kept columns whose field at least one record has.
        num_marks: byte order marks that were dropped.
        unread: of conversations, field that the build does not read to the indices of the records that have it.
    """

    count: int = 0
    texts: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    bad: list[BadRecord] = field(default_factory=list)
    num_empty: int = 0
    input_bytes: int = 0
    fields: set[str] = field(default_factory=set)
    num_marks: int = 0
    unread: dict[str, list[int]] = field(default_factory=dict)

    def note_unread(self, position: int, names: Iterable[str]) -> None:
        """Note that a record has fields that the build does not read."""
        for name in names:
            self.unread.setdefault(name, []).append(position)

    def admit_all(self, spec: RecordSpec, texts: Sequence[str]) -> None:
        """Take the texts of all records of the chunk, in order. The caller adds the kept columns."""
        self.count = len(texts)
        if texts and all(texts) and max(map(len, texts)) * 4 <= spec.max_document_bytes:
            self.texts, self.positions = list(texts), list(range(len(texts)))
            return
        for position, text in enumerate(texts):
            self.admit(spec, position, text)

    def admit(self, spec: RecordSpec, position: int, text: str) -> bool:
        """Take a text as a document, or count it as empty or bad; returns whether it was taken."""
        if not text:
            self.num_empty += 1
            return False
        # a character has 1 to 4 bytes in UTF-8, so most texts need not be encoded to know that they fit
        if len(text) * 4 > spec.max_document_bytes and spec.tokens is None:
            num_bytes = len(text.encode())
            if num_bytes > spec.max_document_bytes:
                detail = f"text has {num_bytes:,} bytes, at most {spec.max_document_bytes:,} are allowed"
                self.bad.append(BadRecord(position, TOO_LONG, detail))
                return False
        self.texts.append(text)
        self.positions.append(position)
        return True

    def set_name(self, spec: RecordSpec, name: str) -> None:
        """Give the kept columns of the field `NAME` their value."""
        for column, (path, _) in spec.columns.items():
            if path == NAME:
                self.columns[column] = [name] * len(self.texts)
                self.fields.add(column)


def no_records(spec: RecordSpec) -> Records:
    """An empty chunk, to which records are added."""
    return Records(columns={name: [] for name in spec.columns})


@dataclass(slots=True)
class LineChunk:
    """Whole lines of one input, before they are parsed.

    Args:
        data: the lines, each with its newline; the last line may lack it.
        oversized_bytes: if not 0, the size of one more line, which follows `data` and is too long to be held.
        input_bytes: bytes of the input that the chunk stands for.
        stop: the place in the stream where the last of these lines ends.
        oversized_start: the first bytes of that line.
    """

    data: bytes
    oversized_bytes: int = 0
    input_bytes: int = 0
    stop: int = 0
    oversized_start: bytes = b""


Chunk = LineChunk | Records | TokenBatch

T = TypeVar("T")

_CONTENTS: Sequence[tuple[bytes, str]] = (
    (b"\x1f\x8b", "gzip; give the file a name that ends in .gz, or decompress it first"),
    (b"\x28\xb5\x2f\xfd", "zstd; give the file a name that ends in .zst, or decompress it first"),
    (b"BZh", "bzip2; give the file a name that ends in .bz2, or decompress it first"),
    (b"\xfd7zXZ\0", "xz; give the file a name that ends in .xz, or decompress it first"),
    (b"PK\3\4", "a zip archive; unpack it first"),
    (b"PAR1", "parquet; give the file a name that ends in .parquet"),
    (b"ARROW1", "Arrow; give the file a name that ends in .arrow"),
    (codecs.BOM_UTF16_LE, "UTF-16; save the file as UTF-8"),
    (codecs.BOM_UTF16_BE, "UTF-16; save the file as UTF-8"),
)


def content_of(data: bytes) -> str | None:
    """The likely content of bytes that are not UTF-8 or JSON, with advice; None if nothing is recognized."""
    for magic, what in _CONTENTS:
        if data.startswith(magic):
            return f"this looks like {what}"
    if data[:4] in {b"{\0\0\0", b"\0\0\0{"}:
        return "this looks like UTF-32; save the file as UTF-8"
    if data.startswith(b"\0\0") or data.endswith(b"\0\0"):  # which no text in UTF-16 does
        return (
            "these are NUL bytes: the file was cut off or preallocated when its machine stopped, or is sparse; "
            "take them out, and see what is missing"
        )
    if data[:1] in (b"{", b"\0") and data[:8].count(0) >= min(len(data), 8) // 2 > 0:
        return "this looks like UTF-16; save the file as UTF-8"
    return None


def admit_rows(
    spec: RecordSpec,
    texts: Sequence[Any],
    columns: Sequence[Sequence[Any]] | None = None,
    problems: Mapping[int, Problem] = MappingProxyType({}),
) -> Records:
    """Make records from values that are already parsed.

    Args:
        texts: str, bytes (checked for UTF-8), or None where the text is missing.
        columns: for each kept column, one value per text; None if no record has the field.
        problems: index of a record to its known problem; texts and values of such records are ignored.
    """
    records = Records(fields=set() if columns is None else set(spec.columns))
    kept, wrong = typed_columns(spec, columns or [])
    if problems or wrong or not _are_strings(texts):
        records.count = len(texts)
        for position, raw in enumerate(texts):
            text, problem = text_of(spec, raw)
            problem = problems.get(position) or problem or wrong.get(position)
            if problem:
                records.bad.append(BadRecord(position, *problem))
            else:
                records.admit(spec, position, text)
    else:
        records.admit_all(spec, texts)
    for name, values in zip(spec.columns, kept or [[None] * len(texts)] * len(spec.columns), strict=True):
        is_whole = len(records.texts) == len(texts)
        records.columns[name] = list(values) if is_whole else [values[position] for position in records.positions]
    return records


def _are_strings(texts: Sequence[Any]) -> bool:
    """Whether all texts are strings that UTF-8 can hold, that is, without lone surrogates."""
    try:
        return set(map(type, texts)) == {str} and all(text.isascii() or text.encode() for text in texts)
    except UnicodeError:
        return False


def text_of(spec: RecordSpec, raw: Any) -> tuple[str, Problem | None]:
    """The text of a record, from str, bytes or None; or its problem."""
    if raw is None:
        detail = f"it has {NO_CHAT}" if spec.is_chat else f"no value in field {spec.text_field!r}"
        return "", (MISSING_TEXT, detail)
    try:
        text: str = raw.decode() if isinstance(raw, bytes) else raw
        if not text.isascii():
            text.encode()  # raises for lone surrogates
    except UnicodeError as error:
        seems = content_of(raw) if isinstance(raw, bytes) else None
        return "", (INVALID_UTF8, seems or str(error))
    return text, None


def typed_columns(spec: RecordSpec, columns: Sequence[Sequence[Any]]) -> tuple[list[list[Any]], Mapping[int, Problem]]:
    """The kept columns in their requested types, and the problems of rows with a value of another type."""
    found: list[list[Any]] = []
    wrong: dict[int, Problem] = {}
    for (path, kind), values in zip(spec.columns.values(), columns, strict=False):
        typed: list[Any] = []
        for position, value in enumerate(values):
            try:
                typed.append(typed_value(value, kind))
                continue
            except WrongTypeError:
                problem = WRONG_TYPE, f"field {path!r} is {value!r:.80}, not {kind}"
            except RecursionError:
                problem = WRONG_TYPE, f"field {path!r} is nested too deeply"
            except UnicodeError as error:
                problem = INVALID_UTF8, f"field {path!r}: {error}"
            typed.append(None)
            wrong.setdefault(position, problem)
        found.append(typed)
    return found, wrong


def batches(items: Iterable[T], num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Batches of consecutive items: at most `ROWS_PER_CHUNK` items, until they have `CHUNK_BYTES`."""
    held: list[T] = []
    size = 0
    for item in items:
        held.append(item)
        size += num_bytes(item)
        if size >= CHUNK_BYTES or len(held) >= ROWS_PER_CHUNK:
            yield held
            held, size = [], 0
    if held:
        yield held


def counted(chunks: Iterable[Records], position: Callable[[int | None], int]) -> Iterator[tuple[None, Records]]:
    """Chunks of no certain place, with the bytes of the input that were read for each.

    Args:
        position: ``file_position`` of a `ByteSource`.
    """
    reported = 0
    for chunk in chunks:
        here = position(None)
        chunk.input_bytes, reported = here - reported, here
        yield None, chunk


def parse_columns(id_field: str | None, keep: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Parse ``--id-field`` and ``--keep-field FIELD[:TYPE]`` into column name to (dotted path, type).

    Raises:
        ValueError: a type is unknown, a name is empty or reserved, or two columns have the same name.
        UsageError: no reader accepts a name.
    """
    columns: dict[str, tuple[str, str]] = {}
    wanted = [("id", id_field, "string")] if id_field else []
    for item in keep:
        path, _, kind = item.partition(":")
        wanted.append((path, path, kind or "string"))
    for name, path, kind in wanted:
        if name in columns:
            raise ValueError(f"column {name!r} is kept twice")
        if not path:
            raise ValueError("the name of a kept field is empty")
        check_field_name(path)
        if path == NAME and kind != "string":
            raise ValueError(f"{NAME} is always a string")
        if name == TOKENS:
            raise ValueError(f"a kept column cannot be called {TOKENS!r}: that is the column of token ids")
        if kind not in SUPPORTED_COLUMN_TYPES:
            raise ValueError(f"{name}: unknown type {kind!r}, expected one of {', '.join(SUPPORTED_COLUMN_TYPES)}")
        columns[name] = (path, kind)
    return columns


def check_field_name(name: str) -> None:
    """Refuse a field name that JSON would have to escape.

    Raises:
        UsageError: it has a quote, backslash or control character, or is not UTF-8.
    """
    is_utf8 = not any("\ud800" <= character <= "\udfff" for character in name)
    if not is_utf8 or any(character in '"\\' or character < " " for character in name):
        raise UsageError(
            f"the field name {name!r} "
            + ("has a quote, backslash or control character" if is_utf8 else "is not UTF-8"),
            hint="rename the field in the source",
        )


def positions_array(records: Records) -> NDArray[np.int64]:
    """Positions of the texts as int64 [texts]."""
    positions = records.positions
    if positions and positions[-1] == len(positions) - 1:  # they ascend, so none is left out
        return np.arange(len(positions))
    return np.array(positions, np.int64)


def field_hint(path: str, spec: RecordSpec, what: str = "field") -> str:
    """The hint that names the option of a missing field."""
    if path == spec.text_field and spec.tokens is None:
        return f"give the {what} that holds the text with --text-field"
    is_id = path == spec.columns.get("id", ("",))[0]
    return f"name an existing {what} with {'--id-field' if is_id else '--keep-field'}, or leave the option out"


def value_bytes(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes) else 0
