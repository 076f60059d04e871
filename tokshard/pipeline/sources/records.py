"""Records: what a source yields before encoding, and the reasons why a record does not become a document."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import msgspec
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


class JsonLinesParser:
    """Parses lines of JSON, about 1 GB per second on long texts. Fields that are not asked for are only scanned."""

    def __init__(self, spec: RecordSpec) -> None:
        self._spec = spec
        self._fast = not spec.columns and "." not in spec.text_field
        self._diagnose = _roots_decoder(spec)
        kind = self._diagnose.type
        self._attributes = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
        self._decoder = _text_decoder(spec.text_field) if self._fast else self._diagnose
        self._text = attrgetter("f0")

    def __call__(self, chunk: LineChunk) -> Records:
        """Every line is a record; a line of white space is an empty one."""
        spec = self._spec
        records = self._take_all(chunk.data)
        if records is None:
            records = self._take_each(chunk.data)
        records.input_bytes = chunk.input_bytes
        if chunk.oversized_bytes:
            detail = f"line has {chunk.oversized_bytes:,} bytes, at most {spec.max_line_bytes:,} are allowed"
            records.bad.append(BadRecord(records.count, TOO_LONG, detail))
            records.count += 1
        return records

    def _take_all(self, data: bytes) -> Records | None:
        """All lines in one call, which takes half the time of a call each; None: they have to be looked at one by one.

        `decode_lines` takes any white space between objects for the end of a record, and none too.
        """
        num_lines = _count_object_lines(data)
        if num_lines is None:
            return None
        records = self._no_records()
        try:
            found = self._decoder.decode_lines(data)
            if len(found) != num_lines:
                return None
            if self._fast:
                records.admit_all(self._spec, list(map(self._text, found)))
            else:
                records.count = num_lines
                for position, fields in enumerate(found):
                    self._admit_slowly(records, position, fields)
        except _JSON_ERRORS:
            return None
        return None if records.bad else records  # the lines themselves say more of what is wrong

    def _take_each(self, data: bytes) -> Records:
        """Line by line: bad ones say what is wrong with them."""
        records = self._no_records()
        lines = data.split(b"\n")
        if not lines[-1]:
            lines.pop()  # the newline ends the last line and starts no other
        records.count = len(lines)
        spec, decode, text, fast, admit = self._spec, self._decoder.decode, self._text, self._fast, records.admit
        for position, line in enumerate(lines):
            try:
                found = decode(line)
                if fast:
                    admit(spec, position, text(found), {})
                else:
                    self._admit_slowly(records, position, found, line)
            except _JSON_ERRORS:
                if not line.strip():
                    records.num_empty += 1
                else:
                    self._admit_or_explain(records, position, line, lines[position + 1 : position + 2])
        return records

    def _no_records(self) -> Records:
        return Records(columns={name: [] for name in self._spec.columns})

    def _admit_slowly(self, records: Records, position: int, found: Any, line: bytes = b"") -> None:
        spec = self._spec
        raw = self._lookup(found, spec.text_field)
        if raw is None:
            records.bad.append(BadRecord(position, MISSING_TEXT, f"no field {spec.text_field!r}{_what_there_is(line)}"))
            return
        if raw == b"null":
            records.bad.append(BadRecord(position, MISSING_TEXT, f"field {spec.text_field!r} is null"))
            return
        if raw[:1] != b'"':
            detail = f"field {spec.text_field!r} is {_shown(raw)}"
            records.bad.append(BadRecord(position, NOT_A_STRING, detail))
            return
        text = _STRING.decode(raw)
        values = {}
        for name, (path, kind) in spec.columns.items():
            kept = self._lookup(found, path)
            if kept is not None:
                records.fields.add(name)
            try:
                values[name] = _json_value(kept, kind)
            except WrongTypeError:
                detail = f"field {path!r} is {_shown(kept or b'')}, not {kind}"
                records.bad.append(BadRecord(position, WRONG_TYPE, detail))
                return
        records.admit(spec, position, text, values)

    def _lookup(self, found: Any, path: str) -> bytes | None:
        """The raw JSON of the field of that name, else at the dotted path, or None."""
        raw = getattr(found, self._attributes[path])
        if raw is None and "." in path:
            root, *rest = path.split(".")
            raw = getattr(found, self._attributes[root])
            for key in rest:
                if raw is None or not bytes(raw).lstrip().startswith(b"{"):
                    return None
                raw = _RAW_FIELDS.decode(raw).get(key)
        return None if raw is None else bytes(raw).strip()

    def _admit_or_explain(self, records: Records, position: int, line: bytes, following: Sequence[bytes]) -> None:
        if line.startswith(codecs.BOM_UTF8):  # of the file, or of one of those that it was joined from
            records.num_marks += 1
            line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                records.num_empty += 1
                return
        try:
            # a field that comes twice counts as its last, which may be a string where the first is none
            self._admit_slowly(records, position, self._diagnose.decode(line), line)
        except _JSON_ERRORS as error:
            records.bad.append(BadRecord(position, *_explain(line, following, error)))


_JSON_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _count_object_lines(data: bytes) -> int | None:
    """The number of lines, if each starts with ``{`` and ends with ``}``; else None.

    Then no JSON object spans two lines: inside of one, a brace that closes is never followed by one that opens. So if
    there are as many objects as lines, each line holds exactly one.
    """
    if not data.startswith(b"{") or len(data) > _MOST_AT_ONCE:
        return None
    characters = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(characters == _NEWLINE)
    num_lines = len(ends) + (not data.endswith(b"\n"))
    starts = ends[: num_lines - 1] + 1
    is_whole = (characters[ends - 1] == _CLOSING).all() and (characters[starts] == _OPENING).all()
    return num_lines if is_whole else None


_OPENING, _CLOSING, _NEWLINE = b"{}\n"
_MOST_AT_ONCE = 4 << 20
"""Bytes of lines: a chunk has 1 MiB and its longest line, and looking at one of 128 MiB would take as much again."""


def _explain(line: bytes, following: Sequence[bytes], error: Exception) -> tuple[str, str]:
    """Reason and detail for a line that is no JSON object."""
    if isinstance(error, UnicodeDecodeError):
        return INVALID_UTF8, str(error)
    if isinstance(error, RecursionError):
        return MALFORMED, "JSON is nested too deeply"
    return _allowed_by_python(line) or (
        MALFORMED,
        content_of(line) or f"{error}{_expected(line, following)}: {_excerpt(line)}",
    )


def _expected(line: bytes, following: Sequence[bytes]) -> str:
    """What to do about JSON that is not one object in each line."""
    if line.lstrip().startswith(b"["):
        return "; JSON lines are expected, an object in each line: jq -c '.[]' makes them of an array"
    if line.strip() == b"{" and any(other.startswith((b" ", b"\t", b'"')) for other in following):
        return "; JSON lines are expected, an object in each line: jq -c . makes them of other JSON"
    return ""


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


def _what_there_is(line: bytes) -> str:
    """The fields of a line, to stand after what it lacks."""
    names = list(_RAW_FIELDS.decode(line)) if line else []
    if "messages" in names or "conversations" in names:
        return "; it has messages, and chat data is not supported: make a text of each conversation first"
    shown = ", ".join(name if name.isprintable() else repr(name) for name in names[:_FIELDS_SHOWN])
    more = ", ..." if len(names) > _FIELDS_SHOWN else ""
    return f"; it has: {shown[:160]}{more}" if names else ""


_FIELDS_SHOWN = 12


_STRING = msgspec.json.Decoder(str)


def _text_decoder(name: str) -> msgspec.json.Decoder[Any]:
    """A decoder of objects that has no eyes but for the text, which becomes attribute f0."""
    # gc=False: the objects hold strings only, and die with their line
    return msgspec.json.Decoder(msgspec.defstruct("Record", [("f0", str)], rename={"f0": name}, gc=False))


def _roots_decoder(spec: RecordSpec) -> msgspec.json.Decoder[Any]:
    """A decoder of objects that keeps the raw JSON of every field that some dotted path starts with."""
    paths = [spec.text_field, *(path for path, _ in spec.columns.values())]
    roots = dict.fromkeys(name for path in paths for name in (path, path.split(".")[0]))
    rename = {f"f{index}": root for index, root in enumerate(roots)}
    fields: list[Any] = [(attribute, msgspec.Raw, None) for attribute in rename]
    return msgspec.json.Decoder(msgspec.defstruct("Record", fields, rename=rename))


_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class WrongTypeError(Exception):
    """A kept field is not of the type that was asked for."""


def _json_value(raw: bytes | None, kind: str) -> Any:
    """The value of a kept field.

    Raises:
        WrongTypeError: it is not of the type that was asked for.
    """
    if raw is None or raw == b"null":
        return None
    if kind == "string":  # never inferred: numbers and objects are kept as their JSON text
        return _STRING.decode(raw) if raw[:1] == b'"' else raw.decode()
    try:
        value: Any = msgspec.json.decode(raw, type=_COLUMN_TYPES[kind])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WrongTypeError from error
    if kind == "int64" and value not in _INT64:
        raise WrongTypeError
    return value


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


def _allowed_by_python(line: bytes) -> tuple[str, str] | None:
    """Reason and detail for a line with which nothing is wrong but what the json module of Python writes and reads."""
    constants: list[str] = []
    if b"\\ud" not in line.lower() and b"NaN" not in line and b"Infinity" not in line:
        return None
    try:
        json.loads(line, parse_constant=constants.append)
    except (ValueError, RecursionError):
        return None
    if constants:
        return MALFORMED, f"JSON does not allow {constants[0]}, which Python's json module writes: replace it by null"
    return INVALID_UTF8, "the JSON escapes a lone surrogate, which no UTF-8 text can hold"


def _shown(raw: bytes) -> str:
    """The start of a JSON value, as it stands in the line."""
    return raw[:80].decode("utf-8", "replace") + ("..." if len(raw) > 80 else "")


def _excerpt(raw: bytes) -> str:
    text = raw[:80].decode("utf-8", "replace")
    return repr(text) + ("..." if len(raw) > 80 else "")
