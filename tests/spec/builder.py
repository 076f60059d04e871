"""A naive builder, written from README.md, the page of the command line and that of the pipeline: no chunks, no tasks.

It knows JSON lines, text and parquet, compressed or not; what becomes a document and what is left out; duplicates,
lengths, limits, splits and appends. It has no files: a build is a value.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import pyarrow.parquet as pq

# ------------------------------------------------------------------------------------------------------- what is asked

Files = Mapping[str, bytes]
"""A directory: the content of each file, by its path."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a build, with their names there; `encode` and `eos` are its tokenizer."""

    encode: Callable[[str], list[int]]
    eos: int
    bos: int | None = None
    text_field: str = "text"
    id_field: str | None = None
    text_unit: Literal["file", "line", "paragraph"] = "file"
    max_document_bytes: int = 64 << 20
    min_tokens: int = 0
    max_tokens: float = float("inf")
    dedup: Literal["none", "exact"] = "none"
    validation_fraction: float | None = None
    max_documents: float = float("inf")
    on_bad_record: Literal["fail", "skip"] = "fail"
    max_bad_records: float = float("inf")


class RefusedError(ValueError):
    """A build that fails: at the bad record of an input, or because there is nothing to write."""

    def __init__(self, reason: str, source: str = "", record: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.source, self.record = reason, source, record


# ------------------------------------------------------------------------------------------------------ what is written


@dataclass(frozen=True)
class Document:
    tokens: list[int]
    source: int
    record: int
    id: str | None


@dataclass
class SourceRow:
    """A row of the table of sources."""

    path: str
    records_read: int = 0
    documents: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def count(self, reason: str) -> None:
        self.records_read += 1
        self.documents += not reason
        self.left_out.update([reason] if reason else [])


@dataclass
class Corpus:
    """What a build writes: two of them with a split. `rejects` are sources, records and reasons."""

    documents: list[Document] = field(default_factory=list)
    sources: list[SourceRow] = field(default_factory=list)
    rejects: list[tuple[str, int, str]] = field(default_factory=list)


# ------------------------------------------------------------------------------------------- from sources to records

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".txt": "text", ".parquet": "parquet"}
DECOMPRESS = {".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress}
MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Record:
    """A record, counted from 1 in its source: its text, or why it has none."""

    number: int
    text: str = ""
    problem: str = ""
    id: str | None = None


def format_of(path: str) -> tuple[str, str] | None:
    """Format and compression, by the name; None for a file that is not read."""
    name = path.rsplit("/", 1)[-1]
    if any(part.startswith(".") for part in path.split("/")):
        return None
    packed = next((suffix for suffix in DECOMPRESS if name.endswith(suffix)), "")
    plain = name.removesuffix(packed)
    found = next((kind for suffix, kind in SUFFIXES.items() if plain.endswith(suffix)), None)
    return None if found is None or (packed and found == "parquet") else (found, packed)


def files_of(files: Files) -> list[str]:
    """The files of a directory that are read, sorted by path, byte by byte."""
    return sorted((path for path in files if format_of(path)), key=str.encode)


def records_of(path: str, content: bytes, options: Options) -> Iterator[Record]:
    kind, packed = format_of(path) or ("", "")
    content = DECOMPRESS[packed](content) if packed else content
    if kind == "parquet":
        rows = pq.read_table(io.BytesIO(content)).to_pylist()
        yield from (record_of_fields(number, row, options) for number, row in enumerate(rows, 1))
        return
    if kind == "jsonl":
        for number, line in enumerate(lines_of(content), 1):
            yield record_of_line(number, line.removeprefix(MARK), options)
    else:
        for number, part in enumerate(units_of(content.removeprefix(MARK), options.text_unit), 1):
            yield checked(number, part, options)


def lines_of(content: bytes) -> list[bytes]:
    """Lines end in a line feed, or in a carriage return and a line feed; the last one may have no end."""
    lines = [line.removesuffix(b"\r") if line != b"\r" else b"" for line in content.split(b"\n")]
    return lines[:-1] if content.endswith(b"\n") or not content else lines


def units_of(content: bytes, unit: str) -> list[bytes]:
    if unit == "file":
        return [content]
    if unit == "line":
        return lines_of(content)
    paragraphs = re.split(rb"(?:^|(?<=\n))(?:[ \t\r\f\v]*\n)+", content + b"\n")
    return [part.removesuffix(b"\n").removesuffix(b"\r") for part in paragraphs if part.strip()]


def record_of_line(number: int, line: bytes, options: Options) -> Record:
    if not line.strip():
        return Record(number, problem="empty")
    pairs: list[Any] = []  # also of the keys that a later one replaces

    def dict_of(some: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs.extend(some)
        return dict(some)

    def refuse(constant: str) -> None:
        raise ValueError(constant)  # NaN and Infinity are not JSON

    try:
        fields = json.loads(line.decode(), parse_constant=refuse, object_pairs_hook=dict_of)
    except UnicodeDecodeError:
        return Record(number, problem="invalid UTF-8")
    except (ValueError, RecursionError):
        return Record(number, problem="malformed")
    if re.search("[\ud800-\udfff]", json.dumps([fields, pairs], ensure_ascii=False)):
        return Record(number, problem="invalid UTF-8")
    if not isinstance(fields, dict):
        return Record(number, problem="malformed")
    return record_of_fields(number, fields, options)


def record_of_fields(number: int, fields: Any, options: Options) -> Record:
    """The text is a field, or with dots one of a field of a field."""
    for name in options.text_field.split("."):
        fields, outer = fields.get(name) if isinstance(fields, dict) else None, fields
    if fields is None:
        return Record(number, problem="missing text")
    if not isinstance(fields, str):
        return Record(number, problem="text is not a string")
    found = outer.get(options.id_field) if options.id_field else None
    return checked(number, fields.encode(), options, None if found is None else str(found))


def checked(number: int, text: bytes, options: Options, name: str | None = None) -> Record:
    if not text:
        return Record(number, problem="empty")
    if len(text) > options.max_document_bytes:
        return Record(number, problem="over max-document-bytes")
    try:
        return Record(number, text.decode(), id=name)
    except UnicodeDecodeError:
        return Record(number, problem="invalid UTF-8")


# ----------------------------------------------------------------------------------------- from records to documents


def tokens_of(text: str, options: Options) -> list[int]:
    """The whole document; special tokens that the text spells are text."""
    return [*([] if options.bos is None else [options.bos]), *options.encode(text), options.eos]


def split_of(text: str, options: Options) -> str:
    """A hash of the text decides."""
    if options.validation_fraction is None:
        return ""
    digest = hashlib.sha256(text.encode()).digest()
    is_validation = int.from_bytes(digest[16:24], "little") < Fraction(options.validation_fraction) * 2**64
    return "validation" if is_validation else "train"


def build(sources: Sequence[Files], options: Options, earlier: Iterable[str] | None = None) -> dict[str, Corpus]:
    """The corpora of a build, by the name of their split: "" without one.

    Args:
        sources: directories, or files alone, in their order.
        earlier: of an append, the texts of the generations before that duplicates are looked for in.
    """
    if not all(map(files_of, sources)):
        raise RefusedError("a directory that holds no input")
    paths = [(path, files[path]) for files in sources for path in files_of(files)]
    if options.dedup == "exact":  # all is read before the first document is written
        refuse_bad(paths, options)
    found = Build(options, set(earlier or ()))
    for path, content in paths:
        found.read(path, content)
    # of an append, a part of a split may be empty
    if not (all if earlier is None else any)(corpus.documents for corpus in found.corpora.values()):
        raise RefusedError("no document was written")
    return found.corpora


class Build:
    """A build under way."""

    def __init__(self, options: Options, seen: set[str]) -> None:
        self.options, self.seen = options, seen
        self.num_bad = self.num_documents = 0
        splits = [""] if options.validation_fraction is None else ["train", "validation"]
        self.corpora = {split: Corpus() for split in splits}

    def read(self, path: str, content: bytes) -> None:
        for corpus in self.corpora.values():
            corpus.sources.append(SourceRow(path))
        for record in records_of(path, content, self.options):
            if self.num_documents >= self.options.max_documents:
                break
            reason = left_out(record, self.seen, self.options)
            self.seen.add(record.text)
            if is_bad(reason):
                self.reject(reason, path, record)
            home = split_of(record.text, self.options)
            for split, corpus in self.corpora.items():
                corpus.sources[-1].count(reason if reason or split == home else f"in the {home} split")
            if not reason:
                corpus, tokens = self.corpora[home], tokens_of(record.text, self.options)
                corpus.documents.append(Document(tokens, len(corpus.sources) - 1, record.number, record.id))
                self.num_documents += 1

    def reject(self, reason: str, path: str, record: Record) -> None:
        self.num_bad += 1
        if self.options.on_bad_record == "fail" or self.num_bad > self.options.max_bad_records:
            raise RefusedError(reason, path, record.number)
        for corpus in self.corpora.values():
            corpus.rejects.append((path, record.number, reason))


def refuse_bad(paths: Sequence[tuple[str, bytes]], options: Options) -> None:
    for path, content in paths:
        for record in records_of(path, content, options):
            if is_bad(record.problem) and options.on_bad_record == "fail":
                raise RefusedError(record.problem, path, record.number)


def is_bad(reason: str) -> bool:
    return reason not in ("", "empty", "duplicate", "under min-tokens", "over max-tokens")


def left_out(record: Record, seen: set[str], options: Options) -> str:
    """The first reason that applies, or nothing."""
    if record.problem:
        return record.problem
    if options.dedup == "exact" and record.text in seen:
        return "duplicate"
    num_tokens = len(tokens_of(record.text, options))
    if num_tokens < options.min_tokens:
        return "under min-tokens"
    return "over max-tokens" if num_tokens > options.max_tokens else ""


def texts_of(sources: Sequence[Files], options: Options) -> set[str]:
    """The texts of a build, which an append compares with."""
    paths = [(path, files[path]) for files in sources for path in files_of(files)]
    return {record.text for path, content in paths for record in records_of(path, content, options) if record.text}
