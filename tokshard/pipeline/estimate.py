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

import msgspec
import numpy as np

from tokshard.errors import BadSourceError, CorpusError, UsageError
from tokshard.pipeline.adopt import plan
from tokshard.pipeline.build import save_tokenizer
from tokshard.pipeline.encode.documents import Made
from tokshard.pipeline.encode.maker import Maker
from tokshard.pipeline.executors.choice import cpu_count
from tokshard.pipeline.executors.worker import leaving_the_program_alone
from tokshard.pipeline.options import SKIP, BuildOptions
from tokshard.pipeline.request import Build
from tokshard.pipeline.resolve import resolve
from tokshard.pipeline.sources.division import Span, Whole
from tokshard.pipeline.sources.formats import read_stream
from tokshard.pipeline.sources.inputs import TEXT, Input, read_once_name
from tokshard.pipeline.sources.records import Chunk, LineChunk
from tokshard.pipeline.tasks.duplicates import bytes_per_text
from tokshard.pipeline.tasks.planning import Planned, StreamTask
from tokshard.pipeline.tasks.running import InputReader
from tokshard.pipeline.tasks.writing import Writer
from tokshard.pipeline.workspace.places import TOKENIZER, WRITE, open_workspace
from tokshard.pipeline.workspace.receipts import Receipt, TaskFailedError
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
    build, tokenizer = resolve(sources, options)
    if build.inputs.read_once:
        name = read_once_name(build.inputs.read_once[0])
        raise UsageError(
            f"a sample of {name} would be lost to the build, because it can be read once only",
            hint="write it to a file first, or leave out --dry-run",
        )
    tasks = plan(build)
    total = _Sums()
    sampled = _Sums()
    for num_bytes, sample, stands_for in _by_kind(build, tokenizer, tasks):
        sampled = sampled.plus(sample, 1.0)
        total = total.plus(stands_for, num_bytes / stands_for.input_bytes if stands_for.input_bytes else 0.0)
    is_limited = options.limit is not None and options.limit < total.documents
    if is_limited and options.limit is not None:
        total = _Sums().plus(total, options.limit / total.documents)
    hash_bytes = int(total.documents * bytes_per_text(len(tasks))) if options.is_dedup else 0
    num_workers = build.options.workers or cpu_count()
    parallel = num_workers if _streams(tasks) else max(1, min(num_workers, len(tasks)))
    return Estimate(
        directory=options.out,
        num_inputs=len(build.inputs),
        input_bytes=build.inputs.num_bytes,
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


def _by_kind(build: Build, tokenizer: bytes, tasks: Sequence[Planned]) -> Iterator[tuple[int, _Sums, _Sums]]:
    """For each format and compression: the bytes of its inputs, what was measured, and what the sample stands for."""
    inputs = build.inputs
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
        sampler = _Sampler(build, tokenizer, Path(directory))
        for kind, found in places.items():
            most = _SAMPLED_PLACES if kind[1] is None else _COMPRESSED_PLACES
            share = min(len(found), max(1, most * len(found) // sum(map(len, places.values()))))
            measured, read = _Sums(), _Sums()
            for number in range(share):
                index, span = found[number * len(found) // share]
                sample, stands_for = sampler.sample(inputs[index], span)
                measured, read = measured.plus(sample, 1.0), read.plus(stands_for, 1.0)
            yield num_bytes[kind], measured, read


def _streams(tasks: Sequence[object]) -> int:
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

    def __init__(self, build: Build, tokenizer: bytes, directory: Path) -> None:
        workspace = open_workspace(directory, attempt="sample")
        workspace.take_over()
        options = msgspec.structs.replace(build.options, on_bad_record=SKIP)
        build = msgspec.structs.replace(build, options=options, generation=0, workspace=workspace)
        save_tokenizer(build, tokenizer)
        self._build, self._reader = build, InputReader(build)
        self._maker = Maker(build.spec, build.config, build.tokenizer, workspace.store, TOKENIZER)
        self._writer = Writer(build, WRITE, self._maker)
        if build.config.reads == TEXT:
            self._maker.encode(["warm up: the first text builds caches"])

    def sample(self, input_: Input, span: Span) -> tuple[_Sums, _Sums]:
        """Measure the start of a span, or what can be read of a damaged one; returns that, and what it stands for.

        For the chunks that are passed over, documents are estimated by lines and all else by bytes.
        """
        input_bytes, done_bytes, bad, measuring = 0, 0, 0, 0.0
        measured, passed = np.zeros(2), np.zeros(2)  # bytes and lines
        wanted = _TEXT_BYTES_PER_PLACE if input_.compression is None else _TEXT_BYTES_PER_COMPRESSED_PLACE
        started = time.process_time()
        with self._writer.begin((input_.index, 0), [], None) as task:
            with contextlib.suppress(TaskFailedError, BadSourceError, CorpusError):  # the build itself will say so
                for number, chunk in enumerate(self._chunks(input_, span)):
                    input_bytes += chunk.input_bytes
                    if isinstance(chunk, LineChunk):
                        size = np.array([len(chunk.data), chunk.data.count(b"\n")])
                        if input_.compression and number >= _FIRST_CHUNKS and number % _EVERY_CHUNK:
                            passed += size
                            continue
                        measured += size
                    before = time.process_time()
                    made = self._writer.prepare(self._maker.parse(chunk), task)
                    bad += task.take(input_.index, made).bad
                    measuring += time.process_time() - before
                    sizes = made.documents.text_bytes
                    done_bytes += made.documents.tokens.nbytes if sizes is None else int(sizes.sum())
                    if done_bytes >= wanted:
                        break
            before = time.process_time()
            receipt = task.finish()
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

    def _chunks(self, input_: Input, span: Span) -> Iterator[Chunk | Made]:
        if isinstance(span, Whole) and input_.compression is not None:
            stream = read_stream(input_, self._build.spec, task_bytes=self._build.config.task_bytes)
            return (chunk for _, chunk in stream)
        return self._reader.chunks(input_.index, span)

    def _written(self, receipt: Receipt, bad: int) -> _Sums:
        """What a task wrote, which is removed."""
        counts = [counts for output in receipt.outputs for counts in output.sources]
        disk_bytes = 0
        for output in self._build.outputs:
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
