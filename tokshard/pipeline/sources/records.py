"""Records: what an input yields before encoding, and the reasons why a record does not become a document."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.schema import SUPPORTED_COLUMN_TYPES, TOKENS

MALFORMED = "malformed"

MISSING_TEXT = "missing text"

NOT_A_STRING = "text is not a string"

INVALID_UTF8 = "invalid UTF-8"

TOO_LONG = "over max-document-bytes"

WRONG_TYPE = "kept field of another type"

SPECIAL_TOKEN = "special token in text"

NOT_ENCODED = "tokenizer fails on the text"

EMPTY = "empty"

ROWS_PER_CHUNK = 1_024
"""Records that are handled at once, at most."""

FILE, LINE, PARAGRAPH = TEXT_MODES = ("file", "line", "paragraph")
"""Values of ``--text-mode``."""

_COLUMN_TYPES: Mapping[str, type] = {"string": str, "int64": int, "float64": float, "bool": bool}

_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSpec:
    """Which parts of a record matter.

    Args:
        text_field: dotted path of the text. A field of that very name goes before a nested one, as for all paths.
        columns: column name to (dotted path, type name), for the kept metadata.
        max_document_bytes: a longer text is a bad record; UTF-8 bytes.
        text_mode: what a document is in plain text: one of `TEXT_MODES`.
    """

    text_field: str
    columns: Mapping[str, tuple[str, str]]
    max_document_bytes: int
    text_mode: str = FILE

    @property
    def max_line_bytes(self) -> int:
        """A longer line is a bad record that is never held in memory: JSON escapes can make six bytes of one."""
        return 8 * self.max_document_bytes + (1 << 20)


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
    """The parsed records of one chunk of one input.

    Args:
        count: records in the chunk, all of them.
        texts: the texts that can become documents.
        positions: index in the chunk of each text; ascending.
        columns: kept column to one value per text.
        bad: the records that cannot, by ascending position.
        num_empty: records whose text is empty.
        passed_over: (index in the chunk, reason) of records that are not meant to be read, by ascending index.
        input_bytes: bytes of the input that the chunk stands for.
        fields: the kept columns that some record has a field for.
        num_marks: byte order marks that were dropped.
    """

    count: int = 0
    texts: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    bad: list[BadRecord] = field(default_factory=list)
    num_empty: int = 0
    passed_over: list[tuple[int, str]] = field(default_factory=list)
    input_bytes: int = 0
    fields: set[str] = field(default_factory=set)
    num_marks: int = 0

    def admit_all(self, spec: RecordSpec, texts: list[str]) -> None:
        """Take the texts of all records of the chunk, in order; none has values to keep."""
        self.count = len(texts)
        if texts and all(texts) and max(map(len, texts)) * 4 <= spec.max_document_bytes:
            self.texts, self.positions = texts, list(range(len(texts)))
            return
        for position, text in enumerate(texts):
            self.admit(spec, position, text, {})

    def admit(self, spec: RecordSpec, position: int, text: str, values: Mapping[str, Any]) -> None:
        """Take a text as a document, or count it as empty or bad."""
        if not text:
            self.num_empty += 1
            return
        # len is a lower bound of the UTF-8 size, and exact for ASCII
        if len(text) * 4 > spec.max_document_bytes:
            num_bytes = utf8_size(text)
            if num_bytes > spec.max_document_bytes:
                detail = f"text has {num_bytes:,} bytes, at most {spec.max_document_bytes:,} are allowed"
                self.bad.append(BadRecord(position, TOO_LONG, detail))
                return
        for name in spec.columns:
            self.columns[name].append(values[name])
        self.texts.append(text)
        self.positions.append(position)


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def utf8_sizes(texts: Sequence[str]) -> int:
    """Bytes of all texts in UTF-8: `utf8_size` of each, at a quarter of the cost for short ones."""
    others = [text for text in texts if not text.isascii()]
    return sum(map(len, texts)) + sum(len(text.encode()) - len(text) for text in others)


@dataclass(frozen=True, slots=True)
class LineChunk:
    """Whole lines of one input, not parsed yet.

    Args:
        data: the lines, each with its newline but perhaps the last.
        oversized_bytes: if not 0, one more line of so many bytes follows, too long to be kept.
        input_bytes: bytes of the input that the chunk stands for.
    """

    data: bytes
    oversized_bytes: int
    input_bytes: int


Chunk = LineChunk | Records

_CONTENTS: Sequence[tuple[bytes, str]] = (
    (b"\x1f\x8b", "gzip; give the file a name that ends in .gz"),
    (b"\x28\xb5\x2f\xfd", "zstd; give the file a name that ends in .zst"),
    (b"BZh", "bzip2; give the file a name that ends in .bz2"),
    (b"\xfd7zXZ\0", "xz; give the file a name that ends in .xz"),
    (b"PK\3\4", "a zip archive; unpack it first"),
    (b"PAR1", "parquet; give the file a name that ends in .parquet"),
    (b"ARROW1", "Arrow; give the file a name that ends in .arrow"),
    (codecs.BOM_UTF16_LE, "UTF-16; save the file as UTF-8"),
    (codecs.BOM_UTF16_BE, "UTF-16; save the file as UTF-8"),
)


def content_of(data: bytes) -> str | None:
    """What bytes that are not UTF-8 text or not JSON seem to be, and what to do; None: nothing that is known."""
    for magic, what in _CONTENTS:
        if data.startswith(magic):
            return f"this looks like {what}"
    if data[:1] in (b"{", b"\0") and data[:8].count(0) >= min(len(data), 8) // 2 > 0:
        return "this looks like UTF-16; save the file as UTF-8"
    return None


class WrongTypeError(Exception):
    """A kept field is not of the type that was asked for."""


def typed_value(value: Any, kind: str) -> Any:
    """The value of a kept field of a source that has types of its own (parquet, Arrow, csv).

    Raises:
        WrongTypeError: it is not of the type that was asked for.
        UnicodeError: it is not UTF-8.
    """
    if value is None:
        return None
    if isinstance(value, bytes):
        value = value.decode()
    if kind == "string":
        return _as_string(value)
    if isinstance(value, str):
        return _parsed_value(value.strip(), kind)
    wanted = _COLUMN_TYPES[kind]
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not wanted or (wanted is int and value not in _INT64):
        raise WrongTypeError
    return value


def _parsed_value(text: str, kind: str) -> Any:
    """A value of csv, as other programs write it there: ``True``, ``007``, ``nan``.

    Raises:
        WrongTypeError: it is not of that type.
    """
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise WrongTypeError
        return text.lower() == "true"
    try:
        if "_" in text:  # which only Python takes
            raise ValueError
        value: Any = _COLUMN_TYPES[kind](text)
        if value in (math.inf, -math.inf) and "inf" not in text.lower():
            raise ValueError  # too large for a float
    except ValueError as error:
        raise WrongTypeError from error
    if kind == "int64" and value not in _INT64:
        raise WrongTypeError
    return value


def _as_string(value: Any) -> str:
    """What JSON lines with the same value would give, where JSON has such a value."""
    if isinstance(value, str):
        value.encode()  # raises for lone surrogates
        return value
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def admit_rows(
    spec: RecordSpec,
    texts: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    *,
    input_bytes: int,
    broken: Mapping[int, tuple[str, str]] = MappingProxyType({}),
) -> Records:
    """Records from values that are parsed already.

    Args:
        texts: str, bytes (checked for UTF-8), or None where there is none.
        columns: kept column to one value per text.
        broken: index to (reason, detail) of records that are known to be bad; what stands for them is not looked at.
    """
    records = Records(
        count=len(texts),
        input_bytes=input_bytes,
        columns={name: [] for name in spec.columns},
        fields=set(spec.columns),
    )
    for position, raw in enumerate(texts):
        if position in broken:
            records.bad.append(BadRecord(position, *broken[position]))
            continue
        if raw is None:
            records.bad.append(BadRecord(position, MISSING_TEXT, f"no value in field {spec.text_field!r}"))
            continue
        try:
            text = raw.decode() if isinstance(raw, bytes) else raw
            if not text.isascii():
                text.encode()  # raises for lone surrogates
        except UnicodeError as error:
            seems = content_of(raw) if isinstance(raw, bytes) else None
            records.bad.append(BadRecord(position, INVALID_UTF8, seems or str(error)))
            continue
        values = {}
        for name, (path, kind) in spec.columns.items():
            try:
                values[name] = typed_value(columns[name][position], kind)
            except WrongTypeError:
                detail = f"field {path!r} is {columns[name][position]!r:.80}, not {kind}"
                records.bad.append(BadRecord(position, WRONG_TYPE, detail))
                break
            except UnicodeError as error:
                records.bad.append(BadRecord(position, INVALID_UTF8, f"field {path!r}: {error}"))
                break
        else:
            records.admit(spec, position, text, values)
    return records


def join_records(spec: RecordSpec, parts: Sequence[Records]) -> Records:
    """Records of one chunk from those of parts of it, in order."""
    joined = Records(columns={name: [] for name in spec.columns})
    for part in parts:
        base = joined.count
        joined.count += part.count
        joined.texts += part.texts
        joined.positions += [base + position for position in part.positions]
        for name, values in part.columns.items():
            joined.columns[name] += values
        joined.bad += [replace(bad, position=base + bad.position) for bad in part.bad]
        joined.num_empty += part.num_empty
        joined.passed_over += [(base + position, reason) for position, reason in part.passed_over]
        joined.input_bytes += part.input_bytes
        joined.fields |= part.fields
        joined.num_marks += part.num_marks
    return joined


def parse_columns(id_field: str | None, keep: Iterable[str]) -> dict[str, tuple[str, str]]:
    """``--id-field`` and ``--keep FIELD[:TYPE]`` as column name to (dotted path, type).

    Raises:
        ValueError: an unknown type, or two columns of one name.
        UsageError: a name that no reader takes.
    """
    columns: dict[str, tuple[str, str]] = {}
    wanted = [("id", id_field, "string")] if id_field else []
    for item in keep:
        path, _, kind = item.partition(":")
        wanted.append((path, path, kind or "string"))
    for name, path, kind in wanted:
        if name in columns:
            raise ValueError(f"column {name!r} is asked for twice")
        if not path:
            raise ValueError("a kept field has no name")
        check_field_name(path)
        if name == TOKENS:
            raise ValueError(f"a kept column cannot be called {TOKENS!r}: that is the column of token ids")
        if kind not in SUPPORTED_COLUMN_TYPES:
            raise ValueError(f"{name}: unknown type {kind!r}, expected one of {', '.join(SUPPORTED_COLUMN_TYPES)}")
        columns[name] = (path, kind)
    return columns


def check_field_name(name: str) -> None:
    """Refuse a name that JSON would have to escape.

    Raises:
        UsageError: with the name.
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
    if positions and positions[-1] == len(positions) - 1:  # they ascend, so they are all that there are
        return np.arange(len(positions))
    return np.array(positions, np.int64)


def field_hint(path: str, spec: RecordSpec, what: str = "field") -> str:
    """Which option asks for a field that is not there."""
    if path == spec.text_field:
        return f"give the {what} that holds the text with --text-field"
    is_id = path == spec.columns.get("id", ("",))[0]
    return (
        f"give the name of a {what} that is there with {'--id-field' if is_id else '--keep'}, or leave the option out"
    )


def value_bytes(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes) else 0
