"""Tar archives, read from start to end and never unpacked: members become records, and nothing is written to disk.

The standard library's `tarfile` takes a damaged header for the end of the archive, and keeps all members and all of
their pax headers in memory. So only its header parser is used.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tokshard.pipeline.sources.decompress import ByteSource, open_bytes
from tokshard.pipeline.sources.division import CHUNK_BYTES
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.json_lines import JsonLinesParser
from tokshard.pipeline.sources.lines import line_chunks
from tokshard.pipeline.sources.opening import damaged
from tokshard.pipeline.sources.plain_text import (
    line_documents,
    max_text_line_bytes,
    paragraphs,
    whole_text,
    without_mark,
)
from tokshard.pipeline.sources.records import (
    FILE,
    INVALID_UTF8,
    LINE,
    MALFORMED,
    ROWS_PER_CHUNK,
    TOO_LONG,
    BadRecord,
    LineChunk,
    Records,
    RecordSpec,
    join_records,
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


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an archive, whose content can be read until the next member is asked for.

    Args:
        name: its path in the archive. Only a label: nothing is written there.
        reason: why it is left out regardless of its content, or None.
        content: its bytes.
    """

    name: str
    reason: str | None
    content: _Content


def tar_chunks(input_: Input, spec: RecordSpec, task_bytes: int) -> Iterator[tuple[int, Records]]:
    """The records of an archive in the order of its members, each chunk with the segment in which it starts.

    Raises:
        SourceError: the archive is damaged.
    """
    with open_bytes(input_) as stream:
        archive = _Archive(input_, stream)
        is_grouped = spec.text_field.split(".")[0] in _SAMPLE_FIELDS
        parts = _sample_parts(archive, spec) if is_grouped else _member_parts(archive, spec)
        pending: list[Records] = []
        start, size, count, reported = 0, 0, 0, 0
        for position, part in parts:
            if not pending:
                start = position
            pending.append(part)
            size += sum(map(len, part.texts))
            count += part.count
            # an archive of pictures has little text, so skipped bytes also end a chunk
            if max(size, position - start) >= CHUNK_BYTES or count >= ROWS_PER_CHUNK:
                records = join_records(spec, pending)
                records.input_bytes = stream.file_position() - reported
                reported += records.input_bytes
                yield start // task_bytes, records
                pending, size, count = [], 0, 0
        if pending:
            records = join_records(spec, pending)
            records.input_bytes = stream.file_position() - reported
            yield start // task_bytes, records


# members as records


def _member_parts(archive: _Archive, spec: RecordSpec) -> Iterator[tuple[int, Records]]:
    """Chunks of the lines of each member, or the whole member: position in the archive, and records."""
    parse = JsonLinesParser(spec)
    for member in archive:
        start = archive.position
        for records in _member_records(member, spec, parse):
            yield start, records
            start = archive.position


def _member_records(member: Member, spec: RecordSpec, parse: JsonLinesParser) -> Iterator[Records]:
    suffix = os.path.splitext(member.name)[1][1:].lower()
    if member.reason:
        yield _passed_over(member.reason)
    elif suffix == "json":
        yield _json_member(member.content, spec, parse)
    elif suffix in _LINES:
        for _, chunk in line_chunks(member.content.read, start=0, stop=None, max_line_bytes=spec.max_line_bytes):
            yield parse(chunk)
    elif suffix == "txt":
        yield from _text_member(member.content.read, spec)
    else:
        yield _passed_over(OTHER_MEMBER)


def _text_member(read: Callable[[int], bytes], spec: RecordSpec) -> Iterator[Records]:
    if spec.text_mode == FILE:
        yield whole_text(read, spec, input_bytes=0)
    elif spec.text_mode == LINE:
        for index, chunk in line_chunks(read, start=0, stop=None, max_line_bytes=max_text_line_bytes(spec)):
            yield line_documents(index, chunk, spec)
    else:
        for _, records in paragraphs(read, spec, position=lambda: 0):
            yield records


def _json_member(content: _Content, spec: RecordSpec, parse: JsonLinesParser) -> Records:
    data = content.read(spec.max_line_bytes + 1)
    if len(data) > spec.max_line_bytes:
        return _bad(TOO_LONG, f"the member has more than {spec.max_line_bytes:,} bytes")
    return parse(LineChunk(_one_line(data) or b"\n", 0, 0))


def _one_line(data: bytes) -> bytes:
    # both are white space between JSON values, and both are wrong inside a string
    return data.replace(b"\n", b"\r")


def _passed_over(reason: str) -> Records:
    return Records(count=1, passed_over=[(0, reason)])


def _bad(reason: str, detail: str) -> Records:
    return Records(count=1, bad=[BadRecord(0, reason, detail)])


# WebDataset samples


def _sample_parts(archive: _Archive, spec: RecordSpec) -> Iterator[tuple[int, Records]]:
    """Each sample, which is a run of members ``KEY.EXTENSION`` with one key: position in the archive, and record.

    The record of a sample has the fields `KEY`, ``txt`` and ``json``; its other members are ignored. A member that is
    left out regardless of its content is reported after the sample in which it stands.
    """
    parse = JsonLinesParser(spec)
    paths = [spec.text_field, *(path for path, _ in spec.columns.values())]
    wanted = _SAMPLE_FIELDS & {path.split(".")[0] for path in paths}
    limits = {"txt": spec.max_document_bytes, "json": spec.max_line_bytes}
    key: str | None = None
    start = 0
    fields: dict[str, bytes] = {}
    broken: Records | None = None
    left_out: list[Records] = []

    def finish() -> Iterator[tuple[int, Records]]:
        if key is not None:
            yield start, broken or _sample(key, fields, parse)
        yield from ((archive.position, part) for part in left_out)
        left_out.clear()

    for member in archive:
        if member.reason:
            left_out.append(_passed_over(member.reason))
            if len(left_out) >= ROWS_PER_CHUNK:  # they are held until the sample ends, so it ends here
                yield from finish()
                key, fields, broken = None, {}, None
            continue
        directory, name = os.path.split(member.name)
        stem, _, extension = name.partition(".")
        member_key, extension = os.path.join(directory, stem), extension.lower()
        if member_key != key:
            yield from finish()
            key, start, fields, broken = member_key, archive.position, {}, None
        if extension in wanted and broken is None:
            if extension in fields:
                broken = _bad(MALFORMED, f"sample {key} has two members .{extension}")
                continue
            fields[extension] = member.content.read(limits[extension] + 1)
            if len(fields[extension]) > limits[extension]:
                broken = _bad(TOO_LONG, f"member .{extension} has more than {limits[extension]:,} bytes")
    yield from finish()


def _sample(key: str, fields: Mapping[str, bytes], parse: JsonLinesParser) -> Records:
    parts: dict[str, Any] = {KEY: key}
    num_marks = 0
    try:
        if "txt" in fields:
            text, num_marks = without_mark(fields["txt"])
            parts["txt"] = text.decode()
        if "json" in fields:
            text, mark = without_mark(fields["json"])
            parts["json"], num_marks = msgspec.Raw(_one_line(text)), num_marks + mark
            msgspec.json.decode(
                parts["json"]
            )  # checked alone, so that broken JSON cannot change the meaning of the line below
    except UnicodeDecodeError as error:
        return _bad(INVALID_UTF8, str(error))
    except (msgspec.DecodeError, RecursionError) as error:
        return _bad(MALFORMED, f"member .json: {error}")
    records = parse(LineChunk(msgspec.json.encode(parts) + b"\n", 0, 0))
    records.num_marks = num_marks
    return records


# the container


class _Content:
    """The bytes of one member."""

    def __init__(self, archive: _Archive, size: int) -> None:
        self._archive, self.left = archive, size

    def read(self, size: int) -> bytes:
        data = self._archive.take(min(size, self.left))
        self.left -= len(data)
        return data

    def skip(self) -> None:
        while self.left:
            self.read(CHUNK_BYTES)


class _Archive:
    """The members of an archive with ustar, GNU and pax headers.

    The end-of-archive marker has to be there, and nothing but zeros may follow it.
    """

    def __init__(self, input_: Input, stream: ByteSource) -> None:
        self._input, self._stream = input_, stream
        self.position = 0
        """Bytes of the archive read so far."""

    def __iter__(self) -> Iterator[Member]:
        extra: dict[str, str] = {}
        everywhere: dict[str, str] = {}
        while (found := self._header()) is not None:
            header, block = found
            kind, size = header.type, self._size(header, {} if header.type in _EXTRA else everywhere | extra)
            if kind in _EXTRA:
                data = self._extra(size)
                if kind == tarfile.GNUTYPE_LONGNAME:
                    extra["path"] = data.rstrip(b"\0").decode("utf-8", "backslashreplace")
                elif kind == tarfile.XGLTYPE:
                    everywhere |= self._pax(data)
                elif kind in _PAX:
                    extra |= self._pax(data)
                continue
            fields = everywhere | extra
            extra = {}
            is_sparse = kind == tarfile.GNUTYPE_SPARSE or _SPARSE in fields
            if kind == tarfile.GNUTYPE_SPARSE:
                self._skip_sparse_map(block)
            if kind in (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, *_DEVICES):
                size = 0  # no content follows, whatever the header says
            content = _Content(self, size)
            name = fields.get("path", header.name).encode("utf-8", "backslashreplace").decode()
            if kind != tarfile.DIRTYPE and not (kind == tarfile.AREGTYPE and name.endswith("/")):
                yield Member(name, _reason(kind, name, is_sparse=is_sparse), content)
            content.skip()
            self._skip_padding(size)

    def take(self, size: int) -> bytes:
        """Read exactly `size` bytes."""
        data = self._stream.read(size)
        self.position += len(data)
        if len(data) < size:
            raise damaged(self._input, f"the archive is cut off at byte {self.position:,}")
        return data

    def _header(self) -> tuple[tarfile.TarInfo, bytes] | None:
        """The next header, parsed and raw, or None at the end-of-archive marker."""
        start = self.position
        block = self._stream.read(_BLOCK)
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
        self.take(_BLOCK)
        while data := self._stream.read(CHUNK_BYTES):
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

    def _extra(self, size: int) -> bytes:
        if size > _MAX_EXTRA_BYTES:
            raise damaged(self._input, f"the extended header before byte {self.position:,} has {size:,} bytes")
        data = self.take(size)
        self._skip_padding(size)
        return data

    def _pax(self, data: bytes) -> dict[str, str]:
        r"""Parse records ``LENGTH KEY=VALUE\n``, and keep only the keys that `_wanted` knows."""
        fields = {}
        place, stop = 0, len(data.rstrip(b"\0"))
        while place < stop:
            space = data.find(b" ", place, place + _MAX_PAX_DIGITS)
            length = data[place : max(place, space)]
            end = place + int(length) if length.isdigit() else place
            equals = data.find(b"=", space, end)
            if equals < 0 or end > len(data) or data[end - 1 : end] != b"\n":
                raise damaged(self._input, f"the pax header before byte {self.position:,} is broken")
            name = _wanted(data[space + 1 : equals])
            if name:
                fields[name] = data[equals + 1 : end - 1].decode("utf-8", "backslashreplace")
            place = end
        return fields

    def _skip_sparse_map(self, header: bytes) -> None:
        is_continued = header[482]
        while is_continued:
            is_continued = self.take(_BLOCK)[504]

    def _skip_padding(self, size: int) -> None:
        self.take(-size % _BLOCK)


def _wanted(key: bytes) -> str | None:
    """The name under which the value of a pax key is kept, or None if it is not."""
    if key.startswith(b"GNU.sparse."):
        return _SPARSE
    return {b"path": "path", b"size": "size"}.get(key)


_SPARSE = "sparse"
_MAX_PAX_DIGITS = 9
"""The most characters of a record's length and the space after it: a header has at most 1 MiB."""
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTRA = frozenset({tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE, *_PAX})
_DEVICES = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)


def _reason(kind: bytes, name: str, *, is_sparse: bool) -> str | None:
    """Why a member is left out regardless of its content, or None."""
    if kind in (tarfile.LNKTYPE, tarfile.SYMTYPE):
        return LINK_MEMBER
    if is_sparse or kind not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE):
        return SPECIAL_MEMBER
    if any(part.startswith(".") and part.strip(".") for part in name.split("/")):
        return HIDDEN_MEMBER
    return None
