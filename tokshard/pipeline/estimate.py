"""What a build would come to, from a sample of its documents: ``--dry-run``. Writes nothing where the build would."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokshard.errors import BadSourceError, UsageError
from tokshard.format.schema import token_dtype
from tokshard.pipeline.encode.documents import Documents, within_limits
from tokshard.pipeline.encode.encoder import DocumentEncoder
from tokshard.pipeline.encode.tokenizer import Encoder
from tokshard.pipeline.executors.processes import leaving_the_program_alone
from tokshard.pipeline.options import BuildOptions
from tokshard.pipeline.resolve import ResolvedBuild, resolve
from tokshard.pipeline.sources.discover import Input, read_once_name
from tokshard.pipeline.sources.readers import read_span, read_stream
from tokshard.pipeline.sources.records import Chunk, JsonLinesParser, LineChunk, Records, positions_array, utf8_size
from tokshard.pipeline.tasks.planning import Span, StreamTask, Task, Whole

_SAMPLED_PLACES = 32
_TEXT_BYTES_PER_PLACE = 2 << 20
_COMPRESSED_PLACES = 4
_TEXT_BYTES_PER_COMPRESSED_PLACE = 16 << 20
"""Decompression reads ahead, so that the first megabyte of text says little about the size of the whole."""
_FIRST_CHUNKS, _EVERY_CHUNK = 4, 16
"""Of lines that are compressed, the first chunks are encoded and then one of so many: reading is far cheaper, and a
stream can only be read from its start, which may be of another kind than its middle."""

_OFFSET_BYTES = 8
_HASH_BYTES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a build would come to.

    Args:
        num_tasks, num_streams: units of work; streams are read from their start and count as one each.
        input_bytes: size of all inputs.
        sampled_documents, sampled_bad: records of the sample that would become documents, and that would not.
        documents, tokens, text_bytes: of the corpus; duplicates are not known, and count.
        seconds: with `num_workers`, if as many cores are free as now.
        disk_bytes: that the build needs, of which
        hash_bytes: go when it is done.
        free_bytes: on the disk of the output directory.
    """

    directory: str
    num_inputs: int
    input_bytes: int
    num_tasks: int
    num_streams: int
    sampled_documents: int
    sampled_bad: int
    documents: int
    tokens: int
    text_bytes: int
    cpu_seconds: float
    seconds: float
    num_workers: int
    disk_bytes: int
    hash_bytes: int
    free_bytes: int
    is_limited: bool

    @property
    def fits(self) -> bool:
        """Whether the disk has room for it."""
        return self.disk_bytes <= self.free_bytes


@leaving_the_program_alone()
def estimate_build(sources: Sequence[str], options: BuildOptions) -> Estimate:
    """Estimate a build. Costs seconds: about 64 MB of text are read and encoded.

    Inputs of one format and compression are taken to be alike. The sample is the same every time; the time is measured.

    Raises:
        TokshardError: as for the build itself.
    """
    request = resolve(sources, options)
    if request.found.inputs.read_once:
        name = read_once_name(request.found.inputs.read_once[0])
        raise UsageError(
            f"a sample of {name} would be lost to the build, because it can be read once only",
            hint="write it to a file first, or leave out --dry-run",
        )
    tasks = request.plan()
    total = _Sums()
    sampled = _Sums()
    for num_bytes, sample, stands_for in _by_kind(request, tasks):
        sampled = sampled.plus(sample, 1.0)
        total = total.plus(stands_for, num_bytes / stands_for.input_bytes if stands_for.input_bytes else 0.0)
    is_limited = options.limit is not None and options.limit < total.documents
    if is_limited and options.limit is not None:
        total = _Sums().plus(total, options.limit / total.documents)
    itemsize = np.dtype(token_dtype(request.read.info.vocab_size)).itemsize
    hash_bytes = int(total.documents * _HASH_BYTES) if options.dedup == "exact" else 0
    parallel = request.num_workers if _streams(tasks) else max(1, min(request.num_workers, len(tasks)))
    return Estimate(
        directory=options.out,
        num_inputs=len(request.found.inputs),
        input_bytes=request.total_bytes,
        num_tasks=len(tasks),
        num_streams=_streams(tasks),
        sampled_documents=int(sampled.documents),
        sampled_bad=int(sampled.bad),
        documents=round(total.documents),
        tokens=round(total.tokens),
        text_bytes=round(total.text_bytes),
        cpu_seconds=total.seconds,
        seconds=total.seconds / parallel,
        num_workers=parallel,
        disk_bytes=int(total.tokens * itemsize + total.documents * _OFFSET_BYTES + total.kept_bytes) + hash_bytes,
        hash_bytes=hash_bytes,
        free_bytes=shutil.disk_usage(_existing(options.out)).free,
        is_limited=is_limited,
    )


@dataclass(frozen=True, slots=True)
class _Sums:
    input_bytes: float = 0.0
    documents: float = 0.0
    bad: float = 0.0
    tokens: float = 0.0
    text_bytes: float = 0.0
    kept_bytes: float = 0.0
    seconds: float = 0.0

    def plus(self, other: _Sums, factor: float) -> _Sums:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return _Sums(*(mine + factor * theirs for mine, theirs in pairs))


def _by_kind(request: ResolvedBuild, tasks: Sequence[Task | StreamTask]) -> Iterator[tuple[int, _Sums, _Sums]]:
    """The bytes of the inputs of each format and compression, what was measured of them, and what that stands for."""
    inputs = request.found.inputs
    num_bytes: dict[tuple[str, str | None], int] = defaultdict(int)
    places: dict[tuple[str, str | None], list[tuple[int, Span]]] = defaultdict(list)
    for source in inputs:
        num_bytes[source.format, source.compression] += source.num_bytes
    for task in tasks:
        parts = ((task.key[0], Whole()),) if isinstance(task, StreamTask) else task.parts
        for index, span in parts:
            source = inputs[index]
            places[source.format, source.compression].append((index, span))
    with tempfile.TemporaryDirectory(prefix="tokshard-") as directory:
        clean = Path(directory) / "tokenizer.json"
        clean.write_bytes(request.read.clean)
        sampler = _Sampler(request, Encoder(clean))
        for kind, found in places.items():
            most = _SAMPLED_PLACES if kind[1] is None else _COMPRESSED_PLACES
            share = min(len(found), max(1, most * len(found) // sum(map(len, places.values()))))
            measured, read = _Sums(), _Sums()
            for number in range(share):
                index, span = found[number * len(found) // share]
                sample, stands_for = sampler.sample(inputs[index], span)
                measured, read = measured.plus(sample, 1.0), read.plus(stands_for, 1.0)
            yield num_bytes[kind], measured, read


def _streams(tasks: Sequence[Task | StreamTask]) -> int:
    return sum(isinstance(task, StreamTask) for task in tasks)


def _existing(path: str) -> str:
    """The path, or the nearest directory above it that exists."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


class _Sampler:
    """Does with the start of a span what a task does, but for writing."""

    def __init__(self, request: ResolvedBuild, encoder: Encoder) -> None:
        self._spec = request.context.spec
        self._task_bytes = request.context.task_bytes
        self._parse = JsonLinesParser(self._spec)
        self._encode = DocumentEncoder(encoder, request.read.info)
        self._rules = request.context.rules
        self._dtype = token_dtype(request.read.info.vocab_size)
        self._encode(["warm up: the first text builds caches"])

    def sample(self, source: Input, span: Span) -> tuple[_Sums, _Sums]:
        """The start of a span, of a damaged input what can be read: what was measured, and what that stands for.

        Where chunks are passed over, documents go by lines and all else by bytes.
        """
        sums, input_bytes, measuring = _Sums(), 0, 0.0
        measured, passed = np.zeros(2), np.zeros(2)  # bytes and lines
        wanted = _TEXT_BYTES_PER_PLACE if source.compression is None else _TEXT_BYTES_PER_COMPRESSED_PLACE
        started = time.process_time()
        with contextlib.suppress(BadSourceError):  # the build itself will say so
            for number, chunk in enumerate(self._chunks(source, span)):
                input_bytes += chunk.input_bytes
                if isinstance(chunk, LineChunk):
                    size = np.array([len(chunk.data), chunk.data.count(b"\n")])
                    if source.compression and number >= _FIRST_CHUNKS and number % _EVERY_CHUNK:
                        passed += size
                        continue
                    measured += size
                before = time.process_time()
                sums = sums.plus(self._measure(self._parse(chunk) if isinstance(chunk, LineChunk) else chunk), 1.0)
                measuring += time.process_time() - before
                if sums.text_bytes >= wanted:
                    break
        reading = time.process_time() - started - measuring
        by_bytes, by_lines = 1 + passed / np.maximum(measured, 1)
        scaled = _Sums().plus(dataclasses.replace(sums, seconds=measuring), by_bytes)
        return sums, dataclasses.replace(
            scaled,
            input_bytes=input_bytes,
            documents=sums.documents * by_lines,
            bad=sums.bad * by_lines,
            seconds=scaled.seconds + reading,
        )

    def _chunks(self, source: Input, span: Span) -> Iterator[Chunk]:
        if isinstance(span, Whole) and source.compression is not None:
            return (chunk for _, chunk in read_stream(source, self._spec, task_bytes=self._task_bytes))
        return read_span(source, span, self._spec)

    def _measure(self, records: Records) -> _Sums:
        encoded = self._encode(records.texts)
        documents = Documents(records.texts, positions_array(records), records.columns, encoded.tokens, encoded.ends)
        bad = len(records.bad) + len(encoded.with_special)
        if encoded.with_special:
            is_text = np.ones(len(records.texts), np.bool_)
            is_text[list(encoded.with_special)] = False
            kept = [text for text, keep in zip(records.texts, is_text, strict=True) if keep]
            documents = Documents(kept, documents.positions[is_text], {}, encoded.tokens, encoded.ends)
        documents, _ = within_limits(documents, self._rules)
        hashlib.sha256(documents.tokens.astype(self._dtype).data)  # a shard is hashed while it is written
        kept_bytes = sum(
            len(value) if isinstance(value, str) else _OFFSET_BYTES
            for values in documents.columns.values()
            for value in values
        )
        return _Sums(
            input_bytes=records.input_bytes,
            documents=len(documents),
            bad=bad,
            tokens=len(documents.tokens),
            text_bytes=sum(map(utf8_size, documents.texts)),
            kept_bytes=kept_bytes,
        )
