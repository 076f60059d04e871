"""JSON lines: records from raw lines, and the problems of bad lines."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from tokshard.pipeline.sources.chats import NO_CHAT, is_chat
from tokshard.pipeline.sources.division import LINES, STREAM
from tokshard.pipeline.sources.inputs import JSONL
from tokshard.pipeline.sources.kept_values import WrongTypeError, json_value
from tokshard.pipeline.sources.lines import lines_of
from tokshard.pipeline.sources.protocol import Format
from tokshard.pipeline.sources.records import (
    INVALID_UTF8,
    MALFORMED,
    MISSING_IDS,
    MISSING_TEXT,
    NOT_A_STRING,
    TOO_LONG,
    WRONG_TYPE,
    BadRecord,
    LineChunk,
    Records,
    RecordSpec,
    content_of,
    no_records,
)


class JsonLinesParser:
    """Parses lines of JSON, about 1 GB per second on long texts. Fields that are not needed are only scanned."""

    def __init__(self, spec: RecordSpec) -> None:
        self._spec = spec
        self._fields = spec.object_fields
        self._fast = not spec.columns and "." not in spec.text_field and not self._fields
        self._diagnose = _roots_decoder([*(self._fields or (spec.text_field,)), *spec.kept_paths])
        kind = self._diagnose.type
        self._attributes = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
        self._decoder = _text_decoder(spec.text_field) if self._fast else self._diagnose
        self._text = attrgetter("f0")

    def __call__(self, chunk: LineChunk) -> Records:
        """Parse a chunk. Every line is a record; a line of white space is an empty record."""
        spec = self._spec
        records = self._take_all(chunk.data)
        if records is None:
            records = self._take_each(chunk.data)
        records.input_bytes = chunk.input_bytes
        if chunk.oversized_bytes:
            detail = f"line has {chunk.oversized_bytes:,} bytes, at most {spec.max_line_bytes:,} are allowed"
            start = chunk.oversized_start
            # no limit would make a record of these bytes
            what = content_of(start) or _expected(start, ()).lstrip("; ")
            problem = (MALFORMED, f"{detail}; {what}") if what else (TOO_LONG, detail)
            records.bad.append(BadRecord(records.count, *problem))
            records.count += 1
        return records

    def _take_all(self, data: bytes) -> Records | None:
        """Parse all lines in one call, which takes half the time of one call per line.

        `decode_lines` accepts any white space between objects as the end of a record, even none.

        Returns:
            None if the lines must be parsed one by one.
        """
        num_lines = _count_object_lines(data)
        if num_lines is None:
            return None
        records = no_records(self._spec)
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
                if self._spec.is_chat:
                    for position, named in enumerate(_RAW_FIELDS.decode_lines(data)):
                        records.note_unread(position, self._unread(named))
        except _JSON_ERRORS:
            return None
        return None if records.bad else records  # line by line, problems can be described better

    def _take_each(self, data: bytes) -> Records:
        """Parse line by line, and explain each bad line."""
        records = no_records(self._spec)
        lines = data.split(b"\n")
        if not lines[-1]:
            lines.pop()  # a newline ends the last line and does not start another
        records.count = len(lines)
        spec, decode, text, fast, admit = self._spec, self._decoder.decode, self._text, self._fast, records.admit
        for position, line in enumerate(lines):
            try:
                found = decode(line)
                if fast:
                    admit(spec, position, text(found))
                else:
                    self._admit_slowly(records, position, found, line)
            except _JSON_ERRORS:
                if not line.strip():
                    records.num_empty += 1
                else:
                    self._admit_or_explain(records, position, line, lines[position + 1 : position + 2])
        return records

    def _admit_slowly(self, records: Records, position: int, found: Any, line: bytes = b"") -> None:
        spec = self._spec
        raw = self._object(found) if self._fields else self._lookup(found, spec.text_field)
        if raw is None or (raw[:1] != b'"' and not self._fields):
            missing = MISSING_TEXT if spec.tokens is None else MISSING_IDS
            reason = missing if raw in (None, b"null") else NOT_A_STRING
            name = NO_CHAT if spec.is_chat else f"no field {spec.text_field!r}" if spec.tokens is None else "no ids"
            detail = f"field {spec.text_field!r} is {_shown(raw)}" if raw else f"{name}{_what_there_is(line)}"
            records.bad.append(BadRecord(position, reason, detail))
            return
        text = raw.decode() if self._fields else _STRING.decode(raw)
        values = []
        for name, (path, kind) in spec.columns.items():
            kept = self._lookup(found, path)
            if kept is not None:
                records.fields.add(name)
            try:
                values.append(json_value(kept, kind))
            except WrongTypeError:
                detail = f"field {path!r} is {_shown(kept or b'')}, not {kind}"
                records.bad.append(BadRecord(position, WRONG_TYPE, detail))
                return
        if spec.is_chat and line:
            records.note_unread(position, self._unread(_RAW_FIELDS.decode(line)))
        if records.admit(spec, position, text):
            for column, value in zip(records.columns.values(), values, strict=True):
                column.append(value)

    def _object(self, found: Any) -> bytes | None:
        """The JSON of the fields that are read together, as of a conversation."""
        values = ((name, self._lookup(found, name)) for name in self._fields)
        parts = {name: b'"%s":%s' % (name.encode(), raw) for name, raw in values if raw not in (None, b"null")}
        return b"{%s}" % b",".join(parts.values()) if parts and (not self._spec.is_chat or is_chat(parts)) else None

    def _unread(self, found: Mapping[str, msgspec.Raw]) -> list[str]:
        """The fields of a record that hold something and are not read."""
        return [name for name in found.keys() - self._attributes.keys() if bytes(found[name]) not in _NOTHING]

    def _lookup(self, found: Any, path: str) -> bytes | None:
        """The raw JSON of the field with this name, else of the field at this dotted path, else None."""
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
        if line.startswith(codecs.BOM_UTF8):  # of the file, or of a file that was joined into it
            records.num_marks += 1
            line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                records.num_empty += 1
                return
        try:
            # of a field that comes twice the last counts, which may be a string where the first is not
            self._admit_slowly(records, position, self._diagnose.decode(line), line)
        except _JSON_ERRORS as error:
            records.bad.append(BadRecord(position, *_explain(line, following, error)))


_JSON_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _count_object_lines(data: bytes) -> int | None:
    """The number of lines if each starts with ``{`` and ends with ``}``, else None.

    No JSON object spans two such lines, because inside an object an opening brace never follows a closing one. So if
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
"""Bytes of lines that are checked at once. A chunk can hold a line of 128 MiB, and the check would copy it."""


def _explain(line: bytes, following: Sequence[bytes], error: Exception) -> tuple[str, str]:
    """Reason and detail of a line that is not a JSON object."""
    if isinstance(error, UnicodeDecodeError):
        return INVALID_UTF8, str(error)
    if isinstance(error, RecursionError):
        return MALFORMED, "JSON is nested too deeply"
    excerpt = repr(line[:80].decode("utf-8", "replace")) + ("..." if len(line) > 80 else "")
    detail = content_of(line) or f"{error}: {excerpt}{_expected(line, following)}"
    return _allowed_by_python(line) or (MALFORMED, detail)


def _expected(line: bytes, following: Sequence[bytes]) -> str:
    """The advice for JSON that is not one object per line."""
    if line.lstrip().startswith(b"["):
        return "; expected JSON lines, one object per line: jq -c '.[]' converts an array"
    if line.strip() == b"{" and any(other.startswith((b" ", b"\t", b'"')) for other in following):
        return "; expected JSON lines, one object per line: jq -c . converts other JSON"
    return ""


def _what_there_is(line: bytes) -> str:
    """The fields of a line, for the message about a missing field."""
    names = [name for name, raw in _RAW_FIELDS.decode(line).items() if bytes(raw) != b"null"] if line else []
    if "messages" in names or "conversations" in names:
        return "; it has messages: make tokens of conversations with --chat"
    shown = ", ".join(name if name.isprintable() else repr(name) for name in names[:_FIELDS_SHOWN])
    more = ", ..." if len(names) > _FIELDS_SHOWN else ""
    return f"; it has: {shown[:160]}{more}" if names else ""


_FIELDS_SHOWN = 12

_STRING = msgspec.json.Decoder(str)


def _text_decoder(name: str) -> msgspec.json.Decoder[Any]:
    """A decoder that reads only the text of an object, as attribute f0."""
    # gc=False is safe: the objects hold nothing but strings
    return msgspec.json.Decoder(msgspec.defstruct("Record", [("f0", str)], rename={"f0": name}, gc=False))


def _roots_decoder(paths: Sequence[str]) -> msgspec.json.Decoder[Any]:
    """A decoder that keeps the raw JSON of every field with which a dotted path starts."""
    roots = dict.fromkeys(name for path in paths for name in (path, path.split(".")[0]))
    rename = {f"f{index}": root for index, root in enumerate(roots)}
    fields: list[Any] = [(attribute, msgspec.Raw, None) for attribute in rename]
    return msgspec.json.Decoder(msgspec.defstruct("Record", fields, rename=rename))


_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NOTHING = (b"null", b'""', b"[]")


def _allowed_by_python(line: bytes) -> tuple[str, str] | None:
    """Reason and detail of a line that only Python's json module accepts, else None."""
    constants: list[str] = []
    if b"\\ud" not in line.lower() and b"NaN" not in line and b"Infinity" not in line:
        return None
    try:
        # pairs, since the surrogate may stand in a field that comes again
        pairs = json.loads(line, parse_constant=constants.append, object_pairs_hook=list)
        json.dumps(pairs, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        if not constants:
            return INVALID_UTF8, "the JSON escapes a lone surrogate, which UTF-8 text cannot hold"
    except (ValueError, RecursionError):
        return None
    if constants:
        return MALFORMED, f"JSON does not allow {constants[0]}, which Python's json module writes: replace it with null"
    return None


def _shown(raw: bytes) -> str:
    """The start of a JSON value, as in the line."""
    return raw[:80].decode("utf-8", "replace") + ("..." if len(raw) > 80 else "")


FORMAT = Format(
    name=JSONL,
    read=lambda input_, span, spec: lines_of(input_, span, spec.max_line_bytes),
    divide=lambda input_, _: LINES if input_.compression is None else STREAM,
    suffixes=(".jsonl", ".ndjson", ".json"),
    is_compressible=True,
)
