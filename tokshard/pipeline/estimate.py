"""``--dry-run``: what a build would amount to, from a sample of its documents. Writes nothing to the output."""

from __future__ import annotations

import contextlib
import dataclasses
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
from tokshard.interop.tokens.batches import TokenBatch
from tokshard.pipeline.executors.surroundings import leaving_the_program_alone
from tokshard.pipeline.options import BuildOptions
from tokshard.pipeline.resolve import ResolvedBuild, resolve
from tokshard.pipeline.sources.division import Span, Whole
from tokshard.pipeline.sources.formats import read_span, read_stream
from tokshard.pipeline.sources.inputs import Input, read_once_name
from tokshard.pipeline.sources.json_lines import JsonLinesParser
from tokshard.pipeline.sources.records import Chunk, LineChunk, utf8_sizes
from tokshard.pipeline.tasks.duplicates import bytes_per_text
from tokshard.pipeline.tasks.planning import StreamTask, Task
from tokshard.pipeline.tasks.writing import DocumentWriters
from tokshard.pipeline.workspace.places import TOKENIZER, open_workspace
from tokshard.pipeline.workspace.receipts import Receipt
from tokshard.store import is_uri

_SAMPLED_PLACES = 32
_TEXT_BYTES_PER_PLACE = 2 << 20
_COMPRESSED_PLACES = 4
_TEXT_BYTES_PER_COMPRESSED_PLACE = 16 << 20
"""Decompression reads ahead, so the first megabyte of text says little about the size of the whole."""
_FIRST_CHUNKS, _EVERY_CHUNK = 4, 16
"""The first chunks of compressed lines are all encoded, then every 16th: reading costs far less than encoding, and a
stream can only be read from its start, which may differ from its middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a build would amount to.

    Args:
        num_tasks, num_streams: units of work; streams are read from their start and count as one each.
        input_bytes: size of all inputs.
        sampled_documents, sampled_bad: records of the sample that would become documents, and bad ones.
        documents, tokens, text_bytes: of the corpus; duplicates are not known, and count.
        seconds: with `num_workers`, if as many cores are free as were for the sample.
        disk_bytes: what the build takes while it runs.
        hash_bytes: the part of it that is removed at the end.
        free_bytes: on the disk of the output directory; None if that is a URI.
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
    free_bytes: int | None
    is_limited: bool

    @property
    def fits(self) -> bool:
        """Whether the disk has room for it. A store always has."""
        return self.free_bytes is None or self.disk_bytes <= self.free_bytes


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
    hash_bytes = int(total.documents * bytes_per_text(len(tasks))) if options.dedup == "exact" else 0
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
        disk_bytes=int(total.disk_bytes) + hash_bytes,
        hash_bytes=hash_bytes,
        free_bytes=None if is_uri(options.out) else shutil.disk_usage(_existing(options.out)).free,
        is_limited=is_limited,
    )


@dataclass(frozen=True, slots=True)
class _Sums:
    input_bytes: float = 0.0
    documents: float = 0.0
    bad: float = 0.0
    tokens: float = 0.0
    text_bytes: float = 0.0
    disk_bytes: float = 0.0
    seconds: float = 0.0

    def plus(self, other: _Sums, factor: float) -> _Sums:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return _Sums(*(mine + factor * theirs for mine, theirs in pairs))


def _by_kind(request: ResolvedBuild, tasks: Sequence[Task | StreamTask]) -> Iterator[tuple[int, _Sums, _Sums]]:
    """For each format and compression: the bytes of its inputs, what was measured, and what the sample stands for."""
    inputs = request.found.inputs
    num_bytes: dict[tuple[str, str | None], int] = defaultdict(int)
    places: dict[tuple[str, str | None], list[tuple[int, Span]]] = defaultdict(list)
    for input_ in inputs:
        num_bytes[input_.format, input_.compression] += input_.num_bytes
    for task in tasks:
        parts = ((task.key[0], Whole()),) if isinstance(task, StreamTask) else task.parts
        for index, span in parts:
            input_ = inputs[index]
            places[input_.format, input_.compression].append((index, span))
    with tempfile.TemporaryDirectory(prefix="tokshard-") as directory:
        sampler = _Sampler(request, Path(directory))
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
    """Runs the start of a span as a task of the build, with a folder of its own to write to.

    Args:
        directory: empty; what is written there is counted and removed.
    """

    def __init__(self, request: ResolvedBuild, directory: Path) -> None:
        context = request.context
        workspace = open_workspace(directory, attempt="sample")
        workspace.take_over()
        workspace.store.put(TOKENIZER, request.read.clean)
        outputs = workspace.outputs(is_split=context.rules.validation_fraction is not None)
        self._context = dataclasses.replace(context, workspace=workspace, outputs=outputs, is_skipping=True)
        self._parse = JsonLinesParser(context.spec)
        self._writers = DocumentWriters(self._context)
        if context.spec.tokens is None:
            self._writers.encode(["warm up: the first text builds caches"])

    def sample(self, input_: Input, span: Span) -> tuple[_Sums, _Sums]:
        """Measure the start of a span, or what can be read of a damaged one; returns that, and what it stands for.

        For the chunks that are passed over, documents are estimated by lines and all else by bytes.
        """
        input_bytes, text_bytes, bad, measuring = 0, 0, 0, 0.0
        measured, passed = np.zeros(2), np.zeros(2)  # bytes and lines
        wanted = _TEXT_BYTES_PER_PLACE if input_.compression is None else _TEXT_BYTES_PER_COMPRESSED_PLACE
        started = time.process_time()
        with self._writers.begin((input_.index, 0), [input_.index], None) as task:
            with contextlib.suppress(BadSourceError):  # the build itself will say so
                for number, chunk in enumerate(self._chunks(input_, span)):
                    input_bytes += chunk.input_bytes
                    if isinstance(chunk, LineChunk):
                        size = np.array([len(chunk.data), chunk.data.count(b"\n")])
                        if input_.compression and number >= _FIRST_CHUNKS and number % _EVERY_CHUNK:
                            passed += size
                            continue
                        measured += size
                    before = time.process_time()
                    records = self._parse(chunk) if isinstance(chunk, LineChunk) else chunk
                    bad += task.take(input_.index, records).bad
                    measuring += time.process_time() - before
                    text_bytes += (
                        records.tokens.nbytes if isinstance(records, TokenBatch) else utf8_sizes(records.texts)
                    )
                    if text_bytes >= wanted:
                        break
            before = time.process_time()
            receipt = task.finish(previous=None, is_last=True)
            measuring += time.process_time() - before
        reading = time.process_time() - started - measuring
        sums = self._written(receipt, bad)
        by_bytes, by_lines = 1 + passed / np.maximum(measured, 1)
        scaled = _Sums().plus(dataclasses.replace(sums, seconds=measuring), by_bytes)
        return sums, dataclasses.replace(
            scaled,
            input_bytes=input_bytes,
            documents=sums.documents * by_lines,
            bad=sums.bad * by_lines,
            seconds=scaled.seconds + reading,
        )

    def _chunks(self, input_: Input, span: Span) -> Iterator[Chunk]:
        if isinstance(span, Whole) and input_.compression is not None:
            stream = read_stream(input_, self._context.spec, task_bytes=self._context.task_bytes)
            return (chunk for _, chunk in stream)
        return read_span(input_, span, self._context.spec)

    def _written(self, receipt: Receipt, bad: int) -> _Sums:
        """What a task wrote, which is removed."""
        counts = [counts for output in receipt.outputs for counts in output.sources]
        disk_bytes = 0
        for output in self._context.outputs:
            for path in Path(output.location).glob("*.arrow"):
                disk_bytes += path.stat().st_size
                path.unlink()
        return _Sums(
            documents=sum(count.documents for count in counts),
            bad=bad,
            tokens=sum(count.tokens for count in counts),
            text_bytes=sum(count.text_bytes for count in counts),
            disk_bytes=disk_bytes,
        )
