"""Tar archives, read from start to end and never unpacked: members become records, and nothing is written to disk.

The standard library's `tarfile` treats a damaged header as the end of the archive, and keeps all members and their pax
headers in memory. So only its header parser is used.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from tokshard.pipeline.sources.decompress import open_bytes
from tokshard.pipeline.sources.division import CHUNK_BYTES, Span
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.json_lines import JsonLinesParser
from tokshard.pipeline.sources.lines import line_chunks
from tokshard.pipeline.sources.opening import damaged
from tokshard.pipeline.sources.plain_text import text_documents, without_mark
from tokshard.pipeline.sources.protocol import Format
from tokshard.pipeline.sources.records import (
    INVALID_UTF8,
    MALFORMED,
    MISSING_TEXT,
    ROWS_PER_CHUNK,
    TOO_LONG,
    BadRecord,
    LineChunk,
    Records,
    RecordSpec,
    counted,
    no_records,
)

OTHER_MEMBER = "archive member of another format"
HIDDEN_MEMBER = "hidden archive member"
LINK_MEMBER = "archive member that is a link"
SPECIAL_MEMBER = "archive member that is no regular file"
"""Why a member is left out, under every policy. Directories are not counted at all."""

KEY = "__key__"
"""Field of a WebDataset sample: the path of its members up to the first dot of their names."""

_BLOCK = 512
_MAX_EXTRA_BYTES = 1 << 20
"""The most bytes of a long name or pax header: a hostile archive may announce any size."""
_LINES = frozenset({"jsonl", "ndjson"})
_SAMPLE_FIELDS = frozenset({"txt", "json"})
_FIELDS_SHOWN = 12


def _chunks(input_: Input, _: Span, spec: RecordSpec) -> Iterator[tuple[int, Records]]:
    """The records of an archive in the order of its members.

    Raises:
        SourceError: the archive is damaged.
    """
    with open_bytes(input_) as stream:
        archive = _Archive(input_, stream.read)
        is_grouped = spec.text_field.split(".")[0] in _SAMPLE_FIELDS
        parts = _samples(archive, spec) if is_grouped else _members(archive, spec)
        yield from counted(_joined(parts, spec), stream.file_position, is_exact=not is_grouped)


def _joined(parts: Iterator[tuple[int, Records]], spec: RecordSpec) -> Iterator[tuple[int, Records]]:
    records, start, size = no_records(spec), 0, 0
    for place, part in parts:
        start = start if records.count else place
        records.extend(part)
        size += sum(map(len, part.texts))
        # an archive of pictures has little text, so skipped bytes also end a chunk
        if max(size, place - start) >= CHUNK_BYTES or records.count >= ROWS_PER_CHUNK:
            yield start, records
            records, size = no_records(spec), 0
    if records.count:
        yield start, records


FORMAT = Format(name="tar", read=_chunks, suffixes=(".tar",), is_compressible=True)


def _passed_over(reason: str) -> Records:
    return Records(count=1, passed_over=[(0, reason)])


def _bad(reason: str, detail: str) -> Records:
    return Records(count=1, bad=[BadRecord(0, reason, detail)])


# members as records


def _members(archive: _Archive, spec: RecordSpec) -> Iterator[tuple[int, Records]]:
    """Each member, whole or in chunks of lines: position in the archive, and records."""
    parse = JsonLinesParser(spec)
    reported = 0
    for name, reason in archive:
        start = end = archive.position
        for records in [_passed_over(reason)] if reason else _member(name, archive, spec, parse):
            # of lines more is read than they stand for
            end = end + records.input_bytes if records.input_bytes else archive.position
            records.input_bytes, reported = end - reported, end
            records.set_name(spec, name)
            yield start, records
            start = archive.position


def _member(name: str, archive: _Archive, spec: RecordSpec, parse: JsonLinesParser) -> Iterator[Records]:
    suffix = os.path.splitext(name)[1][1:].lower()
    if suffix == "json":
        data = archive.read(spec.max_line_bytes + 1)
        if len(data) > spec.max_line_bytes:
            yield _bad(TOO_LONG, f"the member has more than {spec.max_line_bytes:,} bytes")
        else:
            yield parse(LineChunk(_one_line(data) or b"\n"))
    elif suffix in _LINES:
        reported = 0
        for _, chunk in line_chunks(archive.read, spec.max_line_bytes):
            chunk.input_bytes, reported = chunk.stop - reported, chunk.stop
            yield parse(chunk)
    elif suffix == "txt":
        for _, records in text_documents(archive.read, spec):
            yield records
    else:
        yield _passed_over(OTHER_MEMBER)


def _one_line(data: bytes) -> bytes:
    # both are white space between JSON values, and both are wrong inside a string
    return data.replace(b"\n", b"\r")


# WebDataset samples


def _samples(archive: _Archive, spec: RecordSpec) -> Iterator[tuple[int, Records]]:
    """Each sample, which is a run of members ``KEY.EXTENSION`` with one key: position in the archive, and record.

    A key ends at the first dot of the name without its folders. The record of a sample has the fields `KEY`, ``txt``
    and ``json``; other members are ignored. A member that is left out regardless of its content is reported after the
    sample around it.
    """
    parse = JsonLinesParser(spec)
    paths = {spec.text_field, *spec.kept_paths}
    wanted = _SAMPLE_FIELDS & {path.split(".")[0] for path in paths}
    limits = {"txt": spec.max_document_bytes, "json": spec.max_line_bytes}
    key: str | None = None
    start = 0
    fields: dict[str, bytes | None] = {}  # of members that are not wanted the names only, for messages
    broken: Records | None = None
    left_out: list[Records] = []

    def finish() -> Iterator[tuple[int, Records]]:
        if key is not None:
            yield start, broken or _sample(key, fields, parse)
        yield from ((archive.position, part) for part in left_out)
        left_out.clear()

    for path, reason in archive:
        folder, name = os.path.split(path)
        stem, dot, extension = name.partition(".")
        if reason or not dot:
            left_out.append(_passed_over(reason or OTHER_MEMBER))
            if len(left_out) >= ROWS_PER_CHUNK:  # they are held until the sample ends, so it ends here
                yield from finish()
                key, fields, broken = None, {}, None
            continue
        member_key, extension = os.path.join(folder, stem), extension.lower()
        if member_key != key:
            yield from finish()
            key, start, fields, broken = member_key, archive.position, {}, None
        if extension in wanted:
            broken = broken or _take(archive, fields, extension, limits[extension])
        elif extension not in paths and len(fields) < _FIELDS_SHOWN:
            fields[extension] = None
    yield from finish()


def _take(archive: _Archive, fields: dict[str, bytes | None], extension: str, limit: int) -> Records | None:
    """Read a wanted member; returns a bad record instead of the sample if it cannot be read."""
    if extension in fields:
        return _bad(MALFORMED, f"the sample has two members .{extension}")
    fields[extension] = data = archive.read(limit + 1)
    return _bad(TOO_LONG, f"member .{extension} has more than {limit:,} bytes") if len(data) > limit else None


def _sample(key: str, fields: Mapping[str, bytes | None], parse: JsonLinesParser) -> Records:
    parts: dict[str, Any] = {KEY: key, **dict.fromkeys(fields)}
    num_marks = 0
    try:
        for name, data in fields.items():
            if data is None:
                continue
            text, mark = without_mark(data)
            num_marks += mark
            if name == "json":
                msgspec.json.decode(text)  # alone, so that broken JSON cannot change the meaning of the line below
            parts[name] = text.decode() if name == "txt" else msgspec.Raw(_one_line(text))
    except UnicodeDecodeError as error:
        return _bad(INVALID_UTF8, str(error))
    except (msgspec.DecodeError, RecursionError) as error:
        return _bad(MALFORMED, f"member .json: {error}")
    records = parse(LineChunk(msgspec.json.encode(parts) + b"\n"))
    records.num_marks = num_marks
    # one that comes twice, because others stand between its members, lacks some of them each time
    more = "; the members of a sample have to follow each other, as tar --sort=name writes them"
    records.bad = [replace(bad, detail=bad.detail + more * (bad.reason == MISSING_TEXT)) for bad in records.bad]
    return records


# the container


class _Archive:
    """The members of an archive with ustar, GNU and pax headers, each with the reason for leaving it out or None.

    The end-of-archive marker must be there, and only zeros may follow it.
    """

    def __init__(self, input_: Input, read: Callable[[int], bytes]) -> None:
        self._input, self._read = input_, read
        self._left = 0
        self.position = 0
        """Bytes of the archive read so far."""

    def read(self, size: int) -> bytes:
        """The next bytes of the current member; fewer only at its end."""
        data = self._take(min(size, self._left))
        self._left -= len(data)
        return data

    def __iter__(self) -> Iterator[tuple[str, str | None]]:
        extra: dict[str, str] = {}
        everywhere: dict[str, str] = {}
        while (found := self._header()) is not None:
            header, block = found
            kind = header.type
            if kind in _EXTRA:
                (everywhere if kind == tarfile.XGLTYPE else extra).update(self._extra(kind, self._size(header, {})))
                continue
            fields, extra = everywhere | extra, {}
            size = self._size(header, fields)
            if kind == tarfile.GNUTYPE_SPARSE:
                is_continued = block[482]
                while is_continued:
                    is_continued = self._take(_BLOCK)[504]
            if kind in _EMPTY:
                size = 0  # no content follows, whatever the header says
            self._left = size
            name = fields.get("path", header.name).encode("utf-8", "backslashreplace").decode()
            if kind != tarfile.DIRTYPE and not (kind == tarfile.AREGTYPE and name.endswith("/")):
                yield name, _reason(kind, name, is_sparse=kind == tarfile.GNUTYPE_SPARSE or _SPARSE.decode() in fields)
            while self._left:
                self.read(CHUNK_BYTES)
            self._take(-size % _BLOCK)

    def _take(self, size: int) -> bytes:
        """Read exactly `size` bytes."""
        data = self._read(size)
        self.position += len(data)
        if len(data) < size:
            raise damaged(self._input, f"the archive is cut off at byte {self.position:,}")
        return data

    def _header(self) -> tuple[tarfile.TarInfo, bytes] | None:
        """The next header, parsed and raw, or None at the end-of-archive marker."""
        start = self.position
        block = self._read(_BLOCK)
        self.position += len(block)
        if not block:
            what = "the archive lacks its end-of-archive marker: it was cut off between two members"
            raise damaged(self._input, what if start else "the file is empty, and an archive never is")
        if not block.strip(b"\0") and len(block) == _BLOCK:
            self._expect_end()
            return None
        try:
            # the parser reports some wrong numbers as ValueError
            return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape"), block
        except (tarfile.HeaderError, ValueError) as error:
            raise damaged(self._input, f"the header at byte {start:,} is broken: {error}") from error

    def _expect_end(self) -> None:
        self._take(_BLOCK)
        while data := self._read(CHUNK_BYTES):
            if data.strip(b"\0"):
                raise damaged(
                    self._input,
                    f"something follows the end-of-archive marker at byte {self.position:,}; "
                    "split archives that were joined, and give them one by one",
                )

    def _size(self, header: tarfile.TarInfo, fields: Mapping[str, str]) -> int:
        try:
            size = int(fields.get("size", header.size))
        except ValueError:
            size = -1
        if size < 0:
            raise damaged(self._input, f"the member before byte {self.position:,} has the size {size}")
        return size

    def _extra(self, kind: bytes, size: int) -> dict[str, str]:
        """The facts in an extended header about the members that follow."""
        if size > _MAX_EXTRA_BYTES:
            raise damaged(self._input, f"the extended header before byte {self.position:,} has {size:,} bytes")
        data = self._take(size + -size % _BLOCK)[:size]
        if kind == tarfile.GNUTYPE_LONGNAME:
            return {"path": data.rstrip(b"\0").decode("utf-8", "backslashreplace")}
        return {} if kind == tarfile.GNUTYPE_LONGLINK else self._pax(data)

    def _pax(self, data: bytes) -> dict[str, str]:
        r"""Parse records ``LENGTH KEY=VALUE\n``, and keep only path, size, and whether it is sparse."""
        fields = {}
        place, stop = 0, len(data.rstrip(b"\0"))
        while place < stop:
            found = _PAX_RECORD.match(data, place)
            end = place + int(found[1]) if found else 0
            if found is None or not found.end() < end <= len(data) or data[end - 1 : end] != b"\n":
                raise damaged(self._input, f"the pax header before byte {self.position:,} is broken")
            key = found[2] or found[3]
            if key in {b"path", b"size", _SPARSE}:
                fields[key.decode()] = data[found.end() : end - 1].decode("utf-8", "backslashreplace")
            place = end
        return fields


_SPARSE = b"GNU.sparse."
_PAX_RECORD = re.compile(rb"(\d{1,8}) ((?:GNU\.sparse\.)?)([^=]*)=")
"""Its length, which has few digits because a header has at most 1 MiB; what `_SPARSE` says, or nothing; its key."""
_EXTRA = frozenset({tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE, tarfile.XHDTYPE, b"X"})
"""Long names and links of GNU, pax headers of members and of the whole archive."""
_LINKS = (tarfile.LNKTYPE, tarfile.SYMTYPE)
_EMPTY = (*_LINKS, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)


def _reason(kind: bytes, name: str, *, is_sparse: bool) -> str | None:
    """Why a member is left out regardless of its content, or None."""
    if kind in _LINKS:
        return LINK_MEMBER
    if is_sparse or kind not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE):
        return SPECIAL_MEMBER
    if any(part.startswith(".") and part.strip(".") for part in name.split("/")):
        return HIDDEN_MEMBER
    return None
